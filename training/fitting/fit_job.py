"""Fitting of a file of output lengths, block by block, in several processes; memory does not grow with the file."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from scheduler_core.errors import InputError, TailcastError
from scheduler_core.shell.files import atomic_file
from scheduler_core.shell.processes import worker_processes
from scheduler_core.shell.progress import progress_bar
from training.fitting.fits import NUM_ERRORS, FitOptions, fit_groups, fits_table
from training.fitting.sample_files import SampleFile, open_samples
from training.fitting.samples import GROUP, ROW, GroupedLengths, check_enough, group_table

#: Picklable function that fits a block and returns a table.
Fit = Callable[[GroupedLengths, FitOptions], pa.Table]

_BLOCKS_PER_PROCESS = 2


def fit_block(groups: GroupedLengths, options: FitOptions) -> pa.Table:
    """Fits a block; returns a table `fits/2`."""
    return fits_table(fit_groups(groups, options))


def fit_file(
    samples: str | Path,
    out: str | Path,
    options: FitOptions,
    *,
    block_groups: int = 16_384,
    processes: int = 1,
    progress: bool = False,
    fit: Fit = fit_block,
) -> dict[str, Any]:
    """Fits all groups of a file of any size. The output does not depend on the number of processes.

    Args:
        samples, out: The input, see `sample_files`, and the Parquet file to write, atomically.
        options: Grouping and fitting options.
        block_groups, processes, progress: See `fit-dist --help`.
        fit: Function that fits a block; the result of a group must not depend on the other groups of the block.

    Returns:
        The identity of the input. The number of failed samples is stored in the output's metadata.

    Raises:
        InputError: The input is damaged or has a value that is not allowed, or no group has enough samples.
        TailcastError: A worker died, or the output cannot be written.
    """
    out = Path(out)
    largest = num_errors = 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(_writing(out))
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent)))
        source = open_samples(samples, options.keys, work=work)
        if out.resolve() in {file.resolve() for file in source.files}:
            raise InputError("out", str(out), "another file than the samples")
        identity = source.identity()
        temporary = stack.enter_context(atomic_file(out))
        bar = stack.enter_context(
            progress_bar(source.num_rows, "row", enabled=progress, desc="fitting", unit_scale=True)
        )
        blocks = _blocks(source, options, block_groups, work)
        fitted = stack.enter_context(contextlib.closing(_fitted(fit, options, blocks, processes)))
        writer = None
        for groups, num_rows, table in fitted:
            num_errors += groups.num_errors
            largest = max(largest, pc.max(table.column("num_samples")).as_py())
            if writer is None:
                writer = stack.enter_context(pq.ParquetWriter(temporary, table.schema, compression="zstd"))
            writer.write_table(table)
            bar.update(num_rows)
        check_enough(largest, source.path)
        assert writer is not None
        writer.add_key_value_metadata({NUM_ERRORS: str(num_errors)})
        writer.close()
    return identity


@contextlib.contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        detail = error.strerror or str(error).strip()
        raise TailcastError(f"out: cannot write {out} ({detail})") from error


def _blocks(
    source: SampleFile, options: FitOptions, block_groups: int, work: Path
) -> Iterator[tuple[GroupedLengths, int]]:
    """Groups and number of rows of each block."""
    for table in source.blocks(block_groups, work):
        numbers = table.column(ROW)
        groups = group_table(
            table.drop_columns([ROW, GROUP]),
            source.path,
            keys=options.keys,
            max_tokens=options.max_tokens,
            min_samples=0,
            locate=lambda row, numbers=numbers: source.locate(numbers[row].as_py()),  # type: ignore[misc]
        )
        yield groups, table.num_rows


def _fitted(
    fit: Fit, options: FitOptions, blocks: Iterator[tuple[GroupedLengths, int]], processes: int
) -> Generator[tuple[GroupedLengths, int, pa.Table], None, None]:
    """Blocks with their fits, in order, from several processes, or from this one if there is one process or block."""
    first = list(islice(blocks, processes))
    blocks = chain(first, blocks)
    if len(first) < 2:
        for groups, num_rows in blocks:
            yield groups, num_rows, fit(groups, options)
        return
    dead = "a worker process died (killed, or out of memory); fewer --processes or a smaller --block-groups need less memory"
    with worker_processes(len(first), dead, _start_worker) as pool:
        running: deque[tuple[GroupedLengths, int, Future[pa.Table]]] = deque()
        for groups, num_rows in blocks:
            running.append((groups, num_rows, pool.submit(fit, groups, options)))
            if len(running) == len(first) * _BLOCKS_PER_PROCESS:
                groups, num_rows, future = running.popleft()
                yield groups, num_rows, future.result()
        for groups, num_rows, future in running:
            yield groups, num_rows, future.result()


def _start_worker() -> None:
    """Initializes a worker: it ignores interrupts, which the parent handles, and exits when the parent dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pa.set_cpu_count(1)
    parent = multiprocessing.parent_process()
    if parent is not None:

        def end_with_parent() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=end_with_parent, daemon=True).start()
