"""Cache, threads, metrics, logs, traces."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictors.edge import _json_formatter
from predictors.proto import predictor_v1_pb2 as pb
from predictors.service.batcher import BatchingSettings
from predictors.service.errors import BatchError, UnparsableError
from predictors.service.messages import parse
from predictors.service.metrics import ServiceMetrics, WorkerMetricFiles
from predictors.service.pipeline import (
    MAX_INLINE_CHARS,
    PredictionPipeline,
    ServiceThreads,
    _submit,
    cache_key,
    worker_cores,
)
from predictors.tokenizer import TokenizedPrompt
from scheduler_core.errors import TailcastError
from tests.predictors.fakes import GatedRuntime, server_and_stub, until

PROMPTS = st.text(max_size=12) | st.lists(st.integers(0, 2**31), max_size=5).map(
    lambda ids: TokenizedPrompt(np.array(ids), False)
)
REQUESTS = st.tuples(PROMPTS, st.none() | st.text(max_size=6), st.none() | st.sampled_from([0.0, 0.7, 1.0]))


@given(first=REQUESTS, second=REQUESTS)
def test_different_requests_have_different_keys(first: Any, second: Any) -> None:
    def plain(request: Any) -> Any:
        prompt, name, temperature = request
        values = prompt if isinstance(prompt, str) else prompt.ids.tolist()
        return type(values).__name__, values, name or "", temperature

    assert (cache_key(*first) == cache_key(*second)) == (plain(first) == plain(second))


async def test_cached_predictions_cost_no_model_call(rich_folder: Path) -> None:
    runtime = GatedRuntime(rich_folder)
    metrics = ServiceMetrics()
    async with server_and_stub(runtime, cache_entries=10, metrics=metrics) as (_, stub):
        first = await stub.Predict(pb.PredictRequest(request_id="1", prompt="sea"))
        second = await stub.Predict(pb.PredictRequest(request_id="2", prompt="sea", max_tokens=5))
        third = await stub.Predict(pb.PredictRequest(prompt="sea", served_model="huge-llm"))
    assert [response.cached for response in (first, second, third)] == [False, True, False]
    assert (second.request_id, second.mu, second.truncated_length.max_tokens) == ("2", first.mu, 5)
    assert second.durations == pb.Durations()
    assert third.mu != first.mu
    assert len(runtime.batches) == 2
    text = metrics.exposition().decode()
    assert 'tailcast_cache_hits_total{artifact="tiny"} 1.0' in text
    assert 'tailcast_cache_misses_total{artifact="tiny"} 2.0' in text


async def test_failures_are_not_cached(rich_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    runtime = GatedRuntime(rich_folder, num_failures=1)
    async with server_and_stub(runtime, cache_entries=10) as (_, stub):
        with (
            caplog.at_level(logging.CRITICAL, logger="predictors.service.pipeline"),
            pytest.raises(grpc.aio.AioRpcError),
        ):
            await stub.Predict(pb.PredictRequest(prompt="sea"))
        assert not (await stub.Predict(pb.PredictRequest(prompt="sea"))).cached


async def test_results_and_errors_of_threads_come_back_in_the_event_loop() -> None:
    threads = ServiceThreads(num_workers=2)
    barrier = threading.Barrier(2)
    outcomes: asyncio.Queue[tuple[object, BaseException | None, str]] = asyncio.Queue()

    def done(result: object, error: BaseException | None) -> None:
        outcomes.put_nowait((result, error, threading.current_thread().name))

    for _ in range(2):  # neither ends before the other one has begun
        _submit(threads.run, done, _meet, barrier)
    names = [await outcomes.get() for _ in range(2)]
    assert sorted(str(name) for name, _, _ in names) == ["tailcast-run_0", "tailcast-run_1"]
    _submit(threads.run, done, next, iter(()))
    _, error, thread = await outcomes.get()
    assert isinstance(error, StopIteration)
    assert thread == threading.main_thread().name
    threads.close()


async def test_threads_make_the_calls_that_wait_even_after_the_end() -> None:
    threads = ServiceThreads(num_workers=1)
    gate, numbers = threading.Event(), list[int]()
    ended = asyncio.Event()
    _submit(threads.run, lambda result, error: None, gate.wait)
    for number in range(20):
        _submit(threads.run, lambda result, error: None, numbers.append, number)
    _submit(threads.run, lambda result, error: ended.set(), len, numbers)
    threads.close()
    assert numbers == []
    gate.set()
    await ended.wait()
    assert numbers == list(range(20))


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
    found = await asyncio.gather(*(loop.run_in_executor(threads.run, affinity) for _ in cores))
    assert sorted(found, key=min) == [frozenset({core}) for core in cores]
    assert await loop.run_in_executor(threads.tokenize, os.sched_getaffinity, 0) == before
    assert os.sched_getaffinity(0) == before
    threads.close()


@pytest.mark.parametrize(
    ("num_workers", "process", "num_processes", "cores"),
    [
        (4, 0, 1, [1, 3, 5, 7]),
        (2, 0, 2, [1, 3]),
        (2, 1, 2, [5, 7]),
        (1, 3, 4, [7]),
        (3, 0, 1, []),
        (8, 0, 1, []),
    ],
)
def test_model_threads_are_bound_only_where_there_are_as_many_as_cores(
    monkeypatch: pytest.MonkeyPatch, num_workers: int, process: int, num_processes: int, cores: list[int]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {7, 1, 5, 3}, raising=False)
    assert worker_cores(num_workers, process, num_processes) == cores


def _meet(barrier: threading.Barrier) -> str:
    barrier.wait(timeout=20)
    return threading.current_thread().name


@pytest.mark.parametrize("prompt", ["sea", "sea " * 1000], ids=["in the event loop", "in a thread"])
async def test_a_tokenizer_that_fails_fails_its_request_alone(artifact_folder: Path, prompt: str) -> None:
    runtime = GatedRuntime(artifact_folder)
    tokenizer = runtime.tokenizer
    threads: list[str] = []

    def failing(prompts: Any) -> Any:
        threads.append(threading.current_thread().name)
        if len(threads) == 1:
            raise RuntimeError("injected failure")
        return tokenizer(prompts)

    pipeline = PredictionPipeline(runtime, BatchingSettings.cpu(1))
    await pipeline.start()
    runtime.tokenizer = failing  # type: ignore[assignment]
    with pytest.raises(BatchError, match="the batch failed") as caught:
        await pipeline.predict(prompt)
    assert str(caught.value.__cause__) == "injected failure"
    assert (await pipeline.predict(prompt)).prediction.mu is not None
    await pipeline.close()
    is_inline = len(prompt) <= MAX_INLINE_CHARS
    assert all((name == threading.main_thread().name) is is_inline for name in threads)


async def test_waiting_for_a_busy_worker_is_queue_time_though_the_batch_was_handed_over(
    artifact_folder: Path,
) -> None:
    runtime = GatedRuntime(artifact_folder, is_open=False)
    pipeline = PredictionPipeline(runtime, BatchingSettings.cpu(1))
    await pipeline.start()
    start = time.perf_counter()
    calls = [asyncio.ensure_future(pipeline.predict(prompt)) for prompt in ("sea", "name three rivers")]
    await until(lambda: pipeline.num_in_flight == 2)
    before = time.perf_counter()
    await asyncio.sleep(0)
    waited_s = time.perf_counter() - before
    runtime.gate.set()
    _, second = await asyncio.gather(*calls)
    assert second.batch_size == 1
    assert second.queue_s >= waited_s
    assert second.queue_s + second.inference_s <= time.perf_counter() - start
    await pipeline.close()


async def test_metrics_tell_queue_batches_and_padding(artifact_folder: Path) -> None:
    runtime = GatedRuntime(artifact_folder, is_open=False)
    metrics = ServiceMetrics()
    batching = BatchingSettings(max_batch=2, max_wait_s=60.0, max_queue=2)
    async with server_and_stub(runtime, batching=batching, metrics=metrics) as (server, stub):
        calls = [
            asyncio.ensure_future(stub.Predict(pb.PredictRequest(prompt=prompt)))
            for prompt in ("sea", "name three rivers")
        ]
        await until(lambda: server.pipeline.num_in_flight == 2)
        assert 'tailcast_queue_length{artifact="tiny"} 2.0' in metrics.exposition().decode()
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Predict(pb.PredictRequest(prompt="sea"))
        runtime.gate.set()
        await asyncio.gather(*calls)
    text = metrics.exposition().decode()
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
import sys, grpc
from predictors.service.metrics import ServiceMetrics, count_as_worker
count_as_worker(int(sys.argv[1]))
server = ServiceMetrics()
for name in sys.argv[2:]:
    metrics = server.artifact(name)
    metrics.loaded("v1", "CPUExecutionProvider", None)
    metrics.queue_length.inc()
    for method in ("Predict", "PredictBatch", "PredictStream", "HTTP Predict", "ModelInfer"):
        for code in grpc.StatusCode:
            metrics.request(method, code.name, 0.1, 0.1, 0.1)
    metrics.batch([3], 0.1)
    metrics.failed_batches.inc()
    metrics.cache(True), metrics.cache(False)
    metrics.reload(True), metrics.reload(False)
print(server.exposition().decode())
"""


def test_metrics_of_workers_stay_within_the_space_that_was_taken_for_them(tmp_path: Path) -> None:
    names = ["a" * 64, "b" * 64]
    files = WorkerMetricFiles(tmp_path, num_workers=2, num_artifacts=2)
    sizes = {file.name: file.stat().st_size for file in tmp_path.iterdir()}
    assert len(sizes) == 8
    assert all(file.stat().st_blocks * 512 >= sizes[file.name] for file in tmp_path.iterdir())

    def exposition(worker: int) -> str:
        command = [sys.executable, "-c", WORKER, str(worker), *names]
        return subprocess.run(
            command, env=os.environ | files.environment, check=True, capture_output=True, text=True
        ).stdout

    exposition(0)
    files.reset_live(0)
    exposition(0)  # the second process of the same worker
    text = exposition(1)
    assert f'tailcast_failed_batches_total{{artifact="{names[0]}"}} 3.0' in text
    assert f'tailcast_queue_length{{artifact="{names[1]}"}} 2.0' in text  # without the process that has ended
    assert {file.name: file.stat().st_size for file in tmp_path.iterdir()} == sizes


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device without space")
def test_no_space_for_the_metrics_of_workers_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "histogram_1.db").symlink_to("/dev/full")
    with pytest.raises(TailcastError, match=r"metrics of 2 workers need 400 KiB.*No space left"):
        WorkerMetricFiles(tmp_path, num_workers=2, num_artifacts=1)


def test_log_lines_are_json_objects() -> None:
    record = logging.makeLogRecord({"name": "a", "levelname": "INFO", "msg": "two\n%s", "args": ("lines",)})
    record.artifact = "tiny"
    found = json.loads(_json_formatter().format(record))
    assert (found["message"], found["artifact"], found["level"]) == ("two\nlines", "tiny", "INFO")
    try:
        raise ValueError("broken")
    except ValueError as error:
        record.exc_info = (type(error), error, error.__traceback__)
    line = _json_formatter().format(record)
    assert len(line.splitlines()) == 1
    assert "ValueError: broken" in json.loads(line)["traceback"]


def test_what_another_protobuf_raises_is_the_callers_fault_too() -> None:
    """The implementation in pure Python raises UnicodeDecodeError where the compiled one raises DecodeError."""

    class PurePython:
        @staticmethod
        def FromString(data: bytes) -> str:  # the name in protobuf
            return data.decode()

    with pytest.raises(UnparsableError, match="PurePython"):
        parse(PurePython, b"\xff")
    assert parse(pb.PredictRequest, b"\n\x01r").request_id == "r"
