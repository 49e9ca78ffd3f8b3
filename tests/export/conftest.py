from __future__ import annotations

from pathlib import Path

import pytest
import torch

from predictors.modules import (
    LengthPredictor,
    Normalization,
    PredictorConfig,
    load_encoder,
    load_tokenizer,
    save_checkpoint,
)
from tests.training.tiny import tiny_bert, tiny_deberta

TRAINING_INFO = {"data": {"name": "fits.parquet", "sha256": "ab" * 32}, "metrics": {"mu_r2": 0.25}}


def write_checkpoint(folder: Path, kind: str, **options: object) -> Path:
    """A checkpoint of a tiny random predictor, 48 tokens long; returns its folder."""
    (folder / "encoder").mkdir(parents=True)
    encoder = (tiny_bert if kind == "bert" else tiny_deberta)(folder / "encoder")
    config = PredictorConfig(
        encoder=encoder,
        **({"max_length": 48, "hidden_sizes": (16, 16, 8), "served_models": ("tiny-llm",)} | options),
    )
    model = LengthPredictor(
        config,
        load_encoder(encoder),
        Normalization(5.0, 1.2, 0.3, 0.1),
        generator=torch.Generator().manual_seed(1),
    )
    # Large enough weights in the last layer that prompts differ clearly.
    with torch.no_grad():
        for tower in (model.towers.mu, model.towers.sigma):
            tower[-1].weight.mul_(20)
    save_checkpoint(folder / kind, model.eval(), load_tokenizer(encoder), TRAINING_INFO)
    return folder / kind


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoint folders by kind of encoder; tests must not write into them."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {kind: write_checkpoint(root / kind, kind) for kind in ("bert", "deberta")}
