"""Is the predictor right? Coverage of its quantiles over the latest finished requests."""

from __future__ import annotations

from collections import deque

import numpy as np

from scheduler_core.errors import InputError
from scheduler_core.indices.length_table import LengthTable


class Coverage:
    """Largest gap between how often lengths fall below predicted quantiles and how often they should.

    gap = max over levels of |share of u <= level - level|, the Kolmogorov distance of the PIT histogram from uniform on a
    grid. A length x is a whole number, so its u is spread evenly over [F(x - 1/2), F(x + 1/2)] (Czado, Gneiting & Held
    2009, "Predictive model assessment for count data", Biometrics 65): a predictor that knows x exactly has no gap.

    Args:
        window: Latest finished requests that count.
        fewest: Below this many there is no verdict.
    """

    __slots__ = ("_fewest", "_values")

    levels = np.linspace(0.1, 0.9, 9)

    def __init__(self, window: int = 300, fewest: int = 50) -> None:
        if not 1 <= fewest <= window:
            raise InputError("window, fewest", (window, fewest), "1 <= fewest <= window")
        self._values: deque[tuple[float, float]] = deque(maxlen=window)
        self._fewest = fewest

    def finished(self, predicted: LengthTable, output_tokens: int) -> None:
        """A request with this prediction turned out this long."""
        self._values.append((predicted.cdf(output_tokens - 0.5), predicted.cdf(output_tokens + 0.5)))

    @property
    def gap(self) -> float | None:
        """The gap in [0, 1]; None until enough requests have finished."""
        if len(self._values) < self._fewest:
            return None
        low, high = np.array(self._values).T[:, :, None]
        below = np.clip((self.levels - low) / np.maximum(high - low, 1e-12), 0.0, 1.0)
        shares = below.mean(axis=0)
        return float(np.abs(shares - self.levels).max())
