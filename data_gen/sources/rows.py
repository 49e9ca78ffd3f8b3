"""Rows of a file, one by one: JSON lines, a JSON array, CSV, Parquet or text; never all of the file in memory."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from data_gen.tables import open_parquet, readable, require_unique
from scheduler_core.errors import InputError
from scheduler_core.files import existing_file
from scheduler_core.json_text import parse_json, replace_lone_surrogates

Row = tuple[int, Mapping[str, Any]]
SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".parquet", ".txt")
_BATCH_ROWS = 1024
_CHUNK_CHARACTERS = 1 << 20
_SPACE = re.compile(r"\s*")


def file_suffix(path: Path) -> str:
    """Suffix that tells the format; that of `name.csv.gz` is `.csv`."""
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def file_rows(path: str | Path, field: str) -> Iterator[Row]:
    """(number of the row in the file, columns) of each row; text lines become the column `prompt`.

    Numbers count from 1: lines of JSONL, CSV (the heading is 1) and text, elements of an array, rows of Parquet.
    Text formats may be gzipped (`.gz`).

    Args:
        path: The file.
        field: Name of the option that gave the path, for messages.

    Raises:
        InputError: The file cannot be read, or a row is not one; names it.
    """
    file = existing_file(path, field)
    suffix = file_suffix(file)
    if suffix not in SUFFIXES:
        raise InputError(field, str(path), "a file ending in " + ", ".join(SUFFIXES))
    if suffix == ".parquet":
        yield from _parquet_rows(file, field)
        return
    readers = {".csv": _csv_rows, ".json": _array_rows, ".txt": _text_rows}
    kind = "gzip" if file.suffix == ".gz" else "text"
    with readable(path, field, kind), _text(file) as stream:
        try:
            yield from readers.get(suffix, _json_lines)(stream, file.name)
        except UnicodeDecodeError as error:
            raise InputError(field, f"{path} (byte {error.start})", "text in UTF-8") from error


def _text(file: Path) -> TextIO:
    if file.suffix == ".gz":
        return io.TextIOWrapper(gzip.open(file), encoding="utf-8-sig", newline="")
    return open(file, encoding="utf-8-sig", newline="")


def _json_lines(stream: TextIO, name: str) -> Iterator[Row]:
    for number, line in enumerate(stream, start=1):
        if line.strip():
            try:
                row = parse_json(line)
            except ValueError as error:
                raise InputError(
                    f"{name} row {number}", line.strip(), f"one JSON object ({_reason(error)})"
                ) from error
            yield number, _object(row, name, number)


def _object(row: object, name: str, number: int) -> Mapping[str, Any]:
    if not isinstance(row, dict):
        raise InputError(f"{name} row {number}", row, "one JSON object")
    return row


def _reason(error: ValueError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error)


def _array_rows(stream: TextIO, name: str) -> Iterator[Row]:
    """Elements of one JSON array, decoded as the text comes in."""
    decoder = json.JSONDecoder()
    text, position, number = "", 0, 0

    def peek() -> str:
        """The next character that is no white space; "" at the end."""
        nonlocal text, position
        while True:
            position = _SPACE.match(text, position).end()  # type: ignore[union-attr]
            if position < len(text):
                return text[position]
            text, position = stream.read(_CHUNK_CHARACTERS), 0
            if not text:
                return ""

    if peek() != "[":
        allowed = "a JSON array of objects, or JSON lines in a .jsonl file"
        raise InputError(f"{name} row 1", peek(), allowed)
    position += 1
    while peek() != "]":
        if number and peek() == ",":
            position += 1
            peek()
        elif number and peek():
            raise InputError(f"{name} after row {number}", peek(), "a comma, or ] at the end of the array")
        if not peek():
            raise InputError(name, "the end of the file", "a complete JSON array")
        number += 1
        while True:  # an object is complete only with its last brace
            try:
                value, end = decoder.raw_decode(text, position)
                break
            except (ValueError, RecursionError) as error:
                rest = text[position:]
                is_deep = isinstance(error, RecursionError)
                more = "" if is_deep else stream.read(max(_CHUNK_CHARACTERS, len(rest)))
                if not more:
                    allowed = f"one JSON object ({_reason(error)})"
                    raise InputError(f"{name} row {number}", rest[:120], allowed) from error
                text, position = rest + more, 0
        value = replace_lone_surrogates(value, text[position:end])
        position = end
        yield number, _object(value, name, number)
    position += 1
    if peek():
        raise InputError(f"{name} after row {number}", peek(), "nothing after the JSON array")


def _csv_rows(stream: TextIO, name: str) -> Iterator[Row]:
    reader = csv.DictReader(stream, strict=True)
    require_unique(reader.fieldnames or (), name)
    while True:
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise InputError(f"{name} row {reader.line_num}", str(error), "a CSV row") from error
        if row is None:
            return
        if None in row or None in row.values():
            raise InputError(f"{name} row {reader.line_num}", row, "as many values as headings")
        yield reader.line_num, row


def _text_rows(stream: TextIO, name: str) -> Iterator[Row]:
    for number, line in enumerate(stream, start=1):
        if line.strip():
            yield number, {"prompt": line.rstrip("\r\n")}


def _parquet_rows(file: Path, field: str) -> Iterator[Row]:
    number = 0
    with readable(file, field, "Parquet"):
        for batch in open_parquet(file, field).iter_batches(batch_size=_BATCH_ROWS):
            for row in batch.to_pylist():
                number += 1
                yield number, row
