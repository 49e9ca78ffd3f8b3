"""Public serving traces: when a request came and how long its prompt and answer were.

| kind | columns of the source | time |
|---|---|---|
| azure | TIMESTAMP, ContextTokens, GeneratedTokens (2023 and 2024) | date and time, with or without zone |
| burstgpt | Timestamp, Model, Request tokens, Response tokens, Log Type, from 2.0 on Session ID | seconds |
| mooncake | timestamp, input_length, output_length (hash_ids are not kept) | milliseconds |
| vidur | num_prefill_tokens, num_decode_tokens, arrived_at if there | seconds |
| apex | prompt_tokens, output_tokens, workload, tokenizer (recorded as the model) | seconds |
| lengths | prompt_tokens, output_tokens, and any other column of `trace/1` | seconds |

Every kind also reads a file that has the columns of `lengths`. None of the public ones says what cap a request had, nor
whether an answer was cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from data_gen.importers.batch import MAX_TIME_S, TYPES, Batch, finite_numbers, whole_numbers
from data_gen.importers.tabular import Part, column_names, parts
from scheduler_core.errors import InputError

TimeUnit = Literal["s", "ms", "datetime"]
_UNIT_S = {"s": 1.0, "ms": 1e-3}


@dataclass(frozen=True, slots=True)
class TraceLayout:
    """Where the canonical columns are in a source: `required` ones must be there, `optional` ones may."""

    required: Mapping[str, str]
    optional: Mapping[str, str] = field(default_factory=dict)
    time: TimeUnit = "s"


COMMON = TraceLayout(
    {"output_tokens": "output_tokens"},
    {
        "arrival_s": "arrival_s",
        "prompt_tokens": "prompt_tokens",
        "request_id": "request_id",
        "max_tokens": "max_tokens",
        "tier": "tier",
        "tenant": "tenant",
        "prompt_id": "prompt_id",
        "prompt": "prompt",
        "model": "model",
        "category": "category",
    },
)

LAYOUTS: Mapping[str, TraceLayout] = {
    "azure": TraceLayout(
        {"arrival_s": "TIMESTAMP", "prompt_tokens": "ContextTokens", "output_tokens": "GeneratedTokens"},
        time="datetime",
    ),
    "burstgpt": TraceLayout(
        {"arrival_s": "Timestamp", "prompt_tokens": "Request tokens", "output_tokens": "Response tokens"},
        {"model": "Model", "category": "Log Type", "tenant": "Session ID"},
    ),
    "mooncake": TraceLayout(
        {"arrival_s": "timestamp", "prompt_tokens": "input_length", "output_tokens": "output_length"},
        time="ms",
    ),
    "vidur": TraceLayout(
        {"prompt_tokens": "num_prefill_tokens", "output_tokens": "num_decode_tokens"},
        {"arrival_s": "arrived_at"},
    ),
    "apex": TraceLayout(
        {"prompt_tokens": "prompt_tokens", "output_tokens": "output_tokens", "category": "workload"},
        {"arrival_s": "arrival_s", "model": "tokenizer"},
    ),
    "lengths": COMMON,
}


def layout_in(path: str | Path, kind: str) -> TraceLayout:
    """The layout of a file of this kind: its own, or the common one.

    Raises:
        InputError: It has the columns of neither.
    """
    names = set(column_names(path))
    for layout in (LAYOUTS[kind], COMMON):
        if names.issuperset(layout.required.values()):
            return layout
    raise InputError(
        f"{Path(path).name}: columns",
        sorted(names),
        ", ".join(LAYOUTS[kind].required.values()) + f" of kind {kind}",
    )


def trace_batches(path: str | Path, kind: str) -> Iterator[Batch]:
    """Batches of a trace; arrivals count from the earliest, which a first pass over that column finds.

    Raises:
        InputError: Names row, column and value that cannot be used.
    """
    layout = layout_in(path, kind)
    names = set(column_names(path))
    used = dict(layout.required) | {
        name: source for name, source in layout.optional.items() if source in names
    }
    file = Path(path).name
    start = _earliest(path, used["arrival_s"], layout.time) if "arrival_s" in used else None
    for part in parts(path, list(used.values())):
        yield Batch(
            {name: _column(part, name, source, layout.time, start, file) for name, source in used.items()},
            part.rows,
        )


def _column(
    part: Part, name: str, source: str, time: TimeUnit, start: float | int | None, file: str
) -> pa.Array:
    column = part.columns[source]
    if name == "arrival_s":
        return _since(_times(column, part.rows, source, time, file), start, time)
    if pa.types.is_integer(TYPES[name]):
        return whole_numbers(column, part.rows, source, file)
    return column


def _times(column: pa.Array, rows: NDArray[np.int64], name: str, unit: TimeUnit, file: str) -> pa.Array:
    """Times of a column: seconds as they are, or nanoseconds since 1970 of dates."""
    if unit != "datetime":
        return finite_numbers(column, rows, name, file, MAX_TIME_S / _UNIT_S[unit])
    if pa.types.is_timestamp(column.type):
        return column.cast(pa.timestamp("ns", tz=column.type.tz)).cast(pa.int64())
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        raise InputError(f"{file} column {name}", str(column.type), "dates and times")
    zoned = pc.match_substring_regex(column, r"(Z|[+-]\d\d:?\d\d)\s*$")
    kind = pa.timestamp("ns", tz="UTC") if pc.any(zoned).as_py() else pa.timestamp("ns")
    try:
        return column.cast(kind).cast(pa.int64())
    except pa.ArrowException:
        for number, value in zip(rows, column, strict=True):
            try:
                pa.array([value.as_py()]).cast(kind)
            except pa.ArrowException as error:
                raise InputError(
                    f"{file} row {number} column {name}",
                    value.as_py(),
                    "a date and time as in the rows before",
                ) from error
        raise


def _since(times: pa.Array, start: float | int | None, unit: TimeUnit) -> pa.Array:
    if start is None:
        return pa.nulls(len(times), pa.float64())
    if unit == "datetime":
        # Whole nanoseconds are subtracted, so that nothing is lost of the seventh digit of a second.
        return pc.divide(pc.subtract(times, pa.scalar(start, pa.int64())).cast(pa.float64()), 1e9)
    return pc.multiply(pc.subtract(times, pa.scalar(start, pa.float64())), _UNIT_S[unit])


def _earliest(path: str | Path, source: str, unit: TimeUnit) -> float | int | None:
    found = [
        pc.min(_times(part.columns[source], part.rows, source, unit, Path(path).name)).as_py()
        for part in parts(path, [source])
    ]
    return min((time for time in found if time is not None), default=None)
