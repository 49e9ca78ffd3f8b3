"""JSON lines and CSV with answer lengths, streamed by Arrow.

Neither format says the type of a column, so it follows from the column's name: temperature and weights are numbers,
max_tokens and prompt_tokens whole numbers, finish_reason, prompt, category and dataset texts; output_tokens and
finished are lists if they are in the first row. Other columns to group by have the type of their first values in JSON
lines and are texts in CSV. A column of JSON lines must appear within the first `PEEK_ROWS` rows or not at all. In CSV a
list is written as in JSON, "[12, 40, 7]", and an empty field of a number column is a missing value.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.json as pa_json

from data_gen.tables import readable
from scheduler_core.errors import InputError
from scheduler_core.json_text import parse_json

PEEK_ROWS = 1000
#: Bytes that Arrow parses at a time; no line may be longer.
BLOCK_BYTES = 4 << 20
KNOWN = {
    "prompt": pa.string(),
    "category": pa.string(),
    "dataset": pa.string(),
    "finish_reason": pa.string(),
    "prompt_tokens": pa.int64(),
    "max_tokens": pa.int64(),
    "temperature": pa.float64(),
}
LISTABLE = {"output_tokens": pa.float64(), "finished": pa.bool_()}

Batches = Callable[[Sequence[str]], Iterator[pa.RecordBatch]]
Choose = Callable[[Sequence[str]], list[str]]


def open_jsonl(path: Path, choose: Choose, weights: str | None) -> tuple[pa.Schema, Batches]:
    """Schema and reader of JSON lines.

    Args:
        path: The file.
        choose: Picks the columns to read out of those there are.
        weights: Column of weights, None: none.

    Raises:
        InputError: A line is no JSON object, or a value has another type than its column; names the line.
    """
    first = _first_objects(path)
    names = list(dict.fromkeys(name for row in first for name in row))
    chosen = choose(names)
    schema = pa.schema([pa.field(name, _json_type(name, first, path, weights)) for name in chosen])
    lists = pa.types.is_list(schema.field("output_tokens").type)
    # Columns that must not appear later than in the rows peeked at are read too, to notice them.
    late = [name for name in (*LISTABLE, *KNOWN) if name not in names]
    hidden = pa.schema([pa.field(name, _known_type(name, lists)) for name in late])

    def read(columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        wanted = [schema.field(name) for name in columns]
        options = pa_json.ParseOptions(
            explicit_schema=pa.schema([*wanted, *hidden]), unexpected_field_behavior="ignore"
        )
        row = 0
        try:
            with closing(
                pa_json.open_json(
                    path,
                    read_options=pa_json.ReadOptions(use_threads=False, block_size=BLOCK_BYTES),
                    parse_options=options,
                )
            ) as reader:
                for batch in reader:
                    _check_late(batch, late, path, row)
                    yield batch.select(list(columns))
                    row += batch.num_rows
        except pa.ArrowInvalid as error:
            raise _json_error(path, pa.schema([*wanted, *hidden]), error) from error

    return schema, read


def _first_objects(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    with open(path, "rb") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                found.append(_json_object(path, number, line))
            if len(found) >= PEEK_ROWS or stream.tell() > BLOCK_BYTES:
                break
    if not found:
        raise InputError(path.name, "no rows", "at least one row")
    return found


def _json_object(path: Path, number: int, line: bytes) -> dict[str, Any]:
    where = f"{path.name}, line {number}"
    try:
        row = parse_json(line)
    except UnicodeDecodeError as error:
        raise InputError(where, line[:40], "text in UTF-8") from error
    except ValueError as error:
        raise InputError(where, line.decode().strip(), f"one JSON object ({error})") from error
    if not isinstance(row, dict):
        raise InputError(where, row, "one JSON object")
    return row


def _known_type(name: str, lists: bool) -> pa.DataType:
    kind = LISTABLE.get(name)
    if kind is None:
        return KNOWN[name]
    return pa.list_(kind) if lists else kind


def _json_type(name: str, first: list[dict[str, Any]], path: Path, weights: str | None) -> pa.DataType:
    values = [row[name] for row in first if row.get(name) is not None]
    listed = bool(values) and isinstance(values[0], list)
    if name in LISTABLE:
        return _known_type(name, listed)
    if name == weights:
        return pa.list_(pa.float64()) if listed else pa.float64()
    if name in KNOWN:
        return KNOWN[name]
    kinds = {type(value) for value in values}
    types = {str: pa.string(), bool: pa.bool_(), int: pa.int64(), float: pa.float64()}
    if kinds == {int, float}:
        return pa.float64()
    if not kinds:
        return pa.string()
    kind = next(iter(kinds))
    if len(kinds) > 1 or kind not in types:
        shown = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise InputError(f"{path.name}, column {name}", shown, "values of one type, text or number")
    return types[kind]


def _check_late(batch: pa.RecordBatch, late: Sequence[str], path: Path, first_row: int) -> None:
    for name in late:
        column = batch.column(name)
        if column.null_count < len(column):
            row = pc.index(column.is_valid(), True).as_py()
            raise InputError(
                f"{path.name}, row {first_row + row}, column {name}",
                column[row].as_py(),
                f"columns that appear within the first {PEEK_ROWS} rows, if only as null",
            )


def _json_error(path: Path, schema: pa.Schema, error: pa.ArrowInvalid) -> InputError:
    """Reads again, line by line, to name what Arrow could not parse."""
    with open(path, "rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            if len(line) > BLOCK_BYTES:
                return InputError(f"{path.name}, line {number}", f"{len(line)} bytes", f"{BLOCK_BYTES} bytes")
            try:
                row = _json_object(path, number, line)
            except InputError as found:
                return found
            for field in schema:
                if not _fits(row.get(field.name), field.type):
                    where = f"{path.name}, line {number}, column {field.name}"
                    return InputError(where, row[field.name], _in_words(field.type))
    return InputError(path.name, str(error), "one JSON object in each line, each name once")


def _fits(value: Any, kind: pa.DataType) -> bool:
    if value is None:
        return True
    if pa.types.is_list(kind):
        return isinstance(value, list) and all(_fits(entry, kind.value_type) for entry in value)
    if pa.types.is_boolean(kind) or isinstance(value, bool):
        return pa.types.is_boolean(kind) and isinstance(value, bool)
    if pa.types.is_integer(kind):
        return isinstance(value, int) and -(2**63) <= value < 2**63
    if pa.types.is_floating(kind):
        return isinstance(value, int | float)
    return isinstance(value, str)


def _in_words(kind: pa.DataType) -> str:
    if pa.types.is_list(kind):
        return f"a list: {_in_words(kind.value_type)}"
    if pa.types.is_boolean(kind):
        return "true or false"
    if pa.types.is_integer(kind):
        return "a whole number"
    return "a number" if pa.types.is_floating(kind) else "text"


def open_csv(path: Path, choose: Choose, weights: str | None) -> tuple[pa.Schema, Batches]:
    """Schema and reader of CSV; arguments and errors as of `open_jsonl`."""
    names, first = _csv_head(path)
    chosen = choose(names)
    repeated = [name for name in chosen if names.count(name) > 1]
    if repeated:
        raise InputError(f"{path.name}, columns", names, f"{repeated[0]} once")
    row = dict(zip(names, first, strict=False))
    schema = pa.schema([pa.field(name, _csv_type(name, row, weights)) for name in chosen])

    def read(columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        with (
            readable(path, "samples", "CSV"),
            closing(
                pa_csv.open_csv(
                    path,
                    read_options=pa_csv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES),
                    parse_options=pa_csv.ParseOptions(newlines_in_values=True),
                    convert_options=pa_csv.ConvertOptions(
                        column_types=dict.fromkeys(names, pa.string()), include_columns=list(columns)
                    ),
                )
            ) as reader,
        ):
            start = 0
            for batch in reader:
                typed = [_typed(batch.column(name), schema.field(name), path, start) for name in columns]
                yield pa.record_batch(typed, names=list(columns))
                start += batch.num_rows

    return schema, read


def _csv_head(path: Path) -> tuple[list[str], list[str]]:
    with open(path, "rb") as stream:
        head = stream.read(BLOCK_BYTES)
    try:
        # A character cut in two at the end of what was read is no error.
        text = head.decode("utf-8-sig", errors="strict" if len(head) < BLOCK_BYTES else "ignore")
    except UnicodeDecodeError as error:
        line = head.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{path.name}, line {line}", head[error.start : error.start + 10], "text in UTF-8"
        ) from error
    rows = csv.reader(io.StringIO(text, newline=""))
    try:
        names = next(rows, [])
        first = next((row for row in rows if row), None)
    except csv.Error as error:
        raise InputError(f"{path.name}, line {rows.line_num}", str(error), "CSV") from error
    if first is None:
        raise InputError(path.name, "no rows", "a line of column names and at least one row")
    return names, first


def _csv_type(name: str, first: dict[str, str], weights: str | None) -> pa.DataType:
    listed = first.get(name, "").lstrip().startswith("[")
    if name in LISTABLE:
        return _known_type(name, listed)
    if name == weights:
        return pa.list_(pa.float64()) if listed else pa.float64()
    return KNOWN.get(name, pa.string())


def _typed(column: Any, field: pa.Field, path: Path, first_row: int) -> Any:
    kind = field.type
    if pa.types.is_string(kind):
        return column
    trimmed = pc.utf8_trim_whitespace(column)
    try:
        return _parsed_lists(trimmed, kind) if pa.types.is_list(kind) else _parsed(trimmed, kind)
    except pa.ArrowInvalid as error:
        for row, text in enumerate(trimmed.to_pylist()):
            one = pa.array([text])
            try:
                _ = _parsed_lists(one, kind) if pa.types.is_list(kind) else _parsed(one, kind)
            except pa.ArrowInvalid:
                where = f"{path.name}, row {first_row + row}, column {field.name}"
                raise InputError(where, text, _in_words(kind)) from error
        raise


def _parsed(column: Any, kind: pa.DataType) -> Any:
    """Texts as values; empty ones are missing."""
    missing = pc.equal(column, "")
    return pc.if_else(missing, pa.scalar(None, pa.string()), column).cast(kind)


def _parsed_lists(column: Any, kind: pa.DataType) -> Any:
    """Texts such as "[1, 2]" as lists; empty texts are missing, entries "null" too."""
    missing = pc.equal(column, "")
    bracketed = pc.and_(pc.starts_with(column, "["), pc.ends_with(column, "]"))
    if not pc.all(pc.or_(missing, bracketed)).as_py():
        raise pa.ArrowInvalid("not a list")
    inside = pc.utf8_trim_whitespace(pc.utf8_slice_codeunits(column, 1, -1))
    inside = pc.if_else(missing, "", inside)
    lists = pc.split_pattern(inside, ",")
    entries = pc.utf8_trim_whitespace(pc.list_flatten(lists))
    counts = pc.if_else(pc.equal(inside, ""), 0, pc.list_value_length(lists))
    # An empty list is split into one empty text, which is no entry.
    empty = pc.equal(inside, "").take(pc.list_parent_indices(lists))
    entries = entries.filter(pc.invert(empty))
    entries = pc.if_else(pc.equal(entries, "null"), pa.scalar(None, pa.string()), entries)
    offsets = pa.concat_arrays([pa.array([0], pa.int64()), pc.cumulative_sum(counts).cast(pa.int64())])
    return pa.ListArray.from_arrays(
        offsets.cast(pa.int32()),
        entries.cast(kind.value_type),
        mask=missing if pc.any(missing).as_py() else None,
    )
