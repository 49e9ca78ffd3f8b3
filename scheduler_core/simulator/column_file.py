"""Tables of columns as files: Parquet, CSV or JSON lines, by the name's ending."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler_core.errors import InputError, MissingExtraError
from scheduler_core.files import atomic_file, existing_file, writable_target

TABLE_SUFFIXES = (".parquet", ".csv", ".jsonl")
#: Columns [n] by name: whole numbers, numbers (NaN: empty) or objects (text; None: empty).
Columns = dict[str, NDArray[Any]]
#: Rows that are turned into text at a time.
_ROWS = 50_000


def check_table_path(path: str | Path, field: str) -> Path:
    """The path of a table that can be written.

    Raises:
        InputError: The name ends in something else, or the folder cannot be written to.
    """
    target = Path(path)
    if target.suffix not in TABLE_SUFFIXES:
        raise InputError(field, str(path), "a name that ends in " + ", ".join(TABLE_SUFFIXES))
    return writable_target(target, field)


def stacked(parts: Sequence[Columns]) -> Columns:
    """Tables with the same columns, one under the other."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def write_columns(columns: Mapping[str, NDArray[Any]], path: str | Path, schema: str, field: str) -> None:
    """Writes columns [n], atomically; Parquet carries `schema` as metadata `tailcast.schema`.

    Raises:
        InputError: See `check_table_path`.
        MissingExtraError: pyarrow is not installed, for Parquet.
    """
    target = check_table_path(path, field)
    with atomic_file(target) as temporary:
        if target.suffix == ".parquet":
            _write_parquet(columns, temporary, schema)
            return
        with open(temporary, "w", encoding="utf-8", newline="") as stream:
            if target.suffix == ".jsonl":
                stream.writelines(
                    json.dumps(dict(zip(columns, row, strict=True)), allow_nan=False) + "\n"
                    for row in _rows(columns)
                )
            else:
                writer = csv.writer(stream)
                writer.writerow(columns)
                writer.writerows(_rows(columns))


def _write_parquet(columns: Mapping[str, NDArray[Any]], path: Path, schema: str) -> None:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingExtraError("pyarrow", "sim") from error
    kinds = {"i": pa.int64(), "f": pa.float64(), "O": pa.string()}
    arrays = {
        name: pa.array(values, kinds[values.dtype.kind], from_pandas=True) for name, values in columns.items()
    }
    table = pa.table(arrays).replace_schema_metadata({"tailcast.schema": schema})
    pq.write_table(table, path, compression="zstd")


def _rows(columns: Mapping[str, NDArray[Any]]) -> Iterator[tuple[Any, ...]]:
    """Row by row; None for what is empty."""
    size = len(next(iter(columns.values())))
    for start in range(0, size, _ROWS):
        lists = []
        for values in columns.values():
            part = values[start : start + _ROWS]
            plain = part.tolist()
            if part.dtype.kind == "f" and np.isnan(part).any():
                plain = [None if value != value else value for value in plain]
            lists.append(plain)
        yield from zip(*lists, strict=True)


def read_columns(path: str | Path, names: Sequence[str], schema: str, field: str) -> Columns:
    """Reads columns of a Parquet table that `write_columns` wrote.

    Raises:
        InputError: There is no such file, it is not such a table, or it was written by another version.
        MissingExtraError: pyarrow is not installed.
    """
    file = existing_file(path, field)
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingExtraError("pyarrow", "sim") from error
    try:
        found = (pq.read_schema(file).metadata or {}).get(b"tailcast.schema", b"").decode()
        if found != schema:
            raise InputError(field, str(path), f"a Parquet table of schema {schema}, not {found or 'none'}")
        table = pq.read_table(file, columns=list(names))
    except (pa.ArrowException, OSError) as error:
        raise InputError(field, str(path), f"a readable Parquet file ({error})") from error
    return {name: table[name].to_numpy(zero_copy_only=False) for name in names}
