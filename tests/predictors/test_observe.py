"""Observed lengths: they correct the predictions of the service, over gRPC and HTTP, and what is refused."""

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import numpy as np
import pytest

from predictors.client import GrpcPredictor
from predictors.pretrained import TINY
from predictors.proto import predictor_v1_pb2 as pb
from predictors.proto.predictor_v1_pb2_grpc import PredictorStub
from predictors.runtime import open_runtime
from predictors.service.config import ServeConfig
from predictors.service.in_process import InProcessPredictor
from predictors.service.json_request import MAX_OBSERVATIONS
from predictors.service.learning import MAX_OPEN, Learner, PromptEmbedder
from predictors.service.messages import PipelineResult, remaining_length
from predictors.tiny import TinyPredictor
from predictors.wire import prediction_of
from scheduler_core.adapters.live_calibration import CalibrationGauges, LiveCalibration
from scheduler_core.errors import InputError
from scheduler_core.prediction.correction import RequestContext
from scheduler_core.prediction.predictions import LengthPrediction, Prediction
from scheduler_core.prediction.predictor import PredictionRequest
from tests.predictors import fakes
from tests.predictors.fakes import running_server, write_artifact
from tests.waiting import until

TOPICS = ("Translate to German: ", "Write a long story about ", "Answer yes or no: is it ")
LENGTHS = (30, 1500, 4)


def prompt(number: int) -> str:
    return f"{TOPICS[number % 3]}{['rain', 'a dragon', 'the sea', 'my cat'][number % 4]} {number}"


@pytest.fixture
async def server_and_stub() -> AsyncIterator[Any]:
    async with fakes.server_and_stub(open_runtime("tiny"), http_port=0) as pair:
        yield pair


async def learned(server: Any, count: int) -> None:
    """Waits until the service has learned from so many outputs."""
    calibration = server._calls.learner.calibration.calibration

    def has_learned() -> bool:
        names = calibration.served_models
        return sum(calibration.metrics(name)["num_outputs"] for name in names) >= count

    await until(has_learned)


async def observe_topics(server: Any, stub: Any, count: int = 150, **request: Any) -> None:
    """Predicts and observes requests of three applications, by their ids."""
    for start in range(0, count, 50):
        numbers = range(start, start + 50)
        batch = [pb.PredictRequest(request_id=f"r{n}", prompt=prompt(n), **request) for n in numbers]
        await stub.PredictBatch(pb.PredictBatchRequest(requests=batch))
        observations = [
            pb.Observation(request_id=f"r{n}", output_tokens=LENGTHS[n % 3] + n % 2, finished=True)
            for n in numbers
        ]
        response = await stub.Observe(pb.ObserveRequest(observations=observations))
        assert (response.num_accepted, list(response.errors)) == (50, [])
    await learned(server, count)


async def test_observed_lengths_correct_later_predictions(server_and_stub: Any) -> None:
    server, stub = server_and_stub
    before = await stub.Predict(pb.PredictRequest(prompt=prompt(1)))
    assert not before.corrected
    await observe_topics(server, stub)
    medians = [
        (await stub.Predict(pb.PredictRequest(prompt=prompt(300 + n)))).median_tokens for n in range(3)
    ]
    assert medians == pytest.approx(LENGTHS, rel=0.5)
    after = await stub.Predict(pb.PredictRequest(prompt=prompt(1)))
    assert after.corrected
    async with (
        aiohttp.ClientSession(base_url=f"http://127.0.0.1:{server.http_port}") as session,
        session.get("/metrics") as response,
    ):
        text = await response.text()
    assert "tailcast_calibration_outputs" in text


async def test_tenants_are_corrected_apart(server_and_stub: Any) -> None:
    server, stub = server_and_stub
    await observe_topics(server, stub, tenant="a")
    mine = await stub.Predict(pb.PredictRequest(prompt=prompt(301), tenant="a"))
    assert mine.median_tokens == pytest.approx(LENGTHS[1], rel=0.5)
    observations = [
        pb.Observation(
            request=pb.PredictRequest(prompt=prompt(1), tenant="b"), output_tokens=9000, finished=True
        )
        for _ in range(200)
    ]
    await stub.Observe(pb.ObserveRequest(observations=observations))
    await learned(server, 350)
    again = await stub.Predict(pb.PredictRequest(prompt=prompt(301), tenant="a"))
    assert (again.mu, again.sigma) == (mine.mu, mine.sigma)


async def test_without_observations_predictions_are_those_of_the_artifact(server_and_stub: Any) -> None:
    _, stub = server_and_stub
    for number in range(20):
        response = await stub.Predict(pb.PredictRequest(request_id=f"r{number}", prompt=prompt(number)))
        expected = TinyPredictor().length(prompt(number))
        assert (response.mu, response.sigma) == pytest.approx((expected.mu, expected.sigma), rel=1e-6)
        assert not response.embedding


async def test_an_observation_is_used_once_and_refusals_are_listed(server_and_stub: Any) -> None:
    _, stub = server_and_stub
    await stub.Predict(pb.PredictRequest(request_id="r", prompt="sea"))
    rows = [
        (pb.Observation(request_id="r", output_tokens=10, finish_reason="stop"), ""),
        (pb.Observation(request_id="r", output_tokens=10, finish_reason="stop"), "request_id"),
        (pb.Observation(request_id="unknown", output_tokens=10, finished=True), "request_id"),
        (pb.Observation(output_tokens=10, finished=True), "request_id"),
        (
            pb.Observation(request=pb.PredictRequest(prompt=" "), output_tokens=10, finished=True),
            "request.prompt",
        ),
        (
            pb.Observation(request=pb.PredictRequest(prompt="a"), output_tokens=0, finished=True),
            "output_tokens",
        ),
        (
            pb.Observation(request=pb.PredictRequest(prompt="a"), output_tokens=2**60, finished=True),
            "output_tokens",
        ),
        (pb.Observation(request=pb.PredictRequest(prompt="a"), output_tokens=5, max_tokens=0), "max_tokens"),
        (
            pb.Observation(request=pb.PredictRequest(prompt="a"), output_tokens=5),
            "finished, finish_reason, max_tokens",
        ),
        (
            pb.Observation(
                request=pb.PredictRequest(prompt="a"), output_tokens=5, finish_reason="error", finished=True
            ),
            "finish_reason",
        ),
        (
            pb.Observation(
                request=pb.PredictRequest(prompt="a", artifact_id="x"), output_tokens=5, finished=True
            ),
            "request.artifact_id",
        ),
        (
            pb.Observation(
                request=pb.PredictRequest(prompt="a", tenant="t" * 257), output_tokens=5, finished=True
            ),
            "request.tenant",
        ),
        (pb.Observation(request=pb.PredictRequest(prompt="a"), output_tokens=5, max_tokens=5), ""),
    ]
    observations = []
    for observation, _ in rows:
        observations.append(observation)
    # One at a time: observations of one call with the same id race.
    fields = []
    for observation in observations:
        response = await stub.Observe(pb.ObserveRequest(observations=[observation]))
        fields.append(response.errors[0].field if response.errors else "")
        assert response.num_accepted == (0 if response.errors else 1)
        assert all(error.message for error in response.errors)
    assert fields == [field for _, field in rows]
    response = await stub.Observe(pb.ObserveRequest(observations=observations[1:]))
    assert response.num_accepted == 1
    assert [error.index for error in response.errors] == list(range(11))
    for count in (0, MAX_OBSERVATIONS + 1):
        with pytest.raises(grpc.aio.AioRpcError, match="observations") as caught:
            await stub.Observe(pb.ObserveRequest(observations=observations[:1] * count))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_truncated_outputs_are_lower_bounds(server_and_stub: Any) -> None:
    server, stub = server_and_stub
    text = "Write a long story about the sea"
    observations = [
        pb.Observation(
            request=pb.PredictRequest(prompt=text),
            output_tokens=1000,
            finish_reason="length",
            max_tokens=1000,
        )
        for _ in range(100)
    ]
    await stub.Observe(pb.ObserveRequest(observations=observations))
    await learned(server, 100)
    assert (await stub.Predict(pb.PredictRequest(prompt=text))).median_tokens > 1000


async def test_observe_over_http(server_and_stub: Any) -> None:
    server, _ = server_and_stub
    async with aiohttp.ClientSession(base_url=f"http://127.0.0.1:{server.http_port}") as session:

        async def post(path: str, body: Any) -> tuple[int, Any]:
            async with session.post(path, json=body) as response:
                return response.status, await response.json()

        await post("/v1/predict", {"request_id": "h", "prompt": "sea"})
        row = {"request_id": "h", "output_tokens": 12, "finish_reason": "end_turn"}
        assert await post("/v1/observe", row) == (200, {"num_accepted": 1, "errors": []})
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Why is the sky blue?"},
        ]
        more = [
            {"messages": messages, "model": "m", "output_tokens": 40, "finished": True},
            {"request": {"prompt": "sea", "max_tokens": 9}, "output_tokens": 9, "max_tokens": 9},
            row,
        ]
        status, answer = await post("/v1/observe", {"observations": more})
        assert (status, answer["num_accepted"], answer["errors"][0]["index"]) == (200, 2, 2)
        for body, field in (
            ({"output_tokens": "many", "prompt": "sea"}, "output_tokens"),
            ({"output_tokens": 5, "finished": 1, "prompt": "sea"}, "finished"),
            ({"observations": [5]}, "observations[0]"),
            ({"observations": more, "prompt": "sea"}, "observations"),
            ({"output_tokens": 5, "prompt": "sea", "request": {"prompt": "sea"}}, "request"),
            ({"output_tokens": 5, "promt": "sea"}, "member"),
        ):
            status, answer = await post("/v1/observe", body)
            assert status == 400
            assert field in answer["message"]


async def test_a_service_that_does_not_learn_says_so() -> None:
    async with fakes.server_and_stub(open_runtime("tiny"), online_calibration=False) as (_, stub):
        assert not (await stub.GetMetadata(pb.GetMetadataRequest())).learns
        with pytest.raises(grpc.aio.AioRpcError, match="--online_calibration true") as caught:
            await stub.Observe(pb.ObserveRequest(observations=[pb.Observation(output_tokens=1)]))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not ServeConfig(workers=2).learns
    with pytest.raises(InputError, match="calibration_file"):
        ServeConfig(workers=2, calibration_file="state")


async def test_what_was_observed_outlasts_a_restart(tmp_path: Path) -> None:
    options = {"calibration_file": str(tmp_path / "state")}
    corrected = []
    for is_first in (True, False):
        async with fakes.server_and_stub(open_runtime("tiny"), **options) as (server, stub):
            if is_first:
                await observe_topics(server, stub)
            response = await stub.Predict(pb.PredictRequest(prompt=prompt(301)))
            assert response.corrected
            corrected.append(response.median_tokens)
    assert corrected[0] == pytest.approx(corrected[1], rel=0.1)


async def test_clients_get_the_embedding_of_a_prompt(server_and_stub: Any) -> None:
    server, _ = server_and_stub
    expected = TinyPredictor().embedding("Name three rivers.")
    requests = [
        PredictionRequest("a", "Name three rivers.", 100),
        PredictionRequest("b", "word " * 2000, 100),
    ]
    for predictor in (
        GrpcPredictor(f"127.0.0.1:{server.address.split(':')[1].split(',')[0]}"),
        InProcessPredictor("tiny"),
    ):
        one, long_prompt = await predictor.predict(requests)
        await predictor.close()
        assert one.embedding is not None
        assert long_prompt.embedding is not None
        np.testing.assert_allclose(one.embedding, expected, atol=1e-3)
        assert float(long_prompt.embedding @ long_prompt.embedding) == pytest.approx(1.0, abs=1e-2)
    for data in (b"123", b"\x00\x7e" * 64, bytes(8), bytes(2 * 5000)):
        with pytest.raises(InputError, match="embedding"):
            prediction_of(pb.PredictResponse(mu=1.0, sigma=1.0, nu=3.5, embedding=data))


async def test_a_failing_embedding_does_not_fail_the_prediction(
    server_and_stub: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, stub = server_and_stub
    monkeypatch.setattr("predictors.service.learning.TinyPredictor", lambda: 1 / 0)
    for _ in range(2):
        response = await stub.Predict(pb.PredictRequest(prompt="sea", embedding=True))
        assert response.HasField("mu")
        assert not response.embedding
    assert caplog.text.count("cannot be embedded") == 1
    assert await PromptEmbedder().embed(np.zeros(3)) is None


async def test_the_remaining_length_while_decoding(server_and_stub: Any) -> None:
    server, stub = server_and_stub
    first = await stub.Predict(
        pb.PredictRequest(request_id="r", prompt="Write a story.", max_tokens=2000, generated_tokens=0)
    )
    assert first.remaining.expected_tokens == pytest.approx(first.expected_tokens, rel=0.03)
    medians = []
    for generated in (10, 500, 1999, 2000, 5000):
        message = pb.PredictRequest(request_id="r", max_tokens=2000, generated_tokens=generated)
        response = await stub.Predict(message)
        assert (response.mu, response.cached) == (first.mu, True)
        assert 0 <= response.remaining.expected_tokens <= max(2000 - generated, 0)
        medians.append(response.remaining.quantiles[0].tokens)
    assert medians[2:] == [pytest.approx(0.5, abs=0.6), 0.0, 0.0]
    with pytest.raises(grpc.aio.AioRpcError, match="request_id"):
        await stub.Predict(pb.PredictRequest(request_id="unknown", generated_tokens=5))
    with pytest.raises(grpc.aio.AioRpcError, match="generated_tokens"):
        await stub.Predict(pb.PredictRequest(prompt="sea", generated_tokens=-1))
    async with (
        aiohttp.ClientSession(base_url=f"http://127.0.0.1:{server.http_port}") as session,
        session.post(
            "/v1/predict", json={"request_id": "r", "generated_tokens": 100, "max_tokens": 2000}
        ) as response,
    ):
        assert (await response.json())["remaining"]["expected_tokens"] > 0


def test_the_remaining_length_is_that_of_the_conditional_distribution() -> None:
    length = LengthPrediction(5.0, 0.6, 3.5)
    draws = np.exp(5.0 + 0.6 * np.random.default_rng(0).standard_t(3.5, 400_000))
    for generated in (0, 100, 400):
        left = np.minimum(draws[draws > generated], 2000) - generated
        found = remaining_length(length, generated, 2000, (0.5, 0.9))
        assert found.expected_tokens == pytest.approx(left.mean(), rel=0.03)
        quantiles = [each.tokens for each in found.quantiles]
        assert quantiles == pytest.approx(np.quantile(left, (0.5, 0.9)).tolist(), rel=0.03)
    far = remaining_length(LengthPrediction(1.0, 1e-3, 1e9), 1000, 2000, (0.5,))
    assert far.quantiles[0].tokens <= 1000


def test_open_predictions_are_bounded() -> None:
    from prometheus_client import CollectorRegistry

    learner = Learner(LiveCalibration(None, CalibrationGauges("tailcast_", CollectorRegistry())))
    result = PipelineResult(Prediction(length=LengthPrediction(5.0, 0.5, 3.5)), 1, False, 0.0, 0.0, 0.0, 1)
    for number in range(MAX_OPEN + 10):
        learner.add(str(number), result, RequestContext())
    learner.add("", result, RequestContext())
    assert learner.get("9") is None
    assert learner.get("10") is not None
    assert learner.get("") is None
    learner.close()


async def test_many_clients_observe_at_the_same_time(server_and_stub: Any) -> None:
    server, stub = server_and_stub

    async def client(name: str) -> int:
        accepted = 0
        for number in range(20):
            await stub.Predict(pb.PredictRequest(request_id=f"{name}{number}", prompt=prompt(number)))
            observation = pb.Observation(request_id=f"{name}{number}", output_tokens=50, finished=True)
            accepted += (await stub.Observe(pb.ObserveRequest(observations=[observation]))).num_accepted
        return accepted

    assert sum(await asyncio.gather(*(client(name) for name in "abcdefgh"))) == 160
    await learned(server, 160)
    response = await stub.Predict(pb.PredictRequest(prompt=prompt(3)))
    assert response.mu == pytest.approx(math.log(50), abs=0.5)


@pytest.mark.mend
async def test_a_tenant_cannot_observe_the_request_of_another(server_and_stub: Any) -> None:
    """It was learned for the tenant of the prediction, although the observation named its own; and ids had any length."""
    server, stub = server_and_stub
    await stub.Predict(pb.PredictRequest(prompt="sea", request_id="1", tenant="a"))
    other = pb.PredictRequest(tenant="b", prompt="sea")
    observations = [
        pb.Observation(request_id="1", request=other, output_tokens=30_000, finished=True),
        pb.Observation(request_id="x" * 2000, request=other, output_tokens=5, finished=True),
    ]
    response = await stub.Observe(pb.ObserveRequest(observations=observations))
    assert [(error.index, error.field) for error in response.errors] == [(0, "tenant"), (1, "request_id")]
    with pytest.raises(grpc.aio.AioRpcError, match="tenant"):
        await stub.Predict(pb.PredictRequest(request_id="1", tenant="b", generated_tokens=5))
    own = pb.Observation(request_id="1", output_tokens=30, finished=True)
    assert (await stub.Observe(pb.ObserveRequest(observations=[own]))).num_accepted == 1
    await learned(server, 1)


@pytest.mark.mend
async def test_the_remaining_length_of_a_request_to_a_second_artifact(tmp_path: Path) -> None:
    """It came with the name of the default artifact; with that of its own, its served model was refused."""
    second = open_runtime(write_artifact(tmp_path / "second"))
    name, [model, *_] = second.artifact.manifest.artifact_id, second.artifact.manifest.served_models
    server = running_server([open_runtime(TINY), second])
    async with server as (_, address), grpc.aio.insecure_channel(address) as channel:
        stub = PredictorStub(channel)
        request = pb.PredictRequest(prompt="sea", request_id="1", artifact_id=name, served_model=model)
        first = await stub.Predict(request)
        for artifact_id in ("", name):
            progress = pb.PredictRequest(request_id="1", generated_tokens=5, artifact_id=artifact_id)
            later = await stub.Predict(progress)
            assert (later.artifact_id, later.mu) == (name, first.mu)
            assert later.served_model_known == first.served_model_known


@pytest.mark.mend
async def test_a_prompt_that_cannot_be_embedded_does_not_end_the_memory() -> None:
    """One such prompt ended it for all requests, until the service was started again."""
    embedder = PromptEmbedder()
    assert await embedder.embed("sea") is not None
    assert await embedder.embed("\ud800") is None
    assert await embedder.embed("sea") is not None
