"""The dynamic batcher: pure asyncio, no threads, no model, no clock of its own.

Callers `submit` an item and wait; whenever a worker is free, the batcher takes a group (see `grouping.py`), hands it to
`work`, and gives every caller its own result. Cancelled and expired items leave the queue before groups are made.
Whatever goes wrong with a batch reaches every caller of that batch, and the batcher goes on. What `work` found comes by
a callback and not by a future, which would cost every batch one more turn of the event loop.
"""

from __future__ import annotations

import asyncio
import bisect
import functools
import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from predictors.service.clock import Clock, Timer
from predictors.service.errors import BatchError, ClosedError, ExpiredError, QueueFullError
from predictors.service.grouping import BatchingSettings, nearest_in_length, oldest_first
from scheduler_core.errors import TailcastError

I = TypeVar("I")  # noqa: E741  an item
R = TypeVar("R")  # its result

Done = Callable[[Sequence[R] | None, BaseException | None], None]
"""Takes the results of a batch, or why there are none."""
Work = Callable[[Sequence[I], Done[R]], None]
"""Starts on a batch and returns; calls back once in the event loop, later."""


class Answer(NamedTuple, Generic[R]):
    """A result and how it came about: seconds in the queue, seconds in `work`, items in the batch."""

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
    future: asyncio.Future[Answer[R]] = field(repr=False)


class Batcher(Generic[I, R]):
    """Groups concurrent `submit` calls into calls of `work`.

    Args:
        work: Takes 1..max_batch items, calls back with one result each, in order. At most `max_running` batches at a time.
        settings: Limits and grouping.
        clock: Source of time.
    """

    def __init__(
        self,
        work: Work[I, R],
        *,
        settings: BatchingSettings,
        clock: Clock,
    ) -> None:
        self._work = work
        self._settings = settings
        self._clock = clock
        self._numbers = itertools.count()
        self._waiting: dict[int, _Entry[I, R]] = {}  # in order of arrival
        self._by_length: list[tuple[int, int]] = []  # (length, number), ascending
        self._deadlines: list[
            tuple[float, int]
        ] = []  # heap of (deadline, number); may hold numbers that have left
        self._num_running = 0
        self._timer: Timer | None = None
        self._timer_at = math.inf
        self._closing = False
        self._ended = asyncio.Event()  # closing, and nothing runs any more

    @property
    def num_waiting(self) -> int:
        """Items in the queue."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Batches in `work`."""
        return self._num_running

    @property
    def starts_at_once(self) -> bool:
        """Whether an item submitted now would be worked on in the same moment, alone."""
        return not self._waiting and self._settings.starts_at_once(self._num_running)

    async def submit(self, item: I, *, length: int, deadline: float | None = None) -> Answer[R]:
        """Waits for the item's result. Cancelling the caller takes the item out of the queue.

        Args:
            item: What `work` gets.
            length: What padding is counted in, >= 1 (tokens).
            deadline: Time of the clock after which the item is dropped instead of worked on.

        Raises:
            QueueFullError: `max_queue` items are waiting; raised at once.
            ClosedError: The batcher is closing.
            ExpiredError: The deadline passed while the item was waiting; raised at that moment.
            BatchError: The item's batch failed.
        """
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
        if self.starts_at_once:  # what would be taken out in the same moment need not be put into the queue
            self._start([entry], now)
            return await entry.future
        self._waiting[entry.number] = entry
        bisect.insort(self._by_length, (length, entry.number))
        if deadline is not None:
            heapq.heappush(self._deadlines, (deadline, entry.number))
        self._pump()
        try:
            return await entry.future
        finally:
            self._remove(entry)

    async def close(self, *, drain: bool = True) -> None:
        """Refuses new items and waits for running batches; waiting items are worked on, or failed without `drain`."""
        self._closing = True
        if not drain:
            for entry in list(self._waiting.values()):
                self._remove(entry)
                _fail(entry, ClosedError())
        self._pump()
        if self._num_running:
            await self._ended.wait()

    def _remove(self, entry: _Entry[I, R]) -> None:
        if self._waiting.pop(entry.number, None) is not None:
            del self._by_length[bisect.bisect_left(self._by_length, (entry.length, entry.number))]

    def _pump(self) -> None:
        """Drops what has expired, and starts batches while there is a free worker and a group that need not wait."""
        now = self._clock.now()
        self._expire(now)
        while self._waiting and self._num_running < self._settings.max_running and self._is_due(now):
            self._start(self._take(), now)
        self._set_timer()

    def _is_due(self, now: float) -> bool:
        return (
            len(self._waiting) >= self._settings.max_batch
            or not self._oldest.arrived <= now < self._due  # before its arrival: the clock went back
            or self._closing
            or (self._settings.flush_when_idle and not self._num_running)
        )

    @property
    def _oldest(self) -> _Entry[I, R]:
        return next(iter(self._waiting.values()))

    @property
    def _due(self) -> float:
        return self._oldest.arrived + self._settings.max_wait_s

    def _expire(self, now: float) -> None:
        while self._deadlines and (
            self._deadlines[0][0] <= now or self._deadlines[0][1] not in self._waiting
        ):
            entry = self._waiting.get(heapq.heappop(self._deadlines)[1])
            if entry is not None:
                self._remove(entry)
                _fail(entry, ExpiredError())
        if len(self._deadlines) > 2 * len(self._waiting) + 64:  # mostly of items that have left
            self._deadlines = [found for found in self._deadlines if found[1] in self._waiting]
            heapq.heapify(self._deadlines)

    def _set_timer(self) -> None:
        """One timer for what comes first: the end of the oldest item's wait, or a deadline."""
        wanted = self._deadlines[0][0] if self._deadlines else math.inf
        if self._waiting and self._num_running < self._settings.max_running:
            wanted = min(wanted, self._due)
        if self._timer is not None and (wanted == math.inf or wanted < self._timer_at):
            self._timer.cancel()
            self._timer = None
        if self._timer is None and wanted < math.inf:
            self._timer_at = wanted
            self._timer = self._clock.call_at(wanted, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._pump()

    def _take(self) -> list[_Entry[I, R]]:
        """Removes the next group from the queue."""
        if self._settings.order == "arrival":
            entries = list(itertools.islice(self._waiting.values(), self._settings.max_batch))
            entries = entries[: oldest_first([entry.length for entry in entries], self._settings)]
        else:
            oldest = next(iter(self._waiting.values()))
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
            for entry in group:
                _fail(entry, BatchError(error))
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
        if results is None:
            error = error or TailcastError("no results")
        elif len(results) != len(group):
            error = TailcastError(f"{len(results)} results for a batch of {len(group)}")
        if error is not None:
            for entry in group:
                _fail(entry, BatchError(error))
        else:
            assert results is not None
            work_s = self._clock.now() - started
            for entry, result in zip(group, results, strict=True):
                if not entry.future.done():
                    entry.future.set_result(Answer(result, started - entry.arrived, work_s, len(group)))
        if self._waiting or self._deadlines:
            self._pump()
        if self._closing and not self._num_running:
            self._ended.set()


def _fail(entry: _Entry[I, R], error: TailcastError) -> None:
    if not entry.future.done():
        entry.future.set_exception(error)
