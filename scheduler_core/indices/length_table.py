"""A predicted output length as a table, from which what remains is read in microseconds while tokens come.

With X~ = min(max(X, 1), M), for an answer has a token at least, S(x) = P(X~ > x) and the work W(x) = E[min(X~, x)] = integral of S over [0, x], after g tokens

    E[X~ - g | X~ > g] = (W(M) - W(g)) / S(g)                                     expected remaining length
    r(g) = inf over b > g of (W(b) - W(g)) / (S(g) - S(b))                        Gittins rank: 1 / Gittins index

r(g) is the least expected work for each answer finished, over all ways to work until b at most (Gittins 1979, "Bandit
processes and dynamic allocation indices", J. R. Stat. Soc. B 41, 148-177; in this form Aalto, Ayesta & Righter 2009, "On
the Gittins index in the M/G/1 queue", Queueing Systems 63, 437-458).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from scheduler_core.lengths import LogT
from scheduler_core.predictions import LengthPrediction

FloatArray = NDArray[np.float64]

#: Survival at the table's points: half per cents in the body, then falling by this factor down to the floor.
_BODY_STEP, _TAIL_FACTOR, _FLOOR = 0.01, 0.75, 1e-9


def _levels() -> FloatArray:
    left = np.geomspace(1e-6, _BODY_STEP, 12)[:-1]
    body = np.arange(_BODY_STEP, 0.9 + _BODY_STEP / 2, _BODY_STEP)
    num_tail = math.ceil(math.log(_FLOOR / 0.1) / math.log(_TAIL_FACTOR))
    tail = 0.1 * _TAIL_FACTOR ** np.arange(1, num_tail + 1)
    return np.concatenate([1.0 - left, 1.0 - body, tail])


_SURVIVAL = _levels()


@lru_cache(maxsize=64)
def _heights(nu: float) -> FloatArray:
    """T of Student's law at the levels; ln X = mu + sigma T."""
    lower = _SURVIVAL >= 0.5
    found = np.empty_like(_SURVIVAL)
    law = LogT(0.0, 1.0, nu)
    found[lower] = law.logppf(1.0 - _SURVIVAL[lower])
    found[~lower] = -np.asarray(law.logppf(_SURVIVAL[~lower]))
    found.setflags(write=False)
    return found


class LengthTable:
    """S and W of min(X, M) at points up to M; between points both are interpolated linearly.

    Error of expectations and quantiles below 2 % or 0.1 tokens for nu >= 3.5 and sigma in [0.001, 1.2] (tests). Where
    S(g) < 1e-9 the prediction has been refuted and M - g is taken to be left.

    Args:
        prediction: Distribution of X, in tokens.
        max_tokens: M, in tokens.
    """

    __slots__ = ("_points", "_whole", "max_tokens", "points", "survival", "work")

    def __init__(self, prediction: LengthPrediction, max_tokens: int) -> None:
        cap = float(max_tokens)
        logs = prediction.mu + prediction.sigma * _heights(prediction.nu)
        inside = int(np.searchsorted(logs, math.log(cap)))
        points = np.empty(inside + 3)
        survival = np.empty(inside + 3)
        points[0], survival[0] = 0.0, 1.0
        points[1:-2] = np.exp(np.maximum(logs[:inside], 0.0))
        survival[1:-2] = _SURVIVAL[:inside]
        points[-2:] = cap
        survival[-2:] = _survival_at(math.log(cap), logs, inside), 0.0
        if inside == len(logs):
            points[-2] = points[-3]
        self.points: FloatArray = points
        self.survival: FloatArray = survival
        steps = np.diff(points) * (survival[1:] + survival[:-1]) * 0.5
        self.work: FloatArray = np.concatenate([[0.0], np.cumsum(steps)])
        self._whole = float(self.work[-1])
        self.max_tokens = max_tokens
        self._points: list[float] = points[:-1].tolist()

    def _at(self, generated_tokens: float) -> tuple[int, float, float]:
        """Index of the first point beyond g, S(g) and W(g); g < M."""
        index = bisect_right(self._points, generated_tokens)
        left, right = self._points[index - 1], float(self.points[index])
        share = (generated_tokens - left) / (right - left)
        s0, s1 = float(self.survival[index - 1]), float(self.survival[index])
        w0, w1 = float(self.work[index - 1]), float(self.work[index])
        return index, s0 + share * (s1 - s0), w0 + share * (w1 - w0)

    def expected_remaining(self, generated_tokens: float = 0.0) -> float:
        """E[min(X, M) - g | X > g] in tokens; 0 for g >= M."""
        if generated_tokens >= self.max_tokens:
            return 0.0
        _, alive, done = self._at(generated_tokens)
        left = self.max_tokens - generated_tokens
        return left if alive <= 0.0 else min((self._whole - done) / alive, left)

    def cdf(self, tokens: float) -> float:
        """P(min(X, M) <= x)."""
        if tokens >= self.max_tokens:
            return 1.0
        return 1.0 - self._at(max(tokens, 0.0))[1]

    def gittins_rank(self, generated_tokens: float = 0.0) -> float:
        """r(g), in tokens for each finished answer; 0 for g >= M. The smallest rank is served first."""
        if generated_tokens >= self.max_tokens:
            return 0.0
        index, alive, done = self._at(generated_tokens)
        ended = alive - self.survival[index:]
        spent = self.work[index:] - done
        with np.errstate(divide="ignore", invalid="ignore"):
            rank = np.where(ended > 0.0, spent / ended, np.inf)
        best = float(rank.min())
        return best if math.isfinite(best) else self.max_tokens - generated_tokens

    def remaining_quantile(self, q: float, generated_tokens: float = 0.0) -> float:
        """q-quantile of min(X, M) - g given X > g, in tokens; 0 for g >= M.

        Args:
            q: In (0, 1).
            generated_tokens: g >= 0.
        """
        if generated_tokens >= self.max_tokens:
            return 0.0
        index, alive, _ = self._at(generated_tokens)
        wanted = (1.0 - q) * alive
        later = index + int(np.searchsorted(-self.survival[index:], -wanted))
        later = min(later, len(self.points) - 1)
        x0 = max(float(self.points[later - 1]), generated_tokens)
        s0 = min(float(self.survival[later - 1]), alive)
        x1, s1 = float(self.points[later]), float(self.survival[later])
        share = (s0 - wanted) / (s0 - s1) if s0 > s1 else 1.0
        return float(x0 + share * (x1 - x0) - generated_tokens)


def _survival_at(log_x: float, logs: FloatArray, inside: int) -> float:
    """S(x) between two levels, ln S linear in ln x."""
    if inside == 0:
        return 1.0
    if inside == len(logs):
        return 0.0
    l0, l1 = float(logs[inside - 1]), float(logs[inside])
    s0, s1 = float(_SURVIVAL[inside - 1]), float(_SURVIVAL[inside])
    share = (log_x - l0) / (l1 - l0)
    return s0 * math.exp(share * math.log(s1 / s0))
