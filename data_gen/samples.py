"""The sample schema `samples/1`: one row per sampled answer, and how its Parquet files are read and written.

| column | type | meaning |
|---|---|---|
| prompt_id | string | identifier of the prompt; (prompt_id, model, sample_index) is unique |
| prompt | string | the user's text |
| category | string | kind of prompt, may be empty |
| model | string | the served model that answered |
| temperature, top_p | double | sampling settings |
| seed | int64 | seed of the run |
| sample_index | int32 | 0-based index of the answer among the prompt's repeats |
| max_tokens | int32 | cap on the answer, in the model's tokens |
| prompt_tokens | int32 | prompt length with the chat template, in the model's tokens |
| output_tokens | int32 | answer length, end marker included; 0 only when finish_reason is "error" |
| finish_reason | string | "stop", "length" (right-censored at output_tokens) or "error" |
| engine, engine_version | string | what generated it |
| run_id | string | identifier of the run that wrote the row |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from data_gen.tables import read_parquet, require_columns
from scheduler_core.errors import InputError
from scheduler_core.files import atomic_file

SCHEMA_NAME = "samples/1"
FINISH_REASONS = ("stop", "length", "error")
SCHEMA = pa.schema(
    [
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("prompt", pa.string(), nullable=False),
        pa.field("category", pa.string(), nullable=False),
        pa.field("model", pa.string(), nullable=False),
        pa.field("temperature", pa.float64(), nullable=False),
        pa.field("top_p", pa.float64(), nullable=False),
        pa.field("seed", pa.int64(), nullable=False),
        pa.field("sample_index", pa.int32(), nullable=False),
        pa.field("max_tokens", pa.int32(), nullable=False),
        pa.field("prompt_tokens", pa.int32(), nullable=False),
        pa.field("output_tokens", pa.int32(), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("engine", pa.string(), nullable=False),
        pa.field("engine_version", pa.string(), nullable=False),
        pa.field("run_id", pa.string(), nullable=False),
    ],
    metadata={b"tailcast.schema": SCHEMA_NAME.encode()},
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One sampled answer; fields as in the table above."""

    prompt_id: str
    prompt: str
    category: str
    model: str
    temperature: float
    top_p: float
    seed: int
    sample_index: int
    max_tokens: int
    prompt_tokens: int
    output_tokens: int
    finish_reason: str
    engine: str
    engine_version: str
    run_id: str


def to_table(samples: Sequence[Sample]) -> pa.Table:
    """Samples as an Arrow table with the documented schema."""
    return pa.Table.from_pylist([asdict(sample) for sample in samples], schema=SCHEMA)


def write_samples(path: str | Path, table: pa.Table) -> None:
    """Writes a table of samples as Parquet (zstd), atomically and synced to disk."""
    with atomic_file(path) as temporary:
        pq.write_table(table.cast(SCHEMA), temporary, compression="zstd")


def read_samples(path: str | Path) -> pa.Table:
    """Reads a `samples/1` file.

    Raises:
        InputError: If the file is missing, empty, truncated or lacks a column.
    """
    table = read_parquet(path, "samples")
    require_columns(table, SCHEMA.names, f"{Path(path).name}: columns")
    return table.select(SCHEMA.names).cast(SCHEMA)


def join_samples(paths: Sequence[str | Path]) -> pa.Table:
    """All rows of several sample files, in order.

    Raises:
        InputError: If two rows share (prompt_id, model, sample_index): the same answer must not count twice.
    """
    tables = [read_samples(path) for path in paths]
    table = pa.concat_tables(tables)
    keys = list(
        zip(*(table.column(name).to_pylist() for name in ("prompt_id", "model", "sample_index")), strict=True)
    )
    if len(set(keys)) < len(keys):
        seen: set[tuple[str, str, int]] = set()
        repeated = next(key for key in keys if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise InputError("samples", repeated, "each (prompt_id, model, sample_index) once over all files")
    return table
