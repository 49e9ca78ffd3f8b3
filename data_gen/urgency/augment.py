"""Phrases added to training texts, so that a predictor learns that they say nothing: claims of urgency, and openers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from data_gen.urgency.labels import LabelledText
from data_gen.urgency.seed_set import Phrase
from scheduler_core.errors import InputError


def with_phrases(
    texts: Sequence[LabelledText],
    phrases: Sequence[Phrase],
    copies: int,
    random: np.random.Generator,
    *,
    claimed: bool,
    field: str,
) -> list[LabelledText]:
    """`copies` copies of every training text, each with another phrase and the same level.

    Phrases of the text's own language are drawn half of the time where there are any: mixtures occur, too. Texts of
    the validation and test splits get no copies.

    Args:
        texts: Labelled texts.
        phrases: To draw from.
        copies: Copies of each training text, 0 to the number of phrases.
        random: Decides which phrases.
        claimed: The phrases claim urgency.
        field: Name of the option behind `copies`, for messages.

    Raises:
        InputError: `copies` is out of its range.
    """
    if not 0 <= copies <= len(phrases):
        raise InputError(field, copies, f"a whole number from 0 to {len(phrases)}")
    added: list[LabelledText] = []
    for text in texts:
        if text.split != "train":
            continue
        chosen = _draw(text.language, phrases, copies, random)
        added += [replace(text, text=phrase.added_to(text.text), claimed=claimed) for phrase in chosen]
    return added


def _draw(
    language: str | None, phrases: Sequence[Phrase], copies: int, random: np.random.Generator
) -> list[Phrase]:
    own = np.array([phrase.language == language for phrase in phrases])
    probabilities = np.full(len(phrases), 1.0 / len(phrases))
    if own.any():
        probabilities = 0.5 * probabilities + 0.5 * own / own.sum()
    drawn = random.choice(len(phrases), size=copies, replace=False, p=probabilities)
    return [phrases[number] for number in drawn.tolist()]
