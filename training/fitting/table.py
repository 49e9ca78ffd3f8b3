"""Reading answer lengths, in either of two Parquet forms, into groups (all answers of one model to one prompt).

| form | rows | columns used |
|---|---|---|
| samples/1 | one for each answer | output_tokens (number), finish_reason, optional max_tokens |
| lists | one for each group | output_tokens (list), optional finished (list of bool), max_tokens |

Both bring the columns to group by; prompt, category, dataset, prompt_tokens and temperature are carried along if they
exist. Answers with finish_reason "error" are left out and counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from scheduler_core.errors import InputError
from scheduler_core.files import existing_file

CARRIED = ("prompt", "category", "dataset", "prompt_tokens", "temperature")
FINISH_REASONS = ("stop", "length", "error")
MAX_LENGTH = 2**31 - 1


@dataclass(frozen=True, slots=True)
class GroupedLengths:
    """Answer lengths by group; all sequences have one entry for each of G groups, in order of first appearance.

    Attributes:
        path: File they came from.
        keys: Columns that name a group.
        rows: Table [G] of the key and carried columns, from each group's first row.
        lengths: Answer lengths in tokens, int64 [N_g]; of a cut answer the length it was cut at.
        finished: Whether each answer ended by itself, bool [N_g].
        max_tokens: Largest cap of the group's answers, None if unknown.
        num_errors: Answers left out because generating them failed.
    """

    path: Path
    keys: tuple[str, ...]
    rows: pa.Table
    lengths: list[NDArray[np.int64]]
    finished: list[NDArray[np.bool_]]
    max_tokens: list[int | None]
    num_errors: int = 0

    def __len__(self) -> int:
        return len(self.lengths)

    def name(self, group: int) -> str:
        """The group as a person would name it: prompt_id='a1', model='m'."""
        return ", ".join(f"{key}={self.rows.column(key)[group].as_py()!r}" for key in self.keys)

    def column(self, name: str) -> list[Any] | None:
        """Values [G] of a key or carried column, None if the file has no such column."""
        return self.rows.column(name).to_pylist() if name in self.rows.column_names else None

    def take(self, groups: Sequence[int] | NDArray[np.intp]) -> GroupedLengths:
        """The groups at these positions."""
        return GroupedLengths(
            path=self.path,
            keys=self.keys,
            rows=self.rows.take(pa.array(np.asarray(groups, dtype=np.int64))),
            lengths=[self.lengths[group] for group in groups],
            finished=[self.finished[group] for group in groups],
            max_tokens=[self.max_tokens[group] for group in groups],
            num_errors=self.num_errors,
        )


def read_parquet(path: str | Path, field: str) -> pa.Table:
    """A whole Parquet file.

    Raises:
        InputError: It is missing, empty, truncated or no Parquet file; the message names `field`.
    """
    file = existing_file(path, field)
    try:
        return pq.read_table(file)
    except (pa.ArrowException, OSError) as error:
        detail = str(error).strip().splitlines()[0]
        raise InputError(field, str(path), f"a whole Parquet file ({detail})") from error


def group_table(
    table: pa.Table,
    path: Path,
    *,
    keys: Sequence[str] = ("prompt_id", "model"),
    max_tokens: int | None = None,
    min_samples: int = 3,
) -> GroupedLengths:
    """Groups the answers of a table in either form.

    Args:
        table: As in the table above.
        path: Where it came from, for messages.
        keys: Columns that name a group.
        max_tokens: Cap on all answers: longer ones count as cut there. In the list form without a column `finished`
            an answer of just this length counts as cut too, since its own end would be a coincidence.
        min_samples: Fewest answers of a group.

    Raises:
        InputError: A column is missing or of a wrong type, a value is null, NaN, not whole or below 1, a prompt is
            empty, or a group has too few answers; names row or group, and column.
    """
    if table.num_rows == 0:
        raise InputError(path.name, "no rows", "at least one row")
    _require(table, path, (*keys, "output_tokens"))
    if not keys or len(set(keys)) < len(keys):
        raise InputError("group_by", list(keys), "one or more columns, each once")
    for name in {*keys, *({"prompt"} & set(table.column_names))}:
        _check_present(table, path, name)
    answers = _answers(table, path, max_tokens)
    group_of_row, first_rows = _group_rows(table, keys)
    group = group_of_row[answers.row]
    order = np.argsort(group, kind="stable")
    ends = np.searchsorted(group[order], np.arange(1, len(first_rows)))
    carried = [name for name in (*keys, *CARRIED) if name in table.column_names]
    result = GroupedLengths(
        path=path,
        keys=tuple(keys),
        rows=table.select(list(dict.fromkeys(carried))).take(pa.array(first_rows)),
        lengths=np.split(answers.lengths[order], ends),
        finished=np.split(~answers.cut[order], ends),
        max_tokens=_caps(table, path, group_of_row, len(first_rows), max_tokens),
        num_errors=answers.num_errors,
    )
    for number, lengths in enumerate(result.lengths):
        if len(lengths) < min_samples:
            raise InputError(
                f"{path.name}, {result.name(number)}, column output_tokens",
                f"{len(lengths)} samples",
                f"at least {min_samples} samples of each group, failed ones not counted",
            )
    return result


def _require(table: pa.Table, path: Path, names: Sequence[str]) -> None:
    missing = [name for name in names if name not in table.column_names]
    if missing:
        raise InputError(f"{path.name}, columns", table.column_names, f"also {', '.join(missing)}")


def _check_present(table: pa.Table, path: Path, name: str) -> None:
    column = table.column(name)
    bad = column.is_null()
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        bad = pc.or_kleene(bad, pc.equal(pc.utf8_trim_whitespace(column), ""))
    elif name == "prompt":
        raise InputError(f"{path.name}, column prompt", str(column.type), "text")
    row = pc.index(bad, True).as_py()
    if row >= 0:
        raise InputError(
            f"{path.name}, row {row}, column {name}", column[row].as_py(), "a value that is not empty"
        )


@dataclass(frozen=True, slots=True)
class _Answers:
    """All answers but the failed ones, each [answers]: row of the file, length, whether it was cut there."""

    row: NDArray[np.int64]
    lengths: NDArray[np.int64]
    cut: NDArray[np.bool_]
    num_errors: int = 0

    def capped(self, max_tokens: int | None) -> _Answers:
        if max_tokens is None:
            return self
        cut = self.cut | (self.lengths > max_tokens)
        return _Answers(self.row, np.minimum(self.lengths, max_tokens), cut, self.num_errors)


def _answers(table: pa.Table, path: Path, max_tokens: int | None) -> _Answers:
    column = table.column("output_tokens").combine_chunks()
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        return _listed_answers(table, path, column, max_tokens).capped(max_tokens)
    values = _numbers(column, path)
    rows = np.arange(len(values))
    if "finish_reason" not in table.column_names:
        raise InputError(
            f"{path.name}, columns", table.column_names, "also finish_reason, or output_tokens as lists"
        )
    reasons = _finish_reasons(table, path)
    kept = reasons != "error"
    lengths = _whole_lengths(values[kept], rows[kept], path)
    return _Answers(rows[kept], lengths, reasons[kept] == "length", int((~kept).sum())).capped(max_tokens)


def _listed_answers(table: pa.Table, path: Path, column: Any, max_tokens: int | None) -> _Answers:
    row = pc.index(column.is_null(), True).as_py()
    if row >= 0:
        raise InputError(f"{path.name}, row {row}, column output_tokens", None, "a list of lengths")
    rows = pc.list_parent_indices(column).to_numpy(zero_copy_only=False).astype(np.int64)
    lengths = _whole_lengths(_numbers(pc.list_flatten(column), path), rows, path)
    if "finished" in table.column_names:
        return _Answers(rows, lengths, ~_finished(table, path, column))
    cut = np.zeros(len(rows), dtype=bool) if max_tokens is None else lengths >= max_tokens
    return _Answers(rows, lengths, cut)


def _finished(table: pa.Table, path: Path, lengths: Any) -> NDArray[np.bool_]:
    column = table.column("finished").combine_chunks()
    is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    if not is_list or not pa.types.is_boolean(column.type.value_type):
        raise InputError(f"{path.name}, column finished", str(column.type), "lists of booleans")
    same = pc.equal(pc.list_value_length(column), pc.list_value_length(lengths))
    row = pc.index(pc.fill_null(same, False), False).as_py()
    if row >= 0:
        raise InputError(
            f"{path.name}, row {row}, column finished",
            column[row].as_py(),
            "as many values as output_tokens has",
        )
    flat = pc.list_flatten(column)
    if flat.null_count:
        raise InputError(f"{path.name}, column finished", None, "true or false for each answer")
    return np.asarray(flat.to_numpy(zero_copy_only=False), dtype=bool)


def _numbers(column: Any, path: Path) -> NDArray[np.float64]:
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        raise InputError(
            f"{path.name}, column output_tokens", str(column.type), "whole numbers or lists of them"
        )
    return np.asarray(column.cast(pa.float64()).to_numpy(zero_copy_only=False), dtype=np.float64)


def _finish_reasons(table: pa.Table, path: Path) -> NDArray[np.str_]:
    values = table.column("finish_reason").to_pylist()
    unknown = set(values) - set(FINISH_REASONS)
    if unknown:
        row = next(row for row, value in enumerate(values) if value in unknown)
        raise InputError(
            f"{path.name}, row {row}, column finish_reason", values[row], ", ".join(FINISH_REASONS)
        )
    return np.asarray(values, dtype=np.str_)


def _whole_lengths(values: NDArray[np.float64], rows: NDArray[np.int64], path: Path) -> NDArray[np.int64]:
    good = (values >= 1) & (values <= MAX_LENGTH)  # false for NaN
    good[good] = values[good] == np.floor(values[good])
    if not good.all():
        at = int(np.argmin(good))
        raise InputError(
            f"{path.name}, row {rows[at]}, column output_tokens",
            float(values[at]),
            "whole numbers of at least 1",
        )
    return values.astype(np.int64)


def _group_rows(table: pa.Table, keys: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Number of the group of each row, and the first row of each group; groups in order of first appearance."""
    codes = np.zeros(table.num_rows, dtype=np.int64)
    for key in keys:
        encoded = table.column(key).combine_chunks().dictionary_encode()
        column = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        _, codes = np.unique(codes * len(encoded.dictionary) + column, return_inverse=True)
    _, first, group = np.unique(codes, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[group], np.sort(first)


def _caps(
    table: pa.Table, path: Path, group_of_row: NDArray[np.int64], num_groups: int, max_tokens: int | None
) -> list[int | None]:
    if max_tokens is not None:
        return [max_tokens] * num_groups
    if "max_tokens" not in table.column_names:
        return [None] * num_groups
    column = table.column("max_tokens")
    if not pa.types.is_integer(column.type) and not pa.types.is_null(column.type):
        raise InputError(f"{path.name}, column max_tokens", str(column.type), "whole numbers")
    caps: list[int | None] = [None] * num_groups
    for group, cap in zip(group_of_row.tolist(), column.to_pylist(), strict=True):
        if cap is not None:
            caps[group] = max(cap, caps[group] or 0)
    return caps
