"""The dynamic batcher: pure asyncio, no threads, no model, no clock of its own.

Callers `submit` an item and wait; whenever a worker is free, the batcher takes a group (see `grouping.py`), hands it to
`work`, and gives every caller its own result. Whatever goes wrong with a batch reaches every caller of that batch, and
the batcher goes on.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from predictors.service.clock import Clock, Timer
from predictors.service.errors import BatchError, ClosedError, ExpiredError, QueueFullError
from predictors.service.grouping import BatchingSettings, nearest_in_length, oldest_first
from scheduler_core.errors import TailcastError

I = TypeVar("I")  # noqa: E741  an item
R = TypeVar("R")  # its result


@dataclass(frozen=True, slots=True)
class Answer(Generic[R]):
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
    deadline: float | None
    future: asyncio.Future[Answer[R]] = field(repr=False)


class Batcher(Generic[I, R]):
    """Groups concurrent `submit` calls into calls of `work`.

    Args:
        work: Takes 1..max_batch items, returns one result each, in order. At most `num_workers` calls at a time.
        settings: Limits and grouping.
        clock: Source of time.
    """

    def __init__(
        self,
        work: Callable[[Sequence[I]], Awaitable[Sequence[R]]],
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
        self._running: set[asyncio.Task[None]] = set()
        self._timer: Timer | None = None
        self._closing = False

    @property
    def num_waiting(self) -> int:
        """Items in the queue."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Batches in `work`."""
        return len(self._running)

    async def submit(self, item: I, *, length: int, deadline: float | None = None) -> Answer[R]:
        """Waits for the item's result. Cancelling the caller takes the item out of the queue.

        Args:
            item: What `work` gets.
            length: What padding is counted in, >= 1 (tokens).
            deadline: Time of the clock after which the item is dropped instead of worked on.

        Raises:
            QueueFullError: `max_queue` items are waiting; raised at once.
            ClosedError: The batcher is closing.
            ExpiredError: The deadline passed while the item was waiting.
            BatchError: The item's batch failed.
        """
        if self._closing:
            raise ClosedError
        if len(self._waiting) >= self._settings.max_queue:
            raise QueueFullError(self._settings.max_queue)
        entry: _Entry[I, R] = _Entry(
            next(self._numbers),
            item,
            length,
            self._clock.now(),
            deadline,
            asyncio.get_running_loop().create_future(),
        )
        self._waiting[entry.number] = entry
        bisect.insort(self._by_length, (length, entry.number))
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
        while self._running:
            await asyncio.wait(self._running)

    def _remove(self, entry: _Entry[I, R]) -> None:
        if self._waiting.pop(entry.number, None) is not None:
            del self._by_length[bisect.bisect_left(self._by_length, (entry.length, entry.number))]

    def _pump(self) -> None:
        """Starts batches while there is a free worker and a group that need not wait."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting and len(self._running) < self._settings.num_workers:
            now = self._clock.now()
            due = next(iter(self._waiting.values())).arrived + self._settings.max_wait_s
            if now < due and len(self._waiting) < self._settings.max_batch and not self._closing:
                self._timer = self._clock.call_at(due, self._pump)
                return
            group = self._take(now)
            if group:
                task = asyncio.get_running_loop().create_task(self._run(group, now))
                self._running.add(task)

    def _take(self, now: float) -> list[_Entry[I, R]]:
        """Removes the next group from the queue; empty if all of it had expired."""
        oldest = next(iter(self._waiting.values()))
        if self._settings.order == "arrival":
            entries = list(itertools.islice(self._waiting.values(), self._settings.max_batch))
            entries = entries[: oldest_first([entry.length for entry in entries], self._settings)]
        else:
            # No batch reaches further than max_batch places from the oldest request.
            at = bisect.bisect_left(self._by_length, (oldest.length, oldest.number))
            first = max(0, at - self._settings.max_batch)
            near = self._by_length[first : at + self._settings.max_batch]
            chosen = nearest_in_length([length for length, _ in near], at - first, self._settings)
            entries = [self._waiting[near[position][1]] for position in chosen]
        for entry in entries:
            self._remove(entry)
        for entry in entries:
            if entry.deadline is not None and entry.deadline <= now:
                _fail(entry, ExpiredError())
        return [entry for entry in entries if not entry.future.done()]

    async def _run(self, group: list[_Entry[I, R]], started: float) -> None:
        try:
            results = await self._work([entry.item for entry in group])
            if len(results) != len(group):
                raise TailcastError(f"{len(results)} results for a batch of {len(group)}")
        except BaseException as error:
            for entry in group:
                _fail(entry, BatchError(error))
            if not isinstance(error, Exception):
                raise
        else:
            work_s = self._clock.now() - started
            for entry, result in zip(group, results, strict=True):
                if not entry.future.done():
                    entry.future.set_result(Answer(result, started - entry.arrived, work_s, len(group)))
        finally:
            task = asyncio.current_task()
            assert task is not None
            self._running.discard(task)
            self._pump()


def _fail(entry: _Entry[I, R], error: TailcastError) -> None:
    if not entry.future.done():
        entry.future.set_exception(error)
