"""E[min(X, M)] and CVaR_alpha(min(X, M)) of log-t lengths that share nu and alpha: the scheduler's fast path.

In the coordinate t of module `law` (T = sqrt(nu) sinh t, or T = t for nu = inf), with t_M that of ln M and t_alpha that
of the alpha-quantile, and S(t) the probability of a longer answer,

    E = integral over t < t_M of exp(mu + sigma T) q(t) dt + M S(t_M)                          (TIE, Eqs. 8-9)
    CVaR = [integral over t_alpha < t < t_M of exp(mu + sigma T) q(t) dt + M S(t_M)] / (1 - alpha)     (Eq. 10)

A lattice of panels with its origin at t_alpha carries T and weight * q at 12 Gauss-Legendre nodes for each panel, and S
at the edges; it depends on nu and alpha alone and is kept. So a whole panel costs 12 exponentials and a dot product.
In the one partial panel, [e, t_M], the length is written as M - (M - x):

    integral over [e, t_M] of x q dt + M S(t_M) = M [S(e) - integral over [e, t_M] of (1 - x/M) q dt].

Left of t_alpha the integral is a function of sigma alone, analytic for sigma > 0: for many rows it is taken from a
Chebyshev interpolant on each octave of sigma, made from the same lattice.

Panels of width min(1, 2/sqrt(nu)) (2 for nu = inf) resolve q; the growth of x, at most
sqrt(sigma^2 nu + (ln M - mu)^2) for each unit of t, halves them as often as it needs to. Relative error below 1e-11
(1e-10 for nu = 1e9), compared with mpmath and with the general route of `mean_excess`, which serves what is not
covered here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from scheduler_core.lengths.arrays import FloatArray
from scheduler_core.lengths.normal_law import LOG_NORMALISER, NormalLaw
from scheduler_core.lengths.quadrature import GAUSS_NODES, GAUSS_WEIGHTS, NUM_GAUSS
from scheduler_core.lengths.student_law import StudentLaw, log_normaliser

#: Left of exp(-27) of the largest length or of the density's peak nothing is counted.
_UNSEEN = 27.0
#: |ln M - mu| at most this; the lattice reaches to where q is below exp(-_REACH), so that M S(t) is negligible there.
_MOST_GROWTH = 70.0
_REACH = 130.0
#: exp(mu) stays finite.
_HIGHEST_MU = 600.0
#: Largest growth of ln x over a panel that 12 nodes resolve.
_STEEPEST = 16.0
_MOST_LEVELS = 4
#: Rows worked on at once: 12 numbers for each stay in cache.
_ROWS_PER_BLOCK = 2048

#: The interpolant covers sigma in [2^-10, 2^2). The singularity at 0 is three half-octaves away from the middle of each
#: octave: it leaves an error of (3 + sqrt 8)^-18; exp(sigma T_alpha), up to the exponent below, leaves less.
_LOWEST_OCTAVE, _HIGHEST_OCTAVE, _NUM_TERMS = -10, 2, 18
_STEEPEST_LEFT = 4.0

_PAIRS = tuple(zip(GAUSS_NODES.tolist(), GAUSS_WEIGHTS.tolist(), strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class Lattice:
    """Panels [origin + j width, origin + (j+1) width], first <= j < last, first <= 0 <= last.

    Attributes:
        nu: Degrees of freedom, inf for the normal.
        root: sqrt(nu); 1 for nu = inf.
        log_c: ln of the density's constant.
        origin: t_alpha.
        width: Of a panel.
        first: Number of the leftmost panel.
        last: One more than the number of the rightmost.
        heights: T at the nodes, panel after panel [(last - first) * 12].
        masses: Weight * q at the nodes, as long.
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
    """Whether there is a lattice for these; for a smaller nu, or a level closer to 0 or 1, it would be long."""
    return nu >= 0.5 and 1e-6 <= alpha <= 1.0 - 1e-9


@lru_cache(maxsize=128)
def lattice(nu: float, alpha: float, level: int) -> Lattice:
    """The lattice with panels halved `level` times."""
    normal = math.isinf(nu)
    law = NormalLaw() if normal else StudentLaw(np.full((1, 1), nu))
    with np.errstate(divide="ignore"):
        origin = float(law.quantile(np.log(np.full((1, 1), alpha)), np.log1p(-np.full((1, 1), alpha)))[0, 0])
    zero = np.zeros((1, 1))
    right, left = (float(law.reach(zero, 1.0, cut)[0, 0]) for cut in (_REACH, _UNSEEN + 3.0))
    width = (2.0 if normal else min(1.0, 2.0 / math.sqrt(nu))) / 2.0**level
    first = min(math.floor((-left - origin) / width), 0)
    last = max(math.ceil((right - origin) / width), 0)
    nodes = origin + width * (np.arange(first, last)[:, None] + GAUSS_NODES)
    masses = width * GAUSS_WEIGHTS * np.exp(law.log_density(nodes))
    survival = np.append(np.cumsum(masses.sum(axis=1)[::-1])[::-1], 0.0)
    heights = law.height(nodes).ravel()
    masses = masses.ravel()
    for array in (heights, masses, survival):
        array.setflags(write=False)
    root = 1.0 if normal else math.sqrt(nu)
    log_c = LOG_NORMALISER if normal else log_normaliser(nu)
    return Lattice(nu, root, log_c, origin, width, first, last, heights, masses, survival)


def _to_powers() -> FloatArray:
    """Matrix from coefficients of Chebyshev polynomials to those of powers, lowest first."""
    matrix = np.zeros((_NUM_TERMS, _NUM_TERMS))
    for column, unit in enumerate(np.eye(_NUM_TERMS)):
        matrix[: column + 1, column] = np.polynomial.chebyshev.cheb2poly(unit[: column + 1])
    matrix.setflags(write=False)
    return matrix


_TO_POWERS = _to_powers()


@lru_cache(maxsize=128)
def _left_table(nu: float, alpha: float) -> FloatArray:
    """Polynomials in x for the integral of exp(sigma T) q(t) over t < t_alpha, sigma = 2^octave (1.5 + x/2).

    Returns:
        Coefficients, highest power first [_NUM_TERMS, octaves].
    """
    grid = lattice(nu, alpha, 0)
    end = -grid.first * NUM_GAUSS
    angles = np.pi * (np.arange(_NUM_TERMS) + 0.5) / _NUM_TERMS
    octaves = 2.0 ** np.arange(_LOWEST_OCTAVE, _HIGHEST_OCTAVE)
    sigma = np.multiply.outer(1.5 + np.cos(angles) / 2.0, octaves)
    with np.errstate(under="ignore"):
        # Beyond exp(_STEEPEST_LEFT) the table is not used.
        lengths = np.exp(np.minimum(np.multiply.outer(sigma, grid.heights[:end]), 4.0 * _STEEPEST_LEFT))
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
    octave -= _LOWEST_OCTAVE + 1
    value = table[0].take(octave)
    for row in table[1:]:
        value *= x
        value += row.take(octave)
    return np.asarray(value)


def expected_and_cvar_one(
    mu: float, sigma: float, cap: float, nu: float, alpha: float
) -> tuple[float, float] | None:
    """(E, CVaR) of one request in tokens; None where the lattice is too coarse or too short for it.

    Args:
        mu: Location of ln X.
        sigma: Scale of ln X, > 0.
        cap: M > 0, in tokens.
        nu: Degrees of freedom, and alpha: CVaR level, as `covers` allows.
    """
    normal = nu == math.inf
    root = 1.0 if normal else math.sqrt(nu)
    log_ratio = math.log(cap) - mu
    slope = sigma * root
    if abs(log_ratio) > _MOST_GROWTH or mu > _HIGHEST_MU:
        return None
    steepness = 2.0 * sigma if normal else math.hypot(slope, log_ratio) * min(1.0, 2.0 / root)
    level = 0
    while steepness > _STEEPEST:
        steepness *= 0.5
        level += 1
        if level > _MOST_LEVELS:
            return None
    grid = lattice(nu, alpha, level)
    first, last, width, origin = grid.first, grid.last, grid.width, grid.origin

    height = log_ratio / slope
    t_cap = height if normal else math.asinh(height)
    lowest = min(height, 0.0) - _UNSEEN / slope
    position = min(max((t_cap - origin) / width, first), last)
    panel = math.floor(position)
    low = ((lowest if normal else math.asinh(lowest)) - origin) / width
    lowest_panel = min(math.floor(low), panel) if low > first else first

    # The partial panel: 1 - x/M is expm1 of something not positive.
    share = position - panel
    edge = origin + panel * width
    lost = 0.0
    if share > 0.0:
        step = share * width
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
    capped = cap * (grid.survival.item(panel - first) - lost)

    begin, end = (lowest_panel - first) * NUM_GAUSS, (panel - first) * NUM_GAUSS
    lengths = np.exp(grid.heights[begin:end] * sigma)
    median = math.exp(mu)
    if panel < 0:
        return min(median * float(lengths.dot(grid.masses[begin:end])) + capped, cap), float(cap)
    middle = max(-first * NUM_GAUSS, begin)
    left = median * float(lengths[: middle - begin].dot(grid.masses[begin:middle]))
    right = median * float(lengths[middle - begin :].dot(grid.masses[middle:end])) + capped
    tail_mean = min(right / (1.0 - alpha), cap)
    return min(left + right, tail_mean), float(tail_mean)


def expected_and_cvar_rows(
    mu: FloatArray, sigma: FloatArray, cap: FloatArray, nu: float, alpha: float
) -> tuple[FloatArray, FloatArray]:
    """(E, CVaR) of N requests in tokens, each [N]; NaN where the lattice is too coarse or too short for a row.

    Args:
        mu: Locations of ln X [N].
        sigma: Scales of ln X, > 0 [N].
        cap: M > 0, in tokens [N].
        nu: Degrees of freedom, and alpha: CVaR level, as `covers` allows.
    """
    normal = nu == math.inf
    root = 1.0 if normal else math.sqrt(nu)
    log_ratio = np.log(cap) - mu
    with np.errstate(over="ignore"):
        steepness = 2.0 * sigma if normal else np.hypot(sigma * root, log_ratio) * min(1.0, 2.0 / root)
        levels = np.ceil(np.log2(np.maximum(steepness / _STEEPEST, 1.0)))
    levels[(np.abs(log_ratio) > _MOST_GROWTH) | (mu > _HIGHEST_MU)] = np.inf
    mean, tail_mean = np.full_like(mu, np.nan), np.full_like(mu, np.nan)
    for level in np.unique(levels[levels <= _MOST_LEVELS]):
        grid = lattice(nu, alpha, int(level))
        rows = np.flatnonzero(levels == level)
        for start in range(0, len(rows), _ROWS_PER_BLOCK):
            block = rows[start : start + _ROWS_PER_BLOCK]
            mean[block], tail_mean[block] = _block(
                grid, mu[block], sigma[block], cap[block], log_ratio[block], alpha
            )
    return mean, tail_mean


def _block(
    grid: Lattice, mu: FloatArray, sigma: FloatArray, cap: FloatArray, log_ratio: FloatArray, alpha: float
) -> tuple[FloatArray, FloatArray]:
    """`expected_and_cvar_one` for the rows of a block."""
    normal = grid.nu == math.inf
    slope = sigma * grid.root
    with np.errstate(over="ignore"):
        height = log_ratio / slope
    position = ((height if normal else np.arcsinh(height)) - grid.origin) / grid.width
    position = np.clip(position, grid.first, grid.last)
    panel = np.floor(position)

    step = (position - panel) * grid.width
    t = np.multiply.outer(step, GAUSS_NODES)
    t += (grid.origin + panel * grid.width)[:, None]
    t, log_density = _height_and_log_density(t, grid.nu)
    np.exp(log_density, out=log_density)
    t -= height[:, None]
    t *= slope[:, None]
    below = np.subtract(1.0, np.exp(np.minimum(t, 0.0, out=t), out=t), out=t)
    below *= log_density
    lost = step * math.exp(grid.log_c) * (below @ GAUSS_WEIGHTS)
    capped = cap * (grid.survival[(panel - grid.first).astype(np.intp)] - lost)

    left, right = np.zeros_like(mu), np.zeros_like(mu)
    begin = np.zeros_like(mu)
    steepest = grid.origin if normal else grid.root * math.sinh(grid.origin)
    highest = min(2.0**_HIGHEST_OCTAVE, _STEEPEST_LEFT / steepest if steepest > 0 else math.inf)
    tabled = (panel >= 0) & (sigma >= 2.0**_LOWEST_OCTAVE) & (sigma < highest)
    if tabled.any():
        left[tabled] = _left(grid, alpha, sigma[tabled])
    if not tabled.all():
        rest = ~tabled
        with np.errstate(over="ignore"):
            lowest = np.minimum(height[rest], 0.0) - _UNSEEN / slope[rest]
        low = ((lowest if normal else np.arcsinh(lowest)) - grid.origin) / grid.width
        begin[rest] = np.minimum(np.floor(np.maximum(low, grid.first)), panel[rest])
    heights = grid.heights.reshape(-1, NUM_GAUSS)
    masses = grid.masses.reshape(-1, NUM_GAUSS)
    for number in range(int(begin.min()), int(panel.max())):
        rows = np.flatnonzero((begin <= number) & (number < panel))
        lengths = np.multiply.outer(sigma[rows], heights[number - grid.first])
        np.exp(lengths, out=lengths)
        (left if number < 0 else right)[rows] += lengths @ masses[number - grid.first]
    median = np.exp(mu)
    right *= median
    right += capped
    tail_mean = np.minimum(np.where(panel >= 0, right / (1.0 - alpha), cap), cap)
    return np.minimum(left * median + right, tail_mean), tail_mean


def _height_and_log_density(t: FloatArray, nu: float) -> tuple[FloatArray, FloatArray]:
    """(T, ln q up to its constant) at t; overwrites t."""
    if nu == math.inf:
        return t, -0.5 * t * t
    if nu > 100.0:
        # Here t is small, and rounding of cosh t near 1 counts nu times.
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
