"""Fitting of a file of output lengths, block by block, in one process or several."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from scheduler_core.errors import InputError
from scheduler_core.shell.files import atomic_file
from scheduler_core.shell.processes import worker_processes
from scheduler_core.shell.progress import progress_bar
from training.fitting.fits import NUM_ERRORS, FitOptions, fit_groups, fits_table
from training.fitting.sample_files import read_samples
from training.fitting.samples import GroupedLengths, group_table

#: Picklable function that fits a block and returns a table.
Fit = Callable[[GroupedLengths, FitOptions], pa.Table]

_BLOCK_GROUPS = 16_384
_BLOCKS_PER_PROCESS = 4


def fit_block(groups: GroupedLengths, options: FitOptions) -> pa.Table:
    """Fits a block; returns a table `fits/2`."""
    return fits_table(fit_groups(groups, options))


def fit_file(
    samples: str | Path,
    out: str | Path,
    options: FitOptions,
    *,
    processes: int = 1,
    progress: bool = False,
    fit: Fit = fit_block,
) -> dict[str, Any]:
    """Fits all groups of a file. The output does not depend on the number of processes.

    Args:
        samples, out: The input, see `sample_files`, and the Parquet file to write, atomically.
        options: Grouping and fitting options.
        processes, progress: See `fit-dist --help`.
        fit: Function that fits a block; the result of a group must not depend on the other groups of the block.

    Returns:
        The identity of the input. The number of failed samples is stored in the output's metadata.

    Raises:
        InputError: The input is damaged or has a value that is not allowed, or no group has enough samples.
        TailcastError: A worker died.
    """
    out = Path(out)
    source = read_samples(samples, options.keys)
    if out.resolve() in {file.resolve() for file in source.files}:
        raise InputError("out", str(out), "another file than the samples")
    identity = source.identity()
    groups = group_table(
        source.table, source.path, keys=options.keys, max_tokens=options.max_tokens, locate=source.locate
    )
    tables = []
    with (
        progress_bar(len(groups), "group", enabled=progress, desc="fitting", unit_scale=True) as bar,
        contextlib.closing(_fitted(fit, options, groups, processes)) as fitted,
    ):
        for part in fitted:
            tables.append(part)
            bar.update(part.num_rows)
    table = pa.concat_tables(tables)
    table = table.replace_schema_metadata(
        {**(table.schema.metadata or {}), NUM_ERRORS: str(groups.num_errors)}
    )
    with atomic_file(out) as temporary:
        pq.write_table(table, temporary, compression="zstd")
    return identity


def _fitted(
    fit: Fit, options: FitOptions, groups: GroupedLengths, processes: int
) -> Generator[pa.Table, None, None]:
    """Fits of all groups in order, in blocks; from this process if there is one process or block."""
    size = min(_BLOCK_GROUPS, -(-len(groups) // (processes * _BLOCKS_PER_PROCESS if processes > 1 else 1)))
    starts = range(0, len(groups), size)
    blocks = (groups.take(range(start, min(start + size, len(groups)))) for start in starts)
    if processes == 1 or len(starts) == 1:
        for block in blocks:
            yield fit(block, options)
        return
    dead = "a worker process died (killed, or out of memory); fewer --processes need less memory"
    with worker_processes(min(processes, len(starts)), dead, _start_worker) as pool:
        yield from pool.map(fit, blocks, [options] * len(starts))


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
