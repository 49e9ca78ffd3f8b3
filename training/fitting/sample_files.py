"""Files of output lengths: a Parquet file, or a folder of Parquet files that are read as one.

Logs of servers and tools, CSV and JSON lines: `import-lengths`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa

from scheduler_core.errors import InputError
from scheduler_core.shell.files import existing_file, sha256_file
from scheduler_core.shell.table_files import open_parquet, readable
from training.fitting.samples import check_columns, is_text, used_columns

_PARQUET_MAGIC = b"PAR1"
# Name of the option, for error messages.
_FIELD = "samples"


@dataclass(frozen=True, slots=True)
class SampleFiles:
    """The rows of a file or folder of output lengths."""

    path: Path
    files: tuple[Path, ...]
    starts: tuple[int, ...]  # number of the first row of each file
    table: pa.Table  # the columns that are used, of all files

    def locate(self, row: int) -> str:
        """Name for error messages of a row, counted from 0 over the whole input."""
        number = bisect_right(self.starts, row) - 1
        is_folder = self.path != self.files[0]
        name = f"{self.path.name}/{self.files[number].name}" if is_folder else self.path.name
        return f"{name}, row {row - self.starts[number]}"

    def identity(self) -> dict[str, Any]:
        """Name, size and SHA-256 of the input, or of each file of a folder; InputError if two files are identical, because
        their samples would count twice."""
        files: list[dict[str, Any]] = []
        names: dict[str, str] = {}
        ends = (*self.starts[1:], self.table.num_rows)
        for file, start, end in zip(self.files, self.starts, ends, strict=True):
            digest = sha256_file(file)
            if digest in names and end > start:
                allowed = f"files that differ: {names[digest]} is the same, and its samples would count twice"
                raise InputError(f"samples {self.path.name}", file.name, allowed)
            names[digest] = file.name
            files.append({"name": file.name, "size": file.stat().st_size, "sha256": digest})
        return files[0] if self.path == self.files[0] else {"name": self.path.name, "files": files}


def read_samples(path: str | Path, keys: Sequence[str] = ("prompt_id", "model")) -> SampleFiles:
    """Reads the used columns of a Parquet file, or of a folder's Parquet files in order of name. InputError if it is missing,
    empty or damaged, has another format, or lacks a column."""
    path = Path(path)
    if path.is_dir():
        files = tuple(sorted(entry for entry in path.glob("*.parquet") if entry.name[0] not in "._"))
    else:
        with open(existing_file(path, _FIELD), "rb") as stream:
            files = (path,) if stream.read(len(_PARQUET_MAGIC)) == _PARQUET_MAGIC else ()
    if not files:
        allowed = f"a Parquet file or a folder of .parquet files; import-lengths log {path.name} reads others"
        raise InputError(_FIELD, str(path), allowed)
    tables: list[pa.Table] = []
    for file in files:
        table = _used_columns_of(file, keys)
        _check_same_types(table, tables[0] if tables else table, f"{path.name}/{file.name}")
        tables.append(table)
    table = pa.concat_tables(tables)
    if not table.num_rows:
        raise InputError(path.name, "no rows", "at least one row")
    check_columns(table.column_names, path, keys)
    return SampleFiles(path, files, tuple(accumulate((len(each) for each in tables[:-1]), initial=0)), table)


def _used_columns_of(file: Path, keys: Sequence[str]) -> pa.Table:
    with open_parquet(file, _FIELD) as parquet, readable(file, _FIELD, "Parquet"):
        names = used_columns(parquet.schema_arrow.names, keys)
        parts = [parquet.schema_arrow.empty_table().select(names)]
        parts += (parquet.read_row_group(number, names) for number in range(parquet.num_row_groups))
        at = names.index("prompt") if "prompt" in names else None
        if at is not None and is_text(parts[0].schema.field(at).type):  # samples of a prompt repeat its text
            parts = [part.set_column(at, "prompt", part.column(at).dictionary_encode()) for part in parts]
        return pa.concat_tables(parts)


def _check_same_types(table: pa.Table, first: pa.Table, where: str) -> None:
    for name in dict.fromkeys((*first.column_names, *table.column_names)):
        here, there = (
            str(each.schema.field(name).type) if name in each.column_names else "no such column"
            for each in (table, first)
        )
        if here != there:
            raise InputError(f"{where}, column {name}", here, f"{there}, as in the first file")
