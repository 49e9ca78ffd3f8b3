"""Rows of the same group brought together on disk, for files whose groups are scattered and larger than memory.

One pass writes runs: Arrow files of as many rows as are held at a time, each with one record batch for each partition
of the groups' hashes. Partition p is batch p of all runs, so any number of partitions needs one open file.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from scheduler_core.errors import TailcastError
from scheduler_core.files import atomic_file, write_json
from scheduler_core.json_text import parse_json
from training.fitting.reading.key_hashes import key_hashes

MAX_PARTITIONS = 4096
#: Column that a partition's rows bring beside their own: the row of the file they were.
ROW = "__tailcast_row__"


@dataclass(frozen=True, slots=True)
class Partitions:
    """A folder of runs.

    Attributes:
        folder: Where they are.
        num_runs: How many runs there are.
        num_rows: Rows of each partition.
    """

    folder: Path
    num_runs: int
    num_rows: tuple[int, ...]

    def load(self, partition: int) -> pa.Table:
        """All rows of a partition in the order of the file, with their numbers in column ROW."""
        batches = []
        for run in range(self.num_runs):
            with pa.OSFile(str(_run_path(self.folder, run))) as stream, pa.ipc.open_file(stream) as reader:
                batches.append(reader.get_batch(partition))
        return pa.Table.from_batches(batches)


def _run_path(folder: Path, run: int) -> Path:
    return folder / f"run-{run:06d}.arrow"


def open_partitions(folder: Path) -> Partitions | None:
    """Partitions written before, None if the folder does not exist."""
    if not folder.is_dir():
        return None
    try:
        content = parse_json((folder / "partitions.json").read_bytes())
        return Partitions(folder, int(content["num_runs"]), tuple(map(int, content["num_rows"])))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TailcastError(f"{folder} is damaged; --resume false starts over") from error


def write_partitions(
    batches: Iterable[pa.RecordBatch],
    folder: Path,
    *,
    keys: Sequence[str],
    num_partitions: int,
    held_bytes: int,
    advance: Callable[[int], None] = lambda rows: None,
) -> Partitions:
    """Writes the rows of `batches` by partition; the folder has its name only once it is whole.

    Args:
        batches: All rows, in order, with the key columns.
        folder: To make.
        keys: Columns that name a group.
        num_partitions: How many parts.
        held_bytes: A run is written as soon as so much is held.
        advance: Told the number of rows done.

    Raises:
        OSError: The folder cannot be written, or the disk is full.
    """
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    counts = np.zeros(num_partitions, dtype=np.int64)
    run = row = 0
    for held in _gathered(batches, held_bytes):
        table = held.append_column(ROW, pa.array(np.arange(row, row + held.num_rows)))
        counts += _write_run(_run_path(unfinished, run), table, keys, num_partitions)
        num_rows = held.num_rows
        row += num_rows
        run += 1
        del held, table
        pa.default_memory_pool().release_unused()
        advance(num_rows)
    write_json(unfinished / "partitions.json", {"num_runs": run, "num_rows": counts.tolist()})
    os.replace(unfinished, folder)
    return Partitions(folder, run, tuple(counts.tolist()))


def _gathered(batches: Iterable[pa.RecordBatch], held_bytes: int) -> Iterator[pa.Table]:
    held: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        held.append(batch)
        size += batch.nbytes
        if size >= held_bytes:
            table = pa.Table.from_batches(held)
            held, size = [], 0
            yield table
            del table
    if held:
        yield pa.Table.from_batches(held)


def _write_run(path: Path, table: pa.Table, keys: Sequence[str], num_partitions: int) -> NDArray[np.int64]:
    hashes = [key_hashes([batch.column(key) for key in keys]) for batch in table.to_batches()]
    partition = (np.concatenate(hashes) % np.uint64(num_partitions)).astype(np.int64)
    order = np.argsort(partition, kind="stable")
    counts = np.bincount(partition, minlength=num_partitions)
    ends = np.cumsum(counts)
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with (
        atomic_file(path) as temporary,
        pa.OSFile(str(temporary), "wb") as stream,
        pa.ipc.new_file(stream, table.schema, options=options) as writer,
    ):
        # Some partitions at a time, so that the rows are not held twice.
        step = -(-num_partitions // 8)
        for first in range(0, num_partitions, step):
            last = min(first + step, num_partitions)
            begin = int(ends[first] - counts[first])
            part = table.take(pa.array(order[begin : ends[last - 1]])).combine_chunks()
            for number in range(first, last):
                start = int(ends[number] - counts[number]) - begin
                writer.write_batch(_one_batch(part.slice(start, int(counts[number]))))
    return counts


def _one_batch(table: pa.Table) -> pa.RecordBatch:
    batches = table.to_batches()
    if batches:
        return batches[0]
    return pa.record_batch([pa.array([], kind) for kind in table.schema.types], schema=table.schema)
