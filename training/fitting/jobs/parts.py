"""The folder OUT.parts: what a run has finished, so that an interrupted one can go on.

| file | content |
|---|---|
| manifest.json | input, options and versions; a run that differs in any of them cannot go on here |
| shard-NUMBER.parquet | fits of one block; has its name only once it is whole |
| whole.parquet | all of them, on its way to OUT |
| partitions/ | rows brought together on disk, see `partitions` |
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from scheduler_core.errors import InputError, TailcastError
from scheduler_core.files import atomic_file, write_json
from scheduler_core.json_text import parse_json
from training.fitting.reading.table import GroupedLengths, check_enough

MANIFEST = "manifest.json"
#: Metadata of a shard; the first is kept, as a sum, in the whole file.
ERRORS, SAMPLES, LARGEST = b"tailcast.num_errors", b"tailcast.num_samples", b"tailcast.largest_group"


@dataclass(frozen=True, slots=True)
class Counts:
    """What a whole file of fits holds: groups, their answers, and failed answers that were left out."""

    num_groups: int
    num_samples: int
    num_errors: int


def encode_shard(groups: GroupedLengths, fits: pa.Table) -> bytes:
    """Fits of a block as a Parquet file, with the block's counts in its metadata."""
    counts = {
        ERRORS: str(groups.num_errors),
        SAMPLES: str(len(groups.flat_lengths)),
        LARGEST: str(int(groups.counts.max())),
    }
    table = fits.replace_schema_metadata((fits.schema.metadata or {}) | counts)
    stream = pa.BufferOutputStream()
    pq.write_table(table, stream, compression="zstd")
    return bytes(stream.getvalue().to_pybytes())


class Parts:
    """The folder of parts of one output file."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.folder = out.with_name(out.name + ".parts")

    def open(self, manifest: Mapping[str, Any], *, resume: bool) -> bool:
        """Makes the folder, or takes the one of an interrupted run of the same manifest; returns whether it is new.

        Raises:
            InputError: It belongs to a run with another manifest (named) and `resume` is true, or is not ours.
        """
        manifest = json.loads(json.dumps(manifest))
        if self.folder.exists() and not self._is_ours():
            raise InputError(
                "out", str(self.folder), "a name that is free: fit-dist keeps its unfinished work there"
            )
        found = self._manifest()
        if found is not None and resume:
            changed = _difference(found, manifest)
            if changed is not None:
                name, before, now = changed
                raise InputError(
                    "resume",
                    f"{name} = {now!r}",
                    f"{before!r}, as in the interrupted run whose parts are in {self.folder.name}; "
                    "--resume false starts over",
                )
            return False
        try:
            self.clear()
            self.folder.mkdir(exist_ok=True)
            write_json(self.folder / MANIFEST, manifest)
        except OSError as error:
            with contextlib.suppress(OSError):
                self.folder.rmdir()
            raise unwritable(self.folder, error) from error
        return True

    def _is_ours(self) -> bool:
        if not self.folder.is_dir():
            return False
        names = {entry.name for entry in self.folder.iterdir()}
        return MANIFEST in names or all(name.startswith(f".{MANIFEST}.") for name in names)

    def _manifest(self) -> Any:
        path = self.folder / MANIFEST
        if not path.is_file():
            return None
        try:
            return parse_json(path.read_bytes())
        except ValueError:
            return {}

    def path(self, number: int) -> Path:
        """Where the shard of a block is, or will be."""
        return self.folder / f"shard-{number:08d}.parquet"

    def write(self, number: int, content: bytes) -> None:
        """Writes a shard, atomically.

        Raises:
            TailcastError: It cannot be written, for instance because the disk is full.
        """
        try:
            with atomic_file(self.path(number)) as temporary:
                temporary.write_bytes(content)
        except OSError as error:
            raise unwritable(self.folder, error) from error

    def has(self, number: int) -> bool:
        """Whether the shard of a block is finished."""
        return self.path(number).is_file()

    def shards(self) -> list[Path]:
        """All finished shards, in the order of the blocks."""
        return sorted(self.folder.glob("shard-*.parquet"))

    def has_progress(self) -> bool:
        """Whether there is anything that an interrupted run can go on with: a finished block, or all partitions."""
        return bool(self.shards()) or (self.folder / "partitions").is_dir()

    def assemble(self, samples: Path) -> Counts:
        """Writes the output file from all shards in order, atomically.

        Args:
            samples: The input, for messages.

        Raises:
            InputError: No group has enough answers to be fitted.
            TailcastError: The file cannot be written.
        """
        shards = self.shards()
        totals = {ERRORS: 0, SAMPLES: 0}
        largest = num_groups = 0
        for shard in shards:
            try:
                metadata = pq.read_metadata(shard)
                largest = max(largest, int(metadata.metadata[LARGEST]))
                for name in totals:
                    totals[name] += int(metadata.metadata[name])
            except (pa.ArrowException, KeyError, TypeError, ValueError) as error:
                raise TailcastError(f"{shard} is damaged; --resume false starts over") from error
            num_groups += metadata.num_rows
        check_enough(largest, samples)
        schema = pq.read_schema(shards[0])
        kept = {name: value for name, value in schema.metadata.items() if name not in (SAMPLES, LARGEST)}
        schema = schema.with_metadata(kept | {ERRORS: str(totals[ERRORS])})
        try:
            # Made inside the folder, so that a kill leaves nothing beside the output.
            with (
                atomic_file(self.folder / "whole.parquet") as temporary,
                pq.ParquetWriter(temporary, schema, compression="zstd") as writer,
            ):
                for table in _tables(shards):
                    writer.write_table(table.replace_schema_metadata(schema.metadata))
            with atomic_file(self.out) as temporary:
                shutil.move(self.folder / "whole.parquet", temporary)
        except OSError as error:
            raise unwritable(self.out, error) from error
        return Counts(num_groups, totals[SAMPLES], totals[ERRORS])

    def clear(self) -> None:
        """Removes what is in the folder."""
        if self.folder.exists():
            # The manifest last, so that what is left of an interrupted removal is still known as ours.
            for entry in sorted(self.folder.iterdir(), key=lambda entry: entry.name == MANIFEST):
                if entry.is_dir():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()


def _tables(shards: list[Path]) -> Iterator[pa.Table]:
    for shard in shards:
        with pq.ParquetFile(shard) as file:
            for group in range(file.num_row_groups):
                yield file.read_row_group(group)


def unwritable(path: Path, error: OSError) -> TailcastError:
    """What a full disk or a folder without permission means."""
    detail = error.strerror or str(error).strip()
    return TailcastError(
        f"out: cannot write {path} ({detail}); finished blocks, if any, are kept, and the same command goes on from there"
    )


def _difference(before: Any, now: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """Name and both values of the first entry in which two JSON objects differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(before.keys() | now.keys()):
            found = _difference(before.get(key), now.get(key), f"{name}.{key}" if name else key)
            if found is not None:
                return found
        return None
    return None if before == now else (name, before, now)
