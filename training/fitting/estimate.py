"""Maximum-likelihood estimates for many groups, by the compiled solver or by scipy's L-BFGS-B.

| family | parameters | fitted | in TIE, table 1 |
|---|---|---|---|
| log-t | mu, sigma (log tokens), nu | mu, sigma, optionally nu | yes, with fixed and with free nu |
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
#: Smallest sigma of a fit. If a fraction above nu/(nu+1) of the lengths is equal, the likelihood has no maximum and
#: sigma -> 0 (Kent & Tyler 1991). A relative scale of 0.001 is below the resolution of lengths up to 1000 tokens.
SIGMA_FLOOR = 1e-3
_FLOOR = math.log(SIGMA_FLOOR)
#: Minimum number of samples of a fitted group.
MIN_SAMPLES = 3
# L-BFGS-B's line search stops when the likelihood no longer grows in double precision, at slopes of about 1e-7.
_LBFGSB_SLOPE = 1e-5
#: Start values of nu in [1, 100] for L-BFGS-B; infinity is the log-normal, whose nu is fixed.
_FIRST_NU = (1.0, 4.0, 20.0, math.inf)
_NU_STEP = 1e-4
# Objective outside the float range: larger than any mean negative log-likelihood.
_FAR = 1e30
_EMPTY = np.empty(0)
_MAX_INSERTION_SORT = 48
_NOT_FITTED = kernel.ALL_CENSORED | kernel.TOO_FEW_SAMPLES


class Solution(NamedTuple):
    """Maxima over the kernel parameters, arrays [G]; see `kernels` for the meaning of m and s in each family."""

    # m, s, nu: location, ln of the scale, degrees of freedom.
    m: FloatArray
    s: FloatArray
    nu: FloatArray
    log_likelihood: FloatArray  # of all samples, x in tokens
    # se_m, se_s, se_log_nu, cov_m_s: standard errors from the observed information, and the covariance of m and s; NaN
    # if the data do not determine them.
    se_m: FloatArray
    se_s: FloatArray
    se_log_nu: FloatArray
    cov_m_s: FloatArray
    slope: FloatArray  # largest remaining slope of the mean log-likelihood


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
    """A family of distributions, and its settings in the kernels."""

    label: str  # name in column names
    code: int  # family code of the kernels
    nu: float | None  # degrees of freedom; None: free; used by the log-t only
    fixed_scale: bool  # whether sigma is fixed to 1
    num_parameters: int  # number of free parameters, for AIC
    parameters: Callable[[Solution], tuple[Columns, Columns]]  # values and standard errors by name


_FAMILIES = {
    "log-normal": Family("log_normal", LOG_T, math.inf, False, 2, _location_scale),
    "gamma": Family("gamma", GAMMA, math.inf, False, 2, _gamma),
    "weibull": Family("weibull", WEIBULL, math.inf, False, 2, _weibull),
    "exponential": Family("exponential", WEIBULL, math.inf, True, 1, _exponential),
}


def family_of(name: str, nu: float | None = 3.5) -> Family:
    """The family of this name; `nu` (None = free; else above 0) is used by the log-t only."""
    if name == "log-t":
        if nu is None:
            return Family("log_t_free", LOG_T, None, False, 3, _location_scale)
        if not nu > 0:
            raise InputError("nu", nu, "a number above 0 (inf = log-normal), or free")
        return Family("log_t", LOG_T, float(nu), False, 2, _location_scale)
    return _FAMILIES[name]


def compared_families(nu: float | None) -> dict[str, Family]:
    """Label -> family of TIE's table 1: log-t with fixed nu (default: the paper's), log-t with free nu, and the others."""
    families = [family_of("log-t", 3.5 if nu is None else nu), family_of("log-t", None), *_FAMILIES.values()]
    return {family.label: family for family in families}


@dataclass(frozen=True, slots=True)
class SortedLengths:
    """Observations of G groups in the kernels' format: sorted keys and weights (empty = all 1), and offsets [G + 1]."""

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
        return cls(keys, _EMPTY, ends)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def group(self, number: int) -> SortedLengths:
        """A single group."""
        rows = slice(self.offsets[number], self.offsets[number + 1])
        weights = self.weights[rows] if self.weights.size else self.weights
        return SortedLengths(self.keys[rows], weights, np.array([0, rows.stop - rows.start]))


@dataclass(frozen=True, slots=True)
class Estimates:
    """Estimates of G groups."""

    # family, solution: fitted family, and its kernel parameters with standard errors.
    family: Family
    solution: Solution
    flags: NDArray[np.int64]  # bits of `kernels.groups`, [G]
    # No slope of the mean log-likelihood exceeds 1e-8 (lbfgsb: 1e-5), or all samples are equal; [G].
    converged: NDArray[np.bool_]

    @property
    def log_likelihood(self) -> FloatArray:
        """Log-likelihood of all samples, x in tokens [G]; NaN if not fitted."""
        return self.solution.log_likelihood

    @property
    def fitted(self) -> NDArray[np.bool_]:
        """Whether each group was fitted: enough samples, not all of them censored [G]."""
        return np.asarray((self.flags & _NOT_FITTED) == 0)

    def distances(self, sample: SortedLengths) -> tuple[FloatArray, FloatArray]:
        """Kolmogorov-Smirnov and Anderson-Darling statistics [G] of the sample; NaN if not fitted."""
        at, free = self.solution, self.family.nu is None
        model = _model(self.family)
        both = kernel.group_distances(
            sample.keys, sample.weights, sample.offsets, model, free, at.m, at.s, at.nu, self.fitted
        )
        return both[:, 0], both[:, 1]


def _model(family: Family, nu: float | None = None) -> Model:
    """Kernel model of a family; `nu` is its value if it is free."""
    if nu is not None and family.nu is None:
        return log_t_model(nu, _FLOOR)
    nu = math.inf if family.nu is None else family.nu
    return Model(family.code, nu, _constants(family.code, nu), family.fixed_scale, _FLOOR)


_constants = lru_cache(maxsize=256)(constants_of)


def estimate(
    sample: SortedLengths, family: Family, *, solver: Solver = "batched", integers: bool = False
) -> Estimates:
    """Fits every group independently.

    Args:
        sample, family: Observations by group, and the family to fit.
        solver: batched = compiled Newton for all groups, with lbfgsb as fallback for groups that do not converge;
            lbfgsb = scipy's L-BFGS-B, group by group (as in the TIE paper).
        integers: Whether a finished length x contributes P(x - 1/2 < X < x + 1/2) instead of the density at x.
    """
    numbers, flags, converged = kernel.fit_groups(
        sample.keys, sample.weights, sample.offsets, _model(family), family.nu is None, integers, MIN_SAMPLES
    )
    usable = (flags & (_NOT_FITTED | kernel.CONSTANT)) == 0
    again = np.flatnonzero(usable if solver == "lbfgsb" else usable & ~converged)
    if len(again):
        # With several BLAS threads the optimizer's two-element arrays are forty times slower.
        with threadpool_limits(limits=1, user_api="blas"):
            for number in again:
                flags[number], converged[number] = _by_lbfgsb(
                    sample.group(int(number)), family, integers, numbers[number]
                )
    return Estimates(family, Solution(*numbers.T), flags, converged)


def _by_lbfgsb(group: SortedLengths, family: Family, integers: bool, numbers: FloatArray) -> tuple[int, bool]:
    """Fits one group over (m, s), and ln nu if it is free, with scipy. Writes its row of `numbers`; returns its flags and
    whether it converged."""
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
    """Minimizes by L-BFGS-B from `start` and, if it is free, from nu; returns (m, s, nu, mean negative log-likelihood).

    m is scaled by the initial sigma; the derivative by ln nu is a central difference.
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
