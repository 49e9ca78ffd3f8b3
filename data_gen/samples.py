"""The sample schema `samples/2`: one row per sample, and how its Parquet files are read and written.

| column | type | meaning |
|---|---|---|
| prompt_id | string | identifier of the prompt; (prompt_id, model, sample_index) is unique |
| prompt | string or null | the user's text, of a conversation its last user message; null location only its hash is kept |
| prompt_sha256 | string or null | hex SHA-256 of what was sent (`prompt_sha256`); null if the text was never known |
| messages | list of (role, content) or null | the whole conversation; null if it is one user message, or only hashed |
| category | string | kind of prompt, may be empty |
| dataset | string | public set the prompt comes from, may be empty |
| model | string | the served model |
| temperature, top_p | double or null | sampling settings; null if unknown (imported sets) |
| seed | int64 or null | seed of the run; null if unknown |
| sample_index | int32 | 0-based index of the sample among the prompt's repeats |
| max_tokens | int32 or null | maximum number of output tokens, in the model's tokens; null if unknown |
| prompt_tokens | int32 or null | prompt length with the chat template, in the model's tokens; null if unknown |
| output_tokens | int32 | output length, end marker included; 0 only when finish_reason is "error" |
| finish_reason | string | "stop", "length" (right-censored at output_tokens), "error", or "unknown" (imported sets without it; a run never writes it) |
| error | string or null | why there is no output, "KIND: reason"; null unless finish_reason is "error" |
| queue_s | double or null | seconds the request waited before the engine took it; null if unknown |
| ttft_s | double or null | seconds from sending the request to its first token; null if unknown |
| total_s | double or null | seconds from sending the request to its last token; null if unknown |
| text | string or null | the output; null unless it is kept |
| engine, engine_version | string | the engine; engine "synthetic" is no language model |
| run_id | string | identifier of the run that wrote the row |

`samples/1` had no prompt_sha256, messages, dataset, error, timings and text, and no nulls; such files stay readable and
are given the missing columns.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from data_gen.prompts import Prompt
from data_gen.tables import open_parquet, readable, require_columns
from scheduler_core.errors import InputError
from scheduler_core.files import atomic_file

SCHEMA_NAME = "samples/2"
SCHEMA_KEY = b"tailcast.schema"
FINISH_REASONS = ("stop", "length", "error", "unknown")
MESSAGES = pa.list_(pa.struct([pa.field("role", pa.string()), pa.field("content", pa.string())]))
SCHEMA = pa.schema(
    [
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("prompt", pa.string()),
        pa.field("prompt_sha256", pa.string()),
        pa.field("messages", MESSAGES),
        pa.field("category", pa.string(), nullable=False),
        pa.field("dataset", pa.string(), nullable=False),
        pa.field("model", pa.string(), nullable=False),
        pa.field("temperature", pa.float64()),
        pa.field("top_p", pa.float64()),
        pa.field("seed", pa.int64()),
        pa.field("sample_index", pa.int32(), nullable=False),
        pa.field("max_tokens", pa.int32()),
        pa.field("prompt_tokens", pa.int32()),
        pa.field("output_tokens", pa.int32(), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("error", pa.string()),
        pa.field("queue_s", pa.float64()),
        pa.field("ttft_s", pa.float64()),
        pa.field("total_s", pa.float64()),
        pa.field("text", pa.string()),
        pa.field("engine", pa.string(), nullable=False),
        pa.field("engine_version", pa.string(), nullable=False),
        pa.field("run_id", pa.string(), nullable=False),
    ],
    metadata={SCHEMA_KEY: SCHEMA_NAME.encode()},
)
_ADDED_IN_2 = frozenset(
    {"prompt_sha256", "messages", "dataset", "error", "queue_s", "ttft_s", "total_s", "text"}
)
SCHEMA_1_NAMES = [name for name in SCHEMA.names if name not in _ADDED_IN_2]
BATCH_ROWS = 1 << 15


def prompt_sha256(prompt: Prompt) -> str:
    """Hex SHA-256 of what a prompt sends.

    Of the UTF-8 text, or of a conversation's JSON `[[role, content], ...]` as Python's json writes it with
    `ensure_ascii=False`.
    """
    return _sha256_of(prompt.text, [[message.role, message.content] for message in prompt.messages])


def _sha256_of(text: str, messages: Sequence[Sequence[str]] = ()) -> str:
    sent = json.dumps(messages, ensure_ascii=False) if messages else text
    return hashlib.sha256(sent.encode(errors="surrogatepass")).hexdigest()


def write_samples(path: str | Path, table: pa.Table) -> None:
    """Writes a table of samples as Parquet (zstd), atomically and synced to disk."""
    with atomic_file(path) as temporary:
        pq.write_table(table.select(SCHEMA.names).cast(SCHEMA), temporary, compression="zstd")


def read_samples(path: str | Path) -> pa.Table:
    """Reads a whole `samples/2` or `samples/1` file as `samples/2`.

    Raises:
        InputError: If the file is missing, empty, truncated, of another schema, or lacks a column.
    """
    return pa.Table.from_batches(
        [batch for table in iter_samples(path) for batch in table.to_batches()], schema=SCHEMA
    )


def iter_samples(path: str | Path, *, batch_rows: int = BATCH_ROWS) -> Iterator[pa.Table]:
    """The rows of a `samples/2` or `samples/1` file as `samples/2`, at most `batch_rows` at a time.

    Raises:
        InputError: As `read_samples`; a bad column only when its rows are reached.
    """
    file = open_parquet(path, "samples")
    location = Path(path).name
    columns = _columns_of(file.schema_arrow, location)
    # Both schemas hold their rows in order, so batches of whole columns stay small.
    with file, readable(path, "samples", "Parquet"):
        for batch in file.iter_batches(batch_size=batch_rows, columns=columns):
            yield _upgraded(pa.Table.from_batches([batch]), columns, location)


def _columns_of(schema: pa.Schema, location: str) -> list[str]:
    """The columns to read: those of the file's schema, by its label or by its columns."""
    label = (schema.metadata or {}).get(SCHEMA_KEY, b"").decode()
    if label not in ("", "samples/1", SCHEMA_NAME):
        raise InputError(f"{location}: schema", label, f"{SCHEMA_NAME} or samples/1")
    first = label == "samples/1" or (not label and "prompt_sha256" not in schema.names)
    columns = SCHEMA_1_NAMES if first else SCHEMA.names
    require_columns(schema.empty_table(), columns, f"{location}: columns")
    return columns


def _upgraded(table: pa.Table, names: list[str], location: str) -> pa.Table:
    table = table.select(names)
    if names is SCHEMA_1_NAMES:
        hashes = {text: _sha256_of(text) for text in set(table.column("prompt").to_pylist())}
        digests = [hashes[text] for text in table.column("prompt").to_pylist()]
        table = table.append_column("prompt_sha256", pa.array(digests, pa.string()))
        table = table.append_column("dataset", pa.array([""] * table.num_rows, pa.string()))
        for name in sorted(_ADDED_IN_2 - {"prompt_sha256", "dataset"}):
            table = table.append_column(name, pa.nulls(table.num_rows, SCHEMA.field(name).type))
    try:
        return table.select(SCHEMA.names).cast(SCHEMA)
    except (pa.ArrowException, ValueError) as error:
        raise InputError(f"{location}: columns", str(error), "columns of the documented types") from error


def join_samples(paths: Sequence[str | Path]) -> pa.Table:
    """All rows of several sample files, in order.

    Raises:
        InputError: If two rows share (prompt_id, model, sample_index): the same sample must not count twice.
    """
    tables = [read_samples(path) for path in paths]
    table = pa.concat_tables(tables)
    keys = list(
        zip(*(table.column(name).to_pylist() for name in ("prompt_id", "model", "sample_index")), strict=True)
    )
    if len(set(keys)) < len(keys):
        [(repeated, _)] = Counter(keys).most_common(1)
        raise InputError("samples", repeated, "each (prompt_id, model, sample_index) once over all files")
    return table
