"""The tokenizer as a graph gives the ids of the `tokenizers` package, and one file goes from text to predictions."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from export.packaging import NASTY, check_tokenizer_graph
from export.text.character_map import character_map, words_of
from export.text.text_graph import extensions_library, text_graph
from export.text.tokenizer_graph import tokenizer_graph
from predictors.artifact import open_artifact, write_manifest
from predictors.runtime import open_runtime
from predictors.tokenizer import LAST_CUT_CHARS_PER_TOKEN, PromptTokenizer
from scheduler_core.errors import InputError, TailcastError
from scheduler_core.lengths import LogT
from tests.export.artifacts import MAX_LENGTH, word_pieces, write_text_artifact

LIMIT = LAST_CUT_CHARS_PER_TOKEN * MAX_LENGTH
SIDES = ("right", "left", "middle")
# Around the number of characters that is looked at.
LONG = (
    "a " * 30 + "sea " * 2000 + "the " * 30,
    "sea " * 1000,
    "," * (LIMIT - 3) + " sea the",
    "a" * (LIMIT - 2) + "bc",
    " " * LIMIT + "sea",
    "x" * LIMIT * 3,
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("text")
    return {side: write_text_artifact(root / side, truncation_side=side) for side in SIDES}


def session_of(content: bytes) -> ort.InferenceSession:
    options: Any = ort.SessionOptions()
    options.register_custom_ops_library(str(extensions_library()))
    return ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def nasty_texts(number: int) -> list[str]:
    """Random characters of every kind, some of them around words that the tokenizer knows."""
    rng = random.Random(0)
    ranges = [(0, 0x7F), (0x80, 0x24F), (0x250, 0x3000), (0x3000, 0xD7FF), (0xE000, 0x10FFFF)]
    texts = []
    for _ in range(number):
        parts = [chr(rng.randint(*rng.choice(ranges))) for _ in range(rng.randrange(20))]
        parts += rng.sample(["sea", " the ", "[SEP]", "caf\u00e9", "[MASK", "  "], k=rng.randrange(3))
        rng.shuffle(parts)
        texts.append("".join(parts))
    return texts


@pytest.mark.parametrize("side", SIDES)
def test_graph_gives_the_ids_of_the_tokenizer(folders: dict[str, Path], side: str) -> None:
    artifact = open_artifact(folders[side])
    session = session_of(tokenizer_graph(artifact).SerializeToString())
    tokenize = PromptTokenizer(artifact.tokenizer_path, max_length=MAX_LENGTH, truncation_side=side)
    texts = [*NASTY, *LONG, *nasty_texts(1500)]
    for start in range(0, len(texts), 16):
        batch = texts[start : start + 16]
        ids, mask = session.run(None, {"text": np.array(batch, dtype=object)})
        wanted = [prompt.ids.tolist() for prompt in tokenize(batch)]
        assert ids.shape == mask.shape == (len(batch), max(len(row) for row in wanted))
        for text, row, used, tokens in zip(batch, ids, mask, wanted, strict=True):
            assert used.tolist() == [1] * len(tokens) + [0] * (len(used) - len(tokens)), text
            assert row[: len(tokens)].tolist() == tokens, text
            assert not row[len(tokens) :].any()


def test_columns_are_rounded_up(folders: dict[str, Path]) -> None:
    session = session_of(tokenizer_graph(open_artifact(folders["right"]), seq_multiple=8).SerializeToString())
    for text, columns in (("sea", 8), ("sea " * 6, 8), ("sea " * 7, MAX_LENGTH), ("sea " * 99, MAX_LENGTH)):
        ids, mask = session.run(None, {"text": np.array([text, ""], dtype=object)})
        assert ids.shape == (2, columns)
        assert mask[1].sum() == 2
    with pytest.raises(InputError, match="seq_multiple"):
        tokenizer_graph(open_artifact(folders["right"]), seq_multiple=0)


def test_character_map_is_what_the_tokenizer_does_to_text() -> None:
    tokenizer = word_pieces()
    table = character_map(tokenizer)
    for text in (*nasty_texts(300), *NASTY):
        without = text.replace("\0", "")
        assert table.apply(text).split() == words_of(tokenizer, without)


def test_one_file_goes_from_text_to_predictions(folders: dict[str, Path]) -> None:
    artifact = open_artifact(folders["right"])
    session = session_of(text_graph(artifact, capped=True).SerializeToString())
    texts = ["name three rivers", "", "naïve café " * 40, "[SEP] x"]
    feed = {
        "text": np.array(texts, dtype=object),
        "served_model": np.array([0, 1, 2, 1]),
        "temperature": np.array([1, np.nan, 0.5, 0], dtype=np.float32),
        "max_tokens": np.array([10, 20, 1000, 1]),
    }
    assert [entry.name for entry in session.get_inputs()] == list(feed)
    names = [entry.name for entry in session.get_outputs()]
    assert names == ["mu", "sigma", "expected_tokens", "cvar_tokens", "quantile_tokens"]
    found = dict(zip(names, session.run(None, feed), strict=True))
    served = [None, "small-llm", "large-llm", "small-llm"]
    wanted = open_runtime(folders["right"]).predict(texts, served, [1.0, None, 0.5, 0.0])
    np.testing.assert_allclose(found["mu"], wanted.mu, rtol=1e-6)
    np.testing.assert_allclose(found["sigma"], wanted.sigma, rtol=1e-6)
    lengths = LogT(wanted.mu, wanted.sigma, 3.5)
    np.testing.assert_allclose(found["expected_tokens"], lengths.expected(feed["max_tokens"]), rtol=1e-4)
    facts = session.get_modelmeta().custom_metadata_map
    assert facts["tailcast.artifact_version"] == artifact.manifest.artifact_version
    plain = session_of(text_graph(artifact).SerializeToString())
    assert [entry.name for entry in plain.get_outputs()] == ["mu", "sigma"]


def change_tokenizer(folder: Path, change: Any) -> None:
    manifest = open_artifact(folder).manifest
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    write_manifest(folder, manifest)


def byte_level(content: dict[str, Any]) -> None:
    content["model"] = {"type": "BPE", "vocab": {"a": 0}, "merges": []}


def stripping(content: dict[str, Any]) -> None:
    content["added_tokens"][4]["lstrip"] = True


def whole_text(content: dict[str, Any]) -> None:
    content["normalizer"] = {"type": "Strip", "strip_left": True, "strip_right": True}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (byte_level, "tokenizer.json, model: got 'BPE'; allowed: WordPiece"),
        (stripping, r"added token \[MASK\]: got \['lstrip'\]"),
        (whole_text, "tokenizer.json: got .*(one by one|drops control)"),
    ],
)
def test_tokenizer_that_the_graph_cannot_be_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    folder = write_text_artifact(tmp_path / "a")
    change_tokenizer(folder, change)
    with pytest.raises(InputError, match=message):
        tokenizer_graph(open_artifact(folder))


def test_graph_that_differs_is_caught(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = open_artifact(folders["right"])
    check_tokenizer_graph(artifact)
    other = PromptTokenizer(artifact.tokenizer_path, max_length=MAX_LENGTH - 1, truncation_side="right")
    monkeypatch.setattr("export.packaging.PromptTokenizer", lambda path, **options: other)
    with pytest.raises(TailcastError, match="the tokenizer as a graph differs on 'Name three"):
        check_tokenizer_graph(artifact)


def test_other_opset_than_the_tokenizers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="opset ai.onnx: got 18; allowed: 20"):
        text_graph(open_artifact(write_text_artifact(tmp_path / "a", opset=18)))
