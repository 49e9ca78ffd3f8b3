"""Every number of the log-t against mpmath, at the corners and in the middle of the promised range.

The references are other forms than the ones implemented: the stop-loss integral of the survival function (an incomplete
beta function) is integrated numerically over asinh(z/sqrt(nu)) with 20 digits; for the log-normal it has a closed form,
taken with enough digits that its cancellation does no harm.
"""

from __future__ import annotations

from typing import Any

import mpmath as mp
import numpy as np
import pytest

from scheduler_core.lengths import LogT, expected_and_cvar

ALPHA = 0.9
RTOL = 1e-9


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
        (0.0, 1e-3, 1.0, 0.5, 1.0),
        (0.0, 1e-3, 100.0, 2.0, 131072.0),
        (10.0, 1e-3, 1.0, 20_000.0, 131072.0),
        (10.0, 3.0, 1.0, 0.5, 1.0),
        (10.0, 3.0, 100.0, 100.0, 131072.0),
        (0.0, 3.0, 1.0, 50.0, 131072.0),
        (0.0, 3.0, 100.0, 1000.0, 131072.0),
        (7.5, 0.0094, 1.0, 3000.0, 83424.0),
        (2.7, 0.1, 1.0, 10.0, 23.0),
        (1.6, 0.0012, 100.0, 5.5, 86226.0),
        (5.0, 0.8, 3.5, 400.0, 2048.0),
        (6.2, 1.3, 3.5, 1.0, 1024.0),
        (4.0, 0.4, 2.0, 53.0, 54.0),
        (8.0, 0.02, 30.0, 2900.0, 3000.0),
    ]
    return [(LogT(*row[:3]), StudentReference(*row[:3]), *row[3:]) for row in rows]


def log_normal_cases() -> list[Case]:
    rows = [
        (0.0, 1e-3, 0.9, 1.0),
        (0.0, 1e-3, 1.005, 131072.0),
        (0.0, 1e-3, 1000.0, 131072.0),
        (10.0, 1e-3, 22_000.0, 131072.0),
        (10.0, 1e-3, 22_200.0, 22_201.0),
        (10.0, 3.0, 0.5, 1.0),
        (10.0, 3.0, 100_000.0, 131072.0),
        (0.0, 3.0, 1000.0, 131072.0),
        (5.0, 0.8, 400.0, 2048.0),
        (5.0, 0.8, 100_000.0, 131072.0),
        (3.0, 0.2, 60.0, 64.0),
    ]
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
