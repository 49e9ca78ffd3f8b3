"""P-values of fitted distributions: plain Kolmogorov-Smirnov, and parametric bootstrap.

The plain p-value, as in TIE's table 1, ignores that the parameters were fitted to the same samples (Lilliefors), which
makes it too high, and that lengths are integers, which makes it too low with many ties. It is only suitable to compare
families. With censored samples only the distance below the smallest limit is used, which makes it even higher. The
bootstrap treats its replicates like the samples, so its p-value is uniform if the family is correct."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import interpolate, stats

from training.fitting.estimate import Estimates, FloatArray, Solver, SortedLengths, estimate
from training.fitting.kernels import GAMMA, WEIBULL

# An exact KS p-value takes some hundred microseconds. More than this many for one sample size are interpolated by a
# cubic spline through as many exact ones (error below 2e-5, at kinks of the exact curve; see the tests).
_TABLE_SIZE = 513
# Upper bound of the logarithm of drawn lengths; below ln(2^31), the maximum length in a file.
_LARGEST = 21.4
_LEAST = 1e-300


def ks_p_values(statistics: FloatArray, counts: NDArray[np.integer]) -> FloatArray:
    """Two-sided p-values of KS statistics [G] for sample sizes `counts` [G]; NaN stays NaN.

    Based on the exact null distribution; absolute error below 2e-5.
    """
    p = np.full(len(statistics), np.nan)
    tested = ~np.isnan(statistics)
    for count in np.unique(counts[tested]):
        rows = tested & (counts == count)
        if rows.sum() > _TABLE_SIZE:
            p[rows] = _p_table(int(count))(statistics[rows])
        else:
            p[rows] = stats.kstwo.sf(statistics[rows], int(count))
    return np.asarray(np.clip(p, 0.0, 1.0), dtype=np.float64)


@lru_cache(maxsize=256)
def _p_table(count: int) -> interpolate.CubicSpline:
    # Statistics lie above 1 / (2 N); beyond 4 / sqrt(N) p is below 1e-13. Most are small, so the grid is denser there.
    low, high = 0.5 / count, min(1.0, 4.0 / math.sqrt(count))
    at = low + (1.0 - low) * np.linspace(0.0, 1.0, _TABLE_SIZE) ** 1.5
    at = np.union1d(at[at < high], [high, 1.0])
    return interpolate.CubicSpline(at, stats.kstwo.sf(at, count))


class Bootstrap(NamedTuple):
    """Result of the parametric bootstrap of G groups; NaN for groups that are not fitted."""

    # ks_p, ad_p: p-values of the Kolmogorov-Smirnov and Anderson-Darling statistics, (1 + #{replicate >= observed}) / (1
    # + replicates), [G].
    ks_p: FloatArray
    ad_p: FloatArray


def bootstrap(
    sample: SortedLengths,
    fits: Estimates,
    *,
    replicates: int,
    integers: bool,
    limits: FloatArray,
    seeds: Sequence[int],
    solver: Solver = "batched",
) -> Bootstrap:
    """Draws samples from each fit, rounds and censors them like the observed ones, and refits and tests them.

    Args:
        sample, fits: The fitted lengths and their fits.
        replicates: Number of replicates for each group.
        integers, solver: The settings of the original fits.
        limits: Length in tokens above which replicates are censored, inf for no censoring [G].
        seeds: Seed of each group's random stream [G], see `group_seed`.
    """
    result = Bootstrap(np.full(len(sample), np.nan), np.full(len(sample), np.nan))
    ks, ad = fits.distances(sample)
    for g in np.flatnonzero(fits.fitted).tolist():
        size = int(sample.offsets[g + 1] - sample.offsets[g])
        rng = np.random.Generator(np.random.PCG64(seeds[g]))
        drawn = _draw(rng, fits, g, replicates * size, float(limits[g]))
        again = SortedLengths.of(*drawn, np.arange(replicates + 1) * size)
        refits = estimate(again, fits.family, solver=solver, integers=integers)
        ks_drawn, ad_drawn = refits.distances(again)
        result.ks_p[g] = _exceeds(ks_drawn, ks[g])
        result.ad_p[g] = _exceeds(ad_drawn, ad[g])
    return result


def _draw(
    rng: np.random.Generator, fits: Estimates, group: int, size: int, limit: float
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Draws lengths of at least one token from the fit of a group, and whether each is within `limit`."""
    at = fits.solution
    m, sigma, nu = float(at.m[group]), math.exp(at.s[group]), float(at.nu[group])
    if fits.family.code == GAMMA:
        shape = sigma**-2
        y = m + np.log(np.maximum(rng.standard_gamma(shape, size), _LEAST) / shape)
    elif fits.family.code == WEIBULL:
        y = m + sigma * np.log(np.maximum(rng.standard_exponential(size), _LEAST))
    elif math.isinf(nu):
        y = m + sigma * rng.standard_normal(size)
    else:
        y = m + sigma * rng.standard_t(nu, size)
    x = np.maximum(np.rint(np.exp(np.minimum(y, _LARGEST))), 1.0)
    return np.minimum(x, limit).astype(np.int64), x <= limit


def _exceeds(drawn: FloatArray, observed: float) -> float:
    """Bootstrap p-value; a replicate without a statistic, because all of it is censored, counts as an exceedance."""
    if math.isnan(observed):
        return math.nan
    return float((1 + np.sum(~(drawn < observed - 1e-12))) / (1 + len(drawn)))


def group_seed(seed: int, name: str) -> int:
    """Seed of a group's random stream, derived from its name and thus independent of the other groups."""
    return int.from_bytes(hashlib.blake2b(f"{seed}|{name}".encode(), digest_size=8).digest(), "little")
