"""Files of output lengths of any size, read in blocks of whole groups.

CSV and JSON lines become a temporary Parquet file. DuckDB groups the rows, and spills to disk if they do not fit into memory.
Logs of servers and tools: `import-lengths`.
"""

from __future__ import annotations

import glob
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from scheduler_core.errors import InputError, TailcastError
from scheduler_core.ranges import parse_number
from scheduler_core.shell.files import existing_file, sha256_file
from scheduler_core.shell.json_text import from_json
from scheduler_core.shell.table_files import SUFFIXES, file_rows, file_suffix, open_parquet
from training.fitting.samples import GROUP, ROW, check_columns, is_list, used_columns

#: Maximum number of samples of a block; only a block with a single group may have more.
BLOCK_SAMPLES = 1 << 20
MEMORY_LIMIT, THREADS = "1GB", 2
BATCH_ROWS = 16_384
_PARQUET_MAGIC = b"PAR1"
#: Types of the columns of CSV and JSON lines; other columns are text.
_TYPES = {
    "output_tokens": pa.float64(),
    "finished": pa.bool_(),
    "prompt_tokens": pa.int64(),
    "max_tokens": pa.int64(),
    "sample_index": pa.int64(),
    "temperature": pa.float64(),
}
_LISTABLE = ("output_tokens", "finished")
_ALLOWED = {
    pa.bool_(): "true or false",
    pa.int64(): "an integer",
    pa.float64(): "a number",
    pa.string(): "a text",
}
_TEXT_SUFFIXES = tuple(suffix for suffix in SUFFIXES if suffix not in (".parquet", ".txt"))
# Name of the option, for error messages.
_FIELD = "samples"


@dataclass(frozen=True, slots=True)
class SampleFile:
    """An opened file or folder of output lengths."""

    path: Path
    files: tuple[Path, ...]
    parquet: tuple[Path, ...]  # `files`, or what they were converted to
    keys: tuple[str, ...]  # columns that identify a group
    columns: tuple[str, ...]  # columns that are read
    lists: bool  # True: a row is a group with a list of lengths; False: a row is one sample
    num_rows: int
    starts: tuple[int, ...]  # number of the first row of each file; empty for a single file

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
        """Yields all rows in blocks of up to `max_groups` whole groups, in order of the groups' first rows, with the
        additional columns ROW and GROUP; deterministic.

        Data that does not fit into memory is spilled to the folder `work`. InputError if the file is damaged, or a file
        with one row per group repeats a key; TailcastError if `work` cannot be written."""
        pending: list[pa.Table] = []
        for table in self._tables(work):
            # The last group may continue in the next table.
            *blocks, last = _divided(pa.concat_tables([*pending, table]), max_groups)
            yield from blocks
            pending = [last]
        yield from pending

    def _tables(self, work: Path) -> Iterator[pa.Table]:
        import duckdb

        with self._database_errors():
            connection = duckdb.connect(
                config={
                    "memory_limit": MEMORY_LIMIT,
                    "threads": THREADS,
                    "temp_directory": str(work),
                    "autoinstall_known_extensions": False,
                }
            )
            files = ", ".join(_literal(glob.escape(str(file))) for file in self.parquet)
            columns = ", ".join(map(_quoted, self.columns))
            rows = f"(SELECT {columns}, row_number() OVER () - 1 AS {ROW} FROM read_parquet([{files}]))"
            keys = ", ".join(map(_quoted, self.keys))
            if self.lists:
                self._check_keys_once(connection, rows)
                query = f"SELECT *, {ROW} AS {GROUP} FROM {rows}"
            else:
                same = " AND ".join(
                    f"s.{_quoted(key)} IS NOT DISTINCT FROM g.{_quoted(key)}" for key in self.keys
                )
                # Only the prompt of a group's first row is kept, because long prompts are expensive to sort.
                first_prompt = f"REPLACE (CASE WHEN {ROW} = {GROUP} THEN prompt END AS prompt)"
                is_carried = "prompt" in self.columns and "prompt" not in self.keys
                query = (
                    # Reading the file twice is cheaper than materializing all columns.
                    f"WITH s AS NOT MATERIALIZED {rows}, g AS (SELECT {keys}, min({ROW}) AS {GROUP} FROM s GROUP BY ALL) "
                    f"SELECT s.* {first_prompt if is_carried else ''}, g.{GROUP} FROM s JOIN g ON {same} "
                    f"ORDER BY {GROUP}, {ROW}"
                )
            for batch in connection.sql(query).to_arrow_reader(BATCH_ROWS):
                yield pa.Table.from_batches([batch])

    def _check_keys_once(self, connection: Any, rows: str) -> None:
        keys = [_quoted(key) for key in self.keys]
        repeat = connection.execute(
            f"SELECT min({ROW}), max({ROW}), {', '.join(keys)} FROM {rows} "
            f"WHERE {' AND '.join(f'{key} IS NOT NULL' for key in keys)} "
            "GROUP BY ALL HAVING count(*) > 1 ORDER BY 1 LIMIT 1"
        ).fetchone()
        if repeat is not None:
            first, last, *values = repeat
            raise InputError(
                self.locate(last),
                ", ".join(f"{key}={value!r}" for key, value in zip(self.keys, values, strict=True)),
                f"one row for each group ({self.locate(first)} has the same keys); to spread a group over several rows, "
                "use one row for each sample",
            )

    @contextmanager
    def _database_errors(self) -> Iterator[None]:
        """Converts exceptions raised by DuckDB, directly or through Arrow, to errors that name the file and the problem."""
        import duckdb

        try:
            yield
        except InputError:
            raise
        except (duckdb.Error, pa.ArrowException, OSError, RuntimeError) as error:
            lines = str(error).strip().splitlines()
            if "nterrupted" in lines[0]:
                raise KeyboardInterrupt from error
            if lines[0].startswith(("Out of Memory Error", "IO Error")):
                raise TailcastError(
                    f"out: cannot group {self.path.name} with {MEMORY_LIMIT} of memory and the disk ({lines[0]}); a file "
                    "with one row for each group needs no grouping"
                ) from error
            raise InputError(_FIELD, str(self.path), f"an undamaged file ({' '.join(lines[:2])})") from error


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


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


def _converted(file: Path, keys: Sequence[str], folder: Path) -> Path:
    """Writes the used columns of CSV or JSON as Parquet to the folder, which is created; InputError names row and column."""
    names: dict[str, bool] = {}  # column -> whether it has lists
    for _, row in file_rows(file, _FIELD):
        for name, value in row.items():
            names[name] = names.get(name, False) or isinstance(_parsed(name, value), list)
    if not names:
        raise InputError(file.name, "no rows", "at least one row")
    check_columns([*names], file, keys)
    lists = names["output_tokens"]
    schema = pa.schema(
        (name, pa.list_(kind) if lists and name in _LISTABLE else kind)
        for name in used_columns([*names], keys)
        for kind in [_TYPES.get(name, pa.string())]
    )
    rows = (
        {field.name: _cell(f"{file.name} row {number}", field, row.get(field.name)) for field in schema}
        for number, row in file_rows(file, _FIELD)
    )
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "samples.parquet"
    with pq.ParquetWriter(target, schema) as writer:
        while batch := list(islice(rows, BATCH_ROWS)):
            writer.write_table(pa.Table.from_pylist(batch, schema))
    return target


def _parsed(name: str, value: object) -> object:
    """A list in the text of a CSV cell as a list; other values unchanged."""
    is_text_of_list = name in _LISTABLE and isinstance(value, str) and value.lstrip().startswith("[")
    return from_json(value) if is_text_of_list else value


def _cell(row: str, field: pa.Field, value: object) -> object:
    """The value of a cell in the type of its column; InputError names the row and the column."""
    value = _parsed(field.name, value)
    if value is None or value == "":
        return None
    if isinstance(value, list) != is_list(field.type):
        allowed = "one value, as in other rows" if isinstance(value, list) else "a list, as in other rows"
        raise InputError(f"{row}, column {field.name}", value, allowed)
    kind = field.type.value_type if isinstance(value, list) else field.type
    try:
        return [_typed(kind, each) for each in value] if isinstance(value, list) else _typed(kind, value)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{row}, column {field.name}", value, _ALLOWED[kind]) from error


def _typed(kind: pa.DataType, value: Any) -> object:
    """A JSON value, or its text, in a type of `_ALLOWED`; ValueError, TypeError or OverflowError if it has another one."""
    if kind == pa.string():
        if isinstance(value, list | dict):
            raise TypeError(value)
        return value if isinstance(value, str) else str(value)
    if kind == pa.bool_():
        return ("false", "true").index(str(value).lower()) == 1
    if isinstance(value, bool):
        raise TypeError(value)
    number = parse_number(value) if isinstance(value, str) else float(value)
    if kind == pa.int64():
        if number % 1 or abs(number) >= 2**53:
            raise ValueError(value)
        return int(number)
    return number


def open_samples(path: str | Path, keys: Sequence[str] = ("prompt_id", "model"), *, work: Path) -> SampleFile:
    """Opens a Parquet, CSV or JSON lines file, or a folder of Parquet files in order of name; other formats than Parquet are
    converted in the folder `work`. InputError if it is missing, empty or damaged, has another format, or lacks a column."""
    path = Path(path)
    if path.is_dir():
        files = tuple(sorted(entry for entry in path.glob("*.parquet") if entry.name[0] not in "._"))
    else:
        with open(existing_file(path, _FIELD), "rb") as stream:
            is_parquet = stream.read(len(_PARQUET_MAGIC)) == _PARQUET_MAGIC
        is_parquet = is_parquet or path.suffix in (".parquet", ".pq")
        files = (path,) if is_parquet or file_suffix(path) in _TEXT_SUFFIXES else ()
    if not files:
        allowed = (
            f"a file of Parquet, CSV or JSON lines ({', '.join(_TEXT_SUFFIXES)}) or a folder of .parquet files; "
            "import-lengths reads logs of servers and tools"
        )
        raise InputError(_FIELD, str(path), allowed)
    parquets = files if path.is_dir() or is_parquet else (_converted(path, keys, work),)
    schemas, counts = [], []
    for file in parquets:
        with open_parquet(file, _FIELD) as parquet:
            schemas.append(parquet.schema_arrow)
            counts.append(parquet.metadata.num_rows)
    for file, schema in zip(files, schemas, strict=True):
        for name in used_columns([*schemas[0].names, *schema.names], keys):
            here, there = (
                str(each.field(name).type) if name in each.names else "no such column"
                for each in (schema, schemas[0])
            )
            if here != there:
                where = f"{path.name}/{file.name}, column {name}"
                raise InputError(where, here, f"{there}, as in the first file")
    schema = schemas[0]
    if not sum(counts):
        raise InputError(path.name, "no rows", "at least one row")
    check_columns(schema.names, path, keys)
    return SampleFile(
        path=path,
        files=files,
        parquet=parquets,
        keys=tuple(keys),
        columns=tuple(used_columns(schema.names, keys)),
        lists=pa.types.is_nested(schema.field("output_tokens").type),
        num_rows=sum(counts),
        starts=tuple(accumulate(counts[:-1], initial=0)) if path.is_dir() else (),
    )
