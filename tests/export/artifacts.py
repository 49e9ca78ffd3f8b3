"""A small artifact for what packages artifacts, whose graph needs no export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer

from predictors.artifact import (
    Conditions,
    EncoderCard,
    Manifest,
    write_manifest,
)

MAX_LENGTH = 12
NAMES = ("small-llm", "large-llm")
_PIECES = [
    "name",
    "three",
    "rivers",
    "write",
    "a",
    "long",
    "essay",
    "the",
    "sea",
    "cafe",
    "istanbul",
    "end",
    "x",
    "y",
    "z",
    "i",
    "s",
    "ᄒ",
    "##ᅡ",
    "##ᆫ",
    "##",
    "##s",
    "##i",
    "##x",
]


def word_pieces() -> Tokenizer:
    """An uncased WordPiece tokenizer of few words, all letters and some marks; it adds [CLS] and [SEP]."""
    from transformers import BertTokenizer

    letters = [*"abcdefghijklmnopqrstuvwxyz0123456789.,[]-'", "北", "京"]
    pieces = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *_PIECES,
        *letters,
        *(f"##{letter}" for letter in letters),
    ]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    return BertTokenizer(vocab=vocabulary).backend_tokenizer


def write_text_artifact(
    folder: Path, *, tokenizer: Tokenizer | None = None, truncation_side: str = "right", opset: int = 20
) -> Path:
    """mu = 3 + 0.01 mean id + served model, sigma = 0.5 + temperature (0 if unknown); nu = 3.5."""
    folder.mkdir(parents=True, exist_ok=True)
    nodes = [
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        helper.make_node("Cast", ["input_ids"], ["ids"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["ids", "mask"], ["kept"]),
        helper.make_node("ReduceSum", ["kept", "one"], ["total"], keepdims=0),
        helper.make_node("ReduceSum", ["mask", "one"], ["count"], keepdims=0),
        helper.make_node("Div", ["total", "count"], ["mean"]),
        helper.make_node("Mul", ["mean", "scale"], ["scaled"]),
        helper.make_node("Cast", ["served_model"], ["number"], to=TensorProto.FLOAT),
        helper.make_node("Sum", ["scaled", "number", "three"], ["mu"]),
        helper.make_node("IsNaN", ["temperature"], ["unknown"]),
        helper.make_node("Where", ["unknown", "zero", "temperature"], ["filled"]),
        helper.make_node("Add", ["filled", "half"], ["sigma"]),
    ]
    numbers = {"scale": 0.01, "three": 3.0, "zero": 0.0, "half": 0.5}
    constants: dict[str, Any] = {"one": np.array([1])} | {
        name: np.float32(value) for name, value in numbers.items()
    }

    def value(name: str, kind: int, shape: list[str]) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, shape)

    integers, floats = TensorProto.INT64, TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "mean",
        [
            value("input_ids", integers, ["batch", "seq"]),
            value("attention_mask", integers, ["batch", "seq"]),
            value("served_model", integers, ["batch"]),
            value("temperature", floats, ["batch"]),
        ],
        [value("mu", floats, ["batch"]), value("sigma", floats, ["batch"])],
        initializer=[numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    onnx.save(model, folder / "model.onnx")
    (tokenizer or word_pieces()).save(str(folder / "tokenizer.json"))
    (folder / "normalization.json").write_text("{}")
    manifest = Manifest.draft(
        artifact_id="text",
        created="2026-01-02T03:04:05+00:00",
        heads=("length",),
        encoder=EncoderCard(architecture="mean", source="fake", num_parameters=1, num_layers=None, width=1),
        nu=3.5,
        max_length=MAX_LENGTH,
        truncation_side=truncation_side,  # type: ignore[arg-type]
        pad_token_id=0,
        served_models=NAMES,
        conditioning=Conditions(unknown_models=True, temperature=True),
    )
    write_manifest(folder, manifest)
    return folder
