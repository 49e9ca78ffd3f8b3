"""Length distributions: what holds for every family, the log-t's fast paths, and the remaining length."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from scheduler_core.errors import InputError
from scheduler_core.lengths import (
    FAMILIES,
    Exponential,
    Gamma,
    LengthDistribution,
    LogNormal,
    LogT,
    Weibull,
    expected_and_cvar,
)
from scheduler_core.lengths.student_t import student_t_cdf, student_t_hazard, student_t_quantile
from tests.properties import examples

Make = Callable[[float], LengthDistribution]
NUS = st.floats(0.0, math.log(100.0)).map(math.exp) | st.just(math.inf)
CAPS = st.floats(0.0, math.log(131072.0)).map(math.exp)
LEVELS = st.floats(0.001, 0.999)


def between(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(math.log(low), math.log(high)).map(math.exp)


@st.composite
def scaled(draw: st.DrawFn) -> Make:
    """A family with its shape drawn, still to be given a factor of its length scale."""
    name = draw(st.sampled_from(sorted(FAMILIES)))
    scale = draw(between(1.0, math.exp(10.0)))
    if name in ("log-t", "log-normal"):
        sigma = draw(between(1e-3, 3.0))
        nu = draw(NUS) if name == "log-t" else math.inf
        return lambda factor: LogT(math.log(scale * factor), sigma, nu)
    if name == "exponential":
        return lambda factor: Exponential(scale * factor)
    k = draw(between(0.2, 100.0) if name == "gamma" else between(0.2, 20.0))
    family = Gamma if name == "gamma" else Weibull
    return lambda factor: family(k, scale * factor)


LENGTHS = scaled().map(lambda make: make(1.0))
EVERY: list[tuple[LengthDistribution, Any]] = [
    (LogT(5.0, 0.8, 3.5), None),
    (LogT(5.0, 0.8, math.inf), stats.lognorm(0.8, scale=math.exp(5.0))),
    (LogNormal(5.0, 0.8), stats.lognorm(0.8, scale=math.exp(5.0))),
    (Gamma(2.3, 80.0), stats.gamma(2.3, scale=80.0)),
    (Gamma(0.4, 300.0), stats.gamma(0.4, scale=300.0)),
    (Weibull(1.7, 200.0), stats.weibull_min(1.7, scale=200.0)),
    (Weibull(0.6, 200.0), stats.weibull_min(0.6, scale=200.0)),
    (Exponential(150.0), stats.expon(scale=150.0)),
]


@given(LENGTHS, LEVELS)
@examples(50)
def test_quantile_and_distribution_function_are_inverse(length: LengthDistribution, q: float) -> None:
    x = float(length.ppf(q))
    assume(1e-300 < x < 1e300)
    # A quantile rounded to a float moves the probability by f(x) x eps.
    slack = 1e-12 + 4e-16 * float(length.pdf(x)) * x
    assert float(length.cdf(x)) == pytest.approx(q, abs=slack)
    assert float(length.sf(x)) == pytest.approx(1 - q, abs=slack)
    assert float(length.logsf(x)) == pytest.approx(math.log(float(length.sf(x))), abs=1e-12)
    assert float(length.logcdf(x)) == pytest.approx(math.log(float(length.cdf(x))), abs=1e-12)
    assert float(length.logppf(q)) == pytest.approx(math.log(x), abs=1e-12)


@given(LENGTHS, LEVELS)
@examples(50)
def test_density_is_the_derivative_of_the_distribution_function(length: LengthDistribution, q: float) -> None:
    log_x = float(length.logppf(q))
    assume(abs(log_x) < 600)
    x = math.exp(log_x)
    density = float(length.pdf(x))
    # Central difference of order 4 in ln x, over a small part of the distribution's own width.
    step = 0.01 * min(q, 1 - q) / (density * x)
    at = np.exp(log_x + step * np.array([-2.0, -1.0, 1.0, 2.0]))
    slope = float(length.cdf(at) @ np.array([1.0, -8.0, 8.0, -1.0])) / (12 * step)
    assert slope == pytest.approx(density * x, rel=1e-6)
    assert density == pytest.approx(math.exp(float(length.logpdf(x))), rel=1e-14)


@given(scaled(), between(0.01, 100.0), LEVELS, CAPS)
@examples(50)
def test_the_scale_of_lengths_is_only_a_scale(make: Make, factor: float, q: float, cap: float) -> None:
    one, other = make(1.0), make(factor)
    x = float(one.ppf(q))
    assume(1e-290 < x < 1e290)
    slack = 1e-11 + 1e-14 * float(one.pdf(x)) * x
    assert float(other.ppf(q)) == pytest.approx(factor * x, rel=1e-11)
    assert float(other.sf(factor * x)) == pytest.approx(float(one.sf(x)), abs=slack)
    assert float(other.pdf(factor * x)) * factor == pytest.approx(float(one.pdf(x)), rel=1e-8)
    assert float(other.expected(factor * cap)) == pytest.approx(factor * float(one.expected(cap)), rel=1e-9)
    assert float(other.cvar(q, factor * cap)) == pytest.approx(factor * float(one.cvar(q, cap)), rel=1e-9)


@given(LENGTHS, CAPS, LEVELS, st.floats(1.0, 10.0))
@examples(50)
def test_capped_expectations_are_ordered(
    length: LengthDistribution, cap: float, alpha: float, more: float
) -> None:
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


@given(st.lists(st.tuples(st.floats(0, 10), between(1e-3, 3.0), CAPS), min_size=1, max_size=20), NUS, LEVELS)
@examples(12)
def test_rows_of_an_array_equal_each_alone(
    rows: list[tuple[float, float, float]], nu: float, alpha: float
) -> None:
    first, second, cap = np.array(rows).T
    level = max(alpha, 0.5)
    mean, tail_mean = LogT(first, second, nu).expected_and_cvar(level, cap)
    for index, (mu, sigma, top) in enumerate(rows):
        assert (mean[index], tail_mean[index]) == pytest.approx(
            expected_and_cvar(mu, sigma, nu, top, level), rel=1e-12
        )
    for family in (Gamma, Weibull):
        together = family(np.exp(first / 3), np.exp(first))
        found = [
            together.expected(cap),
            together.cvar(alpha, cap),
            together.ppf(alpha),
            together.logsf(cap),
            together.remaining(cap / 2).cvar(alpha, cap),
        ]
        alone = [family(math.exp(mu / 3), math.exp(mu)) for mu, _, _ in rows]
        for index, (one, top) in enumerate(zip(alone, cap, strict=True)):
            rest = one.remaining(top / 2).cvar(alpha, top)
            each = [one.expected(top), one.cvar(alpha, top), one.ppf(alpha), one.logsf(top), rest]
            assert [values[index] for values in found] == pytest.approx([float(v) for v in each], rel=1e-11)


@pytest.mark.parametrize(("length", "reference"), EVERY[1:])
def test_functions_agree_with_scipy(length: LengthDistribution, reference: Any) -> None:
    x = np.array([0.01, 1.0, 30.0, 148.4, 400.0, 900.0])
    q = np.array([1e-8, 0.01, 0.3, 0.5, 0.9, 0.999])
    for name in ("pdf", "logpdf", "cdf", "sf", "logsf", "logcdf"):
        np.testing.assert_allclose(getattr(length, name)(x), getattr(reference, name)(x), rtol=1e-10)
    np.testing.assert_allclose(length.ppf(q), reference.ppf(q), rtol=1e-8)


@pytest.mark.parametrize("length", [length for length, _ in EVERY])
def test_edges_of_the_support(length: LengthDistribution) -> None:
    outside = np.array([-np.inf, -1.0, 0.0, np.inf, np.nan])
    np.testing.assert_array_equal(length.pdf(outside), [0, 0, 0, 0, np.nan])
    np.testing.assert_array_equal(length.cdf(outside), [0, 0, 0, 1, np.nan])
    np.testing.assert_array_equal(length.logsf(outside), [0, 0, 0, -np.inf, np.nan])
    np.testing.assert_array_equal(length.ppf([0.0, 1.0]), [0, np.inf])
    assert length.shape == ()
    assert length.cdf(np.zeros((0, 3))).shape == (0, 3)


@pytest.mark.parametrize("length", [length for length, _ in EVERY])
def test_samples_agree_with_the_numbers(length: LengthDistribution) -> None:
    """KS test of 20,000 draws, and mean and tail mean of the capped draws within 4 standard errors."""
    draws = length.sample(np.random.default_rng(1), 20_000)
    assert np.array_equal(draws, length.sample(np.random.default_rng(1), 20_000))
    assert stats.kstest(draws, length.cdf).pvalue > 0.01
    cap = 600.0
    capped = np.minimum(draws, cap)
    assert float(length.expected(cap)) == pytest.approx(
        capped.mean(), abs=4 * capped.std() / math.sqrt(20_000)
    )
    # The standard error of the tail mean, from its influence function v + (X - v)+ / (1 - alpha).
    quantile = min(float(length.ppf(0.9)), cap)
    influence = quantile + np.maximum(capped - quantile, 0.0) / 0.1
    error = influence.std() / math.sqrt(20_000)
    assert float(length.cvar(0.9, cap)) == pytest.approx(influence.mean(), abs=4 * error)
    going_on = capped[capped > 100.0] - 100.0
    error = going_on.std() / math.sqrt(len(going_on))
    assert float(length.remaining(100.0).expected(cap)) == pytest.approx(going_on.mean(), abs=4 * error)


def test_exponential_has_closed_forms_and_no_memory() -> None:
    length = Exponential(150.0)
    assert float(length.expected(400)) == pytest.approx(150 * -math.expm1(-400 / 150), rel=1e-13)
    quantile = 150 * math.log(10)
    above = 150 * (math.exp(-quantile / 150) - math.exp(-600 / 150)) / 0.1
    assert float(length.cvar(0.9, 600)) == pytest.approx(quantile + above, rel=1e-13)
    for done in (0.0, 1.0, 1000.0, 50_000.0):
        rest = length.remaining(done)
        assert float(rest.expected(done + 400)) == pytest.approx(float(length.expected(400)), rel=1e-12)
        assert float(rest.cvar(0.9, done + 600)) == pytest.approx(quantile + above, rel=1e-12)
        assert float(rest.ppf(0.9)) == pytest.approx(quantile, rel=1e-12)
        assert float(rest.sf(300.0)) == pytest.approx(math.exp(-2), rel=1e-12)


def test_special_cases_coincide() -> None:
    x, cap = np.array([1.0, 150.0, 2000.0]), 700.0
    twins: list[tuple[LengthDistribution, LengthDistribution]] = [
        (Gamma(1.0, 150.0), Exponential(150.0)),
        (Weibull(1.0, 150.0), Exponential(150.0)),
        (LogT(5.0, 0.8, math.inf), LogNormal(5.0, 0.8)),
    ]
    for one, other in twins:
        np.testing.assert_allclose(one.logsf(x), other.logsf(x), rtol=1e-13)
        assert float(one.cvar(0.9, cap)) == pytest.approx(float(other.cvar(0.9, cap)), rel=1e-12)


def test_log_t_tends_to_the_log_normal() -> None:
    """The difference falls like 1/nu."""
    limit = float(LogNormal(5.0, 0.8).expected(2048))
    differences = np.array([float(LogT(5.0, 0.8, nu).expected(2048)) - limit for nu in (1e3, 1e4, 1e5)])
    np.testing.assert_allclose(differences[1:] / differences[:-1], 0.1, rtol=0.01)
    assert float(LogT(5.0, 0.8, 1e9).expected(2048)) == pytest.approx(limit, rel=1e-8)


MUS = st.floats(0.0, 10.0)
SIGMAS = st.floats(math.log(1e-3), math.log(3.0)).map(math.exp)
WHOLE_CAPS = st.integers(1, 131072)


@given(MUS, SIGMAS, NUS, WHOLE_CAPS, st.sampled_from([0.5, 0.9, 0.99]))
@examples(60)
def test_scalar_path_equals_the_vectorized_one(
    mu: float, sigma: float, nu: float, cap: int, alpha: float
) -> None:
    mean, tail_mean = expected_and_cvar(mu, sigma, nu, cap, alpha)
    length = LogT(mu, sigma, nu)
    assert mean == pytest.approx(float(length.expected(cap)), rel=1e-11)
    assert tail_mean == pytest.approx(float(length.cvar(alpha, cap)), rel=1e-11)


@given(MUS, SIGMAS, NUS, WHOLE_CAPS, st.floats(0.001, 0.9999))
@examples(60)
def test_the_lattice_equals_the_general_route(
    mu: float, sigma: float, nu: float, cap: int, alpha: float
) -> None:
    """An array of levels takes the general route; one level takes the lattice."""
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
        (lambda: Gamma(0.0, 1.0), "k"),
        (lambda: Gamma([1.0, 2.0], [1.0, 2.0, 3.0]), "broadcast"),
        (lambda: Weibull(1.0, np.nan), "scale"),
        (lambda: Exponential(0.0), "scale"),
        (lambda: Exponential(1.0).remaining(np.inf), "generated_tokens"),
    ],
)
def test_wrong_input_is_named(call: Any, named: str) -> None:
    with pytest.raises(InputError, match=named):
        call()


DONE = st.just(0.0) | between(1e-3, 20_000.0)
MORE = between(1.0, 131_072.0)


@given(LENGTHS, DONE, MORE)
@examples(60)
def test_expectation_splits_at_g(length: LengthDistribution, done: float, more: float) -> None:
    """E[min(X, M)] = E[min(X, g)] + P(X > g) E[min(X, M) - g | X > g], for every g <= M."""
    cap = done + more
    left = float(length.remaining(done).expected(cap))
    assert 0 <= left <= more * (1 + 1e-12)
    before = float(length.expected(done)) if done > 0 else 0.0
    whole = float(length.expected(cap))
    assert before + float(length.sf(done)) * left == pytest.approx(whole, rel=1e-10)


@given(LENGTHS, DONE, MORE, LEVELS)
@examples(60)
def test_remaining_risk_is_ordered(
    length: LengthDistribution, done: float, more: float, alpha: float
) -> None:
    rest, cap = length.remaining(done), done + more
    mean, tail_mean = float(rest.expected(cap)), float(rest.cvar(alpha, cap))
    assert mean <= tail_mean * (1 + 1e-11) <= more * (1 + 2e-11)
    assert tail_mean <= float(rest.cvar((1 + alpha) / 2, cap)) * (1 + 1e-11)
    assert float(rest.cvar(0.0, cap)) == pytest.approx(mean, rel=1e-10)
    assert tail_mean >= min(float(rest.ppf(alpha)), more) * (1 - 1e-11)


@given(LENGTHS, DONE, LEVELS)
@examples(60)
def test_remaining_quantile_and_survival_are_inverse(
    length: LengthDistribution, done: float, q: float
) -> None:
    rest = length.remaining(done)
    more = float(rest.ppf(q))
    # Where g + more rounds, so does the probability.
    if 1e-6 * done < more < 1e300 and more > 1e-300:
        density = float(length.pdf(done + more)) * (done + more)
        slack = 1e-10 + 1e-14 * density / max(float(length.sf(done)), 1e-30)
        assert float(rest.sf(more)) == pytest.approx(1 - q, abs=slack)
    assert float(rest.sf(0.0)) == float(rest.sf(-5.0)) == 1.0


def test_nothing_more_is_certain_and_a_little_more_nearly() -> None:
    """For this distribution the way back from a height rounds; the result must not."""
    rest = LogT(0.75, 0.1849814, 3.8333918).remaining(math.e)
    assert rest.sf(0.0) == 1.0
    hazard = float(rest.length.pdf(math.e) / rest.length.sf(math.e))
    assert 1 - float(rest.sf(1e-9)) == pytest.approx(1e-9 * hazard, rel=1e-6)
    assert float(rest.sf(rest.ppf(1e-12))) == pytest.approx(1 - 1e-12, abs=2e-16)


@given(LENGTHS, between(1.0, 5000.0), between(1.0, 5000.0), LEVELS)
@examples(50)
def test_conditions_chain(length: LengthDistribution, first: float, then: float, q: float) -> None:
    """P(more than a + b remain) = P(more than a remain) P(more than b remain, a tokens later)."""
    together = float(length.remaining(first).sf(then + 10.0))
    chained = float(length.remaining(first).sf(then)) * float(length.remaining(first + then).sf(10.0))
    assert together == pytest.approx(chained, rel=1e-9, abs=1e-300)


def test_remaining_length_of_a_heavy_tail_grows() -> None:
    """A log-t has a decreasing hazard in its tail: the longer it has gone on, the longer it will."""
    done = np.array([400.0, 1000.0, 4000.0])
    heavy = LogT(5.0, 0.5, 3.5).remaining(done)
    light = Weibull(2.0, 400.0).remaining(done)
    assert np.all(np.diff(heavy.expected(131072)) > 0)
    assert np.all(np.diff(heavy.ppf(0.9)) > 0)
    assert np.all(np.diff(light.expected(131072)) < 0)
    assert np.all(np.diff(light.cvar(0.9, 131072)) < 0)


def test_at_the_cap_nothing_is_left() -> None:
    for length in (LogT(5.0, 0.5), Gamma(3.0, 40.0)):
        rest = length.remaining(100.0)
        assert float(rest.expected(100.0)) == 0.0
        assert float(rest.cvar(0.9, 100.0)) == 0.0


def test_far_beyond_the_prediction_it_stays_finite() -> None:
    far: list[LengthDistribution] = [
        LogT(0.0, 1e-3, 100.0),
        LogNormal(0.0, 1e-3),
        Gamma(50.0, 0.1),
        Weibull(3.0, 10.0),
    ]
    for length in far:
        rest = length.remaining(1000.0)
        assert float(length.logsf(1000.0)) < -500
        assert 0 < float(rest.expected(2000)) < float(rest.cvar(0.9, 2000)) < 1000
        assert 0 < float(rest.ppf(0.5)) < float(rest.ppf(0.9)) < 1000
        assert float(rest.sf(float(rest.ppf(0.5)))) == pytest.approx(0.5, rel=1e-9)


def test_rows_broadcast() -> None:
    done, caps = np.array([[0.0], [50.0], [900.0]]), np.array([1000.0, 2000.0])
    length = LogT([4.0, 6.0], 0.7)
    rest = length.remaining(done)
    found = {
        "expected": rest.expected(caps),
        "cvar": rest.cvar(0.9, caps),
        "ppf": rest.ppf(0.9),
        "sf": rest.sf(caps),
    }
    for i in range(3):
        for j in range(2):
            one = LogT([4.0, 6.0][j], 0.7).remaining(done[i, 0])
            assert found["expected"][i, j] == pytest.approx(float(one.expected(caps[j])), rel=1e-12)
            assert found["cvar"][i, j] == pytest.approx(float(one.cvar(0.9, caps[j])), rel=1e-12)
            assert found["ppf"][i, j] == pytest.approx(float(one.ppf(0.9)), rel=1e-12)
            assert found["sf"][i, j] == pytest.approx(float(one.sf(caps[j])), rel=1e-12)


@pytest.mark.parametrize("nu", [0.5, 3.5, 100.0, math.inf])
def test_single_numbers_of_student_t_agree_with_scipy(nu: float) -> None:
    reference = stats.norm if math.isinf(nu) else stats.t(nu)
    for z in (-40.0, -1.3, 0.0, 0.7, 6.0):
        assert student_t_cdf(z, nu) == pytest.approx(reference.cdf(z), rel=1e-10)
        hazard = math.exp(reference.logpdf(z) - reference.logsf(z))
        assert student_t_hazard(z, nu) == pytest.approx(hazard, rel=1e-9)
    for q in (1e-6, 0.5, 0.975):
        assert student_t_quantile(q, nu) == pytest.approx(reference.ppf(q), rel=1e-9, abs=1e-11)
