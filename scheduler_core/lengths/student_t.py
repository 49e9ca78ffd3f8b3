"""Student's t distribution for numpy arrays and for single numbers.

In the coordinate t = asinh(T / sqrt(nu)) of `standard`,

    q(t) = C_nu sech(t)^nu,   C_nu = Gamma((nu+1)/2) / (sqrt(pi) Gamma(nu/2)).

Because ln cosh(t+w) >= ln cosh t + ln cosh w for t, w >= 0, the density beyond t + W, W = arcosh(exp(41/nu)),
is below exp(-41) q(t) for every t.

There are two other implementations for purposes that this one does not support: `training.objectives.student`
(torch, with derivatives) and `training.fitting.kernels.special` (compiled loops).
"""

import math
from functools import lru_cache

import numpy as np

from scheduler_core.lengths.standard import NEGLIGIBLE, FloatArray, StandardDistribution, StandardNormal

_LN2 = math.log(2.0)
#: The far end is neglected if exp(scale T) q(t) is below exp(-30) of its value at the origin there.
_NEGLIGIBLE_END = 30.0


@lru_cache(maxsize=1024)
def log_normalizer(nu: float) -> float:
    """ln C_nu = ln Gamma((nu+1)/2) - ln Gamma(nu/2) - ln(pi)/2; for large nu by its series (DLMF 5.11.13)."""
    if nu > 1e3:
        x = nu / 2
        return 0.5 * math.log(x) - 1 / (8 * x) + 1 / (192 * x**3) - 0.5 * math.log(math.pi)
    return math.lgamma((nu + 1) / 2) - math.lgamma(nu / 2) - 0.5 * math.log(math.pi)


def _log_cosh(t: FloatArray) -> FloatArray:
    """ln cosh t without overflow."""
    size = np.abs(t)
    return np.asarray(size + np.log1p(np.expm1(-2.0 * size) / 2.0))


class StudentT(StandardDistribution):
    """Rows of Student's t distributions with `nu` degrees of freedom, finite and > 0 [N, 1] or [1, 1]."""

    def __init__(self, nu: FloatArray) -> None:
        self._nu = nu
        self._root = np.sqrt(nu)
        values, inverse = np.unique(nu, return_inverse=True)
        self._log_c = np.array([log_normalizer(float(v)) for v in values])[inverse].reshape(nu.shape)
        self._width = self.reach(np.zeros((1, 1)), 1.0, NEGLIGIBLE)

    def coordinate(self, value: FloatArray) -> FloatArray:
        return np.asarray(np.arcsinh(value / self._root))

    def value(self, t: FloatArray) -> FloatArray:
        return np.asarray(self._root * np.sinh(t))

    def rise(self, t: FloatArray, w: FloatArray) -> FloatArray:
        half = w / 2.0
        return np.asarray(2.0 * self._root * np.cosh(t + half) * np.sinh(half))

    def travel(self, t: FloatArray, rise: FloatArray) -> FloatArray:
        # sinh(t + w) - sinh t = rise / root is a quadratic in y = exp(w) - 1; its positive root, without cancellation.
        double = 2.0 * rise / self._root * np.exp(-t)
        slope = 1.0 + np.exp(-2.0 * t) - double
        root = np.sqrt(slope * slope + 4.0 * double)
        with np.errstate(divide="ignore", invalid="ignore"):
            y = np.where(slope > 0, 2.0 * double / (slope + root), (root - slope) / 2.0)
        return np.asarray(np.log1p(y))

    def log_slope(self, t: FloatArray) -> FloatArray:
        return np.asarray(np.log(self._root) + _log_cosh(t))

    def log_density(self, t: FloatArray) -> FloatArray:
        return np.asarray(self._log_c - self._nu * _log_cosh(t))

    def drop(self, t: FloatArray, w: FloatArray) -> FloatArray:
        # ln cosh(t+w) - ln cosh t = w + ln(1 + p (exp(-2w) - 1)), p = 1/(1 + exp(2t)), for t, w >= 0
        size = np.abs(w)
        ending = np.exp(-2.0 * np.abs(t))
        return np.asarray(-self._nu * (size + np.log1p(ending / (1.0 + ending) * np.expm1(-2.0 * size))))

    def reach(self, t: FloatArray, side: FloatArray | float, depth: FloatArray | float) -> FloatArray:
        ratio = depth / self._nu
        close = 2.0 * np.arcsinh(np.sqrt(np.expm1(np.minimum(ratio, 500.0)) / 2.0))
        return np.where(ratio > 500.0, ratio + _LN2, close)

    def width(self, t: FloatArray, side: FloatArray | float) -> FloatArray:
        return self._width

    def pieces(
        self, scale: FloatArray, start: FloatArray, origin: FloatArray, end: FloatArray
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        slope = scale * self._root
        width = self._width
        # Left of this the density or the length is below exp(-41) of its maximum.
        lowest = np.arcsinh(np.minimum(np.sinh(end), 0.0) - NEGLIGIBLE / slope)
        low = np.minimum(np.maximum(start, np.maximum(lowest, np.minimum(origin, 0.0) - width)), end)
        # ln of the integrand is concave, then convex: negligible at W and at the end implies in between.
        near = np.minimum(end, np.maximum(origin, 0.0) + width)
        lifted = np.maximum(self._gain(scale, origin, near), self._gain(scale, origin, end))
        high = np.where(lifted < -_NEGLIGIBLE_END, near, end)
        return low, np.minimum(np.maximum(low, 0.0), high), high

    def _gain(self, scale: FloatArray, origin: FloatArray, t: FloatArray) -> FloatArray:
        """ln of exp(scale T) q(t), relative to the origin."""
        w = t - origin
        return np.asarray(scale * self.rise(origin, w) + self.drop(origin, w))


def standard(nu: float) -> StandardDistribution:
    """One row with Student's t of `nu` > 0 degrees of freedom, or the normal for nu = inf."""
    return StandardNormal() if math.isinf(nu) else StudentT(np.full((1, 1), nu))


def student_t_cdf(z: float, nu: float) -> float:
    """P(T <= z) for one finite z, Student's t of finite nu > 0; relative error of both tails below 1e-9. Fast."""
    tail, _ = _tail(z, nu)
    return tail if z < 0 else 1.0 - tail


def student_t_hazard(z: float, nu: float) -> float:
    """Density / P(T > z) for one finite z, Student's t of finite nu > 0; the limit if both underflow."""
    tail, hazard = _tail(z, nu)
    if z > 0 and hazard is not None:
        return hazard
    density = math.exp(log_normalizer(nu) - 0.5 * (nu + 1) * math.log1p(z * z / nu)) / math.sqrt(nu)
    return density / (1.0 - tail if z < 0 else tail)


def _tail(z: float, nu: float) -> tuple[float, float | None]:
    """(P(T > |z|), hazard at |z|); the hazard is None if the continued fraction is not that of the tail.

    Uses the continued fraction of the incomplete beta function (DLMF 8.17.22), evaluated by Lentz's method,
    on the side of its mean where it converges fast.
    """
    square = z * z
    if square == 0.0:
        return 0.5, None
    a, b, x = 0.5 * nu, 0.5, nu / (nu + square)
    is_center = x > (a + 1.0) / (a + b + 2.0)
    if is_center:
        a, b, x = b, a, square / (nu + square)
    c, d = 1.0, 1.0 / (1.0 - (a + b) * x / (a + 1.0))
    fraction = d
    for m in range(1, 1000):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d, c = 1.0 / (1.0 + term * d), 1.0 + term / c
            fraction *= d * c
        if abs(d * c - 1.0) < 1e-13:
            break
    log_front = log_normalizer(nu) - 0.5 * nu * math.log1p(square / nu)
    mass = math.exp(log_front + 0.5 * math.log(square / (nu + square))) * fraction / a
    return (0.5 - 0.5 * mass, None) if is_center else (0.5 * mass, nu / (fraction * abs(z)))


@lru_cache(maxsize=256)
def student_t_quantile(probability: float, nu: float) -> float:
    """The quantile of level 0 < p < 1 of Student's t, nu > 0 degrees of freedom or inf."""
    rows = standard(nu)
    level = np.full((1, 1), probability)
    return float(rows.value(rows.quantile(np.log(level), np.log1p(-level))).item())
