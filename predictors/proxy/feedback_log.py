"""Log of finished requests in segments of JSON lines, written in a background thread.

Segments are FOLDER/feedback-<UTC time>-<process>-<number>.jsonl. Every process starts a new segment, so only
the last line of a file can be incomplete after a crash, and several proxies can share a folder.
`evaluate-stream` and `import-lengths feedback` read the segments.

Records stay in memory until they are synced to a file that still has its name. On failure the segment is
closed and its unconfirmed records are written to a new one; readers skip duplicates.
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
from scheduler_core.shell.json_text import valid_unicode

logger = logging.getLogger(__name__)
#: Maximum number of records and of bytes in memory; further records are dropped, so that requests do not wait.
MAX_PENDING, MAX_PENDING_BYTES = 10_000, 64 * 2**20
#: Seconds to collect records before they are written and synced together.
LINGER_S = 0.2
#: Initial and maximum seconds between attempts to write after an error; the delay doubles.
RETRY_S = (1.0, 60.0)


class FeedbackLog:
    """Accepts records without waiting for the disk; InputError if the folder is not writable.

    Records of the same `LINGER_S` are written and synced (fsync) together.

    Args:
        folder: Folder of the segments; created if it does not exist, also if it is removed later.
        segment_bytes: Size at which a segment is closed and the next one is started.
        on_outcome: Called for each record with "written" (synced to disk), "dropped" (too many records or bytes
            in memory) or "failed" (not valid JSON, or still not written at `close`).
        retry_s: Initial and maximum seconds between attempts to write after an error.
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
        self._lines: list[bytes] = []  # from the queue, not yet confirmed
        # Each is changed by one thread only; their difference is the number of bytes in memory.
        self._num_bytes_put = self._num_bytes_confirmed = 0
        self._is_dropping = False
        # The current segment and its confirmed size.
        self._file, self._path, self._size = -1, self._folder, 0
        self._number = 0
        try:
            self._open_segment()
        except OSError as error:
            raise InputError("feedback", str(folder), f"a writable folder ({error.strerror})") from error
        self._thread = threading.Thread(target=self._run, name="tailcast-feedback", daemon=True)
        self._thread.start()

    def put(self, record: Mapping[str, Any]) -> None:
        """Enqueues a record and returns immediately; lone surrogates in its strings become U+FFFD."""
        num_pending = self._queue.qsize() + len(self._lines)
        num_bytes = self._num_bytes_put - self._num_bytes_confirmed
        if num_pending >= MAX_PENDING or num_bytes >= MAX_PENDING_BYTES:
            self._on_outcome("dropped")
            if not self._is_dropping:
                logger.error(
                    "feedback waits for the disk, records are dropped: %d of %d bytes", num_pending, num_bytes
                )
            self._is_dropping = True
            return
        self._is_dropping = self._is_dropping and num_pending > 0
        try:
            line = json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        except (TypeError, ValueError, RecursionError) as error:
            self._on_outcome("failed")
            logger.error("a feedback record is not valid JSON: %s", error)
            return
        data = valid_unicode(line).encode() + b"\n"
        self._num_bytes_put += len(data)
        self._queue.put(data)

    def close(self) -> None:
        """Writes pending records and stops the thread."""
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
                    logger.info("writing feedback works again")
                    delay_s = None
            except OSError as error:
                self._close_segment()
                if delay_s is None:
                    logger.error("cannot write feedback, requests continue: %s", error)
                    delay_s = 0.0  # retry immediately: a new segment suffices for a removed folder
                else:
                    delay_s = min(max(self._retry_s[0], 2 * delay_s), self._retry_s[1])
                    self._closed.wait(delay_s)  # records stay in the queue
        self._close_segment()
        for _ in self._lines:
            self._on_outcome("failed")

    def _take(self) -> bool:
        """Moves records from the queue to `_lines`; waits if `_lines` is empty. False after `close`."""
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
        """Writes and confirms all lines; on OSError the unconfirmed ones stay in `_lines`."""
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
                num_written = data.rfind(b"\n", 0, num_written) + 1  # complete lines before the error
                os.ftruncate(self._file, self._size + num_written)
            self._confirm(data[:num_written])
            if failure is not None:
                raise failure

    def _confirm(self, data: bytes) -> None:
        """Syncs the written `data` to disk and removes it from `_lines`; OSError if the file was replaced."""
        if not data:
            return
        os.fsync(self._file)
        if not self._size:
            _sync_folder(self._folder)
        if not os.path.samestat(os.stat(self._path), os.fstat(self._file)):
            raise FileNotFoundError(errno.ENOENT, "a feedback segment was replaced", str(self._path))
        self._size += len(data)
        self._num_bytes_confirmed += len(data)
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
        """Truncates the segment to its confirmed size and closes it; removes it if it is empty."""
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
    """Syncs the directory entries of a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
