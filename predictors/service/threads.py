"""Threads that work for the event loop: one hop there, one hop back, nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple, Unpack

A = TypeVarTuple("A")
R = TypeVar("R")

Done = Callable[[R | None, BaseException | None], None]
"""Takes a result, or the error there is instead."""


class WorkerThreads:
    """A fixed number of threads that call functions for one event loop, in the order they were asked to.

    A third of the CPU time per call of `loop.run_in_executor`, which keeps two futures and a lock for each. Of several
    idle threads the one that worked last is taken: its stack and its part of the interpreter are still in the caches.

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
        self._lock = threading.Lock()
        self._idle: list[_Place] = []
        self._calls: deque[Callable[[], None]] = deque()
        self._is_open = False

    def submit(self, done: Done[R], function: Callable[[Unpack[A]], R], *args: *A) -> None:
        """Calls `function` in a thread, then `done` in the event loop, where this has to be called too."""
        if not self._is_open:
            self._start()
        loop = asyncio.get_running_loop()

        def work() -> None:
            error: BaseException | None = None
            result: R | None = None
            try:
                result = function(*args)
            except BaseException as caught:  # whatever it is, somebody waits for it
                error = caught
            with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody waits any more
                loop.call_soon_threadsafe(done, result, error)

        with self._lock:
            if not self._idle:
                self._calls.append(work)
                return
            place = self._idle.pop()
        place.give(work)

    def call(self, function: Callable[[Unpack[A]], R], *args: *A) -> asyncio.Future[R]:
        """Calls `function` in a thread; to be used in the event loop."""
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self.submit(functools.partial(_settle, future), function, *args)
        return future

    def close(self) -> None:
        """Ends the threads; calls that wait are still made. Does not wait for them."""
        with self._lock:
            self._is_open = False
            idle, self._idle = self._idle, []
        for place in idle:
            place.give(None)

    def _start(self) -> None:
        self._is_open = True
        for number in range(self._count):
            place = _Place()
            thread = threading.Thread(
                target=self._run, args=(place,), name=f"{self._name}-{number}", daemon=True
            )
            self._idle.append(place)
            thread.start()

    def _run(self, place: _Place) -> None:
        _lower_priority(self._niceness)
        work = place.taken()
        while work is not None:
            work()
            del work  # else the last call's arguments live until the next one
            work = self._next(place)

    def _next(self, place: _Place) -> Callable[[], None] | None:
        """The oldest call that waits, or else the next one that is given to this place; None at the end."""
        with self._lock:
            if self._calls:
                return self._calls.popleft()
            if not self._is_open:
                return None
            self._idle.append(place)
        return place.taken()


class _Place:
    """Where an idle thread waits for its next call."""

    __slots__ = ("_given", "_work")

    def __init__(self) -> None:
        self._given = threading.Lock()
        self._given.acquire()
        self._work: Callable[[], None] | None = None

    def give(self, work: Callable[[], None] | None) -> None:
        """Wakes the thread up; None ends it."""
        self._work = work
        self._given.release()

    def taken(self) -> Callable[[], None] | None:
        """Waits for what is given."""
        self._given.acquire()
        work, self._work = self._work, None
        return work


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
