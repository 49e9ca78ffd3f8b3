"""Server processes: start, readiness, CPU and memory including all children, termination."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
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
    """A running server.

    Attributes:
        popen: Its main process.
        start_s: Seconds from its start to its first response.
        start_cpu_s: CPU seconds until then of its live processes, without those that have already exited.
    """

    popen: subprocess.Popen[bytes]
    start_s: float
    start_cpu_s: float = 0.0

    def members(self) -> list[psutil.Process]:
        """The process and its descendants; empty once it has exited."""
        try:
            first = psutil.Process(self.popen.pid)
            return [first, *first.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def pause(self) -> None:
        """Stops all processes with a signal, because idle servers also use some CPU."""
        for process in self.members():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()

    def resume(self) -> None:
        """Continues all processes."""
        for process in self.members():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def cpu_s(self) -> float:
        """CPU seconds of all processes so far, user and system."""
        total = 0.0
        for process in self.members():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def pss_mb(self) -> float:
        """Memory of all processes in MB (PSS: shared pages are counted once)."""
        total = 0
        for process in self.members():
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
                total += next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
        return total / 1000


def free_port() -> int:
    """A free TCP port on the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def listens(port: int) -> bool:
    """Whether the port on the loopback accepts connections; cheap enough to poll a starting server."""
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
    """Starts a server, waits until `answers` returns True, and ends it and its children afterwards.

    Raises:
        RuntimeError: It exited or did not respond in time; the message has the end of its output.
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


@contextlib.contextmanager
def command_ports(name: str, *words: str) -> Iterator[tuple[Process, list[int]]]:
    """Runs a server command of the package predictors; yields its process and the ports that it has chosen."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "ports"
        command = [sys.executable, "-m", f"predictors.commands.{name}", *words]
        command += ["--port", "0", "--port_file", str(file)]
        with running(command, file.exists, environment={"PYTHONPATH": str(ROOT)}, timeout_s=300.0) as process:
            yield process, [int(port) for port in file.read_text(encoding="utf-8").split()]


def cpu_s(pid: int) -> float:
    """CPU seconds of a process's threads so far, exact to nanoseconds."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def http_ok(url: str, body: bytes | None = None) -> bool:
    """Whether a POST of JSON, or without a body a GET, returns 200."""
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def _end(popen: subprocess.Popen[bytes], members: Sequence[psutil.Process]) -> None:
    """Terminates the server, then kills its remaining processes."""
    if popen.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(popen.pid, signal.SIGCONT)  # a stopped process does not handle signals
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
