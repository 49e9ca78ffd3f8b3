"""Finished requests as columns, for whatever looks at many of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler_core.simulator.records import RequestRecord

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class RequestColumns:
    """Columns [n] of `RequestRecord`, in the order of the records; NaN where a record has None.

    Attributes:
        arrival_s: See `RequestRecord`, as for all that follow.
        first_scheduled_s: Seconds.
        first_token_s: Seconds.
        finish_s: Seconds.
        output_tokens: Tokens generated.
        max_tbt_s: Seconds; NaN: one token, or not measured.
        ttft_slo_s: Seconds; NaN: no target.
        tbt_slo_s: Seconds; NaN: no target.
        ttlt_slo_s: Seconds; NaN: no target.
        predicted_mu: NaN: no prediction.
        predicted_sigma: NaN: no prediction.
        predicted_nu: NaN: no prediction.
        tier: Whole numbers.
        tenant: Text.
        category: Text.
        finish_reason: "stop" or "length".
    """

    arrival_s: FloatArray
    first_scheduled_s: FloatArray
    first_token_s: FloatArray
    finish_s: FloatArray
    output_tokens: FloatArray
    max_tbt_s: FloatArray
    ttft_slo_s: FloatArray
    tbt_slo_s: FloatArray
    ttlt_slo_s: FloatArray
    predicted_mu: FloatArray
    predicted_sigma: FloatArray
    predicted_nu: FloatArray
    tier: NDArray[np.int64]
    tenant: NDArray[np.object_]
    category: NDArray[np.object_]
    finish_reason: NDArray[np.object_]

    @classmethod
    def of(cls, records: Sequence[RequestRecord]) -> RequestColumns:
        """The columns of these records."""
        kinds: dict[str, Any] = {"tier": np.int64} | dict.fromkeys(
            ("tenant", "category", "finish_reason"), object
        )
        values = {
            item.name: np.array([*map(attrgetter(item.name), records)], kinds.get(item.name, np.float64))
            for item in fields(cls)
        }
        return cls(**values)

    def __len__(self) -> int:
        return len(self.arrival_s)

    def where(self, chosen: BoolArray) -> RequestColumns:
        """The rows [n] that are chosen."""
        return RequestColumns(**{item.name: getattr(self, item.name)[chosen] for item in fields(self)})

    @cached_property
    def queueing_delay_s(self) -> FloatArray:
        """From arrival to admission."""
        return self.first_scheduled_s - self.arrival_s

    @cached_property
    def ttft_s(self) -> FloatArray:
        """Time to first token."""
        return self.first_token_s - self.arrival_s

    @cached_property
    def ttlt_s(self) -> FloatArray:
        """Time to last token."""
        return self.finish_s - self.arrival_s

    @cached_property
    def per_token_latency_s(self) -> FloatArray:
        """End-to-end latency per output token."""
        return self.ttlt_s / self.output_tokens

    @cached_property
    def tpot_s(self) -> FloatArray:
        """Mean gap between output tokens; NaN if there was only one token."""
        gaps = np.where(self.output_tokens > 1, self.output_tokens - 1, np.nan)
        return (self.finish_s - self.first_token_s) / gaps

    @cached_property
    def normalized_waiting_s(self) -> FloatArray:
        """Queueing delay per output token (Semantic Scheduling, section 4)."""
        return self.queueing_delay_s / self.output_tokens

    @cached_property
    def has_slo(self) -> BoolArray:
        """They have a target of any kind."""
        return np.asarray(
            np.isfinite(self.ttft_slo_s) | np.isfinite(self.tbt_slo_s) | np.isfinite(self.ttlt_slo_s)
        )

    @cached_property
    def meets_slo(self) -> BoolArray:
        """They met all the targets they have. Without a measured longest gap the mean gap stands for it."""
        gap_s = np.where(np.isnan(self.max_tbt_s), self.tpot_s, self.max_tbt_s)
        missed = self.ttft_s > self.ttft_slo_s  # a comparison with NaN is false
        return np.asarray(~(missed | (gap_s > self.tbt_slo_s) | (self.ttlt_s > self.ttlt_slo_s)))

    def groups(self, name: str, most: int) -> dict[str, BoolArray]:
        """By value of the column, as text and in order: which rows [n] have it; empty with one value, or over `most`."""
        column = getattr(self, name).tolist()
        values = sorted(set(column))
        if not 1 < len(values) <= most:
            return {}
        # A dictionary numbers the values: sorting a million texts takes seconds.
        ids = {value: place for place, value in enumerate(values)}
        places = np.array([ids[value] for value in column], np.int64)
        return {str(value): np.asarray(places == place) for place, value in enumerate(values)}
