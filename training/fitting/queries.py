"""Grouping of the rows of a file with DuckDB, which spills to disk if they do not fit into memory."""

from __future__ import annotations

import csv
import glob
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from scheduler_core.errors import InputError, TailcastError
from scheduler_core.shell.json_text import parse_json
from scheduler_core.shell.table_files import readable, require_unique
from training.fitting.samples import GROUP, ROW, candidate_columns, check_columns, used_columns

MEMORY_LIMIT, THREADS = "1GB", 2
MAX_LINE_BYTES = 4 << 20
BATCH_ROWS = 16_384
#: Types of the non-text columns of CSV and JSON lines; those in `_LISTABLE` may also be lists.
_NUMBERS = {
    "prompt_tokens": "BIGINT",
    "max_tokens": "BIGINT",
    "sample_index": "BIGINT",
    "temperature": "DOUBLE",
}
_LISTABLE = {"output_tokens": "DOUBLE", "finished": "BOOLEAN"}
_KIND_NAMES = {"DOUBLE": "a number", "BIGINT": "an integer", "BOOLEAN": "true or false"}
#: Column with the first text of a row that cannot be converted to the type of its column.
_BAD = "__bad"


@dataclass(frozen=True, slots=True)
class GroupingQuery:
    """DuckDB query that reads the rows of a file and sorts them by group."""

    path: Path  # input, for error messages
    connection: Any  # DuckDB connection
    relation: str  # SQL expression of the input table
    keys: tuple[str, ...]  # columns that identify a group
    lists: bool  # True: a row is a group with a list of lengths; False: a row is one sample
    columns: dict[str, str]  # used column -> its SQL expression

    def tables(self, work: Path, locate: Callable[[int], str]) -> Iterator[pa.Table]:
        """Yields all rows sorted by group, in order of the groups' first rows, with the additional columns ROW and GROUP.

        Data that does not fit into memory is spilled to the folder `work`; `locate` names a row in error messages.
        InputError if the file is damaged, or a file with one row per group repeats a key; TailcastError if `work` cannot
        be written."""
        values = ", ".join(f"{value} AS {quoted(name)}" for name, value in self.columns.items())
        rows = f"(SELECT {values}, row_number() OVER () - 1 AS {ROW} FROM {self.relation})"
        keys = ", ".join(quoted(key) for key in self.keys)
        if self.lists:
            self._check_keys_once(rows, locate)
            query = f"SELECT *, {ROW} AS {GROUP} FROM {rows}"
        else:
            same = " AND ".join(f"s.{quoted(key)} IS NOT DISTINCT FROM g.{quoted(key)}" for key in self.keys)
            # Only the prompt of a group's first row is kept, because long prompts are expensive to sort.
            first_prompt = f"REPLACE (CASE WHEN {ROW} = {GROUP} THEN prompt END AS prompt)"
            is_carried = "prompt" in self.columns and "prompt" not in self.keys
            query = (
                # Reading the file twice is cheaper than materializing all columns.
                f"WITH s AS NOT MATERIALIZED {rows}, g AS (SELECT {keys}, min({ROW}) AS {GROUP} FROM s GROUP BY ALL) "
                f"SELECT s.* {first_prompt if is_carried else ''}, g.{GROUP} FROM s JOIN g ON {same} ORDER BY {GROUP}, {ROW}"
            )
        with database_errors(self.path):
            self.connection.execute(f"SET temp_directory = {_literal(str(work))}")
            for batch in self.connection.sql(query).to_arrow_reader(BATCH_ROWS):
                table = pa.Table.from_batches([batch])
                if _BAD in self.columns:
                    self._check_texts(table, locate)
                    table = table.drop_columns([_BAD])
                yield table

    def _check_keys_once(self, rows: str, locate: Callable[[int], str]) -> None:
        keys = [quoted(key) for key in self.keys]
        repeat = first_row(
            self.path,
            self.connection,
            f"SELECT min({ROW}), max({ROW}), {', '.join(keys)} FROM {rows} "
            f"WHERE {' AND '.join(f'{key} IS NOT NULL' for key in keys)} "
            "GROUP BY ALL HAVING count(*) > 1 ORDER BY 1 LIMIT 1",
        )
        if repeat is not None:
            first, last, *values = repeat
            raise InputError(
                locate(last),
                ", ".join(f"{key}={value!r}" for key, value in zip(self.keys, values, strict=True)),
                f"one row for each group ({locate(first)} has the same keys); to spread a group over several rows, use "
                "one row for each sample",
            )

    def _check_texts(self, table: pa.Table, locate: Callable[[int], str]) -> None:
        bad = table.filter(pc.is_valid(table.column(_BAD)))
        if bad.num_rows:
            entry = bad.column(_BAD)[0].as_py()
            kind = _KIND_NAMES[entry["kind"].removesuffix("[]")]
            raise InputError(
                f"{locate(bad.column(ROW)[0].as_py())}, column {entry['name']}",
                entry["text"],
                f"a list: {kind}" if entry["kind"].endswith("[]") else kind,
            )


def connect() -> Any:
    """Opens a connection to an empty in-memory database."""
    import duckdb

    return duckdb.connect(
        config={"memory_limit": MEMORY_LIMIT, "threads": THREADS, "autoinstall_known_extensions": False}
    )


def query_text(path: Path, keys: tuple[str, ...], weights: str | None) -> tuple[int, GroupingQuery]:
    """Number of rows and grouping query of a CSV or JSON-lines file; types are determined by column names. InputError if
    the file is damaged, has no rows, or lacks a column."""
    is_csv = path.suffix == ".csv"
    names = _csv_names(path) if is_csv else candidate_columns(keys, weights)
    kinds = ", ".join(f"{_literal(name)}: '{'VARCHAR' if is_csv else 'JSON'}'" for name in names)
    if is_csv:
        relation = (
            f"read_csv({path_literal(path)}, auto_detect = false, columns = {{{kinds}}}, header = true, delim = ',', "
            f"quote = '\"', escape = '\"', allow_quoted_nulls = false, max_line_size = {MAX_LINE_BYTES})"
        )
    else:
        relation = (
            f"read_json({path_literal(path)}, format = 'newline_delimited', columns = {{{kinds}}}, "
            f"maximum_object_size = {MAX_LINE_BYTES})"
        )
    connection = connect()
    # A column without any value is treated as missing.
    counts = first_row(
        path,
        connection,
        f"SELECT count(*), {', '.join(f'count({quoted(name)})' for name in names)} FROM {relation}",
    )
    assert counts is not None
    num_rows, *filled = counts
    if num_rows == 0:
        raise InputError(path.name, "no rows", "at least one row")
    names = [name for name, count in zip(names, filled, strict=True) if count]
    check_columns(names, path, keys, weights)
    text = "nullif(trim({}), '')" if is_csv else "CAST({} AS VARCHAR)"
    texts = {name: text.format(quoted(name)) for name in used_columns(names, keys, weights)}
    length = texts["output_tokens"]
    first = first_row(path, connection, f"SELECT {length} FROM {relation} WHERE {length} IS NOT NULL LIMIT 1")
    lists = first is not None and first[0].startswith("[")
    listable = _LISTABLE | ({weights: "DOUBLE"} if weights else {})
    types = _NUMBERS | {name: kind + "[]" * lists for name, kind in listable.items()}
    columns, bad = {}, []
    for name, text in texts.items():
        if name not in types:
            columns[name] = quoted(name) if is_csv else f"{quoted(name)}->>'$'"
            continue
        kind = types[name]
        # A cast to BIGINT would round 7.5; with a comma instead of the point it fails.
        literal = f"replace({text}, '.', ',')" if kind == "BIGINT" else text
        if not kind.startswith("BOOLEAN"):  # DuckDB also reads 1_000 and 0x10
            literal = f"translate({literal}, '_xX', '???')"
        columns[name] = value = f"TRY_CAST({literal} AS {kind})"
        has_bad_entry = f" OR list_count({value}) < len({value})" if kind.endswith("[]") else ""
        bad.append(
            f"WHEN {text} IS NOT NULL AND ({value} IS NULL{has_bad_entry}) "
            f"THEN {{'name': {_literal(name)}, 'kind': '{kind}', 'text': {text}}}"
        )
    columns[_BAD] = f"CASE {' '.join(bad)} END"
    return num_rows, GroupingQuery(path, connection, relation, keys, lists, columns)


def first_row(path: Path, connection: Any, query: str) -> tuple[Any, ...] | None:
    """First row of a query's result; None if it is empty."""
    with database_errors(path):
        row: tuple[Any, ...] | None = connection.execute(query).fetchone()
        return row


@contextmanager
def database_errors(path: Path) -> Iterator[None]:
    """Converts exceptions raised by DuckDB, directly or through Arrow, to errors that name the file and the problem."""
    import duckdb

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
                f"out: cannot group {path.name} with {MEMORY_LIMIT} of memory and the disk ({lines[0]}); a file with "
                "one row for each group needs no grouping"
            ) from error
        if path.suffix in (".jsonl", ".ndjson"):
            _check_json_lines(path)
        raise InputError("samples", str(path), f"an undamaged file ({' '.join(lines[:2])})") from error


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def path_literal(path: Path) -> str:
    return _literal(glob.escape(str(path)))


def _csv_names(path: Path) -> list[str]:
    """Column names of a CSV file."""
    with (
        open(path, encoding="utf-8-sig", errors="replace", newline="") as stream,
        readable(path, "samples", "CSV"),
    ):
        names = next(csv.reader([stream.readline(MAX_LINE_BYTES)]), [])
    if not names:
        raise InputError(path.name, "no rows", "a line of column names and at least one row")
    require_unique(names, path.name)
    return names


def _check_json_lines(path: Path) -> None:
    """Raises `InputError` for the first invalid line; DuckDB's own line numbers can differ."""
    with open(path, "rb") as stream:
        for number, line in enumerate(iter(lambda: stream.readline(MAX_LINE_BYTES), b""), start=1):
            try:
                parse_json(line if line.strip() else b"{}")
            except ValueError as error:
                where = f"{path.name}, line {number}"
                allowed = f"one JSON object of up to {MAX_LINE_BYTES} bytes ({error})"
                raise InputError(where, line[:80], allowed) from error
