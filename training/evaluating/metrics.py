"""Numbers that compare predicted parameters and rankings with what the answers say.

The distribution itself is scored answer by answer in `scoring`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]


def regression(true: ArrayLike, predicted: ArrayLike) -> dict[str, float | None]:
    """R2, MAE, RMSE and MAPE of predictions [N]; R2 is None where the truth does not vary."""
    truth = np.asarray(true, dtype=np.float64)
    error = np.asarray(predicted, dtype=np.float64) - truth
    if len(truth) == 0:
        return {"r2": None, "mae": None, "rmse": None, "mape": None}
    spread = float(((truth - truth.mean()) ** 2).sum())
    positive = bool((truth > 0).all())
    return {
        "r2": 1 - float((error**2).sum()) / spread if spread > 0 else None,
        "mae": float(np.abs(error).mean()),
        "rmse": float(np.sqrt((error**2).mean())),
        "mape": float((np.abs(error) / truth).mean()) if positive else None,
    }


def kendall_tau(one: ArrayLike, other: ArrayLike) -> float | None:
    """Kendall's tau-b of two rankings [N], in O(N log N); None if one of them ranks nothing."""
    from scipy import stats

    first, second = np.asarray(one, dtype=np.float64), np.asarray(other, dtype=np.float64)
    if len(first) < 2 or (first == first[0]).all() or (second == second[0]).all():
        return None
    return float(stats.kendalltau(first, second).statistic)


def ranking(score: ArrayLike, true: ArrayLike) -> dict[str, float | None]:
    """How well scores [N], larger = longer, order true lengths [N].

    Returns:
        tau: Kendall's tau-b.
        pair_accuracy: Share of the pairs of different true length that the scores order right; a pair of equal scores
            counts one half, as if ordered by chance. None where no two true lengths differ.
    """
    scores, truth = np.asarray(score, dtype=np.float64), np.asarray(true, dtype=np.float64)
    pairs = _pairs(len(truth))
    untied = pairs - _tied_pairs(truth)
    if untied == 0:
        return {"tau": None, "pair_accuracy": None}
    tau = kendall_tau(scores, truth)
    if tau is None:
        return {"tau": None, "pair_accuracy": 0.5}
    # tau-b = (C - D) / sqrt((pairs untied in one) (pairs untied in the other))
    difference = tau * np.sqrt(untied) * np.sqrt(pairs - _tied_pairs(scores))
    return {"tau": tau, "pair_accuracy": float(0.5 + 0.5 * difference / untied)}


def _pairs(count: int) -> float:
    return count * (count - 1) / 2


def _tied_pairs(values: FloatArray) -> float:
    counts = np.unique(values, return_counts=True)[1].astype(np.float64)
    return float((counts * (counts - 1) / 2).sum())


def finite(value: float) -> float | None:
    """`value`, or None where JSON has no word for it."""
    return float(value) if np.isfinite(value) else None


def nothing(names: tuple[str, ...]) -> dict[str, Any]:
    """A metric that does not apply: each of its names with None."""
    return dict.fromkeys(names)
