"""Several worker processes behind the same ports: started together, replaced when they die, drained together.

The kernel spreads new connections over the workers (SO_REUSEPORT). A worker ends by itself when its supervisor does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from predictors.service.server import probe_port
from scheduler_core.errors import TailcastError

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0
STEADY_S = 30.0  # a worker that lived this long is restarted without further delay
# Workers killed before any was ever ready; then what kills them is taken to be their own fault.
MAX_EARLY_ENDS = 5


@dataclass(slots=True)
class _Worker:
    number: int
    ready_file: Path
    process: asyncio.subprocess.Process | None = None
    ready: asyncio.Event = field(default_factory=asyncio.Event)


def reserved_port(stack: ExitStack, host: str, port: int, name: str = "port") -> int:
    """Holds a port for the workers without listening on it; 0 takes a free one.

    Raises:
        InputError: Somebody listens on it, or it may not be bound.
    """
    probe_port(host, port, name)
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    holder = stack.enter_context(socket.socket(family, kind, protocol))
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    holder.bind(address)
    bound: int = holder.getsockname()[1]
    return bound


class Supervisor:
    """Runs workers until it is stopped.

    Args:
        command: Command line of a worker; the path of its ready file is appended.
        count: Number of workers.
    """

    def __init__(self, command: Sequence[str], count: int) -> None:
        self._command = list(command)
        self._count = count
        self._workers: list[_Worker] = []
        self._stopping = asyncio.Event()
        self._failed: int | None = None  # exit code of a worker that never came up
        self._num_early_ends = 0

    async def run(self, on_ready: Callable[[], None]) -> int:
        """Starts the workers, calls `on_ready` when all of them answer, and keeps them alive until `stop`.

        Returns:
            0 if every worker drained; else the exit code of one that could not start, or 1.
        """
        with tempfile.TemporaryDirectory(prefix="tailcast-workers-") as folder:
            self._workers = workers = [
                _Worker(number, Path(folder) / f"ready-{number}") for number in range(self._count)
            ]
            metrics = Path(folder) / "metrics"
            metrics.mkdir()
            environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(metrics)}
            tasks = [asyncio.create_task(self._keep(worker, environment)) for worker in workers]
            all_ready = asyncio.ensure_future(_all_ready(workers))
            stopping = asyncio.ensure_future(self._stopping.wait())
            waited: set[asyncio.Future[Any]] = {all_ready, stopping}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not self._stopping.is_set():
                on_ready()
                await stopping
            all_ready.cancel()
            self._signal(signal.SIGTERM)
            codes = await asyncio.gather(*tasks)
        if self._failed is not None:
            return self._failed
        return 0 if all(code == 0 for code in codes) else 1

    def stop(self) -> None:
        """Lets all workers drain and end."""
        self._stopping.set()

    def reload(self) -> None:
        """Lets all workers look for new artifacts."""
        self._signal(signal.SIGHUP)

    def _signal(self, number: int) -> None:
        for worker in self._workers:
            if worker.process is not None and worker.process.returncode is None:
                worker.process.send_signal(number)

    async def _keep(self, worker: _Worker, environment: dict[str, str]) -> int:
        """Starts a worker again whenever it ends.

        Returns:
            The exit code of the one that was there when all were stopped; 0 where it was not ready yet, or still to be
            started: nothing was left to drain.
        """
        loop = asyncio.get_running_loop()
        backoff_s = FIRST_BACKOFF_S
        while True:
            started = loop.time()
            worker.ready_file.unlink(missing_ok=True)
            worker.process = await asyncio.create_subprocess_exec(
                *self._command, str(worker.ready_file), stdin=asyncio.subprocess.PIPE, env=environment
            )
            code = await self._until_end(worker)
            _forget_metrics(environment, worker.process.pid)
            if self._stopping.is_set():
                return code if worker.ready_file.exists() else 0
            if self._is_hopeless(code):
                self._failed = code if code > 0 else 1
                self.stop()
                return code
            logger.error("worker %d ended with code %d; it is started again", worker.number, code)
            backoff_s = (
                FIRST_BACKOFF_S if loop.time() - started > STEADY_S else min(backoff_s * 2, MAX_BACKOFF_S)
            )
            try:
                async with asyncio.timeout(backoff_s):
                    await self._stopping.wait()
                return 0
            except TimeoutError:
                continue

    def _is_hopeless(self, code: int) -> bool:
        """Whether starting again helps nobody: no worker was ever ready, and this one ended by itself, as it does where
        the artifact or an option is wrong. One that was killed (by the kernel for its memory, by a person) tells nothing
        about the others."""
        # Ready files too: another worker may have become ready since they were last looked at.
        if any(worker.ready.is_set() or worker.ready_file.exists() for worker in self._workers):
            return False
        self._num_early_ends += 1
        return code >= 0 or self._num_early_ends >= MAX_EARLY_ENDS

    async def _until_end(self, worker: _Worker) -> int:
        assert worker.process is not None
        ended = asyncio.ensure_future(worker.process.wait())
        while not ended.done() and not worker.ready_file.exists():
            await asyncio.wait({ended}, timeout=0.02)
            if self._stopping.is_set() and worker.process.returncode is None:
                worker.process.terminate()
                break
        if worker.ready_file.exists():
            worker.ready.set()
        return await ended


async def _all_ready(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        await worker.ready.wait()


def _forget_metrics(environment: dict[str, str], pid: int) -> None:
    """Gauges of a dead worker count no more."""
    try:
        from prometheus_client import multiprocess
    except ImportError:
        return
    untyped: Any = multiprocess
    untyped.mark_process_dead(pid, environment["PROMETHEUS_MULTIPROC_DIR"])


def worker_command(config_file: Path) -> list[str]:
    """Command line of a worker that serves what a JSON file with the fields of ServeConfig says."""
    if not sys.executable:
        raise TailcastError("workers: this Python does not know its own executable")
    return [sys.executable, "-m", "predictors.service.worker", str(config_file)]
