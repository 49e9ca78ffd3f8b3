"""Quantiles of the length from head to policy: trained, calibrated, exported, served, and ordered by."""

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from predictors.artifact import write_manifest
from predictors.client import GrpcPredictor
from predictors.manifest import content_version, parse_manifest
from predictors.modules.checkpoint import load_checkpoint, save_checkpoint
from predictors.modules.config import Calibration
from predictors.modules.heads import Heads, LengthHead
from predictors.proto import open_inference_pb2 as oip
from predictors.runtime import open_runtime
from predictors.service.in_process import InProcessPredictor
from scheduler_core.errors import InputError, TailcastError
from scheduler_core.lengths import LogQuantiles, LogT
from scheduler_core.lengths.quantiles import LEVELS
from scheduler_core.prediction.linear_correction import Coefficients, features_of
from scheduler_core.prediction.predictor import PredictionRequest
from scheduler_core.simulator.trace_predictions import fetch_predictions
from tests.export.conftest import export, write_checkpoint
from tests.predictors.fakes import read_manifest, running_server, server_and_stub
from tests.predictors.test_recipes_served import TRACE, Order, simulated
from tests.training.checkpoints import CONDITIONING, NORMALIZATION, TOWER, predictor
from tests.training.data import SERVED_MODELS, write_rows
from tests.training.tiny import tiny_bert
from training.commands.train import main as train
from training.correcting.corrected_graph import Adaptation, with_corrections
from training.evaluating.config import EvaluateConfig
from training.evaluating.run import evaluate
from training.network.tasks import LengthTask

K = len(LEVELS)
HEAD = LengthHead(TOWER, within=True, quantiles=True)
CALIBRATION = Calibration((1.0, 2.0, 0.5), (0.0, 0.25, -1.0))


def parameters(scores: torch.Tensor) -> dict[str, torch.Tensor]:
    return HEAD.parameters(scores, NORMALIZATION)


def test_quantiles_ascend_with_mu_as_their_median_and_sigma_of_the_closest_log_t() -> None:
    torch.manual_seed(0)
    scores = 20 * torch.randn(500, K + 1)
    outputs = parameters(scores)
    quantiles = outputs["quantiles"]
    assert quantiles.shape == (500, K)
    assert (quantiles.diff() > 0).all()
    assert torch.equal(quantiles[:, K // 2], outputs["mu"])
    assert (outputs["sigma"] > 0).all()
    half = HEAD.parameters(scores.half(), NORMALIZATION)["quantiles"].half()
    assert (half.diff() >= 0).all()
    untrained = parameters(torch.zeros(1, K + 1))
    sigma = float(np.expm1(NORMALIZATION.sigma_log_mean))
    exact = LogT(NORMALIZATION.mu_mean, sigma, HEAD.nu).logppf(LEVELS)
    np.testing.assert_allclose(untrained["quantiles"][0], exact, atol=2e-3)
    assert untrained["sigma"].item() == pytest.approx(sigma, rel=1e-2)


def test_every_score_has_a_gradient() -> None:
    scores = torch.randn(4, K + 1, dtype=torch.float64, requires_grad=True)
    outputs = parameters(scores)
    (outputs["quantiles"].square().sum() + outputs["sigma"].sum() + outputs["sigma_within"].sum()).backward()
    assert scores.grad is not None
    assert (scores.grad != 0).all()
    assert torch.isfinite(scores.grad).all()


def standardized(outputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return (outputs["quantiles"] - outputs["mu"][:, None]) / outputs["sigma"][:, None]


def test_calibration_and_the_mean_over_served_models_move_quantiles_with_mu_and_sigma(tmp_path: Path) -> None:
    options: dict[str, Any] = {"heads": Heads(length=HEAD)}
    model = predictor(tiny_bert(tmp_path), **options)
    mean = predictor(str(tmp_path), **options, conditioning=replace(CONDITIONING, unknown_is_mean=True))
    features, numbers = torch.rand(3, model.num_features), torch.tensor([0, 1, 2])
    with torch.no_grad():
        plain = model.predict(features, numbers)
        for each in (model, mean):
            each.set_calibration(CALIBRATION)
        moved, unknown = model.predict(features, numbers), mean.predict(features)
    torch.testing.assert_close(moved["sigma"], plain["sigma"] * torch.tensor(CALIBRATION.sigma_scale))
    torch.testing.assert_close(standardized(moved), standardized(plain), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(moved["mu"][1:], plain["mu"][1:])
    for outputs in (moved, unknown):
        torch.testing.assert_close(outputs["quantiles"][:, K // 2], outputs["mu"])
    fitted = torch.tensor(LogT(0.0, 1.0, HEAD.nu).logppf(LEVELS))
    assert (unknown["quantiles"].diff() > 0).all()
    assert standardized(unknown).double() @ fitted == pytest.approx(float(fitted @ fitted), rel=0.2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with rows.parquet, and checkpoint and artifact of a tiny training."""
    folder = tmp_path_factory.mktemp("quantiles")
    options = {"data": write_rows(folder / "rows.parquet"), "out": folder / "checkpoint"}
    options |= {"encoder": tiny_bert(folder / "encoder"), "max_length": 24, "batch_size": 8, "threads": 1}
    options |= {"length.quantiles": "true", "length.objective": "crps", "conditioning.width": 4}
    options |= {"tower.hidden_sizes": [16], "tower.dropouts": [0.0], "progress": "false"}
    options |= {"stage1.epochs": 8, "stage1.learning_rate": 3e-3, "accelerator": "cpu"}
    options |= {"stage2.epochs": 2, "stage2.learning_rate": 3e-3}
    assert train([str(word) for name, value in options.items() for word in (f"--{name}", value)]) == 0
    checkpoint = load_checkpoint(folder / "checkpoint")
    checkpoint.model.set_calibration(Calibration((1.0, 1.5, 1.0, 0.8), (0.0, 0.2, 0.0, -0.1)))
    parts = (checkpoint.model, checkpoint.tokenizer, checkpoint.training_info)
    save_checkpoint(folder / "calibrated", *parts)
    export(folder / "calibrated", folder / "artifact")
    return folder


async def test_clients_policies_and_statistics_get_the_quantiles_of_the_graph(trained: Path) -> None:
    runtime = open_runtime(trained / "artifact")
    assert runtime.artifact.manifest.quantile_levels == LEVELS
    requests = [PredictionRequest(row.request_id, row.prompt or "", 100, "small") for row in TRACE.requests]
    predicted = runtime.predict([each.prompt for each in requests], ["small"] * len(requests))
    assert predicted.quantiles is not None
    assert np.ptp(predicted.quantiles, axis=0).min() > 0.1
    async with running_server(runtime) as (_, address):
        async with GrpcPredictor(address) as client:
            responses = await client.responses(requests, truncated_length=True)
            assert tuple((await client.metadata()).quantile_levels) == LEVELS
        remote = await asyncio.to_thread(fetch_predictions, TRACE, f"grpc://{address}", served_model="small")
    async with InProcessPredictor(trained / "artifact") as client:
        local = await client.predict(requests)
    means = {}
    for row, (request, response, each) in enumerate(zip(requests, responses, local, strict=True)):
        prediction = remote.by_id[request.request_id]
        assert prediction is not None and prediction.length is not None and each.length is not None  # noqa: PT018
        np.testing.assert_allclose(prediction.length.quantiles, predicted.quantiles[row], atol=1e-5)
        np.testing.assert_allclose(each.length.quantiles, predicted.quantiles[row], atol=1e-5)
        exact = LogQuantiles(response.quantiles)
        numbers = response.truncated_length
        means[request.request_id] = numbers.expected_tokens
        means_of_exact = exact.expected_and_cvar(0.9, 100)
        assert (numbers.expected_tokens, numbers.cvar_tokens) == pytest.approx(means_of_exact)
        expected = [min(float(exact.ppf(level)), 100.0) for level in (0.5, 0.9, 0.99)]
        assert [quantile.tokens for quantile in numbers.quantiles] == pytest.approx(expected)
        assert (response.median_tokens, response.p90_tokens) == pytest.approx(expected[:2])
        log_t = LogT(response.mu, response.sigma, response.nu)
        assert numbers.expected_tokens == pytest.approx(float(log_t.expected(100)), rel=0.2)
    assert simulated(Order("length", "sept"), remote) == sorted(means, key=means.__getitem__)
    assert simulated(Order("length", "tie"), remote) != [each.request_id for each in requests]


async def test_the_open_inference_protocol_has_the_tensor(trained: Path) -> None:
    runtime = open_runtime(trained / "artifact")
    name = runtime.artifact.manifest.artifact_id
    request = oip.ModelInferRequest(model_name=name, outputs=[{"name": "quantiles"}])
    contents = oip.InferTensorContents(bytes_contents=[b"write a long story", b"name 3"])
    request.inputs.add(name="prompt", datatype="BYTES", shape=[2], contents=contents)
    async with server_and_stub(runtime) as (_, stub):
        [tensor] = (await stub.ModelInfer(request)).outputs
    assert list(tensor.shape) == [2, K]
    assert (np.diff(np.reshape(tensor.contents.fp32_contents, (2, K))) > 0).all()


def test_crps_and_coverage_are_those_of_the_quantiles(trained: Path) -> None:
    options: dict[str, Any] = {"data": str(trained / "rows.parquet"), "ceiling": False, "progress": False}
    found = [
        evaluate(EvaluateConfig(predictor=str(trained / name), **options))["model"]
        for name in ("calibrated", "artifact", "checkpoint")
    ]
    for name in ("crps_log_tokens", "nll"):
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-4)
        assert found[0][name] != pytest.approx(found[2][name], rel=1e-3), "calibration moves the quantiles"


def test_adapted_predictions_have_their_quantiles_moved_along(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "artifact", tmp_path / "a")
    before = open_runtime(tmp_path / "a")
    model = onnx.load(tmp_path / "a/model.onnx")
    coefficients = Coefficients((0.4, 0.1, 0.0, 0.0), (-0.7, 0.0, 0.2, 0.1))
    adaptation = {"small": Adaptation("small", coefficients)}
    manifest = with_corrections(model, before.artifact.manifest, adaptation, None)
    onnx.save(model, tmp_path / "a/model.onnx")
    write_manifest(tmp_path / "a", manifest)
    after = open_runtime(tmp_path / "a")
    texts = [row.prompt or "" for row in TRACE.requests]
    plain, corrected = (side.predict(texts, ["small"] * len(texts)) for side in (before, after))
    standard = [
        (each.quantiles - each.mu[:, None]) / each.sigma[:, None]  # type: ignore[index,operator]
        for each in (plain, corrected)
    ]
    np.testing.assert_allclose(*standard, rtol=1e-4, atol=1e-4)
    assert plain.mu is not None and corrected.mu is not None  # noqa: PT018
    slope = np.clip(plain.mu - 6, -4, 4)
    assert corrected.mu - plain.mu == pytest.approx(0.4 + 0.1 * slope, abs=1e-4)
    num_tokens = [each.num_tokens for each in before.tokenizer(texts)]
    for number, (old, new) in enumerate(zip(plain.rows(), corrected.rows(), strict=True)):
        prediction = before.prediction(old).length
        assert prediction is not None
        expected = coefficients.corrected(prediction, features_of(prediction, num_tokens[number]))
        np.testing.assert_allclose(expected.quantiles, new["quantiles"], atol=1e-3)
    one, other = (side.predict(texts, ["large"] * len(texts)).quantiles for side in (before, after))
    assert np.array_equal(one, other)  # type: ignore[arg-type]


@pytest.mark.parametrize("legacy_exporter", [True, False])
def test_quantiles_of_the_mean_over_models_are_in_the_graph(tmp_path: Path, *, legacy_exporter: bool) -> None:
    conditioning = replace(CONDITIONING, unknown_is_mean=True)
    checkpoint = write_checkpoint(tmp_path, "bert", heads=Heads(length=HEAD), conditioning=conditioning)
    options = {"legacy_exporter": legacy_exporter, "parity_tokens": 256, "parity_shapes": 0}
    parity = export(checkpoint, tmp_path / "a", **options).parity  # compared with torch
    assert parity["by_output"].keys() == {"mu", "sigma", "sigma_within", "quantiles"}


def test_a_manifest_with_other_levels_and_numbers_that_are_no_quantiles_are_refused(trained: Path) -> None:
    content = read_manifest(trained / "artifact")
    for changes in ({"quantile_levels": [0.1, 0.9]}, {"nu": None}):
        changed = content | changes
        with pytest.raises(InputError, match="artifact manifest, (quantile_levels|outputs)"):
            parse_manifest(changed | {"artifact_version": content_version(changed)})
    with pytest.raises(TailcastError, match="predicted quantiles: got"):
        open_runtime(trained / "artifact").prediction(
            {"mu": 5.0, "sigma": 0.5, "nu": 3.5, "quantiles": [5.0] * (K - 1) + [4.0]}
        )


def test_a_new_served_model_is_added_to_a_checkpoint_with_quantiles(trained: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.parquet", models=(*SERVED_MODELS, "newcomer"))
    options = ["--init", str(trained / "checkpoint"), "--data", str(data), "--progress", "false"]
    options += ["--threads", "1", "--accelerator", "cpu"]
    options += ["--stage2.epochs", "15", "--stage2.learning_rate", "0.1"]
    assert train([*options, "--out", str(tmp_path / "no"), "--conditioning.width", "4"]) == 2
    assert train([*options, "--out", str(tmp_path / "out"), "--only_conditioning", "true"]) == 0
    head = load_checkpoint(tmp_path / "out").config.heads.length
    assert head is not None
    assert head.quantiles


def test_options_that_do_not_fit_are_named() -> None:
    with pytest.raises(InputError, match="length.objective: got 'nll'; allowed: crps, with quantiles"):
        LengthTask(quantiles=True)
    with pytest.raises(InputError, match="learn_nu: got True"):
        LengthHead(quantiles=True, learn_nu=True)
