"""Threads that work for the event loop: one hop there, one hop back, nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar, TypeVarTuple, Unpack

A = TypeVarTuple("A")
R = TypeVar("R")


class WorkerThreads:
    """A fixed number of threads that call functions for one event loop, in the order they were asked to.

    Half the CPU time per call of `loop.run_in_executor`, which keeps two futures and a lock for each.

    Args:
        count: Number of threads, >= 1; they start at the first call.
        name: Prefix of their names.
        niceness: By how much their scheduling priority is lower than the process's own, 0 to 19; where threads have none
            of their own (not on Linux) it says nothing.
    """

    def __init__(self, count: int, name: str, *, niceness: int = 0) -> None:
        self._count = count
        self._name = name
        self._niceness = niceness
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def call(self, function: Callable[[Unpack[A]], R], *args: *A) -> asyncio.Future[R]:
        """Calls `function` in a thread; to be used in the event loop."""
        if not self._threads:
            self._start()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()

        def work() -> None:
            error: BaseException | None = None
            result: R | None = None
            try:
                result = function(*args)
            except BaseException as caught:  # whatever it is, somebody waits for it
                error = caught
            with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody waits any more
                loop.call_soon_threadsafe(_settle, future, result, error)

        self._calls.put(work)
        return future

    def close(self) -> None:
        """Ends the threads; calls that wait are still made. Does not wait for them."""
        for _ in self._threads:
            self._calls.put(None)
        self._threads = []

    def _start(self) -> None:
        for number in range(self._count):
            thread = threading.Thread(target=self._run, name=f"{self._name}-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self) -> None:
        _lower_priority(self._niceness)
        while (work := self._calls.get()) is not None:
            work()
            del work  # else the last call's arguments live until the next one


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, StopIteration):  # a future does not take it
        future.set_exception(RuntimeError(f"a thread raised {error!r}"))
    else:
        future.set_exception(error)


def _lower_priority(niceness: int) -> None:
    """Of the thread that calls it."""
    if niceness and sys.platform == "linux":
        own = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(19, own + niceness))


class ServiceThreads:
    """The threads of one server, shared by its artifacts.

    Args:
        num_workers: Model calls at the same time.
        niceness: By how much the threads of model calls stand back behind the event loop, 0 to 19. They are what fills
            the cores; without it every refusal of a full server waits for a turn beside them.
    """

    def __init__(self, num_workers: int, niceness: int = 0) -> None:
        self.tokenise = WorkerThreads(1, "tailcast-tokenise")
        self.run = WorkerThreads(num_workers, "tailcast-run", niceness=niceness)

    def close(self) -> None:
        """Ends them."""
        self.tokenise.close()
        self.run.close()
