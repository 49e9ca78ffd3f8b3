from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from predictors.tokenizer import MAX_CHARS_PER_TOKEN, PromptTokenizer
from scheduler_core.errors import InputError
from tests.predictors.fakes import VOCAB, WORDS

MAX_LENGTH = 8


def whole_text(folder: Path, text: str, side: str) -> list[int]:
    """The reference: tokenise everything, then truncate."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if side != "middle":
        tokenizer.enable_truncation(MAX_LENGTH, direction=side)
    ids: list[int] = tokenizer.encode(text).ids
    if side == "middle" and len(ids) > MAX_LENGTH:
        return ids[: MAX_LENGTH // 2] + ids[-MAX_LENGTH // 2 :]
    return ids


@pytest.mark.parametrize("side", ["left", "right", "middle"])
@given(words=st.lists(st.sampled_from(WORDS), max_size=60), gap=st.sampled_from([" ", "  ", "\n", " " * 40]))
def test_cutting_before_tokenising_changes_nothing(
    artifact_folder: Path, side: str, words: list[str], gap: str
) -> None:
    text = gap.join(words)
    if len(text) > MAX_CHARS_PER_TOKEN * MAX_LENGTH:
        words = words[:10]
        text = gap.join(words)
    path = artifact_folder / "tokenizer.json"
    [prompt] = PromptTokenizer(path, max_length=MAX_LENGTH, truncation_side=side)([text])
    assert prompt.ids.tolist() == whole_text(artifact_folder, text, side)
    assert prompt.truncated == (len(words) + 2 > MAX_LENGTH)


def test_each_side_keeps_its_end(artifact_folder: Path) -> None:
    text = "name " + "a " * 50_000 + "sea"
    path = artifact_folder / "tokenizer.json"
    [right] = PromptTokenizer(path, max_length=4, truncation_side="right")([text])
    [left] = PromptTokenizer(path, max_length=4, truncation_side="left")([text])
    assert right.ids.tolist() == [VOCAB["[CLS]"], VOCAB["name"], VOCAB["a"], VOCAB["[SEP]"]]
    assert left.ids.tolist() == [VOCAB["[CLS]"], VOCAB["a"], VOCAB["sea"], VOCAB["[SEP]"]]
    [middle] = PromptTokenizer(path, max_length=5, truncation_side="middle")([text])
    assert middle.ids.tolist() == [VOCAB[token] for token in ("[CLS]", "name", "a", "sea", "[SEP]")]
    assert all(prompt.truncated for prompt in (left, middle, right))
    assert right.ids.dtype == np.int64


class CountingTokenizer:
    """Counts the characters that reach the real tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.num_chars = 0

    def encode_batch_fast(self, texts: list[str]) -> object:
        self.num_chars += sum(len(text) for text in texts)
        return self.tokenizer.encode_batch_fast(texts)


@pytest.mark.parametrize("side", ["right", "middle"])
@pytest.mark.parametrize("text", ["a " * 5_000_000, "x" * 10_000_000, " " * 10_000_000, "\n" * 10_000_000])
def test_work_on_a_huge_prompt_is_bounded(artifact_folder: Path, text: str, side: str) -> None:
    path = artifact_folder / "tokenizer.json"
    tokenize = PromptTokenizer(path, max_length=MAX_LENGTH, truncation_side=side)
    counting = CountingTokenizer(tokenize._tokenizer)
    tokenize._tokenizer = counting  # type: ignore[assignment]
    [prompt] = tokenize([text])
    # Cuts are doubled, and ends that share no gap with the rest are read once more together.
    assert counting.num_chars <= 3 * MAX_CHARS_PER_TOKEN * MAX_LENGTH
    assert prompt.truncated
    assert len(prompt.ids) <= MAX_LENGTH


def test_padding_stored_in_the_file_is_not_applied(artifact_folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(artifact_folder / "tokenizer.json"))
    tokenizer.enable_padding(length=12)
    tokenizer.enable_truncation(3)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokenize = PromptTokenizer(tmp_path / "tokenizer.json", max_length=8, truncation_side="right")
    assert len(tokenize(["name three a"])[0].ids) == 5


def test_bad_file_and_bad_length_are_named(artifact_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="tokenizer"):
        PromptTokenizer(tmp_path / "tokenizer.json", max_length=8, truncation_side="right")
    with pytest.raises(InputError, match="max_length: got 2"):
        PromptTokenizer(artifact_folder / "tokenizer.json", max_length=2, truncation_side="right")
