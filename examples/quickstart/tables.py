"""Tables of the quickstart: concatenated sample files, and a trace of sampled outputs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data_gen.samples import TRACE_SCHEMA, read_samples
from scheduler_core.errors import InputError
from scheduler_core.shell.files import atomic_file
from scheduler_core.simulator.workloads.arrivals import Arrivals


def join_samples(paths: Sequence[str | Path]) -> pa.Table:
    """All rows of several sample files, in order.

    Raises:
        InputError: Two rows have the same (prompt_id, model, sample_index).
    """
    table = pa.concat_tables([read_samples(path) for path in paths])
    keys = table.group_by(["prompt_id", "model", "sample_index"]).aggregate([([], "count_all")])
    for repeated in keys.filter(pc.greater(keys.column("count_all"), 1)).slice(0, 1).to_pylist():
        raise InputError("samples", repeated, "each (prompt_id, model, sample_index) once over all files")
    return table


def trace_of(
    samples: pa.Table, arrivals: Arrivals, seed: int, prompt_ids: Collection[str] | None = None
) -> pa.Table:
    """Creates a trace with one request per sampled output, in random order.

    A request truncated at max_tokens ends there in the simulation too, so its length is exact.

    Args:
        samples: Table of schema `samples/2`.
        arrivals: Arrival process of the requests.
        seed: Seed of the arrivals and of the order.
        prompt_ids: Use only outputs of these prompts; None: all.

    Returns:
        Table of schema `trace/1`.

    Raises:
        InputError: No output remains.
    """
    mask = pc.not_equal(samples.column("finish_reason"), "error")
    if prompt_ids is not None:
        mask = pc.and_(mask, pc.is_in(samples.column("prompt_id"), pa.array(list(prompt_ids), pa.string())))
    rows = samples.filter(mask)
    if not rows.num_rows:
        raise InputError("samples", samples.num_rows, "at least one finished output of the selected prompts")
    rows = rows.take(pa.array(np.random.Generator(np.random.PCG64(seed + 1)).permutation(rows.num_rows)))
    times = arrivals.times(rows.num_rows, np.random.Generator(np.random.PCG64(seed)))
    ids = pc.binary_join_element_wise(
        rows.column("prompt_id"), rows.column("sample_index").cast(pa.string()), "-"
    )
    rows = rows.append_column("request_id", ids).append_column("arrival_s", pa.array(times))
    arrays = [
        rows.column(field.name) if field.name in rows.column_names else pa.nulls(rows.num_rows, field.type)
        for field in TRACE_SCHEMA
    ]
    return pa.table(arrays, schema=TRACE_SCHEMA)


def write_trace(path: str | Path, trace: pa.Table) -> None:
    """Writes a trace as Parquet (zstd), atomically."""
    with atomic_file(path) as temporary:
        pq.write_table(trace, temporary, compression="zstd")
