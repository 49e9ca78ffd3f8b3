"""The batcher, the cache, threads, tokenizing and metrics of the service."""

import asyncio
import dataclasses
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from prometheus_client.multiprocess import mark_process_dead

from predictors.proto import predictor_v1_pb2 as pb
from predictors.service.artifacts import ArtifactTable
from predictors.service.batcher import BatchedResult, Batcher, BatchingSettings, Callback
from predictors.service.errors import BatchError, ClosedError, ExpiredError, QueueFullError
from predictors.service.messages import CheckedRequest
from predictors.service.metrics import DIRECTORY_VARIABLE
from predictors.service.pipeline import MAX_INLINE_CHARS, ServiceThreads, worker_cores
from scheduler_core.errors import InputError
from tests.predictors.fakes import GatedRuntime, ManualClock, failure, server_and_stub, settle
from tests.waiting import until


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
        calls = (self.batcher.submit(item, length=length or item, deadline=deadline) for item in items)
        tasks = [asyncio.create_task(call) for call in calls]
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
    assert outcomes(await asyncio.gather(*callers)) == [f"r{item}" for item in (50, 10, 51, 11, 52, 49, 53)]


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
LIMITS = {"max_batch": st.integers(1, 5), "num_workers": st.integers(1, 3), "max_queue": st.integers(1, 12)}
LIMITS["max_wait_s"] = st.sampled_from([0.0, 1.0, 2.0, 3.0])
PADDING = {"max_padding": st.just(1.5), "max_padded_tokens": st.just(300)}
SETTINGS = st.builds(BatchingSettings, **LIMITS, **PADDING)


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


async def test_predictions_alone_are_cached(rich_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    runtime = GatedRuntime(rich_folder, num_failures=1)
    async with server_and_stub(runtime, cache_entries=10) as (server, stub):
        with caplog.at_level(logging.CRITICAL, logger="predictors.service.pipeline"):
            await failure(stub.Predict(pb.PredictRequest(prompt="sea")))
        first = await stub.Predict(pb.PredictRequest(request_id="1", prompt="sea"))
        second = await stub.Predict(pb.PredictRequest(request_id="2", prompt="sea", max_tokens=5))
        third = await stub.Predict(pb.PredictRequest(prompt="sea", served_model="huge-llm"))
    assert [response.cached for response in (first, second, third)] == [False, True, False]
    assert (second.request_id, second.mu, second.truncated_length.max_tokens) == ("2", first.mu, 5)
    assert second.durations == pb.Durations()
    assert third.mu != first.mu
    assert len(runtime.batches) == 3
    text = server.metrics.exposition().decode()
    assert 'tailcast_cache_hits_total{artifact="tiny"} 1.0' in text
    assert 'tailcast_cache_misses_total{artifact="tiny"} 3.0' in text


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads cannot be bound to cores here")
async def test_model_threads_are_bound_to_a_core_each_and_no_other_thread_is() -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    threads = ServiceThreads(len(cores), cores=cores)
    barrier = threading.Barrier(len(cores))

    def affinity() -> frozenset[int]:
        barrier.wait(timeout=20)
        return frozenset(os.sched_getaffinity(0))

    before = os.sched_getaffinity(0)
    loop = asyncio.get_running_loop()
    bound = await asyncio.gather(*(loop.run_in_executor(threads.run, affinity) for _ in cores))
    assert sorted(bound, key=min) == [frozenset({core}) for core in cores]
    assert await loop.run_in_executor(threads.tokenize, os.sched_getaffinity, 0) == before
    assert os.sched_getaffinity(0) == before
    threads.close()


def test_model_threads_are_bound_only_if_there_are_as_many_as_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {7, 1, 5, 3}, raising=False)
    assert worker_cores(num_workers=4) == [1, 3, 5, 7]
    assert worker_cores(num_workers=2, process=1, num_processes=2) == [5, 7]
    assert worker_cores(num_workers=3) == worker_cores(num_workers=8) == []


@pytest.mark.parametrize("prompt", ["sea", "sea " * MAX_INLINE_CHARS], ids=["in the loop", "in a thread"])
async def test_a_tokenizer_that_fails_fails_its_request_alone(artifact_folder: Path, prompt: str) -> None:
    runtime = GatedRuntime(artifact_folder)
    tokenizer = runtime.tokenizer

    def failing(prompts: Any) -> Any:
        runtime.tokenizer = tokenizer
        raise RuntimeError("injected failure")

    table = ArtifactTable([runtime], BatchingSettings.cpu(1))
    pipeline = table.default
    with pytest.raises(ClosedError, match="the service is starting"):
        await pipeline.predict(CheckedRequest(prompt))
    await table.start()
    runtime.tokenizer = failing  # type: ignore[assignment]
    with pytest.raises(BatchError, match="the batch failed") as caught:
        await pipeline.predict(CheckedRequest(prompt))
    assert str(caught.value.__cause__) == "injected failure"
    assert (await pipeline.predict(CheckedRequest(prompt))).prediction.length is not None
    await table.close()


async def test_metrics_tell_queue_batches_and_padding(artifact_folder: Path) -> None:
    runtime = GatedRuntime(artifact_folder, is_open=False)
    batching = BatchingSettings(max_batch=2, max_wait_s=60.0, max_queue=2)
    prompts = ("sea", "name three rivers")
    async with server_and_stub(runtime, batching=batching) as (server, stub):
        calls = [asyncio.ensure_future(stub.Predict(pb.PredictRequest(prompt=prompt))) for prompt in prompts]
        await until(lambda: server.artifacts.num_in_flight == 2)
        assert 'tailcast_queue_length{artifact="tiny"} 2.0' in server.metrics.exposition().decode()
        await failure(stub.Predict(pb.PredictRequest(prompt="sea")))
        runtime.gate.set()
        await asyncio.gather(*calls)
    text = server.metrics.exposition().decode()
    for line in (
        'tailcast_queue_length{artifact="tiny"} 0.0',
        'tailcast_requests_total{artifact="tiny",code="OK",method="Predict"} 2.0',
        'tailcast_requests_total{artifact="tiny",code="RESOURCE_EXHAUSTED",method="Predict"} 1.0',
        'tailcast_batch_size_bucket{artifact="tiny",le="1.0"} 0.0',
        'tailcast_batch_size_bucket{artifact="tiny",le="2.0"} 1.0',
        'tailcast_tokens_total{artifact="tiny"} 8.0',
        'tailcast_padding_tokens_total{artifact="tiny"} 2.0',
        'tailcast_request_seconds_count{artifact="tiny",method="Predict"} 3.0',
        'tailcast_queue_seconds_count{artifact="tiny"} 2.0',
        'tailcast_inference_seconds_count{artifact="tiny"} 1.0',
    ):
        assert line in text, line


WORKER = """
import sys
from predictors.service.metrics import ArtifactMetrics, ServiceMetrics, count_as_worker
count_as_worker(int(sys.argv[1]))
server = ServiceMetrics()
metrics = ArtifactMetrics(server, "tiny")
metrics.queue_length.inc()
metrics.failed_batches.inc()
print(server.exposition().decode())
"""


def test_counts_of_a_worker_that_has_ended_stay_and_its_gauges_go(tmp_path: Path) -> None:
    def exposition(worker: int) -> str:
        environment = os.environ | {DIRECTORY_VARIABLE: str(tmp_path)}
        command = [sys.executable, "-c", WORKER, str(worker)]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

    exposition(0)
    mark_process_dead(0, str(tmp_path))  # type: ignore[no-untyped-call]
    exposition(0)  # the second process of the same worker
    text = exposition(1)
    assert 'tailcast_failed_batches_total{artifact="tiny"} 3.0' in text
    assert 'tailcast_queue_length{artifact="tiny"} 2.0' in text
