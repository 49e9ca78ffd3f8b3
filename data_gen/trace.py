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
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from scheduler_core.errors import InputError
from scheduler_core.files import atomic_file
from scheduler_core.simulator.workloads.arrivals import Arrivals

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


def trace_of(
    samples: pa.Table, arrivals: Arrivals, seed: int, prompt_ids: Collection[str] | None = None
) -> pa.Table:
    """One request per sampled output, in random order.

    An output that was truncated at max_tokens is a request that really ends there, so its length is exact.

    Args:
        samples: Table of a samples schema.
        arrivals: When the requests come.
        seed: Of the arrivals and the order.
        prompt_ids: Only outputs of these prompts; None takes all.

    Returns:
        Table of the schema `trace/1`.

    Raises:
        InputError: If no output remains.
    """
    mask = pc.not_equal(samples.column("finish_reason"), "error")
    if prompt_ids is not None:
        mask = pc.and_(mask, pc.is_in(samples.column("prompt_id"), pa.array(list(prompt_ids), pa.string())))
    rows = samples.filter(mask)
    if not rows.num_rows:
        raise InputError("samples", samples.num_rows, "at least one finished output of the chosen prompts")
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
