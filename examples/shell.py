"""Running the commands of an example: their output is written to log files, and the terminal shows one line per step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from scheduler_core.errors import TailcastError

STARTUP_LIMIT_S = 120.0


class StepFailedError(TailcastError):
    """A command of an example exited with an error; the message ends with its last lines."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A finished step: letter, title, command line, wall-clock seconds, and one-line result."""

    letter: str
    title: str
    command: str
    seconds: float
    result: str


@dataclass(slots=True)
class Shell:
    """Runs commands of this environment and records the steps."""

    logs: Path
    terminal: IO[str] = sys.stdout
    records: list[StepRecord] = field(default_factory=list)

    def run(self, letter: str, command: Sequence[str | Path], allowed: Sequence[int] = (0,)) -> None:
        """Runs a command until it exits; its output is appended to `LETTER-NAME.log`.

        Raises:
            StepFailedError: It exits with a code that is not allowed.
        """
        log = self._log(letter, command)
        with open(log, "ab") as stream:
            process = subprocess.Popen(executable(command), stdout=stream, stderr=subprocess.STDOUT)
            try:
                self._wait(process, letter, log)
            finally:
                if process.poll() is None:
                    process.terminate()
                    process.wait()
        if process.returncode not in allowed:
            raise StepFailedError(
                f"step {letter}: {' '.join(map(str, command))} failed: {last_lines(log)} (log: {log})"
            )

    def _wait(self, process: subprocess.Popen[bytes], letter: str, log: Path) -> None:
        """Waits for the process; a terminal shows the last line of its log meanwhile."""
        while True:
            try:
                process.wait(timeout=1.0)
                return
            except subprocess.TimeoutExpired:
                if self.terminal.isatty():
                    line = last_lines(log, 1)[-100:]
                    self.terminal.write(f"\r\x1b[K  {letter}  {line}")
                    self.terminal.flush()

    @contextmanager
    def serving(self, letter: str, command: Sequence[str | Path], port_file: Path) -> Iterator[int]:
        """Starts a server, yields its port when it has written `port_file`, and stops it with SIGTERM at the end.

        Raises:
            StepFailedError: It dies, does not start within two minutes, or does not exit with 0.
        """
        log = self._log(letter, command)
        with open(log, "ab") as stream:
            process = subprocess.Popen(executable(command), stdout=stream, stderr=subprocess.STDOUT)
            try:
                deadline = time.monotonic() + STARTUP_LIMIT_S
                while not port_file.exists():
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise StepFailedError(
                            f"step {letter}: the server did not start: {last_lines(log)} (log: {log})"
                        )
                    time.sleep(0.05)
                yield int(port_file.read_text(encoding="utf-8"))
                process.send_signal(signal.SIGTERM)
                if process.wait(timeout=30) != 0:
                    raise StepFailedError(
                        f"step {letter}: the server exited with {process.returncode}: {last_lines(log)}"
                    )
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()

    def finished(self, letter: str, title: str, command: str, start: float, result: str) -> None:
        """Records a step that started at the `time.monotonic()` value `start`, and prints its line."""
        record = StepRecord(letter, title, command, time.monotonic() - start, result)
        self.records.append(record)
        clear = "\r\x1b[K" if self.terminal.isatty() else ""
        self.terminal.write(
            f"{clear}  {letter}  {record.title:<16} {record.seconds:6.1f} s  {record.result}\n"
        )
        self.terminal.flush()

    def _log(self, letter: str, command: Sequence[str | Path]) -> Path:
        self.logs.mkdir(parents=True, exist_ok=True)
        return self.logs / f"{letter}-{Path(command[0]).name}.log"


def executable(command: Sequence[str | Path]) -> list[str]:
    """The command with its program taken from the environment that runs this interpreter."""
    program = Path(sys.executable).parent / command[0]
    if not program.exists():
        raise StepFailedError(f"{command[0]} is not installed next to {Path(sys.executable).name}; run make")
    return [os.fspath(program), *(os.fspath(word) for word in command[1:])]


def last_lines(log: Path, count: int = 3) -> str:
    """The last non-empty lines of a log, joined; updates of progress bars count as lines."""
    with open(log, "rb") as stream:
        stream.seek(0, os.SEEK_END)
        stream.seek(max(0, stream.tell() - 4000))
        text = stream.read().decode("utf-8", errors="replace").replace("\r", "\n")
    return " | ".join([line.strip() for line in text.splitlines() if line.strip()][-count:])
