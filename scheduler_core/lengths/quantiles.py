"""Distribution of output length X in tokens given by quantiles of ln X instead of a parametric family.

P(ln X <= z) is linear in z between the quantiles q_0 <= ... <= q_K at the levels u_0 < ... < u_K. The tails
beyond them are exponential, with scales a and b from the adjacent gaps:

    P(ln X <= z) = u_0 exp((z - q_0) / a),        a = (q_1 - q_0) / ln(u_1 / u_0),                      z < q_0
    P(ln X > z)  = (1 - u_K) exp(-(z - q_K) / b),  b = (q_K - q_(K-1)) / ln((1 - u_(K-1)) / (1 - u_K)),  z > q_K

Expectations are of the censored length. The stop-loss integral (see `distribution`) has a closed form on each part.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from scheduler_core.errors import InputError
from scheduler_core.lengths.distribution import checked_level, checked_tokens
from scheduler_core.lengths.standard import FloatArray

#: u_0, ..., u_K: the levels of all predicted quantiles; the middle one is the median.
LEVELS = (0.01, 0.025, *(round(0.05 * step, 2) for step in range(1, 20)), 0.975, 0.99)
_U = np.array(LEVELS)
_STEPS, _LOW, _HIGH = np.diff(_U), LEVELS[0], 1.0 - LEVELS[-1]
_LOG_LOW, _LOG_HIGH = math.log(LEVELS[1] / _LOW), math.log((1.0 - LEVELS[-2]) / _HIGH)
_STEP_LIST = _STEPS.tolist()
#: Minimum gap in ln tokens, so that slopes are finite for equal quantiles.
_MIN_GAP = 1e-6


@dataclass(frozen=True, eq=False)
class LogQuantiles:
    """Distribution(s) of output length with given quantiles; arguments, results and errors are those of `LogT`.

    Attributes:
        quantiles: Quantiles of ln X (ln tokens) at `LEVELS` [..., K+1], finite and non-decreasing.
    """

    quantiles: Any
    #: Gaps [..., K], a and b [...].
    _gaps: Any = field(init=False, repr=False)
    _low: Any = field(init=False, repr=False)
    _high: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        array = np.array(self.quantiles, dtype=np.float64)
        if array.shape[-1:] != _U.shape or not np.isfinite(array).all() or (np.diff(array) < 0).any():
            allowed = f"{len(LEVELS)} finite, non-decreasing numbers"
            raise InputError("quantiles", array.tolist(), allowed)
        array.setflags(write=False)
        gaps = np.maximum(np.diff(array), _MIN_GAP)
        derived = {"_gaps": gaps, "_low": gaps[..., 0] / _LOG_LOW, "_high": gaps[..., -1] / _LOG_HIGH}
        for name, value in ({"quantiles": array} | derived).items():
            object.__setattr__(self, name, value)

    def cdf(self, x: ArrayLike) -> FloatArray:
        """P(X <= x), x in tokens, with full relative accuracy in the left tail."""
        below, inner, above = self._parts(_log(x))
        return np.asarray(below + inner @ _STEPS + (_HIGH - above))[()]

    def sf(self, x: ArrayLike) -> FloatArray:
        """P(X > x), x in tokens, with full relative accuracy in the right tail."""
        below, inner, above = self._parts(_log(x))
        return np.asarray(above + (1.0 - inner) @ _STEPS + (_LOW - below))[()]

    def logsf(self, x: ArrayLike) -> FloatArray:
        """ln P(X > x)."""
        z = _log(x)
        with np.errstate(divide="ignore"):
            tail = np.log(_HIGH) - (z - self.quantiles[..., -1]) / self._high
            return np.where(z > self.quantiles[..., -1], tail, np.log(self.sf(x)))[()]

    def logpdf(self, x: ArrayLike) -> FloatArray:
        """ln f(x), x in tokens; -inf for x <= 0."""
        z, q = _log(x), self.quantiles
        is_inner = (q[..., :-1] <= z[..., None]) & (z[..., None] < q[..., 1:])
        left = np.log(_LOW / self._low) + (z - q[..., 0]) / self._low
        right = np.log(_HIGH / self._high) - (z - q[..., -1]) / self._high
        with np.errstate(divide="ignore"):
            inner = np.log((is_inner * (_STEPS / self._gaps)).sum(axis=-1))
        log_density = np.where(z < q[..., 0], left, np.where(z < q[..., -1], inner, right))
        return np.where(np.isfinite(z), log_density - np.where(np.isfinite(z), z, 0.0), -np.inf)[()]

    def pdf(self, x: ArrayLike) -> FloatArray:
        """f(x) per token, x in tokens; 0 for x <= 0."""
        return np.exp(self.logpdf(x))

    def logppf(self, q: ArrayLike) -> FloatArray:
        """ln of the q-quantile, q in [0, 1]; infinite at 0 and 1."""
        level = checked_level("q", q)
        with np.errstate(divide="ignore"):
            below = np.minimum(np.log(level / _LOW), 0.0)
            above = np.minimum(np.log((1.0 - level) / _HIGH), 0.0)
        if self.quantiles.ndim == 1:
            middle = np.interp(level, _U, self.quantiles)
        else:
            inner = np.clip((level[..., None] - _U[:-1]) / _STEPS, 0.0, 1.0)
            middle = self.quantiles[..., 0] + (inner * np.diff(self.quantiles)).sum(axis=-1)
        return np.asarray(middle + self._low * below - self._high * above)[()]

    def ppf(self, q: ArrayLike) -> FloatArray:
        """q-quantile in tokens, q in [0, 1]; a value above the float range is +inf."""
        with np.errstate(over="ignore"):
            return np.exp(self.logppf(q))

    def expected(self, max_tokens: ArrayLike, generated_tokens: ArrayLike = 0.0) -> FloatArray:
        """E[min(X, M)] in tokens; with g > 0 the remaining E[min(X, M) - g | X > g] after g tokens."""
        top = checked_tokens("max_tokens", max_tokens, positive=True)
        generated = checked_tokens("generated_tokens", generated_tokens)
        if (generated > top).any():
            raise InputError("max_tokens", max_tokens, "at least generated_tokens")
        return self._mean_excess(generated, top, self.sf(generated))

    def cvar(self, alpha: ArrayLike, max_tokens: ArrayLike) -> FloatArray:
        """CVaR_alpha(min(X, M)): mean of the worst fraction 1 - alpha of censored lengths, in tokens."""
        level = checked_level("alpha", alpha, below_one=True)
        top = checked_tokens("max_tokens", max_tokens, positive=True)
        value = np.minimum(self.ppf(level), top)
        # Divides by 1 - alpha, not by P(X > v): of equal quantiles, a part is in the worst fraction.
        return np.asarray(value + self._mean_excess(value, top, 1.0 - level))[()]

    def expected_and_cvar(self, alpha: ArrayLike, max_tokens: ArrayLike) -> tuple[FloatArray, FloatArray]:
        """(`expected`, `cvar`) with expected <= cvar <= max_tokens."""
        tail_mean = self.cvar(alpha, max_tokens)
        return np.minimum(self.expected(max_tokens), tail_mean), tail_mean

    def _parts(self, z: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """P(ln X <= z) below q_0, the fraction of each gap up to z [..., K], and P(ln X > z) above q_K."""
        q = self.quantiles
        below = _LOW * np.exp(np.minimum(z - q[..., 0], 0.0) / self._low)
        above = _HIGH * np.exp(-np.maximum(z - q[..., -1], 0.0) / self._high)
        return below, np.clip((z[..., None] - q[..., :-1]) / self._gaps, 0.0, 1.0), above

    def _mean_excess(self, start: FloatArray, top: FloatArray, fraction: FloatArray) -> FloatArray:
        """Integral of P(X > x) over [a, M] = [start, top], divided by `fraction`; in the right tail by P(X > a)."""
        q, ends = self.quantiles, (_log(start), _log(top))
        left, middle = [], []
        for z in ends:
            below, _, _ = self._parts(z)
            # Antiderivatives of 1 - F(ln x), at the end of the part of each piece that is below z.
            left.append(np.exp(np.minimum(z, q[..., 0])) * (1.0 - below * self._low / (1.0 + self._low)))
            inner = np.clip(z[..., None], q[..., :-1], q[..., 1:])
            slope = _STEPS / self._gaps
            factor = 1.0 - _U[:-1] + slope * (1.0 - (inner - q[..., :-1]))
            middle.append((np.exp(inner) * factor).sum(axis=-1))
        is_tail = ends[0] > q[..., -1]
        low, high = (np.maximum(z, q[..., -1]) for z in ends)
        power = 1.0 - 1.0 / self._high
        power = np.where(np.abs(power) < 1e-12, 1e-12, power)
        tail = np.exp(low) * np.expm1(power * (high - low)) / power
        # In the right tail, `tail` is already relative to P(X > a), which may underflow.
        body = left[1] - left[0] + middle[1] - middle[0] + _HIGH * tail
        excess = np.where(is_tail, tail, body / np.where(is_tail, 1.0, fraction))
        return np.asarray(np.clip(excess, 0.0, top - start))[()]


def _log(x: ArrayLike) -> FloatArray:
    with np.errstate(divide="ignore"):
        return np.log(np.maximum(np.asarray(x, dtype=np.float64), 0.0))


def moved(quantiles: Any, mu: Any, new_mu: Any, factor: Any) -> Any:
    """Quantiles [..., K] moved from `mu` to `new_mu`, with distances from mu times `factor` [...]; arrays or tensors."""
    return new_mu[..., None] + (quantiles - mu[..., None]) * factor[..., None]


def cdf(quantiles: Sequence[float], tokens: float) -> float:
    """P(X <= tokens) of one request: `LogQuantiles.cdf` for valid quantiles and a number of tokens > 0, without arrays."""
    z = math.log(tokens)
    if z < quantiles[0]:
        return _LOW * math.exp((z - quantiles[0]) / _scale(quantiles[1] - quantiles[0], _LOG_LOW))
    if z >= quantiles[-1]:
        return 1.0 - _HIGH * math.exp((quantiles[-1] - z) / _scale(quantiles[-1] - quantiles[-2], _LOG_HIGH))
    index = bisect_right(quantiles, z)
    gap = quantiles[index] - quantiles[index - 1]
    return LEVELS[index - 1] + (LEVELS[index] - LEVELS[index - 1]) * (z - quantiles[index - 1]) / gap


def expected_and_cvar(
    quantiles: Sequence[float], max_tokens: float, alpha: float = 0.9
) -> tuple[float, float]:
    """(E[min(X, M)], CVaR_alpha(min(X, M))) in tokens of one request, for valid quantiles: the scheduler's fast path.

    Same results as `LogQuantiles.expected_and_cvar`, for plain floats; alpha in [0.5, 1). X is a mixture of the parts between
    two quantiles, where ln X is uniform, and of the tails; each adds its probability times its mean of min(X, M).
    """
    if not (0 < max_tokens < math.inf and 0.5 <= alpha < 1):
        raise InputError(
            "max_tokens, alpha", (max_tokens, alpha), "a finite max_tokens > 0 and alpha in [0.5, 1)"
        )
    top = math.log(max_tokens)
    low = _scale(quantiles[1] - quantiles[0], _LOG_LOW)
    # E[min(exp(q - low E), M)] with E exponential
    first = min(quantiles[0], top)
    mean = _LOW * math.exp(first) * (1.0 - math.exp((first - quantiles[0]) / low) * low / (1.0 + low))
    tail = 0.0
    for index, step in enumerate(_STEP_LIST):
        left, right, end = quantiles[index], quantiles[index + 1], LEVELS[index + 1]
        mean += step * _mean_of_uniform(left, right, top)
        if end > alpha:
            share = min((end - alpha) / step, 1.0)
            tail += share * step * _mean_of_uniform(right - share * (right - left), right, top)
    high = _scale(quantiles[-1] - quantiles[-2], _LOG_HIGH)
    above = _mean_of_tail(quantiles[-1], high, top)
    mean += _HIGH * above
    if 1.0 - alpha < _HIGH:
        worst = _mean_of_tail(quantiles[-1] - high * math.log((1.0 - alpha) / _HIGH), high, top)
    else:
        worst = (tail + _HIGH * above) / (1.0 - alpha)
    return min(mean, worst), worst


def _scale(gap: float, log_ratio: float) -> float:
    return max(gap, _MIN_GAP) / log_ratio


def _mean_of_uniform(left: float, right: float, top: float) -> float:
    """E[min(exp(Z), exp(top))], Z uniform in [left, right]."""
    gap = right - left
    if top <= left:
        return math.exp(top)
    if gap < _MIN_GAP:
        return math.exp(left)
    inner = min(top - left, gap)
    return (math.exp(left) * math.expm1(inner) + math.exp(min(top, right)) * (gap - inner)) / gap


def _mean_of_tail(start: float, scale: float, top: float) -> float:
    """E[min(exp(start + scale E), exp(top))], E exponential."""
    if top <= start:
        return math.exp(top)
    power = 1.0 - 1.0 / scale
    growth = top - start if abs(power) < 1e-12 else math.expm1(power * (top - start)) / power
    return math.exp(start) * (1.0 + growth)
