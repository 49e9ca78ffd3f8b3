"""Tables as files, Parquet, CSV or JSON lines by the name's ending: results that are written, rows that users bring."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler_core import json_text
from scheduler_core.errors import InputError, MissingExtraError
from scheduler_core.files import atomic_file, existing_file, writable_target

TABLE_SUFFIXES = (".parquet", ".csv", ".jsonl")
#: Columns [n] by name: integers, numbers (NaN: empty) or objects (text; None: empty).
Columns = dict[str, NDArray[Any]]
#: Rows that are turned into text at a time.
_BATCH_ROWS = 50_000
#: Versions of the project's own tables that are read here, by the kind of table.
_VERSIONS = {"trace": "trace/1", "fits": "fits/2", "samples": "samples/2"}


def import_pyarrow() -> tuple[Any, Any]:
    """(pyarrow, pyarrow.parquet).

    Raises:
        MissingExtraError: pyarrow is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError("pyarrow", "sim") from error
    return pyarrow, pyarrow.parquet


def check_table_path(path: str | Path, field: str, suffixes: Sequence[str] = TABLE_SUFFIXES) -> Path:
    """The path of a table that can be written.

    Raises:
        InputError: The name ends in something else, or the folder cannot be written to.
    """
    target = Path(path)
    if target.suffix not in suffixes:
        raise InputError(field, str(path), "a name that ends in " + ", ".join(suffixes))
    return writable_target(target, field)


def write_columns(parts: Sequence[Columns], path: str | Path, schema: str, field: str) -> None:
    """Writes tables with the same columns as one, atomically; Parquet carries `schema` as metadata `tailcast.schema`.

    Raises:
        InputError: See `check_table_path`.
        MissingExtraError: pyarrow is not installed, for Parquet.
    """
    target = check_table_path(path, field)
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    with atomic_file(target) as temporary:
        if target.suffix == ".parquet":
            pa, _ = import_pyarrow()
            kinds = {"i": pa.int64(), "f": pa.float64(), "O": pa.string()}
            arrays = {
                name: pa.array(values, kinds[values.dtype.kind], from_pandas=True)
                for name, values in columns.items()
            }
            write_parquet(arrays, temporary, schema)
        else:
            write_text(target.suffix, temporary, list(columns), _text_rows(columns))


def write_parquet(columns: Mapping[str, Any], path: Path, schema: str | None = None) -> None:
    """Writes columns as Parquet, with their schema's name as metadata."""
    pa, pq = import_pyarrow()
    table = pa.table(dict(columns))
    if schema is not None:
        table = table.replace_schema_metadata({"tailcast.schema": schema})
    pq.write_table(table, path, compression="zstd")


def write_text(suffix: str, path: Path, names: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Writes rows as `.jsonl` or `.csv`; None is null or an empty cell."""
    with open(path, "w", encoding="utf-8", newline="") as stream:
        if suffix == ".jsonl":
            for row in rows:
                stream.write(json.dumps(dict(zip(names, row, strict=True)), allow_nan=False) + "\n")
        else:
            writer = csv.writer(stream)
            writer.writerow(names)
            writer.writerows(rows)


def _text_rows(columns: Columns) -> Iterator[tuple[Any, ...]]:
    size = len(next(iter(columns.values())))
    for start in range(0, size, _BATCH_ROWS):
        lists = []
        for values in columns.values():
            part = values[start : start + _BATCH_ROWS]
            items = part.tolist()
            if part.dtype.kind == "f" and np.isnan(part).any():
                items = [None if value != value else value for value in items]
            lists.append(items)
        yield from zip(*lists, strict=True)


def read_columns(path: str | Path, names: Sequence[str], schema: str, field: str) -> Columns:
    """Columns of a Parquet table that `write_columns` wrote.

    Raises:
        InputError: There is no such file, it is not such a table, or it was written by another version.
        MissingExtraError: pyarrow is not installed.
    """
    file = existing_file(path, field)
    pa, pq = import_pyarrow()
    try:
        stored = (pq.read_schema(file).metadata or {}).get(b"tailcast.schema", b"").decode()
        if stored != schema:
            allowed = f"a Parquet table of schema {schema}, not {stored or 'none'}"
            raise InputError(field, str(path), allowed)
        table = pq.read_table(file, columns=list(names))
    except (pa.ArrowException, OSError) as error:
        raise InputError(field, str(path), f"a readable Parquet file ({error})") from error
    return {name: table[name].to_numpy(zero_copy_only=False) for name in names}


def write_rows(rows: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """Writes rows as .parquet or .csv, atomically; a column that a row does not have is empty there.

    Raises:
        InputError: The name ends in something else.
    """
    target = check_table_path(path, "table", (".parquet", ".csv"))
    names = list(dict.fromkeys(name for row in rows for name in row))
    with atomic_file(target) as temporary:
        if target.suffix == ".csv":
            write_text(".csv", temporary, names, ([row.get(name) for name in names] for row in rows))
        else:
            columns = {name: _of_one_type([row.get(name) for row in rows]) for name in names}
            write_parquet(columns, temporary)


def _of_one_type(values: list[Any]) -> list[Any]:
    """Numbers stay numbers, a mixture of types or anything else becomes text."""
    types = {type(value) for value in values if value is not None}
    if len(types) <= 1 and types <= {int, float, str, bool}:
        return values
    convert = float if types <= {int, float} else str
    return [None if value is None else convert(value) for value in values]


def file_rows(file: Path, field: str, columns: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """Rows of a user's table by column; of Parquet only these columns. Empty cells are None.

    Raises:
        InputError: The name's ending is unknown, the file is not readable, a line is no row, or two columns have one name.
        MissingExtraError: pyarrow is not installed, for Parquet.
    """
    if file.suffix == ".parquet":
        with parquet_file(file, field) as table:
            names = [name for name in table.schema_arrow.names if name in columns]
            for batch in table.iter_batches(columns=names):
                yield from batch.to_pylist()
    elif file.suffix in (".jsonl", ".csv"):
        try:
            yield from _json_rows(file) if file.suffix == ".jsonl" else _csv_rows(file)
        except UnicodeDecodeError as error:
            raise InputError(
                field, file.name, f"UTF-8 text ({error.reason} at byte {error.start})"
            ) from error
    else:
        raise InputError(field, file.name, "a name that ends in .jsonl, .csv or .parquet")


def _json_rows(file: Path) -> Iterator[Mapping[str, Any]]:
    with open(file, encoding="utf-8") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            location = f"{file.name} line {number}"
            try:
                row = json_text.parse_json(line)
            except ValueError as error:
                raise InputError(location, line.strip(), f"a JSON object ({error})") from error
            if not isinstance(row, dict):
                raise InputError(location, line.strip(), "a JSON object")
            yield row


def _csv_rows(file: Path) -> Iterator[Mapping[str, Any]]:
    with open(file, encoding="utf-8", newline="") as stream:
        reader = csv.reader(stream, strict=True)
        try:
            names = next(reader, [])
            _check_names(names, file)
            for cells in reader:
                if len(cells) not in (0, len(names)):
                    allowed = f"a CSV row of {len(names)} values, as the heading"
                    raise InputError(f"{file.name} line {reader.line_num}", cells, allowed)
                if cells:
                    yield {name: cell or None for name, cell in zip(names, cells, strict=True)}
        except csv.Error as error:
            raise InputError(f"{file.name} line {reader.line_num}", str(error), "a CSV row") from error


def _check_names(names: Sequence[str], file: Path) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise InputError(f"columns of {file.name}", ", ".join(twice), "each name once")


@contextmanager
def parquet_file(file: Path, field: str) -> Iterator[Any]:
    """An open `pyarrow.parquet.ParquetFile`; errors while it is read become `InputError`.

    Raises:
        InputError: It is not readable, two columns have one name, or another version of tailcast wrote it.
        MissingExtraError: pyarrow is not installed.
    """
    pa, pq = import_pyarrow()
    try:
        with pq.ParquetFile(file) as table:
            schema = table.schema_arrow
            _check_names(schema.names, file)
            stored = (schema.metadata or {}).get(b"tailcast.schema", b"").decode("utf-8", "replace")
            current = _VERSIONS.get(stored.partition("/")[0])
            if current not in (None, stored):
                raise InputError(field, file.name, f"a table of schema {current}; this one has {stored}")
            yield table
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        detail = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(field, str(file), f"a readable Parquet file ({detail})") from error
