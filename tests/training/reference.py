"""Slow, independent likelihoods of scipy.stats, to check the compiled fitter against."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy import stats

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


def log_likelihood(distribution, lengths, finished, *, integers: bool = False) -> float:
    """Of answers [N]; cut ones contribute ln P(X > length)."""
    x = np.asarray(lengths, dtype=float)
    if integers:
        with np.errstate(divide="ignore"):
            ended = np.log(distribution.cdf(x + 0.5) - distribution.cdf(x - 0.5))
    else:
        ended = distribution.logpdf(x)
    return float(np.where(finished, ended, distribution.logsf(x)).sum())
