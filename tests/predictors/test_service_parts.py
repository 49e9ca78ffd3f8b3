"""Cache, threads, tokenizing, metrics."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.multiprocess import mark_process_dead

from predictors.proto import predictor_v1_pb2 as pb
from predictors.service.artifacts import ArtifactTable
from predictors.service.batcher import BatchingSettings
from predictors.service.errors import BatchError, ClosedError
from predictors.service.messages import CheckedRequest
from predictors.service.metrics import DIRECTORY_VARIABLE
from predictors.service.pipeline import MAX_INLINE_CHARS, ServiceThreads, worker_cores
from tests.predictors.fakes import GatedRuntime, failure, server_and_stub, until


async def test_cached_predictions_cost_no_model_call_and_failures_are_not_cached(
    rich_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_model_threads_are_bound_only_where_there_are_as_many_as_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {7, 1, 5, 3}, raising=False)
    assert worker_cores(num_workers=4) == [1, 3, 5, 7]
    assert worker_cores(num_workers=2, process=1, num_processes=2) == [5, 7]
    assert worker_cores(num_workers=3) == worker_cores(num_workers=8) == []


@pytest.mark.parametrize(
    "prompt", ["sea", "sea " * MAX_INLINE_CHARS], ids=["in the event loop", "in a thread"]
)
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
    assert (await pipeline.predict(CheckedRequest(prompt))).prediction.mu is not None
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
