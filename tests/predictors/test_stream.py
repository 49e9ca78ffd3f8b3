"""PredictStream: any order, errors with ids, bounded memory, ends."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from predictors.proto import predictor_v1_pb2 as pb
from predictors.service.batcher import BatchingSettings
from predictors.service.grpc_methods import MAX_STREAM_REQUESTS
from tests.predictors.fakes import GatedRuntime, failure, server_and_stub, settle, until

ONE_WORKER = BatchingSettings(max_batch=1, max_wait_s=0.0, max_queue=50)
EOF: Any = grpc.aio.EOF


def request(number: int, prompt: str = "sea") -> pb.PredictRequest:
    return pb.PredictRequest(request_id=str(number), prompt=prompt)


@pytest.fixture
def runtime(artifact_folder: Path) -> GatedRuntime:
    return GatedRuntime(artifact_folder, is_open=False)


async def test_a_wrong_or_refused_request_is_an_outcome_and_the_stream_goes_on(runtime: GatedRuntime) -> None:
    batching = BatchingSettings(max_batch=1, max_wait_s=0.0, max_queue=1)
    async with server_and_stub(runtime, batching=batching) as (server, stub):
        stream = stub.PredictStream()
        await stream.write(request(0))
        await until(lambda: server.artifacts.num_in_flight == 1)
        await stream.write(request(1, ""))
        await stream.write(request(2))
        refused = [await stream.read(), await stream.read()]
        runtime.gate.set()
        assert (await stream.read()).prediction.request_id == "0"
        await stream.done_writing()
        assert await stream.read() is EOF
        assert await stream.code() == grpc.StatusCode.OK
    assert {outcome.error.request_id: outcome.error.code for outcome in refused} == {
        "1": grpc.StatusCode.INVALID_ARGUMENT.value[0],
        "2": grpc.StatusCode.RESOURCE_EXHAUSTED.value[0],
    }


async def test_answers_come_as_they_are_ready(runtime: GatedRuntime) -> None:
    async with server_and_stub(runtime, batching=ONE_WORKER, cache_entries=10) as (server, stub):
        runtime.gate.set()
        await stub.Predict(request(9, "known"))
        runtime.gate.clear()
        stream = stub.PredictStream()
        await stream.write(request(0, "slow"))
        await until(lambda: server.artifacts.num_in_flight == 1)
        await stream.write(request(1, "known"))
        first = (await stream.read()).prediction
        runtime.gate.set()
        second = (await stream.read()).prediction
        await stream.done_writing()
    assert (first.request_id, first.cached) == ("1", True)
    assert (second.request_id, second.cached) == ("0", False)


async def test_no_more_is_read_than_may_be_under_way(runtime: GatedRuntime) -> None:
    async with server_and_stub(runtime, batching=BatchingSettings.cpu(1)) as (server, stub):
        stream = stub.PredictStream()
        for number in range(MAX_STREAM_REQUESTS + 12):
            await stream.write(request(number))
        await until(lambda: server.artifacts.num_in_flight == MAX_STREAM_REQUESTS)
        await settle()
        assert server.artifacts.num_in_flight == MAX_STREAM_REQUESTS
        runtime.gate.set()
        await stream.done_writing()
        ids = {outcome.prediction.request_id async for outcome in stream}
    assert ids == {str(number) for number in range(MAX_STREAM_REQUESTS + 12)}


async def test_client_that_hangs_up_leaves_nothing_behind(runtime: GatedRuntime) -> None:
    async with server_and_stub(runtime, batching=ONE_WORKER) as (server, stub):
        stream = stub.PredictStream()
        for number in range(5):
            await stream.write(request(number))
        await until(lambda: server.artifacts.num_in_flight == 5)
        stream.cancel()
        await until(lambda: server.artifacts.num_in_flight == 0)
        runtime.gate.set()
        assert (await stub.Predict(request(0))).mu > 0
    assert len(runtime.batches) == 2  # the one that ran, and the last


async def test_draining_answers_what_was_read_and_ends_the_stream(runtime: GatedRuntime) -> None:
    async with server_and_stub(runtime, batching=ONE_WORKER) as (server, stub):
        stream = stub.PredictStream()
        for number in range(3):
            await stream.write(request(number))
        await until(lambda: server.artifacts.num_in_flight == 3)
        stopping = asyncio.create_task(server.stop())
        await until(lambda: server.artifacts.default.state == "shutting down")
        runtime.gate.set()
        assert {(await stream.read()).prediction.request_id for _ in range(3)} == {"0", "1", "2"}
        assert (await failure(stream.read())).code() == grpc.StatusCode.UNAVAILABLE
        await stopping
