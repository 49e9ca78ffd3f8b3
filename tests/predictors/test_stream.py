"""PredictStream: any order, errors with ids, bounded memory, ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from predictors.proto import predictor_v1_pb2 as pb
from predictors.proto.predictor_v1_pb2_grpc import PredictorStub
from predictors.runtime import open_runtime
from predictors.service.batcher import BatchingSettings
from predictors.service.server import SERVICE
from tests.predictors.fakes import GatedRuntime, expected, running_server, server_and_stub, until

ONE_WORKER = BatchingSettings(max_batch=1, max_wait_s=0.0, max_queue=50)
EOF: Any = grpc.aio.EOF


def request(number: int, prompt: str = "sea", **fields: Any) -> pb.PredictRequest:
    return pb.PredictRequest(request_id=str(number), prompt=prompt, **fields)


async def test_every_request_is_answered_with_its_id(artifact_folder: Path) -> None:
    prompts = ["sea" + " a" * (number % 9) for number in range(300)]

    async def ask() -> AsyncIterator[pb.PredictRequest]:
        for number, prompt in enumerate(prompts):
            yield request(number, prompt)

    async with server_and_stub(open_runtime(artifact_folder), max_stream_requests=16) as (_, stub):
        found = {outcome.prediction.request_id: outcome async for outcome in stub.PredictStream(ask())}
    assert len(found) == 300
    for number, prompt in enumerate(prompts):
        assert found[str(number)].prediction.mu == pytest.approx(expected(prompt)[0], rel=1e-5)


async def test_a_wrong_or_refused_request_is_an_outcome_and_the_stream_goes_on(artifact_folder: Path) -> None:
    runtime = GatedRuntime(artifact_folder, is_open=False)
    batching = BatchingSettings(max_batch=1, max_wait_s=0.0, max_queue=1)
    async with (
        running_server(runtime, batching=batching) as (server, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        stream = PredictorStub(channel).PredictStream()
        await stream.write(request(0))
        await until(lambda: server.pipeline.num_in_flight == 1)
        await stream.write(request(1, ""))
        await stream.write(request(2))
        refused = [await stream.read(), await stream.read()]
        runtime.gate.set()
        answered = await stream.read()
        await stream.done_writing()
        assert await stream.read() is EOF
        assert await stream.code() == grpc.StatusCode.OK
    codes = {outcome.error.request_id: outcome.error.code for outcome in refused}
    assert codes == {
        "1": grpc.StatusCode.INVALID_ARGUMENT.value[0],
        "2": grpc.StatusCode.RESOURCE_EXHAUSTED.value[0],
    }
    assert answered.prediction.request_id == "0"


async def test_answers_come_as_they_are_ready(artifact_folder: Path) -> None:
    runtime = GatedRuntime(artifact_folder, is_open=False)
    async with (
        running_server(runtime, batching=ONE_WORKER, cache_entries=10) as (server, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        runtime.gate.set()
        stub: Any = PredictorStub(channel)  # type: ignore[no-untyped-call]
        await stub.Predict(request(9, "known"))
        runtime.gate.clear()
        stream = stub.PredictStream()
        await stream.write(request(0, "slow"))
        await until(lambda: server.pipeline.num_in_flight == 1)
        await stream.write(request(1, "known"))
        first = await stream.read()
        runtime.gate.set()
        second = await stream.read()
        await stream.done_writing()
    assert (first.prediction.request_id, first.prediction.cached) == ("1", True)
    assert (second.prediction.request_id, second.prediction.cached) == ("0", False)


async def test_no_more_is_read_than_may_be_under_way(artifact_folder: Path) -> None:
    runtime = GatedRuntime(artifact_folder, is_open=False)
    async with (
        running_server(runtime, batching=ONE_WORKER, max_stream_requests=3) as (server, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        stream = PredictorStub(channel).PredictStream()
        for number in range(8):
            await stream.write(request(number))
        await until(lambda: server.pipeline.num_in_flight == 3)
        await asyncio.sleep(0.05)
        assert server.pipeline.num_in_flight == 3
        runtime.gate.set()
        await stream.done_writing()
        found = {outcome.prediction.request_id async for outcome in stream}
    assert found == {str(number) for number in range(8)}


async def test_bytes_that_are_no_request_end_the_stream_after_what_was_read(artifact_folder: Path) -> None:
    async with (
        running_server(open_runtime(artifact_folder)) as (_, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        stream = channel.stream_stream(f"/{SERVICE}/PredictStream")()
        await stream.write(request(0).SerializeToString())
        await stream.write(b"\xff\xff")
        first = pb.Outcome.FromString(await stream.read())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
    assert first.prediction.request_id == "0"
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_client_that_hangs_up_leaves_nothing_behind(artifact_folder: Path) -> None:
    runtime = GatedRuntime(artifact_folder, is_open=False)
    async with (
        running_server(runtime, batching=ONE_WORKER) as (server, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        stream = PredictorStub(channel).PredictStream()
        for number in range(5):
            await stream.write(request(number))
        await until(lambda: server.pipeline.num_in_flight == 5)
        stream.cancel()
        await until(lambda: server.pipeline.num_in_flight == 0)
        runtime.gate.set()
        assert (await PredictorStub(channel).Predict(request(0))).mu > 0
    assert len(runtime.batches) == 2  # the one that ran, and the last


async def test_too_many_streams_are_refused(artifact_folder: Path) -> None:
    async with server_and_stub(open_runtime(artifact_folder), max_streams=1) as (_, stub):
        first = stub.PredictStream()
        await first.write(request(0))
        await first.read()
        second = stub.PredictStream()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await second.read()
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        await first.done_writing()
        assert await first.read() is EOF
        third = stub.PredictStream()
        await third.write(request(1))
        assert (await third.read()).prediction.request_id == "1"
        await third.done_writing()


async def test_draining_answers_what_was_read_and_ends_the_stream(artifact_folder: Path) -> None:
    runtime = GatedRuntime(artifact_folder, is_open=False)
    async with (
        running_server(runtime, batching=ONE_WORKER) as (server, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        stream = PredictorStub(channel).PredictStream()
        for number in range(3):
            await stream.write(request(number))
        await until(lambda: server.pipeline.num_in_flight == 3)
        stopping = asyncio.create_task(server.stop())
        await until(lambda: server.pipeline.state == "shutting down")
        runtime.gate.set()
        found = {(await stream.read()).prediction.request_id for _ in range(3)}
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
        await stopping
    assert found == {"0", "1", "2"}
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
