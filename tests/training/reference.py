"""Slow, independent likelihoods of scipy.stats, to check the compiled fitter against."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy import optimize, stats

#: Family -> (parameters as in a fits file) -> scipy's distribution of X.
SCIPY: dict[str, Callable[..., object]] = {
    "log-normal": lambda mu, sigma, nu=math.inf: stats.lognorm(sigma, scale=math.exp(mu)),
    "gamma": lambda shape, scale: stats.gamma(shape, scale=scale),
    "weibull": lambda shape, scale: stats.weibull_min(shape, scale=scale),
    "exponential": lambda scale: stats.expon(scale=scale),
}


class LogTOfScipy:
    """The log-t by scipy's Student-t of ln X."""

    def __init__(self, mu: float, sigma: float, nu: float) -> None:
        self.t = stats.t(nu, loc=mu, scale=sigma) if math.isfinite(nu) else stats.norm(mu, sigma)

    def logpdf(self, x):
        return self.t.logpdf(np.log(x)) - np.log(x)

    def logsf(self, x):
        return self.t.logsf(np.log(x))

    def cdf(self, x):
        return self.t.cdf(np.log(x))


def scipy_distribution(family: str, **parameters: float):
    if family == "log-t":
        return LogTOfScipy(**parameters)
    return SCIPY[family](**parameters)


def log_likelihood(distribution, lengths, finished, *, integers: bool = False, weights=None) -> float:
    """Of answers [N]; cut ones contribute ln P(X > length)."""
    x = np.asarray(lengths, dtype=float)
    if integers:
        with np.errstate(divide="ignore"):
            ended = np.log(distribution.cdf(x + 0.5) - distribution.cdf(x - 0.5))
    else:
        ended = distribution.logpdf(x)
    return float(
        np.average(np.where(finished, ended, distribution.logsf(x)), weights=weights)
        * (len(x) if weights is None else np.sum(weights))
    )


def maximize_log_t(lengths, finished, nu: float, *, weights=None) -> tuple[float, float]:
    """(mu, ln sigma) by Nelder-Mead from several starts."""
    y = np.log(lengths)

    def objective(theta):
        return -log_likelihood(
            LogTOfScipy(theta[0], math.exp(theta[1]), nu), lengths, finished, weights=weights
        )

    options = {"xatol": 1e-9, "fatol": 1e-12, "maxiter": 4000}
    starts = [(np.median(y), math.log(y.std() * factor + 1e-3)) for factor in (1.0, 0.3)]
    results = [optimize.minimize(objective, at, method="Nelder-Mead", options=options) for at in starts]
    best = min(results, key=lambda result: result.fun)
    return float(best.x[0]), float(best.x[1])
