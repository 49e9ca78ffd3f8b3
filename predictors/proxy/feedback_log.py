"""Finished requests in segments of JSON lines, written in a thread of their own.

Segments are FOLDER/feedback-<UTC time>-<process>-<number>.jsonl. A process begins a segment of its own, so a line torn
by a crash is the last of its file for ever, and several proxies may share a folder. Keys are those that
`evaluate --stream` reads (mu, sigma, nu, output_tokens, finished, served_model, max_tokens, time) and those that
`import-lengths feedback` reads beside them.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any, Literal

from scheduler_core.errors import InputError

logger = logging.getLogger(__name__)
Fsync = Literal["always", "interval", "never"]
#: Records that wait for the disk; further ones are dropped and counted: a full disk must not stop answers.
MAX_PENDING = 10_000
BATCH = 256


class FeedbackLog:
    """Takes records without waiting for the disk.

    Args:
        folder: Made if it is not there.
        segment_bytes: A segment that has reached this size is closed and the next one begun.
        fsync: When lines are forced to the disk: "always" after each batch of lines that came together, "interval" at
            most every `fsync_s` seconds and when a segment is closed, "never" leaves it to the system.
        fsync_s: Seconds > 0.
        counted: Told "written", "dropped" (the disk is too slow) or "failed" (the disk refuses) for each record; called
            in the thread.

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
        self._queue: queue.Queue[bytes | None] = queue.Queue()
        self._file: FileIO | None = None
        self._size = self._number = 0
        self._synced = True
        self._last_sync_s = time.monotonic()
        self._works = True
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._begin()
        except OSError as error:
            raise InputError("feedback", str(folder), f"a folder to write to ({error.strerror})") from error
        self._thread = threading.Thread(target=self._run, name="tailcast-feedback", daemon=True)
        self._thread.start()

    def put(self, record: Mapping[str, Any]) -> None:
        """Hands a record over; returns at once."""
        if self._queue.qsize() >= MAX_PENDING:
            self._counted("dropped")
            return
        line = json.dumps(record, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
        self._queue.put(line.encode() + b"\n")

    def close(self) -> None:
        """Writes what was put, forces it to the disk (unless "never") and ends the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        going = True
        while going:
            lines, going = self._take()
            try:
                self._write(lines)
                self._sync(closing=not going)
            except OSError as error:
                self._lost(lines, error)
        self._end()

    def _take(self) -> tuple[list[bytes], bool]:
        """Some lines, and whether there will be more; none where only the disk is to be synced."""
        timeout = None if self._synced or self._fsync != "interval" else self._fsync_s
        lines: list[bytes] = []
        try:
            found = self._queue.get(timeout=timeout)
            while found is not None:
                lines.append(found)
                if len(lines) == BATCH:
                    return lines, True
                found = self._queue.get_nowait()
            return lines, False
        except queue.Empty:
            return lines, True

    def _write(self, lines: list[bytes]) -> None:
        while lines:
            if self._file is None or self._size >= self._segment_bytes:
                self._end()
                self._begin()
            assert self._file is not None
            line = lines[0]
            written = self._file.write(line)
            self._size += written
            if written != len(line):
                self._file.write(line[written:])
                self._size += len(line) - written
            self._synced = False
            lines.pop(0)
            self._counted("written")
        if not self._works:
            logger.info("feedback is written again")
            self._works = True

    def _lost(self, lines: list[bytes], error: OSError) -> None:
        for _ in lines:
            self._counted("failed")
        if self._works:
            logger.error("feedback cannot be written, requests go on: %s", error)
        self._works = False
        self._end()  # the next line begins a segment: this one may end with half a line

    def _begin(self) -> None:
        moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")
        self._number += 1
        name = f"feedback-{moment}-{os.getpid()}-{self._number:06d}.jsonl"
        self._file = FileIO(self._folder / name, "x")
        self._size = 0

    def _sync(self, *, closing: bool) -> None:
        if self._file is None or self._synced or self._fsync == "never":
            return
        now = time.monotonic()
        if self._fsync == "always" or closing or now - self._last_sync_s >= self._fsync_s:
            os.fsync(self._file.fileno())
            self._last_sync_s, self._synced = now, True

    def _end(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        try:
            if not self._synced and self._fsync != "never":
                os.fsync(file.fileno())
            self._synced = True
            file.close()
        except OSError as error:
            logger.error("a feedback segment was not closed well: %s", error)
