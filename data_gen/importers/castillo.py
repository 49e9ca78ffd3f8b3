"""CASTILLO: ten output lengths for each prompt and model, as `preproc_DATASET_SPLIT_MODEL.json` or as Parquet.

Lengths are in the model's own tokens; an output at or past 15,000 tokens was truncated there (some files count one
token more).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_gen.importers.logs import RowValues
from data_gen.importers.rows import LENGTH, MAX_TOKENS, STOP, ImportedRows, in_batches
from data_gen.sources.rows import file_rows, file_suffix
from scheduler_core.errors import InputError

MAX_OUTPUT_TOKENS = 15_000
#: Our column -> the original files' column.
_ORIGINAL = {
    "prompt": "prompt_text",
    "prompt_tokens": "input_size",
    "temperature": "temp",
    "output_tokens": "output_sizes",
}


def castillo_rows(path: str | Path) -> Iterator[ImportedRows]:
    """Batches of one row for each length.

    Raises:
        InputError: Names row, column and value that cannot be used.
    """
    yield from in_batches(_rows(Path(path)))


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    names = _ORIGINAL if file_suffix(path) == ".json" else {}
    for number, raw in file_rows(path, "file"):
        location = f"{path.name} row {number}"
        row = RowValues(raw, location)
        common = {
            "prompt_id": row.text("prompt_id"),
            "prompt": row.text(names.get("prompt", "prompt")),
            "category": row.text("category", required=False) or "",
            "dataset": row.text("dataset"),
            "model": (row.text("model") or "").replace("--", "/", 1),
            "temperature": row.number(names.get("temperature", "temperature")),
            "top_p": row.number("top_p"),
            "max_tokens": MAX_OUTPUT_TOKENS,
            "prompt_tokens": row.integer(names.get("prompt_tokens", "prompt_tokens")),
        }
        column = names.get("output_tokens", "output_tokens")
        lengths = raw.get(column)
        if not isinstance(lengths, list) or not all(
            type(length) is int and 0 <= length <= MAX_TOKENS for length in lengths
        ):
            raise InputError(
                f"{location} column {column}", lengths, f"a list of integers from 0 to {MAX_TOKENS}"
            )
        for index, length in enumerate(lengths):
            yield (
                number,
                {
                    **common,
                    "sample_index": index,
                    "output_tokens": min(length, MAX_OUTPUT_TOKENS),
                    "finish_reason": LENGTH if length >= MAX_OUTPUT_TOKENS else STOP,
                },
            )
