"""The hand-written seed set keeps what docs/urgency.md promises of it."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from importlib import resources
from itertools import combinations

import pytest

from data_gen.urgency.labels import text_split
from data_gen.urgency.seed_set import (
    PARTS,
    POSITIONS,
    SeedText,
    read_claims,
    read_openers,
    read_pairs,
    read_seed_texts,
)
from predictors.modules import URGENCY_LEVELS
from scheduler_core.errors import InputError
from scheduler_core.urgency import LEVELS

ALL = {part: read_seed_texts(part) for part in PARTS}
EVERY_TEXT = [seed for part in ALL.values() for seed in part]
PAIRS = read_pairs()


def trigrams(text: str) -> frozenset[tuple[str, ...]]:
    """Word 3-grams, without case and punctuation; a shorter text is one gram."""
    words = re.findall(r"\w+", text.casefold())
    return frozenset(tuple(words[i : i + 3]) for i in range(max(1, len(words) - 2)))


def similarity(a: frozenset[tuple[str, ...]], b: frozenset[tuple[str, ...]]) -> float:
    return len(a & b) / len(a | b)


def test_levels_have_the_predictors_names() -> None:
    assert LEVELS == URGENCY_LEVELS


def test_llm_traffic_has_many_texts_of_every_level() -> None:
    counts = Counter(seed.level for seed in ALL["llm"])
    assert sum(counts.values()) >= 500
    assert set(counts) == set(LEVELS)
    assert min(counts.values()) >= 100
    assert max(counts.values()) <= 1.2 * min(counts.values())


def test_triage_notes_cover_every_level() -> None:
    counts = Counter(seed.level for seed in ALL["triage"])
    assert set(counts) == set(LEVELS)
    assert min(counts.values()) >= 30


def test_quiet_emergencies_are_emergencies_without_loud_words() -> None:
    quiet = ALL["quiet"]
    assert len(quiet) >= 40
    assert {seed.level for seed in quiet} == {"emergency"}
    loud = re.compile(r"urgen|emergenc|dringend|notfall|priorit|!!", re.IGNORECASE)
    assert [seed.id for seed in quiet if loud.search(seed.text)] == []


def test_ids_and_texts_are_unique() -> None:
    ids = [seed.id for seed in EVERY_TEXT] + [pair.id for pair in PAIRS]
    texts = (
        [seed.text for seed in EVERY_TEXT]
        + [pair.text for pair in PAIRS]
        + [pair.claimed_text for pair in PAIRS]
    )
    assert [name for name, count in Counter(ids).items() if count > 1] == []
    assert [text for text, count in Counter(texts).items() if count > 1] == []


def test_no_two_texts_are_nearly_the_same() -> None:
    named = [(seed.id, trigrams(seed.text)) for seed in EVERY_TEXT] + [
        (pair.id, trigrams(pair.text)) for pair in PAIRS
    ]
    holders: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for number, (_, grams) in enumerate(named):
        for gram in grams:
            holders[gram].append(number)
    # Only texts that share a gram can be alike.
    pairs = {pair for numbers in holders.values() for pair in combinations(numbers, 2)}
    near = [(named[a][0], named[b][0]) for a, b in pairs if similarity(named[a][1], named[b][1]) >= 0.7]
    assert near == []


@pytest.mark.parametrize("part", list(PARTS))
def test_splits_are_the_hash_of_the_text_and_every_level_is_in_each(part: str) -> None:
    by_stratum: Counter[tuple[str, str]] = Counter()
    for seed in ALL[part]:
        assert seed.split == text_split(seed.text), seed.id
        by_stratum[seed.level, seed.split] += 1
    for level in {seed.level for seed in ALL[part]}:
        total = sum(by_stratum[level, split] for split in ("train", "validation", "test"))
        assert 0.5 <= by_stratum[level, "train"] / total <= 0.75, level
        assert min(by_stratum[level, "validation"], by_stratum[level, "test"]) >= (
            14 if part == "llm" else 3
        ), level


def test_texts_are_of_many_languages_domains_and_lengths() -> None:
    llm = ALL["llm"]
    languages = Counter(seed.language for seed in llm)
    assert min(languages[code] for code in ("en", "de", "es", "fr")) >= 50
    assert len(languages) >= 10
    for level in LEVELS:
        texts = [seed for seed in llm if seed.level == level]
        assert len({seed.domain for seed in texts}) >= 8, level
        assert max(len(seed.text.split()) for seed in texts) >= 80, level
    assert all(seed.rationale and seed.domain for seed in EVERY_TEXT)


def test_levels_do_not_differ_much_in_length() -> None:
    def median_words(texts: list[SeedText]) -> float:
        counts = sorted(len(seed.text.split()) for seed in texts)
        return counts[len(counts) // 2]

    medians = [median_words([seed for seed in ALL["llm"] if seed.level == level]) for level in LEVELS]
    assert max(medians) <= 2 * min(medians)


def test_pairs_differ_by_their_claim_alone() -> None:
    assert len(PAIRS) >= 150
    for pair in PAIRS:
        assert pair.position in POSITIONS
        assert pair.claim in pair.claimed_text
        assert " ".join(pair.claimed_text.replace(pair.claim, " ", 1).split()) == " ".join(
            pair.text.split()
        ), pair.id
        assert pair.level_number > 0, "an emergency cannot be raised"
        assert pair.split in ("validation", "test")
    assert len({pair.language for pair in PAIRS}) >= 8
    assert min(Counter(pair.level for pair in PAIRS).values()) >= 30
    assert min(Counter(pair.position for pair in PAIRS).values()) >= 15
    assert read_pairs("test") == [pair for pair in PAIRS if pair.split == "test"]


def plain(phrase: str) -> str:
    return re.sub(r"[\W_]+", " ", phrase.casefold()).strip()


def test_openers_for_training_are_not_those_of_the_control() -> None:
    text = PAIRS[0].text
    openers = {plain(opener.phrase) for opener in read_openers()}
    assert len(openers) >= 80
    rows = resources.files("data_gen.urgency.seed").joinpath("neutral.jsonl").read_text(encoding="utf-8")
    control = {plain(json.loads(row)["phrase"]) for row in rows.splitlines()}
    assert control
    assert not openers & control
    assert {opener.added_to(text).startswith(text) for opener in read_openers()} == {True, False}


def test_claims_for_training_are_none_of_the_attacks() -> None:
    claims = read_claims()
    attacks = {plain(pair.claim) for pair in PAIRS}
    assert len(claims) >= 40
    assert [claim.phrase for claim in claims if plain(claim.phrase) in attacks and plain(claim.phrase)] == []


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(InputError, match="part of the seed set"):
        read_seed_texts("poems")
