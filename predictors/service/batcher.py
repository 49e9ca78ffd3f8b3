"""The dynamic batcher: pure asyncio, independent of threads and models, with an injectable clock.

Callers `submit` an item and wait. When a worker is idle, the batcher forms a batch, passes it to `work`, and
returns each caller its result. Canceled and expired items are removed from the queue first. An error of a
batch is raised in every caller of the batch, and the batcher continues. `work` reports by a callback, because
a future would cost one more iteration of the event loop per batch.

On a CPU, batching speeds up matrix products only slightly, but adds padding: a typical batch of 32 in order
of arrival has about 3.5 times its real tokens. So the oldest request is batched only with requests of similar
length, and no request waits for others. On a GPU, larger batches and a short wait are faster.
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
"""Called with the results of a batch, or with the error."""
Work = Callable[[Sequence[I], Callback[R]], None]
"""Starts a batch and returns immediately; later calls the callback once, in the event loop."""


class Clock:
    """Monotonic system clock and timers. (`time()` of uvloop does not advance while callbacks run.)"""

    now = staticmethod(time.monotonic)

    def call_at(self, when: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """Calls `callback` in the event loop at the time `when` in seconds."""
        return asyncio.get_running_loop().call_later(max(0.0, when - time.monotonic()), callback)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingSettings:
    """Settings of batching; defaults are `cpu` and `gpu`.

    Attributes:
        max_batch: Maximum number of requests in a batch.
        max_wait_s: Maximum time the oldest request waits for a full batch while a worker is idle.
        flush_when_idle: Whether requests wait only while another batch is running.
        max_padding: Maximum ratio of padded to real tokens of a batch of more than one request.
        max_padded_tokens: Maximum number of padded tokens of a batch of more than one request.
        max_queue: Maximum number of waiting requests; further requests are rejected.
        num_workers: Number of batches that run concurrently.
        num_ahead: Number of further batches passed to the workers, so that a worker can start the next batch
            without waiting for the event loop.
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
        """No waiting, at most 4 requests of similar length, one single-threaded worker per core. Batches
        above 256 tokens are not faster per prompt; they only increase memory and latency."""
        limits: dict[str, Any] = {"max_padding": 1.1, "max_padded_tokens": 256}
        return cls(max_batch=4, max_wait_s=0.0, num_workers=num_workers, num_ahead=1, **limits)

    @classmethod
    def gpu(cls) -> BatchingSettings:
        """No waiting while the GPU is idle; otherwise a batch has up to 32 requests or the oldest has waited
        3 ms. The second worker prepares the next batch while the first one runs."""
        return cls(max_batch=32, max_wait_s=0.003, flush_when_idle=True, num_workers=2)

    @property
    def max_running(self) -> int:
        """Maximum number of batches passed to the workers and not finished."""
        return self.num_workers + self.num_ahead

    def starts_at_once(self, num_running: int) -> bool:
        """Whether a request that arrives at an empty queue starts immediately, as a batch of one."""
        if num_running >= self.max_running:
            return False
        return self.max_wait_s == 0 or self.max_batch == 1 or (self.flush_when_idle and num_running == 0)


def nearest_in_length(lengths: Sequence[int], start: int, settings: BatchingSettings) -> range:
    """Range of positions of the batch around the request at `start`, given ascending lengths >= 1. The
    nearest neighbor in length (the longer one for ties) is added within the limits on size and padding."""
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
    """A result, seconds in the queue, seconds in `work`, and number of items in the batch."""

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
    """Groups concurrent `submit` calls into at most `max_running` concurrent calls of `work`, with 1 to
    max_batch items each. The callback gets one result per item, in order."""

    def __init__(self, work: Work[I, R], settings: BatchingSettings, clock: Clock | None = None) -> None:
        self._work = work
        self._settings = settings
        self._clock = clock or Clock()
        self._numbers = itertools.count()
        self._waiting: dict[int, _Entry[I, R]] = {}  # in order of arrival
        self._by_length: list[tuple[int, int]] = []  # (length, number), ascending
        self._num_running = 0
        self._timer: asyncio.TimerHandle | None = None  # for max_wait_s of the oldest item
        self._closing = False
        self._ended = asyncio.Event()  # closing, and no batch is running

    @property
    def num_waiting(self) -> int:
        """Number of items in the queue."""
        return len(self._waiting)

    async def submit(self, item: I, *, length: int, deadline: float | None = None) -> BatchedResult[R]:
        """Waits for the result of an item; cancellation removes the item from the queue. `length` >= 1 is the
        number of tokens, for padding. ExpiredError if the item is still queued at `deadline`, a time of the
        clock; BatchError if its batch failed; QueueFullError and ClosedError are raised immediately."""
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
            self._start([entry], now)  # bypass the queue
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
        """Rejects new items, and finishes queued items and running batches."""
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
        """Starts batches while a worker is idle and a batch is due."""
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
        """Removes the oldest request and its batch of nearest lengths from the queue."""
        oldest = self._oldest
        # A batch extends at most max_batch positions from the oldest request.
        index = bisect.bisect_left(self._by_length, (oldest.length, oldest.number))
        first = max(0, index - self._settings.max_batch)
        near = self._by_length[first : index + self._settings.max_batch]
        chosen = nearest_in_length([length for length, _ in near], index - first, self._settings)
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
    """Sets a separate error for every caller."""
    for entry in group:
        if not entry.future.done():
            entry.future.set_exception(error())
