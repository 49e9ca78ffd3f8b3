"""The trace schema `trace/1`: requests with their lengths and arrivals, for the simulator.

| column | type | meaning |
|---|---|---|
| request_id | string | unique in the trace |
| arrival_s | double or null | seconds from the first request; null if the source has no arrivals |
| prompt_tokens | int32 or null | length of the prompt; null if unknown |
| output_tokens | int32 | length of the output, at least 1 |
| max_tokens | int32 or null | maximum number of output tokens; null if unknown |
| tier | int32 or null | urgency, 0 is the most urgent |
| tenant | string or null | sender: a user, a session, an application |
| prompt_id | string or null | identifier of the prompt |
| prompt | string or null | the user's text |
| model | string or null | served model |
| category | string or null | kind of request |

The simulator (`scheduler_core.simulator.trace.load_trace`) reads all but model, and needs the first five known:
arrival_s may be null only where it draws arrivals itself. The tokens' unit is in the file's metadata under
`tailcast.tokens`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data_gen.tables import convertible, read_parquet, require_columns
from scheduler_core.errors import InputError
from scheduler_core.files import atomic_file

TRACE_SCHEMA_NAME = "trace/1"
TRACE_SCHEMA = pa.schema(
    [
        pa.field("request_id", pa.string(), nullable=False),
        pa.field("arrival_s", pa.float64()),
        pa.field("prompt_tokens", pa.int32()),
        pa.field("output_tokens", pa.int32(), nullable=False),
        pa.field("max_tokens", pa.int32()),
        pa.field("tier", pa.int32()),
        pa.field("tenant", pa.string()),
        pa.field("prompt_id", pa.string()),
        pa.field("prompt", pa.string()),
        pa.field("model", pa.string()),
        pa.field("category", pa.string()),
    ],
    metadata={b"tailcast.schema": TRACE_SCHEMA_NAME.encode()},
)


@dataclass(frozen=True, slots=True)
class PoissonArrivals:
    """Arrivals with independent exponential gaps; `rate_rps` requests per second on average."""

    rate_rps: float
    seed: int

    def __post_init__(self) -> None:
        if not (np.isfinite(self.rate_rps) and self.rate_rps > 0):
            raise InputError("rate_rps", self.rate_rps, "a finite number above 0")

    def times(self, count: int) -> np.ndarray:
        """Arrival times in seconds, increasing, the first at 0; shape [count]."""
        rng = np.random.Generator(np.random.PCG64(self.seed))
        gaps = rng.exponential(1 / self.rate_rps, count)
        gaps[:1] = 0.0
        return np.cumsum(gaps)


def trace_of(
    samples: pa.Table, arrivals: PoissonArrivals, prompt_ids: Collection[str] | None = None
) -> pa.Table:
    """One request per sampled output, in random order.

    An output that was truncated at max_tokens is a request that really ends there, so its length is exact.

    Args:
        samples: Table of a samples schema.
        arrivals: When the requests come; its seed also shuffles their order.
        prompt_ids: Only outputs of these prompts; None takes all.

    Returns:
        Table of the schema `trace/1`.

    Raises:
        InputError: If no output remains.
    """
    mask = pc.not_equal(samples.column("finish_reason"), "error")
    if prompt_ids is not None:
        ids = pa.array(list(prompt_ids), samples.schema.field("prompt_id").type)
        mask = pc.and_(mask, pc.is_in(samples.column("prompt_id"), ids))
    rows = samples.filter(mask)
    if not rows.num_rows:
        raise InputError("samples", samples.num_rows, "at least one finished output of the chosen prompts")
    rng = np.random.Generator(np.random.PCG64(arrivals.seed + 1))
    rows = rows.take(pa.array(rng.permutation(rows.num_rows)))
    index = rows.column("sample_index").cast(pa.string())
    columns = {
        "request_id": pc.binary_join_element_wise(rows.column("prompt_id"), index, "-"),
        "arrival_s": pa.array(arrivals.times(rows.num_rows)),
    }
    same = ("prompt_tokens", "output_tokens", "max_tokens", "prompt", "prompt_id", "model", "category")
    columns |= {name: rows.column(name) for name in same if name in rows.column_names}
    return as_trace(columns, rows.num_rows)


def as_trace(columns: dict[str, pa.Array], num_rows: int) -> pa.Table:
    """A table of the schema `trace/1` from some of its columns; the others are null."""
    arrays = [
        columns[field.name].cast(field.type) if field.name in columns else pa.nulls(num_rows, field.type)
        for field in TRACE_SCHEMA
    ]
    return pa.table(arrays, schema=TRACE_SCHEMA)


def read_trace(path: str | Path) -> pa.Table:
    """Reads a `trace/1` file.

    Raises:
        InputError: If the file is missing, no Parquet file, or lacks a column.
    """
    table = read_parquet(path, "trace")
    require_columns(table, TRACE_SCHEMA.names, f"{Path(path).name}: columns")
    metadata = {**(table.schema.metadata or {}), **(TRACE_SCHEMA.metadata or {})}
    with convertible(Path(path).name):
        return table.select(TRACE_SCHEMA.names).cast(TRACE_SCHEMA).replace_schema_metadata(metadata)


def write_trace(path: str | Path, trace: pa.Table) -> None:
    """Writes a trace as Parquet (zstd), atomically."""
    with atomic_file(path) as temporary:
        pq.write_table(trace, temporary, compression="zstd")
