from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from predictors.service.batcher import BatchedResult, Batcher, BatchingSettings, Callback
from predictors.service.errors import BatchError, ClosedError, ExpiredError, QueueFullError
from scheduler_core.errors import InputError
from tests.predictors.fakes import ManualClock, settle


class Bench:
    """A batcher on a clock that stands still; its batches wait until they are released with results or an error."""

    def __init__(self, **settings: Any) -> None:
        self.clock = ManualClock()
        self.batches: list[list[int]] = []
        self._callbacks: list[Callback[str]] = []
        options = {"max_batch": 4, "max_wait_s": 0.0} | settings
        self.batcher: Batcher[int, str] = Batcher(self._work, BatchingSettings(**options), self.clock)

    def _work(self, items: Sequence[int], done: Callback[str]) -> None:
        self.batches.append(list(items))
        self._callbacks.append(done)

    async def release(
        self, number: int, error: BaseException | None = None, results: list[str] | None = None
    ) -> None:
        if results is None and error is None:
            results = [f"r{item}" for item in self.batches[number]]
        self._callbacks[number](results, error)
        await settle()

    async def submit(self, *items: int, length: int | None = None, deadline: float | None = None) -> Any:
        """Starts one caller per item; the length of item i is i unless given."""
        tasks = [
            asyncio.create_task(self.batcher.submit(item, length=length or item, deadline=deadline))
            for item in items
        ]
        await settle()
        return tasks if len(tasks) != 1 else tasks[0]


def outcomes(results: list[Any]) -> list[str]:
    """Results, and the kinds of errors."""
    return [one.result if isinstance(one, BatchedResult) else type(one).__name__ for one in results]


async def test_idle_worker_takes_a_request_at_once() -> None:
    bench = Bench()
    caller = await bench.submit(7)
    assert bench.batches == [[7]]
    await bench.clock.advance(0.5)
    await bench.release(0)
    assert await caller == BatchedResult("r7", queue_s=0.0, work_s=0.5, batch_size=1)


async def test_waiting_requests_are_joined_by_length_starting_from_the_oldest() -> None:
    bench = Bench(max_padding=1.1)
    await bench.submit(1)
    callers = await bench.submit(50, 10, 51, 11, 52, 49, 53)
    await bench.release(0)
    assert sorted(bench.batches[1]) == [49, 50, 51, 52]
    await bench.release(1)
    assert sorted(bench.batches[2]) == [10, 11]
    await bench.release(2)
    await bench.release(3)
    assert bench.batches[3] == [53]
    answers = await asyncio.gather(*callers)
    assert outcomes(answers) == [f"r{item}" for item in (50, 10, 51, 11, 52, 49, 53)]


async def test_waits_for_company_but_not_longer_than_allowed() -> None:
    bench = Bench(max_batch=3, max_wait_s=0.003)
    await bench.submit(1)
    await bench.clock.advance(0.002)
    await bench.submit(2)
    assert bench.batches == []
    await bench.clock.advance(0.001)
    assert sorted(bench.batches[0]) == [1, 2]
    assert not bench.clock.timers
    await bench.release(0)
    await bench.submit(3, 4, 5)  # a full batch does not wait
    assert sorted(bench.batches[1]) == [3, 4, 5]


async def test_one_batch_is_handed_over_ahead_and_the_rest_waits_for_company() -> None:
    bench = Bench(num_workers=2, num_ahead=1, max_batch=2)
    await bench.submit(1, 2, 3, 4, 5)
    assert bench.batches == [[1], [2], [3]]
    assert bench.batcher.num_waiting == 2
    await bench.release(0)
    assert bench.batches == [[1], [2], [3], [4, 5]]


async def test_expired_requests_are_told_at_that_moment_and_cost_no_work() -> None:
    bench = Bench(max_batch=1)
    running = await bench.submit(1)
    late = await bench.submit(2, deadline=1.0)
    in_time = await bench.submit(3, deadline=1.5)
    await bench.clock.advance(0.9)
    assert not late.done()
    await bench.clock.advance(0.1)
    with pytest.raises(ExpiredError):
        await late
    assert bench.batcher.num_waiting == 1
    for number in range(2):
        await bench.release(number)
    assert ((await running).result, (await in_time).result) == ("r1", "r3")
    assert bench.batches == [[1], [3]]
    assert not bench.clock.timers
    with pytest.raises(ExpiredError):  # a deadline that has passed
        await bench.batcher.submit(1, length=1, deadline=1.0)


async def test_idle_session_is_flushed_at_once_and_a_busy_one_waits_for_company() -> None:
    bench = Bench(max_batch=3, max_wait_s=0.003, flush_when_idle=True, num_workers=2)
    await bench.submit(1)
    assert bench.batches == [[1]]
    await bench.submit(2)
    assert bench.batches == [[1]]
    await bench.clock.advance(0.003)
    assert bench.batches == [[1], [2]]
    await bench.submit(3, 4, 5, 6)
    await bench.release(0)
    assert sorted(bench.batches[2]) == [3, 4, 5]
    await bench.release(1)
    assert len(bench.batches) == 3
    await bench.release(2)
    assert bench.batches[3] == [6]


async def test_work_that_cannot_even_start_fails_its_batch() -> None:
    def work(items: Sequence[int], done: Callback[str]) -> None:
        raise RuntimeError("no thread")

    batcher = Batcher(work, BatchingSettings(max_batch=2, max_wait_s=0.0), ManualClock())
    for _ in range(2):
        with pytest.raises(BatchError, match="RuntimeError"):
            await batcher.submit(1, length=1)


def test_bad_settings_are_named() -> None:
    for field in ("max_batch", "max_padding", "max_padded_tokens", "max_queue", "num_workers"):
        with pytest.raises(InputError, match=field):
            Bench(**{field: 0})


async def test_close_drains_what_waits_without_waiting_for_company() -> None:
    bench = Bench(max_batch=2, max_wait_s=60.0)
    callers = await bench.submit(1, 2, 3)
    closing = asyncio.create_task(bench.batcher.close())
    await settle()
    with pytest.raises(ClosedError):
        await bench.batcher.submit(4, length=4)
    await bench.release(0)
    assert not closing.done()
    await bench.release(1)
    await closing
    assert outcomes(await asyncio.gather(*callers)) == ["r1", "r2", "r3"]


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 200), st.one_of(st.none(), st.integers(0, 20))),
        st.tuples(st.just("cancel"), st.integers(0, 100), st.none()),
        st.tuples(st.just("advance"), st.integers(1, 5), st.none()),
        st.tuples(st.just("finish"), st.integers(0, 10), st.booleans()),
    ),
    max_size=40,
)


SETTINGS = st.builds(
    BatchingSettings,
    max_batch=st.integers(1, 5),
    max_wait_s=st.sampled_from([0.0, 1.0, 2.0, 3.0]),
    num_workers=st.integers(1, 3),
    max_queue=st.integers(1, 12),
    max_padding=st.just(1.5),
    max_padded_tokens=st.just(300),
)


@given(operations=OPERATIONS, settings=SETTINGS)
@hypothesis_settings(max_examples=60, deadline=None)
async def test_every_caller_gets_exactly_its_own_outcome(
    operations: list[tuple[str, int, Any]], settings: BatchingSettings
) -> None:
    bench = Bench(**dataclasses.asdict(settings))
    callers: list[asyncio.Task[BatchedResult[str]]] = []
    lengths: list[int] = []
    released: set[int] = set()

    def running() -> list[int]:
        return sorted(set(range(len(bench.batches))) - released)

    for name, number, extra in operations:
        if name == "submit":
            deadline = None if extra is None else bench.clock.now() + extra
            caller = asyncio.create_task(bench.batcher.submit(len(callers), length=number, deadline=deadline))
            callers.append(caller)
            lengths.append(number)
            await settle()
        elif name == "cancel" and callers:
            callers[number % len(callers)].cancel()
            await settle()
        elif name == "advance":
            await bench.clock.advance(float(number))
        elif name == "finish" and running():
            batch = running()[number % len(running())]
            released.add(batch)
            await bench.release(batch, ValueError("broken") if extra else None)
        assert len(running()) <= settings.num_workers
        assert bench.batcher.num_waiting <= settings.max_queue
    closing = asyncio.create_task(bench.batcher.close())
    await settle()
    while not closing.done():
        batch = running()[-1]
        released.add(batch)
        await bench.release(batch)
    worked_on = [item for batch in bench.batches for item in batch]
    assert len(worked_on) == len(set(worked_on))
    for batch in bench.batches:
        assert 1 <= len(batch) <= settings.max_batch
        real = [lengths[item] for item in batch]
        if len(batch) > 1:
            assert len(batch) * max(real) <= min(300, 1.5 * sum(real))
    for item, outcome in enumerate(await asyncio.gather(*callers, return_exceptions=True)):
        if isinstance(outcome, BatchedResult):
            assert outcome.result == f"r{item}"
        elif isinstance(outcome, QueueFullError | ExpiredError):
            assert item not in worked_on
        else:
            assert isinstance(outcome, BatchError | asyncio.CancelledError)
