"""From a file of answer lengths to a file of fits: blocks, shards, and one output file.

The output does not depend on how many processes or machines made it, nor on whether it was made in one go.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa

from scheduler_core.errors import InputError
from scheduler_core.files import locked_folder, sha256_file
from training.fitting.fits import fit_groups
from training.fitting.fits_file import fits_table
from training.fitting.jobs.parts import Counts, Parts
from training.fitting.jobs.workers import Fit, Runner, Task, run_here
from training.fitting.options import FitOptions
from training.fitting.reading.blocks import Block, BlockLimits, Grouping, read_blocks
from training.fitting.reading.formats import SampleFile, open_samples
from training.fitting.reading.table import GroupedLengths

DEFAULT_GROUPING = Grouping()
DEFAULT_LIMITS = BlockLimits()


def fit_block(groups: GroupedLengths, options: FitOptions) -> pa.Table:
    """Fits of a block as a table `fits/2`."""
    return fits_table(fit_groups(groups, options))


def input_identity(source: SampleFile) -> dict[str, Any]:
    """Name, size and SHA-256 of the input; of a folder those of each file.

    Raises:
        InputError: Two files have the same content (a copy or a link): its answers would count twice.
    """
    files: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for file in source.files:
        digest = sha256_file(file)
        if digest in names and source.has_rows(file):
            allowed = f"files that differ: {names[digest]} is the same, and its answers would count twice"
            raise InputError(f"samples {source.path.name}", file.name, allowed)
        names[digest] = file.name
        files.append({"name": file.name, "size": file.stat().st_size, "sha256": digest})
    return files[0] if source.path == source.files[0] else {"name": source.path.name, "files": files}


def fit_file(
    samples: str | Path,
    out: str | Path,
    fit: Fit,
    *,
    grouping: Grouping = DEFAULT_GROUPING,
    settings: Mapping[str, Any] | None = None,
    limits: BlockLimits = DEFAULT_LIMITS,
    runner: Runner = run_here,
    resume: bool = True,
    progress: bool = False,
) -> tuple[Counts, dict[str, Any]]:
    """Fits all groups of a file of any format and size.

    Interrupted at any moment, killed included, the same call goes on where it stopped: finished blocks are kept in
    the folder OUT.parts, which is removed at the end, and at an early end before the first block is finished.

    Args:
        samples: The input, see `formats`.
        out: The Parquet file to write.
        fit: Block -> table with one row for each group; the same for a group whatever is around it.
        grouping: How rows become groups.
        settings: JSON object of all else the result depends on: options, versions.
        limits: How much is held at a time.
        runner: Where blocks are fitted, see `workers` and `ray_workers`.
        resume: Go on with finished blocks; False: start over.
        progress: Show a bar on stderr.

    Returns:
        What the output holds, and the identity of the input.

    Raises:
        InputError: The input is damaged or has a value that is not allowed; no group has enough answers; finished
            blocks belong to another input, other options or versions.
        TailcastError: A worker died, or the output cannot be written; finished blocks are kept.
    """
    out = Path(out)
    if out.is_dir():
        raise InputError("out", str(out), "a file path, but a folder stands there")
    source = open_samples(samples, keys=grouping.keys, weights=grouping.weights)
    if out.resolve() in {file.resolve() for file in source.files}:
        raise InputError("out", str(out), "another file than the samples")
    identity = input_identity(source)
    parts = Parts(out)
    manifest = {
        "samples": identity,
        "grouping": {
            "keys": list(grouping.keys),
            "max_tokens": grouping.max_tokens,
            "weights": grouping.weights,
        },
        "settings": dict(settings or {}),
        "blocks": {"groups": limits.groups, "answers": limits.answers, "held_bytes": limits.held_bytes},
    }
    with locked_folder(parts.folder, "out"):
        fresh = parts.open(manifest, resume=resume)
        try:
            with closing(_Bars(source.num_rows, progress)) as bars:
                blocks = read_blocks(
                    source, grouping, limits, parts.folder, advance=lambda rows: bars.update("sorting", rows)
                )
                rows: dict[int, int] = {}
                with closing(runner(fit, _tasks(blocks, parts, rows, bars))) as results:
                    for number, shard in results:
                        parts.write(number, shard)
                        bars.update("fitting", rows.pop(number))
            counts = parts.assemble(source.path)
        except BaseException as error:
            # Once the input is mended no block of it could be kept.
            if (fresh and isinstance(error, InputError)) or not parts.has_progress():
                parts.clear()
            raise
        parts.clear()
    return counts, identity


def _tasks(blocks: Iterator[Block], parts: Parts, rows: dict[int, int], bars: _Bars) -> Iterator[Task]:
    for block in blocks:
        if parts.has(block.number):
            bars.update("fitting", block.num_rows)
        else:
            rows[block.number] = block.num_rows
            yield block.number, block.load()


class _Bars:
    """One progress bar at a time, each from its first update on."""

    def __init__(self, total: int | None, enabled: bool) -> None:
        self._total = total
        self._enabled = enabled
        self._bar: Any = None
        self._name = ""

    def update(self, name: str, rows: int) -> None:
        if name != self._name:
            self.close()
            self._name, self._bar = name, progress_bar(name, self._total, "row", self._enabled)
        self._bar.update(rows)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def progress_bar(name: str, total: int | None, unit: str, enabled: bool) -> Any:
    """A bar on stderr to be moved by hand: redrawn on a terminal, a line every ten seconds elsewhere."""
    from tqdm import tqdm

    interval = 0.1 if sys.stderr.isatty() else 10.0
    return tqdm(total=total, desc=name, unit=unit, unit_scale=True, disable=not enabled, mininterval=interval)
