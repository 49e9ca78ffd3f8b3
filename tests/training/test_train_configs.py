"""Every shipped recipe: the values of its paper, and training of a tiny model of its architecture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

import training
from predictors.modules import load_checkpoint
from tests.training.data import write_labels, write_rows
from tests.training.tiny import tiny_bert, tiny_deberta, tiny_distilbert, tiny_opt
from training.cli_train import main
from training.module import StageModule

FOLDER = Path(training.__file__).parent / "configs"
CONFIGS = sorted(FOLDER.glob("*.yaml"))
BUILDERS = {
    "deberta": tiny_deberta,
    "distilbert": tiny_distilbert,
    "bert": tiny_bert,
    "opt": tiny_opt,
    "minilm": tiny_bert,
}
HEADS = {
    "tie-deberta": ("length",),
    "ssjf-bert": ("regression",),
    "s3-distilbert-buckets": ("bucket",),
    "ltr-opt125m-listmle": ("rank",),
    "urgency-distilbert": ("urgency",),
    "urgency-minilm": ("urgency",),
    "semantic": ("urgency", "bucket"),
    "minilm-cpu": ("length",),
    "minilm-quickstart": ("length",),
    "multitask": ("length", "urgency", "bucket", "regression", "rank"),
}


def content_of(stem):
    return yaml.safe_load((FOLDER / f"{stem}.yaml").read_text())


def architecture(stem):
    return next(name for name in BUILDERS if name in content_of(stem)["encoder"].lower())


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    return {name: build(tmp_path_factory.mktemp(name)) for name, build in BUILDERS.items()}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return write_rows(folder / "rows.parquet", num_prompts=24), write_labels(
        folder / "labels.parquet", count=30
    )


def arguments(stem, files, out):
    """A recipe with its own data; the sizes are cut down so that a test takes seconds."""
    content = content_of(stem)
    heads = HEADS[stem]
    args = ["--config", str(FOLDER / f"{stem}.yaml"), "--out", str(out)]
    if heads != ("urgency",):
        args += ["--data", str(files[0])]
    if "urgency" in heads:
        args += ["--urgency_data", str(files[1])]
    for stage in ("stage1", "stage2"):
        args += [f"--{stage}.epochs", str(min(content[stage]["epochs"], 2))]
    size = content.get("tower", {}).get("hidden_sizes", [256, 256, 128])
    args += ["--tower.hidden_sizes", json.dumps([8] * len(size))]
    return [*args, "--max_length", "24", "--batch_size", "4", "--threads", "1", "--accelerator", "cpu"]


def test_all_recipes_are_here():
    assert {path.stem for path in CONFIGS} == set(HEADS)


def run(stem, encoders, files, out):
    return main(
        [*arguments(stem, files, out), "--encoder", encoders[architecture(stem)], "--progress", "false"]
    )


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_trains(path, encoders, files, tmp_path):
    assert run(path.stem, encoders, files, tmp_path / "out") == 0
    checkpoint = load_checkpoint(tmp_path / "out")
    assert checkpoint.config.heads.names == HEADS[path.stem]
    options = checkpoint.training_info["config"]
    overridden = {"encoder", "max_length", "batch_size", "tower", "stage1", "stage2"}
    for name, value in content_of(path.stem).items():
        if name not in overridden and not isinstance(value, dict):
            assert options[name] == value, name


@pytest.mark.parametrize("stem", ["tie-deberta", "multitask"])
def test_an_interrupted_command_resumes_bit_exactly(stem, encoders, files, tmp_path, monkeypatch):
    assert run(stem, encoders, files, tmp_path / "complete") == 0
    original = StageModule.training_step

    def training_step(self, batch, batch_idx):
        if self.current_epoch == 1 and batch_idx == 1:
            raise KeyboardInterrupt
        return original(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(StageModule, "training_step", training_step)
        assert run(stem, encoders, files, tmp_path / "resumed") == 130
    assert not (tmp_path / "resumed").exists()
    assert run(stem, encoders, files, tmp_path / "resumed") == 0
    complete, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("complete", "resumed"))
    assert complete.keys() == resumed.keys()
    assert all(torch.equal(complete[name], resumed[name]) for name in complete)
    one, other = (load_checkpoint(tmp_path / name) for name in ("complete", "resumed"))
    assert one.training_info["metrics"] == other.training_info["metrics"]


def test_the_tie_recipe_is_the_papers():
    config = content_of("tie-deberta")
    assert config["encoder"] == "microsoft/deberta-v3-base"
    assert config["pooling"] == ["cls", "mean", "max"]
    assert config["length"] == {
        "objective": "mse",
        "nu": 3.5,
        "sigma_weight_start": 3.0,
        "sigma_weight_end": 4.0,
    }
    assert config["stage1"] == {"epochs": 12, "learning_rate": 2e-5, "warmup_fraction": 0.1}
    assert config["stage2"] == {"epochs": 8, "learning_rate": 5e-5, "warmup_fraction": 0.0}
    assert config["tower"]["hidden_sizes"] == [256, 256, 128]
    assert config["tower"]["dropouts"] == [0.2, 0.2, 0.1]
    assert config["oversampling"] == [[5.5, 1.0, 1.5], [6.0, 1.3, 2.0]]
    assert (config["batch_size"], config["max_length"], config["clip_norm"]) == (32, 512, 1.0)
    assert (config["weight_decay"], config["adam_epsilon"]) == (0.01, 1e-8)
    assert config["fractions"] == [0.6, 0.2, 0.2]


def test_the_baselines_recipes_are_their_papers():
    ssjf = content_of("ssjf-bert")
    assert (ssjf["stage1"]["epochs"], ssjf["stage2"]["epochs"], ssjf["batch_size"]) == (3, 3, 16)
    assert (ssjf["truncation_side"], ssjf["max_length"], ssjf["pooling"]) == ("left", 512, ["cls"])
    assert ssjf["tower"]["hidden_sizes"] == [128, 128]
    assert ssjf["stage1"]["learning_rate"] == 1e-5
    ltr = content_of("ltr-opt125m-listmle")
    assert (ltr["stage1"]["epochs"], ltr["stage1"]["learning_rate"], ltr["batch_size"]) == (5, 2e-5, 32)
    assert (ltr["optimizer"], ltr["weight_decay"]) == ("adam", 0.01)
    assert ltr["rank"]["group_tokens"] == 10
    assert ltr["tower"]["hidden_sizes"] == []
    assert content_of("s3-distilbert-buckets")["bucket"]["num_buckets"] == 10
