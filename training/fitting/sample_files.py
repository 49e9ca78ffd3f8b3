"""Files of output lengths in any supported format and size, read in blocks of whole groups.

| format | recognized by | types |
|---|---|---|
| Parquet | content, or suffix .parquet | as stored |
| JSON lines | suffix .jsonl, .ndjson | by column name; other key columns are text |
| CSV | suffix .csv | as JSON lines; lists are written as JSON, "[12, 40, 7]"; an empty field is a missing value |
| folder saved by `datasets` | state.json | as stored |
| folder of Parquet files | suffix .parquet | as stored; files in order of name |

DuckDB groups the rows (`queries`), and spills to disk if they do not fit into memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scheduler_core.errors import InputError
from scheduler_core.shell.files import existing_file, sha256_file
from scheduler_core.shell.table_files import open_parquet
from training.fitting.queries import GroupingQuery, connect, path_literal, query_text, quoted
from training.fitting.samples import GROUP, check_columns, is_list, used_columns

ALLOWED = (
    "a Parquet, .jsonl or .csv file, a folder saved by datasets' save_to_disk, or a folder of .parquet files"
)
#: Maximum number of samples of a block; only a block with a single group may have more.
BLOCK_SAMPLES = 1 << 20
_PARQUET_MAGIC = b"PAR1"
# Name of the option, for error messages.
_FIELD = "samples"


@dataclass(frozen=True, slots=True)
class SampleFile:
    """An opened file or folder of output lengths.

    `starts` has the first row number of each of `files` if errors name the individual file; else it is empty.
    """

    path: Path
    files: tuple[Path, ...]
    num_rows: int
    query: GroupingQuery
    starts: tuple[int, ...] = ()

    def locate(self, row: int) -> str:
        """Name for error messages of a row, counted from 0 over the whole input."""
        if not self.starts:
            return f"{self.path.name}, row {row}"
        number = bisect_right(self.starts, row) - 1
        return f"{self.path.name}/{self.files[number].name}, row {row - self.starts[number]}"

    def identity(self) -> dict[str, Any]:
        """Name, size and SHA-256 of the input, or of each file of a folder; InputError if two files are identical, because
        their samples would count twice."""
        files: list[dict[str, Any]] = []
        names: dict[str, str] = {}
        ends = (*self.starts[1:], self.num_rows)
        for number, file in enumerate(self.files):
            digest = sha256_file(file)
            is_empty = bool(self.starts) and ends[number] == self.starts[number]
            if digest in names and not is_empty:
                allowed = f"files that differ: {names[digest]} is the same, and its samples would count twice"
                raise InputError(f"samples {self.path.name}", file.name, allowed)
            names[digest] = file.name
            files.append({"name": file.name, "size": file.stat().st_size, "sha256": digest})
        return files[0] if self.path == self.files[0] else {"name": self.path.name, "files": files}

    def blocks(self, max_groups: int, work: Path) -> Iterator[pa.Table]:
        """Yields all rows of `GroupingQuery.tables` in blocks of up to `max_groups` whole groups; deterministic."""
        pending: list[pa.Table] = []
        for table in self.query.tables(work, self.locate):
            # The last group may continue in the next table.
            *blocks, last = _divided(pa.concat_tables([*pending, table]), max_groups)
            yield from blocks
            pending = [last]
        yield from pending


def _divided(table: pa.Table, max_groups: int) -> list[pa.Table]:
    """Splits the rows into parts of at most `max_groups` groups and BLOCK_SAMPLES samples, but at least one group."""
    starts = np.flatnonzero(np.diff(table.column(GROUP).to_numpy(), prepend=-1))
    bounds = np.append(starts, table.num_rows)
    lengths = table.column("output_tokens")
    if is_list(lengths.type):
        sizes = pc.fill_null(pc.list_value_length(lengths), 0).to_numpy()
        samples = np.append(0, np.cumsum(sizes, dtype=np.int64))[bounds]
    else:
        samples = bounds
    parts, first = [], 0
    while first < len(starts):
        last = int(np.searchsorted(samples, samples[first] + BLOCK_SAMPLES, side="right")) - 1
        last = max(min(last, first + max_groups), first + 1)
        parts.append(table.slice(int(bounds[first]), int(bounds[last] - bounds[first])))
        first = last
    return parts


def open_samples(
    path: str | Path, keys: Sequence[str] = ("prompt_id", "model"), weights: str | None = None
) -> SampleFile:
    """Opens a file or folder of output lengths, see the table above; InputError if it is missing, empty or damaged, has an
    unsupported format, or lacks a column."""
    path = Path(path)
    if path.is_dir():
        if any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
            return _open_saved(path, keys, weights)
        files = tuple(sorted(entry for entry in path.glob("*.parquet") if entry.name[0] not in "._"))
        if not files:
            raise InputError(_FIELD, str(path), ALLOWED)
        return _open_parquet(path, files, keys, weights)
    file = existing_file(path, _FIELD)
    with open(file, "rb") as stream:
        magic = stream.read(len(_PARQUET_MAGIC))
    if magic == _PARQUET_MAGIC or file.suffix in (".parquet", ".pq"):
        return _open_parquet(path, (file,), keys, weights)
    if file.suffix not in (".jsonl", ".ndjson", ".csv"):
        raise InputError(_FIELD, str(path), ALLOWED)
    num_rows, query = query_text(file, tuple(keys), weights)
    return SampleFile(path, (file,), num_rows, query)


def _open_parquet(
    path: Path, files: tuple[Path, ...], keys: Sequence[str], weights: str | None
) -> SampleFile:
    schemas, counts = [], []
    for file in files:
        with open_parquet(file, _FIELD) as parquet:
            schemas.append(parquet.schema_arrow)
            counts.append(parquet.metadata.num_rows)
    for file, schema in zip(files, schemas, strict=True):
        for name in used_columns([*schemas[0].names, *schema.names], keys, weights):
            here, there = (
                str(each.field(name).type) if name in each.names else "no such column"
                for each in (schema, schemas[0])
            )
            if here != there:
                where = f"{path.name}/{file.name}, column {name}"
                raise InputError(where, here, f"{there}, as in the first file")

    starts = tuple(accumulate(counts[:-1], initial=0)) if path.is_dir() else ()
    return _stored(path, files, files, schemas[0], sum(counts), keys, weights, starts)


def _open_saved(path: Path, keys: Sequence[str], weights: str | None) -> SampleFile:
    """Opens a folder saved by `datasets`, memory-mapped."""
    import datasets

    try:
        saved = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(_FIELD, str(path), f"an undamaged folder saved by datasets ({error})") from error
    if isinstance(saved, datasets.DatasetDict):
        if len(saved) != 1:
            splits = ", ".join(str(path / split) for split in saved) or "it has none"
            raise InputError(_FIELD, str(path), f"one split of this dataset: {splits}")
        (saved,) = saved.values()
    table = saved.data.table
    files = tuple(Path(entry["filename"]) for entry in saved.cache_files)
    return _stored(path, files, table, table.schema, table.num_rows, keys, weights)


def _stored(
    path: Path,
    files: tuple[Path, ...],
    rows: pa.Table | Sequence[Path],
    schema: pa.Schema,
    num_rows: int,
    keys: Sequence[str],
    weights: str | None,
    starts: tuple[int, ...] = (),
) -> SampleFile:
    """Opens data whose columns are typed; `rows` is the table, or the Parquet files to read."""
    if num_rows == 0:
        raise InputError(path.name, "no rows", "at least one row")
    check_columns(schema.names, path, keys, weights)
    columns = {name: quoted(name) for name in used_columns(schema.names, keys, weights)}
    lists = pa.types.is_nested(schema.field("output_tokens").type)
    connection = connect()
    if isinstance(rows, pa.Table):
        connection.register("samples", rows)
        relation = "samples"
    else:
        relation = f"read_parquet([{', '.join(map(path_literal, rows))}])"
    query = GroupingQuery(path, connection, relation, tuple(keys), lists, columns)
    return SampleFile(path, files, num_rows, query, starts)
