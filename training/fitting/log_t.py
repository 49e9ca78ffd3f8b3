"""Maximum-likelihood fit of the log-t length distribution to the answers of one prompt.

Source: TIE, section on the length distribution: X = exp(mu + sigma T), T ~ Student-t(nu), fitted by L-BFGS-B over
(mu, ln sigma) for fixed nu. Differs from the paper: answers cut at a cap are right-censored and contribute
ln(1 - F(cap)); the degenerate cases below are defined.

| case | result |
|---|---|
| all lengths equal, none cut | mu = ln length, sigma = the floor; flags "constant", "sigma_floor"; converged |
| sigma at the floor otherwise | best mu at the floor; flag "sigma_floor" |
| all answers cut | mu = ln of the largest cap, sigma = the floor: "at least the cap", which is all the data say, since the likelihood grows without end in mu; flag "all_censored"; not converged |
| median of the fit beyond the largest cap | the fit, which extrapolates; flag "median_beyond_cap" |
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

from scheduler_core.errors import InputError

# Smallest sigma of a fit, log tokens. Where a share above nu/(nu+1) of the lengths is equal the likelihood has no
# maximum (Kent & Tyler 1991), sigma -> 0; a thousandth of the length is finer than one token in a thousand.
SIGMA_FLOOR = 1e-3
MIN_SAMPLES = 3
# Largest slope of the mean log-likelihood, per unit of mu / sigma and of ln sigma, that counts as a maximum.
GRADIENT_TOLERANCE = 1e-4

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LogTFit:
    """Result of one fit.

    Attributes:
        mu: Location of ln X, log tokens.
        sigma: Scale of ln X, log tokens, at least the floor.
        nu: Degrees of freedom (given).
        log_likelihood: Sum over the samples of ln f(x) (finished) or ln(1 - F(x)) (cut), x in tokens.
        converged: The optimiser ended at a maximum, or the case has a defined result with all its data seen.
        flags: Of "constant", "sigma_floor", "all_censored", "median_beyond_cap".
    """

    mu: float
    sigma: float
    nu: float
    log_likelihood: float
    converged: bool
    flags: tuple[str, ...]


def fit_log_t(
    lengths: NDArray[np.number],
    finished: NDArray[np.bool_],
    nu: float = 3.5,
    sigma_floor: float = SIGMA_FLOOR,
) -> LogTFit:
    """Fits mu and sigma to one prompt's answers.

    Args:
        lengths: Answer lengths in tokens [N], N >= 3, finite and above 0; for a cut answer the length it was cut at.
        finished: Whether each answer ended by itself [N]; False means right-censored.
        nu: Degrees of freedom, above 0.
        sigma_floor: Smallest sigma, log tokens.

    Raises:
        InputError: Fewer than 3 lengths, one that is not a finite number above 0, or nu not above 0.
    """
    x = np.asarray(lengths, dtype=np.float64)
    is_finished = np.asarray(finished, dtype=bool)
    _check(x, is_finished, nu)
    y, cut = np.log(x[is_finished]), np.log(x[~is_finished])
    if len(y) == 0:
        top = float(cut.max())
        value, _ = _objective(np.array([top, math.log(sigma_floor)]), y, cut, nu)
        return LogTFit(top, sigma_floor, nu, -value, False, ("all_censored",))
    if len(cut) == 0 and np.all(y == y[0]):
        mu = float(y[0])
        value, _ = _objective(np.array([mu, math.log(sigma_floor)]), y, cut, nu)
        return LogTFit(mu, sigma_floor, nu, -value, True, ("constant", "sigma_floor"))
    return _maximize(y, cut, nu, sigma_floor)


def _check(x: FloatArray, finished: NDArray[np.bool_], nu: float) -> None:
    if x.ndim != 1 or x.shape != finished.shape:
        raise InputError("lengths", x.shape, f"one dimension, as many as finished has ({finished.shape})")
    if len(x) < MIN_SAMPLES:
        raise InputError("lengths", len(x), f"at least {MIN_SAMPLES} samples")
    bad = ~(np.isfinite(x) & (x > 0))
    if bad.any():
        raise InputError("lengths", float(x[bad][0]), "finite numbers above 0")
    if not 0 < nu < math.inf:
        raise InputError("nu", nu, "a finite number above 0")


def _maximize(y: FloatArray, cut: FloatArray, nu: float, sigma_floor: float) -> LogTFit:
    low = math.log(sigma_floor)
    results = [
        optimize.minimize(
            _objective,
            np.array([mu, max(log_sigma, low)]),
            args=(y, cut, nu),
            method="L-BFGS-B",
            jac=True,
            bounds=[(None, None), (low, None)],
            options={"maxiter": 500, "ftol": 1e-13, "gtol": 1e-7},
        )
        for mu, log_sigma in _starts(y, cut, nu, low)
    ]
    best = min(results, key=lambda result: float(result.fun))
    mu, log_sigma = float(best.x[0]), float(best.x[1])
    sigma = math.exp(log_sigma)
    flags = []
    if log_sigma <= low + 1e-9:
        sigma = sigma_floor
        flags.append("sigma_floor")
    if len(cut) and mu > cut.max():
        flags.append("median_beyond_cap")
    slope = np.asarray(best.jac, dtype=np.float64).copy()
    if "sigma_floor" in flags and slope[1] > 0:
        slope[1] = 0.0  # pushed against the bound
    # A line search that cannot improve any further reports failure although it stands at the maximum.
    converged = bool(best.success) or bool(np.abs(slope).max() < GRADIENT_TOLERANCE * len(y))
    return LogTFit(mu, sigma, nu, -float(best.fun), converged, tuple(flags))


def _starts(y: FloatArray, cut: FloatArray, nu: float, low: float) -> list[tuple[float, float]]:
    """Median and spread of all samples; and, where the likelihood has its second maximum there, the tied value."""
    everything = np.concatenate([y, cut])
    quartiles = np.quantile(everything, [0.25, 0.5, 0.75])
    # The interquartile range of t(3.5) is 1.5 sigma; ties may make it 0 although the lengths vary.
    spread = (quartiles[2] - quartiles[0]) / 1.5 or float(everything.std())
    starts = [(float(quartiles[1]), math.log(max(spread, 1e-2)))]
    values, counts = np.unique(y, return_counts=True)
    tied = int(counts.argmax())
    # Near sigma = 0 at a value with m ties, ln L ~ -(m - nu * others) ln sigma; cut answers below it do not count.
    others = len(y) - int(counts[tied]) + int((cut > values[tied]).sum())
    if counts[tied] >= nu * others:
        starts.append((float(values[tied]), low))
    return starts


def _objective(theta: FloatArray, y: FloatArray, cut: FloatArray, nu: float) -> tuple[float, FloatArray]:
    """Negative log-likelihood and its gradient over (mu, ln sigma).

    Finished: ln t_nu(z) - ln sigma - y; cut: ln S(z), S(z) = P(T > z); z = (y - mu) / sigma.
    """
    mu, log_sigma = theta
    sigma = math.exp(log_sigma)
    z = (y - mu) / sigma
    square = z * z
    value = (
        len(y) * (_log_constant(nu) - log_sigma)
        - 0.5 * (nu + 1) * float(np.log1p(square / nu).sum())
        - float(y.sum())
    )
    # d ln t_nu(z) / dz = -slope
    slope = (nu + 1) * z / (nu + square)
    by_mu = float(slope.sum()) / sigma
    by_log_sigma = float((slope * z).sum()) - len(y)
    if len(cut):
        z = (cut - mu) / sigma
        survival = special.stdtr(nu, -z)
        hazard = np.exp(_log_constant(nu) - 0.5 * (nu + 1) * np.log1p(z * z / nu)) / survival
        value += float(np.log(survival).sum())
        by_mu += float(hazard.sum()) / sigma
        by_log_sigma += float((hazard * z).sum())
    return -value, np.array([-by_mu, -by_log_sigma])


def _log_constant(nu: float) -> float:
    return math.lgamma(0.5 * (nu + 1)) - math.lgamma(0.5 * nu) - 0.5 * math.log(nu * math.pi)
