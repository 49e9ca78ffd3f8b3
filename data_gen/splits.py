"""Stable hashes of texts, and splits of prompts, which depend only on the prompt id.

All samples of a prompt have the same id and thus the same split. The turns of a conversation share a prefix and form a
family: their ids end in `#turn-N` (see `turn_id`), and the part before it determines the split.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Sequence
from typing import Literal

from scheduler_core.errors import InputError

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
_TURN = re.compile(r"#turn-\d+(-[0-9a-f]+)?\Z")


def turn_id(conversation_id: str, turn: int, history: str = "") -> str:
    """Id of the prompt that ends with user turn number `turn` (from 1) of a conversation.

    `history`: hex digits that distinguish conversations with the same id; may be empty.
    """
    return f"{conversation_id}#turn-{turn}" + (f"-{history}" if history else "")


def family_of(prompt_id: str) -> str:
    """The part of an id that determines the split: without the turn of a conversation."""
    return _TURN.sub("", prompt_id)


def split_of(prompt_id: str, seed: int, fractions: tuple[float, float, float] = (0.6, 0.2, 0.2)) -> Split:
    """The split of a prompt, by a stable hash of (seed, family of the prompt id); splits of different seeds are independent.

    `fractions` are the expected fractions of (train, validation, test); InputError if they are negative or do not sum to 1.
    """
    if len(fractions) != 3 or min(fractions) < 0 or not math.isclose(sum(fractions), 1.0, abs_tol=1e-9):
        raise InputError("fractions", fractions, "three non-negative fractions that sum to 1")
    position = unit_hash(f"{seed}\x00{family_of(prompt_id)}")
    if position < fractions[0]:
        return "train"
    return "validation" if position < fractions[0] + fractions[1] else "test"


def unit_hash(text: str) -> float:
    """A hash of the text as a number from 0 to 1, uniformly distributed over texts."""
    return digest64(text) / 2**64


def smallest_hashes(texts: Iterable[str], count: int = 200) -> list[int]:
    """The `count` smallest distinct hashes of the texts, a sketch for `overlap`."""
    return sorted({digest64(text) for text in texts})[:count]


def overlap(texts: Iterable[str], hashes: Sequence[int]) -> float:
    """Estimated fraction of distinct texts that are among the texts of `smallest_hashes` (bottom-k sketch: Broder 1997).

    Only texts whose hash is at most the largest of `hashes` are compared; 0 without such texts.
    """
    below = {digest for text in texts if (digest := digest64(text)) <= max(hashes, default=-1)}
    return len(below & set(hashes)) / len(below) if below else 0.0


def digest64(text: str) -> int:
    """First eight bytes of the SHA-256 of a text; ten million texts have a collision with probability 3e-6."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big")
