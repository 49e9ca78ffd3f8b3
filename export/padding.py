"""Shapes and padding patterns that an artifact is compared with torch on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_BATCH = 64

PATTERNS = ("full", "one long", "one short", "all short", "steps", "alternating", "random")


@dataclass(frozen=True, slots=True)
class Shape:
    """A batch of `batch` rows and `seq` columns, padded on the right as `pattern` says."""

    batch: int
    seq: int
    pattern: str

    def __str__(self) -> str:
        return f"{self.batch}x{self.seq} {self.pattern}"

    def lengths(self, rng: np.random.Generator) -> NDArray[np.int64]:
        """Tokens in each row [batch], from 1 to seq.

        full: no padding. one long, one short: one row has all columns, or 1, the others the opposite. all short: every row
        is padded, as where columns are rounded up. steps: from 1 to all. alternating: 1 and all. random: any.
        """
        full = np.full(self.batch, self.seq, dtype=np.int64)
        ones = np.ones(self.batch, dtype=np.int64)
        one = int(rng.integers(self.batch))
        if self.pattern == "one long":
            ones[one] = self.seq
            return ones
        if self.pattern == "one short":
            full[one] = 1
            return full
        if self.pattern == "all short":
            return rng.integers(1, max(self.seq, 2), size=self.batch, dtype=np.int64)
        if self.pattern == "steps":
            return np.linspace(1, self.seq, self.batch).round().astype(np.int64)
        if self.pattern == "alternating":
            full[1::2] = 1
            return full
        if self.pattern == "random":
            return rng.integers(1, self.seq + 1, size=self.batch, dtype=np.int64)
        assert self.pattern == "full"
        return full


def shapes(longest: int, *, max_tokens: int, num_random: int, rng: np.random.Generator) -> Iterator[Shape]:
    """Every pattern at one small shape; edge shapes and random ones, patterns in turn.

    Args:
        longest: Most columns.
        max_tokens: Most rows times columns; one row of `longest` columns comes in any case.
        num_random: Random shapes, log-uniform over 1 to 64 rows and 1 to `longest` columns.
        rng: Draws them.
    """
    small = (5, min(16, longest))
    yield from (Shape(*small, pattern) for pattern in PATTERNS)
    found = [(1, 1), (1, 2), (2, 1), (1, longest), (3, 17)]
    found += [(min(MAX_BATCH, max_tokens), 1), (min(MAX_BATCH, max_tokens // 2), 2)]
    found += [(min(MAX_BATCH, max_tokens // longest), longest), (MAX_BATCH, max_tokens // MAX_BATCH)]
    for _ in range(num_random):
        batch, seq = np.exp(rng.uniform(0, np.log([MAX_BATCH + 0.99, longest + 0.99]))).astype(int).tolist()
        found.append((batch, min(seq, max_tokens // batch)))
    for number, (batch, seq) in enumerate(found):
        if batch >= 1 and seq >= 1:
            yield Shape(batch, min(seq, longest), PATTERNS[number % len(PATTERNS)])
