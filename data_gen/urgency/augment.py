"""Claims added to training texts, so that a predictor learns that a claim says nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from data_gen.urgency.labels import LabelledText
from data_gen.urgency.seed_set import Claim
from scheduler_core.errors import InputError


def add_claims(
    texts: Sequence[LabelledText], claims: Sequence[Claim], copies: int, random: np.random.Generator
) -> list[LabelledText]:
    """The texts, and behind them `copies` copies of every training text, each with another claim and the same level.

    Claims of the text's own language are drawn half of the time where there are any: mixtures occur, too. Texts of
    the validation and test splits get no copies.

    Args:
        texts: Labelled texts.
        claims: To draw from.
        copies: Copies of each training text, 0 to the number of claims.
        random: Decides which claims.

    Raises:
        InputError: `copies` is out of its range.
    """
    if not 0 <= copies <= len(claims):
        raise InputError("augment_claims", copies, f"a whole number from 0 to {len(claims)}")
    added: list[LabelledText] = []
    for text in texts:
        if text.split != "train":
            continue
        chosen = _draw(text.language, claims, copies, random)
        added += [replace(text, text=claim.added_to(text.text), claimed=True) for claim in chosen]
    return [*texts, *added]


def _draw(
    language: str | None, claims: Sequence[Claim], copies: int, random: np.random.Generator
) -> list[Claim]:
    own = np.array([claim.language == language for claim in claims])
    probabilities = np.full(len(claims), 1.0 / len(claims))
    if own.any():
        probabilities = 0.5 * probabilities + 0.5 * own / own.sum()
    drawn = random.choice(len(claims), size=copies, replace=False, p=probabilities)
    return [claims[number] for number in drawn.tolist()]
