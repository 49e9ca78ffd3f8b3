"""Server processes: started, waited for, measured with all their children, stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Process:
    """A server that answers.

    Attributes:
        popen: Its first process.
        start_s: Seconds from its start to its first answer.
        start_cpu_s: CPU seconds of it and its descendants until then; without those of any that have ended.
    """

    popen: subprocess.Popen[bytes]
    start_s: float
    start_cpu_s: float = 0.0

    def members(self) -> list[psutil.Process]:
        """It and its descendants; none once it has ended."""
        try:
            first = psutil.Process(self.popen.pid)
            return [first, *first.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def pause(self) -> None:
        """Stops all of them where they are: even a server without requests wakes now and then."""
        for process in self.members():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()

    def resume(self) -> None:
        """Lets all of them go on."""
        for process in self.members():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def cpu_s(self) -> float:
        """CPU seconds of all of them so far, user and system."""
        total = 0.0
        for process in self.members():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def pss_mb(self) -> float:
        """Memory of all of them in MB, shared pages counted once."""
        total = 0
        for process in self.members():
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
                total += next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
        return total / 1000


def free_port() -> int:
    """A TCP port on the loopback that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def listens(port: int) -> bool:
    """Whether anybody takes connections on that port of the loopback: cheap enough to ask a server that is starting."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def running(
    command: Sequence[str],
    is_ready: Callable[[], bool],
    *,
    environment: Mapping[str, str],
    timeout_s: float = 120.0,
) -> Iterator[Process]:
    """Starts a server, waits until `answers`, and ends it and its children afterwards.

    Raises:
        RuntimeError: It ended or did not answer in time; the end of what it wrote is told.
    """
    with tempfile.TemporaryFile() as log:
        begin = time.perf_counter()
        popen = subprocess.Popen(
            list(command),
            stdout=log,
            stderr=subprocess.STDOUT,
            env=dict(os.environ) | dict(environment),
            start_new_session=True,
        )
        members: list[psutil.Process] = []
        try:
            while not is_ready():
                if popen.poll() is not None or time.perf_counter() - begin > timeout_s:
                    raise RuntimeError(f"{' '.join(command)} did not start:\n{_tail(log)}")
                time.sleep(0.02)
            start_s = time.perf_counter() - begin
            process = Process(popen, start_s, Process(popen, start_s).cpu_s())
            yield process
            members = process.members()
        finally:
            _end(popen, members)


def http_answers(url: str, body: bytes) -> bool:
    """Whether a POST of JSON gets 200."""
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def _end(popen: subprocess.Popen[bytes], members: Sequence[psutil.Process]) -> None:
    """Asks the group to end, then makes what is left of it."""
    if popen.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(popen.pid, signal.SIGCONT)  # one that is paused hears nothing
        popen.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            popen.wait(10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(popen.pid, signal.SIGKILL)
    for member in members:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    popen.wait()


def _tail(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read()[-2000:].decode(errors="replace")
