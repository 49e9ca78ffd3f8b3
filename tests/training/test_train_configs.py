"""Every shipped recipe: the values of its paper, and training of a tiny model of its architecture; low-rank adapters."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

import training
from predictors.heads import Tower
from predictors.modules.checkpoint import load_checkpoint
from predictors.modules.encoder import load_encoder
from scheduler_core.errors import InputError
from tests.training.data import write_labels, write_rows
from tests.training.tiny import ENCODERS, tiny_bert
from training.commands.train import main
from training.network.config import ConditioningOptions, LoraOptions, StageConfig, TrainConfig
from training.network.module import StageModule
from training.network.train import train

FOLDER = Path(training.__file__).parent / "configs"
CONFIGS = sorted(FOLDER.glob("*.yaml"))
KINDS = {"deberta": "deberta", "distilbert": "distilbert", "bert": "bert", "opt": "opt", "minilm": "bert"}
HEADS = {
    **dict.fromkeys(("tie-deberta", "minilm-cpu", "minilm-quickstart", "minilm-logs"), ("length",)),
    **dict.fromkeys(("urgency-distilbert", "urgency-minilm"), ("urgency",)),
    "ssjf-bert": ("regression",),
    "s3-distilbert-buckets": ("bucket",),
    "ltr-opt125m-listmle": ("rank",),
    "semantic": ("urgency", "bucket"),
    "multitask": ("length", "urgency", "bucket", "regression", "rank"),
}
RANK = 2


def content_of(stem):
    return yaml.safe_load((FOLDER / f"{stem}.yaml").read_text())


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    return {name: ENCODERS[kind](tmp_path_factory.mktemp(name)) for name, kind in KINDS.items()}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    labels = write_labels(folder / "labels.parquet", count=30)
    return write_rows(folder / "rows.parquet", num_prompts=24), labels


def architecture(stem):
    return next(name for name in KINDS if name in content_of(stem)["encoder"].lower())


def arguments(stem, files, out):
    """A recipe with its own data; the sizes are reduced so that a test takes seconds."""
    content, heads = content_of(stem), HEADS[stem]
    sizes = content.get("tower", {}).get("hidden_sizes", [256, 256, 128])
    options = {"config": FOLDER / f"{stem}.yaml", "out": out, "tower.hidden_sizes": [8] * len(sizes)}
    options |= {f"{stage}.epochs": min(content[stage]["epochs"], 2) for stage in ("stage1", "stage2")}
    options |= {"max_length": 24, "batch_size": 4, "threads": 1, "accelerator": "cpu"}
    if heads != ("urgency",):
        options["data"] = files[0]
    if "urgency" in heads:
        options["urgency_data"] = files[1]
    return [str(word) for name, value in options.items() for word in (f"--{name}", value)]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_trains(path, encoders, files, tmp_path):
    encoder = encoders[architecture(path.stem)]
    args = arguments(path.stem, files, tmp_path / "out")
    assert main([*args, "--encoder", encoder, "--progress", "false"]) == 0
    checkpoint = load_checkpoint(tmp_path / "out")
    assert checkpoint.config.heads.names == HEADS[path.stem]
    options = checkpoint.training_info["config"]
    overridden = {"encoder", "max_length", "batch_size", "tower", "stage1", "stage2"}
    for name, value in content_of(path.stem).items():
        if name not in overridden and not isinstance(value, dict):
            assert options[name] == value, name


TIE = {
    "encoder": "microsoft/deberta-v3-base", "max_length": 512, "truncation_side": "right",
    "pooling": ["cls", "mean", "max"], "batch_size": 32, "batching": "shuffled", "fractions": [0.6, 0.2, 0.2],
    "length": {"objective": "mse", "nu": 3.5, "sigma_weight_start": 3.0, "sigma_weight_end": 4.0},
    "stage1": {"epochs": 12, "learning_rate": 2e-5, "warmup_fraction": 0.1},
    "stage2": {"epochs": 8, "learning_rate": 5e-5, "warmup_fraction": 0.0},
    "tower": {"hidden_sizes": [256, 256, 128], "dropouts": [0.2, 0.2, 0.1], "activation": "gelu", "layer_norm": True},
    "oversampling": [[5.5, 1.0, 1.5], [6.0, 1.3, 2.0]],
    "weight_decay": 0.01, "adam_epsilon": 1e-8, "clip_norm": 1.0,
}  # fmt: skip


def test_the_recipes_are_their_papers():
    assert content_of("tie-deberta") == TIE
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


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    paths = {"data": str(write_rows(folder / "rows.parquet")), "out": str(folder / "checkpoint")}
    network = {"encoder": tiny_bert(folder / "bert"), "conditioning": ConditioningOptions(width=4)}
    network["tower"] = Tower(hidden_sizes=(8, 4), dropouts=(0.0, 0.0))
    network["lora"] = LoraOptions(rank=RANK, layers=1)
    stages = {"stage1": StageConfig(epochs=2, learning_rate=1e-2)}
    stages["stage2"] = StageConfig(epochs=1, learning_rate=1e-3)
    return TrainConfig(**paths, **network, **stages, max_length=24, batch_size=8, progress=False)


@pytest.fixture(scope="module")
def weights(config):
    train(config)
    return load_file(f"{config.out}/model.safetensors")


def test_merged_adapters_change_linear_layers_of_the_chosen_part_by_products_of_low_rank(config, weights):
    start = load_encoder(config.encoder).state_dict()
    changed = {}
    for name, value in start.items():
        if not torch.equal(weights[f"encoder.{name}"], value):
            changed[name] = weights[f"encoder.{name}"] - value
    last = max(int(name.split(".")[2]) for name in start if name.startswith("encoder.layer."))
    assert changed
    for name, change in changed.items():
        assert name.startswith(f"encoder.layer.{last}.")
        assert torch.linalg.matrix_rank(change, rtol=1e-3) <= RANK
    assert not any("lora" in name for name in weights)


def test_an_interrupted_run_with_adapters_resumes_to_the_same_weights(config, weights, tmp_path, monkeypatch):
    def interrupted(self, batch, batch_idx):
        if self.current_epoch == 1:
            raise KeyboardInterrupt
        start(self, batch, batch_idx)

    start = StageModule.on_train_batch_start
    config = replace(config, out=str(tmp_path / "checkpoint"))
    with monkeypatch.context() as patch:
        patch.setattr(StageModule, "on_train_batch_start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(config)
    train(config)
    for name, value in load_file(f"{config.out}/model.safetensors").items():
        torch.testing.assert_close(value, weights[name], msg=name)


def test_more_layers_than_the_encoder_has_are_refused(config, tmp_path):
    config = replace(config, out=str(tmp_path / "checkpoint"), lora=LoraOptions(layers=99))
    with pytest.raises(InputError, match="lora.layers"):
        train(config)
