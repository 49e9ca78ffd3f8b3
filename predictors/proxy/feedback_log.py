"""Finished requests in segments of JSON lines, written in a thread of their own.

Segments are FOLDER/feedback-<UTC time>-<process>-<number>.jsonl. A process begins a segment of its own, so a line torn
by a crash is always the last of its file, and several proxies may share a folder. `evaluate-stream` and
`import-lengths feedback` read them.

A record is held in memory until it is on the disk, in a file that still has its name. Where that fails the segment is
closed and its unconfirmed records go to a new one; readers skip a record that is in both.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from scheduler_core.errors import InputError
from scheduler_core.json_text import valid_unicode

logger = logging.getLogger(__name__)
#: Records in memory that wait for the disk; further ones are dropped: a full disk must not stop requests.
MAX_PENDING = 10_000
#: Seconds in which records are collected, to be forced to the disk together.
LINGER_S = 0.2
#: Seconds between attempts to write where the disk refuses; doubled after each, up to the last.
RETRY_S = (1.0, 60.0)


class FeedbackLog:
    """Takes records without waiting for the disk; InputError if the folder cannot be written to.

    Lines that come within `LINGER_S` are written and forced to the disk (fsync) together.

    Args:
        folder: Made if it is not there, also when it is removed later.
        segment_bytes: A segment that has reached this size is closed and the next one begun.
        on_outcome: Called for each record with "written" (it is on the disk, and survives a crash), "dropped" (the disk is
            too slow, or has refused for long) or "failed" (it is not JSON, or the disk still refused it at the end).
        retry_s: Seconds until the first new attempt and longest time between attempts where the disk refuses.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        segment_bytes: int = 64 * 2**20,
        on_outcome: Callable[[str], None] = lambda outcome: None,
        retry_s: tuple[float, float] = RETRY_S,
    ) -> None:
        self._folder = Path(folder)
        self._segment_bytes = segment_bytes
        self._on_outcome = on_outcome
        self._retry_s = retry_s
        self._queue: queue.Queue[bytes | None] = queue.Queue()
        self._closed = threading.Event()
        self._lines: list[bytes] = []  # taken from the queue, and not yet confirmed
        # The segment, and its size as far as it is confirmed.
        self._file, self._path, self._size = -1, self._folder, 0
        self._number = 0
        try:
            self._open_segment()
        except OSError as error:
            raise InputError("feedback", str(folder), f"a folder to write to ({error.strerror})") from error
        self._thread = threading.Thread(target=self._run, name="tailcast-feedback", daemon=True)
        self._thread.start()

    def put(self, record: Mapping[str, Any]) -> None:
        """Hands a record over and returns at once; lone surrogates in its strings become U+FFFD."""
        if self._queue.qsize() + len(self._lines) >= MAX_PENDING:
            self._on_outcome("dropped")
            return
        try:
            line = json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        except (TypeError, ValueError, RecursionError) as error:
            self._on_outcome("failed")
            logger.error("a feedback record is not JSON: %s", error)
            return
        self._queue.put(valid_unicode(line).encode() + b"\n")

    def close(self) -> None:
        """Writes what was put and ends the thread."""
        self._closed.set()
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        delay_s: float | None = None
        is_open = True
        while is_open or delay_s == 0.0:
            is_open = is_open and self._take()
            try:
                self._write()
                if delay_s is not None and not self._lines:
                    logger.info("feedback is written again")
                    delay_s = None
            except OSError as error:
                self._close_segment()
                if delay_s is None:
                    logger.error("feedback cannot be written, requests go on: %s", error)
                    delay_s = 0.0  # a removed folder needs no more than a new segment
                else:
                    delay_s = min(max(self._retry_s[0], 2 * delay_s), self._retry_s[1])
                    self._closed.wait(delay_s)  # meanwhile records wait in the queue
        self._close_segment()
        for _ in self._lines:
            self._on_outcome("failed")

    def _take(self) -> bool:
        """Moves records from the queue to `_lines`; waits for one unless some are left. False at the end."""
        try:
            line = self._queue.get(block=not self._lines)
            self._closed.wait(LINGER_S)
            while line is not None:
                self._lines.append(line)
                line = self._queue.get_nowait()
            return False
        except queue.Empty:
            return True

    def _write(self) -> None:
        """Writes all lines and confirms them; OSError if some are not on the disk: they are still in `_lines`."""
        while self._lines:
            if self._size >= self._segment_bytes:
                self._close_segment()
            if self._file < 0:
                self._open_segment()
            sizes = itertools.accumulate(map(len, self._lines), initial=self._size)
            count = sum(size < self._segment_bytes for size in sizes)
            data = b"".join(self._lines[:count])
            num_written, failure = 0, None
            try:
                while num_written < len(data):
                    num_written += os.write(self._file, data[num_written:])
            except OSError as error:
                failure = error
                num_written = data.rfind(b"\n", 0, num_written) + 1  # a full disk has taken the lines before
                os.ftruncate(self._file, self._size + num_written)
            self._confirm(data[:num_written])
            if failure is not None:
                raise failure

    def _confirm(self, data: bytes) -> None:
        """Forces the first lines to the disk and counts them, if their file still has its name."""
        if not data:
            return
        os.fsync(self._file)
        if not self._size:
            _sync_folder(self._folder)
        if not os.path.samestat(os.stat(self._path), os.fstat(self._file)):
            raise FileNotFoundError(errno.ENOENT, "a feedback segment was replaced", str(self._path))
        self._size += len(data)
        num_lines = data.count(b"\n")
        del self._lines[:num_lines]
        for _ in range(num_lines):
            self._on_outcome("written")

    def _open_segment(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")
        self._number += 1
        self._path = self._folder / f"feedback-{moment}-{os.getpid()}-{self._number:06d}.jsonl"
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o666)

    def _close_segment(self) -> None:
        """Removes what is not confirmed of the segment, and the file if there is nothing else; lines go to the next one."""
        if self._file < 0:
            return
        with contextlib.suppress(OSError):
            os.ftruncate(self._file, self._size)
        with contextlib.suppress(OSError):
            os.close(self._file)
        if not self._size:
            with contextlib.suppress(OSError):
                self._path.unlink()
        self._file, self._size = -1, 0


def _sync_folder(folder: Path) -> None:
    """Makes new names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
