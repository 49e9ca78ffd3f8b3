import hashlib
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from data_gen.filters import NearDuplicates, PromptFilters, filtered, lsh_bands, pieces, similarity
from data_gen.prompts import Message, Prompt
from data_gen.splits import split_of
from scheduler_core.errors import InputError

#: Few letters, so that small texts share pieces.
TEXTS = st.lists(st.text("ab ", max_size=24) | st.text(max_size=8), max_size=30)


def prompts(*texts: str) -> list[Prompt]:
    return [Prompt(f"p{i}", text) for i, text in enumerate(texts)]


def test_token_bounds(tmp_path: Path, word_tokenizer: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(word_tokenizer / "tokenizer.json"))
    tokenizer.enable_truncation(2)
    tokenizer.save(str(tmp_path / "short.json"))
    filters = PromptFilters(tokenizer=str(tmp_path / "short.json"), min_prompt_tokens=2, max_prompt_tokens=3)
    chat = Prompt("c", "b", messages=(Message("system", "a a a"), Message("user", "b")))
    stream = [*prompts("a", "a b", "a b c", "a b c d"), chat]
    dropped = Counter[str]()
    assert [p.text for p in filtered(stream, filters, dropped)] == ["a b", "a b c"]
    assert dropped == {"fewer than 2 tokens": 1, "more than 3 tokens": 2}
    (tmp_path / "bad.json").write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match="a tokenizer.json"):
        list(filtered(stream, PromptFilters(tokenizer=str(tmp_path / "bad.json"))))


@given(st.lists(st.sampled_from("abc"), max_size=60), st.integers(1, 40), st.integers(0, 5))
def test_strata_share_evenly_what_they_have(kinds: list[str], count: int, seed: int) -> None:
    stream, dropped = [Prompt(f"p{i}", "x", kind) for i, kind in enumerate(kinds)], Counter[str]()
    filters = PromptFilters(sample=count, stratify_by="category", sample_seed=seed, deduplicate=False)
    drawn = list(filtered(stream, filters, dropped))
    assert len(drawn) == min(count, len(stream))
    assert dropped["not drawn"] == len(stream) - len(drawn)
    assert [p for p in stream if p in drawn] == drawn
    have, got = Counter(kinds), Counter(p.category for p in drawn)
    fewest = min((got[kind] for kind in have if got[kind] < have[kind]), default=None)
    if fewest is not None:
        assert all(got[kind] <= fewest + 1 for kind in have)


def test_a_draw_depends_on_seed_and_ids_not_on_order() -> None:
    stream, dropped = prompts(*map(str, range(300))), Counter[str]()
    drawn = list(filtered(stream, PromptFilters(sample=40, sample_seed=1), dropped))
    assert len(drawn) == 40
    assert [prompt for prompt in stream if prompt in drawn] == drawn
    assert dropped == {"not drawn": 260}
    assert set(drawn) == set(filtered(stream[::-1], PromptFilters(sample=40, sample_seed=1)))
    assert set(drawn) != set(filtered(stream, PromptFilters(sample=40, sample_seed=2)))
    assert list(filtered(stream, PromptFilters(sample=400))) == stream


def unlike(texts: list[str], threshold: float) -> list[str]:
    index = NearDuplicates(threshold)
    return [text for text in texts if index.add(text)]


def compared_with_all(texts: list[str], threshold: float) -> list[str]:
    """The same by comparing each text with every one that passed."""
    passed: list[str] = []
    for text in texts:
        if all(similarity(pieces(text), pieces(other)) < threshold for other in passed):
            passed.append(text)
    return passed


@given(TEXTS, st.sampled_from([0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0]), st.randoms(use_true_random=False))
@example(["aaaaa", "aaaaaa", "", ""], 1.0, random.Random(0))
def test_near_duplicates_as_by_all_pairs(texts: list[str], threshold: float, order: random.Random) -> None:
    passed = unlike(texts, threshold)
    assert passed == compared_with_all(texts, threshold) == unlike([*texts, *texts], threshold)
    twice = [*texts, *texts]
    order.shuffle(twice)
    assert all(count == 1 for count in Counter(unlike(twice, threshold)).values())


@pytest.mark.parametrize("threshold", [0.5, 0.65, 0.8, 0.9, 0.99, 1.0])
def test_a_pair_at_the_threshold_is_missed_once_in_a_million_at_most(threshold: float) -> None:
    num_bands, rows = lsh_bands(threshold)
    assert num_bands * rows <= 256
    assert (1 - threshold**rows) ** num_bands <= 1e-6


def test_near_duplicates_are_of_the_normalized_conversation() -> None:
    story = "Write a short story about a lighthouse keeper who finds a letter from the sea, in the past."
    turns = (Message("user", "Hi"), Message("assistant", "Hello, what can I do?"), Message("user", story))
    poem = "Write a long poem about a mountain guide who loses a map, in rhyme."
    changed = story.upper().replace(" ", "  "), story.replace("sea,", "sea")
    stream = [*prompts(story, *changed, poem, "ok", "ok", "no"), Prompt("chat", story, messages=turns)]
    dropped = Counter[str]()
    passed = list(filtered(stream, PromptFilters(near_duplicates=0.9), dropped))
    assert [prompt.prompt_id for prompt in passed] == ["p0", "p3", "p4", "p6", "chat"]
    assert dropped == {"near-duplicate text": 3}
    # Repetitions alone: of other case, width or white space.
    wide = [*prompts(story, *changed), Prompt("wide", story.replace("W", "\uff37"))]
    wide.append(Prompt("chat", story, messages=turns))
    both, exact = Counter[str](), Counter[str]()
    list(filtered(stream, PromptFilters(deduplicate=True, near_duplicates=0.9), both))
    assert both == {"duplicate text": 2, "near-duplicate text": 1}
    passed = list(filtered(wide, PromptFilters(deduplicate=True), exact))
    assert [prompt.prompt_id for prompt in passed] == ["p0", "p2", "chat"]
    assert exact == {"duplicate text": 2}


def test_splits_are_stable_and_have_their_fractions() -> None:
    names = ("train", "validation", "test")
    stream = prompts(*map(str, range(6000)))
    parts = {name: list(filtered(stream, PromptFilters(split=name, split_seed=1))) for name in names}
    assert sorted(p.prompt_id for part in parts.values() for p in part) == sorted(p.prompt_id for p in stream)
    # Standard error of a fraction of 0.6 over 6,000 is 0.006.
    assert [len(parts[name]) / 6000 for name in names] == pytest.approx([0.6, 0.2, 0.2], abs=0.025)
    assert all(split_of(p.prompt_id, 1) == name for name, part in parts.items() for p in part)
    assert any(split_of(p.prompt_id, 2) != "train" for p in parts["train"])
    # Worked out by hand from SHA-256: a changed hash would silently move test prompts into training.
    golden = {"a": "train", "b": "validation", "c": "train", "m": split_by_hand("m"), "z": split_by_hand("z")}
    assert {name: split_of(name, seed=0) for name in golden} == golden


def split_by_hand(prompt_id: str) -> str:
    first_byte = hashlib.sha256(b"0\x00" + prompt_id.encode()).digest()[0]
    assert first_byte not in (153, 204)  # the bytes in which the borders 0.6 and 0.8 fall
    return "train" if first_byte < 153 else "validation" if first_byte < 204 else "test"
