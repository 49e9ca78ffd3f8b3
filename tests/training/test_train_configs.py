"""Every shipped recipe: the values of its paper, and training of a tiny model of its architecture."""

from pathlib import Path

import pytest
import yaml

import training
from predictors.modules.checkpoint import load_checkpoint
from tests.training.data import write_labels, write_rows
from tests.training.tiny import ENCODERS
from training.cli_train import main

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
