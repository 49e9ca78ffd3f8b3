"""Rows of text and Parquet files that users bring: checked as far as no value gets lost between file and reader."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scheduler_core import json_text
from scheduler_core.errors import InputError, MissingExtraError

#: Versions of the project's own tables that are read here, by the kind of table.
_VERSIONS = {"trace": "trace/1", "fits": "fits/2", "samples": "samples/2"}


def parse_json(text: str, where: str, allowed: str) -> Any:
    """The value of a JSON text.

    Raises:
        InputError: It is not valid, or nested too deeply; names `where`.
    """
    try:
        return json_text.parse_json(text)
    except ValueError as error:
        raise InputError(where, text.strip(), f"{allowed} ({error})") from error


def text_rows(file: Path, field: str) -> Iterator[Mapping[str, Any]]:
    """Rows of a .jsonl or .csv file by column; empty cells are None.

    Raises:
        InputError: It is not UTF-8, a line is no row, or two columns have one name.
    """
    try:
        yield from _json_rows(file) if file.suffix == ".jsonl" else _csv_rows(file)
    except UnicodeDecodeError as error:
        raise InputError(field, file.name, f"UTF-8 text ({error.reason} at byte {error.start})") from error


def _json_rows(file: Path) -> Iterator[Mapping[str, Any]]:
    with open(file, encoding="utf-8") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            row = parse_json(line, f"{file.name} line {number}", "a JSON object")
            if not isinstance(row, dict):
                raise InputError(f"{file.name} line {number}", line.strip(), "a JSON object")
            yield row


def _csv_rows(file: Path) -> Iterator[Mapping[str, Any]]:
    with open(file, encoding="utf-8", newline="") as stream:
        reader = csv.reader(stream, strict=True)
        try:
            names = next(reader, [])
            check_columns(names, file)
            for cells in reader:
                if len(cells) not in (0, len(names)):
                    allowed = f"a CSV row of {len(names)} values, as the heading"
                    raise InputError(f"{file.name} line {reader.line_num}", cells, allowed)
                if cells:
                    yield {
                        name: None if cell == "" else cell for name, cell in zip(names, cells, strict=True)
                    }
        except csv.Error as error:
            raise InputError(f"{file.name} line {reader.line_num}", str(error), "a CSV row") from error


def check_columns(names: Sequence[str], file: Path) -> None:
    """Every column has a name of its own.

    Raises:
        InputError: Which two would be one.
    """
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise InputError(f"columns of {file.name}", ", ".join(twice), "each name once")


@contextmanager
def parquet_file(file: Path, field: str) -> Iterator[Any]:
    """An open `pyarrow.parquet.ParquetFile`; what goes wrong with it is the same error wherever it shows.

    Raises:
        InputError: It is not readable, two columns have one name, or another version of tailcast wrote it.
        MissingExtraError: pyarrow is not installed.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingExtraError("pyarrow", "sim") from error
    try:
        with pq.ParquetFile(file) as table:
            schema = table.schema_arrow
            check_columns(schema.names, file)
            name = (schema.metadata or {}).get(b"tailcast.schema", b"").decode("utf-8", "replace")
            known = _VERSIONS.get(name.partition("/")[0])
            if known not in (None, name):
                raise InputError(field, file.name, f"a table of schema {known}; this one has {name}")
            yield table
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        detail = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(field, str(file), f"a readable Parquet file ({detail})") from error
