"""Finished requests in segments of JSON lines, written in a thread of their own.

Segments are FOLDER/feedback-<UTC time>-<process>-<number>.jsonl. A process begins a segment of its own, so a line torn
by a crash is the last of its file for ever, and several proxies may share a folder. Keys are those that
`evaluate --stream` reads (mu, sigma, nu, output_tokens, finished, served_model, max_tokens, time) and those that
`import-lengths feedback` reads beside them.

A record is held in memory until it is on the disk, in a file that still has its name. Where that fails the segment is
given up and its last records go to a new one; readers skip a record that is in both.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from scheduler_core.errors import InputError
from scheduler_core.json_text import valid_unicode

logger = logging.getLogger(__name__)
Fsync = Literal["always", "interval", "never"]
#: Records in memory that wait for the disk; further ones are dropped: a full disk must not stop requests.
MAX_PENDING = 10_000
BATCH = 256
#: Seconds between attempts to write where the disk refuses; doubled after each, up to the last.
RETRY_S = (1.0, 60.0)


class FeedbackLog:
    """Takes records without waiting for the disk.

    Args:
        folder: Made if it is not there, also when it is removed later.
        segment_bytes: A segment that has reached this size is closed and the next one begun.
        fsync: When lines are forced to the disk: "always" after each batch of lines that came together, "interval" at
            most every `fsync_s` seconds and when a segment is closed, "never" leaves it to the system.
        fsync_s: Seconds > 0.
        counted: Called for each record with "written" (it is on the disk; with fsync "never": with the system),
            "dropped" (the disk is too slow, or has refused for long) or "failed" (it is no JSON, or the disk still
            refused it at the end).
        retry_s: Seconds until the first new attempt and longest time between attempts where the disk refuses.

    Raises:
        InputError: A limit is outside its range, or the folder cannot be written to.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        segment_bytes: int = 64 * 2**20,
        fsync: Fsync = "interval",
        fsync_s: float = 1.0,
        counted: Callable[[str], None] = lambda outcome: None,
        retry_s: tuple[float, float] = RETRY_S,
    ) -> None:
        if segment_bytes < 1:
            raise InputError("feedback_segment_mib", segment_bytes, "bytes >= 1")
        if fsync not in ("always", "interval", "never"):
            raise InputError("feedback_fsync", fsync, "always, interval or never")
        if not fsync_s > 0:
            raise InputError("feedback_fsync_s", fsync_s, "seconds > 0")
        self._folder = Path(folder)
        self._segment_bytes, self._fsync, self._fsync_s = segment_bytes, fsync, fsync_s
        self._counted = counted
        self._retry_s = retry_s
        self._queue: queue.Queue[bytes | None] = queue.Queue()
        self._closed = threading.Event()
        # Records taken from the queue and not yet confirmed; the first `_num_written` of them are in the segment.
        self._lines: list[bytes] = []
        self._num_written = 0
        self._segment: _Segment | None = None
        self._number = 0
        self._confirmed_s = time.monotonic()
        try:
            self._segment = self._new_segment()
        except OSError as error:
            raise InputError("feedback", str(folder), f"a folder to write to ({error.strerror})") from error
        self._thread = threading.Thread(target=self._run, name="tailcast-feedback", daemon=True)
        self._thread.start()

    def put(self, record: Mapping[str, Any]) -> None:
        """Hands a record over and returns at once; lone surrogates in its strings become U+FFFD."""
        if self._queue.qsize() + len(self._lines) >= MAX_PENDING:
            self._counted("dropped")
            return
        try:
            line = json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        except (TypeError, ValueError, RecursionError) as error:
            self._counted("failed")
            logger.error("a feedback record is no JSON: %s", error)
            return
        self._queue.put(valid_unicode(line).encode() + b"\n")

    def close(self) -> None:
        """Writes what was put, forces it to the disk (unless "never") and ends the thread."""
        self._closed.set()
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        delay_s: float | None = None
        running = True
        while running or delay_s == 0.0:
            running = running and self._take()
            try:
                self._write()
                if self._num_written and (not running or self._sync_is_due()):
                    self._confirm()
                    if delay_s is not None:
                        logger.info("feedback is written again")
                    delay_s = None
            except OSError as error:
                self._give_up_segment()
                if delay_s is None:
                    logger.error("feedback cannot be written, requests go on: %s", error)
                    delay_s = 0.0  # a removed folder needs no more than a new segment
                else:
                    delay_s = min(max(self._retry_s[0], 2 * delay_s), self._retry_s[1])
                    self._closed.wait(delay_s)  # meanwhile records wait in the queue
        self._give_up_segment()
        for _ in self._lines:
            self._counted("failed")

    def _take(self) -> bool:
        """Moves records from the queue to `_lines`; waits for one unless there is something else to do. False at the end."""
        try:
            line = self._queue.get(timeout=self._idle_s())
            while line is not None:
                self._lines.append(line)
                if len(self._lines) - self._num_written >= BATCH:
                    return True
                line = self._queue.get_nowait()
            return False
        except queue.Empty:
            return True

    def _idle_s(self) -> float | None:
        """Seconds until there is something to do without a new record; None: there never is."""
        if len(self._lines) > self._num_written:
            return 0.0
        return max(self._confirmed_s + self._fsync_s - time.monotonic(), 0.0) if self._lines else None

    def _sync_is_due(self) -> bool:
        if self._fsync != "interval" or self._num_written >= MAX_PENDING:
            return True
        return time.monotonic() - self._confirmed_s >= self._fsync_s

    def _write(self) -> None:
        while self._num_written < len(self._lines):
            if self._segment is not None and self._segment.size >= self._segment_bytes:
                self._confirm()
                self._give_up_segment()
            if self._segment is None:
                self._segment = self._new_segment()
            try:
                self._segment.append(self._lines[self._num_written])
            except OSError:
                self._confirm()  # a full disk has taken the lines before
                raise
            self._num_written += 1

    def _confirm(self) -> None:
        """Counts what is written, once it is safe."""
        assert self._segment is not None
        self._segment.confirm(sync=self._fsync != "never")
        self._confirmed_s = time.monotonic()
        for _ in range(self._num_written):
            self._counted("written")
        del self._lines[: self._num_written]
        self._num_written = 0

    def _give_up_segment(self) -> None:
        """Closes the segment; what is not confirmed goes to the next one."""
        self._num_written = 0
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def _new_segment(self) -> _Segment:
        self._folder.mkdir(parents=True, exist_ok=True)
        moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")
        self._number += 1
        name = f"feedback-{moment}-{os.getpid()}-{self._number:06d}.jsonl"
        return _Segment(self._folder / name)


class _Segment:
    """An open file of lines, of which the first ones are confirmed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o666)
        self.size = self._confirmed_size = 0

    def append(self, line: bytes) -> None:
        """Writes a line.

        Raises:
            OSError: It is not in the file.
        """
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            os.ftruncate(self._descriptor, self.size)
            raise
        self.size += len(line)

    def confirm(self, *, sync: bool) -> None:
        """Sees to it that all lines stay.

        Raises:
            OSError: The disk does not take them, or the file no longer has its name.
        """
        if sync:
            os.fsync(self._descriptor)
            if not self._confirmed_size:
                _sync_folder(self._path.parent)
        if not os.path.samestat(os.stat(self._path), os.fstat(self._descriptor)):
            raise FileNotFoundError(errno.ENOENT, "a feedback segment was replaced", str(self._path))
        self._confirmed_size = self.size

    def close(self) -> None:
        """Removes lines that are not confirmed, and the file if there are no others."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, self._confirmed_size)
        with contextlib.suppress(OSError):
            os.close(self._descriptor)
        if not self._confirmed_size:
            with contextlib.suppress(OSError):
                self._path.unlink()


def _sync_folder(folder: Path) -> None:
    """Makes new names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
