"""Scores of length distributions that are given as CDFs on a common grid of ln tokens."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from training.network.data import SampleLengths

Array = NDArray[np.float64]
#: Lengths are truncated to this value before scoring.
LIMIT = 15_000
#: Grid of ln tokens at which every CDF is evaluated, 0.5 to about 65,000 tokens; it contains the limit.
STEP = math.log(2 * LIMIT) / 336
GRID: Array = math.log(0.5) + STEP * np.arange(384.0)
LEVELS = (0.5, 0.9, 0.99)
RISK = 0.9


def at_grid(values: Array, z: Array, of: NDArray[np.int64] | None = None) -> Array:
    """Interpolates values on GRID [D, G] at z [R, N]; `of` [R] is the row of `values`, default 0..R-1."""
    place = np.clip((z - GRID[0]) / STEP, 0, len(GRID) - 1.0001)
    low = place.astype(np.int64)
    row = (np.arange(len(z)) if of is None else of)[:, None]
    return np.asarray(values[row, low] * (low + 1 - place) + values[row, low + 1] * (place - low))


def quantile(cdf: Array, level: float) -> Array:
    """Quantile at a level, in ln tokens [R]."""
    at = np.clip((cdf < level).sum(axis=1), 1, len(GRID) - 1)
    row = np.arange(len(cdf))
    below, above = cdf[row, at - 1], cdf[row, at]
    return np.asarray(GRID[at - 1] + STEP * (level - below) / np.maximum(above - below, 1e-12))


def shifted(cdf: Array, shift: float, scale: float) -> Array:
    """Shifts and scales about the median m: m + shift w + scale (z - m); w is half the 16 % to 84 % range."""
    median = quantile(cdf, 0.5)[:, None]
    width = ((quantile(cdf, 0.84) - quantile(cdf, 0.16)) / 2)[:, None]
    return at_grid(cdf, median + (GRID - median - shift * width) / scale)


def crps(cdf: Array, lengths: Array, x: Array, of: NDArray[np.int64]) -> Array:
    """CRPS [R, N] of lengths: the integral of (F - 1{X <= x})^2 up to the limit; `x`: values on GRID."""

    def below(values: Array) -> Array:
        steps = (values[:, 1:] + values[:, :-1]) / 2 * np.diff(x)
        return np.concatenate([np.zeros((len(values), 1)), np.cumsum(steps, axis=1)], axis=1)

    z, lower, upper = np.log(lengths), below(cdf**2), below((1 - cdf) ** 2)
    # Integral of F^2 below the length, and of (1 - F)^2 from there to the limit;
    top = upper[of, np.searchsorted(GRID, math.log(LIMIT) - STEP / 2)][:, None]
    return np.asarray(at_grid(lower, z, of) + top - at_grid(upper, z, of))


def mean_over(present: NDArray[np.bool_], values: Array) -> Array:
    """Mean over each row's samples [R]."""
    return np.asarray(np.where(present, values, 0.0).sum(1) / present.sum(1))


def scores(cdf: Array, samples: SampleLengths, of: NDArray[np.int64]) -> dict[str, Array]:
    """Scores of each row [R]; `of` [R] is the index of its distribution in cdf [D, G]."""
    finished, present = samples.finished.numpy(), samples.present.numpy()
    served = np.minimum(samples.tokens.numpy().astype(float), LIMIT)
    z, x = np.log(served), np.exp(GRID)
    u = at_grid(cdf, z, of)
    density = np.maximum(at_grid(cdf, z + STEP, of) - at_grid(cdf, z - STEP, of), 1e-12) / (2 * STEP)
    nll = np.where(finished, z - np.log(density), -np.log(np.maximum(1 - u, 1e-12)))
    survival = np.where(x[1:] < LIMIT * 1.001, 1 - (cdf[:, 1:] + cdf[:, :-1]) / 2, 0.0) * np.diff(x)
    top = np.minimum(np.exp(quantile(cdf, RISK)), LIMIT)
    beyond = np.cumsum(survival[:, ::-1], axis=1)[:, ::-1]
    tail = at_grid(np.concatenate([beyond, np.zeros((len(cdf), 1))], axis=1), np.log(top)[:, None])[:, 0]
    over = present & (served > top[of, None])
    result = {
        "crps_tokens": mean_over(present, crps(cdf, served, x, of)),
        "crps_log": mean_over(present, crps(cdf, served, GRID, of)),
        "nll": mean_over(present, nll),
        "median": quantile(cdf, 0.5)[of],
        "expected": (survival.sum(axis=1) + x[0])[of],
        "cvar": np.minimum(top + tail / (1 - RISK), LIMIT)[of],
        "mean_length": mean_over(present, served),
        "mean_log": mean_over(present, z),
        "over": over.sum(1) / present.sum(1),
        "over_length": np.where(over, served, 0.0).sum(1) / present.sum(1),
    }
    return result | {f"p{100 * level:g}": mean_over(present, (u <= level) & finished) for level in LEVELS}
