"""The censored mean excess m(a, M) = E[min(X, M) - a | X > a], from which every expectation of a length follows.

With the stop-loss integral I(a, M) = integral of P(X > x) over x in [a, M] (Klugman, Panjer & Willmot, "Loss Models",
section 3.4),

    m(a, M) = I(a, M) / P(X > a),
    E[min(X, M)] = m(0, M),
    CVaR_alpha(min(X, M)) = v + m(v, M), v the alpha-quantile of X, or M where v >= M
    (Rockafellar & Uryasev, "Optimization of conditional value-at-risk", J. Risk 2 (2000), 21-41),
    E[min(X, M) - g | X > g] = m(g, M).

By parts, with q the density of the coordinate t of `standard`,

    m(a, M) = integral over t in [t_a, t_M] of (x(t) - a) q(t)/S(t_a) dt + (M - a) S(t_M)/S(t_a):

no term is negative, so nothing cancels, and the ratios to S(t_a) are taken before anything underflows.
"""

from __future__ import annotations

import numpy as np

from scheduler_core.lengths.standard import NODES, WEIGHTS, FloatArray, StandardDistribution, log_complement

_MAX_VALUE = 1e300


def mean_excess(
    standard: StandardDistribution,
    location: FloatArray,
    scale: FloatArray,
    start_tokens: FloatArray,
    max_tokens: FloatArray,
    start: FloatArray | None = None,
) -> FloatArray:
    """m(a, M) in tokens, a = start_tokens >= 0, M = max_tokens > 0; 0 where a >= M. `start` is t of a, where a is rounded from it.

    All arrays are columns [N, 1], or [1, 1] for parameters of `standard`, the distribution of T in ln X = location + scale T.
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
    # Everything is taken relative to the density at the origin: the start if it is beyond the mode, else the mode,
    # or the end if that is before the mode.
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
    """T of a length, kept finite where the scale is too small for it: nothing lives out there."""
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
