"""E[min(X, M)] and CVaR_alpha(min(X, M)) of log-t lengths that share nu and alpha: the scheduler's fast path.

In the coordinate t of module `standard` (T = sqrt(nu) sinh t, or T = t for nu = inf), with t_M that of ln M and t_alpha
that of the alpha-quantile, and S(t) the probability of a longer output,

    E = integral over t < t_M of exp(mu + sigma T) q(t) dt + M S(t_M)                          (TIE, Eqs. 8-9)
    CVaR = [integral over t_alpha < t < t_M of exp(mu + sigma T) q(t) dt + M S(t_M)] / (1 - alpha)     (Eq. 10)

A lattice of intervals with its origin at t_alpha stores T and weight * q at 12 Gauss-Legendre nodes per
interval, and S at the edges. It only depends on nu and alpha and is cached, so a full interval costs 12
exponentials and a dot product. In the partial interval [e, t_M] the length is written as M - (M - x):

    integral over [e, t_M] of x q dt + M S(t_M) = M [S(e) - integral over [e, t_M] of (1 - x/M) q dt].

Left of t_alpha the integral only depends on sigma and is analytic for sigma > 0. For many rows it is computed
with a Chebyshev interpolant on each octave of sigma, derived from the same lattice.

Intervals of width min(1, 2/sqrt(nu)) (2 for nu = inf) resolve q. They are halved until they also resolve the growth of
x, at most sqrt(sigma^2 nu + (ln M - mu)^2) per unit of t. The relative error is below 1e-11 (1e-10 for nu = 1e9) compared
with mpmath and with the general method of `mean_excess`, which is used for parameters that are not covered here.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from scheduler_core.lengths.standard import LOG_NORMALIZER, FloatArray
from scheduler_core.lengths.student_t import log_normalizer, standard

#: On the left, lengths or densities below exp(-27) of their maximum are neglected.
_NEGLIGIBLE = 27.0
#: Maximum of |ln M - mu|. The lattice ends where q is below exp(-_REACH), so that M S(t) is negligible there.
_MAX_GROWTH = 70.0
_REACH = 130.0
#: Maximum of mu, so that exp(mu) stays finite.
_MAX_MU = 600.0
#: Largest growth of ln x over an interval that 12 nodes resolve.
_MAX_STEEPNESS = 16.0
_MAX_LEVEL = 4
#: Rows per block: 12 numbers per row stay in the CPU cache.
_ROWS_PER_BLOCK = 2048

#: The interpolant covers sigma in [2^-10, 2^2). The distance of the singularity at 0 from the middle of each octave limits
#: the error to (3 + sqrt 8)^-18; the error from exp(sigma T_alpha), up to the exponent below, is smaller.
_MIN_OCTAVE, _MAX_OCTAVE, _NUM_TERMS = -10, 2, 18
_MAX_EXPONENT_LEFT = 4.0

#: Gauss-Legendre nodes and weights on [0, 1] (Abramowitz & Stegun, section 25.4.29).
_NUM_NODES = 12
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(_NUM_NODES)
_NODES, _WEIGHTS = (_NODES + 1.0) / 2.0, _WEIGHTS / 2.0
_PAIRS = tuple(zip(_NODES.tolist(), _WEIGHTS.tolist(), strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class Lattice:
    """Intervals [origin + j width, origin + (j+1) width], first <= j < last, first <= 0 <= last.

    Attributes:
        nu: Degrees of freedom, inf for the normal.
        root: sqrt(nu); 1 for nu = inf.
        log_c: ln of the normalization constant of the density.
        origin: t_alpha.
        width: Width of an interval.
        first: Index of the leftmost interval.
        last: One more than the index of the rightmost interval.
        heights: T at the nodes, interval by interval [(last - first) * 12].
        masses: Weight * q at the nodes, same shape.
        survival: S at the edges, from the left [last - first + 1].
    """

    nu: float
    root: float
    log_c: float
    origin: float
    width: float
    first: int
    last: int
    heights: FloatArray
    masses: FloatArray
    survival: FloatArray


def covers(nu: float, alpha: float) -> bool:
    """Whether a lattice is used; for a smaller nu, or a level closer to 0 or 1, it would be too long."""
    return nu >= 0.5 and 1e-6 <= alpha <= 1.0 - 1e-9


@lru_cache(maxsize=128)
def lattice(nu: float, alpha: float, level: int) -> Lattice:
    """The lattice with intervals halved `level` times."""
    normal = math.isinf(nu)
    rows = standard(nu)
    level_alpha = np.full((1, 1), alpha)
    with np.errstate(divide="ignore"):
        origin = rows.quantile(np.log(level_alpha), np.log1p(-level_alpha)).item()
    zero = np.zeros((1, 1))
    right, left = (rows.reach(zero, 1.0, depth).item() for depth in (_REACH, _NEGLIGIBLE + 3.0))
    width = (2.0 if normal else min(1.0, 2.0 / math.sqrt(nu))) / 2.0**level
    first = min(math.floor((-left - origin) / width), 0)
    last = max(math.ceil((right - origin) / width), 0)
    nodes = origin + width * (np.arange(first, last)[:, None] + _NODES)
    masses = width * _WEIGHTS * np.exp(rows.log_density(nodes))
    survival = np.append(np.cumsum(masses.sum(axis=1)[::-1])[::-1], 0.0)
    heights = rows.value(nodes).ravel()
    masses = masses.ravel()
    for array in (heights, masses, survival):
        array.setflags(write=False)
    root = 1.0 if normal else math.sqrt(nu)
    log_c = LOG_NORMALIZER if normal else log_normalizer(nu)
    return Lattice(nu, root, log_c, origin, width, first, last, heights, masses, survival)


def _to_powers() -> FloatArray:
    """Matrix that converts Chebyshev coefficients to power coefficients, lowest first."""
    matrix = np.zeros((_NUM_TERMS, _NUM_TERMS))
    for column, unit in enumerate(np.eye(_NUM_TERMS)):
        matrix[: column + 1, column] = np.polynomial.chebyshev.cheb2poly(unit[: column + 1])
    matrix.setflags(write=False)
    return matrix


_TO_POWERS = _to_powers()


@lru_cache(maxsize=128)
def _left_table(nu: float, alpha: float) -> FloatArray:
    """Coefficients of polynomials in x, highest power first [_NUM_TERMS, octaves], for the integral of
    exp(sigma T) q(t) over t < t_alpha with sigma = 2^octave (1.5 + x/2)."""
    grid = lattice(nu, alpha, 0)
    end = -grid.first * _NUM_NODES
    angles = np.pi * (np.arange(_NUM_TERMS) + 0.5) / _NUM_TERMS
    octaves = 2.0 ** np.arange(_MIN_OCTAVE, _MAX_OCTAVE)
    sigma = np.multiply.outer(1.5 + np.cos(angles) / 2.0, octaves)
    with np.errstate(under="ignore"):
        # The table is not used above exp(_MAX_EXPONENT_LEFT).
        lengths = np.exp(np.minimum(np.multiply.outer(sigma, grid.heights[:end]), 4.0 * _MAX_EXPONENT_LEFT))
    values = lengths @ grid.masses[:end]
    series = np.cos(np.multiply.outer(np.arange(_NUM_TERMS), angles)) @ values * (2.0 / _NUM_TERMS)
    series[0] /= 2.0
    table = np.ascontiguousarray((_TO_POWERS @ series)[::-1])
    table.setflags(write=False)
    return table


def _left(grid: Lattice, alpha: float, sigma: FloatArray) -> FloatArray:
    """Integral of exp(sigma T) q(t) over t < t_alpha, for sigma within the octaves of the table."""
    table = _left_table(grid.nu, alpha)
    mantissa, octave = np.frexp(sigma)
    x = 4.0 * mantissa - 3.0
    octave -= _MIN_OCTAVE + 1
    value = table[0].take(octave)
    for row in table[1:]:
        value *= x
        value += row.take(octave)
    return np.asarray(value)


def expected_and_cvar_one(
    mu: float, sigma: float, max_tokens: float, nu: float, alpha: float
) -> tuple[float, float] | None:
    """(E, CVaR) of one request in tokens, for nu and alpha that `covers` accepts; None if the lattice is too
    coarse or too short."""
    normal = nu == math.inf
    root = 1.0 if normal else math.sqrt(nu)
    log_ratio = math.log(max_tokens) - mu
    slope = sigma * root
    if abs(log_ratio) > _MAX_GROWTH or mu > _MAX_MU:
        return None
    steepness = 2.0 * sigma if normal else math.hypot(slope, log_ratio) * min(1.0, 2.0 / root)
    level = 0
    while steepness > _MAX_STEEPNESS:
        steepness *= 0.5
        level += 1
        if level > _MAX_LEVEL:
            return None
    grid = lattice(nu, alpha, level)
    first, last, width, origin = grid.first, grid.last, grid.width, grid.origin

    height = log_ratio / slope
    t_max = height if normal else math.asinh(height)
    lowest = min(height, 0.0) - _NEGLIGIBLE / slope
    position = min(max((t_max - origin) / width, first), last)
    interval = math.floor(position)
    low = ((lowest if normal else math.asinh(lowest)) - origin) / width
    begin_interval = min(math.floor(low), interval) if low > first else first

    # The partial interval: x/M - 1 is expm1 of a number <= 0.
    fraction = position - interval
    edge = origin + interval * width
    lost = 0.0
    if fraction > 0.0:
        step = fraction * width
        if normal:
            for node, weight in _PAIRS:
                t = edge + step * node
                lost -= weight * math.exp(-0.5 * t * t) * math.expm1(slope * (t - height))
        else:
            power = -0.5 * nu
            for node, weight in _PAIRS:
                sinh = math.sinh(edge + step * node)
                lost -= (
                    weight * math.exp(power * math.log1p(sinh * sinh)) * math.expm1(slope * (sinh - height))
                )
        lost *= step * math.exp(grid.log_c)
    censored = max_tokens * (grid.survival.item(interval - first) - lost)

    begin, end = (begin_interval - first) * _NUM_NODES, (interval - first) * _NUM_NODES
    lengths = np.exp(grid.heights[begin:end] * sigma)
    median = math.exp(mu)
    if interval < 0:
        mean = median * float(lengths.dot(grid.masses[begin:end])) + censored
        return min(mean, max_tokens), float(max_tokens)
    middle = max(-first * _NUM_NODES, begin)
    left = median * float(lengths[: middle - begin].dot(grid.masses[begin:middle]))
    right = median * float(lengths[middle - begin :].dot(grid.masses[middle:end])) + censored
    tail_mean = min(right / (1.0 - alpha), max_tokens)
    return min(left + right, tail_mean), float(tail_mean)


def expected_and_cvar_rows(
    mu: FloatArray, sigma: FloatArray, max_tokens: FloatArray, nu: float, alpha: float
) -> tuple[FloatArray, FloatArray]:
    """`expected_and_cvar_one` for N requests; arguments and results have shape [N]. NaN instead of None."""
    normal = nu == math.inf
    root = 1.0 if normal else math.sqrt(nu)
    log_ratio = np.log(max_tokens) - mu
    with np.errstate(over="ignore"):
        steepness = 2.0 * sigma if normal else np.hypot(sigma * root, log_ratio) * min(1.0, 2.0 / root)
        levels = np.ceil(np.log2(np.maximum(steepness / _MAX_STEEPNESS, 1.0)))
    levels[(np.abs(log_ratio) > _MAX_GROWTH) | (mu > _MAX_MU)] = np.inf
    mean, tail_mean = np.full_like(mu, np.nan), np.full_like(mu, np.nan)
    for level in np.unique(levels[levels <= _MAX_LEVEL]):
        grid = lattice(nu, alpha, int(level))
        rows = np.flatnonzero(levels == level)
        for start in range(0, len(rows), _ROWS_PER_BLOCK):
            block = rows[start : start + _ROWS_PER_BLOCK]
            mean[block], tail_mean[block] = _block(
                grid, mu[block], sigma[block], max_tokens[block], log_ratio[block], alpha
            )
    return mean, tail_mean


def _block(
    grid: Lattice,
    mu: FloatArray,
    sigma: FloatArray,
    max_tokens: FloatArray,
    log_ratio: FloatArray,
    alpha: float,
) -> tuple[FloatArray, FloatArray]:
    """`expected_and_cvar_one` for the rows of a block."""
    normal = grid.nu == math.inf
    slope = sigma * grid.root
    with np.errstate(over="ignore"):
        height = log_ratio / slope
    position = ((height if normal else np.arcsinh(height)) - grid.origin) / grid.width
    position = np.clip(position, grid.first, grid.last)
    interval = np.floor(position)

    step = (position - interval) * grid.width
    t = np.multiply.outer(step, _NODES)
    t += (grid.origin + interval * grid.width)[:, None]
    t, log_density = _height_and_log_density(t, grid.nu)
    np.exp(log_density, out=log_density)
    t -= height[:, None]
    t *= slope[:, None]
    below = np.subtract(1.0, np.exp(np.minimum(t, 0.0, out=t), out=t), out=t)
    below *= log_density
    lost = step * math.exp(grid.log_c) * (below @ _WEIGHTS)
    censored = max_tokens * (grid.survival[(interval - grid.first).astype(np.intp)] - lost)

    left, right = np.zeros_like(mu), np.zeros_like(mu)
    begin = np.zeros_like(mu)
    steepest = grid.origin if normal else grid.root * math.sinh(grid.origin)
    highest = min(2.0**_MAX_OCTAVE, _MAX_EXPONENT_LEFT / steepest if steepest > 0 else math.inf)
    tabled = (interval >= 0) & (sigma >= 2.0**_MIN_OCTAVE) & (sigma < highest)
    if tabled.any():
        left[tabled] = _left(grid, alpha, sigma[tabled])
    if not tabled.all():
        summed = ~tabled
        with np.errstate(over="ignore"):
            lowest = np.minimum(height[summed], 0.0) - _NEGLIGIBLE / slope[summed]
        low = ((lowest if normal else np.arcsinh(lowest)) - grid.origin) / grid.width
        begin[summed] = np.minimum(np.floor(np.maximum(low, grid.first)), interval[summed])
    heights = grid.heights.reshape(-1, _NUM_NODES)
    masses = grid.masses.reshape(-1, _NUM_NODES)
    for number in range(int(begin.min()), int(interval.max())):
        rows = np.flatnonzero((begin <= number) & (number < interval))
        lengths = np.multiply.outer(sigma[rows], heights[number - grid.first])
        np.exp(lengths, out=lengths)
        (left if number < 0 else right)[rows] += lengths @ masses[number - grid.first]
    median = np.exp(mu)
    right *= median
    right += censored
    tail_mean = np.minimum(np.where(interval >= 0, right / (1.0 - alpha), max_tokens), max_tokens)
    return np.minimum(left * median + right, tail_mean), tail_mean


def _height_and_log_density(t: FloatArray, nu: float) -> tuple[FloatArray, FloatArray]:
    """(T, ln q up to a constant) at t; overwrites t."""
    if nu == math.inf:
        return t, -0.5 * t * t
    if nu > 100.0:
        # t is small, and rounding errors of cosh t near 1 are multiplied by nu.
        height = np.sinh(t)
        return height, -0.5 * nu * np.log1p(height * height)
    np.exp(t, out=t)
    t *= 0.5
    height = 0.25 / t
    cosh = t + height
    np.subtract(t, height, out=height)
    np.log(cosh, out=cosh)
    cosh *= -nu
    return height, cosh
