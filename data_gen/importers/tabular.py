"""Columns of a table in a file, batch by batch: CSV and Parquet by Arrow, JSON lines row by row."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
from numpy.typing import NDArray

from data_gen.importers.batch import BATCH_ROWS
from data_gen.sources.rows import file_rows, file_suffix
from data_gen.tables import open_parquet, readable, require_unique
from scheduler_core.errors import InputError
from scheduler_core.files import existing_file

_BLOCK_BYTES = 1 << 20
_PARQUET_ROWS = 4096


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of some columns: arrays [rows] by name, and the rows' numbers in the file."""

    columns: dict[str, pa.Array]
    rows: NDArray[np.int64]


def column_names(path: str | Path) -> list[str]:
    """Names of the columns; of JSON lines those of the first row.

    Raises:
        InputError: The file cannot be read or has no row.
    """
    file = existing_file(path, "file")
    suffix = file_suffix(file)
    if suffix == ".parquet":
        return list(open_parquet(file, "file").schema_arrow.names)
    if suffix == ".csv":
        return _heading(file)
    for _, row in file_rows(file, "file"):
        return [str(name) for name in row]
    raise InputError("file", str(path), "a file with at least one row")


def parts(path: str | Path, columns: Sequence[str]) -> Iterator[Part]:
    """The columns of a file, in batches; CSV values are text.

    Raises:
        InputError: A column is missing or a row cannot be read.
    """
    file = existing_file(path, "file")
    names = column_names(file)
    require_unique(names, file.name)
    missing = [name for name in columns if name not in names]
    if missing:
        raise InputError(f"{file.name}: columns", names, f"also {', '.join(missing)}")
    readers = {".csv": _csv_parts, ".parquet": _parquet_parts}
    yield from readers.get(file_suffix(file), _row_parts)(file, list(columns))


def _heading(file: Path) -> list[str]:
    with (
        readable(file, "file", "CSV"),
        gzip.open(file) if file.suffix == ".gz" else open(file, "rb") as stream,
    ):
        return next(csv.reader([stream.readline().decode("utf-8-sig")]), [])


def _csv_parts(file: Path, columns: list[str]) -> Iterator[Part]:
    convert = pa_csv.ConvertOptions(
        include_columns=columns, column_types=dict.fromkeys(columns, pa.string()), strings_can_be_null=False
    )
    row = 2
    with readable(file, "file", "CSV"):
        reader = pa_csv.open_csv(
            pa.input_stream(str(file), compression="detect"),
            read_options=pa_csv.ReadOptions(block_size=_BLOCK_BYTES, use_threads=False),
            convert_options=convert,
        )
        for batch in reader:
            rows = np.arange(row, row + batch.num_rows, dtype=np.int64)
            row += batch.num_rows
            yield Part({name: batch.column(name) for name in columns}, rows)


def _parquet_parts(file: Path, columns: list[str]) -> Iterator[Part]:
    row = 1
    with readable(file, "file", "Parquet"):
        for batch in open_parquet(file, "file").iter_batches(batch_size=_PARQUET_ROWS, columns=columns):
            rows = np.arange(row, row + batch.num_rows, dtype=np.int64)
            row += batch.num_rows
            yield Part({name: batch.column(name) for name in columns}, rows)


def _row_parts(file: Path, columns: list[str]) -> Iterator[Part]:
    stream = file_rows(file, "file")
    while taken := list(islice(stream, BATCH_ROWS)):
        rows = np.array([number for number, _ in taken], dtype=np.int64)
        arrays = {}
        for name in columns:
            for number, row in taken:
                if name not in row:
                    raise InputError(f"{file.name} row {number}: columns", sorted(row), f"also {name}")
            arrays[name] = _array([row[name] for _, row in taken], rows, name, file.name)
        yield Part(arrays, rows)


def _array(values: list[Any], rows: NDArray[np.int64], name: str, where: str) -> pa.Array:
    try:
        return pa.array(values)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        first = next((value for value in values if value is not None), None)
        odd = next((row for row, value in enumerate(values) if not _converts([first, value])), 0)
        raise InputError(
            f"{where} row {rows[odd]} column {name}",
            values[odd],
            f"values of one type, {type(first).__name__}, that a column can hold",
        ) from error


def _converts(values: list[Any]) -> bool:
    try:
        pa.array(values)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return False
    return True
