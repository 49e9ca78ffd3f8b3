"""Laws that every length distribution obeys, whatever its family, with parameters over the range of real answers."""

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


def test_the_families_are_named() -> None:
    assert {
        "log-t": LogT,
        "log-normal": LogNormal,
        "gamma": Gamma,
        "weibull": Weibull,
        "exponential": Exponential,
    } == FAMILIES


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


@given(scaled(), between(1.01, 3.0), CAPS, LEVELS)
@examples(50)
def test_a_larger_scale_means_longer_answers(make: Make, factor: float, cap: float, q: float) -> None:
    one, longer = make(1.0), make(factor)
    assert float(longer.sf(cap)) >= float(one.sf(cap))
    assert float(longer.logppf(q)) > float(one.logppf(q))
    assert float(longer.expected(cap)) >= float(one.expected(cap)) * (1 - 1e-11)
    assert float(longer.cvar(q, cap)) >= float(one.cvar(q, cap)) * (1 - 1e-11)


@given(between(0.2, 50.0), between(1.01, 3.0), CAPS)
@examples(50)
def test_shapes_order_the_lengths(k: float, factor: float, cap: float) -> None:
    """More stages of a gamma take longer; a wider log-t and a smaller Weibull shape have more beyond the scale."""
    assert float(Gamma(k * factor, 90.0).expected(cap)) >= float(Gamma(k, 90.0).expected(cap)) * (1 - 1e-12)
    beyond = 90.0 * (1.0 + cap)
    assert float(Weibull(k, 90.0).logsf(beyond)) >= float(Weibull(k * factor, 90.0).logsf(beyond))
    sigma, mu = min(k, 3.0), math.log(90.0)
    assert float(LogT(mu, sigma * factor).logsf(beyond)) > float(LogT(mu, sigma).logsf(beyond))


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


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: Gamma(0.0, 1.0), "k"),
        (lambda: Gamma(1.0, -1.0), "scale"),
        (lambda: Gamma([1.0, 2.0], [1.0, 2.0, 3.0]), "broadcast"),
        (lambda: Weibull(np.inf, 1.0), "k"),
        (lambda: Weibull(1.0, np.nan), "scale"),
        (lambda: Exponential(0.0), "scale"),
        (lambda: LogNormal(np.inf, 1.0), "mu"),
        (lambda: LogNormal(1.0, 0.0), "sigma"),
        (lambda: Exponential(1.0).expected(-1.0), "max_tokens"),
        (lambda: Gamma(1.0, 1.0).cvar(1.0, 10.0), "alpha"),
        (lambda: Weibull(1.0, 1.0).ppf(-0.1), "q"),
        (lambda: Exponential(1.0).remaining(np.inf), "generated_tokens"),
        (lambda: Exponential(1.0).remaining(5.0).cvar(0.9, 4.0), "max_tokens"),
    ],
)
def test_wrong_input_is_named(call: Any, named: str) -> None:
    with pytest.raises(InputError, match=named):
        call()
