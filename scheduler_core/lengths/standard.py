"""Standard distributions of T in ln X = location + scale * T, with all functions derived from the density.

A standard distribution is defined in a coordinate t in which its density q(t) is log-concave with mode t = 0, and
T = value(t) is increasing with value(0) = 0.

| distribution of T | coordinate | q(t), up to a constant |
| --- | --- | --- |
| Student t, nu degrees of freedom (`student_t`) | T = sqrt(nu) sinh t | sech(t)^nu |
| normal | T = t | exp(-t^2/2) |

The mass beyond t, away from the center, is q(t) R(t), R(t) = integral over w > 0 of q(t + w)/q(t) (Mills'
ratio in this coordinate). The integrand decreases from 1 and is neglected below exp(-41), so the tails are
accurate in relative terms at any distance. Because q is log-concave, its tail is too. Newton's method on the
logarithm of the tail therefore converges, and it does so monotonically from the right of the root.

Shapes: one row per distribution. `t` is a column [N, 1], `w` a column or a matrix [N, K]; results have the
broadcast shape of the arguments; parameters are [N, 1] or [1, 1]. `side` is +1 for the right tail, -1 for the
left. Callers must suppress numpy's warnings of overflow, underflow and division by zero, because infinite
logarithms and terms that underflow to 0 are correct results here.
"""

import math
from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

#: Values below exp(-41) = 1.6e-18 of the maximum are neglected.
NEGLIGIBLE = 41.0
_MAX_STEPS = 100
#: ln of 1/sqrt(2 pi), the constant of the normal density.
LOG_NORMALIZER = -0.5 * math.log(2.0 * math.pi)


def _tanh_sinh(step: float = 0.07, half_count: int = 46) -> tuple[FloatArray, FloatArray]:
    """Nodes and weights of the tanh-sinh rule on [0, 1].

    The nodes are double-exponentially dense at both ends, so features of the integrand at the ends are resolved at any
    scale (Takahasi & Mori, "Double exponential formulas for numerical integration", Publ. RIMS 9 (1974), 721-741).
    """
    t = step * np.arange(-half_count, half_count + 1)
    nodes = 1.0 / (1.0 + np.exp(-np.pi * np.sinh(t)))
    weights = step * np.pi * np.cosh(t) * nodes * nodes[::-1]
    nodes.setflags(write=False)
    weights.setflags(write=False)
    return nodes, weights


NODES, WEIGHTS = _tanh_sinh()


def log_complement(log_p: FloatArray) -> FloatArray:
    """ln(1 - exp(log_p)) for log_p <= 0."""
    near_zero = np.log(-np.expm1(np.maximum(log_p, -1.0)))
    return np.where(log_p > -0.7, near_zero, np.log1p(-np.exp(np.minimum(log_p, -0.5))))


class StandardDistribution(ABC):
    """Rows of standard distributions of one kind; see the module's docstring.

    The methods implemented here are for a coordinate t that equals T.
    """

    def coordinate(self, value: FloatArray) -> FloatArray:
        """t of a value of T."""
        return value

    def value(self, t: FloatArray) -> FloatArray:
        """T at t."""
        return t

    def rise(self, t: FloatArray, w: FloatArray) -> FloatArray:
        """value(t + w) - value(t), without cancellation."""
        return w

    def travel(self, t: FloatArray, rise: FloatArray) -> FloatArray:
        """The w >= 0 with value(t + w) - value(t) = rise >= 0; t >= 0."""
        return rise

    def log_slope(self, t: FloatArray) -> FloatArray:
        """ln of dT/dt."""
        return np.zeros_like(t)

    @abstractmethod
    def log_density(self, t: FloatArray) -> FloatArray:
        """ln q(t)."""

    @abstractmethod
    def drop(self, t: FloatArray, w: FloatArray) -> FloatArray:
        """ln q(t + w) - ln q(t), without cancellation; w points away from the mode, or t = 0."""

    @abstractmethod
    def reach(self, t: FloatArray, side: FloatArray | float, depth: FloatArray | float) -> FloatArray:
        """A w >= 0 with drop(t, side * w) <= -depth, close to the smallest one."""

    @abstractmethod
    def pieces(
        self, scale: FloatArray, start: FloatArray, origin: FloatArray, end: FloatArray
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """(low, middle, high) such that exp(scale T) q(t) is negligible in [start, end] outside [low, high].

        Its features are at the ends of [low, middle] and [middle, high].

        Args:
            scale: Factor of T in ln X.
            start: Left end, may be -inf.
            origin: max(start, 0), but at most `end`.
            end: Right end.
        """

    def width(self, t: FloatArray, side: FloatArray | float) -> FloatArray:
        """Distance from t at which the density becomes negligible."""
        return self.reach(t, side, NEGLIGIBLE)

    def ratio(self, t: FloatArray, side: FloatArray | float) -> FloatArray:
        """R(t), the mass beyond t divided by q(t)."""
        width = self.width(t, side)
        falling = np.exp(self.drop(t, side * width * NODES))
        return np.asarray(width * (falling @ WEIGHTS)[:, None])

    def log_tail(self, t: FloatArray, side: FloatArray | float) -> FloatArray:
        """ln of the mass beyond t; t on that side of the mode."""
        return np.minimum(self.log_density(t) + np.log(self.ratio(t, side)), 0.0)

    def log_sf(self, t: FloatArray) -> FloatArray:
        """ln P(T > value(t)), exact in both tails; t may be infinite or NaN."""
        return self._log_probability(t, 1.0)

    def log_cdf(self, t: FloatArray) -> FloatArray:
        """ln P(T <= value(t)), exact in both tails; t may be infinite or NaN."""
        return self._log_probability(t, -1.0)

    def _log_probability(self, t: FloatArray, side: float) -> FloatArray:
        safe = np.where(np.isfinite(t), t, 0.0)
        own = np.where(safe >= 0, 1.0, -1.0)
        tail = self.log_tail(safe, own)
        value = np.where(own == side, tail, log_complement(tail))
        value = np.where(np.isinf(t), np.where(t * side < 0, 0.0, -np.inf), value)
        return np.where(np.isnan(t), np.nan, value)

    def outward(self, t: FloatArray, goal: FloatArray, side: FloatArray | float) -> FloatArray:
        """The w >= 0 with ln(mass beyond t + side w) - ln(mass beyond t) = goal <= 0."""
        # R decreases outward, so the start value is at or beyond the root.
        w = self.reach(t, side, -goal)
        here = np.log(self.ratio(t, side))
        for _ in range(_MAX_STEPS):
            ratio = self.ratio(t + side * w, side)
            error = self.drop(t, side * w) + np.log(ratio) - here - goal
            step = error * ratio
            w = np.maximum(w + step, 0.0)
            # Convergence is quadratic down to rounding errors.
            if np.all(np.abs(step) <= 1e-9 * w + 4e-16 * (1.0 - goal) * ratio):
                break
        return w

    def quantile(self, log_cdf: FloatArray, log_sf: FloatArray) -> FloatArray:
        """t for the logarithms of P(T <= value(t)) and P(T > value(t)); infinite if one of them is -inf."""
        mode = np.zeros_like(log_sf)
        at_mode = self.log_tail(mode, 1.0)
        right = log_sf <= at_mode
        side = np.where(right, 1.0, -1.0)
        goal = np.where(right, log_sf - at_mode, log_cdf - log_complement(at_mode))
        finite = np.isfinite(goal)
        w = self.outward(mode, np.minimum(np.where(finite, goal, 0.0), 0.0), side)
        return np.where(finite, side * w, side * np.inf)


class StandardNormal(StandardDistribution):
    """The standard normal: the limit nu -> infinity of Student's t."""

    def log_density(self, t: FloatArray) -> FloatArray:
        return np.asarray(LOG_NORMALIZER - 0.5 * t * t)

    def drop(self, t: FloatArray, w: FloatArray) -> FloatArray:
        return np.asarray(-w * (t + 0.5 * w))

    def reach(self, t: FloatArray, side: FloatArray | float, depth: FloatArray | float) -> FloatArray:
        steep = np.abs(t)
        return np.asarray(2.0 * depth / (steep + np.sqrt(steep * steep + 2.0 * depth) + 1e-300))

    def pieces(
        self, scale: FloatArray, start: FloatArray, origin: FloatArray, end: FloatArray
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        # exp(scale t) q(t) is the density of a normal with mean `scale`, up to a constant.
        middle = np.minimum(np.maximum(scale, start), end)
        width = self.width(middle - scale, 1.0)
        return np.maximum(start, middle - width), middle, np.minimum(end, middle + width)
