"""Confidence intervals of paired differences within a run, by a bootstrap of blocks of consecutive requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler_core.errors import InputError

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Spread:
    """A number of b less that of a.

    Attributes:
        a: The number of the first.
        b: Of the second.
        difference: b - a.
        low: Lower end of the interval of the difference; None: too few blocks for one.
        high: Upper end.
    """

    a: float
    b: float
    difference: float
    low: float | None
    high: float | None


class BlockBootstrap:
    """Draws blocks of consecutive requests with replacement, of each seed as many as it has.

    Latencies of neighbours go up and down together with the queue, so requests are not drawn one by one: that would make
    intervals far too narrow. Blocks of ceil(sqrt(n)) do not overlap (Carlstein 1986; Lahiri 2003, section 2.6).

    Args:
        runs: Whose request is which [n], numbers of seeds; requests of a seed in the order of their arrival.
        rng: Draws the blocks.
        num_resamples: How many samples.
        confidence: Of the percentile intervals.

    Raises:
        InputError: `num_resamples` is below 1, or `confidence` is not between 0 and 1.
    """

    def __init__(
        self,
        runs: NDArray[np.int64],
        rng: np.random.Generator,
        num_resamples: int = 1000,
        confidence: float = 0.95,
    ) -> None:
        if num_resamples < 1:
            raise InputError("num_resamples", num_resamples, "integers > 0")
        if not 0 < confidence < 1:
            raise InputError("confidence", confidence, "numbers between 0 and 1")
        self._tails = [(1 - confidence) / 2, (1 + confidence) / 2]
        self._block = np.zeros(len(runs), np.int64)
        counts: list[NDArray[np.int64]] = []
        num_blocks = 0
        for run in np.unique(runs):
            mine = np.flatnonzero(runs == run)
            blocks = math.ceil(len(mine) / math.ceil(math.sqrt(len(mine))))
            self._block[mine] = num_blocks + np.arange(len(mine)) * blocks // len(mine)
            counts.append(rng.multinomial(blocks, np.full(blocks, 1 / blocks), num_resamples))
            num_blocks += blocks
        #: How often each block is in each sample [num_resamples, blocks].
        self._counts = np.concatenate(counts, axis=1) if counts else np.zeros((num_resamples, 0), np.int64)

    def mean(self, a: FloatArray, b: FloatArray, chosen: NDArray[np.bool_] | None = None) -> Spread:
        """Difference of the means of paired values [n], over those that are chosen [n]."""
        chosen = np.ones(len(a), bool) if chosen is None else chosen
        block, off = self._block[chosen], (b - a)[chosen]
        size = self._counts.shape[1]
        totals = self._counts @ np.bincount(block, off, size)
        drawn = self._counts @ np.bincount(block, minlength=size)
        samples = totals[drawn > 0] / drawn[drawn > 0]
        return self._spread(float(a[chosen].mean()), float(b[chosen].mean()), samples, len(np.unique(block)))

    def quantiles(self, a: FloatArray, b: FloatArray, shares: Sequence[float]) -> list[Spread]:
        """Differences of these quantiles of values [n]."""
        samples = np.zeros((2, len(self._counts), len(shares)))
        for side, values in enumerate((a, b)):
            order = np.argsort(values, kind="stable")
            ordered, block = values[order], self._block[order]
            for place, counts in enumerate(self._counts):
                upto = np.cumsum(counts[block])
                found = np.searchsorted(upto, np.asarray(shares) * upto[-1])
                samples[side, place] = ordered[np.minimum(found, len(ordered) - 1)]
        size = self._counts.shape[1]
        return [
            self._spread(
                float(np.quantile(a, share)),
                float(np.quantile(b, share)),
                samples[1, :, place] - samples[0, :, place],
                size,
            )
            for place, share in enumerate(shares)
        ]

    def _spread(self, a: float, b: float, samples: NDArray[Any], num_blocks: int) -> Spread:
        if num_blocks < 2:
            return Spread(a, b, b - a, None, None)
        low, high = map(float, np.quantile(samples, self._tails))
        return Spread(a, b, b - a, low, high)
