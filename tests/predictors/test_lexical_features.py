"""Lexical features of prompts: total, deterministic, and what their names say."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictors.lexical import FEATURE_NAMES, LexicalFeatures
from scheduler_core.errors import InputError

extract = LexicalFeatures().extract
# Any code point, lone surrogates too.
ANY_TEXT = st.text(st.characters(codec=None, exclude_categories=()), max_size=200)


def features(prompt, **options):
    return dict(zip(FEATURE_NAMES, extract([prompt], **options)[0].tolist(), strict=True))


@given(st.lists(ANY_TEXT, max_size=5))
def test_any_text_has_finite_features_that_do_not_depend_on_others(prompts):
    together = extract(prompts)
    assert together.shape == (len(prompts), len(FEATURE_NAMES))
    assert together.dtype == np.float32
    assert np.isfinite(together).all()
    for prompt, row in zip(prompts, together, strict=True):
        assert extract([prompt])[0].tolist() == row.tolist()


def test_names_are_unique_and_documented():
    import predictors.lexical as module

    assert len(set(FEATURE_NAMES)) == len(FEATURE_NAMES)
    table = "\n".join(line for line in module.__doc__.splitlines() if line.startswith("| "))
    words = set(table.replace(",", " ").split())
    assert set(FEATURE_NAMES) <= words


def test_empty_and_enormous_texts():
    empty = features("")
    assert empty["log_chars"] == 0
    assert empty["log_words"] == 0
    huge = "write " + "x" * 3_000_000 + " in 3 sentences"
    found = features(huge)
    assert found["log_chars"] == pytest.approx(math.log1p(len(huge)), rel=1e-6)
    # the end is read too
    assert found["number_sentences"] == pytest.approx(math.log1p(3), rel=1e-6)
    assert features("abc def", max_chars=4)["log_words"] == pytest.approx(math.log1p(2), rel=1e-6)
    with pytest.raises(InputError, match="max_chars"):
        extract(["x"], max_chars=1)


@pytest.mark.parametrize(
    ("prompt", "name", "value"),
    [
        ("Give me five tips for sleep.", "number_items", math.log1p(5)),
        ("Write 500 words on tides.", "number_words", math.log1p(500)),
        ("Summarise this in two short paragraphs.", "number_sentences", math.log1p(2)),
        ("Answer in one word.", "yes_no", 1),
        ("Is it raining, yes or no?", "yes_no", 1),
        ("Which is red? A) rose B) sky", "choices", 1),
        ("Translate to French: hello", "asks_translation", 1),
        ("Think step by step.", "says_steps", 1),
        ("Think step-by-step.", "says_steps", 1),
        ("What is the capital of Peru?", "first_question", 1),
        ("What is the capital of Peru?", "ends_question", 1),
        ("List rivers", "first_command", 1),
        ("Give the output as JSON", "structured", 1),
        ("```\ncode\n```", "fences", math.log1p(2)),
        ("今天天气怎么样", "cjk", 1),
        ("Привет", "cyrillic_greek", 1),
        ("مرحبا", "arabic_hebrew", 1),
        ("안녕", "hangul", 1),
        ("12 ab", "digits", 0.4),
        ("ab?c?", "questions", math.log1p(2)),
        ("USER: hi\nASSISTANT: yes\nUSER: go", "turns", math.log1p(3)),
        ("number 99999999999999999999999999", "number", 0),
    ],
)
def test_features_mean_what_they_say(prompt, name, value):
    assert features(prompt)[name] == pytest.approx(value, rel=1e-6)
