from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch

from export.graph import export_graph
from export.passes.graph import random_feed, session
from predictors.manifest import EncoderCard, Manifest
from tests.export.conftest import PLAIN
from tests.predictors.predictors import predictor
from tests.training.tiny import ENCODERS, tiny_bert

LONGEST = 48
# All tiny vocabularies have these.
VOCABULARY = 20
MANIFEST = Manifest.model_construct(
    artifact_id="tiny",
    created="",
    heads=("length",),
    encoder=EncoderCard(architecture="bert", source="fake", num_parameters=1, num_layers=None, width=1),
    nu=3.5,
    max_length=LONGEST,
    truncation_side="right",
    pad_token_id=0,
)


def _bert(folder: Path) -> str:
    # Wide enough that its products are worth quantising.
    return tiny_bert(folder, hidden_size=64)


@pytest.fixture(scope="session")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Exported graphs of tiny encoders, by kind; tests must not write into them."""
    root = tmp_path_factory.mktemp("graphs")
    made = {}
    for kind, make in {"bert": _bert, "deberta": ENCODERS["deberta"], "opt": ENCODERS["opt"]}.items():
        options = PLAIN | ({"pooling": ("mean", "last")} if kind == "opt" else {})
        model = predictor(make(root / kind), **options)
        # Attention that prefers some tokens: with the usual small weights every mask would do.
        with torch.no_grad():
            for name, weight in model.encoder.named_parameters():
                if weight.ndim == 2 and "word_embeddings" not in name:
                    weight.mul_(8)
        made[kind] = root / f"{kind}.onnx"
        # The older exporter is fast, but gives OPT a branch that no pass reads.
        export_graph(model, MANIFEST, made[kind], legacy_exporter=kind != "opt")
    return made


def largest_difference(one: ir.Model, other: ir.Model) -> float:
    """Of all outputs over edge shapes, with padding."""
    rng = np.random.default_rng(1)
    first, second = session(one), session(other)
    largest = 0.0
    for batch, seq in ((1, 1), (1, 2), (3, 7), (4, 33), (2, LONGEST)):
        feed = random_feed(one, batch, seq, rng, VOCABULARY)
        for left, right in zip(first.run(None, feed), second.run(None, feed), strict=True):
            largest = max(largest, float(np.abs(left - right).max()))
    return largest
