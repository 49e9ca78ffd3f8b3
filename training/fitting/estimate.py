"""Maximum-likelihood estimates of many groups at once, by the compiled solver or by scipy's L-BFGS-B.

| family | parameters | free | TIE, table 1 |
|---|---|---|---|
| log-t | mu, sigma (log tokens), nu | mu, sigma, and nu if it is free | yes, both ways |
| log-normal | mu, sigma (log tokens), nu = inf | mu, sigma | yes |
| gamma | shape, scale (tokens) | both | yes |
| weibull | shape, scale (tokens) | both | yes |
| exponential | scale (tokens) | scale | yes |
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import optimize
from threadpoolctl import threadpool_limits

from scheduler_core.errors import InputError
from training.fitting.kernels import GAMMA, LOG_T, WEIBULL
from training.fitting.kernels import groups as kernel
from training.fitting.kernels.likelihood import Model, Observations, constants_of, evaluate
from training.fitting.kernels.solve import log_t_model

FloatArray = NDArray[np.float64]
FamilyName = Literal["log-t", "log-normal", "gamma", "weibull", "exponential"]
Solver = Literal["batched", "lbfgsb"]
#: Smallest sigma of a fit. Where a fraction above nu/(nu+1) of the lengths is equal the likelihood has no maximum (Kent &
#: Tyler 1991), sigma -> 0; a thousandth of the length is finer than one token in a thousand.
SIGMA_FLOOR = 1e-3
_FLOOR = math.log(SIGMA_FLOOR)
#: Groups of fewer samples are not fitted.
MIN_SAMPLES = 3
# L-BFGS-B's line search ends where the likelihood, of sixteen digits, no longer grows: at slopes of about 1e-7.
_LBFGSB_SLOPE = 1e-5
#: Where L-BFGS-B starts over ln nu in [1, 100]; at infinity, the log-normal, nu stays.
_FIRST_NU = (1.0, 4.0, 20.0, math.inf)
_NU_STEP = 1e-4
# Worse than any mean log-likelihood: the objective beyond the float range.
_FAR = 1e30
_NOTHING = np.empty(0)
_MAX_INSERTION_SORT = 48
_NOT_FITTED = kernel.ALL_CENSORED | kernel.TOO_FEW_SAMPLES


class Solution(NamedTuple):
    """Maxima over a kernel's parameters, arrays [G]; see `kernels` for what m and s mean in each family."""

    # m, s, nu: location, ln of the scale, degrees of freedom.
    m: FloatArray
    s: FloatArray
    nu: FloatArray
    log_likelihood: FloatArray  # of all samples, x in tokens
    # se_m, se_s, se_log_nu, cov_m_s: standard errors by the observed information, and the covariance of m and s; NaN
    # where the data do not determine them.
    se_m: FloatArray
    se_s: FloatArray
    se_log_nu: FloatArray
    cov_m_s: FloatArray
    slope: FloatArray  # the largest that is left


Columns = dict[str, FloatArray]


def _location_scale(at: Solution) -> tuple[Columns, Columns]:
    sigma = np.where(at.s <= _FLOOR, SIGMA_FLOOR, np.exp(at.s))
    values = {"mu": at.m, "sigma": sigma, "nu": at.nu}
    return values, {"mu": at.se_m, "sigma": sigma * at.se_s, "nu": at.nu * at.se_log_nu}


def _gamma(at: Solution) -> tuple[Columns, Columns]:
    shape = np.exp(-2.0 * at.s)
    scale = np.exp(at.m + 2.0 * at.s)
    relative_error = np.sqrt(at.se_m**2 + 4.0 * at.se_s**2 + 4.0 * at.cov_m_s)
    return {"shape": shape, "scale": scale}, {"shape": 2.0 * shape * at.se_s, "scale": scale * relative_error}


def _weibull(at: Solution) -> tuple[Columns, Columns]:
    shape, scale = np.exp(-at.s), np.exp(at.m)
    return {"shape": shape, "scale": scale}, {"shape": shape * at.se_s, "scale": scale * at.se_m}


def _exponential(at: Solution) -> tuple[Columns, Columns]:
    scale = np.exp(at.m)
    return {"scale": scale}, {"scale": scale * at.se_m}


@dataclass(frozen=True, slots=True)
class Family:
    """How the kernels fit one family."""

    label: str  # name as part of a column
    code: int  # what the kernels branch on
    nu: float | None  # degrees of freedom; None if they are free, unused outside the log-t
    fixed_scale: bool  # whether sigma stays 1
    num_parameters: int  # free ones, for AIC
    parameters: Callable[[Solution], tuple[Columns, Columns]]  # values and standard errors by name


_FAMILIES = {
    "log-normal": Family("log_normal", LOG_T, math.inf, False, 2, _location_scale),
    "gamma": Family("gamma", GAMMA, math.inf, False, 2, _gamma),
    "weibull": Family("weibull", WEIBULL, math.inf, False, 2, _weibull),
    "exponential": Family("exponential", WEIBULL, math.inf, True, 1, _exponential),
}


def family_of(name: str, nu: float | None = 3.5) -> Family:
    """The family of this name; `nu` (None = free; else above 0) matters for the log-t only."""
    if name == "log-t":
        if nu is None:
            return Family("log_t_free", LOG_T, None, False, 3, _location_scale)
        if not nu > 0:
            raise InputError("nu", nu, "a number above 0 (inf = log-normal), or free")
        return Family("log_t", LOG_T, float(nu), False, 2, _location_scale)
    return _FAMILIES[name]


def compared_families(nu: float | None) -> dict[str, Family]:
    """Label -> family of TIE's table 1: log-t with the given (or the paper's) nu, log-t with free nu, and the others."""
    families = [family_of("log-t", 3.5 if nu is None else nu), family_of("log-t", None), *_FAMILIES.values()]
    return {family.label: family for family in families}


@dataclass(frozen=True, slots=True)
class SortedLengths:
    """Observations of G groups as the kernels take them: sorted keys and weights (empty = all 1), and offsets [G + 1]."""

    keys: NDArray[np.int64]
    weights: FloatArray
    offsets: NDArray[np.int64]

    @classmethod
    def of(
        cls,
        lengths: NDArray[np.integer],
        finished: NDArray[np.bool_],
        offsets: NDArray[np.integer],
        weights: FloatArray | None = None,
    ) -> SortedLengths:
        """Sorts flat lengths [S], at least 1, within each group."""
        flat = np.ascontiguousarray(lengths, dtype=np.int64)
        ends = np.ascontiguousarray(offsets, dtype=np.int64)
        keys = 2 * flat + ~finished
        if weights is not None:
            order = np.lexsort((keys, np.repeat(np.arange(len(ends) - 1), np.diff(ends))))
            return cls(keys[order], np.ascontiguousarray(weights, dtype=np.float64)[order], ends)
        kernel.sort_small_groups(keys, ends, _MAX_INSERTION_SORT)
        for group in np.flatnonzero(np.diff(ends) > _MAX_INSERTION_SORT):
            keys[ends[group] : ends[group + 1]].sort()
        return cls(keys, _NOTHING, ends)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def group(self, number: int) -> SortedLengths:
        """One group as a sample of its own."""
        rows = slice(self.offsets[number], self.offsets[number + 1])
        weights = self.weights[rows] if self.weights.size else self.weights
        return SortedLengths(self.keys[rows], weights, np.array([0, rows.stop - rows.start]))


@dataclass(frozen=True, slots=True)
class Estimates:
    """Estimates of G groups."""

    # family, solution: what was fitted, and parameters and standard errors as the kernels name them.
    family: Family
    solution: Solution
    flags: NDArray[np.int64]  # bits of `kernels.groups`, [G]
    # No slope of the mean log-likelihood above 1e-8 (by lbfgsb 1e-5), or all samples are equal; [G].
    converged: NDArray[np.bool_]

    @property
    def log_likelihood(self) -> FloatArray:
        """Of all samples, x in tokens [G]; NaN where not fitted."""
        return self.solution.log_likelihood

    @property
    def fitted(self) -> NDArray[np.bool_]:
        """Groups with a likelihood to maximize: neither all samples censored nor too few of them, [G]."""
        return np.asarray((self.flags & _NOT_FITTED) == 0)

    def distances(self, sample: SortedLengths) -> tuple[FloatArray, FloatArray]:
        """Kolmogorov-Smirnov and Anderson-Darling statistics [G] of the sample; NaN where not fitted."""
        at, free = self.solution, self.family.nu is None
        model = _model(self.family)
        both = kernel.group_distances(
            sample.keys, sample.weights, sample.offsets, model, free, at.m, at.s, at.nu, self.fitted
        )
        return both[:, 0], both[:, 1]


def _model(family: Family, nu: float | None = None) -> Model:
    """The family as the kernels take it; `nu` where it is free."""
    if nu is not None and family.nu is None:
        return log_t_model(nu, _FLOOR)
    nu = math.inf if family.nu is None else family.nu
    return Model(family.code, nu, _constants(family.code, nu), family.fixed_scale, _FLOOR)


_constants = lru_cache(maxsize=256)(constants_of)


def estimate(
    sample: SortedLengths, family: Family, *, solver: Solver = "batched", integers: bool = False
) -> Estimates:
    """Fits every group by itself.

    Args:
        sample, family: Observations by group, and what to fit.
        solver: batched = compiled Newton for all groups; lbfgsb = scipy's L-BFGS-B, group by group (the paper's).
            Groups that the first does not bring to its target are handed to the second.
        integers: Whether a finished length x stands for [x - 1/2, x + 1/2] instead of the density at x.
    """
    numbers, flags, converged = kernel.fit_groups(
        sample.keys, sample.weights, sample.offsets, _model(family), family.nu is None, integers, MIN_SAMPLES
    )
    usable = (flags & (_NOT_FITTED | kernel.CONSTANT)) == 0
    again = np.flatnonzero(usable if solver == "lbfgsb" else usable & ~converged)
    if len(again):
        # The optimizer's arrays of two numbers are forty times slower with more threads.
        with threadpool_limits(limits=1, user_api="blas"):
            for number in again:
                flags[number], converged[number] = _by_lbfgsb(
                    sample.group(int(number)), family, integers, numbers[number]
                )
    return Estimates(family, Solution(*numbers.T), flags, converged)


def _by_lbfgsb(group: SortedLengths, family: Family, integers: bool, numbers: FloatArray) -> tuple[int, bool]:
    """Fits one group over (m, s), and ln nu where it is free, by scipy; writes its row of `numbers`; returns flags and
    convergence."""
    logs = np.empty(len(group.keys))
    first_m, first_s = kernel.first_guess(family.code, group.keys, logs)
    first_s = 0.0 if family.fixed_scale else max(first_s, _FLOOR)
    observations = kernel.read_observations(
        group.keys, group.weights, logs, integers, np.empty((5, len(logs)))
    )
    optima = []
    for nu in _FIRST_NU if family.nu is None else (family.nu,):
        is_free = family.nu is None and math.isfinite(nu)
        starts = [(first_m, first_s)]
        fraction = observations.tied_fraction
        if family.code == LOG_T and fraction >= (1.0 if is_free else nu) * (1.0 - fraction):
            starts.append((observations.tied, _FLOOR))
        fits = [_minimize(family, nu, observations, at) for at in starts]
        if is_free:
            fits += [_minimize(family, nu, observations, fit[:2], is_free=True) for fit in fits]
        optima += fits
    m, s, nu, _ = min(optima, key=lambda optimum: optimum[3])
    model = _model(family, nu)
    value, by_m, by_s, mm, ms, ss = evaluate(model, observations, m, s)
    bound = family.fixed_scale or (s <= _FLOOR and by_s < 0.0)
    slope = (abs(by_m) if bound else max(abs(by_m), abs(by_s))) / observations.total_weight
    fit = (m, s, value, mm, ms, ss, slope)
    flags = kernel.describe(group.keys, model, observations, family.nu is None, fit, numbers)
    return int(flags), bool(slope <= _LBFGSB_SLOPE)


def _minimize(
    family: Family,
    nu: float,
    observations: Observations,
    start: tuple[float, float],
    *,
    is_free: bool = False,
) -> tuple[float, float, float, float]:
    """(m, s, nu, mean negative log-likelihood) by L-BFGS-B from `start` and, if it is free, from nu.

    m is counted in units of the first sigma; the slope over ln nu is a central difference.
    """
    unit, weight = math.exp(start[1]), observations.total_weight

    def derivatives(theta: FloatArray, by_log_nu: float = 0.0) -> tuple[float, float, float]:
        model = _model(family, math.exp(theta[2] + by_log_nu) if is_free else nu)
        return evaluate(model, observations, start[0] + unit * theta[0], theta[1])[:3]

    def objective(theta: FloatArray) -> tuple[float, FloatArray]:
        value, by_m, by_s = derivatives(theta)
        if not math.isfinite(value):
            return _FAR, np.zeros(len(theta))
        slope = [by_m * unit / math.exp(theta[1]), by_s]
        if is_free:
            slope.append(
                (derivatives(theta, _NU_STEP)[0] - derivatives(theta, -_NU_STEP)[0]) / (2 * _NU_STEP)
            )
        return -value / weight, -np.array(slope) / weight

    bounds = [(None, None), (0.0, 0.0) if family.fixed_scale else (_FLOOR, 12.0), (0.0, math.log(100.0))]
    result = optimize.minimize(
        objective,
        np.array([0.0, start[1], math.log(nu)] if is_free else [0.0, start[1]]),
        method="L-BFGS-B",
        jac=True,
        bounds=bounds if is_free else bounds[:2],
        options={"maxiter": 500, "ftol": 1e-16, "gtol": 1e-9},
    )
    best_nu = math.exp(result.x[2]) if is_free else nu
    return start[0] + unit * float(result.x[0]), float(result.x[1]), best_nu, float(result.fun)
