"""Distance between each group's observations and its fitted distribution: Kolmogorov-Smirnov and Anderson-Darling.

Both look below the smallest length at which a sample was censored, where the empirical distribution F_n of all observations is
known. With u = F(x) and steps of F_n at the observations (by their weights),

    KS = max |F_n - u|,      AD = N * integral over u of (F_n - u)^2 / (u (1 - u)),

the integral up to F(smallest censored length), or 1; between two steps F_n = c and the antiderivative is
-u + c^2 ln u - (1 - c)^2 ln(1 - u).
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from training.fitting.kernels.likelihood import cdf
from training.fitting.kernels.special import t_log_constant

_LEAST = 1e-300
_MOST = 1.0 - 1e-16


@njit(cache=True)
def _antiderivative(u: float, c: float) -> float:
    """At c = 0 and c = 1 the vanishing term is left out, so that u = 0 and u = 1 are allowed there."""
    value = -u
    if c > 0.0:
        value += c * c * math.log(u)
    if c < 1.0:
        value -= (1.0 - c) * (1.0 - c) * math.log1p(-u)
    return value


@njit(cache=True)
def distances(
    keys: np.ndarray,
    weights: np.ndarray,
    family: int,
    nu: float,
    constants: np.ndarray,
    m: float,
    s: float,
) -> tuple[float, float]:
    """(KS, AD) of one group; NaN if nothing lies below the smallest censored length.

    Args:
        keys, weights: One group's, see `groups`.
        family, nu, m, s: The fitted distribution.
        constants: `constants_of` family and nu.
    """
    total = 0.0
    limit = -1
    for i in range(keys.size):
        total += weights[i] if weights.size else 1.0
        if limit < 0 and keys[i] & 1:
            limit = keys[i] >> 1
    sigma = math.exp(s)
    empirical, last_u, ks, ad = 0.0, 0.0, 0.0, 0.0
    i = 0
    while i < keys.size and not keys[i] & 1:
        key = keys[i]
        mass = 0.0
        while i < keys.size and keys[i] == key:
            mass += weights[i] if weights.size else 1.0
            i += 1
        u = cdf(family, nu, constants, math.log(key >> 1), m, sigma)
        after = min(empirical + mass / total, 1.0)
        ks = max(ks, abs(u - empirical), abs(after - u))
        inner = min(max(u, _LEAST), _MOST)
        ad += _antiderivative(inner, empirical) - _antiderivative(last_u, empirical)
        empirical, last_u = after, inner
    if limit < 0:
        # F_n = 1 from here; if rounding of the weights left less, it is 1 all the same.
        ad += _antiderivative(1.0, 1.0) - _antiderivative(last_u, 1.0)
        return ks, total * ad
    u = min(cdf(family, nu, constants, math.log(limit), m, sigma), _MOST)
    if u <= 0.0:
        return math.nan, math.nan
    ks = max(ks, abs(u - empirical))
    if u > last_u:
        ad += _antiderivative(u, empirical) - _antiderivative(last_u, empirical)
    return ks, total * ad


@njit(cache=True)
def group_distances(
    keys: np.ndarray,
    weights: np.ndarray,
    offsets: np.ndarray,
    family: int,
    nu: np.ndarray,
    constants: np.ndarray,
    m: np.ndarray,
    s: np.ndarray,
    tested: np.ndarray,
) -> np.ndarray:
    """KS and AD of each group [G, 2]; NaN where `tested` [G] is false. No constants: each group has a nu of its own."""
    out = np.full((offsets.size - 1, 2), np.nan)
    for g in range(offsets.size - 1):
        if tested[g]:
            begin, end = offsets[g], offsets[g + 1]
            w = weights[begin:end] if weights.size else weights
            own = constants if constants.size else np.array([t_log_constant(nu[g])])
            out[g, 0], out[g, 1] = distances(keys[begin:end], w, family, nu[g], own, m[g], s[g])
    return out
