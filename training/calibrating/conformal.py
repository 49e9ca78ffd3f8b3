"""Split conformal quantiles: for each level an offset q, so that exp(mu + q sigma) covers with a guarantee.

Let z_1, ..., z_n be the residuals of n calibration rows and z of a new one, exchangeable with them. With
k = ceil((n + 1) p) and q the k-th smallest of the z_i (infinite if k > n),

    P(z <= q) >= p,

for every n, every predictor and every distribution, and P(z <= q) <= p + 1/(n + 1) if no two residuals are equal
(Vovk et al.; Lei et al. 2018). The probability is over calibration rows and the new one together.

- Samples of one prompt are not exchangeable with those of another one row by row, so one sample of each row counts, and
  for the quantiles of all models together one row of each prompt.
- A censored sample counts as infinitely long, so the guarantee holds whatever truncates the outputs; the price is a
  quantile that is too long where many are censored, and infinite where it lies beyond them.
- A served model with too few rows for a finite quantile at a level, or fewer than 50, gets that of all models together;
  for it the guarantee holds on average over served models only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from training.calibrating.residuals import Residuals
from training.evaluating.conformal import ConformalQuantiles
from training.evaluating.scores import COVERAGE_LEVELS

FloatArray = NDArray[np.float64]
MIN_ROWS = 50


def conformal_offset(z: FloatArray, finished: NDArray[np.bool_], level: float) -> float:
    """The k-th smallest residual, k = ceil((n + 1) level), censored ones infinite; infinite if k > n."""
    rank = math.ceil((len(z) + 1) * level - 1e-9)
    if rank > len(z):
        return math.inf
    return float(np.partition(np.where(finished, z, np.inf), rank - 1)[rank - 1])


def fit_conformal(
    residuals: Residuals,
    served_models: Sequence[str],
    rng: np.random.Generator,
    levels: Sequence[float] = COVERAGE_LEVELS,
) -> ConformalQuantiles:
    """Offsets of all models together and of each served model.

    Args:
        residuals: Of the calibrated predictor.
        served_models: That the predictor tells apart [M].
        rng: Draws the sample of each row, and the row of each prompt, that counts.
        levels: Ascending.
    """
    one_per_row = residuals.take(_sample_one(residuals.row, rng))
    pooled = one_per_row.take(_sample_one(one_per_row.prompt, rng))
    shape = (len(served_models) + 1, len(levels))
    offsets, counts, own = np.empty(shape), np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=bool)
    for row in range(shape[0]):
        by_model = one_per_row.take(one_per_row.model == row) if row else pooled
        for column, level in enumerate(levels):
            is_enough = len(by_model) >= MIN_ROWS and len(by_model) >= level / (1 - level)
            own[row, column] = is_enough or row == 0
            data = by_model if own[row, column] else pooled
            counts[row, column] = len(data)
            offsets[row, column] = conformal_offset(data.z, data.finished, level)
    return ConformalQuantiles(tuple(levels), tuple(served_models), offsets, counts, own)


def _sample_one(groups: NDArray[np.intp], rng: np.random.Generator) -> NDArray[np.intp]:
    """Position of one member of each group, drawn at random."""
    order = rng.permutation(len(groups))
    _, first = np.unique(groups[order], return_index=True)
    return np.sort(order[first])
