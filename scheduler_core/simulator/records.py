"""Finished requests: as records, as columns, and as a table in a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler_core.plan import Finished
from scheduler_core.predictions import LengthPrediction, Prediction
from scheduler_core.simulator.tables import Columns, read_columns, write_columns
from scheduler_core.simulator.trace import TraceRequest

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

SCHEMA = "tailcast.simulated_requests/4"
#: The latencies that every result summarizes.
LATENCIES = (
    "ttft_s",
    "ttlt_s",
    "normalized_latency_s",
    "tpot_s",
    "queueing_delay_s",
    "normalized_waiting_s",
)
#: What a comparison by request reads.
COMPARED = ("seed", "request_id", "arrival_s", "prompt_tokens", "output_tokens", "tier", "tenant", *LATENCIES)


class Latencies:
    """Latencies of one finished request, or of columns of them, in seconds."""

    __slots__ = ()
    arrival_s: Any
    first_scheduled_s: Any
    first_token_s: Any
    finish_s: Any
    output_tokens: Any

    @property
    def queueing_delay_s(self) -> Any:
        """From arrival to admission."""
        return self.first_scheduled_s - self.arrival_s

    @property
    def ttft_s(self) -> Any:
        """Time to first token."""
        return self.first_token_s - self.arrival_s

    @property
    def ttlt_s(self) -> Any:
        """Time to last token, also called end-to-end latency."""
        return self.finish_s - self.arrival_s

    @property
    def normalized_latency_s(self) -> Any:
        """End-to-end latency per output token."""
        return self.ttlt_s / self.output_tokens

    @property
    def normalized_waiting_s(self) -> Any:
        """Queueing delay per output token (Semantic Scheduling, section 4)."""
        return self.queueing_delay_s / self.output_tokens


@dataclass(slots=True, kw_only=True)
class RequestRecord(Latencies):
    """A finished request, to be read only. Times are seconds on the simulated clock.

    Not frozen, as that would take several times as long to make, and there may be millions.

    Attributes:
        first_scheduled_s: When it first left the waiting queue.
        finish_s: When its last token was generated.
        finish_reason: "stop", or "length" if max_tokens was reached.
        predicted_mu: Predicted location of ln length; None without a prediction, as its scale and degrees of freedom.
        ttft_slo_s: Target for ttft_s; None: none. tbt_slo_s is one for the longest gap between two tokens.
        session_id: Conversation that it was a turn of; None: none.
        max_tbt_s: Longest gap between two of its tokens; None: it had only one, or gaps were not measured. Steps taken at
            once and one by one give the same but for rounding, so it is not compared.
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
        prediction: Prediction | LengthPrediction | None,
        finish_s: float,
        replica_id: str | None = None,
    ) -> RequestRecord:
        """The record of a request that has just finished; `row` has its real arrival."""
        length = prediction.length if isinstance(prediction, Prediction) else prediction
        return cls(
            request_id=item.request_id,
            arrival_s=row.arrival_s,
            first_scheduled_s=item.first_scheduled_s,
            first_token_s=item.first_token_s,
            finish_s=finish_s,
            prompt_tokens=row.prompt_tokens,
            output_tokens=item.output_tokens,
            max_tokens=row.max_tokens,
            finish_reason=item.reason,
            num_preemptions=item.num_preemptions,
            predicted_mu=None if length is None else length.mu,
            predicted_sigma=None if length is None else length.sigma,
            predicted_nu=None if length is None else length.nu,
            tier=row.tier,
            tenant=row.tenant,
            category=row.category,
            ttft_slo_s=row.ttft_slo_s,
            tbt_slo_s=row.tbt_slo_s,
            ttlt_slo_s=row.ttlt_slo_s,
            session_id=row.session_id,
            turn=row.turn,
            replica_id=replica_id,
        )

    @property
    def tpot_s(self) -> float | None:
        """Mean gap between output tokens; None if there was only one token."""
        gaps = self.output_tokens - 1
        return (self.finish_s - self.first_token_s) / gaps if gaps else None


@dataclass(frozen=True, eq=False)
class RequestColumns(Latencies):
    """Columns [n] of `RequestRecord`, in the order of the records; NaN where a record has None."""

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
        types: dict[str, Any] = {
            "tier": np.int64,
            "tenant": object,
            "category": object,
            "finish_reason": object,
        }
        columns = {
            item.name: np.array([*map(attrgetter(item.name), records)], types.get(item.name, np.float64))
            for item in fields(cls)
        }
        return cls(**columns)

    def __len__(self) -> int:
        return len(self.arrival_s)

    def where(self, rows: BoolArray) -> RequestColumns:
        """The rows [n] for which `rows` is true."""
        return RequestColumns(**{item.name: getattr(self, item.name)[rows] for item in fields(self)})

    @cached_property
    def tpot_s(self) -> FloatArray:
        """Mean gap between output tokens; NaN if there was only one token."""
        gaps = np.where(self.output_tokens > 1, self.output_tokens - 1, np.nan)
        return (self.finish_s - self.first_token_s) / gaps

    @cached_property
    def has_slo(self) -> BoolArray:
        """Requests with a target of any kind."""
        targets = np.stack([self.ttft_slo_s, self.tbt_slo_s, self.ttlt_slo_s])
        return np.asarray(np.isfinite(targets).any(axis=0))

    @cached_property
    def meets_slo(self) -> BoolArray:
        """Requests that met all targets they have. Without a measured longest gap the mean gap stands for it."""
        gap_s = np.where(np.isnan(self.max_tbt_s), self.tpot_s, self.max_tbt_s)
        missed = self.ttft_s > self.ttft_slo_s  # a comparison with NaN is false
        return np.asarray(~(missed | (gap_s > self.tbt_slo_s) | (self.ttlt_s > self.ttlt_slo_s)))

    def groups(self, name: str, max_groups: int) -> dict[str, BoolArray]:
        """By value of the column, as text and in order: the rows [n] with it; empty with one value or over `max_groups`."""
        column = getattr(self, name).tolist()
        values = sorted(set(column))
        if not 1 < len(values) <= max_groups:
            return {}
        # A dictionary numbers the values: sorting a million texts takes seconds.
        numbers = {value: number for number, value in enumerate(values)}
        codes = np.array([numbers[value] for value in column], np.int64)
        return {str(value): np.asarray(codes == number) for value, number in numbers.items()}


def request_columns(records: Sequence[RequestRecord], seed: int) -> Columns:
    """Columns [n] of the table of requests: the seed, all fields of `RequestRecord`, and its latencies."""
    types: dict[str, Any] = {"int": np.int64, "float": np.float64, "str": object}
    columns: Columns = {"seed": np.full(len(records), seed, np.int64)}
    for item in fields(RequestRecord):
        dtype = types[str(item.type).removesuffix(" | None")]
        columns[item.name] = np.array([*map(attrgetter(item.name), records)], dtype)
    latencies = RequestColumns.of(records)
    return columns | {name: getattr(latencies, name) for name in LATENCIES}


def write_requests(parts: Sequence[Columns], path: str | Path) -> None:
    """Writes the tables of one or several seeds as one, as Parquet, CSV or JSON lines by the name's ending."""
    write_columns(parts, path, SCHEMA, "requests")


def read_requests(path: str | Path, field: str) -> Columns:
    """Reads the columns `COMPARED` of a Parquet table of requests; see `read_columns` for errors."""
    return read_columns(path, COMPARED, SCHEMA, field)
