"""Special functions and derivatives of the compiled loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from training.fitting.kernels import GAMMA, LOG_T, WEIBULL
from training.fitting.kernels.likelihood import Model, Observations, constants_of, evaluate
from training.fitting.kernels.special import t_constants, t_log_sf_and_hazard, t_sf


@pytest.mark.parametrize("nu", [0.7, 1.0, 3.5, 9.9, 20.0, 100.0, 5000.0, math.inf])
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
    if math.isinf(nu):  # far out, Mills
        log_sf, hazard = t_log_sf_and_hazard(1000.0, nu, constants)
        assert hazard == pytest.approx(1000.0 + 1.0 / 1000.0, rel=1e-9)
        assert log_sf == pytest.approx(float(stats.norm.logsf(1000.0)), rel=1e-12)
    elif len(constants) > 1:  # by the polynomial as by the series
        for z in (-4.0, -0.3, 0.0, 0.1, 0.8, 3.0, 40.0, 1e4):
            assert t_sf(z, nu, constants) == pytest.approx(t_sf(z, nu, constants[:1]), rel=1e-12)
            of_series = t_log_sf_and_hazard(z, nu, constants[:1])
            assert t_log_sf_and_hazard(z, nu, constants) == pytest.approx(of_series, rel=1e-11)


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
    model = Model(family, nu, constants_of(family, nu), False, -7.0)
    m, s, h = 5.2, -0.4, 1e-5
    sigma = math.exp(s)
    _, g1, g2, h11, h12, h22 = evaluate(model, observations, m, s)

    def at(by_m, by_s):
        return np.array(evaluate(model, observations, m + by_m, s + by_s))

    by_m = sigma * (at(h, 0) - at(-h, 0)) / (2 * h)
    by_s = (at(0, h) - at(0, -h)) / (2 * h)
    assert g1 == pytest.approx(by_m[0], rel=1e-5, abs=1e-6)
    assert g2 == pytest.approx(by_s[0], rel=1e-5, abs=1e-6)
    assert h11 == pytest.approx(by_m[1], rel=1e-5, abs=1e-6)
    assert h12 == pytest.approx(by_m[2], rel=1e-5, abs=1e-6)
    assert h22 == pytest.approx(by_s[2], rel=1e-5, abs=1e-6)
