"""A sampling run that is killed with SIGKILL at the N-th thing it does to its files, half-way through if it is a write.

    python -m tests.data_gen.killed_run OUT SHUFFLE N HEARD

N 0 means: live, and print how many such moments there were. Each answer that the run has declared safe is written to
the file HEARD first.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from data_gen.backend import Failure, SamplingSettings, WorkResult
from data_gen.prompts import Prompt
from data_gen.runs import Observer, RunOptions, merge, run
from tests.data_gen.fake_backend import FakeBackend

PROMPTS = [Prompt(f"p{i}", f"prompt number {i} " * (1 + i % 5), "kind") for i in range(40)]
SETTINGS = SamplingSettings(num_samples=5, max_tokens=50, temperature=1.0, top_p=1.0, seed=7)
OPTIONS = RunOptions(shard_bytes=2500, keep_text=True, sync_interval_s=0.0)


def sometimes(prompt_id: str, sample_index: int, attempt: int) -> Failure | None:
    """Every seventh prompt fails at first."""
    if attempt == 1 and int(prompt_id[1:]) % 7 == 3:
        return Failure(sample_index, "try again", "http_500")
    return None


class Moments:
    """Counts calls, and kills the process at the chosen one."""

    def __init__(self, fatal: int) -> None:
        self.fatal = fatal
        self.count = 0
        self._write = os.write

    def reached(self) -> bool:
        self.count += 1
        return self.count == self.fatal

    def wrap(self, owner: Any, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def moment(*arguments: Any, **options: Any) -> Any:
            if self.reached():
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)

        setattr(owner, name, moment)

    def write(self, handle: int, data: bytes) -> int:
        if self.reached():
            self._write(handle, bytes(data)[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return self._write(handle, data)


class Ear(Observer):
    """Notes what the run says it has."""

    def __init__(self, path: str) -> None:
        self._handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._write = os.write

    def arrived(self, result: WorkResult) -> None:
        for answer in result.answers:
            self._write(self._handle, f"{result.prompt.prompt_id} {answer.sample_index}\n".encode())


def main() -> None:
    out, shuffle, fatal, heard = sys.argv[1:]
    ear = Ear(heard)
    moments = Moments(int(fatal))
    os.write = moments.write  # type: ignore[assignment]
    for name in ("fsync", "replace", "mkdir", "unlink", "rmdir"):
        moments.wrap(os, name)
    moments.wrap(pq.ParquetWriter, "write_table")
    moments.wrap(pq.ParquetWriter, "close")
    merge.GROUP_ROWS = 40
    merge.FAN_IN = 3
    backend = FakeBackend(sometimes, shuffle=int(shuffle), window=20)
    run(backend, PROMPTS, SETTINGS, Path(out), OPTIONS, observer=ear)
    sys.stdout.write(f"{moments.count}\n")


if __name__ == "__main__":
    main()
