"""What the service answers for artifacts with other heads and with conditions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from predictors.client import PredictorError, connect
from predictors.manifest import FORMAT_VERSION, Conditions
from predictors.proto import predictor_v1_pb2 as pb
from predictors.runtime import open_runtime
from predictors.service.batcher import BatchingSettings
from predictors.service.messages import urgency
from scheduler_core.predictor import PredictionRequest
from tests.predictors.fakes import (
    RICH,
    SERVED_MODELS,
    GatedRuntime,
    expected_rich,
    running_server,
    server_and_stub,
    status,
    write_rich_artifact,
)

PROMPTS = ["sea", "name three rivers", "a a a", "write a long essay"]


@pytest.fixture
async def stub(rich_folder: Path) -> AsyncIterator[Any]:
    async with server_and_stub(open_runtime(rich_folder)) as (_, stub):
        yield stub


async def test_one_batch_holds_rows_of_different_served_models_and_every_head(rich_folder: Path) -> None:
    runtime = GatedRuntime(rich_folder)
    batching = BatchingSettings(max_batch=4, max_wait_s=60.0)
    names, temperatures = ["tiny-llm", "huge-llm", "", "never heard of"], [0.5, None, 1.0, 0.0]
    requests = [
        pb.PredictRequest(prompt=prompt, served_model=name, temperature=temperature)
        for prompt, name, temperature in zip(PROMPTS, names, temperatures, strict=True)
    ]
    async with server_and_stub(runtime, batching=batching) as (_, stub):
        responses = await asyncio.gather(*(stub.Predict(request) for request in requests))
    assert runtime.batches == [4]
    numbers = [1, 2, 0, 0]
    for prompt, number, temperature, response in zip(PROMPTS, numbers, temperatures, responses, strict=True):
        row = expected_rich(prompt, number, temperature or 0.0)
        for name in ("mu", "sigma", "nu", "regression_tokens", "rank"):
            assert getattr(response, name) == pytest.approx(row[name], rel=1e-5), name
        np.testing.assert_allclose(response.urgency.probabilities, row["urgency"], rtol=1e-5)
        np.testing.assert_allclose(response.bucket_probabilities, row["bucket"], rtol=1e-5)
        assert response.bucket == int(np.argmax(row["bucket"]))
        assert tuple(response.bucket_edges) == RICH["bucket_edges"]
        assert response.served_model_known == (number > 0)
        assert response.urgency.abstain == (max(row["urgency"]) < RICH["abstain_threshold"])


@pytest.mark.parametrize(
    ("probabilities", "threshold", "declared", "level", "abstain", "effective"),
    [
        ([0.25, 0.5, 0.25], 0.6, None, 1, True, None),
        ([0.25, 0.5, 0.25], 0.5, None, 1, False, None),
        ([0.0, 1.0, 0.0], 1.0, None, 1, True, None),
        ([0.4, 0.4, 0.2], 0.3, None, 0, False, None),
        # At most one level more urgent than declared, never less urgent.
        ([0.7, 0.2, 0.1], None, 2, 0, False, 1),
        ([0.1, 0.1, 0.8], None, 0, 2, False, 0),
        # Abstaining leaves the declared tier.
        ([0.7, 0.2, 0.1], 0.8, 2, 0, True, 2),
        ([0.7, 0.2, 0.1], 0.7, 2, 0, False, 1),
        # In half precision a softmax has a sum of nearly 1.
        ([0.7003, 0.2, 0.1], None, 2, 0, False, 1),
    ],
)
def test_urgency_abstains_below_the_threshold_and_decides_the_effective_level(
    probabilities: list[float],
    threshold: float | None,
    declared: int | None,
    level: int,
    abstain: bool,
    effective: int | None,
) -> None:
    message = urgency(probabilities, threshold, declared)
    assert sum(message.probabilities) == pytest.approx(1.0, abs=1e-12)
    assert (message.level, message.abstain) == (level, abstain)
    assert (message.effective_level if message.HasField("effective_level") else None) == effective
    assert (message.abstain_threshold if message.HasField("abstain_threshold") else None) == threshold


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
    assert (metadata.artifact_id, metadata.format_version) == ("tiny", FORMAT_VERSION)
    assert (metadata.max_length_tokens, metadata.truncation_side) == (16, "right")
    assert (metadata.max_batch_requests, metadata.max_message_bytes) == (256, 4 * 2**20)


async def test_artifact_that_knows_only_its_own_models_refuses_others(tmp_path: Path) -> None:
    conditioning = Conditions(unknown_models=False, temperature=True)
    folder = write_rich_artifact(tmp_path / "a", conditioning=conditioning)
    async with server_and_stub(open_runtime(folder)) as (_, stub):
        for name in ("other", ""):
            _, message = await status(stub.Predict(pb.PredictRequest(prompt="sea", served_model=name)))
            assert message == f"served_model: got {name!r}; allowed: one of tiny-llm, huge-llm"
        requests = [pb.PredictRequest(prompt="sea", served_model=name) for name in ("other", "tiny-llm")]
        batch = await stub.PredictBatch(pb.PredictBatchRequest(requests=requests))
    assert batch.outcomes[0].error.field == "requests[0].served_model"
    assert batch.outcomes[1].prediction.served_model_known


async def test_an_artifact_without_a_length_predicts_what_it_has(tmp_path: Path) -> None:
    folder = write_rich_artifact(tmp_path / "a", heads=("urgency", "rank"))
    async with running_server(open_runtime(folder)) as (_, address), connect(address) as predictor:
        [response] = await predictor.responses([PredictionRequest("r", "sea", 100)], truncated_length=True)
        [prediction] = await predictor.predict([PredictionRequest("r", "sea", 100)])
        with pytest.raises(PredictorError, match="the model gave rank = nan") as caught:
            await predictor.predict([PredictionRequest("r", "nan", 100)])
    assert caught.value.code == "INTERNAL"
    absent = ["mu", "sigma", "nu", "truncated_length", "regression_tokens", "bucket"]
    absent += ["median_tokens", "p90_tokens", "expected_tokens"]
    assert not any(response.HasField(name) for name in absent)
    assert (prediction.length, prediction.bucket, prediction.point) == (None, None, None)
    assert prediction.rank.score == response.rank
    assert prediction.urgency.probabilities == tuple(response.urgency.probabilities)
