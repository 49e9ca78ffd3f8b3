"""Append-only shards: whole records go to the end of the open one, which is synced now and then and at its close."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from data_gen.runs.errors import disk_errors

PATTERN = "shard-*.log"


def shard_paths(folder: Path) -> list[Path]:
    """The shards of a run, oldest first."""
    return sorted(folder.glob(PATTERN))


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class ShardWriter:
    """Writes records to new shards of a folder; the shards of earlier processes are never touched.

    What was appended survives the death of the process at once, and a power cut once it is synced: with the first
    record after `sync_interval_s`, and when the shard is closed.

    Args:
        folder: Where the shards are.
        max_bytes: A shard that has reached this size is closed and the next one begun.
        sync_interval_s: Longest time between two syncs while records arrive.
        clock: Seconds that never go back.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int,
        sync_interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._sync_interval_s = sync_interval_s
        self._clock = clock
        self._handle: int | None = None
        self._size = 0
        self._synced_at = 0.0
        # Names sort as numbers up to a million shards.
        self._next = max((int(path.stem.split("-")[1]) for path in shard_paths(folder)), default=-1) + 1

    def append(self, records: bytes) -> None:
        """Writes whole records.

        Raises:
            RunStoppedError: The disk is full or fails; what was appended before stays whole.
        """
        with disk_errors(self._folder):
            if self._handle is None:
                self._open()
            assert self._handle is not None
            try:
                self._write(self._handle, records)
            except OSError:
                # A torn record would be left out by readers anyway; the file is simply cleaner without it.
                with contextlib.suppress(OSError):
                    os.ftruncate(self._handle, self._size)
                raise
            self._size += len(records)
            if self._size >= self._max_bytes:
                self.close()
            elif self._clock() - self._synced_at >= self._sync_interval_s:
                os.fsync(self._handle)
                self._synced_at = self._clock()

    def close(self) -> None:
        """Syncs and closes the open shard, if there is one.

        Raises:
            RunStoppedError: The disk fails.
        """
        if self._handle is None:
            return
        handle, self._handle = self._handle, None
        with disk_errors(self._folder):
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def _open(self) -> None:
        path = self._folder / f"shard-{self._next:06d}.log"
        self._handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
        self._next += 1
        self._size = 0
        self._synced_at = self._clock()
        sync_folder(self._folder)

    @staticmethod
    def _write(handle: int, records: bytes) -> None:
        rest = memoryview(records)
        while rest:
            rest = rest[os.write(handle, rest) :]
