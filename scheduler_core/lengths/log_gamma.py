"""The logarithm of a gamma variable, T = ln(G/k), G ~ Gamma(k, scale 1). The coordinate of `standard` is T itself:

    q(t) = C_k exp(k (t - exp t + 1)),   C_k = k^k exp(-k) / Gamma(k).

`LogExponential` is the case k = 1, where tails and quantiles have closed forms; with scale 1/shape that is the Weibull
distribution.
"""

from __future__ import annotations

import math

import numpy as np

from scheduler_core.lengths.standard import NEGLIGIBLE, FloatArray, StandardDistribution

#: exp(t) stays finite; beyond, nothing is left of the tail.
_MAX_COORDINATE = 690.0


def _log_normalizer(k: float) -> float:
    """ln C_k; for large k by Stirling's series of ln Gamma (DLMF 5.11.1), where k ln k - k - ln Gamma(k) cancels."""
    if k < 20.0:
        return k * math.log(k) - k - math.lgamma(k)
    rest = (1 / 12 - (1 / 360 - (1 / 1260 - 1 / (1680 * k * k)) / (k * k)) / (k * k)) / k
    return 0.5 * math.log(k / (2 * math.pi)) - rest


def _width(
    slope: FloatArray, k: FloatArray, side: FloatArray | float, depth: FloatArray | float
) -> FloatArray:
    """w > 0 with slope (exp(side w) - 1) - k side w = depth: where exp(k t - exp t) has fallen by exp(-depth).

    Newton on a convex function from beyond its root; stopped early, w is a little too large, which does no harm.
    """
    excess = side * (slope - k)
    # The function is >= excess w + slope w^2/2 to the right; to the left >= k w - slope.
    quadratic = 2.0 * depth / (excess + np.sqrt(excess * excess + 2.0 * slope * depth) + 1e-300)
    logarithmic = np.maximum(2.0, np.log(2.0 * depth / slope))
    w = np.where(np.asarray(side) > 0, np.minimum(quadratic, logarithmic), (depth + slope) / k)
    for _ in range(12):
        value = slope * np.expm1(side * w) - k * side * w - depth
        slant = side * (slope * np.exp(side * w) - k)
        w = w - np.where(value > 0, value / np.where(slant > 0, slant, np.inf), 0.0)
    return np.asarray(np.maximum(w, 0.0))


class LogGamma(StandardDistribution):
    """ln(G/k) for a gamma variable G.

    Args:
        k: Shape, > 0 [N, 1] or [1, 1].
    """

    def __init__(self, k: FloatArray) -> None:
        self._k = k
        values, inverse = np.unique(k, return_inverse=True)
        self._log_c = np.array([_log_normalizer(float(v)) for v in values])[inverse].reshape(k.shape)
        # For k < 1 the right tail from the mode on is flat and then falls like exp(-exp t): start it at G = 1.
        self.split = np.maximum(-np.log(k), 0.0)

    def _slope(self, t: FloatArray) -> FloatArray:
        return np.asarray(self._k * np.exp(np.minimum(t, _MAX_COORDINATE)))

    def log_density(self, t: FloatArray) -> FloatArray:
        return np.asarray(self._log_c + self._k * (t - np.expm1(t)))

    def drop(self, t: FloatArray, w: FloatArray) -> FloatArray:
        return np.asarray(self._k * w - self._slope(t) * np.expm1(w))

    def reach(self, t: FloatArray, side: FloatArray | float, depth: FloatArray | float) -> FloatArray:
        return _width(self._slope(t), self._k, side, depth)

    def pieces(
        self, scale: FloatArray, start: FloatArray, origin: FloatArray, end: FloatArray
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        # exp(scale t) q(t) is the density of the logarithm of a gamma variable of shape k + scale.
        middle = np.minimum(np.maximum(np.log1p(scale / self._k), start), end)
        slope, k = self._slope(middle), self._k + scale
        low = np.maximum(start, middle - _width(slope, k, -1.0, NEGLIGIBLE))
        return low, middle, np.minimum(end, middle + _width(slope, k, 1.0, NEGLIGIBLE))


class LogExponential(LogGamma):
    """ln E for an exponential variable E of mean 1."""

    def __init__(self) -> None:
        super().__init__(np.ones((1, 1)))

    def ratio(self, t: FloatArray, side: FloatArray | float) -> FloatArray:
        hazard = self._slope(t)
        return np.asarray(np.where(np.asarray(side) > 0, 1.0, np.expm1(hazard)) / hazard)

    def log_tail(self, t: FloatArray, side: FloatArray | float) -> FloatArray:
        hazard = np.exp(t)
        return np.asarray(np.where(np.asarray(side) > 0, -hazard, np.log(-np.expm1(-hazard))))

    def outward(self, t: FloatArray, goal: FloatArray, side: FloatArray | float) -> FloatArray:
        hazard = self._slope(t)
        right = np.log1p(-goal / hazard)
        left = t - np.log(-np.log1p(np.expm1(-hazard) * np.exp(goal)))
        return np.asarray(np.where(np.asarray(side) > 0, right, left))

    def quantile(self, log_cdf: FloatArray, log_sf: FloatArray) -> FloatArray:
        return np.asarray(np.log(-log_sf))
