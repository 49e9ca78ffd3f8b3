"""The capped mean excess m(a, M) = E[min(X, M) - a | X > a], from which every expectation of a length follows.

With the stop-loss integral I(a, M) = integral of P(X > x) over x in [a, M] (Klugman, Panjer & Willmot, "Loss Models",
section 3.4),

    m(a, M) = I(a, M) / P(X > a),
    E[min(X, M)] = m(0, M),
    CVaR_alpha(min(X, M)) = v + m(v, M), v the alpha-quantile of X, or M where v >= M
    (Rockafellar & Uryasev, "Optimization of conditional value-at-risk", J. Risk 2 (2000), 21-41),
    E[min(X, M) - g | X > g] = m(g, M),
    CVaR_alpha(min(X, M) - g | X > g) = v - g + m(v, M), v the alpha-quantile of X given X > g, or M - g where v >= M.

By parts, with q the density of the law's coordinate t (see `law`),

    m(a, M) = integral over t in [t_a, t_M] of (x(t) - a) q(t)/S(t_a) dt + (M - a) S(t_M)/S(t_a):

no term is negative, so nothing cancels, and the ratios to S(t_a) are taken before anything underflows.
"""

from __future__ import annotations

import numpy as np

from scheduler_core.lengths.arrays import FloatArray
from scheduler_core.lengths.law import Law, log_complement
from scheduler_core.lengths.quadrature import NODES, WEIGHTS

_FARTHEST = 1e300


def mean_excess(
    law: Law,
    location: FloatArray,
    spread: FloatArray,
    start_tokens: FloatArray,
    cap: FloatArray,
    start: FloatArray | None = None,
) -> FloatArray:
    """m(a, M) in tokens; 0 where a >= M. All arrays are columns [N, 1], or [1, 1] for the law's parameters.

    Args:
        law: Law of T in ln X = location + spread T.
        location: In ln tokens.
        spread: Dimensionless, > 0.
        start_tokens: a >= 0.
        cap: M > 0.
        start: t of a, where that is known and a is rounded from it.
    """
    inside = start_tokens < cap
    a = np.where(inside, start_tokens, 0.0)
    top = _height(cap, location, spread)
    if start is None:
        start = law.coordinate(np.where(a > 0, _height(a, location, spread), -np.inf))
        rise = np.log1p((cap - a) / np.where(a > 0, a, cap)) / spread
    else:
        start = np.where(inside, start, -np.inf)
        rise = top - law.height(np.where(inside, start, 0.0))
    end = np.maximum(law.coordinate(top), start)
    # Everything is taken relative to the density at the origin: the start if it is beyond the mode, else the mode,
    # or the end if that is before the mode.
    origin = np.maximum(start, np.minimum(end, 0.0))
    at_start = origin == start
    gap = law.travel(np.where(at_start, start, 0.0), np.where(at_start, rise, 0.0))
    span = np.where(at_start, gap, end - origin)

    beyond = start >= law.split
    safe = np.where(np.isfinite(start), start, law.split)
    own = law.ratio(safe, np.where(beyond, 1.0, -1.0))
    tail = np.where(np.isfinite(start), np.minimum(law.log_density(safe) + np.log(own), 0.0), -np.inf)
    log_sf = log_complement(np.where(beyond, -1.0, tail))
    relative = np.where(beyond, -np.log(own), law.log_density(origin) - log_sf)

    over = _survival(law, origin, span, end, relative, log_sf)
    body = np.zeros_like(over)
    low, middle, high = law.pieces(spread, start, origin, end)
    for first, last in ((low, middle), (middle, high)):
        width = last - first
        w = (first - origin) + width * NODES
        density = np.exp(law.drop(origin, w) + relative)
        growth = spread * law.rise(origin, w)
        log_length = np.where(origin == end, np.log(cap), location)
        excess = np.where(at_start, a * np.expm1(growth), np.exp(log_length + growth) - a)
        body += width * ((density * excess) @ WEIGHTS)[:, None]
    value = body + (cap - a) * over
    return np.where(inside, np.clip(value, 0.0, cap - a), 0.0)


def capped_cvar(
    law: Law, location: FloatArray, spread: FloatArray, alpha: FloatArray, cap: FloatArray
) -> FloatArray:
    """CVaR_alpha(min(X, M)) in tokens; columns as for `mean_excess`."""
    t = law.quantile(np.log(alpha), np.log1p(-alpha))
    quantile = np.minimum(np.exp(location + spread * law.height(t)), cap)
    return np.minimum(quantile + mean_excess(law, location, spread, quantile, cap, start=t), cap)


def _height(x: FloatArray, location: FloatArray, spread: FloatArray) -> FloatArray:
    """T of a length, kept finite where the spread is too small for it: nothing lives out there."""
    return np.clip((np.log(x) - location) / spread, -_FARTHEST, _FARTHEST)


def _survival(
    law: Law,
    origin: FloatArray,
    span: FloatArray,
    end: FloatArray,
    relative: FloatArray,
    log_sf: FloatArray,
) -> FloatArray:
    """P(X > M) / P(X > a); `relative` is ln of q(origin) / P(X > a), `log_sf` ln P(X > a)."""
    beyond = end >= law.split
    side = np.where(beyond, 1.0, -1.0)
    ratio = law.ratio(end, side)
    tail = np.minimum(law.log_density(end) + np.log(ratio), 0.0)
    right = np.exp(law.drop(origin, np.where(beyond, span, 0.0)) + relative) * ratio
    return np.where(beyond, right, np.exp(log_complement(np.where(beyond, -1.0, tail)) - log_sf))
