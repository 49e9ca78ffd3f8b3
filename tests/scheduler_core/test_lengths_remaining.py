"""What is left of an answer of which g tokens have come: laws of X - g given X > g."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_core.lengths import Gamma, LengthDistribution, LogNormal, LogT, Weibull
from tests.properties import examples
from tests.scheduler_core.test_lengths_families import LENGTHS, LEVELS, between

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
    """In this law the way back from a height rounds; the answer must not."""
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


def test_nothing_generated_is_no_condition() -> None:
    for length in (LogT(5.0, 0.8), LogNormal(5.0, 0.8), Gamma(2.0, 80.0), Weibull(0.7, 150.0)):
        rest = length.remaining(0.0)
        assert float(rest.expected(2048)) == pytest.approx(float(length.expected(2048)), rel=1e-11)
        assert float(rest.cvar(0.9, 2048)) == pytest.approx(float(length.cvar(0.9, 2048)), rel=1e-11)
        assert float(rest.ppf(0.9)) == pytest.approx(float(length.ppf(0.9)), rel=1e-12)
        assert float(rest.sf(100.0)) == pytest.approx(float(length.sf(100.0)), rel=1e-12)


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


def test_hazard_of_the_rest_is_that_of_the_whole() -> None:
    """-d ln P(more remain) / d more at 0 is f(g)/S(g)."""
    for length in (LogT(5.0, 0.8), Gamma(2.0, 80.0), Weibull(0.7, 150.0)):
        for done in (20.0, 150.0, 3000.0):
            step = 1e-4 * done
            falling = -math.log(float(length.remaining(done).sf(step))) / step
            hazard = math.exp(float(length.logpdf(done) - length.logsf(done)))
            assert falling == pytest.approx(hazard, rel=1e-3)
