"""The log-t distribution of lengths: its functions, its fast paths, and the remaining length."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from scheduler_core.lengths import LogT, expected_and_cvar
from scheduler_core.lengths.student_t import student_t_cdf, student_t_hazard, student_t_quantile
from tests.properties import examples


def between(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(math.log(low), math.log(high)).map(math.exp)


MUS, SIGMAS = st.floats(0.0, 10.0), between(1e-3, 3.0)
NUS = between(1.0, 100.0) | st.just(math.inf)
CAPS, LEVELS = between(1.0, 131072.0), st.floats(0.001, 0.999)
LENGTHS = st.builds(LogT, MUS, SIGMAS, NUS)


@given(LENGTHS, LEVELS)
@examples(50)
def test_density_distribution_function_and_quantile_belong_together(length: LogT, q: float) -> None:
    log_x = float(length.logppf(q))
    assume(abs(log_x) < 600)
    x = float(length.ppf(q))
    density = float(length.pdf(x))
    # A quantile rounded to a float moves the probability by f(x) x eps.
    slack = 1e-12 + 4e-16 * density * x
    assert float(length.cdf(x)) == pytest.approx(q, abs=slack)
    assert float(length.sf(x)) == pytest.approx(1 - q, abs=slack)
    assert math.log(x) == pytest.approx(log_x, abs=1e-12)
    assert density == pytest.approx(math.exp(float(length.logpdf(x))), rel=1e-14)
    # Central difference of order 4 in ln x, over a small part of the distribution's own width.
    step = 0.01 * min(q, 1 - q) / (density * x)
    at = np.exp(log_x + step * np.array([-2.0, -1.0, 1.0, 2.0]))
    slope = float(length.cdf(at) @ np.array([1.0, -8.0, 8.0, -1.0])) / (12 * step)
    assert slope == pytest.approx(density * x, rel=1e-6)


@given(LENGTHS, CAPS, LEVELS, st.floats(1.0, 10.0))
@examples(50)
def test_capped_expectations_are_ordered(length: LogT, cap: float, alpha: float, more: float) -> None:
    mean, tail_mean = (float(value) for value in length.expected_and_cvar(alpha, cap))
    assert 0 < mean <= tail_mean <= cap
    assert mean == pytest.approx(float(length.expected(cap)), rel=1e-11)
    assert tail_mean == pytest.approx(float(length.cvar(alpha, cap)), rel=1e-11)
    assert float(length.cvar(0.0, cap)) == pytest.approx(mean, rel=1e-10)
    assert tail_mean >= min(float(length.ppf(alpha)), cap) * (1 - 1e-11)
    assert tail_mean <= float(length.cvar((1 + alpha) / 2, cap)) * (1 + 1e-11)
    # Markov, and a longer cap adds at most its own length.
    assert cap * float(length.sf(cap)) <= mean * (1 + 1e-11)
    longer = float(length.expected(cap * more))
    assert mean * (1 - 1e-11) <= longer <= (mean + cap * (more - 1) * float(length.sf(cap))) * (1 + 1e-10)


@given(MUS, SIGMAS, NUS, CAPS, LEVELS)
@examples(60)
def test_every_route_gives_the_same_numbers(
    mu: float, sigma: float, nu: float, cap: float, alpha: float
) -> None:
    """An array of levels takes the general route, one level the lattice; single requests have a path of their own."""
    lattice = LogT(mu, sigma, nu).expected_and_cvar(alpha, cap)
    general = LogT([mu, 1.0], [sigma, 1.0], nu).expected_and_cvar([alpha, alpha / 2], [cap, 5.0])
    assert float(lattice[0]) == pytest.approx(float(general[0][0]), rel=1e-11)
    assert float(lattice[1]) == pytest.approx(float(general[1][0]), rel=1e-11)
    if alpha >= 0.5:
        assert expected_and_cvar(mu, sigma, nu, cap, alpha) == pytest.approx(
            [float(value) for value in lattice], rel=1e-11
        )


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


@pytest.mark.parametrize("nu", [0.5, 1.0, 2.0, 3.5, 10.0, 30.0, 100.0, 1e5, math.inf])
def test_student_t_agrees_with_scipy(nu: float) -> None:
    reference, length = stats.norm() if math.isinf(nu) else stats.t(nu), LogT(0.0, 1.0, nu)
    z = np.concatenate([-np.logspace(-6, 2, 60), [0.0], np.logspace(-6, 2, 60)])
    keep = (reference.sf(z) > 1e-280) & (np.abs(z) < 30 if math.isinf(nu) else True)
    x = np.exp(z)
    np.testing.assert_allclose(length.sf(x)[keep], reference.sf(z)[keep], rtol=1e-10)
    np.testing.assert_allclose(length.cdf(1 / x)[keep], reference.cdf(-z)[keep], rtol=1e-10)
    np.testing.assert_allclose(length.logpdf(x) + z, reference.logpdf(z), rtol=1e-9, atol=1e-10)
    q = np.concatenate([np.logspace(-10, -0.01, 40), 1 - np.logspace(-6, -1, 10)])
    np.testing.assert_allclose(length.logppf(q), reference.ppf(q), rtol=1e-8, atol=1e-12)
    for at in () if math.isinf(nu) else (-40.0, -1.3, 0.0, 0.7, 6.0):
        hazard = math.exp(reference.logpdf(at) - reference.logsf(at))
        assert student_t_hazard(at, nu) == pytest.approx(hazard, rel=1e-8)
        assert student_t_cdf(at, nu) == pytest.approx(reference.cdf(at), rel=1e-8)
    for level in (1e-6, 0.5, 0.975):
        expected = pytest.approx(reference.ppf(level), rel=1e-9, abs=1e-11)
        assert student_t_quantile(level, nu) == expected


@pytest.mark.parametrize("nu", [3.5, math.inf])
def test_edges_of_the_support(nu: float) -> None:
    length = LogT(5.0, 0.8, nu)
    outside = np.array([-np.inf, -1.0, 0.0, np.inf, np.nan])
    np.testing.assert_array_equal(length.pdf(outside), [0, 0, 0, 0, np.nan])
    np.testing.assert_array_equal(length.cdf(outside), [0, 0, 0, 1, np.nan])
    np.testing.assert_array_equal(length.logsf(outside), [0, 0, 0, -np.inf, np.nan])
    np.testing.assert_array_equal(length.ppf([0.0, 1.0]), [0, np.inf])
    assert length.cdf(np.zeros((0, 3))).shape == (0, 3)


def test_rows_broadcast_and_equal_each_alone() -> None:
    """Parameters [3, 1] with an infinite nu among them, arguments [2]."""
    mu, sigma, nu = np.array([[3.0], [5.0], [6.0]]), 0.8, np.array([[1.5], [np.inf], [3.5]])
    done, caps = np.array([0.0, 50.0]), np.array([1000.0, 2000.0])

    def numbers(length: LogT, done: Any, caps: Any) -> list[Any]:
        return [
            length.expected(caps), length.expected(caps, done), length.cvar(0.9, caps), length.sf(caps),
            length.logppf(0.3) + 0 * caps,
        ]  # fmt: skip

    together = numbers(LogT(mu, sigma, nu), done, caps)
    for i in range(3):
        for j in range(2):
            alone = numbers(LogT(mu[i, 0], sigma, nu[i, 0]), done[j], caps[j])
            assert [values[i, j] for values in together] == pytest.approx(
                [float(v) for v in alone], rel=1e-11
            )
    assert isinstance(float(LogT(5.0, 0.8).expected(100)), float)
    assert LogT(np.zeros(0), np.ones(0)).expected(10).shape == (0,)


def test_what_remains() -> None:
    """In a heavy tail the more the longer it has gone on; nothing at max_tokens; finite far beyond the prediction."""
    left = LogT(5.0, 0.5, 3.5).expected(131072, np.array([400.0, 1000.0, 4000.0]))
    assert np.all(np.diff(left) > 0)
    assert float(LogT(5.0, 0.5).expected(100.0, 100.0)) == 0.0
    for nu in (100.0, math.inf):
        refuted = LogT(0.0, 1e-3, nu)
        assert float(refuted.logsf(1000.0)) < -500
        assert 0 < float(refuted.expected(2000, 1000.0)) < 1000
