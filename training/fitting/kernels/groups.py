"""Loops over groups: sorting, fitting, flags, standard errors, goodness-of-fit statistics.

A sample is encoded as the key 2 * length + (1 if censored), so that a censored sample is sorted after finished samples
of the same length.

The Kolmogorov-Smirnov and Anderson-Darling statistics are computed below the smallest censored length, where the
empirical distribution F_n of all observations is known. With u = F(x), and F_n stepping by weight at each observation,

    KS = max |F_n - u|,      AD = N * integral over u of (F_n - u)^2 / (u (1 - u)),

where the integral ends at F(smallest censored length), or 1. Between two steps F_n is a constant c, and the
antiderivative is -u + c^2 ln u - (1 - c)^2 ln(1 - u).
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from training.fitting.kernels import GAMMA, WEIBULL
from training.fitting.kernels.likelihood import (
    HIGH,
    INTERVAL_WEIGHT,
    LOW,
    WEIGHT,
    Model,
    Observations,
    Y,
    cdf,
)
from training.fitting.kernels.solve import TARGET, Maximum, climb, log_t_model, profile, standard_errors

#: Bits of the flags of a fit; their names are in `training.fitting.fits`.
CONSTANT = 1
SIGMA_FLOOR = 2
ALL_CENSORED = 4
MEDIAN_EXTRAPOLATED = 8
TOO_FEW_SAMPLES = 16
NU_AT_BOUND = 32

#: Lookup table of ln(length) for lengths below 8192.
_LOGS = np.log(np.maximum(np.arange(8192), 1))


@njit(cache=True)
def _log(length: int) -> float:
    return _LOGS[length] if length < _LOGS.size else math.log(length)


@njit(cache=True)
def sort_small_groups(keys: np.ndarray, offsets: np.ndarray, largest: int) -> None:
    """Sorts the keys of each group of at most `largest` observations in place, by insertion sort."""
    for g in range(offsets.size - 1):
        begin, end = offsets[g], offsets[g + 1]
        if end - begin > largest:
            continue
        for i in range(begin + 1, end):
            key = keys[i]
            j = i - 1
            while j >= begin and keys[j] > key:
                keys[j + 1] = keys[j]
                j -= 1
            keys[j + 1] = key


@njit(cache=True)
def _tie(keys: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """ln of the most frequent finished length, and its fraction of all samples except those censored below it.

    Samples censored below that length are consistent with it, so they do not count against the tie.
    """
    best, best_weight, run, run_weight = 0, 0.0, -1, 0.0
    for i in range(keys.size):
        if keys[i] & 1:
            continue
        w = weights[i] if weights.size else 1.0
        run_weight = run_weight + w if keys[i] == run else w
        run = keys[i]
        if run_weight > best_weight:
            best, best_weight = run, run_weight
    others = 0.0
    for i in range(keys.size):
        if (keys[i] > best) if keys[i] & 1 else (keys[i] != best):
            others += weights[i] if weights.size else 1.0
    return _log(best >> 1), best_weight / (best_weight + others)


@njit(cache=True)
def _few_ties(keys: np.ndarray) -> bool:
    """Whether at most half of the adjacent sorted keys are equal, so that no length is shared by most observations."""
    equal = 0
    for i in range(1, keys.size):
        equal += keys[i] == keys[i - 1]
    return 2 * equal <= keys.size


@njit(cache=True)
def read_observations(
    keys: np.ndarray, weights: np.ndarray, logs: np.ndarray, integers: bool, buffer: np.ndarray
) -> Observations:
    """Converts the sorted keys of one group to observations; equal censored lengths are merged into one interval.

    Args:
        keys, weights: Sorted keys of one group and their weights; empty weights if all are 1.
        logs: Logarithms of the lengths, as filled in by `first_guess`.
        integers: Whether a finished length x is the interval [x - 1/2, x + 1/2] instead of a point.
        buffer: Array of shape (5, at least N), which becomes the table of the observations.
    """
    points, intervals = 0, 0
    point_weight, total = 0.0, 0.0
    last_censored = -1
    for i in range(keys.size):
        w = weights[i] if weights.size else 1.0
        total += w
        length = keys[i] >> 1
        if keys[i] & 1:
            if length == last_censored:
                buffer[INTERVAL_WEIGHT, intervals - 1] += w
                continue
            last_censored = length
            buffer[LOW, intervals], buffer[HIGH, intervals] = logs[i], math.inf
            buffer[INTERVAL_WEIGHT, intervals] = w
            intervals += 1
        elif integers:
            buffer[LOW, intervals], buffer[HIGH, intervals] = math.log(length - 0.5), math.log(length + 0.5)
            buffer[INTERVAL_WEIGHT, intervals] = w
            intervals += 1
        else:
            buffer[Y, points], buffer[WEIGHT, points] = logs[i], w
            point_weight += w
            points += 1
    tied, fraction = 0.0, 0.0
    if weights.size or intervals or not _few_ties(keys):
        tied, fraction = _tie(keys, weights)
    return Observations(buffer, points, intervals, weights.size == 0, point_weight, total, tied, fraction)


@njit(cache=True)
def first_guess(family: int, keys: np.ndarray, ordered: np.ndarray) -> tuple[float, float]:
    """Initial (m, s); fills `ordered` [N] with the logarithms of the lengths, censored ones at their limit."""
    count = keys.size
    sum_x, sum_y = 0.0, 0.0
    for i in range(count):
        ordered[i] = _log(keys[i] >> 1)
        sum_x += keys[i] >> 1
        sum_y += ordered[i]
    if family == GAMMA:
        log_mean = math.log(sum_x / count)
        gap = max(log_mean - sum_y / count, 1e-6)
        shape = (3.0 - gap + math.sqrt((gap - 3.0) ** 2 + 24.0 * gap)) / (12.0 * gap)
        return log_mean, -0.5 * math.log(shape)
    middle = ordered[count // 2]
    width = ordered[(3 * count) // 4] - ordered[count // 4]
    if width <= 0.0:  # ties
        width = 0.5 * (ordered[count - 1] - ordered[0])
    # Interquartile ranges at sigma = 1: 1.5 for t(3.5), 1.57 for ln Exp(1), whose median is -0.37.
    if family == WEIBULL:
        # The likelihood falls like exp(-exp(z)), so the start must not leave a sample far in the upper tail.
        width = max(width, 0.3 * (ordered[count - 1] - middle))
        middle += 0.25 * width
    return middle, math.log(max(width / 1.5, 1e-2))


@njit(cache=True)
def describe(
    keys: np.ndarray, model: Model, observations: Observations, free_nu: bool, fit: Maximum, out: np.ndarray
) -> int:
    """Writes one maximum to `out`, a row [9] of `fit_groups`, and returns its flags."""
    flags = 0
    size = keys.size
    if not model.fixed_scale and fit[1] <= model.floor:
        flags |= SIGMA_FLOOR
    if free_nu and (model.nu == 1.0 or math.isinf(model.nu)):
        flags |= NU_AT_BOUND
    censored = False
    for i in range(size):
        censored = censored or keys[i] & 1 == 1
    # At the sigma floor the fit sits at a tied length, so a median above the longest sample is not an extrapolation.
    if censored and not flags & SIGMA_FLOOR:
        longest = math.log(keys[size - 1] >> 1)
        below = cdf(model, longest, fit[0], math.exp(fit[1]))
        if below < 0.5 - 1e-12:
            flags |= MEDIAN_EXTRAPOLATED
    sum_y = 0.0
    for i in range(observations.num_points):
        sum_y += observations.table[Y, i] * observations.table[WEIGHT, i]
    out[0], out[1], out[2], out[3] = fit[0], fit[1], model.nu, fit[2] - sum_y
    out[4], out[5], out[6], out[7] = standard_errors(model, observations, fit, free_nu)
    out[8] = fit[6]
    return flags


@njit(cache=True)
def fit_groups(
    keys: np.ndarray,
    weights: np.ndarray,
    offsets: np.ndarray,
    model: Model,
    free_nu: bool,
    integers: bool,
    min_samples: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fits each group.

    Args:
        keys, weights: Flat [S], sorted within each group; empty weights if all are 1.
        offsets: [G + 1].
        model: Model to fit; its nu is ignored with `free_nu`.
        integers: See `read_observations`.
        min_samples: Minimum number of observations of a fitted group.

    Returns:
        Numbers [G, 9]: m, ln sigma, nu, log-likelihood of X, standard errors of m, ln sigma and ln nu, covariance of
        m and ln sigma, largest slope; flag bits [G]; converged [G].
    """
    count = offsets.size - 1
    numbers = np.full((count, 9), np.nan)
    flags = np.zeros(count, dtype=np.int64)
    converged = np.zeros(count, dtype=np.bool_)
    widest = 0
    for g in range(count):
        widest = max(widest, offsets[g + 1] - offsets[g])
    buffer = np.empty((5, widest))
    ordered = np.empty(widest)
    for g in range(count):
        rows = keys[offsets[g] : offsets[g + 1]]
        w = weights[offsets[g] : offsets[g + 1]] if weights.size else weights
        size = rows.size
        if size == 0:
            flags[g] = TOO_FEW_SAMPLES
            continue
        logs = ordered[:size]
        m, s = first_guess(model.family, rows, logs)
        observations = read_observations(rows, w, logs, integers, buffer)
        lowest = 0.0 if model.fixed_scale else model.floor
        if model.fixed_scale:
            s = 0.0
        num_censored = 0
        for i in range(size):
            num_censored += rows[i] & 1
        if num_censored == size or size < min_samples:
            # m is the largest limit, a lower bound, if all samples are censored, else the median of the few samples.
            flags[g] |= ALL_CENSORED if num_censored == size else 0
            flags[g] |= TOO_FEW_SAMPLES if size < min_samples else 0
            numbers[g, 0] = ordered[size - 1] if num_censored == size else ordered[size // 2]
            numbers[g, 1] = lowest
            numbers[g, 2] = model.nu
            continue
        if num_censored == 0 and rows[0] == rows[size - 1]:
            flags[g] |= CONSTANT
            m, s = ordered[0], lowest
        fitted = model
        if free_nu:
            nu, fit = profile(observations, m, s, model.floor)
            fitted = log_t_model(nu, model.floor)
        else:
            fit = climb(model, observations, m, s)
        flags[g] |= describe(rows, fitted, observations, free_nu, fit, numbers[g])
        converged[g] = fit[6] <= TARGET or flags[g] & CONSTANT != 0
    return numbers, flags, converged


_LEAST = 1e-300
_MOST = 1.0 - 1e-16


@njit(cache=True)
def _antiderivative(u: float, c: float) -> float:
    """Antiderivative of the AD integrand; its zero terms at c = 0 and c = 1 are skipped, which permits u = 0 and u = 1."""
    value = -u
    if c > 0.0:
        value += c * c * math.log(u)
    if c < 1.0:
        value -= (1.0 - c) * (1.0 - c) * math.log1p(-u)
    return value


@njit(cache=True)
def _distances(
    keys: np.ndarray, weights: np.ndarray, model: Model, m: float, s: float
) -> tuple[float, float]:
    """(KS, AD) of one group; NaN if the fit has no mass below the smallest censored length."""
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
        u = cdf(model, math.log(key >> 1), m, sigma)
        after = min(empirical + mass / total, 1.0)
        ks = max(ks, abs(u - empirical), abs(after - u))
        inner = min(max(u, _LEAST), _MOST)
        ad += _antiderivative(inner, empirical) - _antiderivative(last_u, empirical)
        empirical, last_u = after, inner
    if limit < 0:
        # F_n is exactly 1 beyond the last observation, regardless of rounding in the sum of weights.
        ad += _antiderivative(1.0, 1.0) - _antiderivative(last_u, 1.0)
        return ks, total * ad
    u = min(cdf(model, math.log(limit), m, sigma), _MOST)
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
    model: Model,
    free_nu: bool,
    m: np.ndarray,
    s: np.ndarray,
    nu: np.ndarray,
    tested: np.ndarray,
) -> np.ndarray:
    """KS and AD statistics of each group under its fit [G, 2]; NaN where `tested` [G] is false."""
    out = np.full((offsets.size - 1, 2), np.nan)
    for g in range(offsets.size - 1):
        if tested[g]:
            begin, end = offsets[g], offsets[g + 1]
            w = weights[begin:end] if weights.size else weights
            own = log_t_model(nu[g], model.floor) if free_nu else model
            out[g, 0], out[g, 1] = _distances(keys[begin:end], w, own, m[g], s[g])
    return out
