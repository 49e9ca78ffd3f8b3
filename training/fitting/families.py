"""The families of length distributions that can be fitted, and how their parameters follow from a kernel's (m, s).

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
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from scheduler_core.errors import InputError
from training.fitting.kernels import GAMMA, LOG_T, WEIBULL

FloatArray = NDArray[np.float64]
#: Smallest sigma of a fit. Where a share above nu/(nu+1) of the lengths is equal the likelihood has no maximum (Kent &
#: Tyler 1991), sigma -> 0; a thousandth of the length is finer than one token in a thousand.
SIGMA_FLOOR = 1e-3
#: Fewer answers are not fitted.
MIN_SAMPLES = 3
FamilyName = Literal["log-t", "log-normal", "gamma", "weibull", "exponential"]


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
    spread = np.sqrt(at.se_m**2 + 4.0 * at.se_s**2 + 4.0 * at.cov_m_s)
    return {"shape": shape, "scale": scale}, {"shape": 2.0 * shape * at.se_s, "scale": scale * spread}


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
