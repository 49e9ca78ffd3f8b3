"""The true architectures, at their true size, with random weights: each exports and gives torch's numbers.

One at a time: the largest, DeBERTa-v3-base, takes about 5 GB of memory.
"""

from __future__ import annotations

import gc
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from export.exporter import ExportConfig, export_onnx
from predictors.artifact import open_artifact
from predictors.modules.checkpoint import save_checkpoint
from predictors.modules.encoder import build_encoder, load_tokenizer
from tests.export.conftest import CALIBRATION, TRAINING_INFO
from tests.predictors.predictors import predictor
from tests.training.tiny import tiny_bert

# The published configurations; what is left out is the architecture's default.
TRUE: dict[str, tuple[int, dict[str, Any]]] = {
    "microsoft/deberta-v3-base": (
        183_831_552,
        {
            "model_type": "deberta-v2",
            "vocab_size": 128100,
            "max_position_embeddings": 512,
            "max_relative_positions": -1,
            "position_buckets": 256,
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_biased_input": False,
            "share_att_key": True,
            "norm_rel_ebd": "layer_norm",
            "type_vocab_size": 0,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "layer_norm_eps": 1e-7,
        },
    ),
    "distilbert/distilbert-base-uncased": (66_362_880, {"model_type": "distilbert"}),
    "google-bert/bert-base-uncased": (108_891_648, {"model_type": "bert"}),
    "facebook/opt-125m": (125_239_296, {"model_type": "opt", "dropout": 0.1, "word_embed_proj_dim": 768}),
    "answerdotai/ModernBERT-base": (149_014_272, {"model_type": "modernbert"}),
    "sentence-transformers/all-MiniLM-L6-v2": (
        22_565_376,
        {"model_type": "bert", "hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRUE)
def test_true_architecture_exports_and_gives_torchs_numbers(tmp_path: Path, name: str) -> None:
    size, config = TRUE[name]
    torch.manual_seed(0)
    poolings = ("mean", "last") if config["model_type"] == "opt" else ("cls", "mean", "max")
    options = {"max_length": 512, "pooling": poolings, "prompt_length": True}
    model = predictor(build_encoder(config), **options)
    model.set_calibration(CALIBRATION)
    tokenizer = load_tokenizer(tiny_bert(tmp_path / "tokenizer"))
    save_checkpoint(tmp_path / "checkpoint", model, tokenizer, TRAINING_INFO)
    del model
    gc.collect()
    out = tmp_path / "artifact"
    export_onnx(ExportConfig(checkpoint=str(tmp_path / "checkpoint"), out=str(out), parity_shapes=4))
    manifest = open_artifact(out).manifest
    assert manifest.encoder.num_parameters == size
    assert max(manifest.parity["max_abs_diff"].values()) <= 1e-4
    assert manifest.parity["padding"] <= 1e-4
    assert {shape.split()[0] for shape in manifest.parity["max_abs_diff"]} >= {"1x512", "4x512", "64x32"}
    shutil.rmtree(tmp_path)
