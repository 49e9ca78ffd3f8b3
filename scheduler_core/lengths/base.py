"""One interface for distributions of output length, and the length that remains while tokens come.

    ln X = location + spread * T,   X in tokens,

with T from one of the laws of module `law`. Expectations are of the censored length min(X, M), M = max_tokens (TIE,
Eqs. 8-10): the mean of a log-t is infinite. Nothing is sampled but by `sample`: the same input gives the same number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from scheduler_core.errors import InputError
from scheduler_core.lengths.arrays import FloatArray, Rows, broadcast, probability, tokens, unwrap
from scheduler_core.lengths.law import Law, log_complement
from scheduler_core.lengths.mean_excess import capped_cvar, mean_excess

#: Rows worked on at once: their nodes (93 for each) stay in cache, and memory stays bounded.
_ROWS_PER_BLOCK = 1024

#: Any finite number of tokens is below; keeps sums of them finite.
_FARTHEST = 1e300

#: What is computed for a block of rows: (law, location, spread, arguments) as columns [N, 1], to a column.
_Task = Callable[..., FloatArray]


class LengthDistribution(ABC):
    """Distribution(s) of output length; parameters broadcast against each other and against the arguments.

    A result has the broadcast shape of parameters and arguments; a numpy scalar if that is ().
    """

    @abstractmethod
    def _parameters(self) -> dict[str, FloatArray]:
        """The parameters by name, checked and read-only."""

    @abstractmethod
    def _location_and_spread(self) -> tuple[FloatArray, FloatArray]:
        """location (ln tokens) and spread of ln X."""

    @abstractmethod
    def _draws(self, rng: np.random.Generator, size: int | tuple[int, ...]) -> FloatArray:
        """Draws of X of that shape."""

    def _law_parameter(self) -> FloatArray:
        """The parameter that the law depends on, if it does."""
        return np.zeros(())

    @abstractmethod
    def _laws(self, parameter: FloatArray) -> Iterator[tuple[Rows, Law]]:
        """Which rows have which law, for a column of law parameters [N, 1]; [1, 1] if all rows share one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Broadcast shape of the parameters; () for one distribution."""
        return broadcast(self._parameters())[0].shape

    def logpdf(self, x: ArrayLike) -> FloatArray:
        """ln f(x), x in tokens; -inf for x <= 0."""
        return self._evaluate(_logpdf, {"x": np.asarray(x, dtype=np.float64)})

    def pdf(self, x: ArrayLike) -> FloatArray:
        """f(x) per token, x in tokens; 0 for x <= 0."""
        return unwrap(np.exp(self.logpdf(x)))

    def logcdf(self, x: ArrayLike) -> FloatArray:
        """ln P(X <= x), x in tokens, with full relative accuracy of P in the left tail."""
        return self._evaluate(_logcdf, {"x": np.asarray(x, dtype=np.float64)})

    def cdf(self, x: ArrayLike) -> FloatArray:
        """P(X <= x), x in tokens."""
        return unwrap(np.exp(self.logcdf(x)))

    def logsf(self, x: ArrayLike) -> FloatArray:
        """ln P(X > x): what a length cut at x tokens contributes to a right-censored likelihood."""
        return self._evaluate(_logsf, {"x": np.asarray(x, dtype=np.float64)})

    def sf(self, x: ArrayLike) -> FloatArray:
        """P(X > x), x in tokens, with full relative accuracy in the tail."""
        return unwrap(np.exp(self.logsf(x)))

    def logppf(self, q: ArrayLike) -> FloatArray:
        """ln of the q-quantile, q in [0, 1]: finite for 0 < q < 1 even where the quantile itself is not."""
        return self._evaluate(_logppf, {"q": probability("q", q)})

    def ppf(self, q: ArrayLike) -> FloatArray:
        """q-quantile in tokens, q in [0, 1]; a value above the float range is +inf."""
        with np.errstate(over="ignore"):
            return unwrap(np.exp(self.logppf(q)))

    def sample(self, rng: np.random.Generator, size: int | tuple[int, ...] | None = None) -> FloatArray:
        """Draws lengths in tokens (real numbers, not rounded); a draw above the float range is +inf.

        Args:
            rng: Source of randomness.
            size: Shape of the result; None means the shape of the parameters.
        """
        with np.errstate(over="ignore"):
            return unwrap(self._draws(rng, self.shape if size is None else size))

    def expected(self, max_tokens: ArrayLike) -> FloatArray:
        """E[min(X, M)] in tokens (TIE, Eq. 9).

        Args:
            max_tokens: M > 0, in tokens.
        """
        return self._mean_excess(np.zeros(()), tokens("max_tokens", max_tokens, positive=True))

    def cvar(self, alpha: ArrayLike, max_tokens: ArrayLike) -> FloatArray:
        """CVaR_alpha(min(X, M)): mean of the worst 1 - alpha share of censored lengths, in tokens (TIE, Eq. 10).

        M where the alpha-quantile v of X reaches M, else v + E[min(X, M) - v | X > v].

        Args:
            alpha: Level in [0, 1); 0 gives the expectation.
            max_tokens: M > 0, in tokens.
        """
        level = probability("alpha", alpha, below_one=True)
        cap = tokens("max_tokens", max_tokens, positive=True)
        return self._evaluate(capped_cvar, {"alpha": level, "max_tokens": cap})

    def expected_and_cvar(self, alpha: ArrayLike, max_tokens: ArrayLike) -> tuple[FloatArray, FloatArray]:
        """(`expected`, `cvar`) with expected <= cvar <= max_tokens: what a risk score needs (TIE, Eq. 11).

        Args:
            alpha: Level in [0, 1).
            max_tokens: M > 0, in tokens.
        """
        tail_mean = self.cvar(alpha, max_tokens)
        return unwrap(np.minimum(self.expected(max_tokens), tail_mean)), tail_mean

    def remaining(self, generated_tokens: ArrayLike) -> RemainingLength:
        """Distribution of X - g given X > g: what is left once g tokens are generated and it goes on.

        Args:
            generated_tokens: g >= 0, in tokens.
        """
        return RemainingLength(self, tokens("generated_tokens", generated_tokens))

    def _mean_excess(self, start_tokens: ArrayLike, cap: FloatArray) -> FloatArray:
        start = np.asarray(start_tokens, dtype=np.float64)
        return self._evaluate(mean_excess, {"start_tokens": start, "max_tokens": cap})

    def _evaluate(self, task: _Task, arguments: dict[str, FloatArray]) -> FloatArray:
        """Applies a task to all rows, block by block."""
        location, spread = self._location_and_spread()
        own = self._law_parameter()
        wide = broadcast({**self._parameters(), **arguments})
        shape = wide[0].shape
        columns = [
            np.ascontiguousarray(np.broadcast_to(array, shape)).reshape(-1, 1)
            for array in (location, spread, *arguments.values())
        ]
        shared = list(self._laws(own.reshape(1, 1))) if own.size == 1 else None
        own_column = np.broadcast_to(own, shape).reshape(-1, 1)
        out = np.empty((columns[0].shape[0], 1))
        with np.errstate(over="ignore", under="ignore", divide="ignore"):
            for first in range(0, len(out), _ROWS_PER_BLOCK):
                block = slice(first, first + _ROWS_PER_BLOCK)
                part = np.empty_like(out[block])
                for rows, law in shared or self._laws(own_column[block]):
                    part[rows] = task(law, *(column[block][rows] for column in columns))
                out[block] = part
        return unwrap(out.reshape(shape))


@dataclass(frozen=True, eq=False)
class RemainingLength:
    """X - g given X > g (spec: limit 3, prediction updated while tokens come).

    Attributes:
        length: Distribution of the whole output length X.
        generated_tokens: g >= 0, in tokens.
    """

    length: LengthDistribution
    generated_tokens: FloatArray

    def sf(self, more_tokens: ArrayLike) -> FloatArray:
        """P(more than `more_tokens` remain)."""
        more = np.clip(np.asarray(more_tokens, dtype=np.float64), 0.0, _FARTHEST)
        arguments = {"generated_tokens": self.generated_tokens, "more_tokens": more}
        return self.length._evaluate(_conditional_sf, arguments)

    def ppf(self, q: ArrayLike) -> FloatArray:
        """q-quantile of the remaining tokens, q in [0, 1]: to reserve KV blocks by."""
        arguments = {"generated_tokens": self.generated_tokens, "q": probability("q", q)}
        return self.length._evaluate(_conditional_ppf, arguments)

    def expected(self, max_tokens: ArrayLike) -> FloatArray:
        """E[min(X, M) - g | X > g] in tokens; M caps the whole output, so the result is <= M - g.

        Args:
            max_tokens: M >= g, in tokens.
        """
        return self.length._mean_excess(self.generated_tokens, self._cap(max_tokens))

    def cvar(self, alpha: ArrayLike, max_tokens: ArrayLike) -> FloatArray:
        """CVaR_alpha of min(X, M) - g given X > g, in tokens: the mean of its worst 1 - alpha share.

        Args:
            alpha: Level in [0, 1); 0 gives the expectation.
            max_tokens: M >= g, in tokens.
        """
        level = probability("alpha", alpha, below_one=True)
        cap = self._cap(max_tokens)
        left = cap - self.generated_tokens
        more = np.minimum(self.ppf(level), left)
        whole = np.minimum(self.generated_tokens + more, cap)
        beyond = np.minimum(more + self.length._mean_excess(whole, cap), left)
        # Nothing generated is no condition.
        if (self.generated_tokens == 0).any():
            beyond = np.where(self.generated_tokens == 0, self.length.cvar(level, cap), beyond)
        return unwrap(beyond)

    def _cap(self, max_tokens: ArrayLike) -> FloatArray:
        cap = tokens("max_tokens", max_tokens, positive=True)
        cap, done = broadcast({"max_tokens": cap, "generated_tokens": self.generated_tokens})
        if (cap < done).any():
            raise InputError("max_tokens", float(cap[cap < done].flat[0]), "at least generated_tokens")
        return cap


def _coordinate(law: Law, location: FloatArray, spread: FloatArray, x: FloatArray) -> FloatArray:
    """t of a length; -inf for x <= 0."""
    return law.coordinate((np.log(np.maximum(x, 0.0)) - location) / spread)


def _logpdf(law: Law, location: FloatArray, spread: FloatArray, x: FloatArray) -> FloatArray:
    log_x = np.log(np.where((x > 0) & (x < np.inf), x, 1.0))
    t = law.coordinate((log_x - location) / spread)
    value = law.log_density(t) - law.log_stretch(t) - np.log(spread) - log_x
    return np.where(np.isnan(x), np.nan, np.where((x > 0) & (x < np.inf), value, -np.inf))


def _logcdf(law: Law, location: FloatArray, spread: FloatArray, x: FloatArray) -> FloatArray:
    return law.log_cdf(_coordinate(law, location, spread, x))


def _logsf(law: Law, location: FloatArray, spread: FloatArray, x: FloatArray) -> FloatArray:
    return law.log_sf(_coordinate(law, location, spread, x))


def _logppf(law: Law, location: FloatArray, spread: FloatArray, q: FloatArray) -> FloatArray:
    return location + spread * law.height(law.quantile(np.log(q), np.log1p(-q)))


def _conditional_sf(
    law: Law, location: FloatArray, spread: FloatArray, done: FloatArray, more: FloatArray
) -> FloatArray:
    """P(X > g + more) / P(X > g); beyond the split by a ratio of tails, so that it holds however small they are."""
    start = _coordinate(law, location, spread, done)
    beyond = start >= law.split
    near = np.where(beyond, start, law.split)
    w = law.travel(near, np.log1p(more / np.where(beyond, done, 1.0)) / spread)
    ratio = np.exp(law.drop(near, w)) * law.ratio(near + w, 1.0) / law.ratio(near, 1.0)
    end = _coordinate(law, location, spread, done + more)
    value = np.where(beyond, ratio, np.exp(law.log_sf(end) - law.log_sf(start)))
    return np.where(more > 0, np.clip(value, 0.0, 1.0), 1.0)


def _conditional_ppf(
    law: Law, location: FloatArray, spread: FloatArray, done: FloatArray, q: FloatArray
) -> FloatArray:
    """Solved for the distance from g where g is beyond the split, else for the whole length."""
    start = _coordinate(law, location, spread, done)
    beyond = (start >= law.split) & (q < 1)
    near = np.where(beyond, start, law.split)
    w = law.outward(near, np.where(beyond, np.log1p(-q), 0.0), 1.0)
    further = np.where(beyond, done, 0.0) * np.expm1(spread * law.rise(near, w))
    if beyond.all():
        return further
    log_sf = np.log1p(-q) + law.log_sf(start)
    whole = np.exp(location + spread * law.height(law.quantile(log_complement(log_sf), log_sf)))
    return np.where(beyond, further, np.maximum(whole - done, 0.0))
