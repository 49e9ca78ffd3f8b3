"""The trace schema `trace/1`: requests with their lengths and arrivals, for the simulator; and what can be done to one.

| column | type | meaning |
|---|---|---|
| request_id | string | unique in the trace |
| arrival_s | double or null | seconds from the first request; null if the source has no arrivals |
| prompt_tokens | int32 or null | length of the prompt; null if unknown |
| output_tokens | int32 | length of the answer, at least 1 |
| max_tokens | int32 or null | the request's own cap; null if unknown |
| tier | int32 or null | urgency, 0 is the most urgent |
| tenant | string or null | who sent it: a user, a session, an application |
| prompt_id | string or null | which prompt it is |
| prompt | string or null | the user's text |
| model | string or null | who answered |
| category | string or null | kind of request |

The simulator (`scheduler_core.simulator.trace_file.load_trace`) reads all but model, and needs the first five known:
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
    """One request per sampled answer, in random order.

    An answer that was cut at max_tokens is a request that really ends there, so its length is exact.

    Args:
        samples: Table of a samples schema.
        arrivals: When the requests come; its seed also shuffles their order.
        prompt_ids: Only answers to these prompts; None takes all.

    Returns:
        Table of the schema `trace/1`.

    Raises:
        InputError: If no answer is left.
    """
    kept = pc.not_equal(samples.column("finish_reason"), "error")
    if prompt_ids is not None:
        wanted = pa.array(list(prompt_ids), samples.schema.field("prompt_id").type)
        kept = pc.and_(kept, pc.is_in(samples.column("prompt_id"), wanted))
    rows = samples.filter(kept)
    if not rows.num_rows:
        raise InputError("samples", samples.num_rows, "at least one finished answer to the chosen prompts")
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


def arrivals_of(trace: pa.Table) -> np.ndarray:
    """Arrival times in seconds; shape [rows].

    Raises:
        InputError: A row has none.
    """
    column = trace.column("arrival_s")
    row = pc.index(column.is_null(), True).as_py()
    if row >= 0:
        raise InputError(f"trace row {row + 1} column arrival_s", None, "arrival times in all rows")
    return np.asarray(column.to_numpy(), dtype=np.float64)


def retimed(trace: pa.Table, times: np.ndarray) -> pa.Table:
    """The same requests at other times, in the order of arrival."""
    order = np.argsort(times, kind="stable")
    position = trace.column_names.index("arrival_s")
    table = trace.set_column(position, "arrival_s", pa.array(times, pa.float64()))
    return table if (np.diff(order) == 1).all() else table.take(pa.array(order))


def at_rate(trace: pa.Table, rate_rps: float) -> pa.Table:
    """Real arrivals, faster or slower: all gaps times one factor, so that bursts stay bursts.

    Args:
        trace: Requests with arrivals, at least two different ones.
        rate_rps: Requests per second on average, from the first arrival to the last.

    Raises:
        InputError: There is no rate to scale, or it is no finite number above 0.
    """
    if not (np.isfinite(rate_rps) and rate_rps > 0):
        raise InputError("rate_rps", rate_rps, "a finite number above 0")
    times = arrivals_of(trace)
    span = float(np.ptp(times)) if len(times) else 0.0
    if span <= 0:
        raise InputError("trace", f"{len(times)} arrivals over {span} s", "arrivals at two times at least")
    return retimed(trace, (times - times.min()) * ((len(times) - 1) / rate_rps / span))


def thinned(trace: pa.Table, share: float, seed: int) -> pa.Table:
    """A random part of the requests at their own times: less load with the same hours of day.

    Args:
        trace: Requests.
        share: Probability of each request to stay, above 0 and at most 1.
        seed: Seed of the choice.
    """
    if not 0 < share <= 1:
        raise InputError("share", share, "a number above 0, at most 1")
    rng = np.random.Generator(np.random.PCG64(seed))
    return trace.filter(pa.array(rng.random(trace.num_rows) < share))


def between(trace: pa.Table, start_s: float, end_s: float) -> pa.Table:
    """The requests that arrive from `start_s` until before `end_s`; times count from `start_s`.

    Raises:
        InputError: The times are not in order, or nothing arrives between them.
    """
    if not start_s < end_s:
        raise InputError("end_s", end_s, f"a time after start_s = {start_s}")
    times = arrivals_of(trace)
    inside = (times >= start_s) & (times < end_s)
    if not inside.any():
        raise InputError(
            "start_s", start_s, f"a part of the trace, which lasts {times.max():.3f} s, with arrivals"
        )
    return retimed(trace.filter(pa.array(inside)), times[inside] - start_s)


def repeated(trace: pa.Table, num_requests: int, seed: int) -> pa.Table:
    """The trace over and over until it has `num_requests` requests.

    Each further round has the arrival pattern of the first, and its requests in another random order, so that a long
    answer does not come at the same point each time. A round begins one mean gap after the last arrival of the one
    before. Ids get `~1`, `~2` and so on from the second round.

    Args:
        trace: Requests with arrivals.
        num_requests: How many to return; fewer than the trace has takes its beginning.
        seed: Seed of the orders.
    """
    if num_requests < 1:
        raise InputError("num_requests", num_requests, "a whole number of at least 1")
    times = np.sort(arrivals_of(trace))
    trace = retimed(trace, arrivals_of(trace))
    period = float(times[-1] - times[0]) * (1 + 1 / max(1, len(times) - 1))
    rng = np.random.Generator(np.random.PCG64(seed))
    rounds = [trace]
    while sum(table.num_rows for table in rounds) < num_requests:
        number = len(rounds)
        table = trace.take(pa.array(rng.permutation(trace.num_rows)))
        ids = pc.binary_join_element_wise(table.column("request_id"), pa.scalar(f"~{number}"), "")
        table = table.set_column(table.column_names.index("request_id"), "request_id", ids)
        rounds.append(retimed(table, times + number * period))
    return pa.concat_tables([table.select(trace.column_names).cast(trace.schema) for table in rounds]).slice(
        0, num_requests
    )
