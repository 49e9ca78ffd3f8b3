"""Several worker processes that share ports: started together, restarted when they die, drained together.

The kernel distributes new connections over the workers (SO_REUSEPORT). A worker stops when its supervisor
exits. `python -m predictors.service.process CONFIG NUMBER` is a worker of `serve-predictor --workers N`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from predictors.hosting.process import PortFile, bound_socket, on_signals
from predictors.service.config import ServeConfig
from predictors.service.metrics import WorkerMetricFiles
from predictors.service.server import STREAM_GRACE_S

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0
STEADY_S = 30.0  # a worker that ran this long is restarted with the initial backoff
# For a worker to close its ports and exit, in addition to its other timeouts.
STOP_GRACE_S = 2.0
# Maximum number of workers killed before any worker was ready.
MAX_EARLY_ENDS = 5


@dataclass(slots=True)
class _Worker:
    number: int
    process: asyncio.subprocess.Process | None = None
    is_ready: bool = False  # current process
    misses_reload: bool = False  # a reload was requested before the current process was ready
    was_ready: asyncio.Event = field(default_factory=asyncio.Event)  # current or an earlier process


def run_workers(config: ServeConfig, port_file: PortFile) -> int:
    """Serves with several workers until SIGTERM or SIGINT; returns the exit code."""
    return asyncio.run(_supervise(config, port_file))


async def _supervise(config: ServeConfig, port_file: PortFile) -> int:
    with contextlib.ExitStack() as stack:
        port = _reserved_port(stack, config.host, config.port, "port")
        http_port = config.http_port
        counting: dict[str, Any] = {}
        if http_port is not None:
            http_port = _reserved_port(stack, config.host, http_port, "http_port")
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tailcast-metrics-")))
            files = WorkerMetricFiles(folder, config.workers, config.num_artifacts)
            counting = {"environment": files.environment, "on_end": files.reset_live}
        shared = dataclasses.replace(config, port=port, http_port=http_port, port_file=None)
        supervisor = Supervisor(
            [sys.executable, "-m", "predictors.service.process", json.dumps(dataclasses.asdict(shared))],
            config.workers,
            stop_timeout_s=config.drain_delay_s + config.drain_timeout_s + STREAM_GRACE_S + STOP_GRACE_S,
            **counting,
        )

        def stop() -> None:
            port_file.remove()  # before the workers drain, so that programs that watch it stop sending
            supervisor.stop()

        def on_ready() -> None:
            port_file.write(port)
            http = "" if http_port is None else f", http on {config.host}:{http_port}"
            logger.info("ready on %s:%d%s with %d workers", config.host, port, http, config.workers)

        on_signals(stop, supervisor.reload)
        try:
            return await supervisor.run(on_ready)
        finally:
            port_file.remove()


def _reserved_port(stack: contextlib.ExitStack, host: str, port: int, name: str) -> int:
    """Reserves a port for the workers, 0: a free one, without listening on it. InputError on failure."""
    bound_socket(host, port, name, socket.SO_REUSEADDR).close()  # fails if another process listens on it
    holder = stack.enter_context(bound_socket(host, port, name, socket.SO_REUSEPORT))
    bound: int = holder.getsockname()[1]
    return bound


class Supervisor:
    """Runs `count` workers until it is stopped.

    Args:
        command: Command line of a worker; its number is appended. A ready worker writes one byte to stdout.
        stop_timeout_s: Seconds after `stop` until workers that are still running are killed.
        environment: Additional environment variables of the workers.
        on_end: Called with the number of a worker when its process has ended, before a restart.
    """

    def __init__(
        self,
        command: Sequence[str],
        count: int,
        *,
        stop_timeout_s: float,
        environment: Mapping[str, str] | None = None,
        on_end: Callable[[int], None] | None = None,
    ) -> None:
        self._command = list(command)
        self._stop_timeout_s = stop_timeout_s
        self._environment = os.environ | dict(environment or {})
        self._on_end = on_end
        self._workers = [_Worker(number) for number in range(count)]
        self._stopping = asyncio.Event()
        self._failed: int | None = None  # exit code of a worker that could not start
        self._num_early_ends = 0

    async def run(self, on_ready: Callable[[], None]) -> int:
        """Starts the workers, calls `on_ready` when all of them are ready, and restarts them until `stop`.
        Returns 0 if every worker drained, otherwise the exit code of a worker that could not start, or 1."""
        tasks = [asyncio.create_task(self._keep(worker)) for worker in self._workers]
        all_ready = asyncio.gather(*(worker.was_ready.wait() for worker in self._workers))
        stopping = asyncio.ensure_future(self._stopping.wait())
        events: list[asyncio.Future[Any]] = [all_ready, stopping]
        await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        if not self._stopping.is_set():
            on_ready()
            await stopping
        all_ready.cancel()
        self._signal(signal.SIGTERM)
        _, running = await asyncio.wait(tasks, timeout=self._stop_timeout_s)
        if running:
            text = "killing %d workers that still run %g s after SIGTERM"
            logger.error(text, len(running), self._stop_timeout_s)
            self._signal(signal.SIGKILL)
        codes = await asyncio.gather(*tasks)
        if self._failed is not None:
            return self._failed
        return 0 if all(code == 0 for code in codes) else 1

    def stop(self) -> None:
        """Makes all workers drain and exit."""
        self._stopping.set()

    def reload(self) -> None:
        """Makes all workers reload their artifacts; those that are starting do it when they are ready."""
        for worker in self._workers:
            worker.misses_reload = not worker.is_ready
            if worker.is_ready:
                self._send(worker, signal.SIGHUP)

    def _signal(self, number: int) -> None:
        for worker in self._workers:
            self._send(worker, number)

    @staticmethod
    def _send(worker: _Worker, number: int) -> None:
        if worker.process is not None and worker.process.returncode is None:
            worker.process.send_signal(number)

    async def _keep(self, worker: _Worker) -> int:
        """Restarts a worker whenever it ends. Returns the exit code of its last process, or 0 if it was not
        ready at `stop`, and so had no requests to drain."""
        loop = asyncio.get_running_loop()
        backoff_s = FIRST_BACKOFF_S
        while True:
            started = loop.time()
            code = await self._run_once(worker)
            if self._on_end is not None:
                self._on_end(worker.number)
            if self._stopping.is_set():
                return code if worker.is_ready else 0
            if self._is_hopeless(code):
                self._failed = code if code > 0 else 1
                self.stop()
                return code
            logger.error("worker %d exited with code %d; restarting it", worker.number, code)
            is_steady = loop.time() - started > STEADY_S
            backoff_s = FIRST_BACKOFF_S if is_steady else min(backoff_s * 2, MAX_BACKOFF_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(backoff_s):
                    await self._stopping.wait()
                return 0

    async def _run_once(self, worker: _Worker) -> int:
        """Runs one process of a worker; returns its exit code."""
        worker.is_ready = False
        pipes: Any = dict.fromkeys(("stdin", "stdout"), asyncio.subprocess.PIPE)
        arguments = (*self._command, str(worker.number))
        worker.process = await asyncio.create_subprocess_exec(*arguments, env=self._environment, **pipes)
        if self._stopping.is_set():  # stopped before the process could get the signal
            worker.process.terminate()
        assert worker.process.stdout is not None
        if await worker.process.stdout.read(1):  # empty if the process ended before it was ready
            worker.is_ready = True
            worker.was_ready.set()
            if worker.misses_reload:
                worker.misses_reload = False
                self._send(worker, signal.SIGHUP)
        return await worker.process.wait()

    def _is_hopeless(self, code: int) -> bool:
        """Whether a restart is useless, because no worker was ever ready and this one exited by itself, for
        example for a wrong option. Workers killed by a signal (OOM killer) are restarted a few times."""
        if any(worker.was_ready.is_set() for worker in self._workers):
            return False
        self._num_early_ends += 1
        return code >= 0 or self._num_early_ends >= MAX_EARLY_ENDS
