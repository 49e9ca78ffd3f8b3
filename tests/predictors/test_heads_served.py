"""What the service answers for artifacts with other heads, with conditions, or without tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from predictors.artifact import Conditions
from predictors.client import PredictorError, SyncPredictor, connect
from predictors.proto import predictor_v1_pb2 as pb
from predictors.proto.predictor_v1_pb2_grpc import PredictorStub
from predictors.runtime import open_runtime
from predictors.service.batcher import BatchingSettings
from predictors.service.messages import urgency
from scheduler_core.errors import TailcastError
from scheduler_core.predictor import PredictionRequest
from scheduler_core.urgency import effective_level
from tests.predictors.fakes import (
    RICH,
    SERVED_MODELS,
    GatedRuntime,
    expected_rich,
    running_server,
    server_and_stub,
    write_rich_artifact,
)

PROMPTS = ["sea", "name three rivers", "a a a", "write a long essay"]


@pytest.fixture
async def stub(rich_folder: Path) -> AsyncIterator[Any]:
    async with (
        running_server(open_runtime(rich_folder)) as (_, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        yield PredictorStub(channel)


async def refusal(call: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    return caught.value.details() or ""


@pytest.mark.parametrize(
    ("served_model", "temperature", "number"),
    [("tiny-llm", 0.5, 1), ("huge-llm", None, 2), ("never heard of", 1.0, 0), ("", 0.0, 0)],
)
async def test_every_head_is_in_the_response(
    stub: Any, served_model: str, temperature: float | None, number: int
) -> None:
    request = pb.PredictRequest(
        prompt="name three rivers", served_model=served_model, temperature=temperature
    )
    response = await stub.Predict(request)
    wanted = expected_rich("name three rivers", number, temperature or 0.0)
    for name in ("mu", "sigma", "nu", "regression_tokens", "rank"):
        assert getattr(response, name) == pytest.approx(wanted[name], rel=1e-5), name
    np.testing.assert_allclose(response.urgency.probabilities, wanted["urgency"], rtol=1e-5)
    np.testing.assert_allclose(response.bucket_probabilities, wanted["bucket"], rtol=1e-5)
    assert response.HasField("served_model_known")
    assert response.served_model_known == (number > 0)


async def test_capped_length_uses_the_prompts_own_nu(stub: Any) -> None:
    request = pb.PredictRequest(prompt="sea", served_model="huge-llm", max_tokens=4000, quantile_levels=[0.9])
    response = await stub.Predict(request)
    assert response.nu == 4.0
    # The 0.9 quantile of Student-t with 4 degrees of freedom is 1.5332.
    wanted = np.exp(response.mu + 1.5332062741 * response.sigma)
    assert response.truncated_length.quantiles[0].tokens == pytest.approx(wanted, rel=1e-6)


def test_abstaining_is_a_highest_probability_below_the_threshold() -> None:
    found = urgency([0.25, 0.5, 0.25], 0.6)
    assert (found.level, found.abstain) == (1, True)
    assert list(found.probabilities) == [0.25, 0.5, 0.25]
    assert not urgency([0.25, 0.5, 0.25], 0.5).abstain
    assert not urgency([0.25, 0.5, 0.25], None).abstain
    assert not urgency([0.0, 1.0, 0.0], 0.999).abstain
    assert urgency([0.0, 1.0, 0.0], 1.0).abstain
    assert urgency([0.4, 0.4, 0.2], 0.3).level == 0


def test_effective_level_is_the_schedulers_and_null_means_always_to_answer() -> None:
    rows = [0.7, 0.2, 0.1]
    # At most one level more urgent than declared, never less urgent.
    assert urgency(rows, None, 2).effective_level == 1
    assert urgency(rows, None, 1).effective_level == 0
    assert urgency([0.1, 0.1, 0.8], None, 0).effective_level == 0
    # Abstaining leaves the declared tier.
    assert urgency(rows, 0.8, 2).effective_level == 2
    assert urgency(rows, 0.7, 2).effective_level == 1
    assert urgency([1.0, 0.0, 0.0], 1.0, 2).effective_level == 2
    assert not urgency(rows, None).HasField("effective_level")
    with pytest.raises(TailcastError, match="the model gave urgency"):
        urgency([0.7, 0.7, 0.1], None, 0)


async def test_declared_tier_gives_an_effective_level(stub: Any) -> None:
    response = await stub.Predict(pb.PredictRequest(prompt="sea", declared_tier=2))
    assert response.urgency.abstain == (max(response.urgency.probabilities) < 0.9)
    wanted = int(effective_level(list(response.urgency.probabilities), 2, RICH["abstain_threshold"]))
    assert response.urgency.effective_level == wanted
    assert response.bucket == int(np.argmax(response.bucket_probabilities))
    assert "declared_tier: got 3; allowed: 0 to 2" in await refusal(
        stub.Predict(pb.PredictRequest(prompt="sea", declared_tier=3))
    )


async def test_the_manifests_threshold_decides(stub: Any, tmp_path: Path) -> None:
    highest = float(expected_rich("sea")["urgency"].max())
    for number, (threshold, abstain) in enumerate(
        [(highest + 0.001, True), (highest - 0.001, False), (None, False)]
    ):
        folder = write_rich_artifact(tmp_path / str(number), abstain_threshold=threshold)
        async with (
            running_server(open_runtime(folder)) as (_, address),
            grpc.aio.insecure_channel(address) as channel,
        ):
            response = await PredictorStub(channel).Predict(pb.PredictRequest(prompt="sea"))
        assert response.urgency.abstain is abstain


async def test_metadata_tells_heads_and_conditions(stub: Any) -> None:
    metadata = await stub.GetMetadata(pb.GetMetadataRequest())
    assert tuple(metadata.heads) == RICH["heads"]
    assert tuple(metadata.served_models) == SERVED_MODELS
    assert metadata.conditioned_on_served_model
    assert metadata.conditioned_on_temperature
    assert metadata.accepts_unknown_models
    assert tuple(metadata.urgency_levels) == RICH["urgency_levels"]
    assert metadata.abstain_threshold == RICH["abstain_threshold"]
    assert tuple(metadata.bucket_edges) == RICH["bucket_edges"]
    assert not metadata.HasField("nu")


async def test_one_batch_holds_rows_of_different_served_models(rich_folder: Path) -> None:
    runtime = GatedRuntime(rich_folder)
    batching = BatchingSettings(max_batch=4, max_wait_s=60.0)
    names, temperatures = ["tiny-llm", "huge-llm", "", "other"], [0.5, None, 1.0, 0.0]
    async with server_and_stub(runtime, batching=batching) as (_, stub):
        responses = await asyncio.gather(
            *(
                stub.Predict(pb.PredictRequest(prompt=prompt, served_model=name, temperature=temperature))
                for prompt, name, temperature in zip(PROMPTS, names, temperatures, strict=True)
            )
        )
    assert runtime.batches == [4]
    for prompt, number, temperature, response in zip(
        PROMPTS, [1, 2, 0, 0], temperatures, responses, strict=True
    ):
        assert response.rank == pytest.approx(
            expected_rich(prompt, number, temperature or 0.0)["rank"], rel=1e-5
        )


async def test_artifact_that_knows_only_its_own_models_refuses_others(tmp_path: Path) -> None:
    folder = write_rich_artifact(
        tmp_path / "a", conditioning=Conditions(unknown_models=False, temperature=True)
    )
    async with server_and_stub(open_runtime(folder)) as (_, stub):
        for name in ("other", ""):
            message = await refusal(stub.Predict(pb.PredictRequest(prompt="sea", served_model=name)))
            assert message == f"served_model: got {name!r}; allowed: one of tiny-llm, huge-llm"
        requests = [pb.PredictRequest(prompt="sea", served_model=name) for name in ("other", "tiny-llm")]
        batch = await stub.PredictBatch(pb.PredictBatchRequest(requests=requests))
    assert batch.outcomes[0].error.field == "requests[0].served_model"
    assert batch.outcomes[1].prediction.served_model_known


async def test_client_passes_conditions_and_gives_whole_responses(rich_folder: Path) -> None:
    requests = [
        PredictionRequest("a", "sea", 100, "huge-llm", 0.5),
        PredictionRequest("b", "name three rivers", 100, temperature=1.5),
    ]
    wanted = [expected_rich("sea", 2, 0.5), expected_rich("name three rivers", 0, 1.5)]

    def blocking(address: str) -> list[Any]:
        with SyncPredictor(address) as predictor:
            return predictor.responses(requests)

    async with running_server(open_runtime(rich_folder)) as (_, address), connect(address) as predictor:
        predictions = await predictor.predict(requests)
        responses = await predictor.responses(requests)
        others = await asyncio.to_thread(blocking, address)
    for prediction, response, other, numbers in zip(predictions, responses, others, wanted, strict=True):
        assert (prediction.mu, prediction.nu) == pytest.approx((numbers["mu"], numbers["nu"]), rel=1e-5)
        for found in (response, other):
            np.testing.assert_allclose(found.urgency.probabilities, numbers["urgency"], rtol=1e-5)


async def test_artifact_without_a_length_gives_none(tmp_path: Path) -> None:
    folder = write_rich_artifact(tmp_path / "a", heads=("urgency", "rank"))
    async with running_server(open_runtime(folder)) as (_, address), connect(address) as predictor:
        [response] = await predictor.responses([PredictionRequest("r", "sea", 100)])
        with pytest.raises(PredictorError, match="'tiny' predicts no length distribution") as caught:
            await predictor.predict([PredictionRequest("r", "sea", 100)])
    assert caught.value.code == "FAILED_PRECONDITION"
    assert not any(
        response.HasField(name) for name in ("mu", "sigma", "nu", "truncated_length", "regression_tokens")
    )
    assert response.HasField("rank")
    assert len(response.urgency.probabilities) == 3
    assert not response.bucket_probabilities


async def test_numbers_of_other_heads_are_checked_too(tmp_path: Path) -> None:
    folder = write_rich_artifact(tmp_path / "a", heads=("rank",))
    async with running_server(open_runtime(folder)) as (_, address), connect(address) as predictor:
        with pytest.raises(PredictorError, match="the model gave rank = nan") as caught:
            await predictor.predict([PredictionRequest("r", "nan", 100)])
    assert caught.value.code == "INTERNAL"
