"""Results as tables: Parquet, CSV or JSON lines by the name's ending."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from scheduler_core.errors import InputError
from scheduler_core.files import atomic_file, writable_target
from scheduler_core.table_files import import_pyarrow, open_parquet, readable

TABLE_SUFFIXES = (".parquet", ".csv", ".jsonl")
#: Columns [n] by name: integers, numbers (NaN: empty) or text (objects; None: empty).
Columns = dict[str, NDArray[Any]]
#: Rows that are turned into text at a time.
_BATCH_ROWS = 50_000


def check_table_path(path: str | Path, field: str) -> Path:
    """The path of a table; `InputError` if its name ends in something else, or the folder cannot be written to."""
    target = Path(path)
    if target.suffix not in TABLE_SUFFIXES:
        raise InputError(field, str(path), "a name that ends in " + ", ".join(TABLE_SUFFIXES))
    return writable_target(target, field)


def write_table(columns: Mapping[str, Any], path: str | Path, schema: str, field: str) -> None:
    """Writes columns as Parquet, CSV or JSON lines by the name's ending, atomically; `field` is the option that names the
    path.

    A column has values [n], None or NaN where there is none; values of several types become text. Parquet gets the name of
    the `schema` as metadata `tailcast.schema`.
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
    """Columns of a Parquet table that `write_table` wrote; `InputError` if it is not one, or another version wrote it."""
    parquet = open_parquet(path, field)
    stored = (parquet.schema_arrow.metadata or {}).get(b"tailcast.schema", b"").decode("utf-8", "replace")
    if stored != schema:
        allowed = f"a table of schema {schema}; this one has {stored or 'none'}"
        raise InputError(field, Path(path).name, allowed)
    with readable(path, field, "Parquet"):
        table = parquet.read(columns=list(names))
    return {name: table[name].to_numpy(zero_copy_only=False) for name in names}
