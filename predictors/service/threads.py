"""Threads that work for the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple, Unpack

A = TypeVarTuple("A")
R = TypeVar("R")

Done = Callable[[R | None, BaseException | None], None]
"""Takes a result, or the error there is instead."""


def submit(
    executor: ThreadPoolExecutor, done: Done[R], function: Callable[[Unpack[A]], R], *args: *A
) -> None:
    """Calls `function` in a thread, then `done` in the event loop, where this has to be called too.

    `loop.run_in_executor` would make a second future and two more turns of the event loop for each call.
    """
    loop = asyncio.get_running_loop()

    def on_done(future: Future[R]) -> None:
        error = future.exception()
        result = None if error is not None else future.result()
        with contextlib.suppress(RuntimeError):  # the loop has been closed: nothing waits for the result
            loop.call_soon_threadsafe(done, result, error)

    executor.submit(function, *args).add_done_callback(on_done)


class ServiceThreads:
    """The threads of one server, shared by its artifacts: one that tokenizes, and those of the model calls.

    Args:
        num_workers: Model calls at the same time, >= 1.
        niceness: By how much the threads of model calls have a lower priority than the event loop, 0 to 19. With it a
            full service refuses sooner. Only Linux has priorities of threads.
        cores: Cores of the model threads, one each; empty: the system places them. See `worker_cores`.
    """

    def __init__(self, num_workers: int, niceness: int = 0, cores: Sequence[int] = ()) -> None:
        numbers = itertools.count()

        def prepare() -> None:
            if niceness and sys.platform == "linux":
                own = os.getpriority(os.PRIO_PROCESS, 0)
                os.setpriority(os.PRIO_PROCESS, 0, min(19, own + niceness))
            if cores:
                with contextlib.suppress(OSError):  # the core has been taken from the process since
                    os.sched_setaffinity(0, {cores[next(numbers) % len(cores)]})

        self.tokenise = ThreadPoolExecutor(1, "tailcast-tokenise")
        self.run = ThreadPoolExecutor(num_workers, "tailcast-run", initializer=prepare)

    def close(self) -> None:
        """Ends them after the calls that wait. Does not wait for it."""
        self.tokenise.shutdown(wait=False)
        self.run.shutdown(wait=False)


def worker_cores(num_workers: int, process: int = 0, num_processes: int = 1) -> list[int]:
    """Cores for the single-threaded model calls of one process, one core each.

    Linux often lets two busy threads share a core for tens of milliseconds while the event loop is all that another
    core has to do; at 70 % load this doubled the latency. With as many model threads as cores, threads that are bound
    to one core each cannot meet. With fewer there are idle cores to go to, and binding could put the threads of
    several services on the same ones.

    Args:
        num_workers: Model threads of each process.
        process: Number of the process, from 0.
        num_processes: Processes that share the machine's cores with this one.

    Returns:
        `num_workers` cores; none where cores and threads are not equal in number, or threads cannot be bound.
    """
    if not hasattr(os, "sched_getaffinity"):
        return []
    cores = sorted(os.sched_getaffinity(0))
    if num_workers * num_processes != len(cores):
        return []
    return cores[process * num_workers : (process + 1) * num_workers]
