"""TIE's studies of output lengths: measures against numpy and scipy, and directions that must come out."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from benchmarks.reproduce.study import Effort
from benchmarks.reproduce.tie_lengths import figure_7, figure_8, tails

QUICK = Effort(quick=True)


def test_tail_measures_equal_numpys_and_scipys():
    x = np.array([[*range(1, 20), 400], [*range(3, 22), 25], [6] * 20])
    measures = tails(x)
    p50, p90, p99 = np.quantile(x, [0.5, 0.9, 0.99], axis=1)
    assert measures["cv"] == pytest.approx(x.std(axis=1) / x.mean(axis=1))
    assert measures["P90 / P50"] == pytest.approx(p90 / p50)
    assert measures["P99 / P50"] == pytest.approx(p99 / p50)
    assert measures["skewness"][:2] == pytest.approx(stats.skew(x[:2], axis=1))
    assert np.isnan(measures["skewness"][2])
    # The longest tenth: two samples of 20; 0.3 of the longest of 3.
    assert measures["top decile"][0] == pytest.approx((400 + 19) / 590)
    assert tails(np.array([[3, 5, 8]]))["top decile"] == pytest.approx([0.3 * 8 / 16])


def test_the_best_nu_is_near_the_one_that_was_drawn():
    findings = figure_8(QUICK)
    assert 2.0 <= findings.rows[0].ours <= 6.0
    assert findings.claims[0].holds


def test_errors_fall_with_the_number_of_samples():
    findings = figure_7(QUICK)
    errors = [row.ours for row in findings.rows]
    assert errors == sorted(errors, reverse=True)
    assert findings.claims[0].holds
