"""Public serving traces: arrivals and lengths of prompts and outputs.

| kind | columns of the source | time |
|---|---|---|
| azure | TIMESTAMP, ContextTokens, GeneratedTokens (2023 and 2024) | date and time, with or without zone |
| burstgpt | Timestamp, Model, Request tokens, Response tokens, Log Type, from 2.0 on Session ID | seconds |
| mooncake | timestamp, input_length, output_length (hash_ids are not kept) | milliseconds |

None of them has max_tokens of a request or a finish reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from data_gen.importers.logs import LogRow, RowValues, mapped_row, since_first
from data_gen.importers.rows import ImportedRows, in_batches
from data_gen.sources.rows import file_rows

#: Kind -> canonical column -> column of the source.
COLUMNS: Mapping[str, Mapping[str, str]] = {
    "azure": {"arrival_s": "TIMESTAMP", "prompt_tokens": "ContextTokens", "output_tokens": "GeneratedTokens"},
    "burstgpt": {
        "arrival_s": "Timestamp",
        "prompt_tokens": "Request tokens",
        "output_tokens": "Response tokens",
        "model": "Model",
        "category": "Log Type",
        "tenant": "Session ID",
    },
    "mooncake": {"arrival_s": "timestamp", "prompt_tokens": "input_length", "output_tokens": "output_length"},
}
_OPTIONAL = ("model", "category", "tenant")


def trace_rows(path: str | Path, kind: str) -> Iterator[ImportedRows]:
    """Batches of a trace; arrivals count from the earliest, which a first pass finds.

    Raises:
        InputError: Names row, column and value that cannot be used.
    """
    yield from in_batches(since_first(lambda: _rows(Path(path), kind)))


def _rows(path: Path, kind: str) -> Iterator[LogRow]:
    for number, raw in file_rows(path, "file"):
        mapping = {
            name: source for name, source in COLUMNS[kind].items() if name not in _OPTIONAL or source in raw
        }
        row = mapped_row(RowValues(raw, f"{path.name} row {number}"), mapping)
        if kind == "mooncake" and row["arrival_s"] is not None:
            row["arrival_s"] /= 1000
        yield number, row
