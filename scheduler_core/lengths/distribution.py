"""The log-t distribution of output length X in tokens (TIE, section 3.1, Eqs. 3-4), with the log-normal as nu = inf.

    ln X = mu + sigma T,   T Student's t with nu degrees of freedom;   f(x) = t_nu((ln x - mu)/sigma) / (sigma x)

The mean is infinite for every finite nu, so expectations are of the censored length min(X, M), M = max_tokens
(TIE, Eqs. 8-10). They are computed by quadrature, without sampling.

Every expectation follows from the censored mean excess m(a, M) = E[min(X, M) - a | X > a]. With the stop-loss integral
I(a, M) = integral of P(X > x) over x in [a, M] (Klugman, Panjer & Willmot, "Loss Models", section 3.4),

    m(a, M) = I(a, M) / P(X > a),
    E[min(X, M)] = m(0, M),
    CVaR_alpha(min(X, M)) = v + m(v, M), v the alpha-quantile of X, or M where v >= M
    (Rockafellar & Uryasev, "Optimization of conditional value-at-risk", J. Risk 2 (2000), 21-41),
    E[min(X, M) - g | X > g] = m(g, M).

By parts, with q the density of the coordinate t of `standard`,

    m(a, M) = integral over t in [t_a, t_M] of (x(t) - a) q(t)/S(t_a) dt + (M - a) S(t_M)/S(t_a):

no term is negative, so there is no cancellation. Ratios to S(t_a) are computed in logarithms, before any underflow.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scheduler_core.errors import InputError
from scheduler_core.lengths import log_t_scores
from scheduler_core.lengths.standard import (
    NODES,
    WEIGHTS,
    FloatArray,
    StandardDistribution,
    StandardNormal,
    log_complement,
)
from scheduler_core.lengths.student_t import StudentT

#: Rows per block: their nodes (93 per row) stay in the CPU cache, and memory is bounded.
_ROWS_PER_BLOCK = 1024
_MAX_VALUE = 1e300

#: Function of a block of rows: (standard distribution, mu, sigma, arguments), columns [N, 1] -> [N, 1].
_Task = Callable[..., FloatArray]


@dataclass(frozen=True, eq=False)
class LogT:
    """Log-t distribution(s) of output length; parameters broadcast against each other and against the arguments.

    A result has the broadcast shape of parameters and arguments; a numpy scalar if that is (). Lengths x and max_tokens
    M > 0 are in tokens, generated_tokens g >= 0, levels q in [0, 1] and alpha in [0, 1); InputError otherwise.

    Attributes:
        mu: Location of ln X (ln tokens), finite; exp(mu) is the median length.
        sigma: Scale of ln X, finite and > 0, dimensionless.
        nu: Degrees of freedom, > 0; 3.5 is TIE's fixed choice (section 3.1, appendix D), inf the log-normal.
    """

    mu: Any
    sigma: Any
    nu: Any = 3.5

    def __post_init__(self) -> None:
        for name, low, infinite in (("mu", -math.inf, False), ("sigma", 0.0, False), ("nu", 0.0, True)):
            array = np.array(getattr(self, name), dtype=np.float64)
            valid = (array > low) & (np.isfinite(array) | (infinite & (array == np.inf)))
            kind = "finite numbers" if not infinite else "numbers or inf,"
            _check(name, array, valid, kind if low < 0 else f"{kind} > 0")
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        _broadcast(self._parameters())

    def logpdf(self, x: ArrayLike) -> FloatArray:
        """ln f(x), x in tokens; -inf for x <= 0."""
        return self._evaluate(_logpdf, x=np.asarray(x, dtype=np.float64))

    def pdf(self, x: ArrayLike) -> FloatArray:
        """f(x) per token, x in tokens; 0 for x <= 0."""
        return np.exp(self.logpdf(x))

    def cdf(self, x: ArrayLike) -> FloatArray:
        """P(X <= x), x in tokens, with full relative accuracy in the left tail."""
        return np.exp(self._evaluate(_logcdf, x=np.asarray(x, dtype=np.float64)))

    def logsf(self, x: ArrayLike) -> FloatArray:
        """ln P(X > x): the log-likelihood of a length that is right-censored at x tokens."""
        return self._evaluate(_logsf, x=np.asarray(x, dtype=np.float64))

    def sf(self, x: ArrayLike) -> FloatArray:
        """P(X > x), x in tokens, with full relative accuracy in the tail."""
        return np.exp(self.logsf(x))

    def logppf(self, q: ArrayLike) -> FloatArray:
        """ln of the q-quantile, q in [0, 1]; finite for 0 < q < 1 even if the quantile itself overflows."""
        return self._evaluate(_logppf, q=checked_level("q", q))

    def ppf(self, q: ArrayLike) -> FloatArray:
        """q-quantile in tokens, q in [0, 1]; a value above the float range is +inf."""
        with np.errstate(over="ignore"):
            return np.exp(self.logppf(q))

    def expected(self, max_tokens: ArrayLike, generated_tokens: ArrayLike = 0.0) -> FloatArray:
        """E[min(X, M)] in tokens (TIE, Eq. 9); with g > 0 the remaining E[min(X, M) - g | X > g] after g tokens.

        M limits the whole output, so the result is <= M - g.
        """
        generated, top = np.asarray(generated_tokens), np.asarray(max_tokens)
        if generated.size == 1 and generated.item() == 0 and self._on_lattice(np.asarray(0.5)):
            return self.expected_and_cvar(0.5, max_tokens)[0]
        generated, top = _broadcast(
            {
                "generated_tokens": checked_tokens("generated_tokens", generated),
                "max_tokens": checked_tokens("max_tokens", top, positive=True),
            }
        )
        _check("max_tokens", top, top >= generated, "at least generated_tokens")
        return self._evaluate(mean_excess, start_tokens=generated, max_tokens=top)

    def cvar(self, alpha: ArrayLike, max_tokens: ArrayLike) -> FloatArray:
        """CVaR_alpha(min(X, M)): mean of the worst fraction 1 - alpha of censored lengths, in tokens (TIE, Eq. 10).

        M if the alpha-quantile v of X is at least M, else v + E[min(X, M) - v | X > v]."""
        level = checked_level("alpha", alpha, below_one=True)
        if self._on_lattice(level):
            return self.expected_and_cvar(level, max_tokens)[1]
        top = checked_tokens("max_tokens", max_tokens, positive=True)
        return self._evaluate(censored_cvar, alpha=level, max_tokens=top)

    def expected_and_cvar(self, alpha: ArrayLike, max_tokens: ArrayLike) -> tuple[FloatArray, FloatArray]:
        """(`expected`, `cvar`) with expected <= cvar <= max_tokens, the inputs of a risk score (TIE, Eq. 11).

        With a single nu and alpha it uses the vectorized fast path of `log_t_scores`.
        """
        level = checked_level("alpha", alpha, below_one=True)
        top = checked_tokens("max_tokens", max_tokens, positive=True)
        if not self._on_lattice(level):
            return self._integrated(level, top)
        shape = _broadcast({**self._parameters(), "alpha": level, "max_tokens": top})[0].shape
        mu, sigma, top = (
            np.ascontiguousarray(np.broadcast_to(array, shape)).ravel()
            for array in (self.mu, self.sigma, top)
        )
        mean, tail_mean = log_t_scores.expected_and_cvar_rows(mu, sigma, top, self.nu.item(), level.item())
        hard = np.isnan(mean)
        if hard.any():
            rows = LogT(mu[hard], sigma[hard], self.nu)
            mean[hard], tail_mean[hard] = rows._integrated(level, top[hard])
        return mean.reshape(shape)[()], tail_mean.reshape(shape)[()]

    def _integrated(self, alpha: FloatArray, top: FloatArray) -> tuple[FloatArray, FloatArray]:
        """`expected_and_cvar` for any parameters, by `mean_excess`."""
        tail_mean = self._evaluate(censored_cvar, alpha=alpha, max_tokens=top)
        mean = self._evaluate(mean_excess, start_tokens=np.zeros(()), max_tokens=top)
        return np.minimum(mean, tail_mean), tail_mean

    def _on_lattice(self, alpha: FloatArray) -> bool:
        """Whether all rows share one nu and one alpha that `log_t_scores` covers."""
        return self.nu.size == 1 == alpha.size and log_t_scores.covers(self.nu.item(), alpha.item())

    def _parameters(self) -> dict[str, FloatArray]:
        return {"mu": self.mu, "sigma": self.sigma, "nu": self.nu}

    def _evaluate(self, task: _Task, **arguments: FloatArray) -> FloatArray:
        """Applies a task to all rows, block by block."""
        shape = _broadcast({**self._parameters(), **arguments})[0].shape
        columns = [
            np.ascontiguousarray(np.broadcast_to(array, shape)).reshape(-1, 1)
            for array in (self.mu, self.sigma, *arguments.values())
        ]
        shared = list(_standard_rows(self.nu.reshape(1, 1))) if self.nu.size == 1 else None
        nu = np.broadcast_to(self.nu, shape).reshape(-1, 1)
        out = np.empty((columns[0].shape[0], 1))
        with np.errstate(over="ignore", under="ignore", divide="ignore"):
            for first in range(0, len(out), _ROWS_PER_BLOCK):
                block = slice(first, first + _ROWS_PER_BLOCK)
                part = np.empty_like(out[block])
                for rows, standard in shared or _standard_rows(nu[block]):
                    part[rows] = task(standard, *(column[block][rows] for column in columns))
                out[block] = part
        return np.asarray(out.reshape(shape))[()]


def expected_and_cvar(
    mu: float, sigma: float, nu: float, max_tokens: float, alpha: float = 0.9
) -> tuple[float, float]:
    """(E[min(X, M)], CVaR_alpha(min(X, M))) in tokens for one request: the scheduler's fast path.

    Same results as `LogT.expected_and_cvar`, for plain floats; alpha in [0.5, 1).
    """
    if not (-math.inf < mu < math.inf and 0 < sigma < math.inf and nu > 0):
        raise InputError("mu, sigma, nu", (mu, sigma, nu), "finite mu, finite sigma > 0, nu > 0")
    if not (0 < max_tokens < math.inf and 0.5 <= alpha < 1):
        raise InputError(
            "max_tokens, alpha", (max_tokens, alpha), "a finite max_tokens > 0 and alpha in [0.5, 1)"
        )
    if log_t_scores.covers(nu, alpha):
        scores = log_t_scores.expected_and_cvar_one(mu, sigma, max_tokens, nu, alpha)
        if scores is not None:
            return scores
    mean, tail_mean = LogT(mu, sigma, nu).expected_and_cvar(alpha, max_tokens)
    return float(mean), float(tail_mean)


def _standard_rows(nu: FloatArray) -> Iterator[tuple[slice | NDArray[np.intp], StandardDistribution]]:
    """Rows and their standard distribution, for a column of nu [N, 1]; [1, 1] if all share one."""
    limit = np.isinf(nu[:, 0])
    if limit.all():
        yield slice(None), StandardNormal()
    elif not limit.any():
        yield slice(None), StudentT(nu)
    else:
        yield np.flatnonzero(limit), StandardNormal()
        yield np.flatnonzero(~limit), StudentT(nu[~limit])


def _broadcast(named: dict[str, FloatArray]) -> tuple[FloatArray, ...]:
    """The arrays, broadcast against each other; InputError if their shapes are incompatible."""
    try:
        return tuple(np.broadcast_arrays(*named.values()))
    except ValueError as error:
        shapes = tuple(array.shape for array in named.values())
        raise InputError(", ".join(named), shapes, "shapes that broadcast against each other") from error


def _check(name: str, array: FloatArray, valid: NDArray[np.bool_], allowed: str) -> FloatArray:
    if not valid.all():
        raise InputError(name, float(array[~valid].flat[0]), allowed)
    return array


def checked_tokens(name: str, value: ArrayLike, *, positive: bool = False) -> FloatArray:
    """Lengths as an array; InputError for an invalid one."""
    array = np.asarray(value, dtype=np.float64)
    valid = np.isfinite(array) & ((array > 0) if positive else (array >= 0))
    return _check(name, array, valid, f"finite numbers {'>' if positive else '>='} 0, in tokens")


def checked_level(name: str, value: ArrayLike, *, below_one: bool = False) -> FloatArray:
    """Levels as an array; InputError for one outside [0, 1]."""
    array = np.asarray(value, dtype=np.float64)
    valid = (array >= 0) & ((array < 1) if below_one else (array <= 1))
    return _check(name, array, valid, "numbers in [0, 1)" if below_one else "numbers in [0, 1]")


def _logpdf(standard: StandardDistribution, mu: FloatArray, sigma: FloatArray, x: FloatArray) -> FloatArray:
    inside = (x > 0) & (x < np.inf)
    log_x = np.log(np.where(inside, x, 1.0))
    t = standard.coordinate((log_x - mu) / sigma)
    value = standard.log_density(t) - standard.log_slope(t) - np.log(sigma) - log_x
    return np.where(np.isnan(x), np.nan, np.where(inside, value, -np.inf))


def _logcdf(standard: StandardDistribution, mu: FloatArray, sigma: FloatArray, x: FloatArray) -> FloatArray:
    return standard.log_cdf(standard.coordinate((np.log(np.maximum(x, 0.0)) - mu) / sigma))


def _logsf(standard: StandardDistribution, mu: FloatArray, sigma: FloatArray, x: FloatArray) -> FloatArray:
    return standard.log_sf(standard.coordinate((np.log(np.maximum(x, 0.0)) - mu) / sigma))


def _logppf(standard: StandardDistribution, mu: FloatArray, sigma: FloatArray, q: FloatArray) -> FloatArray:
    return mu + sigma * standard.value(standard.quantile(np.log(q), np.log1p(-q)))


def mean_excess(
    standard: StandardDistribution,
    location: FloatArray,
    scale: FloatArray,
    start_tokens: FloatArray,
    max_tokens: FloatArray,
    start: FloatArray | None = None,
) -> FloatArray:
    """m(a, M) in tokens, a = start_tokens >= 0, M = max_tokens > 0; 0 where a >= M.

    All arrays are columns [N, 1], or [1, 1] for parameters of `standard`, the distribution of T in
    ln X = location + scale T. `start` is t of a, if a was computed from t.
    """
    inside = start_tokens < max_tokens
    a = np.where(inside, start_tokens, 0.0)
    top = _value_of(max_tokens, location, scale)
    if start is None:
        start = standard.coordinate(np.where(a > 0, _value_of(a, location, scale), -np.inf))
        rise = np.log1p((max_tokens - a) / np.where(a > 0, a, max_tokens)) / scale
    else:
        start = np.where(inside, start, -np.inf)
        rise = top - standard.value(np.where(inside, start, 0.0))
    end = np.maximum(standard.coordinate(top), start)
    # Densities are relative to that at the origin: the start if it is right of the mode, else the mode, or the end if
    # that is left of the mode.
    origin = np.maximum(start, np.minimum(end, 0.0))
    at_start = origin == start
    gap = standard.travel(np.where(at_start, start, 0.0), np.where(at_start, rise, 0.0))
    span = np.where(at_start, gap, end - origin)

    beyond = start >= 0
    safe = np.where(np.isfinite(start), start, 0.0)
    own = standard.ratio(safe, np.where(beyond, 1.0, -1.0))
    tail = np.where(np.isfinite(start), np.minimum(standard.log_density(safe) + np.log(own), 0.0), -np.inf)
    log_sf = log_complement(np.where(beyond, -1.0, tail))
    relative = np.where(beyond, -np.log(own), standard.log_density(origin) - log_sf)

    over = _survival(standard, origin, span, end, relative, log_sf)
    body = np.zeros_like(over)
    low, middle, high = standard.pieces(scale, start, origin, end)
    for first, last in ((low, middle), (middle, high)):
        width = last - first
        w = (first - origin) + width * NODES
        density = np.exp(standard.drop(origin, w) + relative)
        growth = scale * standard.rise(origin, w)
        log_length = np.where(origin == end, np.log(max_tokens), location)
        excess = np.where(at_start, a * np.expm1(growth), np.exp(log_length + growth) - a)
        body += width * ((density * excess) @ WEIGHTS)[:, None]
    value = body + (max_tokens - a) * over
    return np.where(inside, np.clip(value, 0.0, max_tokens - a), 0.0)


def censored_cvar(
    standard: StandardDistribution,
    location: FloatArray,
    scale: FloatArray,
    alpha: FloatArray,
    max_tokens: FloatArray,
) -> FloatArray:
    """CVaR_alpha(min(X, M)) in tokens; columns as for `mean_excess`."""
    t = standard.quantile(np.log(alpha), np.log1p(-alpha))
    quantile = np.minimum(np.exp(location + scale * standard.value(t)), max_tokens)
    return np.minimum(
        quantile + mean_excess(standard, location, scale, quantile, max_tokens, start=t), max_tokens
    )


def _value_of(x: FloatArray, location: FloatArray, scale: FloatArray) -> FloatArray:
    """T of a length, clipped to finite values; it overflows for a very small scale, at negligible density."""
    return np.clip((np.log(x) - location) / scale, -_MAX_VALUE, _MAX_VALUE)


def _survival(
    standard: StandardDistribution,
    origin: FloatArray,
    span: FloatArray,
    end: FloatArray,
    relative: FloatArray,
    log_sf: FloatArray,
) -> FloatArray:
    """P(X > M) / P(X > a); `relative` is ln of q(origin) / P(X > a), `log_sf` ln P(X > a)."""
    beyond = end >= 0
    side = np.where(beyond, 1.0, -1.0)
    ratio = standard.ratio(end, side)
    tail = np.minimum(standard.log_density(end) + np.log(ratio), 0.0)
    right = np.exp(standard.drop(origin, np.where(beyond, span, 0.0)) + relative) * ratio
    return np.where(beyond, right, np.exp(log_complement(np.where(beyond, -1.0, tail)) - log_sf))
