"""One interface for distributions of output length, and the length that remains while tokens come.

    ln X = location + scale * T,   X in tokens,

with T from one of the standard distributions of module `standard`. Expectations are of the censored length min(X, M),
M = max_tokens (TIE, Eqs. 8-10): the mean of a log-t is infinite. Nothing is sampled but by `sample`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scheduler_core.errors import InputError
from scheduler_core.lengths.mean_excess import censored_cvar, mean_excess
from scheduler_core.lengths.standard import FloatArray, StandardDistribution, log_complement

#: Which rows of a column.
Rows = slice | NDArray[np.intp]

#: Rows worked on at once: their nodes (93 for each) stay in cache, and memory stays bounded.
_ROWS_PER_BLOCK = 1024

#: Above any number of tokens; keeps sums of them finite.
_MAX_LENGTH = 1e300

#: What is computed for a block of rows: (standard distribution, location, scale, arguments) as columns [N, 1], to a column.
_Task = Callable[..., FloatArray]


def unwrap(array: Any) -> FloatArray:
    """A numpy scalar for a result without dimensions, the array otherwise."""
    result: FloatArray = np.asarray(array)[()]
    return result


def broadcast(named: dict[str, FloatArray]) -> tuple[FloatArray, ...]:
    """The arrays, broadcast against each other; InputError if their shapes do not fit."""
    try:
        return tuple(np.broadcast_arrays(*named.values()))
    except ValueError as error:
        shapes = tuple(array.shape for array in named.values())
        raise InputError(", ".join(named), shapes, "shapes that broadcast against each other") from error


def _check(name: str, array: FloatArray, valid: NDArray[np.bool_], allowed: str) -> FloatArray:
    if not valid.all():
        raise InputError(name, float(array[~valid].flat[0]), allowed)
    return array


def parameter(name: str, value: ArrayLike, *, positive: bool, finite: bool = True) -> FloatArray:
    """A read-only copy of a distribution's parameter; InputError for elements outside its range."""
    array = np.array(value, dtype=np.float64)
    valid = np.isfinite(array) | ((array == np.inf) & (not finite))
    if positive:
        valid &= array > 0
    kind = "finite numbers" if finite else "numbers or inf,"
    _check(name, array, valid, f"{kind} > 0" if positive else kind)
    array.setflags(write=False)
    return array


def tokens(name: str, value: ArrayLike, *, positive: bool = False) -> FloatArray:
    """Numbers of tokens; InputError unless they are finite and >= 0, or > 0 where `positive`."""
    array = np.asarray(value, dtype=np.float64)
    valid = np.isfinite(array) & ((array > 0) if positive else (array >= 0))
    return _check(name, array, valid, f"finite numbers {'>' if positive else '>='} 0, in tokens")


def probability(name: str, value: ArrayLike, *, below_one: bool = False) -> FloatArray:
    """Probabilities; InputError unless they are in [0, 1], or in [0, 1) where `below_one`."""
    array = np.asarray(value, dtype=np.float64)
    valid = (array >= 0) & ((array < 1) if below_one else (array <= 1))
    return _check(name, array, valid, "numbers in [0, 1)" if below_one else "numbers in [0, 1]")


class LengthDistribution(ABC):
    """Distribution(s) of output length; parameters broadcast against each other and against the arguments.

    A result has the broadcast shape of parameters and arguments; a numpy scalar if that is (). Lengths x and max_tokens
    M > 0 are in tokens, generated_tokens g >= 0, levels q in [0, 1] and alpha in [0, 1); InputError otherwise, and for
    parameters that are not finite (but nu) or not positive (but mu).
    """

    @abstractmethod
    def _parameters(self) -> dict[str, FloatArray]:
        """The parameters by name, checked and read-only."""

    @abstractmethod
    def _location_and_scale(self) -> tuple[FloatArray, FloatArray]:
        """location (ln tokens) and scale of ln X."""

    @abstractmethod
    def _draws(self, rng: np.random.Generator, size: int | tuple[int, ...]) -> FloatArray:
        """Draws of X of that shape."""

    def _shape_parameter(self) -> FloatArray:
        """The parameter that the standard distribution depends on, if it does."""
        return np.zeros(())

    @abstractmethod
    def _standard_rows(self, parameter: FloatArray) -> Iterator[tuple[Rows, StandardDistribution]]:
        """Rows and their standard distribution, for a column of shape parameters [N, 1]; [1, 1] if all share one."""

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
        """ln P(X > x): what a length censored at x tokens contributes to a right-censored likelihood."""
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
        """Draws of that size, default the shape of the parameters, not rounded; above the float range +inf."""
        with np.errstate(over="ignore"):
            return unwrap(self._draws(rng, self.shape if size is None else size))

    def expected(self, max_tokens: ArrayLike) -> FloatArray:
        """E[min(X, M)] in tokens (TIE, Eq. 9)."""
        return self._mean_excess(np.zeros(()), tokens("max_tokens", max_tokens, positive=True))

    def cvar(self, alpha: ArrayLike, max_tokens: ArrayLike) -> FloatArray:
        """CVaR_alpha(min(X, M)): mean of the worst fraction 1 - alpha of censored lengths, in tokens (TIE, Eq. 10).

        M where the alpha-quantile v of X reaches M, else v + E[min(X, M) - v | X > v]."""
        level = probability("alpha", alpha, below_one=True)
        top = tokens("max_tokens", max_tokens, positive=True)
        return self._evaluate(censored_cvar, {"alpha": level, "max_tokens": top})

    def expected_and_cvar(self, alpha: ArrayLike, max_tokens: ArrayLike) -> tuple[FloatArray, FloatArray]:
        """(`expected`, `cvar`) with expected <= cvar <= max_tokens: what a risk score needs (TIE, Eq. 11)."""
        tail_mean = self.cvar(alpha, max_tokens)
        return unwrap(np.minimum(self.expected(max_tokens), tail_mean)), tail_mean

    def remaining(self, generated_tokens: ArrayLike) -> RemainingLength:
        """Distribution of X - g given X > g: what is left once g tokens are generated and it goes on."""
        return RemainingLength(self, tokens("generated_tokens", generated_tokens))

    def _mean_excess(self, start_tokens: ArrayLike, top: FloatArray) -> FloatArray:
        start = np.asarray(start_tokens, dtype=np.float64)
        return self._evaluate(mean_excess, {"start_tokens": start, "max_tokens": top})

    def _evaluate(self, task: _Task, arguments: dict[str, FloatArray]) -> FloatArray:
        """Applies a task to all rows, block by block."""
        location, scale = self._location_and_scale()
        own = self._shape_parameter()
        wide = broadcast({**self._parameters(), **arguments})
        shape = wide[0].shape
        columns = [
            np.ascontiguousarray(np.broadcast_to(array, shape)).reshape(-1, 1)
            for array in (location, scale, *arguments.values())
        ]
        shared = list(self._standard_rows(own.reshape(1, 1))) if own.size == 1 else None
        own_column = np.broadcast_to(own, shape).reshape(-1, 1)
        out = np.empty((columns[0].shape[0], 1))
        with np.errstate(over="ignore", under="ignore", divide="ignore"):
            for first in range(0, len(out), _ROWS_PER_BLOCK):
                block = slice(first, first + _ROWS_PER_BLOCK)
                part = np.empty_like(out[block])
                for rows, standard in shared or self._standard_rows(own_column[block]):
                    part[rows] = task(standard, *(column[block][rows] for column in columns))
                out[block] = part
        return unwrap(out.reshape(shape))


@dataclass(frozen=True, eq=False)
class RemainingLength:
    """X - g given X > g.

    Attributes:
        length: Distribution of the whole output length X.
        generated_tokens: g >= 0, in tokens.
    """

    length: LengthDistribution
    generated_tokens: FloatArray

    def sf(self, more_tokens: ArrayLike) -> FloatArray:
        """P(more than `more_tokens` remain)."""
        more = np.clip(np.asarray(more_tokens, dtype=np.float64), 0.0, _MAX_LENGTH)
        arguments = {"generated_tokens": self.generated_tokens, "more_tokens": more}
        return self.length._evaluate(_conditional_sf, arguments)

    def ppf(self, q: ArrayLike) -> FloatArray:
        """q-quantile of the remaining tokens, q in [0, 1]: to reserve KV blocks by."""
        arguments = {"generated_tokens": self.generated_tokens, "q": probability("q", q)}
        return self.length._evaluate(_conditional_ppf, arguments)

    def expected(self, max_tokens: ArrayLike) -> FloatArray:
        """E[min(X, M) - g | X > g] in tokens; M limits the whole output, so the result is <= M - g."""
        return self.length._mean_excess(self.generated_tokens, self._checked_max_tokens(max_tokens))

    def cvar(self, alpha: ArrayLike, max_tokens: ArrayLike) -> FloatArray:
        """CVaR_alpha of min(X, M) - g given X > g, in tokens: the mean of its worst fraction 1 - alpha."""
        level = probability("alpha", alpha, below_one=True)
        top = self._checked_max_tokens(max_tokens)
        left = top - self.generated_tokens
        more = np.minimum(self.ppf(level), left)
        whole = np.minimum(self.generated_tokens + more, top)
        beyond = np.minimum(more + self.length._mean_excess(whole, top), left)
        # Nothing generated is no condition.
        if (self.generated_tokens == 0).any():
            beyond = np.where(self.generated_tokens == 0, self.length.cvar(level, top), beyond)
        return unwrap(beyond)

    def _checked_max_tokens(self, max_tokens: ArrayLike) -> FloatArray:
        top = tokens("max_tokens", max_tokens, positive=True)
        top, generated = broadcast({"max_tokens": top, "generated_tokens": self.generated_tokens})
        if (top < generated).any():
            raise InputError("max_tokens", float(top[top < generated].flat[0]), "at least generated_tokens")
        return top


def _coordinate(
    standard: StandardDistribution, location: FloatArray, scale: FloatArray, x: FloatArray
) -> FloatArray:
    """t of a length; -inf for x <= 0."""
    return standard.coordinate((np.log(np.maximum(x, 0.0)) - location) / scale)


def _logpdf(
    standard: StandardDistribution, location: FloatArray, scale: FloatArray, x: FloatArray
) -> FloatArray:
    log_x = np.log(np.where((x > 0) & (x < np.inf), x, 1.0))
    t = standard.coordinate((log_x - location) / scale)
    value = standard.log_density(t) - standard.log_slope(t) - np.log(scale) - log_x
    return np.where(np.isnan(x), np.nan, np.where((x > 0) & (x < np.inf), value, -np.inf))


def _logcdf(
    standard: StandardDistribution, location: FloatArray, scale: FloatArray, x: FloatArray
) -> FloatArray:
    return standard.log_cdf(_coordinate(standard, location, scale, x))


def _logsf(
    standard: StandardDistribution, location: FloatArray, scale: FloatArray, x: FloatArray
) -> FloatArray:
    return standard.log_sf(_coordinate(standard, location, scale, x))


def _logppf(
    standard: StandardDistribution, location: FloatArray, scale: FloatArray, q: FloatArray
) -> FloatArray:
    return location + scale * standard.value(standard.quantile(np.log(q), np.log1p(-q)))


def _conditional_sf(
    standard: StandardDistribution,
    location: FloatArray,
    scale: FloatArray,
    generated: FloatArray,
    more: FloatArray,
) -> FloatArray:
    """P(X > g + more) / P(X > g); beyond the split by a ratio of tails, so that it holds however small they are."""
    start = _coordinate(standard, location, scale, generated)
    beyond = start >= standard.split
    near = np.where(beyond, start, standard.split)
    w = standard.travel(near, np.log1p(more / np.where(beyond, generated, 1.0)) / scale)
    ratio = np.exp(standard.drop(near, w)) * standard.ratio(near + w, 1.0) / standard.ratio(near, 1.0)
    end = _coordinate(standard, location, scale, generated + more)
    value = np.where(beyond, ratio, np.exp(standard.log_sf(end) - standard.log_sf(start)))
    return np.where(more > 0, np.clip(value, 0.0, 1.0), 1.0)


def _conditional_ppf(
    standard: StandardDistribution,
    location: FloatArray,
    scale: FloatArray,
    generated: FloatArray,
    q: FloatArray,
) -> FloatArray:
    """Solved for the distance from g where g is beyond the split, else for the whole length."""
    start = _coordinate(standard, location, scale, generated)
    beyond = (start >= standard.split) & (q < 1)
    near = np.where(beyond, start, standard.split)
    w = standard.outward(near, np.where(beyond, np.log1p(-q), 0.0), 1.0)
    further = np.where(beyond, generated, 0.0) * np.expm1(scale * standard.rise(near, w))
    if beyond.all():
        return further
    log_sf = np.log1p(-q) + standard.log_sf(start)
    whole = np.exp(location + scale * standard.value(standard.quantile(log_complement(log_sf), log_sf)))
    return np.where(beyond, further, np.maximum(whole - generated, 0.0))
