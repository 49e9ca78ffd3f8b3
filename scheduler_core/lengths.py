"""The log-t length distribution: output length X = exp(mu + sigma T) in tokens, T ~ Student-t(nu).

Density f(x) = t_nu((ln x - mu)/sigma) / (sigma x) (TIE, section 3.1, Eqs. 3-4). Its mean is infinite for
every nu, so expectations are always taken of the censored length min(X, M), M = max_tokens (Eqs. 8-10).

How the integrals are done. With z = sqrt(nu) sinh s (see `student_t`),

    G(a, b) = integral over z in [a, b] of exp(mu + sigma z) t_nu(z) dz                       (Eq. 8)
            = C_nu * integral over s of exp(mu + sigma sqrt(nu) sinh s) sech(s)^nu ds,

split at s = 0, each piece by tanh-sinh quadrature. The features of the integrand (the peak of the density
near 0, the exponential growth towards z_M) then sit at the ends of the pieces, where the nodes crowd.
Nothing is sampled: the same input gives the same number, relative error below 1e-10 for mu in [0, 10],
sigma in [1e-3, 3], nu in [1, 100], max_tokens in [1, 131072].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from scheduler_core import student_t
from scheduler_core.errors import InputError
from scheduler_core.quadrature import NODES, WEIGHTS, FloatArray

_NEGLIGIBLE = 41.0
_UNSEEN = 30.0


def _unwrap(array: Any) -> FloatArray:
    """A numpy scalar for a result without dimensions, the array otherwise."""
    result: FloatArray = np.asarray(array)[()]
    return result


def _parameter(name: str, value: ArrayLike, *, positive: bool) -> FloatArray:
    array = np.array(value, dtype=np.float64)
    wrong = ~np.isfinite(array) | ((array <= 0) if positive else np.zeros(array.shape, bool))
    if wrong.any():
        raise InputError(
            name, float(array[wrong].flat[0]), "finite numbers > 0" if positive else "finite numbers"
        )
    array.setflags(write=False)
    return array


def _limits(name: str, value: ArrayLike, low: float, allowed: str) -> FloatArray:
    array = np.asarray(value, dtype=np.float64)
    wrong = ~(np.isfinite(array) & (array >= low))
    if wrong.any():
        raise InputError(name, float(array[wrong].flat[0]), allowed)
    return array


def _max_tokens(value: ArrayLike) -> FloatArray:
    array = _limits("max_tokens", value, 0.0, "finite numbers > 0, in tokens")
    if (array <= 0).any():
        raise InputError("max_tokens", 0.0, "finite numbers > 0, in tokens")
    return array


def _probability(name: str, value: ArrayLike) -> FloatArray:
    array = np.asarray(value, dtype=np.float64)
    wrong = ~((array >= 0) & (array <= 1))
    if wrong.any():
        raise InputError(name, float(array[wrong].flat[0]), "numbers in [0, 1]")
    return array


@dataclass(frozen=True, eq=False)
class LogT:
    """Log-t distribution(s) of output length; parameters broadcast against each other and the arguments.

    Attributes:
        mu: Location of ln X (ln tokens); exp(mu) is the median length.
        sigma: Scale of ln X, > 0, dimensionless.
        nu: Degrees of freedom, > 0; 3.5 is TIE's fixed choice (section 3.1, appendix D).

    Raises:
        InputError: A parameter is not finite, or sigma or nu is not positive.
    """

    mu: Any
    sigma: Any
    nu: Any = 3.5

    def __post_init__(self) -> None:
        mu = _parameter("mu", self.mu, positive=False)
        sigma = _parameter("sigma", self.sigma, positive=True)
        nu = _parameter("nu", self.nu, positive=True)
        try:
            np.broadcast_shapes(mu.shape, sigma.shape, nu.shape)
        except ValueError as error:
            raise InputError("sigma", sigma.shape, f"a shape that broadcasts with mu {mu.shape}") from error
        for name, value in (("mu", mu), ("sigma", sigma), ("nu", nu)):
            object.__setattr__(self, name, value)

    @property
    def shape(self) -> tuple[int, ...]:
        """Broadcast shape of the parameters; () for one distribution."""
        return np.broadcast_shapes(self.mu.shape, self.sigma.shape, self.nu.shape)

    def _z(self, x: FloatArray) -> FloatArray:
        with np.errstate(divide="ignore", invalid="ignore"):
            z = (np.log(x) - self.mu) / self.sigma
        return np.asarray(np.where(x <= 0, -np.inf, z))

    def logpdf(self, x: ArrayLike) -> FloatArray:
        """ln f(x), x in tokens; -inf for x <= 0."""
        x = np.asarray(x, dtype=np.float64)
        inside = (x > 0) & (x < np.inf)
        safe = np.where(inside, x, 1.0)
        log_x = np.log(safe)
        value = student_t.logpdf((log_x - self.mu) / self.sigma, self.nu) - np.log(self.sigma) - log_x
        return _unwrap(np.where(np.isnan(x), np.nan, np.where(inside, value, -np.inf)))

    def pdf(self, x: ArrayLike) -> FloatArray:
        """f(x) per token, x in tokens; 0 for x <= 0."""
        return np.exp(self.logpdf(x))

    def cdf(self, x: ArrayLike) -> FloatArray:
        """P(X <= x), x in tokens."""
        return _unwrap(student_t.cdf(self._z(np.asarray(x, dtype=np.float64)), self.nu))

    def sf(self, x: ArrayLike) -> FloatArray:
        """P(X > x), x in tokens, with full relative accuracy in the tail."""
        return _unwrap(student_t.sf(self._z(np.asarray(x, dtype=np.float64)), self.nu))

    def logsf(self, x: ArrayLike) -> FloatArray:
        """ln P(X > x): what a length cut at x tokens contributes to a right-censored likelihood."""
        return _unwrap(student_t.log_sf(self._z(np.asarray(x, dtype=np.float64)), self.nu))

    def ppf(self, q: ArrayLike) -> FloatArray:
        """q-quantile in tokens, q in [0, 1]; a value above the float range is +inf."""
        z = student_t.ppf(_probability("q", q), self.nu)
        with np.errstate(over="ignore"):
            return _unwrap(np.exp(self.mu + self.sigma * z))

    def sample(self, rng: np.random.Generator, size: int | tuple[int, ...] | None = None) -> FloatArray:
        """Draws lengths in tokens (real numbers, not rounded); a draw above the float range is +inf.

        Args:
            rng: Source of randomness.
            size: Shape of the result; None means the shape of the parameters.
        """
        draws = rng.standard_t(
            np.broadcast_to(self.nu, self.shape), size=self.shape if size is None else size
        )
        with np.errstate(over="ignore"):
            return _unwrap(np.exp(self.mu + self.sigma * draws))

    def expected(self, max_tokens: ArrayLike) -> FloatArray:
        """E[min(X, M)] = G(-inf, z_M) + M (1 - F(z_M)) in tokens (Eq. 9).

        Args:
            max_tokens: M > 0, in tokens.
        """
        return _expectation(self, _max_tokens(max_tokens), start=-np.inf)

    def cvar(self, alpha: ArrayLike, max_tokens: ArrayLike) -> FloatArray:
        """CVaR_alpha(min(X, M)): mean of the worst 1 - alpha share of censored lengths, in tokens (Eq. 10).

        M where the alpha-quantile reaches M, else [G(z_alpha, z_M) + M (1 - F(z_M))] / (1 - alpha).

        Args:
            alpha: Level in [0, 1); 0 gives the expectation.
            max_tokens: M > 0, in tokens.
        """
        level = _probability("alpha", alpha)
        if (level >= 1).any():
            raise InputError("alpha", 1.0, "numbers in [0, 1)")
        start = np.asarray(student_t.ppf(level, self.nu))
        mean = _expectation(self, _max_tokens(max_tokens), start=start, tail=level)
        return mean

    def remaining(self, generated_tokens: ArrayLike) -> RemainingLength:
        """Distribution of X - g given X > g: what is left once g tokens are generated and it goes on.

        Args:
            generated_tokens: g >= 0, in tokens.
        """
        return RemainingLength(
            self, _limits("generated_tokens", generated_tokens, 0.0, "finite numbers >= 0, in tokens")
        )


@dataclass(frozen=True, eq=False)
class RemainingLength:
    """X - g given X > g, for a log-t length X (spec: limit 3, prediction updated while tokens come).

    Attributes:
        length: Distribution of the whole output length X.
        generated_tokens: g >= 0, in tokens.
    """

    length: LogT
    generated_tokens: FloatArray

    def _log_sf_now(self) -> FloatArray:
        return np.asarray(self.length.logsf(self.generated_tokens))

    def sf(self, tokens: ArrayLike) -> FloatArray:
        """P(more than `tokens` remain)."""
        more = np.maximum(np.asarray(tokens, dtype=np.float64), 0.0)
        return _unwrap(np.exp(self.length.logsf(self.generated_tokens + more) - self._log_sf_now()))

    def ppf(self, q: ArrayLike) -> FloatArray:
        """q-quantile of the remaining tokens, q in [0, 1]."""
        q = _probability("q", q)
        with np.errstate(divide="ignore", over="ignore"):
            z = student_t.isf_from_log(np.log1p(-q) + self._log_sf_now(), self.length.nu)
            total = np.exp(self.length.mu + self.length.sigma * z)
        return _unwrap(np.maximum(total - self.generated_tokens, 0.0))

    def expected(self, max_tokens: ArrayLike) -> FloatArray:
        """E[min(X, M) - g | X > g] in tokens; M caps the whole output, so the result is <= M - g.

        Args:
            max_tokens: M >= g, in tokens.
        """
        cap = _max_tokens(max_tokens)
        if (cap < self.generated_tokens).any():
            raise InputError("max_tokens", float(cap.min()), "at least generated_tokens")
        done = self.generated_tokens
        return _expectation(
            self.length, cap, start=self.length._z(done), offset=done, log_scale=self._log_sf_now()
        )


def _expectation(
    length: LogT,
    cap: FloatArray,
    *,
    start: ArrayLike,
    tail: ArrayLike = 0.0,
    offset: ArrayLike = 0.0,
    log_scale: ArrayLike = 0.0,
) -> FloatArray:
    """[integral over z > start of (min(X(z), M) - offset) t(z) dz] / ((1 - tail) exp(log_scale)).

    Where `start` is at or above z_M the result is M - offset, the value in the limit.
    """
    arrays = (length.mu, length.sigma, length.nu, cap, start, tail, offset, log_scale)
    wide = np.broadcast_arrays(*arrays)
    mu, sigma, nu, top, first, level, minus, scale = (np.ascontiguousarray(a, float).ravel() for a in wide)
    z_cap = (np.log(top) - mu) / sigma
    over = np.exp(student_t.log_sf(z_cap, nu) - scale)
    s_cap = student_t.to_s(z_cap, nu)
    slope = sigma * np.sqrt(nu)
    # Left of this the density or the length itself is below exp(-41) of its largest value.
    lowest = np.arcsinh(np.minimum(np.sinh(s_cap), 0.0) - _NEGLIGIBLE / slope)
    s_low = np.maximum(student_t.to_s(first, nu), np.maximum(lowest, -student_t.half_widths(nu)))
    # Where even the growing length cannot lift the density's far tail, neither at W nor at z_M, the tail is left out.
    wide_end = np.minimum(s_cap, student_t.half_widths(nu))
    tail_log = np.maximum(_log_integrand(slope, nu, wide_end), _log_integrand(slope, nu, s_cap))
    s_end = np.where(tail_log < scale + np.log1p(-level) - _UNSEEN, wide_end, s_cap)
    middle = np.minimum(np.maximum(s_low, 0.0), s_end)
    weight = student_t.log_normalisers(nu) - scale
    body = np.zeros_like(mu)
    for begin, end in ((np.minimum(s_low, middle), middle), (middle, np.maximum(s_end, middle))):
        body += _piece(mu, slope, nu, begin, end, weight, minus)
    value = (body + (top - minus) * over) / (1.0 - level)
    value = np.where(first >= z_cap, top - minus, value)
    return _unwrap(value.reshape(wide[0].shape))


def _log_integrand(slope: FloatArray, nu: FloatArray, s: FloatArray) -> FloatArray:
    """ln of the integrand at s, relative to s = 0; concave in s at first, then convex."""
    return np.asarray(slope * np.sinh(s) - nu * student_t.log_cosh(s))


def _piece(
    mu: FloatArray,
    slope: FloatArray,
    nu: FloatArray,
    begin: FloatArray,
    end: FloatArray,
    log_weight: FloatArray,
    minus: FloatArray,
) -> FloatArray:
    """Integral over s in [begin, end] of (exp(mu + slope sinh s) - minus) exp(log_weight) sech(s)^nu; flat."""
    out = np.empty_like(mu)
    for first in range(0, mu.size, student_t.ROWS_PER_BLOCK):
        rows = slice(first, first + student_t.ROWS_PER_BLOCK)
        width = end[rows] - begin[rows]
        s = begin[rows, None] + width[:, None] * NODES
        log_density = log_weight[rows, None] - nu[rows, None] * student_t.log_cosh(s)
        growth = mu[rows, None] + slope[rows, None] * np.sinh(s)
        values = np.exp(growth + log_density) - minus[rows, None] * np.exp(log_density)
        out[rows] = width * (values @ WEIGHTS)
    return out


def expected_and_cvar(
    mu: float, sigma: float, nu: float, max_tokens: float, alpha: float = 0.9
) -> tuple[float, float]:
    """(E[min(X, M)], CVaR_alpha(min(X, M))) in tokens for one request: the scheduler's fast path.

    The same formulas as `LogT.expected` and `LogT.cvar` for plain floats, with both results out of one pass over
    one array of nodes (pieces [lowest, 0], [0, z_alpha], [z_alpha, z_M], and the survival beyond z_M).

    Raises:
        InputError: A parameter is not finite or not in its range.
    """
    if not (math.isfinite(mu) and 0 < sigma < math.inf and 0 < nu < math.inf):
        raise InputError("mu, sigma, nu", (mu, sigma, nu), "finite numbers, sigma > 0, nu > 0")
    if not (0 < max_tokens < math.inf and 0.5 <= alpha < 1):
        raise InputError(
            "max_tokens, alpha", (max_tokens, alpha), "a finite max_tokens > 0 and alpha in [0.5, 1)"
        )
    root = math.sqrt(nu)
    width = student_t.half_width(nu)
    s_cap = math.asinh((math.log(max_tokens) - mu) / (sigma * root))
    s_alpha = student_t.quantile_s(alpha, nu)
    s_end = s_cap
    if s_cap > width:
        peaks = (sigma * root * math.sinh(x) - nu * math.log(math.cosh(x)) for x in (width, s_cap))
        if max(peaks) < math.log1p(-alpha) - _UNSEEN:
            s_end = width
    # ends of the pieces: [-W, min(0, s_cap)], [0, min(s_alpha, s_cap)], [s_alpha, s_cap], then |s_cap| to its tail
    low_end = min(0.0, s_cap)
    lowest = max(-width, math.asinh(math.sinh(low_end) - _NEGLIGIBLE / (sigma * root)))
    mid_end = max(min(s_alpha, s_cap), 0.0)
    begins = np.array([min(lowest, low_end), 0.0, s_alpha, abs(s_cap)])
    widths = np.array([low_end - begins[0], mid_end, max(s_end - s_alpha, 0.0), width])
    s = begins[:, None] + widths[:, None] * NODES
    growth = np.zeros_like(s)
    growth[:3] = mu + sigma * root * np.sinh(s[:3])
    log_c = student_t.log_normaliser(nu)
    sums = widths * (np.exp(growth + (log_c - nu * student_t.log_cosh(s))) @ WEIGHTS)
    low, middle, high, beyond = (float(v) for v in sums)
    over = beyond if s_cap >= 0 else 1.0 - beyond
    mean = low + middle + high + max_tokens * over
    if s_alpha >= s_cap:
        return mean, float(max_tokens)
    return mean, (high + max_tokens * over) / (1.0 - alpha)
