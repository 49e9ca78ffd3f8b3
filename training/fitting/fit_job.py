"""Resumable fitting of a file of output lengths, block by block, in several processes.

The folder OUT.parts stores the state of an unfinished run:

| file | content |
|---|---|
| manifest.json | input, options and versions; only a run with the same ones can resume |
| shard-NUMBER.parquet | fits of one block, written atomically |
| whole.parquet | fits of all blocks, before the file is moved to OUT |
| grouping/ | temporary files of DuckDB |

The output does not depend on the number of processes, nor on interruptions.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from tqdm import tqdm

from scheduler_core.errors import InputError, TailcastError
from scheduler_core.shell.files import atomic_file, locked_folder, write_json
from scheduler_core.shell.json_text import parse_json
from scheduler_core.shell.processes import worker_processes
from training.fitting.fits import NUM_ERRORS, FitOptions, fit_groups, fits_table
from training.fitting.sample_files import SampleFile, open_samples
from training.fitting.samples import GROUP, ROW, GroupedLengths, check_enough, group_table

#: Picklable function that fits a block and returns a table.
Fit = Callable[[GroupedLengths, FitOptions], pa.Table]
Task = tuple[int, GroupedLengths]
Result = tuple[int, pa.Table]

MANIFEST = "manifest.json"
_TASKS_PER_PROCESS = 2


def fit_block(groups: GroupedLengths, options: FitOptions) -> pa.Table:
    """Fits a block; returns a table `fits/2`."""
    return fits_table(fit_groups(groups, options))


def fit_file(
    samples: str | Path,
    out: str | Path,
    options: FitOptions,
    *,
    versions: Mapping[str, str] | None = None,
    block_groups: int = 16_384,
    processes: int = 1,
    resume: bool = True,
    progress: bool = False,
    fit: Fit = fit_block,
) -> dict[str, Any]:
    """Fits all groups of a file of any size.

    After an interruption the same call resumes from the finished blocks in the folder OUT.parts. The folder is removed
    at the end, and when the run fails before the first block is finished.

    Args:
        samples, out: The input, see `sample_files`, and the Parquet file to write.
        options: Grouping and fitting options.
        versions: Versions of the packages that the result depends on.
        block_groups, processes, resume, progress: See `fit-dist --help`.
        fit: Function that fits a block; the result of a group must not depend on the other groups of the block.

    Returns:
        The identity of the input. The number of failed samples is stored in the output's metadata.

    Raises:
        InputError: The input is damaged or has a value that is not allowed; no group has enough samples; finished
            blocks belong to another input, other options or versions.
        TailcastError: A worker died, or the output cannot be written; finished blocks are kept.
    """
    out = Path(out)
    source = open_samples(samples, options.keys)
    if out.resolve() in {file.resolve() for file in source.files}:
        raise InputError("out", str(out), "another file than the samples")
    identity = source.identity()
    parts = _Parts(out)
    manifest: dict[str, Any] = {"block_groups": block_groups}
    for part, entries in (("samples", identity), ("options", asdict(options)), ("versions", versions or {})):
        manifest |= {f"{part}.{name}": value for name, value in entries.items()}
    with locked_folder(parts.folder, "out"):
        is_new = parts.open(manifest, resume=resume)
        try:
            with tqdm(
                total=source.num_rows,
                desc="fitting",
                unit="row",
                unit_scale=True,
                disable=not progress,
                mininterval=0.1 if sys.stderr.isatty() else 10.0,
            ) as bar:
                rows: dict[int, int] = {}
                tasks = _tasks(source, options, block_groups, parts, rows, bar)
                with contextlib.closing(_run_processes(fit, options, tasks, processes)) as results:
                    for number, shard in results:
                        parts.write(number, shard)
                        bar.update(rows.pop(number))
            parts.assemble(source.path)
        except BaseException as error:
            # Finished blocks of an invalid input cannot be reused, because a corrected input is a different one.
            if (is_new and isinstance(error, InputError)) or not parts.shards():
                parts.clear()
            raise
        parts.clear()
    return identity


def _tasks(
    source: SampleFile, options: FitOptions, block_groups: int, parts: _Parts, rows: dict[int, int], bar: Any
) -> Iterator[Task]:
    for number, table in enumerate(source.blocks(block_groups, parts.folder / "grouping")):
        if parts.path(number).is_file():
            bar.update(table.num_rows)
            continue
        rows[number] = table.num_rows
        numbers = table.column(ROW)
        groups = group_table(
            table.drop_columns([ROW, GROUP]),
            source.path,
            keys=options.keys,
            max_tokens=options.max_tokens,
            min_samples=0,
            locate=lambda row, numbers=numbers: source.locate(numbers[row].as_py()),  # type: ignore[misc]
        )
        yield number, groups


class _Parts:
    """The folder of parts of one output file."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.folder = out.with_name(out.name + ".parts")

    def open(self, manifest: dict[str, Any], *, resume: bool) -> bool:
        """Creates the folder, or reuses that of an interrupted run with the same manifest; returns whether it is new."""
        manifest = json.loads(json.dumps(manifest))
        names = {entry.name for entry in self.folder.iterdir()}
        if MANIFEST in names and resume:
            try:
                earlier = dict(parse_json((self.folder / MANIFEST).read_bytes()))
            except (TypeError, ValueError):
                earlier = {}
            changed = [name for name in earlier | manifest if earlier.get(name) != manifest.get(name)]
            if changed:
                raise InputError(
                    "resume",
                    f"changed {', '.join(changed)}",
                    f"the values of the interrupted run in {self.folder.name}; --resume false starts over",
                )
            return False
        if MANIFEST not in names and not all(name.startswith(f".{MANIFEST}.") for name in names):
            raise InputError("out", str(self.folder), "an unused name; fit-dist stores its state there")
        with self._writing():
            self.clear()
            write_json(self.folder / MANIFEST, manifest)
        return True

    def path(self, number: int) -> Path:
        """Path of the shard of a block."""
        return self.folder / f"shard-{number:08d}.parquet"

    def shards(self) -> list[Path]:
        """All finished shards, in the order of the blocks."""
        return sorted(self.folder.glob("shard-*.parquet"))

    def write(self, number: int, shard: pa.Table) -> None:
        """Writes a shard, atomically."""
        with self._writing(), atomic_file(self.path(number)) as temporary:
            pq.write_table(shard, temporary, compression="zstd")

    def assemble(self, samples: Path) -> None:
        """Writes the output file from all shards in order, atomically."""
        shards = self.shards()
        largest = 0
        try:
            num_errors = sum(int(pq.read_schema(shard).metadata[NUM_ERRORS]) for shard in shards)
            schema = pq.read_schema(shards[0])
            schema = schema.with_metadata(schema.metadata | {NUM_ERRORS: str(num_errors)})
            # Created inside the folder, so that a killed run leaves no files next to the output.
            whole = self.folder / "whole.parquet"
            with self._writing(), pq.ParquetWriter(whole, schema, compression="zstd") as writer:
                for shard in shards:
                    for batch in pq.ParquetFile(shard).iter_batches():
                        largest = max(largest, pc.max(batch.column("num_samples")).as_py())
                        writer.write_batch(batch.replace_schema_metadata(schema.metadata))
        except (pa.ArrowException, KeyError, TypeError, ValueError) as error:
            raise TailcastError(f"a block in {self.folder} is damaged; --resume false starts over") from error
        check_enough(largest, samples)
        with self._writing(), atomic_file(self.out) as temporary:
            shutil.move(whole, temporary)

    def clear(self) -> None:
        """Removes the content of the folder, the manifest last, so that it stays recognizable if this is interrupted."""
        for entry in sorted(self.folder.iterdir(), key=lambda entry: entry.name == MANIFEST):
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            detail = error.strerror or str(error).strip()
            raise TailcastError(
                f"out: cannot write {self.folder} ({detail}); finished blocks are kept: run the same command again to "
                "resume"
            ) from error


def _fit_shard(fit: Fit, options: FitOptions, groups: GroupedLengths) -> pa.Table:
    """Fits a block and stores its number of failed samples as metadata."""
    table = fit(groups, options)
    return table.replace_schema_metadata((table.schema.metadata or {}) | {NUM_ERRORS: str(groups.num_errors)})


def _run_processes(
    fit: Fit, options: FitOptions, tasks: Iterator[Task], processes: int
) -> Generator[Result, None, None]:
    """Fits tasks in several processes, or in this one if there is only one process or task."""
    first = list(islice(tasks, processes))
    tasks = chain(first, tasks)
    if len(first) < 2:
        for number, groups in tasks:
            yield number, _fit_shard(fit, options, groups)
        return
    dead = (
        "a worker process died (killed, or out of memory); finished blocks are kept: run the same command again to "
        "resume; fewer --processes or a smaller --block-groups need less memory"
    )
    with worker_processes(len(first), dead, _start_worker) as pool:
        running: dict[Future[pa.Table], int] = {}
        while True:
            for number, groups in islice(tasks, len(first) * _TASKS_PER_PROCESS - len(running)):
                running[pool.submit(_fit_shard, fit, options, groups)] = number
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result()


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
