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
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

from scheduler_core.errors import InputError
from training.fitting.kernels import GAMMA, LOG_T, WEIBULL
from training.fitting.kernels import groups as kernel
from training.fitting.kernels.distances import group_distances
from training.fitting.kernels.likelihood import Observations, constants_of, evaluate

FloatArray = NDArray[np.float64]
FamilyName = Literal["log-t", "log-normal", "gamma", "weibull", "exponential"]
Solver = Literal["batched", "lbfgsb"]
#: Smallest sigma of a fit. Where a fraction above nu/(nu+1) of the lengths is equal the likelihood has no maximum (Kent &
#: Tyler 1991), sigma -> 0; a thousandth of the length is finer than one token in a thousand.
SIGMA_FLOOR = 1e-3
#: Groups of fewer samples are not fitted.
MIN_SAMPLES = 3
# L-BFGS-B's line search ends where the likelihood, of sixteen digits, no longer grows: at slopes of about 1e-7.
_LBFGSB_SLOPE = 1e-5
# Worse than any mean log-likelihood: the objective beyond the float range.
_FAR = 1e30
_NOTHING = np.empty(0)
_MAX_INSERTION_SORT = 48
_NOT_FITTED = kernel.ALL_CENSORED | kernel.TOO_FEW_SAMPLES


@dataclass(frozen=True, slots=True)
class Solution:
    """Maxima over a kernel's parameters, arrays [G]; see `kernels` for what m and s mean in each family.

    Attributes:
        m, s, nu: Location, ln of the scale, degrees of freedom.
        se_m, se_s, se_log_nu, cov_m_s: Standard errors by the observed information, and the covariance of m and s;
            NaN where the data do not determine them.
    """

    m: FloatArray
    s: FloatArray
    nu: FloatArray
    se_m: FloatArray
    se_s: FloatArray
    se_log_nu: FloatArray
    cov_m_s: FloatArray


Columns = dict[str, FloatArray]


def _location_scale(at: Solution) -> tuple[Columns, Columns]:
    sigma = np.where(at.s <= math.log(SIGMA_FLOOR), SIGMA_FLOOR, np.exp(at.s))
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
    """How the kernels fit one family.

    Attributes:
        label: Name as part of a column.
        code: What the kernels branch on.
        nu: Degrees of freedom; None if they are free, unused outside the log-t.
        fixed_scale: Whether sigma stays 1.
        num_parameters: Free parameters, for AIC.
        parameters: Values and standard errors by name.
    """

    label: str
    code: int
    nu: float | None
    fixed_scale: bool
    num_parameters: int
    parameters: Callable[[Solution], tuple[Columns, Columns]]


_FAMILIES = {
    "log-normal": Family("log_normal", LOG_T, math.inf, False, 2, _location_scale),
    "gamma": Family("gamma", GAMMA, math.inf, False, 2, _gamma),
    "weibull": Family("weibull", WEIBULL, math.inf, False, 2, _weibull),
    "exponential": Family("exponential", WEIBULL, math.inf, True, 1, _exponential),
}


def family_of(name: str, nu: float | None = 3.5) -> Family:
    """The family of this name; `nu` (None = free) matters for the log-t only.

    Raises:
        InputError: No such family, or nu is not above 0.
    """
    if name == "log-t":
        if nu is None:
            return Family("log_t_free", LOG_T, None, False, 3, _location_scale)
        if not nu > 0:
            raise InputError("nu", nu, "a number above 0 (inf = log-normal), or free")
        return Family("log_t", LOG_T, float(nu), False, 2, _location_scale)
    if name not in _FAMILIES:
        raise InputError("family", name, " | ".join(get_args(FamilyName)))
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
        """Sorts flat lengths [S] within each group.

        Raises:
            InputError: A length below 1, a weight not above 0, or shapes that do not fit each other.
        """
        flat = np.ascontiguousarray(lengths, dtype=np.int64)
        ends = np.ascontiguousarray(offsets, dtype=np.int64)
        if flat.ndim != 1 or flat.shape != finished.shape or ends[0] != 0 or ends[-1] != len(flat):
            raise InputError("lengths", flat.shape, "one dimension, as many as finished has, as offsets say")
        if len(flat) and flat.min() < 1:
            raise InputError("lengths", int(flat.min()), "integers of at least 1, in tokens")
        if (np.diff(ends) < 0).any():
            raise InputError("offsets", ends.tolist()[:10], "non-decreasing integers")
        if weights is not None and not (np.isfinite(weights) & (weights > 0)).all():
            bad = weights[~(np.isfinite(weights) & (weights > 0))][0]
            raise InputError("weights", float(bad), "finite numbers above 0")
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
    """Estimates of G groups.

    Attributes:
        family: What was fitted.
        solution: Parameters and standard errors as the kernels name them.
        log_likelihood: Of all samples, x in tokens.
        flags: Bits of `kernels.groups`, [G].
        converged: No slope of the mean log-likelihood above 1e-8 (by lbfgsb 1e-5), or all samples are equal; [G].
    """

    family: Family
    solution: Solution
    log_likelihood: FloatArray
    flags: NDArray[np.int64]
    converged: NDArray[np.bool_]

    @property
    def fitted(self) -> NDArray[np.bool_]:
        """Groups with a likelihood to maximize: neither all samples censored nor too few of them, [G]."""
        return np.asarray((self.flags & _NOT_FITTED) == 0)

    def distances(self, sample: SortedLengths) -> tuple[FloatArray, FloatArray]:
        """Kolmogorov-Smirnov and Anderson-Darling statistics [G] of the sample; NaN where not fitted."""
        at = self.solution
        code, nu = self.family.code, self.family.nu
        both = group_distances(
            sample.keys,
            sample.weights,
            sample.offsets,
            code,
            at.nu,
            _NOTHING if nu is None else _constants(code, nu),
            at.m,
            at.s,
            self.fitted,
        )
        return both[:, 0], both[:, 1]


@lru_cache(maxsize=256)
def _constants(family: int, nu: float) -> FloatArray:
    return constants_of(family, nu)


def estimate(
    sample: SortedLengths, family: Family, *, solver: Solver = "batched", integers: bool = False
) -> Estimates:
    """Fits every group by itself.

    Args:
        sample: Observations by group.
        family: What to fit.
        solver: batched = compiled Newton for all groups; lbfgsb = scipy's L-BFGS-B, group by group (the paper's).
            Groups that the first does not bring to its target are handed to the second.
        integers: Whether a finished length x stands for [x - 1/2, x + 1/2] instead of the density at x.

    Raises:
        InputError: lbfgsb with free nu, which only the batched solver profiles.
    """
    numbers, flags, converged = kernel.fit_groups(
        sample.keys,
        sample.weights,
        sample.offsets,
        family.code,
        math.inf if family.nu is None else family.nu,
        _constants(family.code, math.inf if family.nu is None else family.nu),
        family.nu is None,
        family.fixed_scale,
        integers,
        math.log(SIGMA_FLOOR),
        MIN_SAMPLES,
    )
    usable = (flags & (_NOT_FITTED | kernel.CONSTANT)) == 0
    if solver == "lbfgsb":
        if family.nu is None:
            raise InputError("solver", solver, "batched, where nu is free")
        again = np.flatnonzero(usable)
    else:
        again = np.flatnonzero(usable & ~converged)
    if len(again):
        with one_blas_thread():
            for number in again:
                flags[number], converged[number] = _by_lbfgsb(
                    sample.group(int(number)), family, integers, numbers[number]
                )
    solution = Solution(
        m=numbers[:, 0],
        s=numbers[:, 1],
        nu=numbers[:, 2],
        se_m=numbers[:, 4],
        se_s=numbers[:, 5],
        se_log_nu=numbers[:, 6],
        cov_m_s=numbers[:, 7],
    )
    return Estimates(family, solution, numbers[:, 3], flags, converged)


def _by_lbfgsb(group: SortedLengths, family: Family, integers: bool, numbers: FloatArray) -> tuple[int, bool]:
    """Fits one group over (m, s) by scipy and writes its row of `numbers`; returns flags and convergence.

    Free degrees of freedom stay where `numbers` has them.
    """
    nu = float(numbers[2])
    floor = math.log(SIGMA_FLOOR)
    logs = np.empty(len(group.keys))
    first = kernel.first_guess(family.code, group.keys, logs)
    observations = kernel.read_observations(
        group.keys, group.weights, logs, integers, np.empty((5, len(logs)))
    )
    constants = _constants(family.code, nu)
    tied, tied_fraction = kernel.tie(group.keys, group.weights)
    starts = [(first[0], 0.0 if family.fixed_scale else max(first[1], floor))]
    if family.code == LOG_T and tied_fraction >= nu * (1.0 - tied_fraction):
        starts.append((tied, floor))

    results = [_minimize(family, nu, observations, at, floor) for at in starts]
    m, s = min(results, key=lambda result: result[2])[:2]
    value, by_m, by_s, mm, ms, ss = evaluate(family.code, nu, constants, observations, m, s)
    bound = family.fixed_scale or (s <= floor and by_s < 0.0)
    slope = (abs(by_m) if bound else max(abs(by_m), abs(by_s))) / observations.total_weight
    flags = kernel.describe(
        group.keys,
        observations,
        family.code,
        nu,
        constants,
        family.nu is None,
        family.fixed_scale,
        floor,
        (m, s, value, mm, ms, ss, slope),
        numbers,
    )
    return int(flags), bool(slope <= _LBFGSB_SLOPE)


def _minimize(
    family: Family, nu: float, observations: Observations, start: tuple[float, float], floor: float
) -> tuple[float, float, float]:
    """(m, s, mean negative log-likelihood) by L-BFGS-B from `start`, m in units of the first sigma."""
    unit = math.exp(start[1])
    constants = _constants(family.code, nu)

    def objective(theta: FloatArray) -> tuple[float, FloatArray]:
        value, by_m, by_s, *_ = evaluate(
            family.code, nu, constants, observations, start[0] + unit * theta[0], theta[1]
        )
        if not math.isfinite(value):
            return _FAR, np.zeros(2)
        slope = np.array([by_m * unit / math.exp(theta[1]), by_s])
        return -value / observations.total_weight, -slope / observations.total_weight

    result = optimize.minimize(
        objective,
        np.array([0.0, start[1]]),
        method="L-BFGS-B",
        jac=True,
        bounds=[(None, None), (0.0, 0.0) if family.fixed_scale else (floor, 12.0)],
        options={"maxiter": 500, "ftol": 1e-16, "gtol": 1e-9},
    )
    return start[0] + unit * float(result.x[0]), float(result.x[1]), float(result.fun)


def one_blas_thread() -> AbstractContextManager[object]:
    """A context in which BLAS uses one thread: the optimizer's arrays of two numbers are forty times slower with more."""
    import scipy.optimize  # noqa: F401  (its BLAS can only be limited once it is loaded)
    from threadpoolctl import threadpool_limits

    limits: AbstractContextManager[object] = threadpool_limits(limits=1, user_api="blas")
    return limits
