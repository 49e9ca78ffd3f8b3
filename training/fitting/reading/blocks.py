"""A file of answer lengths as blocks of whole groups, in memory that does not grow with the file.

| rows of the file | blocks |
|---|---|
| one for each group | consecutive rows; a group's keys must not come again in the file |
| one for each answer, all of them small enough to hold | consecutive groups, in order of first appearance |
| one for each answer, more than that | partitions by hash of the keys, brought together on disk first |

Of the last, groups are in order of first appearance within a partition. What the blocks are depends on the file and on
`BlockLimits`, on nothing else, so a run can go on where another one stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scheduler_core.errors import InputError
from training.fitting.jobs.parts import unwritable
from training.fitting.reading.formats import SampleFile
from training.fitting.reading.key_hashes import SeenHashes, first_repeat, key_hashes
from training.fitting.reading.partitions import (
    MAX_PARTITIONS,
    ROW,
    Partitions,
    open_partitions,
    write_partitions,
)
from training.fitting.reading.table import GroupedLengths, group_table

Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLimits:
    """How much is held at a time.

    Attributes:
        groups: Most groups of a block.
        answers: Most answers of a block of list rows, though never less than one row.
        held_bytes: Most bytes of rows, as Arrow holds them; of rows for each answer as many are grouped without a disk.
    """

    groups: int = 16_384
    answers: int = 1 << 20
    held_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        for name in ("groups", "answers", "held_bytes"):
            if getattr(self, name) < 1:
                raise InputError(f"block {name}", getattr(self, name), "a whole number of at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """How rows become groups; see `group_table`."""

    keys: tuple[str, ...] = ("prompt_id", "model")
    max_tokens: int | None = None
    weights: str | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """Some groups of a file, not yet in memory as such.

    Attributes:
        number: Position among the blocks; numbers need not be consecutive.
        num_rows: Rows of the file it stands for.
        load: Groups its rows; raises `InputError` for a value that is not allowed.
    """

    number: int
    num_rows: int
    load: Callable[[], GroupedLengths]


def read_blocks(
    source: SampleFile,
    grouping: Grouping,
    limits: BlockLimits,
    work: Path,
    *,
    advance: Advance = lambda rows: None,
) -> Iterator[Block]:
    """Streams a file as blocks; each must be loaded, or not, before the next is asked for.

    Args:
        source: The opened file.
        grouping: How rows become groups.
        limits: How much is held at a time.
        work: Folder for partitions; what a run before left there is used. The caller makes and removes it.
        advance: Told the number of rows that have been brought to disk, if that is needed.

    Raises:
        InputError: The file is damaged, or keys come again in a file of one row for each group.
        TailcastError: The work folder cannot be written.
    """
    if source.lists:
        yield from _row_ranges(source, grouping, limits)
        return
    done = open_partitions(work / "partitions")
    if done is not None:
        yield from _partition_blocks(source, grouping, done)
        return
    batches = _sliced(source.batches(), limits.held_bytes // 8)
    held: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        held.append(batch)
        size += batch.nbytes
        if size > limits.held_bytes:
            break
    else:
        yield from _held_blocks(source, grouping, limits, held)
        return
    count = _num_partitions(source, sum(batch.num_rows for batch in held), size, limits)
    try:
        done = write_partitions(
            chain(_drained(held), batches),
            work / "partitions",
            keys=grouping.keys,
            num_partitions=count,
            held_bytes=limits.held_bytes,
            advance=advance,
        )
    except OSError as error:
        raise unwritable(work, error) from error
    yield from _partition_blocks(source, grouping, done)


def _sliced(batches: Iterator[pa.RecordBatch], most_bytes: int) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of about so many bytes."""
    for batch in batches:
        rows = max(int(most_bytes * batch.num_rows / max(batch.nbytes, 1)), 1)
        for start in range(0, batch.num_rows, rows):
            yield batch.slice(start, rows)


def _drained(held: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    while held:
        yield held.pop(0)


def _row_ranges(source: SampleFile, grouping: Grouping, limits: BlockLimits) -> Iterator[Block]:
    seen = SeenHashes()
    first_row = 0
    for number, table in enumerate(_tables(_sliced(source.batches(), limits.held_bytes), limits)):
        hashes = key_hashes([table.column(key).combine_chunks() for key in grouping.keys])
        repeated = seen.add(hashes)
        if len(repeated):
            _refuse_repeat(source, grouping.keys, repeated)

        def load(table: pa.Table = table, first: int = first_row) -> GroupedLengths:
            return _grouped(table, source, grouping, lambda row: source.place(first + row))

        yield Block(number, table.num_rows, load)
        first_row += table.num_rows


def _refuse_repeat(source: SampleFile, keys: Sequence[str], suspects: np.ndarray) -> None:
    found = first_repeat(source.batches(keys), keys, suspects)
    if found is None:  # different keys of the same hash
        return
    first, second, values = found
    name = ", ".join(f"{key}={value!r}" for key, value in values.items())
    raise InputError(
        source.place(second),
        name,
        f"each group in one row ({source.place(first)} has it too); answers of a group over several rows need one row "
        "for each answer",
    )


def _tables(batches: Iterator[pa.RecordBatch], limits: BlockLimits) -> Iterator[pa.Table]:
    """Rows of lists in tables as large as the limits allow."""
    held: list[pa.RecordBatch] = []
    rows = answers = size = 0
    for batch in batches:
        start = 0
        lengths = pc.fill_null(pc.list_value_length(batch.column("output_tokens")), 0).to_numpy()
        ends = np.cumsum(lengths, dtype=np.int64)
        while start < batch.num_rows:
            before = int(ends[start - 1]) if start else 0
            fitting = int(np.searchsorted(ends, before + limits.answers - answers, side="right")) - start
            count = min(fitting, limits.groups - rows, batch.num_rows - start)
            if count > 0 or not held:
                part = batch.slice(start, max(count, 1))
                held.append(part)
                start += part.num_rows
                rows += part.num_rows
                answers += int(ends[start - 1]) - before
                size += part.nbytes
            if start < batch.num_rows or rows >= limits.groups or size >= limits.held_bytes:
                yield pa.Table.from_batches(held)
                held, rows, answers, size = [], 0, 0, 0
    if held:
        yield pa.Table.from_batches(held)


def _held_blocks(
    source: SampleFile, grouping: Grouping, limits: BlockLimits, held: list[pa.RecordBatch]
) -> Iterator[Block]:
    if not held:
        raise InputError(source.path.name, "no rows", "at least one row")
    table = pa.Table.from_batches(held)
    num_rows = table.num_rows
    groups = _grouped(table, source, grouping, source.place)
    held.clear()
    del table
    for number, start in enumerate(range(0, len(groups), limits.groups)):
        at = np.arange(start, min(start + limits.groups, len(groups)))
        part = replace(groups.take(at), num_errors=0 if number else groups.num_errors)
        last = at[-1] == len(groups) - 1
        rows = num_rows if last else len(part.flat_lengths) + part.num_errors
        num_rows -= rows
        yield Block(number, rows, lambda part=part: part)  # type: ignore[misc]


def _partition_blocks(source: SampleFile, grouping: Grouping, partitions: Partitions) -> Iterator[Block]:
    for number, rows in enumerate(partitions.num_rows):
        if rows == 0:
            continue

        def load(number: int = number) -> GroupedLengths:
            table = partitions.load(number)
            row_numbers = table.column(ROW)
            return _grouped(
                table.drop_columns([ROW]),
                source,
                grouping,
                lambda row: source.place(row_numbers[row].as_py()),
            )

        yield Block(number, rows, load)


def _grouped(
    table: pa.Table, source: SampleFile, grouping: Grouping, place: Callable[[int], str]
) -> GroupedLengths:
    return group_table(
        table,
        source.path,
        keys=grouping.keys,
        max_tokens=grouping.max_tokens,
        min_samples=0,
        weights=grouping.weights,
        place=place,
    )


def _num_partitions(source: SampleFile, rows: int, size: int, limits: BlockLimits) -> int:
    """So many that each is a quarter of what may be held, if the file goes on as it began."""
    # A text is at most twice as large in Arrow: a number of one digit and a comma becomes eight bytes, names vanish.
    total = 2 * source.num_bytes if source.num_rows is None else size * source.num_rows / rows
    return int(np.clip(np.ceil(4 * total / limits.held_bytes), 2, MAX_PARTITIONS))
