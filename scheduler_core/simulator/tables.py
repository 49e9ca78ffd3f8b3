"""Tables as files, Parquet, CSV or JSON lines by the name's ending: results that are written, rows that users bring."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from scheduler_core import json_text
from scheduler_core.errors import InputError, MissingExtraError
from scheduler_core.files import atomic_file, existing_file, writable_target

TABLE_SUFFIXES = (".parquet", ".csv", ".jsonl")
#: Columns [n] by name: integers, numbers (NaN: empty) or text (objects; None: empty).
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


def check_table_path(path: str | Path, field: str) -> Path:
    """The path of a table that can be written.

    Raises:
        InputError: The name ends in something else, or the folder cannot be written to.
    """
    target = Path(path)
    if target.suffix not in TABLE_SUFFIXES:
        raise InputError(field, str(path), "a name that ends in " + ", ".join(TABLE_SUFFIXES))
    return writable_target(target, field)


def write_table(columns: Mapping[str, Any], path: str | Path, schema: str, field: str) -> None:
    """Writes columns as Parquet, CSV or JSON lines by the name's ending, atomically.

    Args:
        columns: By name: values [n], None or NaN where there is none; values of several types become text.
        path: Where to write.
        schema: Name of the schema, as metadata `tailcast.schema` of Parquet.
        field: The option that names the path.

    Raises:
        InputError: See `check_table_path`.
        MissingExtraError: pyarrow is not installed.
    """
    target = check_table_path(path, field)
    pa, pq = import_pyarrow()
    arrays = {name: _array(pa, values) for name, values in columns.items()}
    table = pa.table(arrays, metadata={"tailcast.schema": schema})
    with atomic_file(target) as temporary:
        if target.suffix == ".parquet":
            pq.write_table(table, temporary, compression="zstd")
        elif target.suffix == ".csv":
            from pyarrow import csv as arrow_csv

            arrow_csv.write_csv(table, temporary)
        else:
            with open(temporary, "w", encoding="utf-8") as stream:
                for batch in table.to_batches(_BATCH_ROWS):
                    stream.writelines(json.dumps(row, allow_nan=False) + "\n" for row in batch.to_pylist())


def _array(pa: Any, values: Any) -> Any:
    try:
        return pa.array(values, from_pandas=True)
    except pa.ArrowException:
        return pa.array([None if value is None else str(value) for value in values])


def columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Columns of rows; None where a row does not have the column."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def read_columns(path: str | Path, names: Sequence[str], schema: str, field: str) -> Columns:
    """Columns of a Parquet table that `write_table` wrote.

    Raises:
        InputError: There is no such file, it is not such a table, or it was written by another version.
        MissingExtraError: pyarrow is not installed.
    """
    with parquet_file(existing_file(path, field), field, schema) as parquet:
        table = parquet.read(columns=list(names))
    return {name: table[name].to_numpy(zero_copy_only=False) for name in names}


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
def parquet_file(file: Path, field: str, expected_schema: str | None = None) -> Iterator[Any]:
    """An open `pyarrow.parquet.ParquetFile`; errors while it is read become `InputError`.

    Args:
        file: The file.
        field: The option that names it.
        expected_schema: The one schema that it may have; None: any table of a user, and tailcast's of this version.

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
            current = expected_schema or _VERSIONS.get(stored.partition("/")[0])
            if current not in (None, stored):
                allowed = f"a table of schema {current}; this one has {stored or 'none'}"
                raise InputError(field, file.name, allowed)
            yield table
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        detail = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(field, str(file), f"a readable Parquet file ({detail})") from error
