"""Special functions and derivatives of the compiled loops."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import integrate, special, stats

from training.fitting.kernels import GAMMA, LOG_T, WEIBULL
from training.fitting.kernels.likelihood import Observations, cdf, constants_of, evaluate
from training.fitting.kernels.special import (
    digamma,
    gamma_cdf,
    gamma_moments,
    t_constants,
    t_log_constant,
    t_log_sf_and_hazard,
    t_sf,
    trigamma,
)


@pytest.mark.parametrize("nu", [0.7, 1.0, 3.5, 20.0, 100.0, 5000.0, math.inf])
def test_student_tail_equals_scipys(nu):
    law = stats.norm if math.isinf(nu) else stats.t(nu)
    constants = t_constants(nu)
    assert constants[0] == pytest.approx(float(law.logpdf(0.0)), abs=1e-11)  # scipy loses digits at large nu
    for z in (-50.0, -3.0, -0.4, 0.0, 1e-3, 0.7, 2.0, 9.0, 30.0, 200.0):
        assert t_sf(z, nu, constants) == pytest.approx(float(law.sf(z)), rel=1e-10, abs=1e-300)
        if law.sf(z) > 1e-280:
            log_sf, hazard = t_log_sf_and_hazard(z, nu, constants)
            assert log_sf == pytest.approx(float(np.log(law.sf(z))), rel=1e-10, abs=1e-12)
            assert hazard == pytest.approx(float(law.pdf(z) / law.sf(z)), rel=1e-8)


def test_normal_hazard_far_out_follows_mills():
    log_sf, hazard = t_log_sf_and_hazard(1000.0, math.inf, t_constants(math.inf))
    assert hazard == pytest.approx(1000.0 + 1.0 / 1000.0, rel=1e-9)
    assert log_sf == pytest.approx(float(stats.norm.logsf(1000.0)), rel=1e-12)


@pytest.mark.parametrize("x", [1e-3, 0.2, 1.0, 7.5, 40.0, 1e6])
def test_polygammas_equal_scipys(x):
    assert digamma(x) == pytest.approx(float(special.digamma(x)), rel=1e-12, abs=1e-12)
    assert trigamma(x) == pytest.approx(float(special.polygamma(1, x)), rel=1e-12)


@pytest.mark.parametrize("a", [0.05, 0.5, 2.5, 30.0, 4000.0, 1e6])
def test_gamma_distribution_equals_scipys(a):
    for x in a * np.array([1e-3, 0.3, 0.97, 1.0, 1.02, 1.5, 4.0]):
        assert gamma_cdf(a, x) == pytest.approx(float(special.gammainc(a, x)), rel=1e-9, abs=1e-290)


@pytest.mark.parametrize("a", [0.3, 1.0, 6.0, 250.0, 9000.0])
@pytest.mark.parametrize(
    ("low", "high"), [(-0.5, math.inf), (0.05, math.inf), (1.2, math.inf), (-0.3, -0.29), (-0.02, 0.4)]
)
def test_moments_of_a_cut_gamma_equal_quadrature(a, low, high):
    mode = math.log(a)
    begin, end = mode + low, (mode + high if math.isfinite(high) else math.inf)
    log_integral, mean, variance = gamma_moments(a, begin, end)
    peak = min(max(mode, begin), end)

    def density(w):
        return math.exp(a * (w - peak) - math.exp(w) + math.exp(peak))

    stop = min(end, peak + 12.0 / math.sqrt(a) + 8.0 / a)
    points = sorted({begin, peak, *np.linspace(begin, stop, 40), stop})
    moments = [
        sum(
            integrate.quad(lambda w, k=k: density(w) * (w - peak) ** k, p, q, epsabs=0, epsrel=1e-12)[0]
            for p, q in itertools.pairwise(points)
        )
        for k in range(3)
    ]
    assert log_integral - a * peak + math.exp(peak) == pytest.approx(math.log(moments[0]), abs=1e-9)
    assert mean == pytest.approx(peak + moments[1] / moments[0], rel=1e-9)
    expected = moments[2] / moments[0] - (moments[1] / moments[0]) ** 2
    assert variance == pytest.approx(expected, rel=1e-6)


def answers_of(points, intervals, *, plain=False):
    """Points and (low, high) intervals on the log scale."""
    size = max(len(points), len(intervals))
    table = np.ones((5, size))
    table[0, : len(points)] = points
    table[2, : len(intervals)] = [low for low, _ in intervals]
    table[3, : len(intervals)] = [high for _, high in intervals]
    if not plain:
        table[1] = np.linspace(0.5, 2.0, size)
        table[4] = np.linspace(1.5, 0.7, size)
    point_weight = table[1, : len(points)].sum()
    total = point_weight + table[4, : len(intervals)].sum()
    return Observations(table, len(points), len(intervals), plain, point_weight, total)


CASES = {
    "points": ([4.2, 4.9, 5.0, 5.3, 5.9, 6.6, 7.7, 5.1, 5.2], []),
    "cut": ([4.2, 4.9, 5.0], [(5.0, math.inf), (5.6, math.inf), (4.0, math.inf)]),
    "whole numbers": ([], [(4.0, 4.1), (4.6, 4.65), (6.0, 6.3), (5.2, 5.2004), (5.5, math.inf)]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize(
    ("family", "nu"), [(LOG_T, 3.5), (LOG_T, 1.0), (LOG_T, math.inf), (WEIBULL, 0.0), (GAMMA, 0.0)]
)
def test_derivatives_equal_differences(case, plain, family, nu):
    observations = answers_of(*CASES[case], plain=plain)
    constant = constants_of(family, nu)
    m, s, h = 5.2, -0.4, 1e-5
    sigma = math.exp(s)
    _, g1, g2, h11, h12, h22 = evaluate(family, nu, constant, observations, m, s)

    def at(by_m, by_s):
        return np.array(evaluate(family, nu, constant, observations, m + by_m, s + by_s))

    by_m = sigma * (at(h, 0) - at(-h, 0)) / (2 * h)
    by_s = (at(0, h) - at(0, -h)) / (2 * h)
    assert g1 == pytest.approx(by_m[0], rel=1e-5, abs=1e-6)
    assert g2 == pytest.approx(by_s[0], rel=1e-5, abs=1e-6)
    assert h11 == pytest.approx(by_m[1], rel=1e-5, abs=1e-6)
    assert h12 == pytest.approx(by_m[2], rel=1e-5, abs=1e-6)
    assert h22 == pytest.approx(by_s[2], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("family", "nu", "law"),
    [
        (LOG_T, 3.5, lambda y: stats.t(3.5, 5.0, 0.5).cdf(y)),
        (LOG_T, math.inf, lambda y: stats.norm(5.0, 0.5).cdf(y)),
        (WEIBULL, 0.0, lambda y: stats.weibull_min(2.0, scale=math.exp(5.0)).cdf(np.exp(y))),
        (GAMMA, 0.0, lambda y: stats.gamma(4.0, scale=math.exp(5.0) / 4.0).cdf(np.exp(y))),
    ],
)
def test_distribution_functions_equal_scipys(family, nu, law):
    for y in (2.0, 4.0, 4.9, 5.3, 7.0):
        assert cdf(family, nu, constants_of(family, nu), y, 5.0, 0.5) == pytest.approx(
            float(law(y)), rel=1e-9
        )


@pytest.mark.parametrize("nu", [1.0, 3.5, 9.9])
def test_the_tail_by_its_polynomial_equals_that_by_its_series(nu):
    constants = t_constants(nu)
    series = np.array([t_log_constant(nu)])
    assert len(constants) > len(series)
    for z in (-4.0, -0.3, 0.0, 0.1, 0.8, 3.0, 40.0, 1e4):
        assert t_sf(z, nu, constants) == pytest.approx(t_sf(z, nu, series), rel=1e-12)
        assert t_log_sf_and_hazard(z, nu, constants) == pytest.approx(
            t_log_sf_and_hazard(z, nu, series), rel=1e-11
        )
