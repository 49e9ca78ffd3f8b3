"""Results as tables: Parquet, CSV or JSON lines, by the suffix of the file name."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from scheduler_core.errors import InputError
from scheduler_core.shell.files import atomic_file, writable_target
from scheduler_core.shell.table_files import import_pyarrow, open_parquet, readable

TABLE_SUFFIXES = (".parquet", ".csv", ".jsonl")
#: Columns [n] by name: integers, numbers (NaN: empty) or text (objects; None: empty).
Columns = dict[str, NDArray[Any]]
#: Number of rows per batch in the conversion to text.
_BATCH_ROWS = 50_000


def check_table_path(path: str | Path, field: str) -> Path:
    """The path of a table; `InputError` if its suffix is not supported, or the folder is not writable."""
    target = Path(path)
    if target.suffix not in TABLE_SUFFIXES:
        raise InputError(field, str(path), "a name that ends in " + ", ".join(TABLE_SUFFIXES))
    return writable_target(target, field)


def write_table(columns: Mapping[str, Any], path: str | Path, schema: str, field: str) -> None:
    """Writes columns as Parquet, CSV or JSON lines, by the suffix, atomically; `field` is the option with the path.

    A column has values [n]; None or NaN are missing values. Values of mixed types are converted to text. In
    Parquet the metadata `tailcast.schema` is set to `schema`.
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
    """Rows converted to columns; None if a row does not have the column."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def read_columns(path: str | Path, names: Sequence[str], schema: str, field: str) -> Columns:
    """Columns of a Parquet table of `write_table`; `InputError` if it is invalid or has another schema."""
    parquet = open_parquet(path, field)
    stored = (parquet.schema_arrow.metadata or {}).get(b"tailcast.schema", b"").decode("utf-8", "replace")
    if stored != schema:
        allowed = f"a table of schema {schema}; this one has {stored or 'none'}"
        raise InputError(field, Path(path).name, allowed)
    with readable(path, field, "Parquet"):
        table = parquet.read(columns=list(names))
    return {name: table[name].to_numpy(zero_copy_only=False) for name in names}
