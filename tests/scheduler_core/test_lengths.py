"""The log-t distribution against scipy, against mpmath's quadrature, and against its own laws."""

from __future__ import annotations

import math
from typing import Any

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from scheduler_core import student_t
from scheduler_core.errors import InputError
from scheduler_core.lengths import LogT, expected_and_cvar

MUS = st.floats(0.0, 10.0)
SIGMAS = st.floats(math.log(1e-3), math.log(3.0)).map(math.exp)
NUS = st.floats(0.0, math.log(100.0)).map(math.exp)
CAPS = st.integers(1, 131072)

#: Corners of the range for which accuracy is promised, and some of its inside.
CASES = [
    (0.0, 1e-3, 1.0, 1),
    (0.0, 1e-3, 100.0, 131072),
    (10.0, 1e-3, 1.0, 131072),
    (10.0, 3.0, 1.0, 1),
    (10.0, 3.0, 100.0, 131072),
    (0.0, 3.0, 1.0, 131072),
    (0.0, 3.0, 100.0, 131072),
    (7.5, 0.0094, 1.0, 83424),
    (2.7, 0.1, 1.0, 23),
    (1.6, 0.0012, 100.0, 86226),
    (5.0, 0.8, 3.5, 2048),
    (6.2, 1.3, 3.5, 1024),
    (4.0, 0.4, 2.0, 54),
    (8.0, 0.02, 30.0, 3000),
]


def exact(mu: float, sigma: float, nu: float, cap: float, alpha: float | None) -> float:
    """E[min(X, M)], or its CVaR, from 1 - integral of the survival function in z, by mpmath with 18 digits.

    E = integral over x from 0 to M of P(X > x): another form than the one implemented.
    """
    with mp.workdps(18):
        mu_, sigma_, nu_, cap_ = (mp.mpf(value) for value in (mu, sigma, nu, cap))
        z_cap = (mp.log(cap_) - mu_) / sigma_

        def survival(z: Any) -> Any:
            tail = mp.betainc(nu_ / 2, mp.mpf(1) / 2, 0, nu_ / (nu_ + z * z), regularized=True) / 2
            return tail if z >= 0 else 1 - tail

        def tokens_per_s(s: Any) -> Any:
            z = mp.sinh(s) * mp.sqrt(nu_)
            return mp.exp(mu_ + sigma_ * z) * survival(z) * sigma_ * mp.sqrt(nu_) * mp.cosh(s)

        def split(low: Any, high: Any) -> list[Any]:
            inner = [mp.mpf(value) / 10 for value in (-10, -5, -2, -1, 0, 1, 2, 5, 10)]
            points = [*mp.linspace(low, high, 9), *(value for value in inner if low < value < high)]
            return sorted(set(points))

        s_cap = mp.asinh(z_cap / mp.sqrt(nu_))
        if alpha is None:
            lowest = mp.asinh((min(z_cap, 0) - 60 / sigma_) / mp.sqrt(nu_))
            return float(mp.quad(tokens_per_s, split(lowest, s_cap)))
        start = float(stats.t(nu).ppf(alpha))
        z_alpha = mp.findroot(lambda z: survival(z) - (1 - mp.mpf(alpha)), start)
        if z_alpha >= z_cap:
            return cap
        above = mp.quad(tokens_per_s, split(mp.asinh(z_alpha / mp.sqrt(nu_)), s_cap))
        return float(mp.exp(mu_ + sigma_ * z_alpha) + above / (1 - mp.mpf(alpha)))


@pytest.mark.parametrize(("mu", "sigma", "nu", "cap"), CASES)
def test_expectation_and_cvar_agree_with_mpmath(mu: float, sigma: float, nu: float, cap: int) -> None:
    length = LogT(mu, sigma, nu)
    assert float(length.expected(cap)) == pytest.approx(exact(mu, sigma, nu, cap, None), rel=1e-10)
    assert float(length.cvar(0.9, cap)) == pytest.approx(exact(mu, sigma, nu, cap, 0.9), rel=1e-10)


@given(MUS, SIGMAS, NUS, CAPS, st.sampled_from([0.5, 0.9, 0.99]))
@settings(max_examples=200, deadline=None)
def test_scalar_path_equals_the_vectorised_one(
    mu: float, sigma: float, nu: float, cap: int, alpha: float
) -> None:
    mean, tail_mean = expected_and_cvar(mu, sigma, nu, cap, alpha)
    length = LogT(mu, sigma, nu)
    assert mean == pytest.approx(float(length.expected(cap)), rel=1e-11)
    assert tail_mean == pytest.approx(float(length.cvar(alpha, cap)), rel=1e-11)


@given(MUS, SIGMAS, NUS, CAPS)
@settings(max_examples=200, deadline=None)
def test_laws_of_the_capped_length(mu: float, sigma: float, nu: float, cap: int) -> None:
    length = LogT(mu, sigma, nu)
    mean, cvar50, cvar90 = (
        float(v) for v in (length.expected(cap), length.cvar(0.5, cap), length.cvar(0.9, cap))
    )
    assert 0 < mean <= cap * (1 + 1e-11)
    assert mean <= cvar50 * (1 + 1e-11) <= cvar90 * (1 + 2e-11) <= cap * (1 + 3e-11)
    assert cvar90 >= min(float(length.ppf(0.9)), cap) * (1 - 1e-11)
    assert float(length.expected(2 * cap)) >= mean * (1 - 1e-11)
    assert float(length.cvar(0.0, cap)) == pytest.approx(mean, rel=1e-10)
    assert float(LogT(mu + 0.1, sigma, nu).expected(cap)) >= mean * (1 - 1e-11)


@given(MUS, st.floats(0.05, 2.0), NUS, st.floats(0.001, 0.999))
@settings(max_examples=200, deadline=None)
def test_quantile_and_distribution_function_are_inverse(mu: float, sigma: float, nu: float, q: float) -> None:
    length = LogT(mu, sigma, nu)
    x = float(length.ppf(q))
    assert float(length.cdf(x)) == pytest.approx(q, rel=1e-9)
    assert float(length.cdf(x)) + float(length.sf(x)) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("nu", [0.5, 1.0, 2.0, 3.5, 10.0, 30.0, 100.0, 1e5])
def test_student_t_agrees_with_scipy(nu: float) -> None:
    reference = stats.t(nu)
    z = np.concatenate([-np.logspace(-6, 2, 60), [0.0], np.logspace(-6, 2, 60)])
    keep = reference.sf(z) > 1e-280
    np.testing.assert_allclose(student_t.sf(z, nu)[keep], reference.sf(z)[keep], rtol=1e-10)
    np.testing.assert_allclose(student_t.cdf(-z, nu)[keep], reference.cdf(-z)[keep], rtol=1e-10)
    np.testing.assert_allclose(student_t.logpdf(z, nu), reference.logpdf(z), rtol=1e-9, atol=1e-10)
    q = np.concatenate([np.logspace(-10, -0.01, 40), 1 - np.logspace(-6, -1, 10)])
    np.testing.assert_allclose(student_t.ppf(q, nu), reference.ppf(q), rtol=1e-8, atol=1e-12)


def test_density_and_distribution_agree_with_scipy() -> None:
    x = np.array([0.5, 1.0, 30.0, 148.4, 900.0, 5e4])
    mu, sigma, nu = 5.0, 0.8, 3.5
    z = (np.log(x) - mu) / sigma
    length = LogT(mu, sigma, nu)
    np.testing.assert_allclose(length.pdf(x), stats.t(nu).pdf(z) / (sigma * x), rtol=1e-11)
    np.testing.assert_allclose(length.cdf(x), stats.t(nu).cdf(z), rtol=1e-11)
    np.testing.assert_allclose(length.sf(x), stats.t(nu).sf(z), rtol=1e-11)
    np.testing.assert_allclose(length.logsf(x), stats.t(nu).logsf(z), rtol=1e-11)


def test_far_tails_keep_their_relative_accuracy() -> None:
    log_sf = float(LogT(0.0, 1e-3, 100.0).logsf(131072.0))
    with mp.workdps(40):
        z = mp.log(131072) / mp.mpf("1e-3")
        exact_log = mp.log(mp.betainc(50, mp.mpf(1) / 2, 0, 100 / (100 + z * z), regularized=True) / 2)
    assert log_sf == pytest.approx(float(exact_log), rel=1e-10)


def test_edges_of_the_support() -> None:
    length = LogT(5.0, 0.8)
    assert length.pdf(0.0) == length.pdf(-3.0) == length.cdf(0.0) == length.cdf(-1.0) == 0.0
    assert length.sf(0.0) == 1.0
    assert length.cdf(np.inf) == 1.0
    assert length.logpdf(-1.0) == -np.inf
    assert length.ppf(0.0) == 0.0
    assert length.ppf(1.0) == np.inf
    assert length.ppf(0.5) == pytest.approx(math.exp(5.0))
    assert np.isnan(length.pdf(np.nan))


def test_parameters_and_arguments_broadcast() -> None:
    mu, sigma, caps = np.array([[3.0], [5.0]]), np.array([0.3, 0.6, 0.9]), np.array([64.0, 128.0, 256.0])
    length = LogT(mu, sigma)
    assert length.shape == (2, 3)
    expected = length.expected(caps)
    assert expected.shape == (2, 3)
    for i in range(2):
        for j in range(3):
            assert expected[i, j] == pytest.approx(
                float(LogT(mu[i, 0], sigma[j]).expected(caps[j])), rel=1e-12
            )
    assert length.cvar(0.9, 100).shape == (2, 3)
    assert isinstance(float(LogT(5.0, 0.8).expected(100)), float)
    assert LogT(np.zeros(0), np.ones(0)).expected(10).shape == (0,)


def test_many_rows_equal_one_row() -> None:
    rng = np.random.default_rng(0)
    mu, sigma = rng.uniform(0, 10, 9000), rng.uniform(0.1, 2, 9000)
    together = LogT(mu, sigma).expected(2048)
    for i in (0, 4095, 4096, 8999):
        assert together[i] == pytest.approx(float(LogT(mu[i], sigma[i]).expected(2048)), rel=1e-12)


def test_samples_follow_the_distribution_and_the_seed() -> None:
    length = LogT(5.0, 0.8, 3.5)
    draws = length.sample(np.random.default_rng(1), 20_000)
    assert np.array_equal(draws, length.sample(np.random.default_rng(1), 20_000))
    assert stats.kstest(draws, length.cdf).pvalue > 0.01
    capped = np.minimum(draws, 2048)
    error = capped.std() / math.sqrt(capped.size)
    assert float(length.expected(2048)) == pytest.approx(capped.mean(), abs=4 * error)
    worst = np.sort(capped)[-2000:]
    assert float(length.cvar(0.9, 2048)) == pytest.approx(worst.mean(), rel=0.03)
    assert LogT(np.zeros(3), np.ones(3)).sample(np.random.default_rng(0)).shape == (3,)


@given(MUS, st.floats(0.05, 2.0), NUS, st.floats(0.0, 20000.0), st.integers(1, 20000))
@settings(max_examples=150, deadline=None)
def test_remaining_length_is_consistent(mu: float, sigma: float, nu: float, done: float, more: int) -> None:
    """E[min(X,M)] = E[min(X,g)] + P(X > g) E[min(X,M) - g | X > g], for every g <= M."""
    length, cap = LogT(mu, sigma, nu), done + more
    rest = length.remaining(done)
    left = float(rest.expected(cap))
    assert 0 <= left <= more * (1 + 1e-9)
    before = float(length.expected(done)) if done > 0 else 0.0
    assert before + float(length.sf(done)) * left == pytest.approx(float(length.expected(cap)), rel=1e-6)
    median = float(rest.ppf(0.5))
    if median > 1e-6 * done:
        assert float(rest.sf(median)) == pytest.approx(0.5, rel=1e-6)


def test_remaining_length_of_a_heavy_tail_grows() -> None:
    """A log-t has a decreasing hazard in its tail: the longer it has gone on, the longer it will."""
    length = LogT(5.0, 0.5, 3.5)
    done = np.array([0.0, 400.0, 1000.0, 4000.0])
    left = length.remaining(done).expected(131072)
    assert np.all(np.diff(left[1:]) > 0)
    assert left[0] == pytest.approx(float(length.expected(131072)), rel=1e-9)
    assert float(length.remaining(100.0).expected(100)) == pytest.approx(0.0, abs=1e-9)


def test_remaining_length_far_beyond_the_prediction_stays_finite() -> None:
    left = LogT(0.0, 1e-3, 100.0).remaining(1000.0)
    assert 0 < float(left.expected(2000)) < 1000
    assert 0 < float(left.ppf(0.5)) < 1000


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: LogT(np.nan, 1.0), "mu"),
        (lambda: LogT(1.0, 0.0), "sigma"),
        (lambda: LogT(1.0, np.inf), "sigma"),
        (lambda: LogT(1.0, 1.0, -1.0), "nu"),
        (lambda: LogT([1.0, 2.0], [1.0, 2.0, 3.0]), "broadcast"),
        (lambda: LogT(1.0, 1.0).expected(0), "max_tokens"),
        (lambda: LogT(1.0, 1.0).expected(np.inf), "max_tokens"),
        (lambda: LogT(1.0, 1.0).cvar(1.0, 10), "alpha"),
        (lambda: LogT(1.0, 1.0).ppf(1.5), "q"),
        (lambda: LogT(1.0, 1.0).remaining(-1.0), "generated_tokens"),
        (lambda: LogT(1.0, 1.0).remaining(11.0).expected(10), "max_tokens"),
        (lambda: expected_and_cvar(math.nan, 1.0, 3.5, 10), "mu"),
        (lambda: expected_and_cvar(1.0, 1.0, 3.5, 0), "max_tokens"),
        (lambda: expected_and_cvar(1.0, 1.0, 3.5, 10, 0.2), "alpha"),
    ],
)
def test_wrong_input_is_named(call: Any, named: str) -> None:
    with pytest.raises(InputError, match=named):
        call()
