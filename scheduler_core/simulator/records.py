"""One row per simulated request."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from scheduler_core.errors import InputError, MissingExtraError
from scheduler_core.files import atomic_file, writable_target

TABLE_SUFFIXES = (".parquet", ".csv", ".jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """What became of a finished request. Times are seconds on the simulated clock; durations end in _s too.

    Attributes:
        request_id: Id in the trace.
        arrival_s: When it arrived.
        first_scheduled_s: When it first left the waiting queue.
        first_token_s: When its first token was there.
        finish_s: When its last token was there.
        prompt_tokens: Length of the prompt.
        output_tokens: Tokens generated.
        max_tokens: Its own cap.
        finish_reason: "stop", or "length" if the cap was reached.
        num_preemptions: How often it lost its cache.
        predicted_mu: Predicted location of ln length; None without a prediction.
        predicted_sigma: Predicted scale; None without a prediction.
        predicted_nu: Degrees of freedom of the prediction; None without a prediction.
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

    @property
    def queueing_delay_s(self) -> float:
        """From arrival to admission."""
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
    def per_token_latency_s(self) -> float:
        """End-to-end latency per output token."""
        return self.ttlt_s / self.output_tokens

    @property
    def tpot_s(self) -> float | None:
        """Mean gap between output tokens; None if there was only one token."""
        if self.output_tokens == 1:
            return None
        return (self.finish_s - self.first_token_s) / (self.output_tokens - 1)


#: The latencies every result summarises.
LATENCIES = ("ttft_s", "ttlt_s", "per_token_latency_s", "tpot_s", "queueing_delay_s")


def record_row(record: RequestRecord) -> dict[str, Any]:
    """All fields and latencies by name."""
    row = {item.name: getattr(record, item.name) for item in fields(record)}
    row.update({name: getattr(record, name) for name in LATENCIES})
    return row


def check_table_path(path: str | Path) -> Path:
    """The path of a table that can be written; `InputError` otherwise."""
    target = Path(path)
    if target.suffix not in TABLE_SUFFIXES:
        raise InputError("requests", str(path), "a name that ends in " + ", ".join(TABLE_SUFFIXES))
    return writable_target(target, "requests")


def write_table(records: Sequence[RequestRecord], path: str | Path) -> None:
    """Writes one row per record as Parquet, CSV or JSON lines, by the name's ending, atomically."""
    target = check_table_path(path)
    rows = [record_row(record) for record in records]
    with atomic_file(target) as temporary:
        if target.suffix == ".parquet":
            _write_parquet(rows, temporary)
            return
        with open(temporary, "w", encoding="utf-8", newline="") as stream:
            if target.suffix == ".jsonl":
                stream.writelines(json.dumps(row, allow_nan=False) + "\n" for row in rows)
            else:
                writer = csv.DictWriter(stream, fieldnames=list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)


def _write_parquet(rows: list[dict[str, Any]], path: Path) -> None:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingExtraError("pyarrow", "sim") from error
    kinds = {"str": pa.string(), "int": pa.int64(), "float": pa.float64(), "float | None": pa.float64()}
    schema = pa.schema(
        [(item.name, kinds[str(item.type)]) for item in fields(RequestRecord)]
        + [(name, pa.float64()) for name in LATENCIES],
        metadata={"tailcast.schema": "simulated_requests/1"},
    )
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path, compression="zstd")
