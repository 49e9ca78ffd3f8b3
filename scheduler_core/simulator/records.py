"""Finished requests as records and as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler_core.engine.plan import Finished
from scheduler_core.prediction.predictions import Prediction
from scheduler_core.simulator.tables import Columns
from scheduler_core.simulator.trace import TraceRequest

BoolArray = NDArray[np.bool_]

SCHEMA = "tailcast.simulated_requests/6"
#: Latencies that are summarized in every result.
LATENCIES = (
    "ttft_s", "ttlt_s", "normalized_latency_s", "tpot_s", "queueing_delay_s", "queueing_delay_per_token_s",
)  # fmt: skip
#: Fields that a record copies from its row in the trace.
_OF_TRACE = (
    "arrival_s", "prompt_tokens", "max_tokens", "tier", "tenant", "category", "ttft_slo_s", "tbt_slo_s", "ttlt_slo_s",
    "session_id", "turn",
)  # fmt: skip
_trace_values = attrgetter(*_OF_TRACE)


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """A finished request, read-only. Times are seconds on the simulated clock; other fields are those of `TraceRequest`.

    Not frozen, because frozen classes are several times slower to construct, and there may be millions of records.

    Attributes:
        first_scheduled_s: Time when it first left the waiting queue.
        finish_s: Time of its last token.
        finish_reason: "stop", or "length" if max_tokens was reached.
        predicted_mu: Predicted location of ln length; None without a prediction, like its scale and degrees of freedom.
        predicted_probability: Predicted probability of an output of at most this length.
        max_tbt_s: Longest gap between two of its tokens; None if it had only one, or gaps were not measured.
            It depends on `exact_steps` by rounding, so it is not compared.
        replica_id: Replica that finished it; None without a router.
    """

    request_id: str
    arrival_s: float
    first_scheduled_s: float
    first_token_s: float
    finish_s: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    finish_reason: str
    num_preemptions: int
    predicted_mu: float | None = None
    predicted_sigma: float | None = None
    predicted_nu: float | None = None
    predicted_probability: float | None = None
    tier: int = 2
    tenant: str = ""
    category: str = ""
    ttft_slo_s: float | None = None
    tbt_slo_s: float | None = None
    ttlt_slo_s: float | None = None
    session_id: str | None = None
    turn: int = 0
    max_tbt_s: float | None = field(default=None, compare=False)
    replica_id: str | None = None

    @classmethod
    def of(
        cls,
        item: Finished,
        row: TraceRequest,
        prediction: Prediction | None,
        finish_s: float,
        replica_id: str | None = None,
    ) -> RequestRecord:
        """The record of a request that has just finished; `row` has its actual arrival."""
        length = None if prediction is None else prediction.length
        return cls(
            request_id=item.request_id,
            first_scheduled_s=item.first_scheduled_s,
            first_token_s=item.first_token_s,
            finish_s=finish_s,
            output_tokens=item.output_tokens,
            finish_reason=item.reason,
            num_preemptions=item.num_preemptions,
            predicted_mu=None if length is None else length.mu,
            predicted_sigma=None if length is None else length.sigma,
            predicted_nu=None if length is None else length.nu,
            predicted_probability=None if length is None else length.cdf(item.output_tokens),
            replica_id=replica_id,
            **dict(zip(_OF_TRACE, _trace_values(row), strict=True)),
        )

    @property
    def queueing_delay_s(self) -> float:
        """Time from arrival to admission."""
        return self.first_scheduled_s - self.arrival_s

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.first_token_s - self.arrival_s

    @property
    def ttlt_s(self) -> float:
        """Time to last token, also called end-to-end latency."""
        return self.finish_s - self.arrival_s

    @property
    def normalized_latency_s(self) -> float:
        """End-to-end latency per output token."""
        return self.ttlt_s / self.output_tokens

    @property
    def queueing_delay_per_token_s(self) -> float:
        """Time from arrival to admission per output token."""
        return self.queueing_delay_s / self.output_tokens

    @property
    def tpot_s(self) -> float | None:
        """Mean gap between output tokens; None if there was only one token."""
        gaps = self.output_tokens - 1
        return (self.finish_s - self.first_token_s) / gaps if gaps else None


def request_columns(records: Sequence[RequestRecord], seed: int = 0) -> Columns:
    """Columns [n] of requests: the seed, all fields of `RequestRecord` (NaN instead of None), and `LATENCIES`."""
    types: dict[str, Any] = {"int": np.int64, "float": np.float64, "str": object}
    columns: Columns = {"seed": np.full(len(records), seed, np.int64)}
    for item in fields(RequestRecord):
        dtype = types[str(item.type).removesuffix(" | None")]
        columns[item.name] = np.array([*map(attrgetter(item.name), records)], dtype)
    for name in LATENCIES:
        columns[name] = np.array([*map(attrgetter(name), records)], np.float64)
    return columns


def has_slo(columns: Columns) -> BoolArray:
    """Mask [n] of requests with at least one target."""
    targets = [columns[name] for name in ("ttft_slo_s", "tbt_slo_s", "ttlt_slo_s")]
    return np.asarray(np.isfinite(targets).any(axis=0))


def meets_slo(columns: Columns) -> BoolArray:
    """Mask [n] of requests that met all their targets; uses the mean gap if the longest was not measured."""
    gap_s = np.where(np.isnan(columns["max_tbt_s"]), columns["tpot_s"], columns["max_tbt_s"])
    pairs = ((columns["ttft_s"], "ttft_slo_s"), (gap_s, "tbt_slo_s"), (columns["ttlt_s"], "ttlt_slo_s"))
    # Comparisons with NaN (no target) are false.
    return np.asarray(~np.any([values > columns[target] for values, target in pairs], axis=0))
