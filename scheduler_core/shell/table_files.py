"""Readers of user tables: Parquet, CSV, JSON lines, a JSON array or text. An invalid file is always an `InputError`.

`file_rows` never loads a whole file into memory. Parquet needs pyarrow.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from scheduler_core.errors import InputError, MissingExtraError, first_line
from scheduler_core.shell.files import existing_file
from scheduler_core.shell.json_text import parse_json, replace_lone_surrogates

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

#: Number of a row in its file (see `file_rows`), and its values by column.
Row = tuple[int, Mapping[str, Any]]
_MaybeRow = tuple[int, Mapping[str, Any] | InputError]
SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".parquet", ".txt")
_BATCH_ROWS = 1024
_CHUNK_CHARACTERS = 1 << 20
_SPACE = re.compile(r"\s*")
#: Bytes that are not UTF-8, as `surrogateescape` decodes them; no valid text has these characters.
_UNDECODED = re.compile("[\udc80-\udcff]")
# Read-ahead of a streamed column, in bytes; without it Arrow loads a whole column of a row group.
BUFFER_BYTES = 1 << 20
#: Newest readable version of each schema. Files have the metadata `tailcast.schema` = `NAME/VERSION`.
SCHEMA_VERSIONS: Mapping[str, int] = {"samples": 2, "fits": 2, "trace": 1}


def import_pyarrow() -> tuple[Any, Any]:
    """(pyarrow, pyarrow.parquet). `MissingExtraError` if pyarrow is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError("pyarrow", "sim") from error
    return pyarrow, pyarrow.parquet


@contextlib.contextmanager
def readable(path: str | Path, field: str, kind: str) -> Iterator[None]:
    """Converts read errors of Arrow, gzip and csv into an `InputError` that names `field` and `kind`."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        if not (_is_arrows(error) or isinstance(error, _READ_ERRORS)):
            raise
        raise InputError(field, str(path), f"a whole {kind} file ({first_line(error)})") from error


@contextlib.contextmanager
def convertible(where: str) -> Iterator[None]:
    """Converts errors of Arrow in the conversion of columns into an `InputError` that names `where`."""
    try:
        yield
    except Exception as error:
        if not (_is_arrows(error) or isinstance(error, UnicodeError | OverflowError)):
            raise
        raise InputError(f"{where}: columns", first_line(error), "values of the documented types") from error


_READ_ERRORS = (OSError, EOFError, zlib.error, csv.Error, UnicodeDecodeError)


def _is_arrows(error: Exception) -> bool:
    """Whether Arrow raised the error, without importing it. Raises KeyboardInterrupt for Ctrl-C in Arrow."""
    if type(error).__name__ == "ArrowCancelled":
        raise KeyboardInterrupt from error
    return type(error).__module__.startswith("pyarrow")


def read_parquet(path: str | Path, field: str) -> pa.Table:
    """A whole Parquet file; raises as `open_parquet`."""
    with open_parquet(path, field) as file, readable(path, field, "Parquet"):
        return file.read()


def open_parquet(path: str | Path, field: str) -> pq.ParquetFile:
    """Opens a Parquet file to read in parts; reads only its footer. `InputError`, naming the option `field`,
    if the file is missing, empty, truncated, not Parquet, has a repeated column name, or its schema is newer
    than this version of tailcast supports."""
    file = existing_file(path, field)
    _, pq = import_pyarrow()
    with readable(path, field, "Parquet"):
        parquet = pq.ParquetFile(file, buffer_size=BUFFER_BYTES, pre_buffer=False)
        schema = parquet.schema_arrow
    require_unique(schema.names, file.name)
    require_known_schema(schema, file.name)
    return parquet


def require_known_schema(schema: pa.Schema, where: str) -> None:
    """Raises `InputError`, naming `where`, if the metadata declare a newer version of a tailcast schema."""
    label = (schema.metadata or {}).get(b"tailcast.schema", b"").decode(errors="replace")
    name, _, version = label.partition("/")
    newest = SCHEMA_VERSIONS.get(name)
    if newest is not None and not (
        version.isascii() and version.isdecimal() and 1 <= int(version[:9]) <= newest
    ):
        raise InputError(f"{where}: schema", label, f"{name}/{newest} or older; a newer tailcast wrote it")


def require_unique(names: Iterable[str], where: str) -> None:
    """Raises `InputError`, naming `where`, if a column name is repeated."""
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise InputError(f"{where}: columns", repeated[0], "each name once")


def require_columns(table: pa.Table, names: list[str], where: str) -> None:
    """Raises `InputError`, naming `where`, unless the table has all columns `names`."""
    missing = [name for name in names if name not in table.column_names]
    if missing:
        raise InputError(where, table.column_names, f"also {', '.join(missing)}")


def file_suffix(path: Path) -> str:
    """Suffix that determines the format; `.csv` for `name.csv.gz`."""
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def file_rows(
    path: str | Path,
    field: str,
    columns: Sequence[str] | None = None,
    *,
    objects: bool = False,
    on_bad_row: Callable[[int, InputError], None] | None = None,
) -> Iterator[Row]:
    """Yields (number of the row, values by column); lines of text become the column `prompt`. `InputError` if
    the file cannot be read, or a row is invalid.

    Numbers start at 1: lines of JSONL, CSV (the header is 1) and text, elements of an array, rows of Parquet. Text
    formats may be gzipped (`.gz`). `columns` limits the columns of a Parquet file; None: all. `objects`: a `.json` file may
    also hold objects that are in no array, such as a single one. A `.jsonl` file with JSON over several lines is read like a
    `.json` file. `on_bad_row` is called with the number and error of an invalid row of JSON or CSV; None: the error is raised.
    """
    file = existing_file(path, field)
    suffix = file_suffix(file)
    if suffix not in SUFFIXES:
        raise InputError(field, str(path), "a file ending in " + ", ".join(SUFFIXES))
    if suffix == ".parquet":
        yield from _parquet_rows(file, field, columns)
        return
    read_objects = partial(_array_rows, objects=objects)
    readers: dict[str, Callable[[TextIO, str], Iterator[_MaybeRow]]] = {
        ".csv": _csv_rows,
        ".json": read_objects,
        ".txt": _text_rows,
    }
    kind = "gzip" if file.suffix == ".gz" else "text"
    errors = "strict" if on_bad_row is None else "surrogateescape"
    with readable(path, field, kind), _text(file, errors) as stream:
        try:
            if suffix not in readers:
                readers[suffix] = read_objects if _is_indented(stream) else _json_lines
            for number, row in readers[suffix](stream, file.name):
                if not isinstance(row, InputError):
                    yield number, row
                elif on_bad_row is None:
                    raise row
                else:
                    on_bad_row(number, row)
        except UnicodeDecodeError as error:
            raise InputError(field, f"{path} (byte {error.start})", "text in UTF-8") from error


def _text(file: Path, errors: str) -> TextIO:
    if file.suffix == ".gz":
        return io.TextIOWrapper(gzip.open(file), encoding="utf-8-sig", errors=errors, newline="")
    return open(file, encoding="utf-8-sig", errors=errors, newline="")


def _not_utf8(name: str, number: int, text: str) -> InputError | None:
    """The error of a row whose text has bytes that are not UTF-8."""
    wrong = _UNDECODED.search(text)
    if wrong is None:
        return None
    byte = ord(wrong[0]) - 0xDC00
    return InputError(f"{name} row {number}", f"the byte 0x{byte:x}", "text in UTF-8")


def _is_indented(stream: TextIO) -> bool:
    """Whether a stream begins with JSON over several lines, such as the spans of OpenTelemetry's console exporter."""
    lines = (line for each in stream if (line := each.strip()))
    first, second = next(lines, ""), next(lines, "")
    stream.seek(0)
    return (first == "{" and second.startswith('"')) or (first == "[" and second.startswith(("{", "[")))


def _json_lines(stream: TextIO, name: str) -> Iterator[_MaybeRow]:
    for number, line in enumerate(stream, start=1):
        if (bad := _not_utf8(name, number, line)) is not None:
            yield number, bad
        elif line.strip():
            try:
                row = parse_json(line)
                hint = " (an array belongs in a .json file)" if isinstance(row, list) else ""
                problem = "" if isinstance(row, dict) else f"one JSON object{hint}"
            except ValueError as error:
                problem = f"one JSON object ({_reason(error)})"
            yield number, InputError(f"{name} row {number}", line.strip(), problem) if problem else row


def _reason(error: ValueError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error)


def _array_rows(stream: TextIO, name: str, *, objects: bool = False) -> Iterator[_MaybeRow]:
    """Elements of one JSON array, or with `objects` consecutive JSON objects, decoded incrementally. A list of objects
    becomes the column `messages`."""
    decoder = json.JSONDecoder()
    text, position, number = "", 0, 0

    def peek() -> str:
        """The next character that is no white space; "" at the end."""
        nonlocal text, position
        while True:
            position = _SPACE.match(text, position).end()  # type: ignore[union-attr]
            if position < len(text):
                return text[position]
            text, position = stream.read(_CHUNK_CHARACTERS), 0
            if not text:
                return ""

    if peek() != "[" and not (objects and peek() == "{"):
        allowed = "a JSON array of objects, or JSON lines in a .jsonl file"
        raise InputError(f"{name} row 1", peek(), allowed)
    is_array = peek() == "["
    position += is_array
    while peek() != ("]" if is_array else ""):
        if is_array and number and peek() == ",":
            position += 1
            peek()
        elif is_array and number and peek():
            raise InputError(f"{name} after row {number}", peek(), "a comma, or ] at the end of the array")
        if not peek():
            raise InputError(name, "the end of the file", "a complete JSON array")
        number += 1
        while True:  # an object is complete only with its last brace
            try:
                value, end = decoder.raw_decode(text, position)
                break
            except (ValueError, RecursionError) as error:
                unparsed = text[position:]
                is_deep = isinstance(error, RecursionError)
                more = "" if is_deep else stream.read(max(_CHUNK_CHARACTERS, len(unparsed)))
                if not more:
                    allowed = f"one JSON object ({_reason(error)})"
                    raise InputError(f"{name} row {number}", unparsed[:120], allowed) from error
                text, position = unparsed + more, 0
        bad = _not_utf8(name, number, text[position:end])
        value = replace_lone_surrogates(value, text[position:end])
        position = end
        if bad is not None:
            yield number, bad
            continue
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            value = {"messages": value}
        is_row = isinstance(value, dict)
        yield number, value if is_row else InputError(f"{name} row {number}", value, "one JSON object")
    position += is_array
    if peek():
        raise InputError(f"{name} after row {number}", peek(), "nothing after the JSON array")


def _csv_rows(stream: TextIO, name: str) -> Iterator[_MaybeRow]:
    reader = csv.DictReader(stream, strict=True)
    if (bad := _not_utf8(name, 1, "".join(reader.fieldnames or ()))) is not None:
        raise bad
    require_unique(reader.fieldnames or (), name)
    while True:
        try:
            row = next(reader, None)
        except csv.Error as error:
            number = reader.line_num
            yield number, InputError(f"{name} row {number}", str(error), "a CSV row")
            continue
        if row is None:
            return
        number = reader.line_num
        if None in row or None in row.values():
            yield number, InputError(f"{name} row {number}", row, "as many values as headings")
        elif (bad := _not_utf8(name, number, "".join(row.values()))) is not None:
            yield number, bad
        else:
            yield number, row


def _text_rows(stream: TextIO, name: str) -> Iterator[_MaybeRow]:
    for number, line in enumerate(stream, start=1):
        if (bad := _not_utf8(name, number, line)) is not None:
            yield number, bad
        elif line.strip():
            yield number, {"prompt": line.rstrip("\r\n")}


def _parquet_rows(file: Path, field: str, columns: Sequence[str] | None) -> Iterator[Row]:
    number = 0
    with readable(file, field, "Parquet"):
        parquet = open_parquet(file, field)
        names = parquet.schema_arrow.names
        names = [name for name in names if columns is None or name in columns]
        for batch in parquet.iter_batches(batch_size=_BATCH_ROWS, columns=names):
            for row in batch.to_pylist():
                number += 1
                yield number, row
