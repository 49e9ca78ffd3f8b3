"""The families beside the log-t, and the Kolmogorov-Smirnov test."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from training.fitting.alternatives import FAMILIES, fit_alternatives
from training.fitting.goodness import ks_p_values, ks_statistic

TRUE = {
    "log_normal": stats.lognorm(0.6, scale=90),
    "gamma": stats.gamma(2.5, scale=40),
    "weibull": stats.weibull_min(1.6, scale=120),
    "exponential": stats.expon(scale=100),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cap", [np.inf, 110.0])
def test_a_family_finds_its_own_parameters(family, cap):
    x = TRUE[family].rvs(3000, random_state=np.random.default_rng(1))
    fit = FAMILIES[family](x[x < cap], np.full((x >= cap).sum(), cap))
    at = np.array([20.0, 60.0, 100.0, 200.0])
    np.testing.assert_allclose(fit.cdf(at), TRUE[family].cdf(at), atol=0.03)


@pytest.mark.parametrize(
    ("family", "parameters"),
    [
        ("gamma", lambda x: stats.gamma.fit(x, floc=0)),
        ("weibull", lambda x: stats.weibull_min.fit(x, floc=0)),
    ],
)
def test_uncensored_fits_equal_scipys(family, parameters):
    x = TRUE[family].rvs(40, random_state=np.random.default_rng(2))
    shape, _, scale = parameters(x)
    fit = FAMILIES[family](x, x[:0])
    assert fit.parameters == pytest.approx({"shape": shape, "scale": scale}, rel=1e-3)


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, 300), min_size=3, max_size=20), cap=st.integers(2, 400))
def test_every_family_has_a_distribution_for_any_lengths(lengths, cap):
    x, finished = np.minimum(lengths, cap), np.array(lengths) < cap
    if len(set(x.tolist())) == 1 or not finished.any():
        return
    for fit in fit_alternatives(x, finished).values():
        values = fit.cdf(np.linspace(1, 500, 50))
        assert np.isfinite(values).all()
        assert (np.diff(values) >= -1e-12).all()
        assert values[0] >= 0
        assert values[-1] <= 1
        assert 0 <= ks_statistic(x, finished, fit.cdf) <= 1


def test_statistic_and_p_equal_scipys_with_ties():
    x = np.array([3, 3, 3, 5, 8, 8, 13, 40])
    cdf = stats.expon(scale=9.0).cdf
    found = ks_statistic(x, np.ones(8, dtype=bool), cdf)
    expected = stats.kstest(x, cdf)
    assert found == pytest.approx(expected.statistic)
    assert ks_p_values(np.array([found, np.nan]), np.array([8, 8]))[0] == pytest.approx(expected.pvalue)


def test_p_of_an_untested_group_stays_unknown():
    assert np.isnan(ks_p_values(np.array([0.2, np.nan]), np.array([10, 20]))).tolist() == [False, True]


def test_with_cut_answers_only_what_lies_below_the_cut_counts():
    cdf = stats.expon(scale=50.0).cdf
    x = np.array([10, 30, 60, 60, 60])
    finished = np.array([True, True, False, False, False])
    steps = [abs(1 / 5 - cdf(10)), cdf(10), abs(2 / 5 - cdf(30)), abs(cdf(30) - 1 / 5), abs(2 / 5 - cdf(60))]
    assert ks_statistic(x, finished, cdf) == pytest.approx(max(steps))


def test_p_values_of_the_true_distribution_are_not_too_small_under_a_cap():
    rng = np.random.default_rng(4)
    drawn = rng.exponential(50.0, (2000, 12))
    cap = 40.0
    x = np.minimum(drawn, cap)
    cdf = stats.expon(scale=50.0).cdf
    statistics = np.array([ks_statistic(row, row < cap, cdf) for row in x])
    rejected = (ks_p_values(statistics, np.full(2000, 12)) <= 0.05).mean()
    assert rejected <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 2000)
