"""The distributions that the log-t is compared with, fitted by maximum likelihood with right-censoring.

Source: TIE, table 1: log-normal, gamma, Weibull and exponential, fitted to the same answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

FloatArray = NDArray[np.float64]
Cdf = Callable[[FloatArray], FloatArray]


@dataclass(frozen=True, slots=True)
class AlternativeFit:
    """A fitted distribution: parameters by name (scale in tokens), and P(X <= x)."""

    family: str
    parameters: dict[str, float]
    cdf: Cdf


def fit_exponential(x: FloatArray, cut: FloatArray) -> AlternativeFit:
    """Rate = finished answers / all tokens; closed form."""
    scale = float((x.sum() + cut.sum()) / len(x))
    return AlternativeFit("exponential", {"scale": scale}, lambda at: -np.expm1(-at / scale))


def fit_log_normal(x: FloatArray, cut: FloatArray) -> AlternativeFit:
    """Closed form without cut answers, else L-BFGS-B over (mu, ln sigma) with the analytic gradient."""
    y, top = np.log(x), np.log(cut)
    everything = np.concatenate([y, top])
    mu, sigma = float(everything.mean()), float(everything.std())
    if len(cut):
        start = np.array([mu, math.log(max(sigma, 1e-3))])
        mu, log_sigma = _minimize(lambda theta: _log_normal_objective(theta, y, top), start, gradient=True)
        sigma = math.exp(log_sigma)
    return AlternativeFit(
        "log_normal", {"mu": mu, "sigma": sigma}, lambda at: special.ndtr((np.log(at) - mu) / sigma)
    )


def _log_normal_objective(theta: FloatArray, y: FloatArray, cut: FloatArray) -> tuple[float, FloatArray]:
    mu, log_sigma = theta
    sigma = math.exp(log_sigma)
    z, z_cut = (y - mu) / sigma, (cut - mu) / sigma
    log_survival = special.log_ndtr(-z_cut)
    hazard = np.exp(-0.5 * z_cut**2 - 0.5 * math.log(2 * math.pi) - log_survival)
    value = -len(y) * log_sigma - 0.5 * float((z * z).sum()) + float(log_survival.sum())
    by_mu = (float(z.sum()) + float(hazard.sum())) / sigma
    by_log_sigma = float((z * z).sum()) - len(y) + float((hazard * z_cut).sum())
    return -value, np.array([-by_mu, -by_log_sigma])


def fit_weibull(x: FloatArray, cut: FloatArray) -> AlternativeFit:
    """One equation in the shape k, increasing: sum(w y)/sum(w) - 1/k = mean of finished y; w = x^k, y = ln x."""
    y = np.log(x)
    everything = np.concatenate([y, np.log(cut)])
    top = everything.max()

    def equation(log_shape: float) -> float:
        shape = math.exp(log_shape)
        weights = np.exp(shape * (everything - top))
        return float((weights * everything).sum() / weights.sum()) - 1 / shape - float(y.mean())

    shape = math.exp(_root(equation, start=math.log(1.2 / max(float(everything.std()), 1e-6))))
    log_scale = top + math.log(float(np.exp(shape * (everything - top)).sum()) / len(y)) / shape
    return AlternativeFit(
        "weibull",
        {"shape": shape, "scale": math.exp(log_scale)},
        lambda at: -np.expm1(-np.exp(shape * (np.log(at) - log_scale))),
    )


def fit_gamma(x: FloatArray, cut: FloatArray) -> AlternativeFit:
    """One equation in the shape without cut answers, else L-BFGS-B over (ln shape, ln scale)."""
    everything = np.concatenate([x, cut])
    # 0 only if all lengths are equal, which is not fitted.
    gap = math.log(float(everything.mean())) - float(np.log(everything).mean())
    shape = math.exp(_root(lambda value: _gamma_equation(value, gap), start=math.log(0.5 / max(gap, 1e-12))))
    scale = float(everything.mean()) / shape
    if len(cut):
        start = np.array([math.log(shape), math.log(scale)])
        log_shape, log_scale = _minimize(lambda theta: _gamma_objective(theta, x, cut), start, gradient=False)
        shape, scale = math.exp(log_shape), math.exp(log_scale)
    return AlternativeFit(
        "gamma", {"shape": shape, "scale": scale}, lambda at: special.gammainc(shape, at / scale)
    )


def _gamma_equation(log_shape: float, gap: float) -> float:
    shape = math.exp(log_shape)
    return gap - (log_shape - float(special.digamma(shape)))


def _gamma_objective(theta: FloatArray, x: FloatArray, cut: FloatArray) -> float:
    shape, log_scale = math.exp(theta[0]), theta[1]
    scale = math.exp(log_scale)
    value = (
        (shape - 1) * np.log(x).sum()
        - x.sum() / scale
        - len(x) * (special.gammaln(shape) + shape * log_scale)
    )
    survival = special.gammaincc(shape, cut / scale)
    # Beyond the float range the tail is worth its smallest number; the optimum is never there.
    value += np.log(np.maximum(survival, np.finfo(np.float64).tiny)).sum()
    return -float(value)


FAMILIES: dict[str, Callable[[FloatArray, FloatArray], AlternativeFit]] = {
    "log_normal": fit_log_normal,
    "gamma": fit_gamma,
    "weibull": fit_weibull,
    "exponential": fit_exponential,
}


def fit_alternatives(lengths: NDArray[np.number], finished: NDArray[np.bool_]) -> dict[str, AlternativeFit]:
    """Fits every family to one prompt's answers.

    Args:
        lengths: Answer lengths in tokens [N], above 0; at least one finished, not all equal.
        finished: False where the answer was cut at its length [N].
    """
    x = np.asarray(lengths, dtype=np.float64)
    return {name: fit(x[finished], x[~finished]) for name, fit in FAMILIES.items()}


def _root(equation: Callable[[float], float], start: float) -> float:
    """Root of an increasing function, the bracket grown from `start`."""
    low, high = start - 1.0, start + 1.0
    while equation(low) > 0:
        low -= 2.0
    while equation(high) < 0:
        high += 2.0
    return float(optimize.brentq(equation, low, high, xtol=1e-10))


def _minimize(
    objective: Callable[[FloatArray], object], start: FloatArray, *, gradient: bool
) -> tuple[float, float]:
    # Twelve units of the logarithm either way: six orders of magnitude, so that exp() stays finite.
    bounds = [(value - 12.0, value + 12.0) for value in start]
    result = optimize.minimize(objective, start, jac=gradient, method="L-BFGS-B", bounds=bounds)
    return float(result.x[0]), float(result.x[1])
