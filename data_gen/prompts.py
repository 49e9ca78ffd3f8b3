"""Where prompts come from: a JSONL, CSV, Parquet or text file, or our own templates."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from data_gen import templates
from scheduler_core.errors import InputError
from scheduler_core.files import existing_file

TEMPLATE_SCHEME = "templates:"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One user prompt; `prompt_id` is unique in a source, `category` may be empty."""

    prompt_id: str
    text: str
    category: str = ""


def prompt_id_of(text: str) -> str:
    """Identifier of a prompt that brings none: the first 16 hex digits of the SHA-256 of its text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_prompts(source: str) -> list[Prompt]:
    """Reads prompts, in the order of the source.

    Args:
        source: Path of a `.jsonl`, `.csv` or `.parquet` file with a column `prompt` (optionally `prompt_id` and
            `category`), of a `.txt` file with one prompt per line, or `templates:COUNT[?seed=N]` for prompts
            composed from the built-in templates.

    Raises:
        InputError: Naming the row for an empty or repeated prompt, a wrong type or invalid UTF-8.
    """
    if source.startswith(TEMPLATE_SCHEME):
        return _from_templates(source)
    path = existing_file(source, "prompts")
    readers = {".jsonl": _jsonl_rows, ".csv": _csv_rows, ".parquet": _parquet_rows, ".txt": _text_rows}
    if path.suffix not in readers:
        raise InputError(
            "prompts", source, "a file ending in .jsonl, .csv, .parquet or .txt, or templates:COUNT"
        )
    try:
        prompts = _checked(readers[path.suffix](path), path)
    except UnicodeDecodeError as error:
        raise InputError("prompts", f"{path} (byte {error.start})", "text in UTF-8") from error
    if not prompts:
        raise InputError("prompts", source, "at least one prompt")
    return prompts


def _from_templates(source: str) -> list[Prompt]:
    count_text, _, query = source.removeprefix(TEMPLATE_SCHEME).partition("?")
    options = parse_qs(query, keep_blank_values=True)
    seed_text = options.pop("seed", ["0"])[-1]
    if not count_text.isdigit() or not seed_text.isdigit() or options:
        raise InputError("prompts", source, "templates:COUNT or templates:COUNT?seed=N with whole numbers")
    composed = templates.compose(int(count_text), int(seed_text))
    return [Prompt(prompt_id_of(text), text, category) for category, text in composed]


def _checked(rows: Iterable[tuple[int, Mapping[str, Any]]], path: Path) -> list[Prompt]:
    prompts: list[Prompt] = []
    seen: dict[str, int] = {}
    for number, row in rows:
        where = f"{path.name} row {number}"
        if "prompt" not in row:
            raise InputError(f"{where}: columns", sorted(map(str, row)), "a column named 'prompt'")
        text = row["prompt"]
        if not isinstance(text, str) or not text.strip():
            raise InputError(f"{where}: prompt", text, "a text that is not empty")
        prompt_id = row.get("prompt_id")
        prompt_id = prompt_id_of(text) if prompt_id is None or prompt_id == "" else str(prompt_id)
        if prompt_id in seen:
            raise InputError(
                f"{where}: prompt_id", prompt_id, f"an id not used before (row {seen[prompt_id]} has it)"
            )
        seen[prompt_id] = number
        prompts.append(Prompt(prompt_id, text, str(row.get("category") or "")))
    return prompts


def _jsonl_rows(path: Path) -> Iterable[tuple[int, Mapping[str, Any]]]:
    with open(path, encoding="utf-8") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise InputError(
                    f"{path.name} row {number}", line.strip(), f"one JSON object ({error.msg})"
                ) from error
            if not isinstance(row, dict):
                raise InputError(f"{path.name} row {number}", row, "one JSON object")
            yield number, row


def _csv_rows(path: Path) -> Iterable[tuple[int, Mapping[str, Any]]]:
    with open(path, encoding="utf-8", newline="") as stream:
        yield from enumerate(csv.DictReader(stream), start=2)


def _text_rows(path: Path) -> Iterable[tuple[int, Mapping[str, Any]]]:
    with open(path, encoding="utf-8") as stream:
        yield from (
            (number, {"prompt": line.rstrip("\n")})
            for number, line in enumerate(stream, start=1)
            if line.strip()
        )


def _parquet_rows(path: Path) -> Iterable[tuple[int, Mapping[str, Any]]]:
    from data_gen.tables import read_parquet

    yield from enumerate(read_parquet(path, "prompts").to_pylist(), start=1)
