"""The 5 % points of likelihood ratios between nested families of the log-t, by simulation.

Free nu against nu = inf (log-normal) lies at the edge of the parameter space, where 2 ln LR tends to an even mixture
of 0 and chi-squared with one degree of freedom as answers grow many; against a fixed inner nu it tends to chi-squared.
Prompts have 10 or 20 answers, where neither holds. But for a location-scale family the distribution of the ratio
under the null depends on the number of answers alone, so it is drawn once for each number and serves all groups.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from training.fitting.estimate import estimate
from training.fitting.families import FloatArray, family_of
from training.studies.draws import log_t_draws

LEVEL = 0.05
#: Numbers of answers that are simulated; between them points are interpolated in 1 / N, beyond by the limit.
SIMULATED = np.array([3, 4, 5, 6, 7, 8, 10, 12, 15, 20, 30, 50, 100, 200])
# Draws far above one token and far apart, so that whole numbers are as good as real ones.
_MU, _SIGMA = 20.0, 0.5


def free_nu_points(counts: NDArray[np.integer], nu: float, *, draws: int, seed: int) -> FloatArray:
    """5 % points of 2 (ln L(free nu) - ln L(nu)) for groups of `counts` [G] uncut answers whose true nu is `nu`.

    Args:
        counts: Numbers of answers, at least 3.
        nu: Of the null; inf = log-normal.
        draws: Simulated groups for each number; the 5 % point then passes 5 % +- 0.22 sqrt(1 / draws) of them.
        seed: Of the draws.
    """
    limit = stats.chi2.ppf(1 - 2 * LEVEL if math.isinf(nu) else 1 - LEVEL, 1)
    known = {math.inf: float(limit)}
    for count in _needed(counts):
        known[count] = _point(count, nu, draws, seed)
    at = sorted(known, reverse=True)
    inverse = 1.0 / np.array(at)
    return np.asarray(np.interp(1.0 / counts, inverse, [known[count] for count in at]))


def _needed(counts: NDArray[np.integer]) -> list[int]:
    """The simulated numbers around each of `counts`."""
    last = len(SIMULATED) - 1
    below = np.maximum(np.searchsorted(SIMULATED, counts, side="right") - 1, 0)
    above = np.minimum(np.searchsorted(SIMULATED, counts, side="left"), last)
    return [int(count) for count in SIMULATED[np.union1d(below, above)]]


def _point(count: int, nu: float, draws: int, seed: int) -> float:
    rng = np.random.default_rng([seed, count])
    one = np.ones(1)
    sample = log_t_draws(_MU * one, _SIGMA * one, nu, np.inf * one, count, draws, rng)
    null = estimate(sample, family_of("log-t", nu))
    free = estimate(sample, family_of("log-t", None))
    return float(np.quantile(2.0 * (free.log_likelihood - null.log_likelihood), 1 - LEVEL))
