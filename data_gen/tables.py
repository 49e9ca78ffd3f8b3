"""The one place where Parquet files are opened, so that a bad one is always the same clear error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from scheduler_core.errors import InputError
from scheduler_core.files import existing_file

# Read-ahead of a streamed column, in bytes: without it a whole column of a row group is held.
BUFFER_BYTES = 1 << 20


@contextlib.contextmanager
def readable(path: str | Path, field: str, kind: str) -> Iterator[None]:
    """Turns what Arrow raises while it reads `path` into an `InputError` that names `field` and the `kind` of file."""
    try:
        yield
    except InputError:
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        detail = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(field, str(path), f"a whole {kind} file ({detail})") from error


def read_parquet(path: str | Path, field: str) -> pa.Table:
    """A whole Parquet file.

    Args:
        path: The file.
        field: Name of the option that gave the path, for messages.

    Raises:
        InputError: It is missing, empty, truncated or no Parquet file; the message names `field`.
    """
    file = existing_file(path, field)
    with readable(path, field, "Parquet"):
        return pq.read_table(file, partitioning=None)


def open_parquet(path: str | Path, field: str) -> pq.ParquetFile:
    """A Parquet file to be read in parts; only its footer is read now.

    Args:
        path: The file.
        field: Name of the option that gave the path, for messages.

    Raises:
        InputError: As `read_parquet`.
    """
    file = existing_file(path, field)
    with readable(path, field, "Parquet"):
        return pq.ParquetFile(file, buffer_size=BUFFER_BYTES, pre_buffer=False)


def require_columns(table: pa.Table, names: list[str], where: str) -> None:
    """Raises `InputError`, naming `where`, unless the table has all columns `names`."""
    missing = [name for name in names if name not in table.column_names]
    if missing:
        raise InputError(where, table.column_names, f"also {', '.join(missing)}")
