"""What importers yield: rows of some canonical columns with the numbers of the source's rows they come from."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from data_gen.samples import MESSAGES
from scheduler_core.errors import InputError

BATCH_ROWS = 8192
STOP, LENGTH, UNKNOWN, ERROR = "stop", "length", "unknown", "error"
MAX_TOKENS = 2**31 - 1
#: Times further from zero are no seconds: 3,000 years.
MAX_TIME_S = 1e11

#: Columns that importers may fill; `samples/2` and `trace/1` each take their part.
TYPES: Mapping[str, pa.DataType] = {
    "request_id": pa.string(),
    "arrival_s": pa.float64(),
    "tier": pa.int64(),
    "tenant": pa.string(),
    "prompt_id": pa.string(),
    "prompt": pa.string(),
    "messages": MESSAGES,
    "category": pa.string(),
    "dataset": pa.string(),
    "model": pa.string(),
    "temperature": pa.float64(),
    "top_p": pa.float64(),
    "sample_index": pa.int64(),
    "max_tokens": pa.int64(),
    "prompt_tokens": pa.int64(),
    "output_tokens": pa.int64(),
    "finish_reason": pa.string(),
    "error": pa.string(),
    "ttft_s": pa.float64(),
    "total_s": pa.float64(),
    "run_id": pa.string(),
}


@dataclass(frozen=True, slots=True)
class Batch:
    """Some rows.

    Attributes:
        columns: Canonical columns (`TYPES`), each [rows]; output_tokens always, finish_reason "stop", "length",
            "unknown" or "error".
        rows: Number of the source's row that each comes from, as an editor or `file_rows` counts, [rows].
        left_out: Rows of the source that the importer skipped, by reason.
    """

    columns: dict[str, pa.Array]
    rows: NDArray[np.int64]
    left_out: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of_left_out(cls, left_out: Mapping[str, int]) -> Batch:
        """A batch without rows that reports skipped ones."""
        return cls({"output_tokens": pa.array([], pa.int64())}, np.empty(0, dtype=np.int64), left_out)

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, row: int, column: str, name: str) -> str:
        """Place of a value, for messages."""
        return f"{name} row {self.rows[row]} column {column}"

    def typed(self, name: str) -> Batch:
        """The batch with columns of the types `TYPES`; numbers become text where text is due.

        Raises:
            InputError: A column has values of another kind, lists or booleans for instance.
        """
        columns = {}
        for column, array in self.columns.items():
            kind = TYPES[column]
            plain = pa.types.is_null(array.type) or not (
                pa.types.is_nested(array.type) or pa.types.is_boolean(array.type)
            )
            if array.type != kind and (pa.types.is_nested(kind) or not plain):
                raise InputError(f"{name} column {column}", str(array.type), str(kind))
            columns[column] = array.cast(kind)
        return Batch(columns, self.rows, self.left_out)

    def filter(self, kept: NDArray[np.bool_]) -> Batch:
        """The rows where `kept` is true."""
        mask = pa.array(kept)
        return Batch({name: column.filter(mask) for name, column in self.columns.items()}, self.rows[kept])

    def constant(self, name: str, value: object) -> pa.Array:
        """A column that has one value in all rows."""
        return pa.repeat(pa.scalar(value, TYPES[name]), len(self))


def batches_of(rows: Iterable[tuple[int, Mapping[str, Any]]]) -> Iterator[Batch]:
    """Batches from rows of canonical columns whose values already have their types."""
    stream = iter(rows)
    while taken := list(islice(stream, BATCH_ROWS)):
        names = [name for name in TYPES if any(name in row for _, row in taken)]
        columns = {name: pa.array([row.get(name) for _, row in taken], TYPES[name]) for name in names}
        yield Batch(columns, np.array([number for number, _ in taken], dtype=np.int64))


def whole_numbers(column: pa.Array, rows: NDArray[np.int64], name: str, where: str) -> pa.Array:
    """A column of whole numbers from 0 to 2**31 - 1, int64, from numbers or text; empty text is null.

    Raises:
        InputError: Names row, column and value that is none.
    """
    values, given = _floats(column)
    good = ~given | ((values >= 0) & (values <= MAX_TOKENS) & (values == np.floor(values)))
    if not good.all():
        at = int(np.argmin(good))
        raise InputError(
            f"{where} row {rows[at]} column {name}",
            column[at].as_py(),
            f"a whole number from 0 to {MAX_TOKENS}",
        )
    return pa.array(np.where(given, values, 0).astype(np.int64), mask=~given)


def finite_numbers(
    column: pa.Array, rows: NDArray[np.int64], name: str, where: str, limit: float = sys.float_info.max
) -> pa.Array:
    """A column of numbers from -`limit` to `limit`, float64, from numbers or text; empty text is null.

    Raises:
        InputError: Names row, column and value that is none.
    """
    values, given = _floats(column)
    good = ~given | (np.abs(values) <= limit)
    if not good.all():
        at = int(np.argmin(good))
        allowed = f"a finite number from -{limit:g} to {limit:g}"
        raise InputError(f"{where} row {rows[at]} column {name}", column[at].as_py(), allowed)
    return pa.array(np.where(given, values, 0.0), mask=~given)


def _floats(column: pa.Array) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Values, NaN where they are no numbers; and where there is a value at all."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        text = pc.utf8_trim_whitespace(column)
        text = pc.if_else(pc.equal(text, ""), None, text)
        given = pc.is_valid(text).to_numpy(zero_copy_only=False)
        number = pc.match_substring_regex(pc.fill_null(text, "0"), r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$")
        values = pc.if_else(number, pc.fill_null(text, "0"), "nan").cast(pa.float64())
        return np.asarray(values.to_numpy(zero_copy_only=False)), np.asarray(given)
    given = np.asarray(pc.is_valid(column).to_numpy(zero_copy_only=False))
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        return np.full(len(column), np.nan), given
    values = pc.fill_null(column.cast(pa.float64()), 0.0).to_numpy(zero_copy_only=False)
    return np.asarray(values), given
