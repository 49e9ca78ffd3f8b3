"""The log-t distribution of lengths: its functions, fast paths and remaining length, and every number against mpmath.

The references in mpmath are other forms than the ones implemented: the stop-loss integral of the survival function (an
incomplete beta function) is integrated numerically over asinh(z/sqrt(nu)) with 20 digits; for the log-normal it has a closed
form, taken with enough digits that its cancellation does no harm.
"""

import math
from typing import Any

import mpmath as mp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from scheduler_core.lengths import LogT, expected_and_cvar
from scheduler_core.lengths.student_t import student_t_cdf, student_t_hazard, student_t_quantile
from scheduler_core.lengths.table import LengthTable
from scheduler_core.prediction.predictions import LengthPrediction
from tests.properties import examples

ALPHA = 0.9
RTOL = 1e-9
predictions = st.tuples(
    st.floats(1.5, 8.0), st.floats(-6.9, 0.18).map(math.exp), st.sampled_from([3.5, 10.0, 1e9])
).map(lambda drawn: LengthPrediction(*drawn))


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
def test_each_route_gives_equal_numbers(mu: float, sigma: float, nu: float, cap: float, alpha: float) -> None:
    """An array of levels takes the general route, one level the lattice; single requests have a path of their own."""
    lattice = LogT(mu, sigma, nu).expected_and_cvar(alpha, cap)
    general = LogT([mu, 1.0], [sigma, 1.0], nu).expected_and_cvar([alpha, alpha / 2], [cap, 5.0])
    assert float(lattice[0]) == pytest.approx(float(general[0][0]), rel=1e-11)
    assert float(lattice[1]) == pytest.approx(float(general[1][0]), rel=1e-11)
    if alpha >= 0.5:
        single = expected_and_cvar(mu, sigma, nu, cap, alpha)
        assert single == pytest.approx([float(value) for value in lattice], rel=1e-11)


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
        assert student_t_quantile(level, nu) == pytest.approx(reference.ppf(level), rel=1e-9, abs=1e-11)


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
            expected = pytest.approx([float(value) for value in alone], rel=1e-11)
            assert [values[i, j] for values in together] == expected
    assert isinstance(float(LogT(5.0, 0.8).expected(100)), float)
    assert LogT(np.zeros(0), np.ones(0)).expected(10).shape == (0,)


def test_what_remains() -> None:
    """In a heavy tail the more the longer it has gone on; nothing at max_tokens; finite far beyond the prediction."""
    assert np.all(np.diff(LogT(5.0, 0.5, 3.5).expected(131072, np.array([400.0, 1000.0, 4000.0]))) > 0)
    assert float(LogT(5.0, 0.5).expected(100.0, 100.0)) == 0.0
    for nu in (100.0, math.inf):
        refuted = LogT(0.0, 1e-3, nu)
        assert float(refuted.logsf(1000.0)) < -500
        assert 0 < float(refuted.expected(2000, 1000.0)) < 1000


class StudentReference:
    """In mpmath: sf, P(X > x), and stop_loss, the integral of it over [low, high]."""

    digits = 20

    def __init__(self, mu: float, sigma: float, nu: float) -> None:
        self.mu, self.sigma, self.nu = mp.mpf(mu), mp.mpf(sigma), mp.mpf(nu)

    def _height(self, x: Any) -> Any:
        return (mp.log(x) - self.mu) / self.sigma

    def _survival(self, z: Any) -> Any:
        tail = mp.betainc(self.nu / 2, mp.mpf(1) / 2, 0, self.nu / (self.nu + z * z), regularized=True) / 2
        return tail if z >= 0 else 1 - tail

    def sf(self, x: Any) -> Any:
        return self._survival(self._height(x))

    def stop_loss(self, low: Any, high: Any) -> Any:
        root = mp.sqrt(self.nu)
        end = self._height(high)
        # Below this a length counts for less than exp(-60) of the whole.
        start = self._height(low) if low > 0 else min(end, 0) - 60 / self.sigma
        begin, stop = mp.asinh(start / root), mp.asinh(end / root)

        def tokens_per_step(s: Any) -> Any:
            z = root * mp.sinh(s)
            return mp.exp(self.mu + self.sigma * z) * self._survival(z) * self.sigma * root * mp.cosh(s)

        inner = [mp.mpf(value) / 10 for value in (-10, -5, -2, -1, 0, 1, 2, 5, 10)]
        # A condition cuts the density off at its start, where it may fall steeply.
        power = 3 if low > 0 else 1
        points = [begin + (stop - begin) * (mp.mpf(step) / 12) ** power for step in range(13)]
        points += [value for value in inner if begin < value < stop]
        # The rule refines until its error is small beside one, so the integrand must be of that size.
        scale = max(tokens_per_step(value) for value in points)
        within = mp.quad(lambda s: tokens_per_step(s) / scale, sorted(set(points)), method="gauss-legendre")
        return scale * within


class NormalReference:
    """As `StudentReference`."""

    digits = 60

    def __init__(self, mu: float, sigma: float) -> None:
        self.mu, self.sigma = mp.mpf(mu), mp.mpf(sigma)

    def sf(self, x: Any) -> Any:
        z = (mp.log(x) - self.mu) / self.sigma
        return mp.erfc(z / mp.sqrt(2)) / 2

    def stop_loss(self, low: Any, high: Any) -> Any:
        return self._above(low) - self._above(high)

    def _above(self, x: Any) -> Any:
        """Integral of the survival function beyond x."""
        mean = mp.exp(self.mu + self.sigma**2 / 2)
        if x == 0:
            return mean
        z = (mp.log(x) - self.mu) / self.sigma
        return mean * mp.erfc((z - self.sigma) / mp.sqrt(2)) / 2 - x * self.sf(x)


Reference = StudentReference | NormalReference
Case = tuple[LogT, Reference, float, float]


def log_t_cases() -> list[Case]:
    """(mu, sigma, nu, generated tokens, max_tokens): corners, and a few inside."""
    rows = [
        (0.0, 1e-3, 1.0, 0.5, 1.0), (0.0, 1e-3, 100.0, 2.0, 131072.0),
        (10.0, 1e-3, 1.0, 20_000.0, 131072.0), (10.0, 3.0, 1.0, 0.5, 1.0),
        (10.0, 3.0, 100.0, 100.0, 131072.0), (0.0, 3.0, 1.0, 50.0, 131072.0),
        (0.0, 3.0, 100.0, 1000.0, 131072.0), (7.5, 0.0094, 1.0, 3000.0, 83424.0),
        (2.7, 0.1, 1.0, 10.0, 23.0), (1.6, 0.0012, 100.0, 5.5, 86226.0), (5.0, 0.8, 3.5, 400.0, 2048.0),
        (6.2, 1.3, 3.5, 1.0, 1024.0), (4.0, 0.4, 2.0, 53.0, 54.0), (8.0, 0.02, 30.0, 2900.0, 3000.0),
    ]  # fmt: skip
    return [(LogT(*row[:3]), StudentReference(*row[:3]), *row[3:]) for row in rows]


def log_normal_cases() -> list[Case]:
    rows = [
        (0.0, 1e-3, 0.9, 1.0), (0.0, 1e-3, 1.005, 131072.0), (0.0, 1e-3, 1000.0, 131072.0),
        (10.0, 1e-3, 22_000.0, 131072.0), (10.0, 1e-3, 22_200.0, 22_201.0), (10.0, 3.0, 0.5, 1.0),
        (10.0, 3.0, 100_000.0, 131072.0), (0.0, 3.0, 1000.0, 131072.0), (5.0, 0.8, 400.0, 2048.0),
        (5.0, 0.8, 100_000.0, 131072.0), (3.0, 0.2, 60.0, 64.0),
    ]  # fmt: skip
    return [(LogT(*row[:2], np.inf), NormalReference(*row[:2]), *row[2:]) for row in rows]


LOG_T, LOG_NORMAL = log_t_cases(), log_normal_cases()


@pytest.mark.parametrize(("length", "reference", "done", "cap"), [*LOG_T, *LOG_NORMAL])
def test_every_number_agrees_with_mpmath(length: LogT, reference: Reference, done: float, cap: float) -> None:
    """Quantiles are checked by the probability beyond them, which a float's rounding moves by f(x) x eps."""
    with mp.workdps(reference.digits):
        g, top, beyond = mp.mpf(done), mp.mpf(cap), 1 - mp.mpf(ALPHA)
        now = reference.sf(g)
        assert float(length.sf(done)) == pytest.approx(float(now), rel=RTOL, abs=1e-300)
        assert float(length.logsf(done)) == pytest.approx(float(mp.log(now)), rel=RTOL)
        assert float(length.cdf(done)) == pytest.approx(float(1 - now), rel=RTOL, abs=1e-15)

        before, after = reference.stop_loss(mp.mpf(0), g), reference.stop_loss(g, top)
        assert float(length.expected(cap)) == pytest.approx(float(before + after), rel=RTOL)
        assert float(length.expected(cap, done)) == pytest.approx(float(after / now), rel=RTOL)
        quantile = mp.mpf(float(length.ppf(ALPHA)))
        assert float(reference.sf(quantile) / beyond) == pytest.approx(1, rel=RTOL)
        tail_mean = top
        if quantile < top:
            tail_mean = quantile + reference.stop_loss(quantile, top) / beyond
        assert float(length.cvar(ALPHA, cap)) == pytest.approx(float(tail_mean), rel=RTOL)
        if done > 0:
            mean, _ = expected_and_cvar(float(length.mu), float(length.sigma), float(length.nu), done)
            assert mean == pytest.approx(float(before), rel=RTOL)


def test_far_tails_keep_their_relative_accuracy() -> None:
    for length, reference in (
        (LogT(0.0, 1e-3, 100.0), StudentReference(0.0, 1e-3, 100.0)),
        (LogT(0.0, 0.5, np.inf), NormalReference(0.0, 0.5)),
    ):
        for x in (1e4, 131072.0):
            with mp.workdps(40):
                exact = float(mp.log(reference.sf(mp.mpf(x))))
            assert exact < -150
            assert float(length.logsf(x)) == pytest.approx(exact, rel=1e-12)
    x = np.array([1e-6, 1e-3, 1.0])
    length, reference = LogT(5.0, 0.3, 3.5), StudentReference(5.0, 0.3, 3.5)
    with mp.workdps(60):
        exact = [float(1 - reference.sf(mp.mpf(float(value)))) for value in x]
    np.testing.assert_allclose(length.cdf(x), exact, rtol=1e-11)
    np.testing.assert_allclose(length.ppf(exact), x, rtol=1e-9)


def table_of(length: LengthPrediction, max_tokens: int) -> LengthTable:
    return LengthTable(length.mu, length.sigma, length.nu, max_tokens)


@given(seen=predictions, cap=st.sampled_from([1, 16, 256, 4096, 15_000]), share=st.floats(0.0, 2.0))
@examples(30)
def test_the_table_agrees_with_the_distribution(seen: LengthPrediction, cap: int, share: float) -> None:
    table, exact = table_of(seen, cap), seen.distribution()
    generated = share * math.exp(seen.mu)
    if generated >= cap or generated < 1.0 or exact.sf(generated) < 1e-4:
        generated = 0.0
    rest = float(exact.expected(cap, generated))
    assert table.expected_remaining(generated) == pytest.approx(rest, rel=0.02, abs=0.1)


def test_nothing_is_left_at_the_cap_and_everything_where_the_prediction_is_refuted() -> None:
    table = table_of(LengthPrediction(math.log(50), 1e-6, 3.5), 200)
    assert (table.expected_remaining(200), table.expected_remaining(150)) == (0.0, 50.0)
    assert table.expected_remaining() == pytest.approx(50.0, rel=1e-3)
