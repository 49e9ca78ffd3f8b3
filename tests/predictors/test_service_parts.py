"""Cache, threads, metrics, logs, traces."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import threading
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictors.proto import predictor_v1_pb2 as pb
from predictors.proto.predictor_v1_pb2_grpc import PredictorStub
from predictors.runtime import open_runtime
from predictors.service.cache import LruCache, cache_key
from predictors.service.calls import parsed
from predictors.service.errors import UnparsableError
from predictors.service.grouping import BatchingSettings
from predictors.service.logs import JsonFormatter
from predictors.service.memory import settle_memory
from predictors.service.metrics import PrometheusMetrics
from predictors.service.threads import WorkerThreads
from predictors.service.tracing import OpenTelemetryTracing
from scheduler_core.errors import InputError
from tests.predictors.fakes import GatedRuntime, running_server, until


def test_cache_forgets_the_least_recently_used() -> None:
    cache: LruCache[int] = LruCache(2)
    cache.put(b"a", 1)
    cache.put(b"b", 2)
    assert cache.get(b"a") == 1
    cache.put(b"c", 3)
    assert [cache.get(key) for key in (b"a", b"b", b"c")] == [1, None, 3]
    assert len(cache) == 2
    with pytest.raises(InputError, match="cache_entries"):
        LruCache(0)


PROMPTS = st.text(max_size=12) | st.lists(st.integers(0, 2**31), max_size=5).map(np.array)
REQUESTS = st.tuples(PROMPTS, st.none() | st.text(max_size=6), st.none() | st.sampled_from([0.0, 0.7, 1.0]))


@given(first=REQUESTS, second=REQUESTS)
def test_different_requests_have_different_keys(first: Any, second: Any) -> None:
    def plain(request: Any) -> Any:
        prompt, name, temperature = request
        values = prompt if isinstance(prompt, str) else prompt.tolist()
        return type(values).__name__, values, name or "", temperature

    assert (cache_key(*first) == cache_key(*second)) == (plain(first) == plain(second))


async def test_cached_predictions_cost_no_model_call(rich_folder: Path) -> None:
    runtime = GatedRuntime(rich_folder)
    metrics = PrometheusMetrics()
    async with (
        running_server(runtime, cache_entries=10, metrics=metrics) as (_, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub: Any = PredictorStub(channel)  # type: ignore[no-untyped-call]
        first = await stub.Predict(pb.PredictRequest(request_id="1", prompt="sea"))
        second = await stub.Predict(pb.PredictRequest(request_id="2", prompt="sea", max_tokens=5))
        third = await stub.Predict(pb.PredictRequest(prompt="sea", served_model="huge-llm"))
    assert [response.cached for response in (first, second, third)] == [False, True, False]
    assert (second.request_id, second.mu, second.capped.max_tokens) == ("2", first.mu, 5)
    assert second.durations == pb.Durations()
    assert third.mu != first.mu
    assert len(runtime.batches) == 2
    text = metrics.exposition().decode()
    assert 'tailcast_cache_hits_total{artifact="tiny"} 1.0' in text
    assert 'tailcast_cache_misses_total{artifact="tiny"} 2.0' in text


async def test_failures_are_not_cached(rich_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    runtime = GatedRuntime(rich_folder, num_failures=1)
    async with (
        running_server(runtime, cache_entries=10) as (_, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub: Any = PredictorStub(channel)  # type: ignore[no-untyped-call]
        with (
            caplog.at_level(logging.CRITICAL, logger="predictors.service.pipeline"),
            pytest.raises(grpc.aio.AioRpcError),
        ):
            await stub.Predict(pb.PredictRequest(prompt="sea"))
        assert not (await stub.Predict(pb.PredictRequest(prompt="sea"))).cached


async def test_threads_work_at_the_same_time_and_hand_back_results_and_errors() -> None:
    threads = WorkerThreads(2, "test")
    barrier = threading.Barrier(2)
    names = await asyncio.gather(*(threads.call(_meet, barrier) for _ in range(2)))
    assert sorted(names) == ["test-0", "test-1"]
    with pytest.raises(ZeroDivisionError):
        await threads.call(lambda: 1 // 0)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await threads.call(next, iter(()))
    assert await threads.call(max, 1, 2) == 2
    threads.close()


async def test_threads_make_waiting_calls_in_order_and_even_after_the_end() -> None:
    threads = WorkerThreads(1, "test")
    gate, made = threading.Event(), list[int]()
    calls = [threads.call(gate.wait), *(threads.call(made.append, number) for number in range(20))]
    threads.close()
    assert not calls[0].done()
    gate.set()
    await asyncio.gather(*calls)
    assert made == list(range(20))


async def test_threads_call_back_in_the_event_loop() -> None:
    threads = WorkerThreads(2, "test")
    found: asyncio.Future[tuple[object, BaseException | None, str]] = (
        asyncio.get_running_loop().create_future()
    )

    def done(result: int | None, error: BaseException | None) -> None:
        found.set_result((result, error, threading.current_thread().name))

    threads.submit(done, max, 1, 2)
    assert await found == (2, None, threading.main_thread().name)
    threads.close()


def test_what_lives_at_the_start_is_not_looked_at_again() -> None:
    try:
        settle_memory()
        assert gc.get_freeze_count() > 1000
    finally:
        gc.unfreeze()


def _meet(barrier: threading.Barrier) -> str:
    barrier.wait(timeout=20)
    return threading.current_thread().name


async def test_metrics_tell_queue_batches_and_padding(artifact_folder: Path) -> None:
    runtime = GatedRuntime(artifact_folder, is_open=False)
    metrics = PrometheusMetrics()
    batching = BatchingSettings(max_batch=2, max_wait_s=60.0, max_queue=2)
    async with (
        running_server(runtime, batching=batching, metrics=metrics) as (server, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub: Any = PredictorStub(channel)  # type: ignore[no-untyped-call]
        calls = [
            asyncio.ensure_future(stub.Predict(pb.PredictRequest(prompt=prompt)))
            for prompt in ("sea", "name three rivers")
        ]
        await until(lambda: server.pipeline.num_inside == 2)
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


def test_log_lines_are_json_objects() -> None:
    record = logging.makeLogRecord({"name": "a", "levelname": "INFO", "msg": "two\n%s", "args": ("lines",)})
    record.artifact = "tiny"
    found = json.loads(JsonFormatter().format(record))
    assert (found["message"], found["artifact"], found["level"]) == ("two\nlines", "tiny", "INFO")
    try:
        raise ValueError("broken")
    except ValueError as error:
        record.exc_info = (type(error), error, error.__traceback__)
    line = JsonFormatter().format(record)
    assert len(line.splitlines()) == 1
    assert "ValueError: broken" in json.loads(line)["traceback"]


async def test_a_prediction_is_a_span_of_the_callers_trace(artifact_folder: Path) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with (
        running_server(open_runtime(artifact_folder), tracing=OpenTelemetryTracing()) as (_, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub: Any = PredictorStub(channel)  # type: ignore[no-untyped-call]
        await stub.Predict(pb.PredictRequest(prompt="sea"), metadata=(("traceparent", parent),))
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Predict(pb.PredictRequest(prompt=""))
    good, bad = exporter.get_finished_spans()
    assert f"{good.context.trace_id:032x}" == parent.split("-")[1]
    assert good.attributes["tailcast.artifact_id"] == "tiny"
    assert good.attributes["tailcast.batch_size"] == 1
    assert bad.attributes["rpc.status"] == "INVALID_ARGUMENT"
    assert not bad.status.is_ok


def test_what_another_protobuf_raises_is_the_callers_fault_too() -> None:
    """The implementation in pure Python raises UnicodeDecodeError where the compiled one raises DecodeError."""

    class PurePython:
        @staticmethod
        def FromString(data: bytes) -> str:  # the name in protobuf
            return data.decode()

    with pytest.raises(UnparsableError, match="PurePython"):
        parsed(PurePython, b"\xff")
    assert parsed(pb.PredictRequest, b"\n\x01r").request_id == "r"
