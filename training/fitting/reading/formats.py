"""Opening a file of answer lengths, whatever its format, as a stream of Arrow record batches.

| format | known by | read as |
|---|---|---|
| Parquet | content | row groups in parts |
| JSON lines | suffix .jsonl, .ndjson | see `text_formats` |
| CSV | suffix .csv | see `text_formats` |
| folder saved by `datasets` | state.json | its Arrow files in order |
| folder of Parquet files | suffix .parquet | files in order of name |

Only the columns that are used are read. Memory does not grow with the file. Types are plain: dictionaries become
their values, large and view types the ordinary ones.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa

from data_gen.tables import open_parquet, readable
from scheduler_core.errors import InputError
from scheduler_core.files import existing_file
from scheduler_core.json_text import parse_json
from training.fitting.reading.answers import is_list
from training.fitting.reading.table import check_columns, used_columns
from training.fitting.reading.text_formats import open_csv, open_jsonl

ALLOWED = (
    "a Parquet, .jsonl or .csv file, a folder saved by datasets' save_to_disk, or a folder of .parquet files"
)
PARQUET_MAGIC = b"PAR1"
#: A batch of Parquet has so many bytes, by what the file says of them, and at most so many rows.
BATCH_BYTES = 2 << 20
BATCH_ROWS = 32_768

Batches = Callable[[Sequence[str]], Iterator[pa.RecordBatch]]


@dataclass(frozen=True, slots=True)
class SampleFile:
    """An opened file or folder of answer lengths.

    Attributes:
        path: As given.
        files: The files behind it, in order.
        schema: Of the columns that are used.
        num_rows: None if only reading to the end can tell.
        starts: Row at which each of `files` begins, if errors name them one by one; else empty.
        read: Streams the named columns as the file has them.
    """

    path: Path
    files: tuple[Path, ...]
    schema: pa.Schema
    num_rows: int | None
    read: Batches
    starts: tuple[int, ...] = ()

    @property
    def lists(self) -> bool:
        """Whether a row is a group with a list of answers, else it is one answer."""
        return is_list(self.schema.field("output_tokens").type)

    @property
    def num_bytes(self) -> int:
        """Size on disk."""
        return sum(file.stat().st_size for file in self.files)

    def has_rows(self, file: Path) -> bool:
        """Whether one of `files` has any row, as far as `starts` can tell."""
        if not self.starts or self.num_rows is None:
            return True
        ends = (*self.starts[1:], self.num_rows)
        number = self.files.index(file)
        return ends[number] > self.starts[number]

    def place(self, row: int) -> str:
        """A row, counted from 0 over the whole input, as messages name it."""
        if not self.starts:
            return f"{self.path.name}, row {row}"
        number = bisect_right(self.starts, row) - 1
        return f"{self.path.name}/{self.files[number].name}, row {row - self.starts[number]}"

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """All rows in order, in batches with plain types.

        Args:
            columns: Only these; None: all that are used.

        Raises:
            InputError: The file is damaged, a text is not UTF-8, or a value has another type than its column.
        """
        schema = self.schema if columns is None else pa.schema([self.schema.field(name) for name in columns])
        row = 0
        for batch in self.read(schema.names):
            arrays = [_plain(batch.column(field.name), field, self.path, self.place, row) for field in schema]
            if batch.num_rows:
                yield pa.record_batch(arrays, schema=schema)
            row += batch.num_rows


def open_samples(
    path: str | Path,
    *,
    keys: Sequence[str] = ("prompt_id", "model"),
    weights: str | None = None,
    field: str = "samples",
) -> SampleFile:
    """Opens a file or folder of answer lengths; see the table above.

    Args:
        path: The file or folder.
        keys: Columns that name a group.
        weights: Column of weights, None: none.
        field: Name of the option that gave the path, for messages.

    Raises:
        InputError: It is missing, empty, of no known format, damaged, or lacks a column.
    """
    opened = _open(Path(path), keys, weights, field)
    for key in keys:
        kind = opened.schema.field(key).type
        if pa.types.is_nested(kind):
            raise InputError(f"{opened.path.name}, column {key}", str(kind), "plain values to group by")
    return opened


def _open(path: Path, keys: Sequence[str], weights: str | None, field: str) -> SampleFile:
    def choose(names: Sequence[str]) -> list[str]:
        check_columns(names, path, keys, weights)
        return used_columns(names, keys, weights)

    if path.is_dir():
        return _open_folder(path, choose, field)
    file = existing_file(path, field)
    with open(file, "rb") as stream:
        magic = stream.read(len(PARQUET_MAGIC))
    if magic == PARQUET_MAGIC or file.suffix in (".parquet", ".pq"):
        return _open_parquet(path, (file,), choose, field)
    texts = {".jsonl": open_jsonl, ".ndjson": open_jsonl, ".csv": open_csv}
    if file.suffix not in texts:
        raise InputError(field, str(path), ALLOWED)
    schema, read = texts[file.suffix](file, choose, weights)
    return SampleFile(path, (file,), schema, None, read)


def _open_folder(path: Path, choose: Callable[[Sequence[str]], list[str]], field: str) -> SampleFile:
    if (path / "dataset_dict.json").is_file():
        splits = _json(path / "dataset_dict.json", field).get("splits", [])
        if not isinstance(splits, list) or len(splits) != 1 or not isinstance(splits[0], str):
            named = ", ".join(str(path / str(split)) for split in splits) if isinstance(splits, list) else ""
            raise InputError(field, str(path), f"one split of this dataset: {named or 'it has none'}")
        path = path / splits[0]
    if (path / "state.json").is_file():
        return _open_dataset(path, choose, field)
    files = sorted(entry for entry in path.glob("*.parquet") if entry.name[0] not in "._")
    if not files:
        raise InputError(field, str(path), ALLOWED)
    return _open_parquet(path, tuple(files), choose, field)


def _json(path: Path, field: str) -> dict[str, Any]:
    try:
        content = parse_json(path.read_bytes())
    except ValueError as error:
        raise InputError(field, str(path), f"JSON as datasets writes it ({error})") from error
    if not isinstance(content, dict):
        raise InputError(field, str(path), "a JSON object as datasets writes it")
    return content


def _open_parquet(
    path: Path, files: tuple[Path, ...], choose: Callable[[Sequence[str]], list[str]], field: str
) -> SampleFile:
    schemas, counts, size = [], [], 0
    for file in files:
        with open_parquet(file, field) as parquet, readable(file, field, "Parquet"):
            schemas.append(parquet.schema_arrow)
            counts.append(parquet.metadata.num_rows)
            groups = range(parquet.num_row_groups)
            size += sum(parquet.metadata.row_group(group).total_byte_size for group in groups)
    schema = _plain_schema(schemas[0], choose(schemas[0].names))
    for file, other in zip(files, schemas, strict=True):
        _check_same(file, schema, other, choose)
    if sum(counts) == 0:
        raise InputError(path.name, "no rows", "at least one row")
    rows = min(max(BATCH_BYTES * sum(counts) // max(size, 1), 1), BATCH_ROWS)

    def read(columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        for file in files:
            with open_parquet(file, field) as parquet, readable(file, field, "Parquet"):
                yield from parquet.iter_batches(batch_size=rows, columns=list(columns), use_threads=False)

    starts = tuple(accumulate(counts[:-1], initial=0)) if path.is_dir() else ()
    return SampleFile(path, files, schema, sum(counts), read, starts)


def _check_same(
    file: Path, schema: pa.Schema, other: pa.Schema, choose: Callable[[Sequence[str]], list[str]]
) -> None:
    found = _plain_schema(other, choose(other.names))
    for name in dict.fromkeys((*schema.names, *found.names)):
        here = found.field(name).type if name in found.names else "no such column"
        there = schema.field(name).type if name in schema.names else "no such column"
        if here != there:
            raise InputError(
                f"{file.parent.name}/{file.name}, column {name}", str(here), f"{there}, as in the first file"
            )


def _open_dataset(path: Path, choose: Callable[[Sequence[str]], list[str]], field: str) -> SampleFile:
    entries = _json(path / "state.json", field).get("_data_files", [])
    if not isinstance(entries, list) or not all(isinstance(e, dict) and "filename" in e for e in entries):
        raise InputError(field, str(path / "state.json"), "_data_files as datasets writes them")
    files = tuple(existing_file(path / str(entry["filename"]), field) for entry in entries)
    if not files:
        raise InputError(field, str(path), "a dataset with at least one row")
    num_rows = 0
    for file in files:
        # Mapped, so that counting rows reads no more than the headers.
        with (
            readable(file, field, "Arrow"),
            pa.memory_map(str(file)) as stream,
            pa.ipc.open_stream(stream) as arrow,
        ):
            whole = arrow.schema
            num_rows += sum(batch.num_rows for batch in arrow)
    if num_rows == 0:
        raise InputError(path.name, "no rows", "at least one row")

    def read(columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        for file in files:
            with (
                readable(file, field, "Arrow"),
                pa.OSFile(str(file)) as stream,
                pa.ipc.open_stream(stream) as arrow,
            ):
                for batch in arrow:
                    yield batch.select(list(columns))

    return SampleFile(path, files, _plain_schema(whole, choose(whole.names)), num_rows, read)


def _plain_schema(schema: pa.Schema, names: Sequence[str]) -> pa.Schema:
    return pa.schema([pa.field(name, _plain_type(schema.field(name).type)) for name in names])


def _plain_type(kind: pa.DataType) -> pa.DataType:
    types = pa.types
    if types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if types.is_large_string(kind) or types.is_string_view(kind):
        return pa.string()
    if (
        is_list(kind)
        or types.is_fixed_size_list(kind)
        or types.is_list_view(kind)
        or types.is_large_list_view(kind)
    ):
        return pa.list_(_plain_type(kind.value_type))
    return kind


def _plain(array: Any, field: pa.Field, path: Path, place: Callable[[int], str], first_row: int) -> pa.Array:
    if array.type != field.type:
        array = array.cast(field.type)
    try:
        array.validate(full=True)
    except pa.ArrowInvalid as error:
        for row, value in enumerate(array):
            try:
                value.as_py()
            except UnicodeDecodeError as wrong:
                where = f"{place(first_row + row)}, column {field.name}"
                raise InputError(where, wrong.object[:40], "text in UTF-8") from error
        raise InputError(f"{path.name}, column {field.name}", str(error), "values that are whole") from error
    return array
