"""Append-only shards: whole records go to the end of the open one, which is synced now and then and at its close."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

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


class Timer(Protocol):
    """A call that is still to come."""

    def cancel(self) -> None:
        """Keeps the call from being made, unless it has begun."""
        ...


def start_timer(seconds: float, function: Callable[[], None]) -> Timer:
    """Calls `function` once, in a thread of its own, which does not keep the process alive."""
    timer = threading.Timer(seconds, function)
    timer.daemon = True
    timer.start()
    return timer


class ShardWriter:
    """Writes records to new shards of a folder; the shards of earlier processes are never touched.

    What was appended survives the death of the process at once, and a power cut once it is synced: after
    `sync_interval_s` at the latest, whether further records arrive or not, and when the shard is closed.

    Args:
        folder: Where the shards are.
        max_bytes: A shard that has reached this size is closed and the next one begun.
        sync_interval_s: Longest time that a record stays unsynced; 0 syncs every one.
        clock: Seconds that never go back.
        timer: Starts a timer (seconds, function).
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int,
        sync_interval_s: float,
        clock: Callable[[], float] = time.monotonic,
        timer: Callable[[float, Callable[[], None]], Timer] = start_timer,
    ) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._sync_interval_s = sync_interval_s
        self._clock = clock
        self._start_timer = timer
        # The timer syncs in a thread of its own; what it meets there is raised by the next call.
        self._lock = threading.Lock()
        self._timer: Timer | None = None
        self._failed: OSError | None = None
        self._handle: int | None = None
        self._size = 0
        self._unsynced_since: float | None = None
        # Names sort as numbers up to a million shards.
        self._next = max((int(path.stem.split("-")[1]) for path in shard_paths(folder)), default=-1) + 1

    def append(self, records: bytes) -> None:
        """Writes whole records.

        Raises:
            RunStoppedError: The disk is full or fails; what was appended before stays whole.
        """
        with disk_errors(self._folder), self._lock:
            self._raise_failed()
            if self._handle is None:
                self._handle = self._opened()
            try:
                self._write(self._handle, records)
            except OSError:
                # A torn record would be left out by readers anyway; the file is simply cleaner without it.
                with contextlib.suppress(OSError):
                    os.ftruncate(self._handle, self._size)
                raise
            self._size += len(records)
            if self._size >= self._max_bytes:
                self._close_shard()
            else:
                self._sync_in_time(self._handle)

    def close(self) -> None:
        """Syncs and closes the open shard, if there is one.

        Raises:
            RunStoppedError: The disk fails.
        """
        with disk_errors(self._folder), self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._close_shard()
            self._raise_failed()

    def _sync_in_time(self, handle: int) -> None:
        """Syncs what has waited long enough; sees to it that what has not will be."""
        now = self._clock()
        if self._unsynced_since is None:
            self._unsynced_since = now
        left_s = self._unsynced_since + self._sync_interval_s - now
        if left_s <= 0:
            os.fsync(handle)
            self._unsynced_since = None
        elif self._timer is None:
            self._timer = self._start_timer(left_s, self._on_timer)

    def _on_timer(self) -> None:
        with self._lock:
            self._timer = None
            if self._handle is None or self._unsynced_since is None:
                return
            try:
                self._sync_in_time(self._handle)
            except OSError as error:
                self._failed = error

    def _raise_failed(self) -> None:
        """Once a sync has failed, nobody knows what of the shard is on the disk; a second one would tell nothing."""
        error, self._failed = self._failed, None
        if error is not None:
            raise error

    def _close_shard(self) -> None:
        if self._handle is None:
            return
        handle, self._handle = self._handle, None
        self._unsynced_since = None
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def _opened(self) -> int:
        path = self._folder / f"shard-{self._next:06d}.log"
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
        self._next += 1
        self._size = 0
        sync_folder(self._folder)
        return handle

    @staticmethod
    def _write(handle: int, records: bytes) -> None:
        rest = memoryview(records)
        while rest:
            rest = rest[os.write(handle, rest) :]
