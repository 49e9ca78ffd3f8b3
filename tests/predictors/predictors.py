"""Tiny predictors with all heads."""

from typing import Any

import torch
from torch import nn

from predictors.modules.config import Conditioning, PredictorConfig
from predictors.modules.encoder import load_encoder
from predictors.modules.heads import BucketHead, Heads, LengthHead, RankHead, RegressionHead, UrgencyHead
from predictors.modules.normalization import Normalization
from predictors.modules.predictor import PromptPredictor
from predictors.modules.towers import Tower

NORMALIZATION = Normalization(5.0, 1.2, 0.3, 0.1, 1.0, 0.1, 4.5, 1.5)
TOWER = Tower((16, 16, 8), (0.2, 0.2, 0.1))
ALL_HEADS = Heads(
    length=LengthHead(TOWER, learn_nu=True, within=True),
    urgency=UrgencyHead(TOWER),
    bucket=BucketHead(TOWER, edges=(64, 512)),
    regression=RegressionHead(TOWER),
    rank=RankHead(TOWER),
)
CONDITIONING = Conditioning(("small-llm", "large-llm"), width=4)


def predictor(encoder: str | nn.Module, **options: Any) -> PromptPredictor:
    """All heads, conditioned on two served models and the temperature; 48 tokens; in eval mode."""
    name, module = (encoder, load_encoder(encoder)) if isinstance(encoder, str) else ("encoder", encoder)
    fields = {"heads": ALL_HEADS, "conditioning": CONDITIONING, "max_length": 48} | options
    generator = torch.Generator().manual_seed(1)
    model = PromptPredictor(
        PredictorConfig(encoder=name, **fields), module, NORMALIZATION, generator=generator
    )
    # Large enough weights in the last layers that prompts and conditions differ clearly.
    with torch.no_grad():
        for name, weight in model.heads.named_parameters():
            if weight.ndim == 2 and weight.shape[0] < 8:
                assert name.endswith("weight")
                weight.mul_(20)
    return model.eval()
