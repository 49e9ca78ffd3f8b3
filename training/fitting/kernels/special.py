"""Scalar special functions for compiled loops: Student-t tail, digamma, trigamma, incomplete gamma.

The Student-t tail. With u = z / sqrt(nu + z^2) and z >= 0,

    P(T > z) = C (nu / (nu + z^2))^(nu/2) R(u),   C = Gamma((nu+1)/2) / (sqrt(pi) Gamma(nu/2)),

where R solves (1 - u^2) R' = nu u R - 1 and is regular at u = 1. Its expansion at u = 1 has only positive terms:

    R(u) = (1/nu) sum_k c_k (1-u)^k,   c_0 = 1,   c_k = c_(k-1) (nu + k - 1) / (nu + 2k),

which is 2F1(1, nu; nu/2 + 1; (1-u)/2) / nu. The hazard is 1 / (R sqrt(nu + z^2)), without a power. For a nu that is
used often, a polynomial approximation of nu R takes a third of the time of the series.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

_EPSILON = 1e-17
_MOST_NU = 10.0
_DEGREE = 19
_SQRT_HALF = math.sqrt(0.5)
_LOG_ROOT_2PI = 0.5 * math.log(2.0 * math.pi)


@njit(cache=True)
def t_log_constant(nu: float) -> float:
    """ln of the density of Student-t(nu) at 0; nu may be infinite."""
    if math.isinf(nu):
        return -_LOG_ROOT_2PI
    if nu > 1e3:  # lgamma(a + 1/2) - lgamma(a) by its series (DLMF 5.11.13), without cancellation
        a = 0.5 * nu
        return -_LOG_ROOT_2PI - 1.0 / (8.0 * a) + 1.0 / (192.0 * a**3)
    return math.lgamma(0.5 * (nu + 1.0)) - math.lgamma(0.5 * nu) - 0.5 * math.log(nu * math.pi)


@njit(cache=True)
def _tail_series(v: float, nu: float) -> float:
    """nu R(u) at v = 1 - u in [0, 1]."""
    term = 1.0
    total = 1.0
    k = 0.0
    while term > _EPSILON * total:
        k += 1.0
        term *= v * (nu + k - 1.0) / (nu + 2.0 * k)
        total += term
    return total


def t_constants(nu: float) -> np.ndarray:
    """Constants of the tail functions for nu: ln of the density at 0, and for nu <= 10 polynomial coefficients of nu R.

    The polynomial in 2 (1 - u) - 1 has degree 19, highest power first, and a relative error below 1e-12. For larger nu,
    which would need more terms, the series is summed instead.
    """
    constant = t_log_constant(nu)
    if not nu <= _MOST_NU:
        return np.array([constant])
    series = np.vectorize(lambda x: _tail_series(0.5 * (x + 1.0), nu))
    terms = np.polynomial.chebyshev.chebinterpolate(series, _DEGREE)
    return np.concatenate([[constant], np.polynomial.chebyshev.cheb2poly(terms)[::-1]])


@njit(cache=True)
def _scaled_tail(v: float, nu: float, constants: np.ndarray) -> float:
    """nu R(u) at v = 1 - u."""
    if constants.size == 1:
        return _tail_series(v, nu)
    x = 2.0 * v - 1.0
    total = 0.0
    for k in range(1, constants.size):
        total = total * x + constants[k]
    return total


@njit(cache=True)
def t_sf(z: float, nu: float, constants: np.ndarray) -> float:
    """P(T > z), with a relative error of about 1e-12 in both tails; `constants` = t_constants(nu)."""
    if math.isinf(nu):
        return 0.5 * math.erfc(z * _SQRT_HALF)
    if math.isinf(z):
        return 0.0 if z > 0 else 1.0
    root = math.sqrt(nu + z * z)
    scaled = _scaled_tail(nu / (root * (root + abs(z))), nu, constants)
    # C = density at 0 times sqrt(nu).
    tail = math.exp(constants[0] + 0.5 * nu * math.log(nu / (nu + z * z))) * scaled / math.sqrt(nu)
    return tail if z >= 0 else 1.0 - tail


@njit(cache=True)
def t_log_sf_and_hazard(z: float, nu: float, constants: np.ndarray) -> tuple[float, float]:
    """ln P(T > z) and the hazard, density / P(T > z), for finite z, even if P underflows."""
    if math.isinf(nu):
        return _normal_log_sf_and_hazard(z)
    square = nu + z * z
    root = math.sqrt(square)
    scaled = _scaled_tail(nu / (root * (root + abs(z))), nu, constants)
    log_tail = constants[0] + 0.5 * nu * math.log(nu / square) + math.log(scaled / math.sqrt(nu))
    if z >= 0:
        return log_tail, nu / (scaled * root)
    sf = 1.0 - math.exp(log_tail)
    return math.log(sf), math.exp(constants[0] - 0.5 * (nu + 1.0) * math.log(square / nu)) / sf


@njit(cache=True)
def _normal_log_sf_and_hazard(z: float) -> tuple[float, float]:
    log_density = -0.5 * z * z - _LOG_ROOT_2PI
    if z < 20.0:
        log_sf = math.log(0.5 * math.erfc(z * _SQRT_HALF))
        return log_sf, math.exp(log_density - log_sf)
    # Mills' ratio by its continued fraction z + 1/(z + 2/(z + 3/...)); 20 levels are exact from z = 20 on.
    fraction = z
    for k in range(20, 0, -1):
        fraction = z + k / fraction
    return log_density - math.log(fraction), fraction


@njit(cache=True)
def digamma(x: float) -> float:
    """psi(x), x > 0."""
    shift = 0.0
    while x < 10.0:
        shift -= 1.0 / x
        x += 1.0
    r = 1.0 / (x * x)
    tail = r * (1 / 12 - r * (1 / 120 - r * (1 / 252 - r * (1 / 240 - r * (1 / 132 - r * 691 / 32760)))))
    return shift + math.log(x) - 0.5 / x - tail


@njit(cache=True)
def trigamma(x: float) -> float:
    """psi'(x), x > 0."""
    shift = 0.0
    while x < 10.0:
        shift += 1.0 / (x * x)
        x += 1.0
    r = 1.0 / (x * x)
    tail = r * (1 / 6 - r * (1 / 30 - r * (1 / 42 - r * (1 / 30 - r * (5 / 66 - r * 691 / 2730)))))
    return shift + (1.0 + 0.5 / x + tail) / x


@njit(cache=True)
def gamma_cdf(a: float, x: float) -> float:
    """Regularized lower incomplete gamma function P(a, x), x >= 0: series below a + 1, else continued fraction."""
    if x <= 0.0:
        return 0.0
    log_front = a * math.log(x) - x - math.lgamma(a)
    if x < a + 1.0:
        term = 1.0 / a
        total = term
        k = a
        while term > _EPSILON * total:
            k += 1.0
            term *= x / k
            total += term
        return min(1.0, total * math.exp(log_front))
    # Lentz's method for Q(a, x) (DLMF 8.9.2).
    b = x + 1.0 - a
    c = 1e300
    d = 1.0 / b
    fraction = d
    for i in range(1, 100_000):
        an = -i * (i - a)
        b += 2.0
        d = 1.0 / (an * d + b)
        c = b + an / c
        step = d * c
        fraction *= step
        if abs(step - 1.0) < 1e-15:
            break
    return 1.0 - fraction * math.exp(log_front)


_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(10)
_NODES, _WEIGHTS = 0.5 * (_NODES + 1.0), 0.5 * _WEIGHTS


@njit(cache=True)
def gamma_moments(a: float, low: float, high: float) -> tuple[float, float, float]:
    """ln I, and mean and variance of w under the density exp(a w - e^w) / I on [low, high]; high may be inf.

    With w = ln(x / scale), I / Gamma(a) is the probability of the interval, and mean and variance give its derivatives by
    the shape. The integral extends from the peak of the density to where it has fallen by a factor of exp(-40), in
    pieces over which it changes by at most a few powers of e.
    """
    peak = min(max(math.log(a), low), high)
    top = a * peak - math.exp(peak)
    slope = a - math.exp(peak)
    # Left of the mode the log-density falls by a (e^-d - 1 + d) at distance d, right of it by a (e^d - 1 - d);
    # if the mode is outside [low, high], it falls by at least |slope| d.
    left = 40.0 / a + 1.0 if a < 240.0 else math.sqrt(160.0 / a)
    right = min(math.sqrt(80.0 / a), math.log1p(40.0 / a) + 2.0)
    if slope > 1e-9 * a:
        left = min(left, 40.0 / slope)
    if slope < -1e-9 * a:
        right = min(right, -40.0 / slope)
    scale = 1.0 / math.sqrt(a)
    total, first, second = 0.0, 0.0, 0.0
    for side in range(2):
        begin = max(low, peak - left) if side == 0 else peak
        end = peak if side == 0 else min(high, peak + right)
        width = scale if side == 0 else min(1.0, scale)
        pieces = max((end - begin) / width, abs(slope) * (end - begin) / 5.0)
        count = min(64, math.ceil(pieces))
        for piece in range(count):
            step = (end - begin) / count
            for node in range(_NODES.size):
                w = begin + (piece + _NODES[node]) * step
                mass = step * _WEIGHTS[node] * math.exp(a * w - math.exp(w) - top)
                offset = w - peak
                total += mass
                first += mass * offset
                second += mass * offset * offset
    mean = first / total
    return top + math.log(total), peak + mean, second / total - mean * mean
