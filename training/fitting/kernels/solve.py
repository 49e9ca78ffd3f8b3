"""Maximum likelihood over (m, s) for the observations of one group, and over nu if it is free.

Damped Newton method (Levenberg-Marquardt with the exact Hessian): a step is accepted if the likelihood increases, and
the damping vanishes near the maximum, where convergence is quadratic. s is bounded below by the floor; at the floor
only m is updated as long as the likelihood increases towards smaller s.

A group has converged when no slope of the mean log-likelihood, per sigma of m and per unit of s, exceeds TARGET.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from training.fitting.kernels import LOG_T
from training.fitting.kernels.likelihood import Derivatives, Model, Observations, evaluate
from training.fitting.kernels.special import t_log_constant

TARGET = 1e-8
# Newton iterates until this slope if rounding permits; any slope below TARGET counts as converged.
_ASPIRE = 1e-9
_MAX_STEPS = 100
#: Grid of free degrees of freedom: [1, 100], and infinity, which is the log-normal.
NU_GRID = np.array([1.0, 1.4, 2.0, 2.8, 4.0, 5.6, 8.0, 12.0, 20.0, 40.0, 100.0, np.inf])
_NU_TOLERANCE = 1e-5
_GOLDEN = 0.5 * (math.sqrt(5.0) - 1.0)

#: (m, s, log-likelihood of ln X, d2/dm2, d2/dmds, d2/ds2 as `evaluate` scales them, largest slope)
Maximum = tuple[float, float, float, float, float, float, float]


@njit(cache=True)
def _slope(d: Derivatives, frozen: bool, weight: float) -> float:
    return (abs(d[1]) if frozen else max(abs(d[1]), abs(d[2]))) / weight


@njit(cache=True)
def _step(d: Derivatives, damping: float, frozen: bool) -> tuple[float, float, float]:
    """Ascent step (in sigma, in s) and the damping that makes the curvature negative definite."""
    _, g1, g2, h11, h12, h22 = d
    a, b, c = -h11, -h12, -h22
    if frozen:
        if a + damping <= 1e-9 * abs(a):
            damping = 2.0 * abs(a) + 1e-300
        return g1 / (a + damping), 0.0, damping
    smallest = 0.5 * (a + c) - math.sqrt(0.25 * (a - c) ** 2 + b * b)
    if smallest + damping <= 1e-9 * (abs(a) + abs(c)):
        damping = 1e-2 * (abs(a) + abs(c)) - smallest
    p, q = a + damping, c + damping
    det = p * q - b * b
    return (q * g1 - b * g2) / det, (p * g2 - b * g1) / det, damping


@njit(cache=True)
def maximize(model: Model, observations: Observations, m: float, s: float) -> Maximum:
    """Climbs from (m, s) to a local maximum with s >= floor; s is constant if the scale is fixed."""
    floor, fixed_scale = model.floor, model.fixed_scale
    weight = observations.total_weight
    d = evaluate(model, observations, m, s)
    frozen = fixed_scale or (s <= floor and d[2] < 0.0)
    slope = _slope(d, frozen, weight)
    damping = 0.0
    for _ in range(_MAX_STEPS):
        if slope <= _ASPIRE:
            break
        by_m, by_s, damping = _step(d, damping, frozen)
        shrink = 1.0 / max(1.0, 0.5 * abs(by_m), abs(by_s))
        new_m = m + shrink * by_m * math.exp(s)
        new_s = max(s + shrink * by_s, floor)
        if frozen:
            new_s = s
        if new_m == m and new_s == s:
            break
        new = evaluate(model, observations, new_m, new_s)
        new_frozen = fixed_scale or (new_s <= floor and new[2] < 0.0)
        new_slope = _slope(new, new_frozen, weight)
        # Near the maximum, improvements of the likelihood are lost in rounding, while its slope is still accurate.
        rounding = 1e-13 * (abs(d[0]) + weight)
        if new[0] > d[0] + rounding or (new[0] > d[0] - rounding and new_slope < slope):
            m, s, d, slope, frozen = new_m, new_s, new, new_slope, new_frozen
            damping = 0.0 if damping < 1e-6 * weight else 0.1 * damping
        elif slope <= TARGET or damping > 1e12 * weight:
            break
        else:
            damping = max(10.0 * damping, 1e-2 * weight)
    return m, s, d[0], d[3], d[4], d[5], slope


@njit(cache=True)
def climb(model: Model, observations: Observations, m: float, s: float) -> Maximum:
    """The better of the maximum near (m, s) and, if enough observations are tied, the one at the tied value.

    At a value shared by a fraction w of the observations, ln L ~ -(w - nu (1 - w)) N s for s -> -inf, which increases if
    w > nu (1 - w) (Kent & Tyler 1991).
    """
    best = maximize(model, observations, m, max(s, model.floor))
    fraction = observations.tied_fraction
    if model.family == LOG_T and fraction >= model.nu * (1.0 - fraction):
        other = maximize(model, observations, observations.tied, model.floor)
        if other[2] > best[2]:
            return other
    return best


@njit(cache=True)
def log_t_model(nu: float, floor: float) -> Model:
    """Log-t model for a nu that is used only once, without the polynomial of `t_constants`."""
    return Model(LOG_T, nu, np.array([t_log_constant(nu)]), False, floor)


@njit(cache=True)
def _climb_at(log_nu: float, observations: Observations, at: Maximum, floor: float) -> Maximum:
    return climb(log_t_model(math.exp(log_nu), floor), observations, at[0], at[1])


@njit(cache=True)
def profile(observations: Observations, m: float, s: float, floor: float) -> tuple[float, Maximum]:
    """(nu, maximum over m and s), by a scan of NU_GRID and golden-section search in ln nu around the best finite value."""
    last = (m, s, 0.0, 0.0, 0.0, 0.0, 0.0)
    best = _climb_at(math.log(NU_GRID[0]), observations, last, floor)
    last, top = best, 0
    for k in range(1, NU_GRID.size):
        last = _climb_at(math.log(NU_GRID[k]), observations, last, floor)
        if last[2] > best[2]:
            best, top = last, k
    best_nu = NU_GRID[top]
    if math.isinf(best_nu):
        return best_nu, best
    begin = math.log(NU_GRID[max(top - 1, 0)])
    end = math.log(NU_GRID[min(top + 1, NU_GRID.size - 2)])
    left = end - _GOLDEN * (end - begin)
    right = begin + _GOLDEN * (end - begin)
    fit_left = _climb_at(left, observations, best, floor)
    fit_right = _climb_at(right, observations, best, floor)
    while end - begin > _NU_TOLERANCE:
        if fit_left[2] > fit_right[2]:
            if fit_left[2] > best[2]:
                best, best_nu = fit_left, math.exp(left)
            end, right, fit_right = right, left, fit_left
            left = end - _GOLDEN * (end - begin)
            fit_left = _climb_at(left, observations, best, floor)
        else:
            if fit_right[2] > best[2]:
                best, best_nu = fit_right, math.exp(right)
            begin, left, fit_left = left, right, fit_right
            right = begin + _GOLDEN * (end - begin)
            fit_right = _climb_at(right, observations, best, floor)
    return best_nu, best


@njit(cache=True)
def standard_errors(
    model: Model, observations: Observations, fit: Maximum, free_nu: bool
) -> tuple[float, float, float, float]:
    """Standard errors of m, s and ln nu, and covariance of m and s, from the observed information; NaN if the data do
    not determine them.

    With `free_nu`, derivatives by ln nu are central differences, and the other errors include the uncertainty of nu.
    """
    m, s = fit[0], fit[1]
    a, b, c = -fit[3], -fit[4], -fit[5]
    sigma = math.exp(s)
    nu = model.nu
    if model.fixed_scale or s <= model.floor:
        return (sigma / math.sqrt(a) if a > 0.0 else math.nan), math.nan, math.nan, math.nan
    if not free_nu or math.isinf(nu):
        det = a * c - b * b
        if a <= 0.0 or det <= 0.0:
            return math.nan, math.nan, math.nan, math.nan
        return sigma * math.sqrt(c / det), math.sqrt(a / det), math.nan, -sigma * b / det
    h = 1e-2
    up = evaluate(log_t_model(nu * math.exp(h), model.floor), observations, m, s)
    down = evaluate(log_t_model(nu * math.exp(-h), model.floor), observations, m, s)
    e = -(up[1] - down[1]) / (2.0 * h)
    f = -(up[2] - down[2]) / (2.0 * h)
    i = -(up[0] - 2.0 * fit[2] + down[0]) / (h * h)
    # Information [[a, b, e], [b, c, f], [e, f, i]]: positive definite if its leading minors are; inverse by cofactors.
    minor = a * c - b * b
    det = a * (c * i - f * f) - b * (b * i - e * f) + e * (b * f - c * e)
    if a <= 0.0 or minor <= 0.0 or det <= 0.0:
        return math.nan, math.nan, math.nan, math.nan
    return (
        sigma * math.sqrt((c * i - f * f) / det),
        math.sqrt((a * i - e * e) / det),
        math.sqrt(minor / det),
        sigma * (e * f - b * i) / det,
    )
