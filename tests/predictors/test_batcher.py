from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from predictors.service.batcher import (
    BatchedResult,
    Batcher,
    BatchingSettings,
    Callback,
    Work,
    nearest_in_length,
    oldest_first,
)
from predictors.service.errors import BatchError, ClosedError, ExpiredError, QueueFullError
from scheduler_core.errors import InputError
from tests.predictors.fakes import ManualClock, settle


class GatedWork:
    """Records its batches; each waits until it is released with results or an error."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self._futures: list[asyncio.Future[list[str]]] = []

    async def __call__(self, items: Sequence[int]) -> list[str]:
        self.batches.append(list(items))
        self._futures.append(asyncio.get_running_loop().create_future())
        return await self._futures[-1]

    async def release(self, number: int, error: BaseException | None = None) -> None:
        if error is None:
            self._futures[number].set_result([f"r{item}" for item in self.batches[number]])
        else:
            self._futures[number].set_exception(error)
        await settle()


def called_back(work: Callable[[Sequence[int]], Awaitable[Sequence[str]]]) -> Work[int, str]:
    """What a batcher takes, of a coroutine function."""

    def start(items: Sequence[int], done: Callback[str]) -> None:
        def finish(running: asyncio.Future[Sequence[str]]) -> None:
            error = asyncio.CancelledError() if running.cancelled() else running.exception()
            done(None if error else running.result(), error)

        asyncio.ensure_future(work(items)).add_done_callback(finish)

    return start


class Bench:
    """A batcher on a clock that stands still."""

    def __init__(self, **settings: Any) -> None:
        self.clock = ManualClock()
        self.work = GatedWork()
        self.batcher: Batcher[int, str] = Batcher(
            called_back(self.work),
            settings=BatchingSettings(**({"max_batch": 4, "max_wait_s": 0.0} | settings)),
            clock=self.clock,
        )

    async def submit(self, *items: int, length: int | None = None, deadline: float | None = None) -> Any:
        """Starts one caller per item; the length of item i is i unless given."""
        tasks = [
            asyncio.create_task(self.batcher.submit(item, length=length or item, deadline=deadline))
            for item in items
        ]
        await settle()
        return tasks if len(tasks) != 1 else tasks[0]


async def test_idle_worker_takes_a_request_at_once() -> None:
    bench = Bench()
    caller = await bench.submit(7)
    assert bench.work.batches == [[7]]
    await bench.clock.advance(0.5)
    await bench.work.release(0)
    assert await caller == BatchedResult("r7", queue_s=0.0, work_s=0.5, batch_size=1)


async def test_waiting_requests_are_joined_by_length_starting_from_the_oldest() -> None:
    bench = Bench(max_padding=1.1)
    await bench.submit(1)
    callers = await bench.submit(50, 10, 51, 11, 52, 49, 53)
    await bench.work.release(0)
    assert sorted(bench.work.batches[1]) == [49, 50, 51, 52]
    await bench.work.release(1)
    assert sorted(bench.work.batches[2]) == [10, 11]
    await bench.work.release(2)
    await bench.work.release(3)
    assert bench.work.batches[3] == [53]
    assert [answer.result for answer in await asyncio.gather(*callers)] == [
        f"r{item}" for item in (50, 10, 51, 11, 52, 49, 53)
    ]


async def test_arrival_order_ignores_length() -> None:
    bench = Bench(order="arrival", max_batch=3)
    await bench.submit(1)
    await bench.submit(50, 10, 51, 11)
    await bench.work.release(0)
    assert bench.work.batches[1] == [50, 10, 51]


async def test_waits_for_company_but_not_longer_than_allowed() -> None:
    bench = Bench(max_batch=3, max_wait_s=0.003)
    await bench.submit(1)
    await bench.clock.advance(0.002)
    await bench.submit(2)
    assert bench.work.batches == []
    await bench.clock.advance(0.001)
    assert sorted(bench.work.batches[0]) == [1, 2]
    assert bench.clock.num_timers == 0


async def test_full_batch_does_not_wait() -> None:
    bench = Bench(max_batch=3, max_wait_s=0.003)
    await bench.submit(1, 2, 3)
    assert sorted(bench.work.batches[0]) == [1, 2, 3]


async def test_workers_run_at_the_same_time_and_no_more_than_allowed() -> None:
    bench = Bench(num_workers=2, max_batch=1)
    await bench.submit(1, 2, 3)
    assert bench.work.batches == [[1], [2]]
    await bench.work.release(1)
    assert bench.work.batches == [[1], [2], [3]]


async def test_one_batch_is_handed_over_ahead_and_the_rest_waits_for_company() -> None:
    bench = Bench(num_workers=2, num_ahead=1, max_batch=2)
    await bench.submit(1, 2, 3, 4, 5)
    assert bench.work.batches == [[1], [2], [3]]
    assert bench.batcher.num_waiting == 2
    await bench.work.release(0)
    assert bench.work.batches == [[1], [2], [3], [4, 5]]


async def test_full_queue_refuses_at_once_and_recovers() -> None:
    bench = Bench(max_batch=1, max_queue=2)
    callers = await bench.submit(1, 2, 3)
    with pytest.raises(QueueFullError, match="fewer than 2"):
        await bench.batcher.submit(4, length=4)
    await bench.work.release(0)
    callers.append(await bench.submit(5))
    for number in (1, 2, 3):
        await bench.work.release(number)
    assert [answer.result for answer in await asyncio.gather(*callers)] == ["r1", "r2", "r3", "r5"]


async def test_cancelled_caller_leaves_the_queue_without_work() -> None:
    bench = Bench(max_batch=1)
    first, second, third = await bench.submit(1, 2, 3)
    second.cancel()
    await settle()
    assert bench.batcher.num_waiting == 1
    await bench.work.release(0)
    await bench.work.release(1)
    assert bench.work.batches == [[1], [3]]
    assert (await first).result == "r1"
    assert (await third).result == "r3"


async def test_cancelled_caller_of_a_running_batch_does_not_disturb_the_others() -> None:
    bench = Bench(max_batch=2, max_wait_s=1.0)
    first, second = await bench.submit(1, 2)
    first.cancel()
    await settle()
    await bench.work.release(0)
    assert (await second).result == "r2"


async def test_expired_request_is_dropped_before_work() -> None:
    bench = Bench(max_batch=1)
    await bench.submit(1)
    late = await bench.submit(2, deadline=1.0)
    in_time = await bench.submit(3, deadline=1.5)
    await bench.clock.advance(1.0)
    await bench.work.release(0)
    with pytest.raises(ExpiredError):
        await late
    await bench.work.release(1)
    assert (await in_time).result == "r3"
    assert bench.work.batches == [[1], [3]]


async def test_expired_request_is_told_at_that_moment_though_no_worker_is_free() -> None:
    bench = Bench(max_batch=1)
    running = await bench.submit(1)
    late = await bench.submit(2, deadline=1.0)
    await bench.clock.advance(0.9)
    assert not late.done()
    await bench.clock.advance(0.1)
    with pytest.raises(ExpiredError):
        await late
    assert bench.batcher.num_waiting == 0
    assert bench.clock.num_timers == 0
    await bench.work.release(0)
    assert (await running).result == "r1"


async def test_request_whose_deadline_has_passed_never_enters_the_queue() -> None:
    bench = Bench()
    await bench.clock.advance(5.0)
    with pytest.raises(ExpiredError):
        await bench.batcher.submit(1, length=1, deadline=5.0)
    assert bench.work.batches == []


async def test_expired_requests_do_not_thin_out_the_next_batch() -> None:
    bench = Bench(max_batch=2)
    await bench.submit(50)
    late = await bench.submit(1, 2, deadline=1.0)
    await bench.submit(1, 2)
    await bench.clock.advance(1.0)
    await bench.work.release(0)
    assert sorted(bench.work.batches[1]) == [1, 2]
    assert all(
        isinstance(error, ExpiredError) for error in await asyncio.gather(*late, return_exceptions=True)
    )


async def test_far_deadlines_of_answered_requests_are_forgotten() -> None:
    bench = Bench(max_batch=1)
    for number in range(500):
        caller = await bench.submit(1, deadline=1e9)
        await bench.work.release(number)
        await caller
    assert len(bench.batcher._deadlines) <= 65
    assert bench.clock.num_timers <= 1


async def test_idle_session_is_flushed_at_once_and_a_busy_one_waits_for_company() -> None:
    bench = Bench(max_batch=3, max_wait_s=0.003, flush_when_idle=True, num_workers=2)
    await bench.submit(1)
    assert bench.work.batches == [[1]]
    await bench.submit(2)
    assert bench.work.batches == [[1]]
    await bench.clock.advance(0.003)
    assert bench.work.batches == [[1], [2]]
    await bench.submit(3, 4, 5, 6)
    await bench.work.release(0)
    assert sorted(bench.work.batches[2]) == [3, 4, 5]
    await bench.work.release(1)
    assert len(bench.work.batches) == 3
    await bench.work.release(2)
    assert bench.work.batches[3] == [6]


async def test_work_that_cannot_even_start_fails_its_batch() -> None:
    def work(items: Sequence[int], done: Callback[str]) -> None:
        raise RuntimeError("no thread")

    batcher = Batcher(work, settings=BatchingSettings(max_batch=2, max_wait_s=0.0), clock=ManualClock())
    for _ in range(2):
        with pytest.raises(BatchError, match="RuntimeError"):
            await batcher.submit(1, length=1)


async def test_failure_reaches_every_caller_of_that_batch_and_only_them() -> None:
    bench = Bench(max_batch=2, max_wait_s=1.0)
    callers = await bench.submit(1, 2, 3, 4)
    await bench.work.release(0, RuntimeError("session died"))
    await bench.work.release(1)
    outcomes = await asyncio.gather(*callers, return_exceptions=True)
    failures = [outcome for outcome in outcomes if isinstance(outcome, BatchError)]
    assert len(failures) == 2
    assert failures[0] is not failures[1]
    assert "RuntimeError" in str(failures[0])
    assert "session died" not in str(failures[0]), "it may quote the prompt of another caller"
    assert str(failures[0].__cause__) == "session died"
    assert sum(isinstance(outcome, BatchedResult) for outcome in outcomes) == 2


@pytest.mark.parametrize("results", [[], ["one", "two", "three"]])
async def test_wrong_number_of_results_fails_the_batch(results: list[str]) -> None:
    async def work(items: Sequence[int]) -> list[str]:
        return results

    settings = BatchingSettings(max_batch=2, max_wait_s=0.0)
    batcher = Batcher(called_back(work), settings=settings, clock=ManualClock())
    with pytest.raises(BatchError) as caught:
        await batcher.submit(1, length=1)
    assert f"{len(results)} results for a batch of 1" in str(caught.value.__cause__)


async def test_cancelled_work_reaches_the_callers() -> None:
    bench = Bench()
    caller = await bench.submit(1)
    await bench.work.release(0, asyncio.CancelledError())
    with pytest.raises(BatchError):
        await caller
    assert bench.batcher.num_running == 0


async def test_close_drains_what_waits_without_waiting_for_company() -> None:
    bench = Bench(max_batch=2, max_wait_s=60.0)
    callers = await bench.submit(1, 2, 3)
    closing = asyncio.create_task(bench.batcher.close())
    await settle()
    with pytest.raises(ClosedError):
        await bench.batcher.submit(4, length=4)
    await bench.work.release(0)
    assert not closing.done()
    await bench.work.release(1)
    await closing
    assert [answer.result for answer in await asyncio.gather(*callers)] == ["r1", "r2", "r3"]


async def test_close_without_drain_fails_what_waits_and_finishes_what_runs() -> None:
    bench = Bench(max_batch=1)
    running, waiting = await bench.submit(1, 2)
    closing = asyncio.create_task(bench.batcher.close(drain=False))
    await settle()
    with pytest.raises(ClosedError):
        await waiting
    await bench.work.release(0)
    await closing
    assert (await running).result == "r1"


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 200), st.one_of(st.none(), st.integers(0, 20))),
        st.tuples(st.just("cancel"), st.integers(0, 100), st.none()),
        st.tuples(st.just("advance"), st.integers(1, 5), st.none()),
        st.tuples(st.just("finish"), st.integers(0, 10), st.booleans()),
    ),
    max_size=40,
)


@given(
    operations=OPERATIONS,
    max_batch=st.integers(1, 5),
    max_wait=st.integers(0, 3),
    workers=st.integers(1, 3),
    order=st.sampled_from(["length", "arrival"]),
    max_queue=st.integers(1, 12),
)
@hypothesis_settings(max_examples=60, deadline=None)
def test_every_caller_gets_exactly_its_own_outcome(
    operations: list[tuple[str, int, Any]],
    max_batch: int,
    max_wait: int,
    workers: int,
    order: str,
    max_queue: int,
) -> None:
    asyncio.run(_play(operations, max_batch, max_wait, workers, order, max_queue))


async def _play(
    operations: list[tuple[str, int, Any]],
    max_batch: int,
    max_wait: int,
    workers: int,
    order: str,
    max_queue: int,
) -> None:
    bench = Bench(
        max_batch=max_batch,
        max_wait_s=float(max_wait),
        num_workers=workers,
        order=order,
        max_queue=max_queue,
        max_padding=1.5,
    )
    callers: list[asyncio.Task[BatchedResult[str]]] = []
    open_batches: list[int] = []
    seen = 0
    for name, number, extra in operations:
        if name == "submit":
            deadline = None if extra is None else bench.clock.now() + extra
            caller = asyncio.create_task(bench.batcher.submit(len(callers), length=number, deadline=deadline))
            callers.append(caller)
            await settle()
        elif name == "cancel" and callers:
            callers[number % len(callers)].cancel()
            await settle()
        elif name == "advance":
            await bench.clock.advance(float(number))
        elif name == "finish" and open_batches:
            failure = ValueError("broken") if extra else None
            await bench.work.release(open_batches.pop(number % len(open_batches)), failure)
        open_batches += range(seen, len(bench.work.batches))
        seen = len(bench.work.batches)
        assert len(open_batches) <= workers
        assert bench.batcher.num_waiting <= max_queue
    closing = asyncio.create_task(bench.batcher.close())
    await settle()
    while not closing.done():
        open_batches += range(seen, len(bench.work.batches))
        seen = len(bench.work.batches)
        await bench.work.release(open_batches.pop())
    worked_on = [item for batch in bench.work.batches for item in batch]
    assert len(worked_on) == len(set(worked_on))
    assert all(1 <= len(batch) <= max_batch for batch in bench.work.batches)
    for item, outcome in enumerate(await asyncio.gather(*callers, return_exceptions=True)):
        if isinstance(outcome, BatchedResult):
            assert outcome.result == f"r{item}"
        elif isinstance(outcome, QueueFullError | ExpiredError):
            assert item not in worked_on
        else:
            assert isinstance(outcome, BatchError | asyncio.CancelledError)


LENGTHS = st.lists(st.integers(1, 512), min_size=1, max_size=60)
SETTINGS = st.builds(
    BatchingSettings,
    max_batch=st.integers(1, 40),
    max_wait_s=st.just(0.0),
    max_padding=st.one_of(st.floats(1, 4), st.just(math.inf)),
    max_padded_tokens=st.integers(1, 20_000),
)


def settings(**changes: Any) -> BatchingSettings:
    return BatchingSettings(**({"max_batch": 4, "max_wait_s": 0.0} | changes))


@given(lengths=LENGTHS, settings=SETTINGS, data=st.data())
def test_group_holds_the_start_and_keeps_every_limit(
    lengths: list[int], settings: BatchingSettings, data: st.DataObject
) -> None:
    lengths.sort()
    start = data.draw(st.integers(0, len(lengths) - 1))
    group = nearest_in_length(lengths, start, settings)
    assert start in group
    assert 0 <= group.start < group.stop <= len(lengths)
    assert len(group) <= settings.max_batch
    chosen = [lengths[position] for position in group]
    if len(chosen) > 1:
        assert len(chosen) * max(chosen) <= settings.max_padding * sum(chosen)
        assert len(chosen) * max(chosen) <= settings.max_padded_tokens


@given(lengths=LENGTHS, settings=SETTINGS, data=st.data())
def test_group_cannot_be_grown_by_either_neighbour(
    lengths: list[int], settings: BatchingSettings, data: st.DataObject
) -> None:
    lengths.sort()
    group = nearest_in_length(lengths, data.draw(st.integers(0, len(lengths) - 1)), settings)
    if len(group) == settings.max_batch:
        return
    for low, high in ((group.start - 1, group.stop), (group.start, group.stop + 1)):
        if low >= 0 and high <= len(lengths):
            grown = lengths[low:high]
            padded = len(grown) * max(grown)
            assert padded > settings.max_padding * sum(grown) or padded > settings.max_padded_tokens


def test_nearer_neighbours_come_first() -> None:
    lengths = [5, 9, 10, 12, 40]
    assert [lengths[at] for at in nearest_in_length(lengths, 2, settings(max_batch=3))] == [9, 10, 12]
    assert [lengths[at] for at in nearest_in_length(lengths, 4, settings(max_batch=2))] == [12, 40]


def test_padding_limit_leaves_an_outlier_alone() -> None:
    assert list(nearest_in_length([5, 9, 10, 12, 400], 4, settings(max_padding=1.1))) == [4]


@given(lengths=LENGTHS, settings=SETTINGS)
def test_oldest_first_takes_a_prefix_within_the_limits(
    lengths: list[int], settings: BatchingSettings
) -> None:
    count = oldest_first(lengths, settings)
    assert 1 <= count <= min(len(lengths), settings.max_batch)
    assert count == 1 or count * max(lengths[:count]) <= settings.max_padded_tokens
    if count < min(len(lengths), settings.max_batch):
        assert (count + 1) * max(lengths[: count + 1]) > settings.max_padded_tokens


def test_defaults_of_the_two_kinds_of_device() -> None:
    cpu, gpu = BatchingSettings.cpu(num_workers=2), BatchingSettings.gpu()
    assert (cpu.max_batch, cpu.max_wait_s, cpu.num_workers, cpu.order) == (4, 0.0, 2, "length")
    assert (gpu.max_batch, gpu.max_wait_s) == (32, 0.003)
    assert (cpu.max_running, gpu.max_running) == (3, 2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_batch", 0),
        ("max_wait_s", -1.0),
        ("max_wait_s", math.nan),
        ("max_padding", 0.9),
        ("max_padding", math.nan),
        ("max_padded_tokens", 0),
        ("max_queue", 0),
        ("num_workers", 0),
        ("num_ahead", -1),
        ("order", "random"),
    ],
)
def test_bad_setting_is_named(field: str, value: object) -> None:
    with pytest.raises(InputError, match=field):
        settings(**{field: value})
