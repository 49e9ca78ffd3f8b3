"""Which split a prompt belongs to: decided by its id alone, so it never changes and never leaks samples."""

from __future__ import annotations

import hashlib
import math
from typing import Literal

from scheduler_core.errors import InputError

Split = Literal["train", "validation", "test"]


def split_of(prompt_id: str, seed: int, fractions: tuple[float, float, float] = (0.6, 0.2, 0.2)) -> Split:
    """The split of a prompt, by a stable hash of (seed, prompt id).

    Args:
        prompt_id: Identifier of the prompt; all samples of a prompt share it, so they share the split.
        seed: Another seed gives another, independent split.
        fractions: Expected shares of (train, validation, test); non-negative, summing to 1.

    Raises:
        InputError: If the fractions are negative or do not sum to 1.
    """
    if len(fractions) != 3 or min(fractions) < 0 or not math.isclose(sum(fractions), 1.0, abs_tol=1e-9):
        raise InputError("fractions", fractions, "three non-negative shares that sum to 1")
    digest = hashlib.sha256(f"{seed}\x00{prompt_id}".encode()).digest()
    position = int.from_bytes(digest[:8], "big") / 2**64
    if position < fractions[0]:
        return "train"
    return "validation" if position < fractions[0] + fractions[1] else "test"
