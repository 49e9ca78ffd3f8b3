"""Randomness of one answer: a function of (seed, prompt id, sample index) alone, so that runs can be resumed."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray


def _digest(seed: int, prompt_id: str, sample_index: int) -> bytes:
    return hashlib.sha256(f"{seed}\x00{prompt_id}\x00{sample_index}".encode()).digest()


def uniforms(seed: int, prompt_id: str, sample_index: int, count: int) -> NDArray[np.float64]:
    """The uniform numbers in [0, 1) that draw one answer, token by token; shape [count].

    They depend on nothing but the arguments, so an answer does not depend on which batch it was made in.
    """
    key = np.frombuffer(_digest(seed, prompt_id, sample_index)[:16], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).random(count)


def answer_seed(seed: int, prompt_id: str, sample_index: int) -> int:
    """A seed for an engine that draws one answer by itself, from 0 to 2**31 - 1."""
    return int.from_bytes(_digest(seed, prompt_id, sample_index)[:4], "big") >> 1
