"""The answers of a table in either form of `training.fitting.reading.table`, checked value by value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from scheduler_core.errors import InputError

FINISH_REASONS = ("stop", "length", "error")
MAX_LENGTH = 2**31 - 1

#: Row of a table -> how a message names it.
Place = Callable[[int], str]


@dataclass(frozen=True, slots=True)
class Answers:
    """All answers but the failed ones, each [answers]: row of the table, length, whether it was cut there, weight."""

    row: NDArray[np.int64]
    lengths: NDArray[np.int64]
    cut: NDArray[np.bool_]
    weights: NDArray[np.float64] | None = None
    num_errors: int = 0

    def capped(self, max_tokens: int | None) -> Answers:
        """Longer answers count as cut at `max_tokens`."""
        if max_tokens is None:
            return self
        cut = self.cut | (self.lengths > max_tokens)
        return replace(self, lengths=np.minimum(self.lengths, max_tokens), cut=cut)


def is_list(kind: pa.DataType) -> bool:
    """Whether a column of this type holds lists."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def read_answers(
    table: pa.Table, path: Path, max_tokens: int | None, weights: str | None, place: Place
) -> Answers:
    """Answers of a table in either form.

    Args:
        table: With output_tokens, and the other columns of its form.
        path: Where it came from, for messages.
        max_tokens: Cap on all answers, see `group_table`.
        weights: Column of weights, None: there are none.
        place: Names a row.

    Raises:
        InputError: A column is missing or of a wrong type, or a value is not allowed.
    """
    column = _whole(table.column("output_tokens"))
    if is_list(column.type):
        return _listed_answers(table, path, column, max_tokens, weights, place).capped(max_tokens)
    values = _numbers(column, path, "output_tokens")
    rows = np.arange(len(values))
    cut, kept = _row_ends(table, path, place)
    lengths = _whole_lengths(values[kept], rows[kept], place)
    found = None
    if weights is not None:
        found = _weights(
            _numbers(_whole(table.column(weights)), path, weights)[kept], rows[kept], weights, place
        )
    return Answers(rows[kept], lengths, cut[kept], found, int((~kept).sum())).capped(max_tokens)


def _row_ends(table: pa.Table, path: Path, place: Place) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which answers were cut, and which did not fail; one row each."""
    if "finish_reason" in table.column_names:
        reasons = _finish_reasons(table, path, place)
        return np.equal(reasons, FINISH_REASONS.index("length")), reasons != FINISH_REASONS.index("error")
    if "finished" not in table.column_names:
        raise InputError(
            f"{path.name}, columns",
            table.column_names,
            "also finish_reason or finished, or output_tokens as lists",
        )
    column = _whole(table.column("finished"))
    if not pa.types.is_boolean(column.type):
        raise InputError(f"{path.name}, column finished", str(column.type), "true or false for each answer")
    row = pc.index(column.is_null(), True).as_py()
    if row >= 0:
        raise InputError(f"{place(row)}, column finished", None, "true or false for each answer")
    finished = np.asarray(column.to_numpy(zero_copy_only=False), dtype=bool)
    return ~finished, np.ones(len(finished), dtype=bool)


def _finish_reasons(table: pa.Table, path: Path, place: Place) -> NDArray[np.int64]:
    """Position of each row's value among FINISH_REASONS."""
    column = _whole(table.column("finish_reason"))
    allowed = pa.array(FINISH_REASONS, pa.string())
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        raise InputError(f"{path.name}, column finish_reason", str(column.type), ", ".join(FINISH_REASONS))
    found = pc.index_in(column, allowed.cast(column.type))
    row = pc.index(found.is_null(), True).as_py()
    if row >= 0:
        raise InputError(
            f"{place(row)}, column finish_reason",
            column[row].as_py(),
            ", ".join(FINISH_REASONS)
            + " (what unknown means is decided at import, import-lengths --unknown)",
        )
    return np.asarray(found.to_numpy(zero_copy_only=False), dtype=np.int64)


def _listed_answers(
    table: pa.Table, path: Path, column: Any, max_tokens: int | None, weights: str | None, place: Place
) -> Answers:
    row = pc.index(column.is_null(), True).as_py()
    if row >= 0:
        raise InputError(f"{place(row)}, column output_tokens", None, "a list of lengths")
    rows = pc.list_parent_indices(column).to_numpy(zero_copy_only=False).astype(np.int64)
    lengths = _whole_lengths(_numbers(pc.list_flatten(column), path, "output_tokens"), rows, place)
    found = None
    if weights is not None:
        flat = _beside(table, path, weights, column, "a list of numbers", place)
        found = _weights(_numbers(flat, path, weights), rows, weights, place)
    if "finished" in table.column_names:
        return Answers(rows, lengths, ~_list_ends(table, path, column, rows, place), found)
    cut = np.zeros(len(rows), dtype=bool) if max_tokens is None else lengths >= max_tokens
    return Answers(rows, lengths, cut, found)


def _list_ends(
    table: pa.Table, path: Path, lengths: Any, rows: NDArray[np.int64], place: Place
) -> NDArray[np.bool_]:
    flat = _beside(table, path, "finished", lengths, "lists of booleans", place)
    if not pa.types.is_boolean(flat.type):
        kind = str(table.column("finished").type)
        raise InputError(f"{path.name}, column finished", kind, "lists of booleans")
    at = pc.index(flat.is_null(), True).as_py()
    if at >= 0:
        raise InputError(f"{place(int(rows[at]))}, column finished", None, "true or false for each answer")
    return np.asarray(flat.to_numpy(zero_copy_only=False), dtype=bool)


def _beside(table: pa.Table, path: Path, name: str, lengths: Any, allowed: str, place: Place) -> Any:
    """All values of a list column whose lists are as long as those of output_tokens."""
    column = _whole(table.column(name))
    if not is_list(column.type):
        raise InputError(f"{path.name}, column {name}", str(column.type), allowed)
    same = pc.equal(
        pc.list_value_length(column).cast(pa.int64()), pc.list_value_length(lengths).cast(pa.int64())
    )
    row = pc.index(pc.fill_null(same, False), False).as_py()
    if row >= 0:
        raise InputError(
            f"{place(row)}, column {name}", column[row].as_py(), "as many values as output_tokens has"
        )
    return pc.list_flatten(column)


def _whole(column: pa.ChunkedArray) -> Any:
    """A column as one array."""
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _numbers(column: Any, path: Path, name: str) -> NDArray[np.float64]:
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        kind = "whole numbers" if name == "output_tokens" else "numbers"
        raise InputError(f"{path.name}, column {name}", str(column.type), f"{kind} or lists of them")
    return np.asarray(column.cast(pa.float64()).to_numpy(zero_copy_only=False), dtype=np.float64)


def _weights(
    values: NDArray[np.float64], rows: NDArray[np.int64], name: str, place: Place
) -> NDArray[np.float64]:
    good = (values > 0) & (values < np.inf)  # false for NaN
    if not good.all():
        at = int(np.argmin(good))
        raise InputError(
            f"{place(int(rows[at]))}, column {name}", float(values[at]), "finite numbers above 0"
        )
    return values


def _whole_lengths(values: NDArray[np.float64], rows: NDArray[np.int64], place: Place) -> NDArray[np.int64]:
    good = (values >= 1) & (values <= MAX_LENGTH)  # false for NaN
    good[good] = values[good] == np.floor(values[good])
    if not good.all():
        at = int(np.argmin(good))
        raise InputError(
            f"{place(int(rows[at]))}, column output_tokens",
            float(values[at]),
            f"whole numbers from 1 to {MAX_LENGTH}",
        )
    return values.astype(np.int64)
