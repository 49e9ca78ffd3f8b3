"""Log-likelihood of one group with its first and second derivatives by (m, s), for every family.

A group consists of weighted points (finished samples) and intervals (censored samples: [length, inf); with integer
lengths: one token wide). On the log scale, with z = (y - m) / sigma, standard density f and survival function S:

    point       ln f(z) - s - y
    interval    ln P,   P = S(z1) - S(z2)

Derivatives by m are returned multiplied by sigma, so that a step in m is in units of sigma. With g(z) the derivative
of ln f, and f1 = f(z1) etc.:

    point       d/dm = -g,             d/ds = -g z - 1,
                d2/dm2 = g',           d2/dmds = g' z + g,       d2/ds2 = g' z^2 + g z
    interval    d/dm = -(f2 - f1)/P,   d/ds = -(z2 f2 - z1 f1)/P, and so on (f' = g f)

For the gamma family the second parameter is s = ln cv with shape a = exp(-2 s), sigma = cv, and m = ln mean.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit

from training.fitting.kernels import GAMMA, LOG_T, WEIBULL
from training.fitting.kernels.special import (
    digamma,
    gamma_cdf,
    gamma_moments,
    t_constants,
    t_log_sf_and_hazard,
    t_sf,
    trigamma,
)

# Permits reordering and contraction of sums, but keeps infinities and NaN.
_FAST = {"reassoc", "contract", "nsz", "arcp"}
_BLOCK = 8
# Width in z below which the point approximation of an interval is more accurate than a difference of probabilities.
_NARROW = 1e-5

#: (log-likelihood, d/dm, d/ds, d2/dm2, d2/dmds, d2/ds2)
Derivatives = tuple[float, float, float, float, float, float]


class Observations(NamedTuple):
    """Observations of one group on the log scale.

    Stored in one table instead of five arrays, because each array argument of a compiled function costs two atomic
    operations.
    """

    # Shape (5, N or more): rows Y and WEIGHT hold points, LOW, HIGH and INTERVAL_WEIGHT intervals; HIGH is inf for
    # censored samples.
    table: np.ndarray
    num_points: int
    num_intervals: int
    plain: bool  # whether all weights of points are 1
    # point_weight, total_weight: sums of the weights of the points, and of all observations.
    point_weight: float
    total_weight: float
    tied: float = 0.0  # ln of the most frequent finished length
    tied_fraction: float = 0.0  # see `groups._tie`


class Model(NamedTuple):
    """A family with its fixed settings."""

    family: int  # code of the family
    nu: float  # degrees of freedom (log-t only), may be infinite
    constants: np.ndarray  # `constants_of(family, nu)`
    fixed_scale: bool  # whether sigma is fixed to 1 (the exponential as a Weibull)
    floor: float  # lower bound of ln sigma


Y, WEIGHT, LOW, HIGH, INTERVAL_WEIGHT = range(5)


@njit(cache=True, fastmath=_FAST)
def _t_points(table: np.ndarray, count: int, nu: float, m: float, sigma: float) -> Derivatives:
    """Log-t points with unit weights; computes a single logarithm per block of `_BLOCK` observations."""
    inverse = 1.0 / sigma
    # With r = 1 / (nu + z^2): -g = (nu+1) z r, g' = (nu+1) (r - 2 nu r^2), and z^2 r = 1 - nu r.
    log_product, sum_r, sum_zr, sum_r2, sum_zr2 = 0.0, 0.0, 0.0, 0.0, 0.0
    for begin in range(0, count, _BLOCK):
        product = 1.0
        for i in range(begin, min(begin + _BLOCK, count)):
            z = (table[Y, i] - m) * inverse
            q = nu + z * z
            r = 1.0 / q
            zr = z * r
            product *= q
            sum_r += r
            sum_zr += zr
            sum_r2 += r * r
            sum_zr2 += zr * r
        log_product += math.log(product)
    scale = nu + 1.0
    return (
        -0.5 * scale * (log_product - count * math.log(nu)),
        scale * sum_zr,
        scale * (count - nu * sum_r) - count,
        scale * (sum_r - 2.0 * nu * sum_r2),
        -2.0 * nu * scale * sum_zr2,
        -2.0 * nu * scale * (sum_r - nu * sum_r2),
    )


@njit(cache=True, inline="always")
def _standard(family: int, nu: float, z: float) -> tuple[float, float, float]:
    """ln f(z) without its constant, g(z), g'(z)."""
    if family == WEIBULL:
        growth = math.exp(z)
        return z - growth, 1.0 - growth, -growth
    if math.isinf(nu):
        return -0.5 * z * z, -z, -1.0
    square = z * z
    q = nu + square
    return (-0.5 * (nu + 1.0) * math.log(q / nu), -(nu + 1.0) * z / q, (nu + 1.0) * (square - nu) / (q * q))


@njit(cache=True)
def _points(family: int, nu: float, observations: Observations, m: float, sigma: float) -> Derivatives:
    value, g1, g2, h11, h12, h22 = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    table = observations.table
    for i in range(observations.num_points):
        w = table[WEIGHT, i]
        z = (table[Y, i] - m) / sigma
        log_f, g, curve = _standard(family, nu, z)
        value += w * log_f
        g1 -= w * g
        g2 -= w * (g * z + 1.0)
        h11 += w * curve
        h12 += w * (curve * z + g)
        h22 += w * (curve * z * z + g * z)
    return value, g1, g2, h11, h12, h22


@njit(cache=True)
def _interval(
    family: int, nu: float, constants: np.ndarray, z1: float, z2: float
) -> tuple[float, float, float, float, float]:
    """ln P, f1/P, f2/P, and g at both bounds; z2 = inf for a censored sample."""
    if family == WEIBULL:
        log_sf, hazard = -math.exp(z1), math.exp(z1)
    else:
        log_sf, hazard = t_log_sf_and_hazard(z1, nu, constants)
    _, slope1, _ = _standard(family, nu, z1)
    if math.isinf(z2):
        return log_sf, hazard, 0.0, slope1, 0.0
    log_f2, slope2, _ = _standard(family, nu, z2)
    if family == WEIBULL:
        # P = S1 (1 - S2/S1)
        fraction = -math.expm1(math.exp(z1) - math.exp(z2))
        log_p = log_sf + math.log(fraction)
    elif z1 > 0:
        log_sf2, _ = t_log_sf_and_hazard(z2, nu, constants)
        log_p = log_sf + math.log(-math.expm1(log_sf2 - log_sf))
    elif z2 < 0:  # from the left, where both probabilities are small
        log_below2, _ = t_log_sf_and_hazard(-z2, nu, constants)
        log_below1, _ = t_log_sf_and_hazard(-z1, nu, constants)
        log_p = log_below2 + math.log(-math.expm1(log_below1 - log_below2))
    else:
        log_p = math.log(1.0 - t_sf(z2, nu, constants) - t_sf(-z1, nu, constants))
    constant = constants[0]
    log_f1, _, _ = _standard(family, nu, z1)
    return log_p, math.exp(constant + log_f1 - log_p), math.exp(constant + log_f2 - log_p), slope1, slope2


@njit(cache=True)
def _intervals(
    family: int, nu: float, constants: np.ndarray, observations: Observations, m: float, sigma: float
) -> Derivatives:
    table = observations.table
    value, g1, g2, h11, h12, h22 = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    for i in range(observations.num_intervals):
        w = table[INTERVAL_WEIGHT, i]
        z1 = (table[LOW, i] - m) / sigma
        z2 = (table[HIGH, i] - m) / sigma
        if z2 - z1 < _NARROW:
            # The density is practically constant within the interval, so P is density times width.
            z = 0.5 * (z1 + z2)
            log_f, g, curve = _standard(family, nu, z)
            constant = constants[0]
            by_m, by_s = -g, -g * z - 1.0
            value += w * (log_f + constant + math.log(z2 - z1))
            h11 += w * curve
            h12 += w * (curve * z + g)
            h22 += w * (curve * z * z + g * z)
        else:
            log_p, f1, f2, slope1, slope2 = _interval(family, nu, constants, z1, z2)
            z2f2 = 0.0 if math.isinf(z2) else z2 * f2
            z2g2 = 0.0 if math.isinf(z2) else z2 * slope2
            by_m, by_s = f1 - f2, z1 * f1 - z2f2
            value += w * log_p
            h11 += w * (f2 * slope2 - f1 * slope1 - by_m * by_m)
            h12 += w * (f2 * (z2g2 + 1.0) - f1 * (z1 * slope1 + 1.0) - by_m * by_s)
            h22 += w * (z2f2 * (z2g2 + 1.0) - z1 * f1 * (z1 * slope1 + 1.0) - by_s * by_s)
        g1 += w * by_m
        g2 += w * by_s
    return value, g1, g2, h11, h12, h22


@njit(cache=True)
def _gamma(observations: Observations, m: float, sigma: float) -> Derivatives:
    table = observations.table
    a = 1.0 / (sigma * sigma)
    log_scale = m - math.log(a)
    log_gamma, psi, psi1 = math.lgamma(a), digamma(a), trigamma(a)
    value, t_u, t_a, t_uu, t_au, t_aa = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    for i in range(observations.num_points):
        w = table[WEIGHT, i]
        u = table[Y, i] - log_scale
        x = math.exp(u)
        value += w * (a * u - x - log_gamma)
        t_u += w * (a - x)
        t_a += w * (u - psi)
        t_uu -= w * x
        t_au += w
        t_aa -= w * psi1
    for i in range(observations.num_intervals):
        w = table[INTERVAL_WEIGHT, i]
        u1 = table[LOW, i] - log_scale
        u2 = table[HIGH, i] - log_scale
        log_i, mean, variance = gamma_moments(a, u1, u2)
        f1 = math.exp(a * u1 - math.exp(u1) - log_i)
        f2, slope2, u2f2 = 0.0, 0.0, 0.0
        if not math.isinf(u2):
            f2 = math.exp(a * u2 - math.exp(u2) - log_i)
            slope2 = a - math.exp(u2)
            u2f2 = u2 * f2
        shift = f2 - f1
        value += w * (log_i - log_gamma)
        t_u += w * shift
        t_a += w * (mean - psi)
        t_uu += w * (f2 * slope2 - f1 * (a - math.exp(u1)) - shift * shift)
        t_au += w * (u2f2 - u1 * f1 - shift * mean)
        t_aa += w * (variance - psi1)
    # u = y - m + ln a, a = exp(-2 s)
    g1 = -t_u
    g2 = -2.0 * (a * t_a + t_u)
    h22 = 4.0 * (a * t_a + a * a * t_aa + 2.0 * a * t_au + t_uu)
    return value, sigma * g1, g2, sigma * sigma * t_uu, sigma * 2.0 * (a * t_au + t_uu), h22


def constants_of(family: int, nu: float) -> np.ndarray:
    """Precomputed constants of a model: `t_constants(nu)` for the log-t, [0] for the other families."""
    return t_constants(nu) if family == LOG_T else np.zeros(1)


@njit(cache=True)
def evaluate(model: Model, observations: Observations, m: float, s: float) -> Derivatives:
    """Log-likelihood of ln X and its scaled derivatives; subtract the points' sum of weight * y to get that of X."""
    family, nu, constants = model.family, model.nu, model.constants
    sigma = math.exp(s)
    if family == GAMMA:
        return _gamma(observations, m, sigma)
    if observations.plain and family == LOG_T and not math.isinf(nu):
        value, g1, g2, h11, h12, h22 = _t_points(observations.table, observations.num_points, nu, m, sigma)
    else:
        value, g1, g2, h11, h12, h22 = _points(family, nu, observations, m, sigma)
    value += observations.point_weight * (constants[0] - s)
    if observations.num_intervals:
        more, i1, i2, i11, i12, i22 = _intervals(family, nu, constants, observations, m, sigma)
        value += more
        g1, g2, h11, h12, h22 = g1 + i1, g2 + i2, h11 + i11, h12 + i12, h22 + i22
    return value, g1, g2, h11, h12, h22


@njit(cache=True)
def cdf(model: Model, y: float, m: float, sigma: float) -> float:
    """P(ln X <= y)."""
    if model.family == GAMMA:
        a = 1.0 / (sigma * sigma)
        return gamma_cdf(a, a * math.exp(y - m))
    z = (y - m) / sigma
    if model.family == WEIBULL:
        return -math.expm1(-math.exp(z))
    return t_sf(-z, model.nu, model.constants)
