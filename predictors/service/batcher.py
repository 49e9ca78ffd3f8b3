"""The dynamic batcher: pure asyncio, no threads, no model, no clock of its own.

Callers `submit` an item and wait; whenever a worker is free, the batcher takes a group, hands it to `work`, and gives
every caller its own result. Canceled and expired items leave the queue before groups are formed. An error of a batch
reaches every caller of that batch, and the batcher goes on. `work` reports by a callback and not by a future, which
would cost every batch one more turn of the event loop.

On a CPU, padding is what batching costs and the matrix products gain almost nothing from it: a batch of 32 in order of
arrival pads to about 3.5 times the real tokens of a usual prompt mix. So the oldest request is joined only by
neighbors of nearly its own length, and nothing waits for company. On a GPU larger batches pay, and a short wait does.
"""

from __future__ import annotations

import asyncio
import bisect
import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from predictors.service.errors import BatchError, ClosedError, ExpiredError, QueueFullError
from scheduler_core.errors import TailcastError
from scheduler_core.ranges import FINITE, INTEGERS, check_ranges

I = TypeVar("I")  # noqa: E741  an item
R = TypeVar("R")  # its result

Callback = Callable[[Sequence[R] | None, BaseException | None], None]
"""Takes the results of a batch, or the error instead."""
Work = Callable[[Sequence[I], Callback[R]], None]
"""Starts on a batch and returns; calls back once in the event loop, later."""


class Clock:
    """The system's monotonic clock (the `time()` of uvloop's event loop does not advance while callbacks run), and timers."""

    now = staticmethod(time.monotonic)

    def call_at(self, when: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """Calls `callback` in the loop at second `when`."""
        return asyncio.get_running_loop().call_later(max(0.0, when - time.monotonic()), callback)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingSettings:
    """How requests are grouped and how many batches run at a time. Defaults: `cpu` and `gpu`.

    Attributes:
        max_batch: Maximum number of requests in a batch.
        max_wait_s: How long the oldest request waits for a full batch while a worker is free; 0 = not at all.
        flush_when_idle: Nothing waits while no batch is running; a wait then only fills the second worker's batch.
        max_padding: Largest ratio of padded to real tokens of a batch of more than one.
        max_padded_tokens: Largest batch x longest of a batch of more than one.
        max_queue: Maximum number of requests waiting; one more is refused.
        num_workers: Batches that run at the same time.
        num_ahead: Batches handed over beyond these: a worker that ends one goes on with the next without waiting for
            the event loop.
    """

    max_batch: int
    max_wait_s: float
    flush_when_idle: bool = False
    max_padding: float = math.inf
    max_padded_tokens: int = 16_384
    max_queue: int = 512
    num_workers: int = 1
    num_ahead: int = 0

    def __post_init__(self) -> None:
        counts = dict.fromkeys(("max_batch", "max_padded_tokens", "max_queue", "num_workers"), (1, INTEGERS))
        check_ranges(self, max_wait_s=(0.0, FINITE), max_padding=(1.0, math.inf), **counts)

    @classmethod
    def cpu(cls, num_workers: int) -> BatchingSettings:
        """No wait, at most 4 requests of nearly the same length, single-threaded workers: one per core. From 256 tokens on a
        batch costs as much for each prompt as one prompt alone; it only takes memory, and lets all wait for all."""
        limits: dict[str, Any] = {"max_padding": 1.1, "max_padded_tokens": 256}
        return cls(max_batch=4, max_wait_s=0.0, num_workers=num_workers, num_ahead=1, **limits)

    @classmethod
    def gpu(cls) -> BatchingSettings:
        """At once when nothing runs; beside a running batch up to 32 requests, or what has come 3 ms after the oldest. The second
        worker prepares the next batch while the device works on the first."""
        return cls(max_batch=32, max_wait_s=0.003, flush_when_idle=True, num_workers=2)

    @property
    def max_running(self) -> int:
        """Batches handed over and not yet ended."""
        return self.num_workers + self.num_ahead

    def starts_at_once(self, num_running: int) -> bool:
        """Whether a request that finds the queue empty is handed over in the same moment, alone."""
        if num_running >= self.max_running:
            return False
        return self.max_wait_s == 0 or self.max_batch == 1 or (self.flush_when_idle and num_running == 0)


def nearest_in_length(lengths: Sequence[int], start: int, settings: BatchingSettings) -> range:
    """Positions of the batch around the request at `start`, out of lengths in ascending order, each >= 1: contiguous, grown by
    the neighbor nearer in length (the longer one when equally near) as long as the limits on size and padding hold."""
    low, high = start, start + 1
    real, longest = lengths[start], lengths[start]
    while high - low < settings.max_batch:
        neighbors = [(lengths[high] - lengths[start], 0, high)] if high < len(lengths) else []
        if low > 0:
            neighbors.append((lengths[start] - lengths[low - 1], 1, low - 1))
        for _, _, position in sorted(neighbors):
            new_real, new_longest = real + lengths[position], max(longest, lengths[position])
            padded = (high - low + 1) * new_longest
            if padded <= settings.max_padding * new_real and padded <= settings.max_padded_tokens:
                low, high = min(low, position), max(high, position + 1)
                real, longest = new_real, new_longest
                break
        else:
            break
    return range(low, high)


class BatchedResult(NamedTuple, Generic[R]):
    """A result, seconds in the queue, seconds in `work`, and items in its batch."""

    result: R
    queue_s: float
    work_s: float
    batch_size: int


@dataclass(slots=True, eq=False)
class _Entry(Generic[I, R]):
    number: int
    item: I
    length: int
    arrived: float
    future: asyncio.Future[BatchedResult[R]]
    deadline: asyncio.TimerHandle | None = None


class Batcher(Generic[I, R]):
    """Groups concurrent `submit` calls into calls of `work`, at most `max_running` at a time, each of 1..max_batch items, which
    calls back with one result for each, in order."""

    def __init__(self, work: Work[I, R], settings: BatchingSettings, clock: Clock | None = None) -> None:
        self._work = work
        self._settings = settings
        self._clock = clock or Clock()
        self._numbers = itertools.count()
        self._waiting: dict[int, _Entry[I, R]] = {}  # in order of arrival
        self._by_length: list[tuple[int, int]] = []  # (length, number), ascending
        self._num_running = 0
        self._timer: asyncio.TimerHandle | None = None  # of the oldest item's wait
        self._closing = False
        self._ended = asyncio.Event()  # closing, and nothing runs any more

    @property
    def num_waiting(self) -> int:
        """Items in the queue."""
        return len(self._waiting)

    async def submit(self, item: I, *, length: int, deadline: float | None = None) -> BatchedResult[R]:
        """Waits for the item's result. Cancelling the caller takes the item out of the queue. The length, >= 1, is what
        padding is counted in (tokens). An item that still waits at `deadline`, a time of the clock, is dropped: ExpiredError.
        QueueFullError and ClosedError come at once; BatchError if the item's batch failed."""
        if self._closing:
            raise ClosedError
        if len(self._waiting) >= self._settings.max_queue:
            raise QueueFullError(self._settings.max_queue)
        now = self._clock.now()
        if deadline is not None and deadline <= now:
            raise ExpiredError
        entry: _Entry[I, R] = _Entry(
            next(self._numbers), item, length, now, asyncio.get_running_loop().create_future()
        )
        if not self._waiting and self._settings.starts_at_once(self._num_running):
            self._start([entry], now)  # without the way through the queue
            return await entry.future
        self._waiting[entry.number] = entry
        bisect.insort(self._by_length, (length, entry.number))
        if deadline is not None:
            entry.deadline = self._clock.call_at(deadline, functools.partial(self._expire, entry))
        self._pump()
        try:
            return await entry.future
        finally:
            self._remove(entry)

    async def close(self) -> None:
        """Refuses new items, works on those that wait, and waits for running batches."""
        self._closing = True
        self._pump()
        if self._num_running:
            await self._ended.wait()

    def _remove(self, entry: _Entry[I, R]) -> None:
        if self._waiting.pop(entry.number, None) is not None:
            del self._by_length[bisect.bisect_left(self._by_length, (entry.length, entry.number))]
            if entry.deadline is not None:
                entry.deadline.cancel()

    def _expire(self, entry: _Entry[I, R]) -> None:
        self._remove(entry)
        _fail([entry], ExpiredError)
        self._pump()

    def _pump(self) -> None:
        """Starts batches while there is a free worker and a group that need not wait."""
        now = self._clock.now()
        while self._waiting and self._num_running < self._settings.max_running and self._is_due(now):
            self._start(self._take(), now)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting and self._num_running < self._settings.max_running:
            self._timer = self._clock.call_at(self._due, self._pump)

    def _is_due(self, now: float) -> bool:
        return (
            len(self._waiting) >= self._settings.max_batch
            or now >= self._due
            or self._closing
            or (self._settings.flush_when_idle and not self._num_running)
        )

    @property
    def _oldest(self) -> _Entry[I, R]:
        return next(iter(self._waiting.values()))

    @property
    def _due(self) -> float:
        return self._oldest.arrived + self._settings.max_wait_s

    def _take(self) -> list[_Entry[I, R]]:
        """Removes the oldest request and its neighbors in length from the queue."""
        oldest = self._oldest
        # No batch reaches further than max_batch places from the oldest request.
        at = bisect.bisect_left(self._by_length, (oldest.length, oldest.number))
        first = max(0, at - self._settings.max_batch)
        near = self._by_length[first : at + self._settings.max_batch]
        chosen = nearest_in_length([length for length, _ in near], at - first, self._settings)
        entries = [self._waiting[near[position][1]] for position in chosen]
        for entry in entries:
            self._remove(entry)
        return entries

    def _start(self, group: list[_Entry[I, R]], now: float) -> None:
        try:
            self._work([entry.item for entry in group], functools.partial(self._finish, group, now))
        except Exception as error:
            _fail(group, functools.partial(BatchError, error))
            return
        self._num_running += 1

    def _finish(
        self,
        group: list[_Entry[I, R]],
        started: float,
        results: Sequence[R] | None,
        error: BaseException | None,
    ) -> None:
        self._num_running -= 1
        num_results = len(results or ())
        if error is None and num_results != len(group):
            error = TailcastError(f"{num_results} results for a batch of {len(group)}")
        if error is not None:
            _fail(group, functools.partial(BatchError, error))
        else:
            work_s = self._clock.now() - started
            for entry, result in zip(group, results or (), strict=True):
                if not entry.future.done():
                    entry.future.set_result(
                        BatchedResult(result, started - entry.arrived, work_s, len(group))
                    )
        if self._waiting:
            self._pump()
        if self._closing and not self._num_running:
            self._ended.set()


def _fail(group: Sequence[_Entry[I, R]], error: Callable[[], TailcastError]) -> None:
    """Every caller gets an error of its own."""
    for entry in group:
        if not entry.future.done():
            entry.future.set_exception(error())
