"""The one place where Parquet files are opened, so that a bad one is always the same clear error."""

from __future__ import annotations

import contextlib
import csv
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from scheduler_core.errors import InputError
from scheduler_core.files import existing_file

# Read-ahead of a streamed column, in bytes: without it a whole column of a row group is held.
BUFFER_BYTES = 1 << 20


#: Newest version of each schema `NAME/VERSION`, the metadata `tailcast.schema` of a file, that is read.
SCHEMA_VERSIONS: Mapping[str, int] = {"samples": 2, "fits": 2, "trace": 1}


@contextlib.contextmanager
def readable(path: str | Path, field: str, kind: str) -> Iterator[None]:
    """Turns what Arrow, gzip and csv raise while they read `path` into an `InputError` that names `field` and the `kind` of file."""
    try:
        yield
    except InputError:
        raise
    except pa.ArrowCancelled as error:
        raise KeyboardInterrupt from error
    except (pa.ArrowException, OSError, EOFError, zlib.error, csv.Error, UnicodeDecodeError) as error:
        detail = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(field, str(path), f"a whole {kind} file ({detail})") from error


@contextlib.contextmanager
def convertible(where: str) -> Iterator[None]:
    """Turns what Arrow raises while it converts columns into an `InputError` that names `where`."""
    try:
        yield
    except pa.ArrowCancelled as error:
        raise KeyboardInterrupt from error
    except (pa.ArrowException, UnicodeError, OverflowError) as error:
        detail = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(f"{where}: columns", detail, "values of the documented types") from error


def read_parquet(path: str | Path, field: str) -> pa.Table:
    """A whole Parquet file.

    Args:
        path: The file.
        field: Name of the option that gave the path, for messages.

    Raises:
        InputError: As `open_parquet`.
    """
    with open_parquet(path, field) as file, readable(path, field, "Parquet"):
        return file.read()


def open_parquet(path: str | Path, field: str) -> pq.ParquetFile:
    """A Parquet file to be read in parts; only its footer is read now.

    Args:
        path: The file.
        field: Name of the option that gave the path, for messages.

    Raises:
        InputError: It is missing, empty, truncated, no Parquet file, has two columns of one name, or is of a newer
            schema than this version of tailcast reads; the message names `field`.
    """
    file = existing_file(path, field)
    with readable(path, field, "Parquet"):
        parquet = pq.ParquetFile(file, buffer_size=BUFFER_BYTES, pre_buffer=False)
        schema = parquet.schema_arrow
    require_unique(schema.names, file.name)
    require_known_schema(schema, file.name)
    return parquet


def require_known_schema(schema: pa.Schema, where: str) -> None:
    """Raises `InputError`, naming `where`, if the metadata name a newer version of one of our schemas."""
    label = (schema.metadata or {}).get(b"tailcast.schema", b"").decode(errors="replace")
    name, _, version = label.partition("/")
    newest = SCHEMA_VERSIONS.get(name)
    if newest is not None and not (version.isdecimal() and 1 <= int(version[:9]) <= newest):
        raise InputError(f"{where}: schema", label, f"{name}/{newest} or older; a newer tailcast wrote it")


def require_unique(names: Iterable[str], where: str) -> None:
    """Raises `InputError`, naming `where`, if two columns have one name."""
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise InputError(f"{where}: columns", repeated[0], "each name once")


def require_columns(table: pa.Table, names: list[str], where: str) -> None:
    """Raises `InputError`, naming `where`, unless the table has all columns `names`."""
    missing = [name for name in names if name not in table.column_names]
    if missing:
        raise InputError(where, table.column_names, f"also {', '.join(missing)}")
