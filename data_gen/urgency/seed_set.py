"""The seed set: texts written and labeled by hand, by the rubric in `docs/urgency.md`.

| file | content |
|---|---|
| emergency, interactive, standard, batch, background | LLM traffic of that level |
| quiet | calmly worded emergencies |
| triage | short triage-like notes, ESI 1 to 5 as levels 0 to 4; invented, not of real patients |
| adversarial | pairs: a text, and the same text with a claim of urgency |
| claims | claims of urgency for training; none of them is in `adversarial` |
| openers | phrases that claim nothing, for training; none of them is in `neutral` |
| neutral | phrases that claim nothing, which replace the claims as a control |
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from data_gen.splits import Split
from data_gen.urgency.labels import LabeledText
from scheduler_core.urgency import LEVELS

# Part of the seed set -> files.
PARTS: dict[str, tuple[str, ...]] = {"llm": LEVELS, "quiet": ("quiet",), "triage": ("triage",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimPair:
    """A text with and without a claim of urgency; both have the same true level, named `level`.

    Pairs are never trained on: their splits are validation and test.
    """

    id: str
    text: str
    claimed_text: str
    level: str
    claim: str
    position: str  # of the claim: before, inside or after the text
    language: str
    split: Split

    @property
    def level_number(self) -> int:
        """The true level, 0 = most urgent."""
        return LEVELS.index(self.level)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phrase:
    """Words that do not change the true level of a text, and their position: before or after it."""

    phrase: str
    position: str
    language: str

    def added_to(self, text: str) -> str:
        """The text with the phrase."""
        return f"{self.phrase} {text}" if self.position == "before" else f"{text} {self.phrase}"


def seed_rows(part: str) -> list[dict[str, Any]]:
    """All texts of a part of `PARTS` in a fixed order: id, text, level, domain, language, rationale and split."""
    return [row for name in PARTS[part] for row in _rows(name)]


def seed_labels(part: str) -> list[LabeledText]:
    """The texts of `seed_rows` as `LabeledText`."""
    return [
        LabeledText(
            text=row["text"],
            level=LEVELS.index(row["level"]),
            source=f"seed-{part}",
            split=row["split"],
            language=row["language"],
        )
        for row in seed_rows(part)
    ]


def read_pairs(split: Split | None = None) -> list[ClaimPair]:
    """The adversarial pairs, all or those of one split (validation or test)."""
    pairs = [ClaimPair(**row) for row in _rows("adversarial")]
    return [pair for pair in pairs if split is None or pair.split == split]


def neutral_texts(pairs: Sequence[ClaimPair]) -> list[str]:
    """For each pair, its claimed text with a neutral phrase of the same language in place of the claim.

    A control: a predictor whose level changes with these phrases reacts to any added words, not to the claims.
    """
    phrases: dict[str, list[str]] = {}
    for row in _rows("neutral"):
        phrases.setdefault(row["language"], []).append(row["phrase"])
    texts = []
    for number, pair in enumerate(pairs):
        choice = phrases.get(pair.language, phrases["en"])
        texts.append(pair.claimed_text.replace(pair.claim, choice[number % len(choice)], 1))
    return texts


def read_claims() -> list[Phrase]:
    """Claims of urgency for training; disjoint from those of the adversarial pairs."""
    return [
        Phrase(phrase=row["claim"], position=row["position"], language=row["language"])
        for row in _rows("claims")
    ]


def read_openers() -> list[Phrase]:
    """Phrases that claim nothing, for training, each before and after a text; disjoint from the neutral phrases."""
    return [Phrase(**row, position=position) for row in _rows("openers") for position in ("before", "after")]


def _rows(name: str) -> list[dict[str, Any]]:
    content = resources.files("data_gen.urgency.seed").joinpath(f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in content.splitlines()]
