"""Files of output lengths, whatever their format and size, as blocks of whole groups.

| format | recognized by | types |
|---|---|---|
| Parquet | content, or suffix .parquet | as stored |
| JSON lines | suffix .jsonl, .ndjson | by the column's name; other columns to group by are texts |
| CSV | suffix .csv | as JSON lines; a list is written as in JSON, "[12, 40, 7]", an empty field is missing |
| folder saved by `datasets` | state.json | as stored |
| folder of Parquet files | suffix .parquet | as stored; files in order of name |

DuckDB reads the columns that are used and brings the samples of a group together, on disk where they do not fit into
its memory; a file of one row for each group is streamed as it is.
"""

from __future__ import annotations

import csv
import glob
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_gen.tables import open_parquet, readable, require_unique
from scheduler_core.errors import InputError, TailcastError
from scheduler_core.files import existing_file, sha256_file
from scheduler_core.json_text import parse_json
from training.fitting.samples import candidate_columns, check_columns, is_list, used_columns

ALLOWED = (
    "a Parquet, .jsonl or .csv file, a folder saved by datasets' save_to_disk, or a folder of .parquet files"
)
#: Columns of a block beside those of the file: the row's number in the input, and that of its group's first row.
ROW, GROUP = "__row", "__group"
#: Maximum number of samples of a block, unless one group has more.
BLOCK_SAMPLES = 1 << 20
MEMORY_LIMIT, THREADS = "1GB", 2
MAX_LINE_BYTES = 4 << 20
_PARQUET_MAGIC = b"PAR1"
_BATCH_ROWS = 16_384
#: Types of the columns of CSV and JSON lines that are not text; those of the second kind may be lists of them.
_NUMBERS = {
    "prompt_tokens": "BIGINT",
    "max_tokens": "BIGINT",
    "sample_index": "BIGINT",
    "temperature": "DOUBLE",
}
_LISTABLE = {"output_tokens": "DOUBLE", "finished": "BOOLEAN"}


@dataclass(frozen=True, slots=True)
class _TextColumn:
    """A column of CSV or JSON lines: its text as SQL, and the type that is read from it."""

    name: str
    text: str
    kind: str

    @property
    def value(self) -> str:
        """Its value as SQL, an error where the text is none."""
        return f"CAST({self._literal} AS {self.kind})"

    @property
    def is_bad(self) -> str:
        """Whether its text is no value, as SQL."""
        value = f"TRY_CAST({self._literal} AS {self.kind})"
        has_bad_entry = f" OR list_count({value}) < len({value})" if self.kind.endswith("[]") else ""
        return f"({self.text} IS NOT NULL AND ({value} IS NULL{has_bad_entry}))"

    @property
    def _literal(self) -> str:
        # A cast to BIGINT would round 7.5; with a comma it is refused.
        return f"replace({self.text}, '.', ',')" if self.kind == "BIGINT" else self.text


@dataclass(frozen=True, slots=True)
class _Source:
    """Rows that DuckDB can read.

    Attributes:
        path: Of the input, for messages.
        connection: To DuckDB.
        relation: What it reads, as SQL.
        values: Expressions of the used columns, as SQL.
        texts: The columns that are read from text.
    """

    path: Path
    connection: Any
    relation: str
    values: str = ""
    texts: tuple[_TextColumn, ...] = ()

    @property
    def rows(self) -> str:
        """A query of all rows in order with their numbers."""
        return f"(SELECT {self.values}, row_number() OVER () - 1 AS {ROW} FROM {self.relation})"

    def first(self, query: str) -> tuple[Any, ...] | None:
        """The first row of a query's result."""
        with self.errors():
            row: tuple[Any, ...] | None = self.connection.execute(query).fetchone()
            return row

    def stream(self, query: str, work: str | Path) -> Iterator[pa.RecordBatch]:
        """A query's result in batches; `work` is the folder for what does not fit into memory."""
        with self.errors():
            self.connection.execute(f"SET temp_directory = {_literal(str(work))}")
            yield from self.connection.sql(query).to_arrow_reader(_BATCH_ROWS)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turns what DuckDB raises, itself or through Arrow, into errors that name the file and what is wrong in it."""
        try:
            yield
        except InputError:
            raise
        except (duckdb.Error, pa.ArrowException, OSError, RuntimeError) as error:
            lines = [line for line in str(error).strip().splitlines() if not line.startswith("Original Line")]
            if "nterrupted" in lines[0]:
                raise KeyboardInterrupt from error
            if lines[0].startswith(("Out of Memory Error", "IO Error")):
                raise TailcastError(
                    f"out: cannot group {self.path.name} in {MEMORY_LIMIT} of memory and on disk ({lines[0]}); a file of "
                    "one row for each group needs no grouping"
                ) from error
            if self.path.suffix in (".jsonl", ".ndjson"):
                _check_json_lines(self.path)
            self._check_texts()
            raise InputError("samples", str(self.path), f"a whole file ({' '.join(lines[:2])})") from error

    def _check_texts(self) -> None:
        """Raises `InputError` for the first text that is no value of its column."""
        for column in self.texts:
            row = self.connection.execute(
                f"SELECT * FROM (SELECT row_number() OVER () - 1, {column.text} AS text, {column.is_bad} AS bad "
                f"FROM {self.relation}) WHERE bad LIMIT 1"
            ).fetchone()
            if row is not None:
                words = {"DOUBLE": "a number", "BIGINT": "an integer", "BOOLEAN": "true or false"}
                kind = words[column.kind.removesuffix("[]")]
                raise InputError(
                    f"{self.path.name}, row {row[0]}, column {column.name}",
                    row[1],
                    f"a list: {kind}" if column.kind.endswith("[]") else kind,
                )


@dataclass(frozen=True, slots=True)
class SampleFile:
    """An opened file or folder of output lengths.

    Attributes:
        path: Path of the option.
        files: The files behind it, in order.
        keys: Columns that name a group.
        columns: Columns that are used.
        lists: Whether a row is a group with a list of lengths, else it is one sample.
        num_rows: Rows of the input.
        source: Its rows.
        starts: Row at which each of `files` begins, if errors name them one by one; else empty.
    """

    path: Path
    files: tuple[Path, ...]
    keys: tuple[str, ...]
    columns: tuple[str, ...]
    lists: bool
    num_rows: int
    source: _Source
    starts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_rows == 0:
            raise InputError(self.path.name, "no rows", "at least one row")

    def locate(self, row: int) -> str:
        """A row, counted from 0 over the whole input, as messages name it."""
        if not self.starts:
            return f"{self.path.name}, row {row}"
        number = bisect_right(self.starts, row) - 1
        return f"{self.path.name}/{self.files[number].name}, row {row - self.starts[number]}"

    def identity(self) -> dict[str, Any]:
        """Name, size and SHA-256 of the input; of a folder those of each file.

        Raises:
            InputError: Two files have the same content (a copy or a link): its samples would count twice.
        """
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

    def blocks(self, max_groups: int, work: str | Path) -> Iterator[pa.Table]:
        """All rows in blocks of whole groups, in order of the groups' first rows; the same blocks in every run.

        Args:
            max_groups: Maximum number of groups of a block.
            work: Folder for what does not fit into memory; DuckDB makes it on demand.

        Yields:
            Tables of the used columns, ROW and GROUP.

        Raises:
            InputError: The file is damaged, a value has a wrong type, or keys come again in a file of one row for
                each group.
            TailcastError: The folder cannot be written.
        """
        rows = self.source.rows
        if self.lists:
            self._check_keys_once()
            query = f"SELECT *, {ROW} AS {GROUP} FROM {rows}"
        else:
            keys = [_quoted(key) for key in self.keys]
            same = " AND ".join(f"s.{key} IS NOT DISTINCT FROM g.{key}" for key in keys)
            # The prompt of a group's first row is enough, and long ones are costly to sort.
            first_prompt = f"REPLACE (CASE WHEN {ROW} = {GROUP} THEN prompt END AS prompt)"
            is_carried = "prompt" in self.columns and "prompt" not in self.keys
            query = (
                # Reading twice costs less than holding all columns.
                f"WITH s AS NOT MATERIALIZED {rows}, g AS (SELECT {', '.join(keys)}, min({ROW}) AS {GROUP} FROM s GROUP BY ALL) "
                f"SELECT s.* {first_prompt if is_carried else ''}, g.{GROUP} FROM s JOIN g ON {same} ORDER BY {GROUP}, {ROW}"
            )
        pending: pa.Table | None = None
        for batch in self.source.stream(query, work):
            table = pa.Table.from_batches([batch])
            # The last group may go on in the next batch.
            *blocks, pending = _divided(
                table if pending is None else pa.concat_tables([pending, table]), max_groups
            )
            yield from blocks
        if pending is not None:
            yield pending

    def _check_keys_once(self) -> None:
        keys = [_quoted(key) for key in self.keys]
        repeat = self.source.first(
            f"SELECT min({ROW}), max({ROW}), {', '.join(keys)} FROM {self.source.rows} "
            f"WHERE {' AND '.join(f'{key} IS NOT NULL' for key in keys)} "
            "GROUP BY ALL HAVING count(*) > 1 ORDER BY 1 LIMIT 1"
        )
        if repeat is not None:
            first, last, *values = repeat
            raise InputError(
                self.locate(last),
                ", ".join(f"{key}={value!r}" for key, value in zip(self.keys, values, strict=True)),
                f"each group in one row ({self.locate(first)} has it too); samples of a group over several rows need "
                "one row for each sample",
            )


def _divided(table: pa.Table, max_groups: int) -> list[pa.Table]:
    """The rows in parts of up to `max_groups` groups and BLOCK_SAMPLES samples, though of at least one group."""
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
    path: str | Path,
    *,
    keys: Sequence[str] = ("prompt_id", "model"),
    weights: str | None = None,
    field: str = "samples",
) -> SampleFile:
    """Opens a file or folder of output lengths; see the table above.

    Args:
        path: The file or folder.
        keys: Columns that name a group.
        weights: Column of weights, None: none.
        field: Name of the option with the path, for messages.

    Raises:
        InputError: It is missing, empty, of another format, damaged, or lacks a column.
    """
    path = Path(path)
    if path.is_dir():
        arrow = _saved_dataset(path, field)
        if arrow is not None:
            return _open_arrow(path, arrow, keys, weights, field)
        files = tuple(sorted(entry for entry in path.glob("*.parquet") if entry.name[0] not in "._"))
        if not files:
            raise InputError(field, str(path), ALLOWED)
        return _open_parquet(path, files, keys, weights, field)
    file = existing_file(path, field)
    with open(file, "rb") as stream:
        magic = stream.read(len(_PARQUET_MAGIC))
    if magic == _PARQUET_MAGIC or file.suffix in (".parquet", ".pq"):
        return _open_parquet(path, (file,), keys, weights, field)
    if file.suffix not in (".jsonl", ".ndjson", ".csv"):
        raise InputError(field, str(path), ALLOWED)
    return _open_text(file, tuple(keys), weights)


def _connect() -> Any:
    return duckdb.connect(
        config={"memory_limit": MEMORY_LIMIT, "threads": THREADS, "autoinstall_known_extensions": False}
    )


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _path_literal(path: Path) -> str:
    return _literal(glob.escape(str(path)))


def _open_parquet(
    path: Path, files: tuple[Path, ...], keys: Sequence[str], weights: str | None, field: str
) -> SampleFile:
    schemas, counts = [], []
    for file in files:
        with open_parquet(file, field) as parquet:
            schemas.append(parquet.schema_arrow)
            counts.append(parquet.metadata.num_rows)
    source = _Source(path, _connect(), f"read_parquet([{', '.join(map(_path_literal, files))}])")
    opened = _stored(source, schemas[0], files, keys, weights, sum(counts))
    for file, schema in zip(files, schemas, strict=True):
        for name in used_columns([*schemas[0].names, *schema.names], keys, weights):
            here, there = (
                str(each.field(name).type) if name in each.names else "no such column"
                for each in (schema, schemas[0])
            )
            if here != there:
                where = f"{path.name}/{file.name}, column {name}"
                raise InputError(where, here, f"{there}, as in the first file")
    if not path.is_dir():
        return opened
    return replace(opened, starts=tuple(accumulate(counts[:-1], initial=0)))


def _open_arrow(
    path: Path, files: tuple[Path, ...], keys: Sequence[str], weights: str | None, field: str
) -> SampleFile:
    tables = []
    for file in files:
        # Mapped into memory: the system holds only what is in use.
        with readable(file, field, "Arrow"), pa.ipc.open_stream(pa.memory_map(str(file))) as stream:
            tables.append(stream.read_all())
    table = pa.concat_tables(tables)
    source = _Source(path, _connect(), "samples")
    source.connection.register("samples", table)
    return _stored(source, table.schema, files, keys, weights, table.num_rows)


def _stored(
    source: _Source,
    schema: pa.Schema,
    files: tuple[Path, ...],
    keys: Sequence[str],
    weights: str | None,
    num_rows: int,
) -> SampleFile:
    """A file whose columns have types of their own."""
    check_columns(schema.names, source.path, keys, weights)
    for key in keys:
        kind = schema.field(key).type
        if pa.types.is_nested(kind):
            raise InputError(f"{source.path.name}, column {key}", str(kind), "plain values to group by")
    columns = tuple(used_columns(schema.names, keys, weights))
    values = [
        f"CAST({_quoted(name)} AS VARCHAR) AS {_quoted(name)}"
        if pa.types.is_dictionary(schema.field(name).type)
        else _quoted(name)
        for name in columns
    ]
    lists = pa.types.is_nested(schema.field("output_tokens").type)
    source = replace(source, values=", ".join(values))
    return SampleFile(source.path, files, tuple(keys), columns, lists, num_rows, source)


def _saved_dataset(path: Path, field: str) -> tuple[Path, ...] | None:
    """The Arrow files of a folder saved by `datasets`; None for another folder."""
    if (path / "dataset_dict.json").is_file():
        splits = _json(path / "dataset_dict.json", field).get("splits", [])
        if not isinstance(splits, list) or len(splits) != 1 or not isinstance(splits[0], str):
            named = ", ".join(str(path / str(split)) for split in splits) if isinstance(splits, list) else ""
            raise InputError(field, str(path), f"one split of this dataset: {named or 'it has none'}")
        path = path / splits[0]
    if not (path / "state.json").is_file():
        return None
    entries = _json(path / "state.json", field).get("_data_files", [])
    if not isinstance(entries, list) or not all(isinstance(e, dict) and "filename" in e for e in entries):
        raise InputError(field, str(path / "state.json"), "_data_files as datasets writes them")
    if not entries:
        raise InputError(field, str(path), "a dataset with at least one row")
    return tuple(existing_file(path / str(entry["filename"]), field) for entry in entries)


def _json(path: Path, field: str) -> dict[str, Any]:
    try:
        content = parse_json(path.read_bytes())
    except ValueError as error:
        raise InputError(field, str(path), f"JSON as datasets writes it ({error})") from error
    if not isinstance(content, dict):
        raise InputError(field, str(path), "a JSON object as datasets writes it")
    return content


def _open_text(path: Path, keys: tuple[str, ...], weights: str | None) -> SampleFile:
    """A file of text, whose columns have the types that their names say."""
    is_csv = path.suffix == ".csv"
    if is_csv:
        relation, names = _csv_relation(path)
    else:
        names = candidate_columns(keys, weights)
        relation = _json_relation(path, names)
    source = _Source(path, _connect(), relation)
    # A column without any value is no column.
    counts = source.first(
        f"SELECT count(*), {', '.join(f'count({_quoted(name)})' for name in names)} FROM {relation}"
    )
    assert counts is not None
    num_rows, *filled = counts
    if num_rows == 0:
        raise InputError(path.name, "no rows", "at least one row")
    names = [name for name, count in zip(names, filled, strict=True) if count]
    check_columns(names, path, keys, weights)
    text = "nullif(trim({}), '')" if is_csv else "CAST({} AS VARCHAR)"
    texts = {name: text.format(_quoted(name)) for name in used_columns(names, keys, weights)}
    length = texts["output_tokens"]
    first = source.first(f"SELECT {length} FROM {relation} WHERE {length} IS NOT NULL LIMIT 1")
    lists = first is not None and first[0].startswith("[")
    kinds = _NUMBERS | {
        name: kind + "[]" * lists
        for name, kind in (_LISTABLE | ({weights: "DOUBLE"} if weights else {})).items()
    }
    columns = {name: _TextColumn(name, text, kinds[name]) for name, text in texts.items() if name in kinds}
    plain = "{}" if is_csv else "{}->>'$'"
    values = [
        f"{columns[name].value if name in columns else plain.format(_quoted(name))} AS {_quoted(name)}"
        for name in texts
    ]
    source = replace(source, values=", ".join(values), texts=tuple(columns.values()))
    return SampleFile(path, (path,), keys, tuple(texts), lists, num_rows, source)


def _csv_relation(path: Path) -> tuple[str, list[str]]:
    """A reader of CSV as SQL, and the names of its columns."""
    with (
        open(path, encoding="utf-8-sig", errors="replace", newline="") as stream,
        readable(path, "samples", "CSV"),
    ):
        names = next(csv.reader([stream.readline(MAX_LINE_BYTES)]), [])
    if not names:
        raise InputError(path.name, "no rows", "a line of column names and at least one row")
    require_unique(names, path.name)
    kinds = ", ".join(f"{_literal(name)}: 'VARCHAR'" for name in names)
    return (
        f"read_csv({_path_literal(path)}, auto_detect = false, columns = {{{kinds}}}, header = true, delim = ',', "
        f"quote = '\"', escape = '\"', "
        f"allow_quoted_nulls = false, max_line_size = {MAX_LINE_BYTES})"
    ), names


def _json_relation(path: Path, names: Sequence[str]) -> str:
    """A reader of JSON lines as SQL; every column is JSON."""
    kinds = ", ".join(f"{_literal(name)}: 'JSON'" for name in names)
    return (
        f"read_json({_path_literal(path)}, format = 'newline_delimited', columns = {{{kinds}}}, "
        f"maximum_object_size = {MAX_LINE_BYTES})"
    )


def _check_json_lines(path: Path) -> None:
    """Raises `InputError` for the first line that is no JSON object: DuckDB does not count empty lines."""
    with open(path, "rb") as stream:
        for number, line in enumerate(iter(lambda: stream.readline(MAX_LINE_BYTES + 1), b""), start=1):
            where = f"{path.name}, line {number}"
            if len(line) > MAX_LINE_BYTES:
                raise InputError(where, f"more than {MAX_LINE_BYTES} bytes", f"{MAX_LINE_BYTES} bytes")
            try:
                row = parse_json(line) if line.strip() else {}
            except UnicodeDecodeError as error:
                raise InputError(where, line[:40], "text in UTF-8") from error
            except ValueError as error:
                raise InputError(where, line.decode().strip(), f"one JSON object ({error})") from error
            if not isinstance(row, dict):
                raise InputError(where, row, "one JSON object")
