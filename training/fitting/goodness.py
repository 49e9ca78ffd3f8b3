"""Kolmogorov-Smirnov test of fitted length distributions.

The plain p-value, as in TIE's table 1: parameters come from the same samples, so it is too high for every family (the
Lilliefors effect) and only compares families. With cut answers the test looks below the smallest length at which one
was cut: there the empirical distribution of all N answers is known. The p-value is that of the statistic over the
whole range, so with cut answers it is higher still, never too low.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy import stats

FloatArray = NDArray[np.float64]


def ks_statistic(
    lengths: NDArray[np.number], finished: NDArray[np.bool_], cdf: Callable[[FloatArray], FloatArray]
) -> float:
    """Largest distance between the empirical and a fitted distribution, below the smallest cut.

    Args:
        lengths: Answer lengths in tokens [N], N >= 1.
        finished: False where the answer was cut at its length [N].
        cdf: P(X <= x) of the fitted distribution.

    Returns:
        The statistic in [0, 1].
    """
    x = np.sort(np.asarray(lengths, dtype=np.float64))
    count = len(x)
    if not finished.all():
        cut = float(np.asarray(lengths, dtype=np.float64)[~finished].min())
        x = x[x < cut]
        edge = abs(len(x) / count - float(cdf(np.array([cut]))[0]))
    else:
        edge = 0.0
    if len(x) == 0:
        return edge
    fitted = cdf(x)
    above = np.arange(1, len(x) + 1) / count - fitted
    below = fitted - np.arange(len(x)) / count
    return float(max(above.max(), below.max(), edge))


def ks_p_values(statistics: FloatArray, counts: NDArray[np.integer]) -> FloatArray:
    """Exact two-sided p-values of KS statistics [G] of samples of `counts` [G] answers; NaN stays NaN."""
    p = np.full(len(statistics), np.nan)
    known = ~np.isnan(statistics)
    for count in np.unique(counts[known]):
        rows = known & (counts == count)
        p[rows] = stats.kstwo.sf(statistics[rows], int(count))
    return np.asarray(np.clip(p, 0.0, 1.0), dtype=np.float64)
