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
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from data_gen.prompts import Prompt
from scheduler_core.errors import InputError
from scheduler_core.files import atomic_file
from scheduler_core.table_files import open_parquet, readable, require_columns

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


def prompt_sha256(prompt: Prompt) -> str:
    """Hex SHA-256 of what a prompt sends.

    Of the UTF-8 text, or of a conversation's JSON `[[role, content], ...]` as Python's json writes it with
    `ensure_ascii=False`.
    """
    sent = prompt.text
    if prompt.messages:
        sent = json.dumps(
            [[message.role, message.content] for message in prompt.messages], ensure_ascii=False
        )
    return hashlib.sha256(sent.encode(errors="surrogatepass")).hexdigest()


def write_samples(path: str | Path, table: pa.Table) -> None:
    """Writes a table of samples as Parquet (zstd), atomically and synced to disk."""
    with atomic_file(path) as temporary:
        pq.write_table(table.select(SCHEMA.names).cast(SCHEMA), temporary, compression="zstd")


def read_samples(path: str | Path, columns: Sequence[str] = tuple(SCHEMA.names)) -> pa.Table:
    """Reads a `samples/2` file, all columns or some.

    Raises:
        InputError: The file is missing, empty, truncated, of another schema, or lacks a column.
    """
    location = Path(path).name
    with open_parquet(path, "samples") as file, readable(path, "samples", "Parquet"):
        require_columns(file.schema_arrow.empty_table(), SCHEMA.names, f"{location}: columns")
        table = file.read(list(columns))
    try:
        return table.cast(pa.schema([SCHEMA.field(name) for name in columns], metadata=SCHEMA.metadata))
    except (pa.ArrowException, ValueError) as error:
        raise InputError(f"{location}: columns", str(error), "columns of the documented types") from error
