"""The seed set: texts written and labeled by hand according to the rubric in `docs/urgency.md`.

| file | content |
|---|---|
| emergency, interactive, standard, batch, background | LLM requests of that level |
| quiet | calmly worded emergencies |
| extra | more requests of all levels, most of them not in English; for training only |
| triage | short triage-like notes, ESI 1 to 5 as levels 0 to 4; fictitious, not from real patients |
| adversarial | pairs of a text, and the same text with a claim of urgency |
| claims | claims of urgency for training; disjoint from `adversarial` |
| openers | phrases without a claim, for training; disjoint from `neutral` |
| neutral | phrases without a claim, which replace the claims as a control |
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

import numpy as np

from data_gen.splits import Split
from data_gen.urgency.labels import LabeledText
from scheduler_core.prediction.urgency import LEVELS

# Part of the seed set -> its files.
PARTS: dict[str, tuple[str, ...]] = {
    "llm": LEVELS,
    "quiet": ("quiet",),
    "extra": ("extra",),
    "triage": ("triage",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimPair:
    """A text with and without a claim of urgency, and the true level of both.

    Pairs are never used for training; their splits are validation and test.
    """

    id: str
    text: str
    claimed_text: str
    level: str
    claim: str
    position: str  # position of the claim: before, inside or after the text
    language: str
    split: Split

    @property
    def level_number(self) -> int:
        """The number of the true level, 0 = most urgent."""
        return LEVELS.index(self.level)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phrase:
    """A phrase that does not change the true level of a text, and its position: before or after the text."""

    phrase: str
    position: str
    language: str

    def added_to(self, text: str) -> str:
        """Adds the phrase to a text."""
        return f"{self.phrase} {text}" if self.position == "before" else f"{text} {self.phrase}"


def seed_rows(part: str) -> list[dict[str, Any]]:
    """All texts of a part of `PARTS` in a fixed order: id, text, level, language, split; except in extra, domain and rationale."""
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
    """Reads the adversarial pairs, all or those of one split (validation or test)."""
    pairs = [ClaimPair(**row) for row in _rows("adversarial")]
    return [pair for pair in pairs if split is None or pair.split == split]


def neutral_texts(pairs: Sequence[ClaimPair]) -> list[str]:
    """For each pair, its claimed text with a neutral phrase of the same language instead of the claim.

    Used as a control: a predictor whose level also changes with these phrases reacts to any added words, not to claims.
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
    """Reads the claims of urgency for training, which are disjoint from those of the adversarial pairs."""
    return [
        Phrase(phrase=row["claim"], position=row["position"], language=row["language"])
        for row in _rows("claims")
    ]


def read_openers() -> list[Phrase]:
    """Reads the phrases without a claim for training, in both positions; disjoint from the neutral phrases."""
    return [Phrase(**row, position=position) for row in _rows("openers") for position in ("before", "after")]


def with_phrases(
    texts: Sequence[LabeledText],
    phrases: Sequence[Phrase],
    num_copies: int,
    random: np.random.Generator,
    *,
    claimed: bool,
) -> list[LabeledText]:
    """`num_copies` copies of every training text, each with a different added phrase and the same level.

    Phrases are drawn uniformly with probability 1/2, else uniformly from the phrases in the language of the text, if any.
    Texts of other splits are not copied. `claimed` is whether the phrases claim urgency.
    """
    copies: list[LabeledText] = []
    for text in texts:
        if text.split != "train":
            continue
        own = np.array([phrase.language == text.language for phrase in phrases])
        probabilities = np.full(len(phrases), 1.0 / len(phrases))
        if own.any():
            probabilities = 0.5 * probabilities + 0.5 * own / own.sum()
        drawn = random.choice(len(phrases), size=num_copies, replace=False, p=probabilities).tolist()
        copies += [
            replace(text, text=phrases[number].added_to(text.text), claimed=claimed) for number in drawn
        ]
    return copies


def _rows(name: str) -> list[dict[str, Any]]:
    content = resources.files("data_gen.urgency.seed").joinpath(f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in content.splitlines()]
