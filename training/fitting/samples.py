"""Output lengths by group; a group has, for example, all samples of one served model for one prompt.

A table of output lengths has one of two forms:

| form | rows | columns used |
|---|---|---|
| samples/2 | one for each sample | output_tokens (number), finish_reason or finished (bool), optional max_tokens |
| lists | one for each group | output_tokens (list), optional finished (list of bool), max_tokens |

Both need the key columns. prompt, category, dataset, prompt_tokens and temperature are carried along if they exist. Samples with finish_reason "error" are left out and counted. With a column sample_index,
rows of the first form must differ in it or in another column of `IDENTITY`, because a duplicated sample would make
standard errors too small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from scheduler_core.errors import InputError
from scheduler_core.prediction.prompt_text import PromptForm, messages_of
from scheduler_core.shell.table_files import convertible
from training.fitting.estimate import MIN_SAMPLES

#: Additional columns of a block: number of the row in the input, and number of the first row of its group.
ROW, GROUP = "__row", "__group"
CARRIED = ("prompt", "category", "dataset", "prompt_tokens", "temperature")
#: Columns that identify a sample, where a file has them.
IDENTITY = ("prompt_id", "model", "run_id", "sample_index")
FINISH_REASONS = ("stop", "length", "error")
MAX_LENGTH = 2**31 - 1
_BOOLEANS = "true or false for each sample"


@dataclass(frozen=True, slots=True)
class GroupedLengths:
    """Output lengths of G groups in order of first appearance; samples of all groups are concatenated."""

    path: Path  # source file, for error messages
    keys: tuple[str, ...]  # columns that identify a group
    rows: pa.Table  # table [G] of the key and carried columns, from each group's first row
    # Output lengths in tokens [S]; the truncated length for censored samples.
    flat_lengths: NDArray[np.int64]
    flat_finished: NDArray[np.bool_]  # whether each sample is complete, not censored [S]
    # Offsets of the groups [G + 1]: group g is flat[offsets[g]:offsets[g + 1]], and may be empty.
    offsets: NDArray[np.int64]
    max_tokens: list[int | None]  # largest limit of each group's samples [G], None if unknown
    num_errors: int = 0  # number of samples left out because their generation failed

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def counts(self) -> NDArray[np.int64]:
        """Number of samples of each group [G]."""
        return np.diff(self.offsets)

    def name(self, group: int) -> str:
        """Readable name of a group, such as prompt_id='a1', model='m'."""
        return ", ".join(f"{key}={self.rows.column(key)[group].as_py()!r}" for key in self.keys)

    def column(self, name: str) -> list[Any] | None:
        """Values [G] of a key or carried column; None if the file has no such column."""
        return self.rows.column(name).to_pylist() if name in self.rows.column_names else None

    def take(self, groups: Sequence[int] | NDArray[np.intp]) -> GroupedLengths:
        """The groups at these positions."""
        at = np.asarray(groups, dtype=np.int64)
        counts = self.counts[at]
        offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
        flat = np.repeat(self.offsets[at] - offsets[:-1], counts) + np.arange(offsets[-1])
        return replace(
            self,
            rows=self.rows.take(pa.array(at)),
            flat_lengths=self.flat_lengths[flat],
            flat_finished=self.flat_finished[flat],
            offsets=offsets,
            max_tokens=[self.max_tokens[group] for group in at.tolist()],
        )


def used_columns(names: Sequence[str], keys: Sequence[str]) -> list[str]:
    """The columns that are used of a file with the columns `names`, in the order of the result."""
    candidates = (*keys, *CARRIED, "output_tokens", "finish_reason", "finished", "max_tokens", *IDENTITY)
    unused = set() if "sample_index" in names else {*IDENTITY} - {*keys}
    return [name for name in dict.fromkeys(candidates) if name in names and name not in unused]


def check_columns(names: Sequence[str], path: Path, keys: Sequence[str]) -> None:
    """Raises `InputError` unless a file with these columns can be grouped by `keys`."""
    missing = [name for name in (*keys, "output_tokens") if name not in names]
    if not missing:
        return
    advice = [f"also {', '.join(map(str, missing))}"]
    if not {*keys} <= {*names}:
        advice.append("--group_by names other columns that identify a group")
    if "output_tokens" in missing:
        advice.append(f"import-lengths log {path.name} --columns output_tokens=COLUMN takes another column")
    raise InputError(f"{path.name}, columns", list(names), "; ".join(advice))


def check_enough(largest: int, path: Path, min_samples: int = MIN_SAMPLES) -> None:
    """Raises `InputError` if even the largest group of a file has too few samples."""
    if largest < min_samples:
        raise InputError(
            f"{path.name}, column output_tokens",
            f"{largest} samples in the largest group",
            f"a group with at least {min_samples} samples, not counting failed ones",
        )


def is_list(kind: pa.DataType) -> bool:
    """Whether a column of this type holds lists."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of this type holds text."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def plain_types(table: pa.Table) -> pa.Table:
    """Decodes dictionary columns, and converts fixed-size lists and string views to plain lists and strings."""
    for number, field in enumerate(table.schema):
        kind = field.type
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        if pa.types.is_fixed_size_list(kind):
            kind = pa.list_(kind.value_type)
        if pa.types.is_string_view(kind):
            kind = pa.string()
        if kind != field.type:
            table = table.set_column(number, field.name, table.column(number).cast(kind))
    return table


def group_table(
    table: pa.Table,
    path: Path,
    *,
    keys: Sequence[str] = ("prompt_id", "model"),
    max_tokens: int | None = None,
    min_samples: int = MIN_SAMPLES,
    locate: Callable[[int], str] | None = None,
) -> GroupedLengths:
    """Groups the samples of a table in either form by their keys.

    Args:
        table, path: Table in one of the forms above, and its source file, for error messages.
        keys: Columns that identify a group.
        max_tokens: Limit of all samples; longer ones are censored at this length. In the list form without a column
            `finished`, a sample of exactly this length is censored too, because it was most likely truncated.
        min_samples: Minimum size of the largest group.
        locate: Row of the table -> its name in error messages; by default "FILE, row N", from 0.

    Raises:
        InputError: A column is missing or has a wrong type; a length is null, NaN, not an integer or below 1; a prompt
            is empty; or no group has enough samples. The message names row or group, and column.
    """
    if table.num_rows == 0:
        raise InputError(path.name, "no rows", "at least one row")
    check_columns(table.column_names, path, keys)
    with convertible(path.name):
        table = plain_types(table)
        source = CheckedTable(table, path, locate)
        for key in keys:
            source.check_filled(key, nullable=False)
        if "prompt" in table.column_names and "prompt" not in keys:
            source.check_filled("prompt", nullable=True)
        rows, lengths, finished, num_errors = _samples(source, max_tokens)
        group_of_row, first_rows = group_rows(table, keys)
        _check_repeats(source, group_of_row)
        limits = _group_limits(source, group_of_row, len(first_rows), max_tokens)
    group = group_of_row[rows]
    order = np.argsort(group, kind="stable")
    carried = [name for name in dict.fromkeys((*keys, *CARRIED)) if name in table.column_names]
    result = GroupedLengths(
        path=path,
        keys=tuple(keys),
        rows=table.select(carried).take(pa.array(first_rows)),
        flat_lengths=lengths[order],
        flat_finished=finished[order],
        offsets=np.searchsorted(group[order], np.arange(len(first_rows) + 1)).astype(np.int64),
        max_tokens=limits,
        num_errors=num_errors,
    )
    check_enough(int(result.counts.max()), path, min_samples)
    return result


@dataclass(frozen=True, slots=True)
class CheckedTable:
    """A table with checks whose errors name file, row and column."""

    table: pa.Table
    path: Path
    name_of_row: Callable[[int], str] | None = None

    def locate(self, row: int) -> str:
        return f"{self.path.name}, row {row}" if self.name_of_row is None else self.name_of_row(row)

    def array(self, name: str) -> Any:
        """A column as one array."""
        return self.table.column(name).combine_chunks()

    def wrong_type(self, name: str, allowed: str) -> InputError:
        return InputError(f"{self.path.name}, column {name}", str(self.table.column(name).type), allowed)

    def require(
        self, good: Any, name: str, allowed: str, values: Any, rows: NDArray[np.int64] | None = None
    ) -> None:
        """Raises `InputError` for the first of `values` that is not `good`; `rows` are their rows, by default 0, 1, ..."""
        flags = np.asarray(good, dtype=bool)
        if flags.all():
            return
        at = int(np.argmin(flags))
        value = values[at]
        value = value.as_py() if isinstance(value, pa.Scalar) else float(value)
        where = self.locate(at if rows is None else int(rows[at]))
        raise InputError(f"{where}, column {name}", value, allowed)

    def check_filled(self, name: str, *, nullable: bool) -> None:
        """Raises `InputError` if a key or prompt column has lists, empty text, or, unless `nullable`, null values."""
        column = self.array(name)
        if pa.types.is_nested(column.type):
            raise self.wrong_type(name, "plain values")
        if is_text(column.type):
            good = pc.fill_null(pc.not_equal(pc.utf8_trim_whitespace(column), ""), nullable)
        elif not nullable:
            good = pc.invert(column.is_null(nan_is_null=True))
        elif pa.types.is_null(column.type):
            return
        else:
            raise self.wrong_type(name, "text")
        self.require(good, name, "a value that is not empty", column)

    def numbers(self, array: Any, name: str) -> NDArray[np.float64]:
        """Values of a numeric array, NaN for null."""
        if not (pa.types.is_integer(array.type) or pa.types.is_floating(array.type)):
            kind = "integers" if name == "output_tokens" else "numbers"
            raise self.wrong_type(name, f"{kind} or lists of them")
        return np.asarray(array.cast(pa.float64()).to_numpy(zero_copy_only=False), dtype=np.float64)


def _samples(
    source: CheckedTable, max_tokens: int | None
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_], int]:
    """All samples except failed ones: table row, length, and whether it is finished, [S] each; and the number of failed
    samples."""
    names = source.table.column_names
    column = source.array("output_tokens")
    listed = is_list(column.type)
    if listed:
        source.require(column.is_valid(), "output_tokens", "a list of lengths", column)
        rows = pc.list_parent_indices(column).to_numpy(zero_copy_only=False).astype(np.int64)
        values = pc.list_flatten(column)
    else:
        rows, values = np.arange(len(column)), column

    lengths = source.numbers(values, "output_tokens")
    failed = np.zeros(len(rows), dtype=bool)
    if "finish_reason" in names and not listed:
        reasons = source.array("finish_reason")
        if not is_text(reasons.type):
            raise source.wrong_type("finish_reason", ", ".join(FINISH_REASONS))
        allowed = ", ".join(FINISH_REASONS) + " (import-lengths --unknown maps unknown ones)"
        is_allowed = pc.is_in(reasons, pa.array(FINISH_REASONS, reasons.type))
        source.require(is_allowed, "finish_reason", allowed, reasons)
        censored, failed = (
            pc.equal(reasons, name).to_numpy(zero_copy_only=False) for name in ("length", "error")
        )
    elif "finished" in names:
        finished = source.array("finished")
        if listed:
            if not is_list(finished.type):
                raise source.wrong_type("finished", "lists of booleans")
            sizes = (
                pc.fill_null(pc.list_value_length(each).cast(pa.int64()), -1) for each in (finished, column)
            )
            allowed = "the same number of values as output_tokens"
            source.require(pc.equal(*sizes), "finished", allowed, finished)
            finished = pc.list_flatten(finished)
        if not pa.types.is_boolean(finished.type):
            raise source.wrong_type("finished", "lists of booleans" if listed else _BOOLEANS)
        source.require(finished.is_valid(), "finished", _BOOLEANS, finished, rows)
        censored = ~np.asarray(finished.to_numpy(zero_copy_only=False), dtype=bool)
    elif listed:
        censored = np.zeros(len(rows), dtype=bool) if max_tokens is None else lengths >= max_tokens
    else:
        allowed = "also finish_reason or finished, or output_tokens as lists; import-lengths log "
        allowed += f"{source.path.name} --columns finish_reason=COLUMN takes another column"
        raise InputError(f"{source.path.name}, columns", names, allowed)
    usable = ~failed
    lengths, rows, censored = lengths[usable], rows[usable], censored[usable]
    good = (lengths >= 1) & (lengths <= MAX_LENGTH) & (lengths == np.floor(lengths))
    source.require(good, "output_tokens", f"integers from 1 to {MAX_LENGTH}", lengths, rows)
    if max_tokens is not None:
        censored = censored | (lengths > max_tokens)
        lengths = np.minimum(lengths, max_tokens)
    return rows, lengths.astype(np.int64), ~censored, int(failed.sum())


def _check_repeats(source: CheckedTable, group_of_row: NDArray[np.int64]) -> None:
    """Raises `InputError` if two rows have the same `IDENTITY` columns, sample_index included."""
    table = source.table
    columns = [name for name in IDENTITY if name in table.column_names]
    columns = [name for name in columns if not pa.types.is_nested(table.column(name).type)]
    listed = is_list(table.column("output_tokens").type)
    if listed or "sample_index" not in columns or table.column("sample_index").null_count:
        return
    sample, first_rows = group_rows(table, columns, group_of_row)
    if len(first_rows) == table.num_rows:
        return
    row = int(np.argmax(first_rows[sample] != np.arange(table.num_rows)))
    raise InputError(
        source.locate(row),
        ", ".join(f"{name}={table.column(name)[row].as_py()!r}" for name in columns),
        f"unique samples ({source.locate(int(first_rows[sample[row]]))} has the same {', '.join(columns)})",
    )


def group_rows(
    table: pa.Table, keys: Sequence[str], codes: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Group number of each row, and first row of each group; groups are numbered in order of first appearance.

    `codes` [rows] are group numbers by other columns, which are subdivided by `keys`.
    """
    for key in keys:
        column = table.column(key).combine_chunks().dictionary_encode(null_encoding="encode")
        numbers = column.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        if codes is not None:
            # Renumbered in order of first appearance.
            pairs = pa.array(codes * len(column.dictionary) + numbers).dictionary_encode()
            numbers = pairs.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        codes = numbers
    assert codes is not None
    first = np.empty(int(codes.max()) + 1, dtype=np.int64)
    first[codes[::-1]] = np.arange(len(codes) - 1, -1, -1)  # for repeated indices the last assignment wins
    return codes, first


def _group_limits(
    source: CheckedTable, group_of_row: NDArray[np.int64], num_groups: int, max_tokens: int | None
) -> list[int | None]:
    if max_tokens is not None or "max_tokens" not in source.table.column_names:
        return [max_tokens] * num_groups
    column = source.array("max_tokens")
    if not pa.types.is_integer(column.type) and not pa.types.is_null(column.type):
        raise source.wrong_type("max_tokens", "integers")
    column = column.cast(pa.int64())
    good = pc.fill_null(pc.and_(pc.greater_equal(column, 1), pc.less_equal(column, MAX_LENGTH)), True)
    source.require(good, "max_tokens", f"integers from 1 to {MAX_LENGTH}, or nothing", column)
    limits = np.zeros(num_groups, dtype=np.int64)
    np.maximum.at(limits, group_of_row, pc.fill_null(column, 0).to_numpy(zero_copy_only=False))
    return [limit or None for limit in limits.tolist()]


def with_conversations(table: pa.Table, path: Path, form: PromptForm) -> pa.Table:
    """Replaces the column `prompt` by what a predictor of this form reads of the conversation, for rows with `messages`.

    Rows without `messages` keep their prompt as a single user message. InputError for a file of fits, which stores only
    the last user message.
    """
    if set(table.column_names) >= {"mu", "sigma", "nu"}:
        allowed = "samples, because fits do not store conversations"
        raise InputError(f"{path.name}, columns", ["mu", "nu", "sigma"], allowed)
    if "messages" not in table.column_names or "prompt" not in table.column_names:
        return table
    texts = [
        text if messages is None else form.text(messages_of(messages)) or text
        for text, messages in zip(
            table.column("prompt").to_pylist(), table.column("messages").to_pylist(), strict=True
        )
    ]
    index = table.column_names.index("prompt")
    field = table.schema.field("prompt")
    return table.set_column(index, field, pa.array(texts, field.type))
