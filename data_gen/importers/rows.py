"""The rows that importers yield: canonical columns with the numbers of the source's rows they come from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
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
class ImportedRows:
    """Some rows.

    Attributes:
        columns: Canonical columns (`TYPES`), each [rows]; output_tokens always, finish_reason "stop", "length",
            "unknown" or "error".
        numbers: Number of the source's row that each comes from, as an editor or `file_rows` counts, [rows].
        skipped: Rows of the source that the importer skipped, by reason.
    """

    columns: dict[str, pa.Array]
    numbers: NDArray[np.int64]
    skipped: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.numbers)

    def location(self, row: int, column: str, name: str) -> str:
        """The file, row and column of a value, for messages."""
        return f"{name} row {self.numbers[row]} column {column}"

    def column(self, name: str) -> pa.Array:
        """A column, null in all rows if the source does not have it."""
        return self.columns.get(name, pa.nulls(len(self), TYPES[name]))

    def typed(self, name: str) -> ImportedRows:
        """The rows with columns of the types `TYPES`; numbers become text where text is due.

        Raises:
            InputError: A column has values of another kind, lists or booleans for instance.
        """
        columns = {}
        for column, array in self.columns.items():
            target, actual = TYPES[column], array.type
            special = pa.types.is_nested(actual) or pa.types.is_boolean(actual)
            if actual != target and not pa.types.is_null(actual) and (pa.types.is_nested(target) or special):
                raise InputError(f"{name} column {column}", str(actual), str(target))
            columns[column] = array.cast(target)
        return ImportedRows(columns, self.numbers, self.skipped)

    def filter(self, mask: NDArray[np.bool_]) -> ImportedRows:
        """The rows where `mask` is true."""
        columns = {name: column.filter(pa.array(mask)) for name, column in self.columns.items()}
        return ImportedRows(columns, self.numbers[mask])


def in_batches(rows: Iterable[tuple[int, Mapping[str, Any]]]) -> Iterator[ImportedRows]:
    """Batches of (number, row) whose values already have their types."""
    stream = iter(rows)
    while batch := list(islice(stream, BATCH_ROWS)):
        names = [name for name in TYPES if any(name in row for _, row in batch)]
        columns = {name: pa.array([row.get(name) for _, row in batch], TYPES[name]) for name in names}
        yield ImportedRows(columns, np.array([number for number, _ in batch], dtype=np.int64))
