"""Store of an unfinished sampling run: an SQLite file in WAL mode with (prompt, sample index) as key.

A result is committed on arrival, so it is not lost if the process is killed. The write-ahead log is synced to disk within
`sync_interval_s`, so a power failure loses at most the results of that time. `export` writes the Parquet file.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_gen.backend import SampledOutput, SampleFailure
from data_gen.prompts import Prompt
from data_gen.samples import SCHEMA, prompt_sha256
from scheduler_core.errors import InputError, TailcastError
from scheduler_core.shell.files import atomic_file, sync_path
from scheduler_core.shell.json_text import valid_unicode

EXPORT_ROWS = 8192
_TABLES = """
CREATE TABLE run (manifest TEXT NOT NULL);
CREATE TABLE prompts (
    prompt_id TEXT PRIMARY KEY, prompt_sha256 TEXT NOT NULL, prompt TEXT, messages TEXT,
    category TEXT NOT NULL, dataset TEXT NOT NULL
);
CREATE TABLE samples (
    prompt_id TEXT NOT NULL, sample_index INTEGER NOT NULL, engine_version TEXT NOT NULL, prompt_tokens INTEGER,
    output_tokens INTEGER NOT NULL, finish_reason TEXT NOT NULL, error TEXT,
    queue_s REAL, ttft_s REAL, total_s REAL, text TEXT,
    final INTEGER NOT NULL, -- 0: a failure that a retry may fix
    PRIMARY KEY (prompt_id, sample_index)
);
"""
_OF_SOURCE = "FROM samples JOIN source USING (prompt_id)"
FAILED = "finish_reason = 'error'"


class RunStoppedError(TailcastError):
    """A run stopped early: the disk is full, the engine keeps failing, or the prompts changed during the run."""


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Converts errors of a full or failing disk to a `RunStoppedError` with advice."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        name = getattr(error, "sqlite_errorname", "")
        if name in ("SQLITE_CORRUPT", "SQLITE_NOTADB"):
            raise RunStoppedError(
                f"{path} is damaged ({error}); `sqlite3 {path} .recover` may recover its content; remove it to start over"
            ) from error
        if isinstance(error, sqlite3.Error) and not isinstance(error, sqlite3.OperationalError):
            raise
        reason = (
            "no space left on device" if name == "SQLITE_FULL" else getattr(error, "strerror", None) or error
        )
        raise RunStoppedError(
            f"{path}: cannot write ({reason}); finished samples are kept: fix this, then run the same command again to "
            "resume"
        ) from error


class SampleStore:
    """Prompts and samples of one run; the caller must hold the lock of the folder. RunStoppedError if the disk is full, or
    the file is damaged.

    A committed result is synced within `sync_interval_s`; 0: every result is synced immediately.
    """

    def __init__(self, path: Path, *, sync_interval_s: float) -> None:
        self.path = path
        self._sync_interval_s = sync_interval_s
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._sync_error: OSError | None = None
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            with disk_errors(path):
                # A single process has the file open, so no shared-memory file is needed.
                self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.execute("PRAGMA synchronous = NORMAL")
                if not self._value("SELECT COUNT(*) FROM sqlite_master"):
                    with self.transaction():
                        for statement in _TABLES.split(";\n")[:-1]:
                            self._db.execute(statement)
                # Failures of earlier processes are retried.
                self._db.execute(f"DELETE FROM samples WHERE {FAILED}")
                self._db.execute(
                    "CREATE TEMP TABLE source (position INTEGER PRIMARY KEY, prompt_id TEXT UNIQUE)"
                )
                sync_path(path.parent)
        except BaseException:
            self._db.close()
            raise

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Commits all changes of the block, or rolls them back if it raises."""
        with disk_errors(self.path):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def _value(self, query: str, parameters: Sequence[object] = ()) -> Any:
        row = self._db.execute(query, parameters).fetchone()
        return None if row is None else row[0]

    @property
    def manifest(self) -> dict[str, Any] | None:
        """The stored manifest; None before it is set."""
        text = self._value("SELECT manifest FROM run")
        return None if text is None else json.loads(text)

    def set_manifest(self, manifest: Mapping[str, object]) -> None:
        """Replaces the manifest."""
        self._db.execute("DELETE FROM run")
        self._db.execute("INSERT INTO run VALUES (?)", [json.dumps(manifest)])

    def register(self, prompts: Iterable[Prompt], *, hash_only: bool) -> int:
        """Stores all prompts of the source and returns their number; with `hash_only` no texts are stored.

        InputError if there is no prompt, an id is repeated, or the stored run has another text for an id.
        """
        count = 0
        for count, prompt in enumerate(prompts, start=1):
            key, digest = valid_unicode(prompt.prompt_id), prompt_sha256(prompt)
            try:
                self._db.execute("INSERT INTO source VALUES (?, ?)", (count - 1, key))
            except sqlite3.IntegrityError as error:
                raise InputError("prompts", prompt.prompt_id, "each prompt id once") from error
            texts: list[str | None] = [None, None]
            if not hash_only:
                messages = [{"role": message.role, "content": message.text} for message in prompt.messages]
                chat = json.dumps(messages, ensure_ascii=False) if messages else None
                texts = [valid_unicode(prompt.text), chat and valid_unicode(chat)]
            columns = (key, digest, *texts, valid_unicode(prompt.category), valid_unicode(prompt.dataset))
            self._db.execute("INSERT OR IGNORE INTO prompts VALUES (?, ?, ?, ?, ?, ?)", columns)
            if self._value("SELECT prompt_sha256 FROM prompts WHERE prompt_id = ?", [key]) != digest:
                allowed = "the text of this id in the interrupted run, or another --out"
                raise InputError("prompts", f"another text of {prompt.prompt_id!r}", allowed)
        if not count:
            raise InputError("prompts", "none", "at least one prompt")
        return count

    def has_prompt(self, position: int, prompt: Prompt) -> bool:
        """Whether the source had this prompt at this position when it was registered."""
        query = "SELECT prompt_sha256 FROM prompts JOIN source USING (prompt_id) WHERE position = ? AND prompt_id = ?"
        digest = self._value(query, (position, valid_unicode(prompt.prompt_id)))
        return bool(digest == prompt_sha256(prompt))

    def open_indices(self, prompt_id: str, num_samples: int) -> tuple[int, ...]:
        """Sample indices of a prompt that are missing or may be retried, in increasing order."""
        query = "SELECT sample_index FROM samples WHERE prompt_id = ? AND final"
        closed = {index for (index,) in self._db.execute(query, [valid_unicode(prompt_id)])}
        return tuple(index for index in range(num_samples) if index not in closed)

    def add(
        self,
        prompt_id: str,
        prompt_tokens: int | None,
        outputs: Sequence[SampledOutput],
        failures: Mapping[SampleFailure, bool],
        *,
        engine_version: str,
        keep_text: bool,
    ) -> None:
        """Commits a result and replaces earlier failures; `failures` maps each failure to whether it is permanent."""
        key = valid_unicode(prompt_id)
        rows: list[tuple[object, ...]] = []
        for output in outputs:
            request = (key, output.sample_index, engine_version, prompt_tokens, output.output_tokens)
            times = (output.queue_s, output.ttft_s, output.total_s)
            text = valid_unicode(output.text) if keep_text else None
            rows.append((*request, output.finish_reason, None, *times, text, True))
        for failure, permanent in failures.items():
            request = (key, failure.sample_index, engine_version, prompt_tokens, 0)
            error = valid_unicode(f"{failure.kind}: {failure.reason}")
            rows.append((*request, "error", error, None, None, None, None, permanent))
        with disk_errors(self.path), self._lock:
            self._raise_sync_error()
            with self.transaction():
                self._db.executemany(f"INSERT OR REPLACE INTO samples VALUES ({', '.join('?' * 12)})", rows)
            if self._sync_interval_s <= 0:
                self._sync_log()
            elif self._timer is None:
                self._timer = threading.Timer(self._sync_interval_s, self._on_timer)
                self._timer.daemon = True
                self._timer.start()

    def _raise_sync_error(self) -> None:
        """Raises the error of a failed background sync, because a later sync may succeed although data were lost."""
        error, self._sync_error = self._sync_error, None
        if error is not None:
            raise error

    def _on_timer(self) -> None:
        with self._lock:
            self._timer = None
            try:
                self._sync_log()
            except OSError as error:
                self._sync_error = error

    def _sync_log(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # checkpointed and removed by SQLite
            sync_path(self.path.with_name(f"{self.path.name}-wal"))

    def count(self, condition: str) -> int:
        """Number of samples of the source that satisfy an SQL condition."""
        return int(self._value(f"SELECT COUNT(*) {_OF_SOURCE} WHERE {condition}"))

    def output_tokens(self) -> int:
        """Total number of output tokens of the samples of the source."""
        return int(self._value(f"SELECT SUM(output_tokens) {_OF_SOURCE}"))

    def num_surplus(self) -> int:
        """Number of finished samples whose prompts are no longer in the source."""
        query = "SELECT COUNT(*) FROM samples WHERE prompt_id NOT IN (SELECT prompt_id FROM source)"
        return int(self._value(f"{query} AND NOT {FAILED}"))

    def is_empty(self) -> bool:
        """Whether no sample of any prompt is finished."""
        return not self._value(f"SELECT COUNT(*) FROM samples WHERE NOT {FAILED}")

    def failures(self) -> Iterator[tuple[str, int, str]]:
        """(prompt id, sample index, "KIND: reason") of each failure, in the order of the source."""
        query = f"SELECT prompt_id, sample_index, error {_OF_SOURCE} WHERE {FAILED}"
        yield from self._db.execute(f"{query} ORDER BY position, sample_index")

    def export(self, target: Path, constants: Mapping[str, object]) -> None:
        """Writes the samples of all prompts of the source, in its order, as Parquet (`samples/2`), atomically.

        `constants` are columns with the same value in all rows.
        """
        own = {"prompt_sha256", "prompt", "messages", "category", "dataset"}
        columns = [
            f":{name}" if name in constants else f"prompts.{name}" if name in own else f"samples.{name}"
            for name in SCHEMA.names
        ]
        query = (
            f"SELECT {', '.join(columns)} FROM source JOIN prompts USING (prompt_id) JOIN samples USING (prompt_id) "
            "ORDER BY position, sample_index"
        )
        messages = SCHEMA.names.index("messages")
        with (
            disk_errors(target),
            atomic_file(target) as temporary,
            pq.ParquetWriter(temporary, SCHEMA, compression="zstd") as writer,
        ):
            cursor = self._db.execute(query, dict(constants))
            while rows := cursor.fetchmany(EXPORT_ROWS):
                values = [list(column) for column in zip(*rows, strict=True)]
                values[messages] = [None if text is None else json.loads(text) for text in values[messages]]
                writer.write_table(
                    pa.Table.from_pydict(dict(zip(SCHEMA.names, values, strict=True)), schema=SCHEMA)
                )

    def close(self) -> None:
        """Syncs and closes the file."""
        with disk_errors(self.path), self._lock:
            self._stop_timer()
            try:
                self._sync_log()
                self._raise_sync_error()
            finally:
                self._db.close()

    def remove(self) -> None:
        """Removes the file so that a crash in between cannot leave a part of it that looks like a run."""
        with self._lock:
            self._stop_timer()
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("PRAGMA journal_mode = DELETE")
            self.path.unlink(missing_ok=True)
            self._db.close()
            self.path.with_name(f"{self.path.name}-wal").unlink(missing_ok=True)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
