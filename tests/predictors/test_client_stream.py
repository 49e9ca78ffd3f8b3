"""The client over one stream: against the service, and against servers that misbehave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from predictors.client import ClientSettings, GrpcPredictor, PredictorError
from predictors.proto import predictor_v1_pb2 as pb
from predictors.proto import predictor_v1_pb2_grpc
from predictors.runtime import open_runtime
from scheduler_core.predictor import PredictionRequest
from tests.predictors.fakes import GatedRuntime, expected, running_server, until
from tests.predictors.scripted import NOBODY, answer, serving

ONE_TRY: dict[str, Any] = {"max_attempts": 1}
SETTINGS = ClientSettings(transport="stream")


def requests(prompts: list[str]) -> list[PredictionRequest]:
    return [PredictionRequest(f"r{index}", prompt, 100) for index, prompt in enumerate(prompts)]


async def test_stream_gives_the_numbers_of_the_service_in_order(artifact_folder: Path) -> None:
    prompts = ["sea" + " a" * (index % 12) for index in range(200)]
    async with (
        running_server(open_runtime(artifact_folder)) as (_, address),
        GrpcPredictor(address, SETTINGS) as predictor,
    ):
        found = await predictor.predict(requests(prompts))
        [alone] = await predictor.responses(requests(["write a long essay"]))
        with pytest.raises(PredictorError, match=r"prompt: got ''") as caught:
            await predictor.predict(requests(["sea", ""]))
    assert [one.mu for one in found] == pytest.approx([expected(prompt)[0] for prompt in prompts], rel=1e-5)
    assert (alone.request_id, alone.mu) == ("r0", pytest.approx(expected("write a long essay")[0], rel=1e-5))
    assert (caught.value.code, caught.value.request_id) == ("INVALID_ARGUMENT", "r1")


async def test_a_request_over_a_stream_has_its_own_deadline(artifact_folder: Path) -> None:
    runtime = GatedRuntime(artifact_folder, is_open=False)
    async with running_server(runtime) as (_, address), GrpcPredictor(address, SETTINGS) as predictor:
        patient = asyncio.ensure_future(predictor.predict(requests(["sea"])))
        with pytest.raises(PredictorError, match="DEADLINE_EXCEEDED"):
            await predictor.predict(requests(["a"]), timeout_s=0.05)
        runtime.gate.set()
        [found] = await patient
    assert found.mu == pytest.approx(expected("sea")[0], rel=1e-6)


class Streaming(predictor_v1_pb2_grpc.PredictorServicer):
    """Ends the first streams after `num_answers` answers each, then goes on.

    Args:
        num_broken: Streams that end early.
        num_answers: Answers they give.
        code: How they end.
        silent: They do not end but answer no more.
    """

    def __init__(
        self, num_broken: int, num_answers: int, code: grpc.StatusCode | None, *, silent: bool = False
    ) -> None:
        self.num_broken = num_broken
        self.num_answers = num_answers
        self.code = code
        self.silent = silent
        self.num_streams = 0

    async def PredictStream(
        self, request_iterator: AsyncIterator[pb.PredictRequest], context: Any
    ) -> AsyncIterator[pb.Outcome]:
        self.num_streams += 1
        broken = self.num_streams <= self.num_broken
        held: list[pb.PredictRequest] = []
        num_answers = 0
        async for request in request_iterator:
            if broken and num_answers == self.num_answers:
                if self.silent:
                    await asyncio.Event().wait()
                if self.code is not None:
                    await context.abort(self.code, "not now")
                return
            # Answers come in another order than the requests.
            held.append(request)
            num_answers += 1
            yield pb.Outcome(prediction=answer(held.pop()))


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, None])
async def test_a_broken_stream_fails_what_was_in_flight_and_the_next_call_opens_another(
    code: grpc.StatusCode | None,
) -> None:
    servicer = Streaming(1, 3, code)
    async with serving(servicer) as address, GrpcPredictor(address, SETTINGS) as predictor:
        with pytest.raises(PredictorError, match="UNAVAILABLE") as caught:
            await predictor.predict(requests(["x" * (index + 1) for index in range(20)]))
        [prediction] = await predictor.predict(requests(["river"]))
    assert caught.value.code == "UNAVAILABLE"
    assert (prediction.mu, servicer.num_streams) == (5.0, 2)


async def test_a_refused_stream_is_an_error_with_its_code() -> None:
    settings = ClientSettings(transport="stream")
    refusing = Streaming(9, 0, grpc.StatusCode.UNAUTHENTICATED)
    async with serving(refusing) as address, GrpcPredictor(address, settings) as predictor:
        with pytest.raises(PredictorError, match="UNAUTHENTICATED: not now"):
            await predictor.predict(requests(["sea"]))


async def test_unreachable_server_is_named_over_a_stream_too() -> None:
    settings = ClientSettings(transport="stream", **ONE_TRY)
    async with GrpcPredictor(NOBODY, settings) as predictor:
        with pytest.raises(PredictorError, match="UNAVAILABLE"):
            await predictor.predict(requests(["sea"]))


async def test_close_ends_requests_on_their_way() -> None:
    servicer = Streaming(1, 0, None, silent=True)
    async with serving(servicer) as address:
        predictor = GrpcPredictor(address, SETTINGS)
        calls = [asyncio.ensure_future(predictor.predict(requests([prompt]))) for prompt in ("sea", "river")]
        await until(lambda: servicer.num_streams == 1)
        await predictor.close()
        for call in calls:
            with pytest.raises(PredictorError, match="the client was closed"):
                await call


async def test_cancelled_requests_do_not_disturb_the_others() -> None:
    async with serving(Streaming(0, 0, None)) as address, GrpcPredictor(address, SETTINGS) as predictor:
        calls = [asyncio.ensure_future(predictor.predict(requests(["x" * (i + 1)]))) for i in range(50)]
        await asyncio.sleep(0)
        for call in calls[::2]:
            call.cancel()
        found = await asyncio.gather(*calls, return_exceptions=True)
    for index, one in enumerate(found):
        if index % 2:
            assert isinstance(one, list)
            assert one[0].mu == index + 1
        else:
            assert isinstance(one, asyncio.CancelledError)
