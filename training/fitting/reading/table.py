"""Answer lengths by group: all answers of, for instance, one model to one prompt.

A table of answer lengths has one of two forms:

| form | rows | columns used |
|---|---|---|
| samples/2 | one for each answer | output_tokens (number), finish_reason or finished (bool), optional max_tokens |
| lists | one for each group | output_tokens (list), optional finished (list of bool), max_tokens |

Both bring the columns to group by; prompt, category, dataset, prompt_tokens and temperature are carried along if they
exist, and a column of weights if one is asked for. Answers with finish_reason "error" are left out and counted. With a
column sample_index, rows of the first form must differ in it or in another column of `IDENTITY`: an answer that is there
twice would make standard errors too small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from data_gen.tables import convertible, read_parquet
from scheduler_core.errors import InputError
from training.fitting.families import MIN_SAMPLES
from training.fitting.reading.answers import MAX_LENGTH, is_list, read_answers

__all__ = [
    "CARRIED",
    "MIN_SAMPLES",
    "GroupedLengths",
    "Slices",
    "group_table",
    "read_parquet",
    "used_columns",
]

CARRIED = ("prompt", "category", "dataset", "prompt_tokens", "temperature")
#: What tells answers apart, where a file has it.
IDENTITY = ("prompt_id", "model", "run_id", "sample_index")
#: Fewest answers that a group's fit needs; smaller groups are kept and flagged.


class Slices(Sequence[NDArray[Any]]):
    """Entry g of G is a view of the part of `flat` that belongs to group g."""

    def __init__(self, flat: NDArray[Any], offsets: NDArray[np.int64]) -> None:
        self._flat = flat
        self._offsets = offsets

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, group: int) -> NDArray[Any]: ...
    @overload
    def __getitem__(self, group: slice) -> list[NDArray[Any]]: ...
    def __getitem__(self, group: int | slice) -> NDArray[Any] | list[NDArray[Any]]:
        if isinstance(group, slice):
            return [self[number] for number in range(*group.indices(len(self)))]
        number = range(len(self))[group]
        return self._flat[self._offsets[number] : self._offsets[number + 1]]


@dataclass(frozen=True, slots=True)
class GroupedLengths:
    """Answer lengths of G groups, in order of first appearance; the answers of all groups one after another.

    Attributes:
        path: Where they came from, for messages.
        keys: Columns that name a group.
        rows: Table [G] of the key and carried columns, from each group's first row.
        flat_lengths: Answer lengths in tokens [S]; of a cut answer the length it was cut at.
        flat_finished: Whether each answer ended by itself [S].
        offsets: Where groups begin [G + 1]: group g is flat[offsets[g]:offsets[g + 1]], and may be empty.
        max_tokens: Largest cap of each group's answers [G], None if unknown.
        num_errors: Answers left out because generating them failed.
        flat_weights: How many answers each one counts as, above 0 [S]; None: each as one.
    """

    path: Path
    keys: tuple[str, ...]
    rows: pa.Table
    flat_lengths: NDArray[np.int64]
    flat_finished: NDArray[np.bool_]
    offsets: NDArray[np.int64]
    max_tokens: list[int | None]
    num_errors: int = 0
    flat_weights: NDArray[np.float64] | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Sequence[NDArray[np.int64]]:
        """Answer lengths of each group, views [G] of [N_g]."""
        return Slices(self.flat_lengths, self.offsets)

    @property
    def finished(self) -> Sequence[NDArray[np.bool_]]:
        """Whether each answer ended by itself, views [G] of [N_g]."""
        return Slices(self.flat_finished, self.offsets)

    @property
    def counts(self) -> NDArray[np.int64]:
        """Number of answers of each group [G]."""
        return np.diff(self.offsets)

    def name(self, group: int) -> str:
        """The group as a person would name it: prompt_id='a1', model='m'."""
        return group_name(self.rows, self.keys, group)

    def column(self, name: str) -> list[Any] | None:
        """Values [G] of a key or carried column, None if the file has no such column."""
        return self.rows.column(name).to_pylist() if name in self.rows.column_names else None

    def take(self, groups: Sequence[int] | NDArray[np.intp]) -> GroupedLengths:
        """The groups at these positions."""
        at = np.asarray(groups, dtype=np.int64)
        counts = self.counts[at]
        offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
        flat = np.repeat(self.offsets[at] - offsets[:-1], counts) + np.arange(offsets[-1])
        return GroupedLengths(
            path=self.path,
            keys=self.keys,
            rows=self.rows.take(pa.array(at)),
            flat_lengths=self.flat_lengths[flat],
            flat_finished=self.flat_finished[flat],
            offsets=offsets,
            max_tokens=[self.max_tokens[group] for group in at.tolist()],
            num_errors=self.num_errors,
            flat_weights=None if self.flat_weights is None else self.flat_weights[flat],
        )


def group_name(rows: pa.Table, keys: Sequence[str], row: int) -> str:
    """The group of a row as a person would name it: prompt_id='a1', model='m'."""
    return ", ".join(f"{key}={rows.column(key)[row].as_py()!r}" for key in keys)


def used_columns(names: Sequence[str], keys: Sequence[str], weights: str | None) -> list[str]:
    """The columns, out of those a file has, that make groups; in the order of the result."""
    wanted = (*keys, *CARRIED, "output_tokens", "finish_reason", "finished", "max_tokens")
    if "sample_index" in names:
        wanted += IDENTITY
    return [name for name in dict.fromkeys((*wanted, *([weights] if weights else []))) if name in names]


def group_table(
    table: pa.Table,
    path: Path,
    *,
    keys: Sequence[str] = ("prompt_id", "model"),
    max_tokens: int | None = None,
    min_samples: int = MIN_SAMPLES,
    weights: str | None = None,
    place: Callable[[int], str] | None = None,
) -> GroupedLengths:
    """Groups the answers of a table in either form; rows of the same keys are one group.

    Args:
        table: As in the table above.
        path: Where it came from, for messages.
        keys: Columns that name a group.
        max_tokens: Cap on all answers: longer ones count as cut there. In the list form without a column `finished`
            an answer of just this length counts as cut too, since its own end would be a coincidence.
        min_samples: How many answers at least one group must have.
        weights: Column of how many answers each one counts as: a number for each answer, or a list for each group.
        place: Row of the table -> how a message names it; by default "FILE, row N", from 0.

    Raises:
        InputError: A column is missing or of a wrong type, a value is null, NaN, not whole or below 1, a prompt is
            empty, or no group has enough answers; names row or group, and column.
    """
    if table.num_rows == 0:
        raise InputError(path.name, "no rows", "at least one row")
    check_columns(table.column_names, path, keys, weights)
    at = place or (lambda row: f"{path.name}, row {row}")
    for name in (*keys, *({"prompt"} & set(table.column_names) - set(keys))):
        _check_values(table, path, name, at, is_key=name in keys)
    answers = read_answers(table, path, max_tokens, weights, at)
    group_of_row, first_rows = group_rows(table, keys)
    _check_repeats(table, group_of_row, at)
    group = group_of_row[answers.row]
    order = np.argsort(group, kind="stable")
    carried = [name for name in dict.fromkeys((*keys, *CARRIED)) if name in table.column_names]
    result = GroupedLengths(
        path=path,
        keys=tuple(keys),
        rows=table.select(carried).take(pa.array(first_rows)),
        flat_lengths=answers.lengths[order],
        flat_finished=~answers.cut[order],
        offsets=np.searchsorted(group[order], np.arange(len(first_rows) + 1)).astype(np.int64),
        max_tokens=_caps(table, path, group_of_row, len(first_rows), max_tokens, at),
        num_errors=answers.num_errors,
        flat_weights=None if answers.weights is None else answers.weights[order],
    )
    check_enough(int(result.counts.max()), path, min_samples)
    return result


def check_columns(names: Sequence[str], path: Path, keys: Sequence[str], weights: str | None) -> None:
    """Raises `InputError` unless a file with these columns can be grouped by `keys`."""
    if not keys or len(set(keys)) < len(keys):
        raise InputError("group_by", list(keys), "one or more columns, each once")
    needed = (*keys, "output_tokens", *([weights] if weights else []))
    missing = [name for name in dict.fromkeys(needed) if name not in names]
    if missing:
        raise InputError(f"{path.name}, columns", list(names), f"also {', '.join(missing)}")


def check_enough(largest: int, path: Path, min_samples: int = MIN_SAMPLES) -> None:
    """Raises `InputError` if even the largest group of a file has too few answers."""
    if largest < min_samples:
        raise InputError(
            f"{path.name}, column output_tokens",
            f"{largest} samples in the largest group",
            f"at least {min_samples} samples of some group, failed ones not counted",
        )


def _check_repeats(table: pa.Table, group_of_row: NDArray[np.int64], at: Callable[[int], str]) -> None:
    """Raises `InputError` if an answer is there twice, as far as the columns can tell."""
    if "sample_index" not in table.column_names or is_list(table.column("output_tokens").type):
        return
    columns = [
        name
        for name in IDENTITY
        if name in table.column_names and not pa.types.is_nested(table.column(name).type)
    ]
    if "sample_index" not in columns or table.column("sample_index").null_count:
        return
    answer, first_rows = group_rows(table, columns, group_of_row)
    if len(first_rows) == table.num_rows:
        return
    row = int(np.argmax(first_rows[answer] != np.arange(table.num_rows)))
    values = {name: table.column(name)[row].as_py() for name in columns}
    raise InputError(
        at(row),
        ", ".join(f"{name}={value!r}" for name, value in values.items()),
        f"each answer once ({at(int(first_rows[answer[row]]))} has the same {', '.join(columns)})",
    )


def group_rows(
    table: pa.Table, keys: Sequence[str], codes: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Number of the group of each row, and the first row of each group; groups in order of first appearance.

    Args:
        table: The rows.
        keys: Columns that name a group.
        codes: Groups by other columns [rows] that are divided further; None: there are none.
    """
    divided = codes is not None
    codes = np.zeros(table.num_rows, dtype=np.int64) if codes is None else codes
    for key in keys:
        column, size = _codes(table.column(key))
        codes = codes * size + column
        if divided:
            codes, _ = _codes(pa.chunked_array([pa.array(codes)]))
        divided = True
    num_groups = int(codes.max()) + 1 if len(codes) else 0
    first = np.empty(num_groups, dtype=np.int64)
    first[codes[::-1]] = np.arange(len(codes) - 1, -1, -1)  # of repeated indices the last assignment stays
    return codes, first


def _codes(column: pa.ChunkedArray) -> tuple[NDArray[np.int64], int]:
    """Number of each value among the different ones, in order of first appearance, and how many those are."""
    encoded = column.dictionary_encode(null_encoding="encode").unify_dictionaries()
    if encoded.num_chunks == 0:
        return np.empty(0, dtype=np.int64), 0
    indices = [chunk.indices.to_numpy(zero_copy_only=False) for chunk in encoded.chunks]
    return np.concatenate(indices).astype(np.int64), len(encoded.chunk(0).dictionary)


def _check_values(table: pa.Table, path: Path, name: str, at: Callable[[int], str], *, is_key: bool) -> None:
    """Keys must be there, and no text may be empty; a prompt may be missing, where only its hash was kept."""
    column = table.column(name)
    if pa.types.is_nested(column.type):
        raise InputError(f"{path.name}, column {name}", str(column.type), "plain values")
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        bad = pc.fill_null(pc.equal(pc.utf8_trim_whitespace(column), ""), is_key)
    elif is_key:
        bad = column.is_null(nan_is_null=True)
    elif pa.types.is_null(column.type):
        return
    else:
        raise InputError(f"{path.name}, column prompt", str(column.type), "text")
    row = pc.index(bad, True).as_py()
    if row >= 0:
        raise InputError(f"{at(row)}, column {name}", column[row].as_py(), "a value that is not empty")


def _caps(
    table: pa.Table,
    path: Path,
    group_of_row: NDArray[np.int64],
    num_groups: int,
    max_tokens: int | None,
    at: Callable[[int], str],
) -> list[int | None]:
    if max_tokens is not None:
        return [max_tokens] * num_groups
    if "max_tokens" not in table.column_names:
        return [None] * num_groups
    column = table.column("max_tokens")
    if not pa.types.is_integer(column.type) and not pa.types.is_null(column.type):
        raise InputError(f"{path.name}, column max_tokens", str(column.type), "whole numbers")
    with convertible(path.name):
        column = column.cast(pa.int64())
    bad = pc.or_(pc.less(column, 1), pc.greater(column, MAX_LENGTH))
    row = pc.index(bad, True).as_py()
    if row >= 0:
        allowed = f"whole numbers from 1 to {MAX_LENGTH}, or nothing"
        raise InputError(f"{at(row)}, column max_tokens", column[row].as_py(), allowed)
    caps = np.zeros(num_groups, dtype=np.int64)
    known = pc.fill_null(column, 0).to_numpy()
    np.maximum.at(caps, group_of_row, known)
    return [cap or None for cap in caps.tolist()]
