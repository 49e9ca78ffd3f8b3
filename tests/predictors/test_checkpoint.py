"""The checkpoint folder: whole, self-contained, without pickle, of this version."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from predictors.modules.checkpoint import load_checkpoint, save_checkpoint
from predictors.modules.config import Calibration
from predictors.modules.encoder import load_tokenizer
from scheduler_core.errors import InputError
from tests.predictors.predictors import predictor
from tests.training.tiny import ENCODERS, tiny_bert

PROMPTS = ["write a long story of 12 rivers", "name 3", "the list of the short essay code a b c d e f g h"]


def batch(tokenizer: Any, **options: Any) -> dict[str, torch.Tensor]:
    encoded = tokenizer(PROMPTS, return_tensors="pt", **({"padding": True} | options))
    conditions = {
        "served_model": torch.tensor([1, 0, 2]),
        "temperature": torch.tensor([1.0, float("nan"), 0.3]),
    }
    return {name: encoded[name] for name in ("input_ids", "attention_mask")} | conditions


@pytest.mark.parametrize("kind", list(ENCODERS))
def test_checkpoint_loads_without_the_encoder_folder_and_predicts_the_same(kind, tmp_path):
    source = tmp_path / "source"
    ENCODERS[kind](source)
    model, tokenizer = predictor(str(source), prompt_length=True), load_tokenizer(str(source))
    model.set_calibration(Calibration((1.0, 1.5, 0.7), (0.0, 0.2, -0.1)))
    before = batch(tokenizer)
    batch(tokenizer, padding="max_length", max_length=5, truncation=True)  # stays in the tokenizer's state
    log = tmp_path / "log.csv"
    log.write_text("epoch\n")
    save_checkpoint(tmp_path / "out", model, tokenizer, {"seed": 3}, extra_files={"metrics.csv": log})
    shutil.rmtree(source)

    loaded = load_checkpoint(tmp_path / "out")
    after = batch(loaded.tokenizer)
    assert torch.equal(before["input_ids"], after["input_ids"])
    with torch.no_grad():
        expected, found = model(**before), loaded.model(**after)
    assert list(expected) == list(found)
    for name in expected:
        assert torch.equal(expected[name], found[name]), name
    assert loaded.config == model.config
    assert loaded.model.calibration == model.calibration
    assert loaded.training_info == {"seed": 3}
    assert not loaded.model.training
    assert (tmp_path / "out" / "metrics.csv").read_text() == "epoch\n"
    assert "_name_or_path" not in (tmp_path / "out" / "config.json").read_text()
    suffixes = sorted(path.suffix for path in (tmp_path / "out").iterdir())
    assert suffixes == [".csv", *[".json"] * 6, ".safetensors"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    encoder = tiny_bert(folder / "encoder")
    save_checkpoint(folder / "out", predictor(encoder), load_tokenizer(encoder), {})
    return folder / "out"


def edited(**values: Any) -> Any:
    """Changes config.json."""

    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return edit


def removed(name: str) -> Any:
    return lambda folder: (folder / name).unlink()


def replaced(name: str, content: str) -> Any:
    return lambda folder: (folder / name).write_text(content)


def widen(folder: Path) -> None:
    content = json.loads((folder / "config.json").read_text())
    content["predictor"]["heads"]["rank"]["tower"]["hidden_sizes"] = [16, 16, 9]
    (folder / "config.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (removed("model.safetensors"), "model.safetensors"),
        (replaced("model.safetensors", "12345678910"), "complete safetensors file"),
        (replaced("config.json", "{"), "checkpoint: got .*config.json'; allowed: a file with valid JSON"),
        (edited(format_version=4), "format_version: got 4; .*an older tailcast wrote it: train it again"),
        (edited(format_version="5"), "format_version: got '5'; allowed: 5$"),
        (edited(predictor={"nope": 1}), "predictor"),
        (edited(calibration={"sigma_scale": [0.0], "mu_shift": [0.0]}), "sigma_scale"),
        (edited(calibration={"sigma_scale": [1.0], "mu_shift": [0.0]}), "0 served models"),
        (edited(encoder_config={"model_type": "nope"}), "encoder_config"),
        (replaced("normalization.json", '{"mu_std": 1}'), "normalization.json: got .*; allowed: also"),
        (removed("tokenizer.json"), "tokenizer.json"),
        (shutil.rmtree, "existing checkpoint folder"),
        (widen, r"weights that fit config\.json"),
    ],
)
def test_broken_checkpoints_are_named(break_it, message, saved, tmp_path):
    shutil.copytree(saved, tmp_path / "out")
    break_it(tmp_path / "out")
    with pytest.raises(InputError, match=message):
        load_checkpoint(tmp_path / "out")
