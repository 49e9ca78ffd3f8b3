"""Encoders whose heads see lexical features too: an optional input of the graph."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

from export.exporter import ExportConfig, export_onnx
from export.variants.build import VariantBuilder
from predictors.artifact import open_artifact
from predictors.lexical import FEATURE_NAMES, FEATURE_VERSION, LexicalFeatures
from predictors.manifest import LEXICAL_INPUT, LexicalInput
from predictors.modules import load_checkpoint, load_tokenizer, save_checkpoint
from predictors.runtime import open_runtime
from scheduler_core.errors import InputError
from tests.predictors.predictors import predictor
from tests.training.tiny import tiny_bert
from training.prediction import predict_prompts

LEXICAL = LexicalInput(feature_names=FEATURE_NAMES, feature_version=FEATURE_VERSION, max_chars=500)
PROMPTS = [
    "name 3 rivers",
    "write a long story\nof the number 12",
    "essay?",
    "the list " * 80,
    "WRITE {code}",
]
SERVED = ["small-llm", "large-llm", None, "small-llm", "large-llm"]
TEMPERATURES = [1.0, None, 0.3, 0.0, 0.7]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lexical")
    encoder = tiny_bert(root / "encoder", hidden_size=64)  # wide enough to be quantised
    model = predictor(encoder, lexical=LEXICAL, truncation_side="middle", max_length=20)
    assert model.lexical is not None
    # Scales as training sets them.
    model.lexical.set_scale(torch.from_numpy(LexicalFeatures().extract(PROMPTS)))
    save_checkpoint(root / "checkpoint", model, load_tokenizer(encoder), {})
    return root / "checkpoint"


@pytest.fixture(scope="module", params=[False, True], ids=["dynamo", "legacy"])
def artifact(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("artifact") / "a"
    export_onnx(ExportConfig(checkpoint=str(checkpoint), out=str(out), legacy_exporter=request.param))
    return out


def test_texts_get_the_numbers_of_the_checkpoint(checkpoint: Path, artifact: Path) -> None:
    loaded = load_checkpoint(checkpoint)
    wanted = predict_prompts(loaded.model, loaded.tokenizer, PROMPTS, SERVED, TEMPERATURES)
    found = open_runtime(artifact, provider="cpu").predict(PROMPTS, SERVED, TEMPERATURES).arrays()
    for name in ("mu", "sigma", "urgency", "rank"):
        np.testing.assert_allclose(found[name], wanted[name], atol=1e-4)


def test_the_input_may_be_left_out(artifact: Path) -> None:
    runtime = open_runtime(artifact, provider="cpu")
    reads = runtime.tokenizer(PROMPTS)
    ids = [read.values for read in reads]
    told = runtime.run(ids, SERVED, TEMPERATURES, lexical=[read.lexical for read in reads])
    unknown = runtime.run(ids, SERVED, TEMPERATURES)
    mixed = runtime.run(ids, SERVED, TEMPERATURES, lexical=[reads[0].lexical, *[None] * 4])
    assert np.abs(told.mu - unknown.mu).min() > 1e-3
    np.testing.assert_allclose(mixed.mu, [told.mu[0], *unknown.mu[1:]], atol=1e-5)
    # Urgency sees the tokens alone: how a text is dressed must not count.
    np.testing.assert_allclose(told.urgency, unknown.urgency, atol=1e-6)

    session = ort.InferenceSession(str(artifact / "model.onnx"), providers=["CPUExecutionProvider"])
    assert [entry.name for entry in session.get_overridable_initializers()] == [LEXICAL_INPUT]
    longest = max(map(len, ids))
    feed = {
        "input_ids": np.stack([np.pad(row, (0, longest - len(row))) for row in ids]),
        "attention_mask": np.stack([np.arange(longest) < len(row) for row in ids]).astype(np.int64),
        "served_model": np.array([1, 2, 0, 1, 2]),
        "temperature": np.array([1.0, np.nan, 0.3, 0.0, 0.7], dtype=np.float32),
    }
    [mu] = session.run(["mu"], feed)
    np.testing.assert_allclose(mu, unknown.mu, atol=1e-5)


def test_the_manifest_tells_of_it(artifact: Path) -> None:
    manifest = open_artifact(artifact).manifest
    assert manifest.lexical == LEXICAL
    assert manifest.kind == "encoder"
    assert manifest.truncation_side == "middle"
    content = json.loads((artifact / "manifest.json").read_text())
    told = {tensor["name"]: (tensor["shape"], tensor["optional"]) for tensor in content["inputs"]}
    assert told[LEXICAL_INPUT] == (["batch", len(FEATURE_NAMES)], True)
    assert told["input_ids"] == (["batch", "seq"], False)


def test_features_of_another_version_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    content = json.loads((checkpoint / "config.json").read_text())
    content["predictor"]["lexical"]["feature_version"] = FEATURE_VERSION + 1
    changed = tmp_path / "changed"
    changed.mkdir()
    for file in checkpoint.iterdir():
        (changed / file.name).write_bytes(file.read_bytes())
    (changed / "config.json").write_text(json.dumps(content))
    loaded = load_checkpoint(changed)
    with pytest.raises(InputError, match="feature_version"):
        predict_prompts(loaded.model, loaded.tokenizer, PROMPTS)


@pytest.mark.parametrize("kind", ["fused", "int8", "fp16"])
def test_variants_keep_the_input_optional(artifact: Path, kind: str, tmp_path: Path) -> None:
    opened = open_artifact(artifact)
    built = VariantBuilder.of(opened, PROMPTS).build(kind)
    onnx.save(built.model, tmp_path / "model.onnx")
    session = ort.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    assert [entry.name for entry in session.get_overridable_initializers()] == [LEXICAL_INPUT]
    runtime = open_runtime(artifact, provider="cpu")
    reads = runtime.tokenizer(PROMPTS[:1])
    feed = {
        "input_ids": reads[0].values[None],
        "attention_mask": np.ones((1, len(reads[0].values)), dtype=np.int64),
        "served_model": np.array([1]),
        "temperature": np.array([1.0], dtype=np.float32),
    }
    for lexical in (None, reads[0].lexical):
        own = feed if lexical is None else feed | {LEXICAL_INPUT: lexical[None]}
        [mu] = session.run(["mu"], own)
        wanted = runtime.run([reads[0].values], ["small-llm"], [1.0], lexical=[lexical]).mu
        tolerance = {"fused": 1e-4, "int8": 0.5, "fp16": 0.05}[kind]
        assert abs(mu[0] - wanted[0]) < tolerance
