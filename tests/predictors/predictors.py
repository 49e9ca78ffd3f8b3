"""Tiny predictors with all heads, and tiny random encoders of every supported architecture."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from predictors.modules.config import Conditioning, PredictorConfig
from predictors.modules.encoder import load_encoder
from predictors.modules.heads import BucketHead, Heads, LengthHead, RankHead, RegressionHead, UrgencyHead
from predictors.modules.normalization import Normalization
from predictors.modules.predictor import PromptPredictor
from predictors.modules.towers import Tower
from tests.training.tiny import tiny_bert, tiny_deberta

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
    model = PromptPredictor(
        PredictorConfig(encoder=name, **fields),
        module,
        NORMALIZATION,
        generator=torch.Generator().manual_seed(1),
    )
    # Large enough weights in the last layers that prompts and conditions differ clearly.
    with torch.no_grad():
        for name, weight in model.heads.named_parameters():
            if weight.ndim == 2 and weight.shape[0] < 8:
                assert name.endswith("weight")
                weight.mul_(20)
    return model.eval()


#: Model type -> its configuration beside the tokenizer's ids.
CONFIGS: dict[str, dict[str, Any]] = {
    "distilbert": {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 2},
    # One of three layers has global attention.
    "modernbert": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "local_attention": 8,
        "cls_token_id": 2,
        "sep_token_id": 3,
    },
    # A decoder whose word embeddings are narrower than its states.
    "opt": {
        "hidden_size": 32,
        "word_embed_proj_dim": 24,
        "ffn_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    },
}


def tiny(kind: str, folder: Path) -> str:
    """Writes an encoder of `CONFIGS` with the tokenizer of `tiny_bert`; returns the folder."""
    from transformers import CONFIG_MAPPING, AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_bert(folder))
    for name in ("config.json", "model.safetensors"):
        (folder / name).unlink()
    ids = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    if kind != "distilbert":
        ids |= {"bos_token_id": 2, "eos_token_id": 3}
    config = CONFIG_MAPPING[kind](max_position_embeddings=64, **ids, **CONFIGS[kind])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModel.from_config(config).save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    return str(folder)


ENCODERS: dict[str, Callable[[Path], str]] = {
    "bert": tiny_bert,
    "deberta": tiny_deberta,
    **{kind: partial(tiny, kind) for kind in CONFIGS},
}
