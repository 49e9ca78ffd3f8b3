"""A full service refuses at once: before it parses, beside model calls of lower priority, and on several listeners."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from google.rpc import error_details_pb2, status_pb2

from predictors.proto import predictor_v1_pb2 as pb
from predictors.runtime import open_runtime
from predictors.service.batcher import BatchingSettings
from predictors.service.metrics import ServiceMetrics
from predictors.service.server import PredictionServer, ServerSettings
from scheduler_core.errors import InputError
from tests.predictors.fakes import GatedRuntime, expected, running_server, until, write_artifact

METHOD = "/tailcast.predictor.v1.Predictor/Predict"
GARBAGE = b"\xff\xff\xff"
ONE_BY_ONE = BatchingSettings(max_batch=1, max_wait_s=0.0, max_queue=2, num_workers=1)
EXHAUSTED, INVALID = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT


def message(prompt: str, artifact: str = "") -> bytes:
    return pb.PredictRequest(prompt=prompt, artifact_id=artifact).SerializeToString()


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


@contextlib.asynccontextmanager
async def full(runtime: GatedRuntime, others: Any = (), **settings: Any) -> AsyncIterator[tuple[Any, Any]]:
    """A server whose first artifact has no place left, and a way to send it bytes."""
    async with (
        running_server([runtime, *others], batching=ONE_BY_ONE, **settings) as (server, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        send = channel.unary_unary(METHOD)
        inside = [asyncio.ensure_future(send(message("sea"))) for _ in range(2)]
        await until(lambda: server.pipeline.num_in_flight == 2)
        yield server, send
        runtime.gate.set()
        await asyncio.gather(*inside)


async def test_what_is_refused_is_not_even_parsed(artifact_folder: Path) -> None:
    metrics = ServiceMetrics()
    runtime = GatedRuntime(artifact_folder, is_open=False)
    async with full(runtime, metrics=metrics) as (server, send):
        for data in (GARBAGE, message("sea"), message("sea", "unknown artifact")):
            error = await refusal(send(data))
            assert error.code() == EXHAUSTED
            assert "fewer than 2" in (error.details() or "")
            details = dict(error.trailing_metadata() or ())["grpc-status-details-bin"]
            status = status_pb2.Status.FromString(details)
            info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
            assert status.details[0].Unpack(info)
            assert status.details[1].Unpack(retry)
            assert (info.reason, retry.retry_delay.nanos) == ("QUEUE_FULL", 100_000_000)
        assert server.pipeline.num_in_flight == 2
        text = metrics.exposition().decode()
        assert 'code="RESOURCE_EXHAUSTED",method="Predict"} 3.0' in text
        runtime.gate.set()
        await until(lambda: server.pipeline.num_in_flight == 0)
        assert (await refusal(send(GARBAGE))).code() == INVALID


async def test_what_is_remembered_is_answered_by_a_full_service(artifact_folder: Path) -> None:
    runtime = GatedRuntime(artifact_folder)
    async with (
        running_server(runtime, batching=ONE_BY_ONE, cache_entries=8) as (server, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        send = channel.unary_unary(METHOD)
        await send(message("a long essay"))
        runtime.gate.clear()
        inside = [asyncio.ensure_future(send(message(text))) for text in ("sea", "name")]
        await until(lambda: server.pipeline.num_in_flight == 2)
        found = pb.PredictResponse.FromString(await send(message("a long essay")))
        assert found.cached
        assert found.mu == pytest.approx(expected("a long essay")[0], rel=1e-6)
        assert (await refusal(send(message("rivers")))).code() == EXHAUSTED
        runtime.gate.set()
        await asyncio.gather(*inside)


async def test_a_full_artifact_does_not_close_the_others(tmp_path: Path, artifact_folder: Path) -> None:
    other = open_runtime(write_artifact(tmp_path / "second", artifact_id="second"))
    runtime = GatedRuntime(artifact_folder, is_open=False)
    async with full(runtime, [other]) as (_, send):
        # The first artifact keeps the only thread busy, so the second takes what its queue holds, and no more.
        inside = [asyncio.ensure_future(send(message("sea", "second"))) for _ in range(2)]
        assert (await refusal(send(message("sea")))).code() == EXHAUSTED
        assert (await refusal(send(GARBAGE))).code() in (INVALID, EXHAUSTED)
        runtime.gate.set()
        answers = [pb.PredictResponse.FromString(data) for data in await asyncio.gather(*inside)]
    assert {answer.artifact_id for answer in answers} == {"second"}


@pytest.mark.parametrize("listeners", [1, 3])
async def test_listeners_share_a_port_and_end_together(artifact_folder: Path, listeners: int) -> None:
    async with running_server(open_runtime(artifact_folder), num_listeners=listeners) as (_, address):
        port = int(address.rpartition(":")[2])

        def num_listening() -> int:
            return sum(
                one.status == psutil.CONN_LISTEN and one.laddr.port == port
                for one in psutil.Process().net_connections("tcp")
            )

        assert num_listening() == listeners
        own = [("grpc.use_local_subchannel_pool", 1)]
        async with contextlib.AsyncExitStack() as stack:
            channels = [
                await stack.enter_async_context(grpc.aio.insecure_channel(address, options=own))
                for _ in range(12)
            ]
            answers = await asyncio.gather(
                *(channel.unary_unary(METHOD)(message("sea"), wait_for_ready=True) for channel in channels)
            )
        assert len({pb.PredictResponse.FromString(answer).mu for answer in answers}) == 1
        # Sharing among its own listeners lets no other server in.
        other = PredictionServer(
            open_runtime(artifact_folder), ONE_BY_ONE, ServerSettings(port=port, num_listeners=listeners)
        )
        with pytest.raises(InputError, match="in use"):
            await other.start()
        await other.stop()
    assert num_listening() == 0


@pytest.mark.parametrize(("field", "value"), [("num_listeners", 0)])
def test_bad_setting_is_named(field: str, value: int) -> None:
    with pytest.raises(InputError, match=field):
        ServerSettings(**{field: value})  # type: ignore[arg-type]
