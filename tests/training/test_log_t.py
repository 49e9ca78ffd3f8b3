"""Maximum-likelihood fits of the log-t distribution."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from scheduler_core.errors import InputError
from scheduler_core.lengths import LogT
from training.fitting.log_t import SIGMA_FLOOR, fit_log_t


def log_likelihood(mu, sigma, nu, lengths, finished):
    distribution = LogT(mu, sigma, nu)
    x = np.asarray(lengths, dtype=float)
    return distribution.logpdf(x[finished]).sum() + distribution.logsf(x[~finished]).sum()


def draw(rng, mu, sigma, count, cap=np.inf):
    lengths = np.ceil(np.exp(mu + sigma * rng.standard_t(3.5, count)))
    return np.minimum(lengths, cap), lengths <= cap


lists = st.lists(st.integers(1, 500), min_size=3, max_size=25)


@settings(max_examples=60, deadline=None)
@given(lengths=lists, cap=st.integers(2, 600), nu=st.sampled_from([1.5, 3.5, 10.0]))
def test_no_other_parameters_are_likelier(lengths, cap, nu):
    x, finished = np.minimum(lengths, cap), np.array(lengths) < cap
    fit = fit_log_t(x, finished, nu)
    assert fit.log_likelihood == pytest.approx(log_likelihood(fit.mu, fit.sigma, nu, x, finished), abs=1e-6)
    if not finished.any():
        return
    for mu_step in (-0.3, -0.01, 0.0, 0.01, 0.3):
        for factor in (0.5, 0.97, 1.0, 1.03, 2.0):
            sigma = fit.sigma * factor
            if sigma >= SIGMA_FLOOR:
                other = log_likelihood(fit.mu + mu_step * sigma, sigma, nu, x, finished)
                assert other <= fit.log_likelihood + 1e-6


@settings(max_examples=25, deadline=None)
@given(lengths=lists, scale=st.integers(2, 9))
def test_longer_by_a_factor_moves_mu_by_its_logarithm(lengths, scale):
    finished = np.ones(len(lengths), dtype=bool)
    one, other = fit_log_t(np.array(lengths), finished), fit_log_t(scale * np.array(lengths), finished)
    assert other.log_likelihood == pytest.approx(one.log_likelihood - len(lengths) * np.log(scale), abs=1e-5)
    if len(set(lengths)) > 4:
        assert other.mu == pytest.approx(one.mu + np.log(scale), abs=1e-3)


def test_equals_scipys_student_fit_of_the_logarithms():
    lengths, finished = draw(np.random.default_rng(3), 5.0, 0.6, 200)
    fit = fit_log_t(lengths, finished)

    def objective(theta):
        return -stats.t.logpdf(np.log(lengths), 3.5, theta[0], np.exp(theta[1])).sum()

    best = optimize.minimize(
        objective, [4.0, 0.0], method="Nelder-Mead", options={"xatol": 1e-8, "fatol": 1e-10}
    )
    assert fit.mu == pytest.approx(best.x[0], abs=1e-5)
    assert fit.sigma == pytest.approx(np.exp(best.x[1]), abs=1e-5)
    assert fit.converged
    assert fit.flags == ()


def test_censoring_removes_the_bias_of_the_cap():
    rng = np.random.default_rng(5)
    censored, naive = [], []
    for _ in range(60):
        lengths, finished = draw(rng, 4.6, 0.5, 20, cap=105)
        if finished.any():
            censored.append(fit_log_t(lengths, finished).mu)
            naive.append(fit_log_t(lengths, np.ones(20, dtype=bool)).mu)
    standard_error = np.std(censored) / np.sqrt(len(censored))
    assert np.mean(censored) == pytest.approx(4.6, abs=3 * standard_error)
    assert np.mean(naive) < 4.6 - 4 * np.std(naive) / np.sqrt(len(naive))


def test_constant_lengths_have_the_floor():
    fit = fit_log_t(np.full(20, 53), np.ones(20, dtype=bool))
    assert (fit.mu, fit.sigma, fit.flags) == (np.log(53), SIGMA_FLOOR, ("constant", "sigma_floor"))
    assert fit.converged


def test_too_many_ties_end_at_the_floor_at_the_tied_length():
    lengths = np.array([53] * 9 + [90])
    fit = fit_log_t(lengths, np.ones(10, dtype=bool))
    assert fit.flags == ("sigma_floor",)
    assert fit.sigma == SIGMA_FLOOR
    assert fit.mu == pytest.approx(np.log(53), abs=SIGMA_FLOOR)


def test_ties_below_the_limit_do_not():
    # 7 of 10 equal is below nu / (nu + 1) = 7 / 9
    fit = fit_log_t(np.array([53] * 7 + [40, 60, 70]), np.ones(10, dtype=bool))
    assert "sigma_floor" not in fit.flags
    assert fit.sigma > SIGMA_FLOOR


def test_all_cut_says_at_least_the_cap():
    fit = fit_log_t(np.array([128, 128, 100]), np.zeros(3, dtype=bool))
    assert (fit.mu, fit.sigma, fit.flags, fit.converged) == (
        np.log(128),
        SIGMA_FLOOR,
        ("all_censored",),
        False,
    )


def test_a_median_beyond_the_cap_is_flagged():
    lengths = np.array([40, 90, 128, 128, 128, 128, 128, 128])
    fit = fit_log_t(lengths, lengths < 128)
    assert fit.flags == ("median_beyond_cap",)
    assert fit.mu > np.log(128)


@pytest.mark.parametrize(
    ("lengths", "nu", "message"),
    [
        ([5, 6], 3.5, "at least 3"),
        ([5, 6, np.nan], 3.5, "got nan"),
        ([5, 6, 0], 3.5, "got 0.0"),
        ([5, -6, 7], 3.5, "got -6.0"),
        ([5, 6, np.inf], 3.5, "got inf"),
        ([5, 6, 7], 0.0, "nu"),
    ],
)
def test_bad_lengths_are_named(lengths, nu, message):
    with pytest.raises(InputError, match=message):
        fit_log_t(np.array(lengths), np.ones(len(lengths), dtype=bool), nu)
