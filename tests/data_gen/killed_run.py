"""A sampling run that is killed with SIGKILL at the N-th thing it does to its files.

    python -m tests.data_gen.killed_run OUT SHUFFLE N STORED

N 0 means: live, and print how many such moments there were. Each sample that the run has declared stored is written to
the file STORED first.
"""

import os
import signal
import sqlite3
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from data_gen import store
from data_gen.backend import SampleFailure, SamplingSettings, WorkResult
from data_gen.prompts import Prompt
from data_gen.sampling_run import SamplingRunOptions, run_sampling
from tests.data_gen.fake_backend import FakeBackend

PROMPTS = [Prompt(f"p{i}", f"prompt number {i} " * (1 + i % 5), "kind") for i in range(40)]
SETTINGS = SamplingSettings(num_samples=5, max_tokens=50, temperature=1.0, top_p=1.0, seed=7)
OPTIONS = SamplingRunOptions(keep_text=True, sync_interval_s=0.0)


def sometimes(prompt_id: str, sample_index: int, attempt: int) -> SampleFailure | None:
    """Every seventh prompt fails at first."""
    if attempt == 1 and int(prompt_id[1:]) % 7 == 3:
        return SampleFailure(sample_index, "try again", "http_500")
    return None


@dataclass
class Moments:
    """Counts moments, and kills the process at the chosen one."""

    fatal: int
    count: int = 0

    def reached(self) -> None:
        self.count += 1
        if self.count == self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    def wrap(self, owner: Any, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def moment(*arguments: Any, **options: Any) -> Any:
            self.reached()
            return original(*arguments, **options)

        setattr(owner, name, moment)


def connection_class(moments: Moments) -> type[sqlite3.Connection]:
    """Connections that have a moment before and after each statement, and inside of long ones."""

    class Connection(sqlite3.Connection):
        def execute(self, *arguments: Any) -> sqlite3.Cursor:
            moments.reached()
            cursor = super().execute(*arguments)
            moments.reached()
            return cursor

        def executemany(self, *arguments: Any) -> sqlite3.Cursor:
            self.set_progress_handler(lambda: moments.reached(), 40)
            cursor = super().executemany(*arguments)
            self.set_progress_handler(None, 0)
            return cursor

    return Connection


def main() -> None:
    out, shuffle, fatal, stored = sys.argv[1:]
    log = os.open(stored, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def declare(result: WorkResult) -> None:
        for output in result.outputs:
            os.write(log, f"{result.prompt.prompt_id} {output.sample_index}\n".encode())

    moments = Moments(int(fatal))
    connect, factory = sqlite3.connect, connection_class(moments)
    sqlite3.connect = lambda *words, **options: connect(*words, factory=factory, **options)  # type: ignore[assignment]
    for name in ("fsync", "replace", "mkdir", "unlink", "rmdir"):
        moments.wrap(os, name)
    moments.wrap(pq.ParquetWriter, "write_table")
    moments.wrap(pq.ParquetWriter, "close")
    store.EXPORT_ROWS = 40
    backend = FakeBackend(sometimes, shuffle=int(shuffle), window=20, on_stored=declare)
    run_sampling(backend, PROMPTS, SETTINGS, Path(out), OPTIONS)
    sys.stdout.write(f"{moments.count}\n")


if __name__ == "__main__":
    main()
