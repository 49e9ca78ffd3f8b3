"""The law of T in ln X = location + spread * T, and everything that follows from its density alone.

Each length distribution is one of these laws, moved and stretched on the log scale. A law is given in a coordinate t
in which its density q(t) is log-concave with its mode at t = 0, and T = height(t) is increasing, height(0) = 0.

| law | coordinate | q(t), up to a constant |
| --- | --- | --- |
| Student t, nu degrees of freedom | T = sqrt(nu) sinh t | sech(t)^nu |
| normal | T = t | exp(-t^2/2) |
| ln(Gamma(k)/k) | T = t | exp(k (t - exp t)) |

The mass beyond t, away from the centre, is q(t) R(t), R(t) = integral over w > 0 of q(t + w)/q(t) (Mills' ratio in this
coordinate). The integrand falls from 1, and where it is below exp(-41) it is left out. So tails keep their relative
accuracy however far out they are. Because q is log-concave so is its tail, hence Newton's method on the logarithm of
the tail converges, and from the right of the root it does so monotonically.

Shapes: one row for each distribution. `t` is a column [N, 1], `w` a column or a matrix [N, K], results have the shape
of their arguments broadcast; parameters of a law are [N, 1] or [1, 1]. `side` is +1 for the right tail, -1 for the left.
The caller switches off numpy's warnings of overflow, underflow and division by zero: an infinite logarithm, and a term
that vanishes, are right answers here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from scheduler_core.lengths.arrays import FloatArray
from scheduler_core.lengths.quadrature import NODES, WEIGHTS

#: What is below exp(-41) = 1.6e-18 of what is kept is left out.
CUT = 41.0
_MOST_STEPS = 100


def log_complement(log_p: FloatArray) -> FloatArray:
    """ln(1 - exp(log_p)) for log_p <= 0."""
    near_zero = np.log(-np.expm1(np.maximum(log_p, -1.0)))
    return np.where(log_p > -0.7, near_zero, np.log1p(-np.exp(np.minimum(log_p, -0.5))))


class Law(ABC):
    """One row of laws: see the module's docstring."""

    #: Where left and right tail meet; the mode or a point to the right of it.
    split: FloatArray

    @abstractmethod
    def coordinate(self, height: FloatArray) -> FloatArray:
        """t of a value of T."""

    @abstractmethod
    def height(self, t: FloatArray) -> FloatArray:
        """T at t."""

    @abstractmethod
    def rise(self, t: FloatArray, w: FloatArray) -> FloatArray:
        """height(t + w) - height(t), without cancellation."""

    @abstractmethod
    def travel(self, t: FloatArray, rise: FloatArray) -> FloatArray:
        """The w >= 0 with height(t + w) - height(t) = rise >= 0; t >= 0, or >= split."""

    @abstractmethod
    def log_stretch(self, t: FloatArray) -> FloatArray:
        """ln of dT/dt."""

    @abstractmethod
    def log_density(self, t: FloatArray) -> FloatArray:
        """ln q(t)."""

    @abstractmethod
    def drop(self, t: FloatArray, w: FloatArray) -> FloatArray:
        """ln q(t + w) - ln q(t), without cancellation; w points away from the mode, or t = 0."""

    @abstractmethod
    def reach(self, t: FloatArray, side: FloatArray | float, cut: FloatArray | float) -> FloatArray:
        """A w >= 0 with drop(t, side * w) <= -cut, not much too large."""

    @abstractmethod
    def pieces(
        self, spread: FloatArray, start: FloatArray, origin: FloatArray, end: FloatArray
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Where exp(spread T) q(t) lives within [start, end]: (low, middle, high).

        Outside [low, high] it is negligible; what features it has are at the ends of [low, middle], [middle, high].

        Args:
            spread: Factor of T in ln X.
            start: From here, may be -inf.
            origin: max(start, 0), but at most `end`.
            end: To here.
        """

    def width(self, t: FloatArray, side: FloatArray | float) -> FloatArray:
        """How far out from t the density counts."""
        return self.reach(t, side, CUT)

    def ratio(self, t: FloatArray, side: FloatArray | float) -> FloatArray:
        """R(t), the mass beyond t over q(t)."""
        width = self.width(t, side)
        falling = np.exp(self.drop(t, side * width * NODES))
        return np.asarray(width * (falling @ WEIGHTS)[:, None])

    def log_tail(self, t: FloatArray, side: FloatArray | float) -> FloatArray:
        """ln of the mass beyond t; t on that side of the split."""
        return np.minimum(self.log_density(t) + np.log(self.ratio(t, side)), 0.0)

    def log_sf(self, t: FloatArray) -> FloatArray:
        """ln P(T > height(t)), exact in both tails; t may be infinite or NaN."""
        return self._log_probability(t, 1.0)

    def log_cdf(self, t: FloatArray) -> FloatArray:
        """ln P(T <= height(t)), exact in both tails; t may be infinite or NaN."""
        return self._log_probability(t, -1.0)

    def _log_probability(self, t: FloatArray, side: float) -> FloatArray:
        safe = np.where(np.isfinite(t), t, self.split)
        own = np.where(safe >= self.split, 1.0, -1.0)
        tail = self.log_tail(safe, own)
        value = np.where(own == side, tail, log_complement(tail))
        value = np.where(np.isinf(t), np.where(t * side < 0, 0.0, -np.inf), value)
        return np.where(np.isnan(t), np.nan, value)

    def outward(self, t: FloatArray, goal: FloatArray, side: FloatArray | float) -> FloatArray:
        """The w >= 0 with ln(mass beyond t + side w) - ln(mass beyond t) = goal <= 0."""
        # R falls outward, so the start is at or beyond the root.
        w = self.reach(t, side, -goal)
        here = np.log(self.ratio(t, side))
        for _ in range(_MOST_STEPS):
            ratio = self.ratio(t + side * w, side)
            error = self.drop(t, side * w) + np.log(ratio) - here - goal
            step = error * ratio
            w = np.maximum(w + step, 0.0)
            # The error after a step goes with its square, down to what rounding leaves.
            if np.all(np.abs(step) <= 1e-9 * w + 4e-16 * (1.0 - goal) * ratio):
                break
        return w

    def quantile(self, log_cdf: FloatArray, log_sf: FloatArray) -> FloatArray:
        """t with these logarithms of P(T <= height(t)) and P(T > height(t)); -inf gives an infinite t."""
        split = self.split + np.zeros_like(log_sf)
        at_split = self.log_tail(split, 1.0)
        right = log_sf <= at_split
        side = np.where(right, 1.0, -1.0)
        goal = np.where(right, log_sf - at_split, log_cdf - log_complement(at_split))
        known = np.isfinite(goal)
        w = self.outward(split, np.minimum(np.where(known, goal, 0.0), 0.0), side)
        return np.where(known, split + side * w, side * np.inf)
