"""Student-t survival and quantile functions with numpy alone, in the variable s = asinh(z / sqrt(nu)).

With z = sqrt(nu) sinh s the density becomes smooth and log-concave:

    t_nu(z) dz = C_nu sech(s)^nu ds,   C_nu = Gamma((nu+1)/2) / (sqrt(pi) Gamma(nu/2)).

The survival function is its tail integral. Because ln cosh(s+w) >= ln cosh s + ln cosh w for s, w >= 0,
everything beyond w = W_nu = arcosh(exp(41/nu)) is below exp(-41) of what is kept, for every s. Because the
density in s is log-concave, so is its survival function, hence Newton's method on ln sf converges from any
start, and does so monotonically after one step.

All functions broadcast; `z`, `p` are dimensionless, `nu` > 0 (degrees of freedom).
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike

from scheduler_core.quadrature import NODES, WEIGHTS, FloatArray

#: Rows integrated at once; bounds the memory of a vectorised call to a few megabytes.
ROWS_PER_BLOCK = 4096
_CUT = 41.0
_LN2 = math.log(2.0)


@lru_cache(maxsize=1024)
def log_normaliser(nu: float) -> float:
    """ln C_nu = ln Gamma((nu+1)/2) - ln Gamma(nu/2) - ln(pi)/2; for large nu by its series (DLMF 5.11.13)."""
    if nu > 1e3:
        x = nu / 2
        return 0.5 * math.log(x) - 1 / (8 * x) + 1 / (192 * x**3) - 0.5 * math.log(math.pi)
    return math.lgamma((nu + 1) / 2) - math.lgamma(nu / 2) - 0.5 * math.log(math.pi)


def log_normalisers(nu: FloatArray) -> FloatArray:
    """`log_normaliser` of each element; one evaluation per distinct value."""
    values, inverse = np.unique(nu, return_inverse=True)
    return np.array([log_normaliser(float(v)) for v in values])[inverse].reshape(nu.shape)


@lru_cache(maxsize=1024)
def half_width(nu: float) -> float:
    """W_nu: cosh(W)^-nu = exp(-41), so that [-W, W] holds the whole distribution to double precision."""
    cut = _CUT / nu
    if cut > 500.0:
        return cut + _LN2
    return 2.0 * math.asinh(math.sqrt(math.expm1(cut) / 2.0))


def half_widths(nu: FloatArray) -> FloatArray:
    """`half_width` of each element."""
    values, inverse = np.unique(nu, return_inverse=True)
    return np.array([half_width(float(v)) for v in values])[inverse].reshape(nu.shape)


def log_cosh(s: FloatArray) -> FloatArray:
    """ln cosh s without overflow."""
    size = np.abs(s)
    return size + np.log1p(np.exp(-2.0 * size)) - _LN2


def to_s(z: FloatArray, nu: FloatArray) -> FloatArray:
    """s = asinh(z / sqrt(nu))."""
    return np.asarray(np.arcsinh(z / np.sqrt(nu)))


def logpdf(z: ArrayLike, nu: ArrayLike) -> FloatArray:
    """ln t_nu(z)."""
    z, nu = np.broadcast_arrays(np.asarray(z, float), np.asarray(nu, float))
    return np.asarray(log_normalisers(nu) - 0.5 * np.log(nu) - (nu + 1.0) * log_cosh(to_s(z, nu)))


def _tail_ratio(s: FloatArray, nu: FloatArray) -> FloatArray:
    """R(s) = integral over w > 0 of (cosh s / cosh(s+w))^nu for s >= 0, shape (n,); R = -1 / (ln sf)'.

    cosh(s+w) / cosh s = cosh w + tanh s sinh w.
    """
    out = np.empty_like(s)
    width = half_widths(nu)
    for first in range(0, s.size, ROWS_PER_BLOCK):
        block = slice(first, first + ROWS_PER_BLOCK)
        w = width[block, None] * NODES
        growth = np.cosh(w) + np.tanh(s[block, None]) * np.sinh(w)
        out[block] = width[block] * (growth ** -nu[block, None] @ WEIGHTS)
    return out


def _log_sf_right(s: FloatArray, nu: FloatArray) -> tuple[FloatArray, FloatArray]:
    """(ln sf, R) at s >= 0; flat arrays."""
    ratio = _tail_ratio(s, nu)
    return log_normalisers(nu) - nu * log_cosh(s) + np.log(ratio), ratio


def log_sf(z: ArrayLike, nu: ArrayLike) -> FloatArray:
    """ln P(T > z), accurate in both tails (relative error of P about 1e-13)."""
    z, nu = np.broadcast_arrays(np.asarray(z, float), np.asarray(nu, float))
    flat_z, flat_nu = z.ravel(), nu.ravel()
    finite = np.isfinite(flat_z)
    right, _ = _log_sf_right(np.where(finite, np.abs(to_s(flat_z, flat_nu)), 0.0), flat_nu)
    right = np.where(finite, np.minimum(right, -_LN2), -np.inf)
    out = np.where(flat_z >= 0, right, np.log1p(-np.exp(right)))
    return np.asarray(np.where(np.isnan(flat_z), np.nan, out).reshape(z.shape))


def sf(z: ArrayLike, nu: ArrayLike) -> FloatArray:
    """P(T > z)."""
    return np.asarray(np.exp(log_sf(z, nu)))


def cdf(z: ArrayLike, nu: ArrayLike) -> FloatArray:
    """P(T <= z); by symmetry the survival function at -z, so small values keep their relative accuracy."""
    return sf(-np.asarray(z, float), nu)


def isf_from_log(log_p: ArrayLike, nu: ArrayLike) -> FloatArray:
    """z with ln P(T > z) = `log_p`; log_p <= 0, where 0 gives -inf and -inf gives +inf."""
    log_p, nu = np.broadcast_arrays(np.asarray(log_p, float), np.asarray(nu, float))
    flat, flat_nu = log_p.ravel(), nu.ravel()
    upper = flat <= -_LN2
    with np.errstate(divide="ignore"):
        target = np.where(upper, flat, np.log(-np.expm1(np.where(upper, 0.0, flat))))
    finite = np.isfinite(target)
    goal = np.where(finite, target, -_LN2)
    s = np.zeros_like(goal)
    for _ in range(60):
        value, ratio = _log_sf_right(s, flat_nu)
        step = (value - goal) * ratio
        s = np.maximum(s + step, 0.0)
        if np.all(np.abs(step) <= 4e-16 + 2e-15 * s):
            break
    z = np.where(finite, np.sqrt(flat_nu) * np.sinh(np.where(finite, s, 0.0)), np.inf)
    z = np.where(np.isnan(flat), np.nan, np.where(upper, z, -z))
    return np.asarray(z.reshape(log_p.shape))


def ppf(q: ArrayLike, nu: ArrayLike) -> FloatArray:
    """z with P(T <= z) = q, 0 <= q <= 1; 0 and 1 give -inf and +inf, anything outside gives NaN."""
    q = np.asarray(q, float)
    with np.errstate(divide="ignore", invalid="ignore"):
        return -isf_from_log(np.log(q) + np.where(q > 1, np.nan, 0.0), nu)


@lru_cache(maxsize=1024)
def quantile_s(q: float, nu: float) -> float:
    """asinh(z_q / sqrt(nu)) of the q-quantile for plain floats, remembered (the scheduler asks for one alpha)."""
    return math.asinh(float(ppf(np.array(q), np.array(nu))) / math.sqrt(nu))
