"""The log-t distribution against scipy, its fast paths against its general one, and what is not accepted."""

from __future__ import annotations

import math
from typing import Any

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from scheduler_core.errors import InputError
from scheduler_core.lengths import LogT, expected_and_cvar
from tests.properties import examples

MUS = st.floats(0.0, 10.0)
SIGMAS = st.floats(math.log(1e-3), math.log(3.0)).map(math.exp)
NUS = st.floats(0.0, math.log(100.0)).map(math.exp) | st.just(math.inf)
CAPS = st.integers(1, 131072)


@given(MUS, SIGMAS, NUS, CAPS, st.sampled_from([0.5, 0.9, 0.99]))
@examples(60)
def test_scalar_path_equals_the_vectorised_one(
    mu: float, sigma: float, nu: float, cap: int, alpha: float
) -> None:
    mean, tail_mean = expected_and_cvar(mu, sigma, nu, cap, alpha)
    length = LogT(mu, sigma, nu)
    assert mean == pytest.approx(float(length.expected(cap)), rel=1e-11)
    assert tail_mean == pytest.approx(float(length.cvar(alpha, cap)), rel=1e-11)


@given(MUS, SIGMAS, NUS, CAPS, st.floats(0.001, 0.9999))
@examples(60)
def test_panels_equal_the_general_route(mu: float, sigma: float, nu: float, cap: int, alpha: float) -> None:
    """An array of levels takes the general route; one level takes the panels."""
    length = LogT(mu, sigma, nu)
    together = length.expected_and_cvar(alpha, cap)
    general = length.expected_and_cvar([alpha, alpha / 2], cap)
    assert float(together[0]) == pytest.approx(float(length.remaining(0.0).expected(cap)), rel=1e-11)
    assert float(together[1]) == pytest.approx(float(general[1][0]), rel=1e-11)


@pytest.mark.parametrize("nu", [0.1, 0.5, 1.0, 3.5, 100.0, 1e9, math.inf])
@pytest.mark.parametrize("sigma", [1e-12, 1e-9, 1.0, 50.0, 500.0])
@pytest.mark.parametrize("mu", [-300.0, -20.0, 5.0, 50.0, 300.0])
def test_extreme_parameters_give_ordered_numbers(mu: float, sigma: float, nu: float) -> None:
    for cap, alpha in [(1.0, 0.9), (2048.0, 0.5), (1e9, 1 - 1e-12)]:
        mean, tail_mean = expected_and_cvar(mu, sigma, nu, cap, alpha)
        assert 0 < mean <= tail_mean <= cap
        general = LogT(mu, [sigma, sigma], [nu, nu]).expected_and_cvar(alpha, cap)
        assert general[0] == pytest.approx(mean, rel=1e-8)
        assert general[1] == pytest.approx(tail_mean, rel=1e-8)


@given(MUS, SIGMAS, NUS, CAPS)
@examples(60)
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
@examples(60)
def test_quantile_and_distribution_function_are_inverse(mu: float, sigma: float, nu: float, q: float) -> None:
    length = LogT(mu, sigma, nu)
    x = float(length.ppf(q))
    assert float(length.cdf(x)) == pytest.approx(q, rel=1e-9)
    assert float(length.cdf(x)) + float(length.sf(x)) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("nu", [0.5, 1.0, 2.0, 3.5, 10.0, 30.0, 100.0, 1e5])
def test_student_t_agrees_with_scipy(nu: float) -> None:
    reference, length = stats.t(nu), LogT(0.0, 1.0, nu)
    z = np.concatenate([-np.logspace(-6, 2, 60), [0.0], np.logspace(-6, 2, 60)])
    keep = reference.sf(z) > 1e-280
    x = np.exp(z)
    np.testing.assert_allclose(length.sf(x)[keep], reference.sf(z)[keep], rtol=1e-10)
    np.testing.assert_allclose(length.cdf(1 / x)[keep], reference.cdf(-z)[keep], rtol=1e-10)
    np.testing.assert_allclose(length.logpdf(x) + z, reference.logpdf(z), rtol=1e-9, atol=1e-10)
    q = np.concatenate([np.logspace(-10, -0.01, 40), 1 - np.logspace(-6, -1, 10)])
    np.testing.assert_allclose(length.logppf(q), reference.ppf(q), rtol=1e-8, atol=1e-12)


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


def test_rows_with_different_nu_equal_each_alone() -> None:
    nus = np.array([1.5, 1.0, 3.5, np.inf, 50.0, np.inf])
    length = LogT(5.0, 0.8, nus)
    rest = length.remaining(300.0)
    rng = np.random.default_rng(2)
    draws = length.sample(rng, (4000, 6))
    for index, nu in enumerate(nus):
        alone = LogT(5.0, 0.8, nu)
        assert length.expected(2048)[index] == pytest.approx(float(alone.expected(2048)), rel=1e-11)
        assert length.cvar(0.9, 2048)[index] == pytest.approx(float(alone.cvar(0.9, 2048)), rel=1e-11)
        assert length.ppf(0.9)[index] == pytest.approx(float(alone.ppf(0.9)), rel=1e-12)
        assert rest.ppf(0.9)[index] == pytest.approx(float(alone.remaining(300.0).ppf(0.9)), rel=1e-12)
        assert stats.kstest(draws[:, index], alone.cdf).pvalue > 1e-3


def test_rows_outside_the_lattice_are_served_with_the_others() -> None:
    mu, sigma = np.array([5.0, 5.0, 300.0, -100.0]), np.array([0.8, 500.0, 0.8, 0.8])
    mean, tail_mean = LogT(mu, sigma).expected_and_cvar(0.9, 2048.0)
    for index in range(4):
        one = expected_and_cvar(mu[index], sigma[index], 3.5, 2048.0)
        assert (mean[index], tail_mean[index]) == pytest.approx(one, rel=1e-11)


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


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: LogT(np.nan, 1.0), "mu"),
        (lambda: LogT(1.0, 0.0), "sigma"),
        (lambda: LogT(1.0, np.inf), "sigma"),
        (lambda: LogT(1.0, 1.0, -1.0), "nu"),
        (lambda: LogT(1.0, 1.0, np.nan), "nu"),
        (lambda: LogT([1.0, 2.0], [1.0, 2.0, 3.0]), "broadcast"),
        (lambda: LogT(1.0, 1.0).expected(0), "max_tokens"),
        (lambda: LogT(1.0, 1.0).expected(np.inf), "max_tokens"),
        (lambda: LogT(1.0, 1.0).cvar(1.0, 10), "alpha"),
        (lambda: LogT(1.0, 1.0).ppf(1.5), "q"),
        (lambda: LogT(1.0, 1.0).remaining(-1.0), "generated_tokens"),
        (lambda: LogT(1.0, 1.0).remaining(11.0).expected(10), "max_tokens"),
        (lambda: LogT([1.0, 2.0], 1.0).cdf([1.0, 2.0, 3.0]), "broadcast"),
        (lambda: expected_and_cvar(1.0, 1.0, math.nan, 10), "nu"),
        (lambda: expected_and_cvar(math.nan, 1.0, 3.5, 10), "mu"),
        (lambda: expected_and_cvar(1.0, 1.0, 3.5, 0), "max_tokens"),
        (lambda: expected_and_cvar(1.0, 1.0, 3.5, 10, 0.2), "alpha"),
    ],
)
def test_wrong_input_is_named(call: Any, named: str) -> None:
    with pytest.raises(InputError, match=named):
        call()
