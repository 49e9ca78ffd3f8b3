from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from data_gen.filters import NearDuplicates, PromptFilters, filtered, lsh_bands, pieces, similarity
from data_gen.prompts import Message, Prompt
from data_gen.templates import compose
from scheduler_core.errors import InputError

#: Few letters, so that small texts share pieces.
TEXTS = st.lists(st.text("ab ", max_size=24) | st.text(max_size=8), max_size=30)
THRESHOLDS = st.sampled_from([0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0])


def kept_of(texts: list[str], threshold: float) -> list[str]:
    index = NearDuplicates(threshold)
    kept = [text for text in texts if index.add(text)]
    assert len(index) == len(kept)
    return kept


def compared_with_all(texts: list[str], threshold: float) -> list[str]:
    """The same by comparing each text with every one that was kept."""
    kept: list[str] = []
    found: list[frozenset[str]] = []
    for text in texts:
        mine = pieces(text)
        if all(similarity(mine, other) < threshold for other in found):
            kept.append(text)
            found.append(mine)
    return kept


@given(TEXTS, THRESHOLDS)
@example(["aaaaa", "aaaaaa", "", ""], 1.0)
def test_what_is_kept_is_what_comparing_with_all_kept_texts_keeps(texts: list[str], threshold: float) -> None:
    kept = kept_of(texts, threshold)
    assert kept == compared_with_all(texts, threshold)
    for i, one in enumerate(kept):
        assert all(similarity(pieces(one), pieces(other)) < threshold for other in kept[:i])


@given(TEXTS, THRESHOLDS, st.randoms(use_true_random=False))
def test_identical_texts_are_always_dropped(texts: list[str], threshold: float, order: random.Random) -> None:
    twice = [*texts, *texts]
    order.shuffle(twice)
    assert all(count == 1 for count in Counter(kept_of(twice, threshold)).values())
    assert kept_of(texts + texts, threshold) == kept_of(texts, threshold)


@pytest.mark.parametrize("threshold", [0.6, 0.8, 0.9])
def test_prompts_with_much_in_common_are_told_apart_exactly(threshold: float) -> None:
    """Templates with other words in them: most pairs are alike to some degree."""
    texts = [text for _, text in compose(300, 3)]
    kept = kept_of([*texts, *texts[:100]], threshold)
    assert kept == compared_with_all(texts, threshold)
    assert 10 < len(kept) < len(texts)


@pytest.mark.parametrize("threshold", [0.5, 0.65, 0.8, 0.9, 0.99, 1.0])
def test_a_pair_at_the_threshold_is_missed_once_in_a_million_at_most(threshold: float) -> None:
    num_bands, rows = lsh_bands(threshold)
    assert num_bands * rows <= 256
    assert (1 - threshold**rows) ** num_bands <= 1e-6


def test_the_filter_compares_normalised_conversations_and_counts() -> None:
    story = (
        "Write a short story about a lighthouse keeper who finds a letter from the sea, in the past tense."
    )
    turns = (Message("user", "Hi"), Message("assistant", "Hello, what can I do?"), Message("user", story))
    stream = [
        Prompt("a", story),
        Prompt("b", story.upper().replace(" ", "  ")),
        Prompt("c", story.replace("sea,", "sea")),
        Prompt("d", story, messages=turns),
        Prompt("e", "Write a long poem about a mountain guide who loses a map, in rhyme."),
        Prompt("f", "ok"),
        Prompt("g", "ok"),
        Prompt("h", "no"),
    ]
    dropped = Counter[str]()
    found = list(filtered(stream, PromptFilters(near_duplicates=0.9), dropped))
    assert [prompt.prompt_id for prompt in found] == ["a", "d", "e", "f", "h"]
    assert dropped == {"near-duplicate text": 3}
    both = Counter[str]()
    list(filtered(stream, PromptFilters(deduplicate=True, near_duplicates=0.9), both))
    assert both == {"duplicate text": 2, "near-duplicate text": 1}


@pytest.mark.parametrize("threshold", [0.0, 0.49, 1.01, float("nan")])
def test_a_bad_threshold_is_named(threshold: float) -> None:
    with pytest.raises(InputError, match=r"^near_duplicates: .*0\.5 to 1"):
        PromptFilters(near_duplicates=threshold)
