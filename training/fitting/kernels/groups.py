"""The loop over groups: sort, fit, flag, standard errors.

A sample is a key: 2 * length + (1 if it is censored), so that sorted keys have a censored sample after finished ones
of its length.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from training.fitting.kernels.likelihood import (
    HIGH,
    INTERVAL_WEIGHT,
    LOW,
    WEIGHT,
    Observations,
    Y,
    cdf,
)
from training.fitting.kernels.solve import TARGET, Maximum, climb, profile, standard_errors, start
from training.fitting.kernels.special import t_log_constant

#: Bits of the flags a fit may carry; their names are in `training.fitting.fits`.
CONSTANT = 1
SIGMA_FLOOR = 2
ALL_CENSORED = 4
MEDIAN_EXTRAPOLATED = 8
TOO_FEW_SAMPLES = 16
NU_AT_BOUND = 32

#: ln of the usual lengths, which are integers.
_LOGS = np.log(np.maximum(np.arange(8192), 1))


@njit(cache=True)
def _log(length: int) -> float:
    return _LOGS[length] if length < _LOGS.size else math.log(length)


@njit(cache=True)
def sort_small_groups(keys: np.ndarray, offsets: np.ndarray, largest: int) -> None:
    """Sorts the keys of each group of up to `largest` observations in place, by insertion."""
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
def read_observations(
    keys: np.ndarray, weights: np.ndarray, logs: np.ndarray, integers: bool, buffer: np.ndarray
) -> Observations:
    """One group's observations out of its sorted keys; equal censored lengths become one interval with the sum of their weights.

    Args:
        keys, weights: One group's sorted keys and their weights; no weights if all are 1.
        logs: Of the lengths, as `first_guess` leaves them.
        integers: Whether a finished length x stands for [x - 1/2, x + 1/2] instead of a point.
        buffer: Of shape (5, at least N), becomes the observations' table.
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
    return Observations(buffer, points, intervals, weights.size == 0, point_weight, total)


@njit(cache=True)
def tie(keys: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """ln of the most frequent finished length, and its fraction of the samples that could differ from it.

    A sample censored below that length is as probable as it can be there, so it does not count.
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
    """Whether at most half of the neighbours in length are equal, so that no value is shared by most observations."""
    equal = 0
    for i in range(1, keys.size):
        equal += keys[i] == keys[i - 1]
    return 2 * equal <= keys.size


@njit(cache=True)
def first_guess(family: int, keys: np.ndarray, ordered: np.ndarray) -> tuple[float, float]:
    """(m, s) to start from; fills `ordered` [N] with the observations' logarithms, censored ones at their limit."""
    mean_x, mean_y = 0.0, 0.0
    for i in range(keys.size):
        ordered[i] = _log(keys[i] >> 1)
        mean_x += keys[i] >> 1
        mean_y += ordered[i]
    return start(family, ordered, mean_x / keys.size, mean_y / keys.size)


@njit(cache=True)
def describe(
    keys: np.ndarray,
    observations: Observations,
    family: int,
    nu: float,
    constants: np.ndarray,
    free_nu: bool,
    fixed_scale: bool,
    floor: float,
    fit: Maximum,
    out: np.ndarray,
) -> int:
    """Writes one maximum as a row [9] of `fit_groups` and returns its flags."""
    flags = 0
    size = keys.size
    if not fixed_scale and fit[1] <= floor:
        flags |= SIGMA_FLOOR
    if free_nu and (nu == 1.0 or math.isinf(nu)):
        flags |= NU_AT_BOUND
    censored = False
    for i in range(size):
        censored = censored or keys[i] & 1 == 1
    # At the floor the fit stands at a tied length, and what it misses it by is no extrapolation.
    if censored and not flags & SIGMA_FLOOR:
        longest = math.log(keys[size - 1] >> 1)
        below = cdf(family, nu, constants, longest, fit[0], math.exp(fit[1]))
        if below < 0.5 - 1e-12:
            flags |= MEDIAN_EXTRAPOLATED
    sum_y = 0.0
    for i in range(observations.num_points):
        sum_y += observations.table[Y, i] * observations.table[WEIGHT, i]
    out[0], out[1], out[2], out[3] = fit[0], fit[1], nu, fit[2] - sum_y
    out[4], out[5], out[6], out[7] = standard_errors(
        family, nu, observations, fit, floor, fixed_scale, free_nu
    )
    out[8] = fit[6]
    return flags


@njit(cache=True)
def fit_groups(
    keys: np.ndarray,
    weights: np.ndarray,
    offsets: np.ndarray,
    family: int,
    nu: float,
    constants: np.ndarray,
    free_nu: bool,
    fixed_scale: bool,
    integers: bool,
    floor: float,
    min_samples: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fits each group.

    Args:
        keys, weights: Flat [S], sorted within each group; no weights if all are 1.
        offsets: [G + 1].
        family: Code; `nu` and `free_nu` matter for LOG_T only.
        constants: `constants_of` family and nu.
        fixed_scale: Keep sigma at 1 (the exponential as a Weibull).
        integers: See `read_observations`.
        floor: Smallest ln sigma.
        min_samples: Fewer observations are not fitted.

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
        m, s = first_guess(family, rows, logs)
        observations = read_observations(rows, w, logs, integers, buffer)
        if fixed_scale:
            s = 0.0
        num_censored = 0
        for i in range(size):
            num_censored += rows[i] & 1
        if num_censored == size or size < min_samples:
            # All the data say is "at least the largest limit"; of too few, the middle one.
            flags[g] |= ALL_CENSORED if num_censored == size else 0
            flags[g] |= TOO_FEW_SAMPLES if size < min_samples else 0
            numbers[g, 0] = ordered[size - 1] if num_censored == size else ordered[size // 2]
            numbers[g, 1] = 0.0 if fixed_scale else floor
            numbers[g, 2] = nu
            continue
        if num_censored == 0 and rows[0] == rows[size - 1]:
            flags[g] |= CONSTANT
            m, s = ordered[0], (0.0 if fixed_scale else floor)
        tied, tied_fraction = 0.0, 0.0
        if weights.size or num_censored or not _few_ties(rows):
            tied, tied_fraction = tie(rows, w)
        fitted_nu = nu
        if free_nu:
            fitted_nu, fit = profile(family, observations, m, s, floor, fixed_scale, tied, tied_fraction)
        else:
            fit = climb(family, nu, constants, observations, m, s, floor, fixed_scale, tied, tied_fraction)
        own = np.array([t_log_constant(fitted_nu)]) if free_nu else constants
        flags[g] |= describe(
            rows, observations, family, fitted_nu, own, free_nu, fixed_scale, floor, fit, numbers[g]
        )
        converged[g] = fit[6] <= TARGET or flags[g] & CONSTANT != 0
    return numbers, flags, converged
