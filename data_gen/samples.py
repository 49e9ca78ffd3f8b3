"""The schemas `samples/2` (one row per sample) and `trace/1` (requests for the simulator), and files of samples."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from data_gen.prompts import Prompt
from scheduler_core.errors import InputError
from scheduler_core.shell.files import atomic_file
from scheduler_core.shell.table_files import open_parquet, readable, require_columns

SCHEMA_NAME = "samples/2"
MESSAGES = pa.list_(pa.struct([pa.field("role", pa.string()), pa.field("content", pa.string())]))
SCHEMA = pa.schema(
    [
        # (prompt_id, model, sample_index) is unique. Null: unknown, as in imported data sets.
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("prompt", pa.string()),  # the last user message; null if only hashed
        pa.field("prompt_sha256", pa.string()),  # see `prompt_sha256`
        pa.field("messages", MESSAGES),  # the whole conversation; null if one user message, or only hashed
        pa.field("category", pa.string(), nullable=False),  # kind of prompt; may be empty
        pa.field("dataset", pa.string(), nullable=False),  # public data set of the prompt; may be empty
        pa.field("model", pa.string(), nullable=False),  # the served model
        pa.field("temperature", pa.float64()),
        pa.field("top_p", pa.float64()),
        pa.field("seed", pa.int64()),  # of the run
        pa.field("sample_index", pa.int32(), nullable=False),  # index among the samples of the prompt, from 0
        pa.field("max_tokens", pa.int32()),  # maximum number of output tokens
        pa.field("prompt_tokens", pa.int32()),  # with the chat template, in the model's tokens
        pa.field("output_tokens", pa.int32(), nullable=False),  # including EOS; 0 only for errors
        # "stop", "length" (right-censored at output_tokens), "error", or "unknown" (imported samples only).
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("error", pa.string()),  # reason for a missing output, "KIND: reason"; null without an error
        pa.field("queue_s", pa.float64()),  # seconds that the request waited before the engine accepted it
        pa.field("ttft_s", pa.float64()),  # seconds from sending the request to its first token
        pa.field("total_s", pa.float64()),  # seconds from sending the request to its last token
        pa.field("text", pa.string()),  # the output; null unless texts are stored
        pa.field("engine", pa.string(), nullable=False),  # "synthetic": no language model
        pa.field("engine_version", pa.string(), nullable=False),
        pa.field("run_id", pa.string(), nullable=False),  # the run that wrote the row
    ],
    metadata={"tailcast.schema": SCHEMA_NAME},
)
# Null: unknown. The simulator (`scheduler_core.simulator.trace.load_trace`) needs values in the first five columns;
# arrival_s may be null if arrivals are drawn. The unit of tokens is in the file's metadata under `tailcast.tokens`.
TRACE_SCHEMA = pa.schema(
    [
        pa.field("request_id", pa.string(), nullable=False),  # unique in the trace
        pa.field("arrival_s", pa.float64()),  # seconds since the first request
        pa.field("prompt_tokens", pa.int32()),
        pa.field("output_tokens", pa.int32(), nullable=False),  # at least 1
        pa.field("max_tokens", pa.int32()),
        pa.field("tier", pa.int32()),  # urgency, 0 is the most urgent
        pa.field("tenant", pa.string()),  # sender: a user, a session, an application
        pa.field("prompt_id", pa.string()),
        pa.field("prompt", pa.string()),  # the user's text
        pa.field("model", pa.string()),
        pa.field("category", pa.string()),  # kind of request
        pa.field("session_id", pa.string()),  # conversation of which it is a turn
        pa.field("turn", pa.int32()),  # number of the turn in its conversation, from 0
        # Seconds between the end of the previous turn and this request; null: the request arrives at arrival_s.
        pa.field("think_time_s", pa.float64()),
        pa.field("prefix_tokens", pa.int32()),  # leading prompt tokens in the cache after the previous turn
        pa.field("ended_by", pa.string()),  # how the output ended: tool_use, end_turn
        # Ids of the prompt's blocks, equal for equal prefixes (Mooncake).
        pa.field("hash_ids", pa.list_(pa.int64())),
        pa.field("ttft_s", pa.float64()),  # measured by the source, as is total_s; see samples/2
        pa.field("total_s", pa.float64()),
    ],
    metadata={"tailcast.schema": "trace/1"},
)


def prompt_sha256(prompt: Prompt) -> str:
    """Hex SHA-256 of a prompt's UTF-8 text, or of a conversation as JSON.

    The JSON of a conversation is `[[role, content], ...]` as written by Python's json with `ensure_ascii=False`.
    """
    sent = prompt.text
    if prompt.messages:
        sent = json.dumps([[message.role, message.text] for message in prompt.messages], ensure_ascii=False)
    return hashlib.sha256(sent.encode(errors="surrogatepass")).hexdigest()


def write_samples(path: str | Path, table: pa.Table) -> None:
    """Writes a table of samples as Parquet (zstd), atomically, and syncs it to disk."""
    with atomic_file(path) as temporary:
        pq.write_table(table.select(SCHEMA.names).cast(SCHEMA), temporary, compression="zstd")


def read_samples(path: str | Path, columns: Sequence[str] = tuple(SCHEMA.names)) -> pa.Table:
    """Reads all or selected columns of a `samples/2` file; InputError if it is missing, empty or truncated, has another
    schema, or lacks a column."""
    location = Path(path).name
    with open_parquet(path, "samples") as file, readable(path, "samples", "Parquet"):
        require_columns(file.schema_arrow.empty_table(), SCHEMA.names, f"{location}: columns")
        table = file.read(list(columns))
    try:
        return table.cast(pa.schema([SCHEMA.field(name) for name in columns], metadata=SCHEMA.metadata))
    except (pa.ArrowException, ValueError) as error:
        raise InputError(f"{location}: columns", str(error), "columns of the documented types") from error
