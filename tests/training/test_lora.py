"""`train` with low-rank adapters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from predictors.modules.encoder import load_encoder
from scheduler_core.errors import InputError
from tests.training.data import write_rows
from tests.training.tiny import tiny_bert
from training.config import ConditioningOptions, LoraOptions, StageConfig, TowerOptions, TrainConfig
from training.module import StageModule
from training.train import train

RANK = 2


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    paths = {"data": str(write_rows(folder / "rows.parquet")), "out": str(folder / "checkpoint")}
    network = {"encoder": tiny_bert(folder / "bert"), "conditioning": ConditioningOptions(width=4)}
    network["tower"] = TowerOptions(hidden_sizes=(8, 4), dropouts=(0.0, 0.0))
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
