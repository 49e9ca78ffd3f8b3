"""Statistics for the whole tree."""

import math

import numpy as np
import pytest
from scipy import stats

from scheduler_core.errors import InputError
from scheduler_core.statistics import interval, kendall_tau


def test_tau_b_is_that_of_scipy() -> None:
    rng = np.random.default_rng(0)
    for size, digits in ((2, 3), (40, 0), (300, 1), (5000, 3)):
        one = rng.normal(size=size).round(digits)
        other = (one + rng.normal(size=size)).round(digits)
        assert kendall_tau(one, other) == pytest.approx(stats.kendalltau(one, other).statistic, abs=1e-12)
    assert kendall_tau([1.0, 1.0], [1.0, 2.0]) is kendall_tau([], []) is None


def test_intervals_cover_the_mean_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(2000):
        found = interval(list(rng.normal(3.0, 2.0, 4)))
        covered += found.low <= 3.0 <= found.high
    assert covered / 2000 == pytest.approx(0.95, abs=4 * (0.95 * 0.05 / 2000) ** 0.5)
    # t_0.975 with 3 degrees of freedom is 3.18245.
    four = interval([1.0, 2.0, 3.0, 4.0])
    assert four.high - four.mean == pytest.approx(3.182446305284263 * np.std([1, 2, 3, 4], ddof=1) / 2)
    one = interval([3.0])
    assert (one.mean, one.low, one.high) == (3.0, -math.inf, math.inf)
    with pytest.raises(InputError, match="values"):
        interval([])
