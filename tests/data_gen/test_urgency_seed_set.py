"""The hand-written seed set keeps what docs/urgency.md promises of it."""

from __future__ import annotations

import json
import re
from collections import Counter
from importlib import resources

import pytest

from data_gen.filters import NearDuplicates, normalized
from data_gen.urgency.labels import text_split
from data_gen.urgency.seed_set import PARTS, neutral_texts, read_claims, read_openers, read_pairs, seed_rows
from predictors.modules.heads import URGENCY_LEVELS
from scheduler_core.urgency import LEVELS

ALL = {part: seed_rows(part) for part in PARTS}
EVERY_TEXT = [seed for part in ALL.values() for seed in part]
PAIRS = read_pairs()


@pytest.mark.parametrize(
    ("part", "total", "smallest", "ratio"), [("llm", 500, 100, 1.2), ("triage", 150, 30, 9)]
)
def test_there_are_many_texts_of_every_level(part: str, total: int, smallest: int, ratio: float) -> None:
    counts = Counter(seed["level"] for seed in ALL[part])
    assert set(counts) == set(LEVELS) == set(URGENCY_LEVELS)
    assert sum(counts.values()) >= total
    assert smallest <= min(counts.values()) <= max(counts.values()) <= ratio * min(counts.values())


def test_quiet_emergencies_are_emergencies_without_loud_words() -> None:
    quiet = ALL["quiet"]
    assert len(quiet) >= 40
    assert {seed["level"] for seed in quiet} == {"emergency"}
    loud = re.compile(r"urgen|emergenc|dringend|notfall|priorit|!!", re.IGNORECASE)
    assert [seed["id"] for seed in quiet if loud.search(seed["text"])] == []


def test_ids_are_unique() -> None:
    ids = [seed["id"] for seed in EVERY_TEXT] + [pair.id for pair in PAIRS]
    assert [name for name, count in Counter(ids).items() if count > 1] == []


def test_no_two_texts_are_nearly_the_same() -> None:
    index = NearDuplicates(0.7)
    texts = [seed["text"] for seed in EVERY_TEXT] + [pair.text for pair in PAIRS]
    assert [text for text in texts if not index.add(normalized(text))] == []


@pytest.mark.parametrize("part", list(PARTS))
def test_splits_are_the_hash_of_the_text_and_every_level_is_in_each(part: str) -> None:
    by_stratum: Counter[tuple[str, str]] = Counter()
    for seed in ALL[part]:
        assert seed["split"] == text_split(seed["text"]), seed["id"]
        by_stratum[seed["level"], seed["split"]] += 1
    for level in {seed["level"] for seed in ALL[part]}:
        total = sum(by_stratum[level, split] for split in ("train", "validation", "test"))
        assert 0.5 <= by_stratum[level, "train"] / total <= 0.75, level
        assert min(by_stratum[level, "validation"], by_stratum[level, "test"]) >= (
            14 if part == "llm" else 3
        ), level


def test_pairs_differ_by_their_claim_alone() -> None:
    assert len(PAIRS) >= 150
    for pair in PAIRS:
        assert pair.position in ("before", "middle", "after")
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


def test_phrases_for_training_are_none_of_those_for_tests() -> None:
    text = PAIRS[0].text
    openers = {plain(opener.phrase) for opener in read_openers()}
    assert len(openers) >= 80
    rows = resources.files("data_gen.urgency.seed").joinpath("neutral.jsonl").read_text(encoding="utf-8")
    control = {plain(json.loads(row)["phrase"]) for row in rows.splitlines()}
    assert control
    assert not openers & control
    assert {opener.added_to(text).startswith(text) for opener in read_openers()} == {True, False}
    claims = {plain(claim.phrase) for claim in read_claims()}
    assert len(claims) >= 40
    assert not claims & {plain(pair.claim) for pair in PAIRS} - {""}
    for pair, neutral in zip(PAIRS, neutral_texts(PAIRS), strict=True):
        assert pair.claim not in neutral
        assert neutral not in (pair.text, pair.claimed_text)
