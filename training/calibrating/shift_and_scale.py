"""Two numbers for each served model, mu shifted and sigma stretched, in one of three ways.

- "likelihood": of largest likelihood of the answers, cut ones right-censored.
- "quantiles": a line through the residuals' P50, P90 and P99 over those of Student's t, each weighted by how well it is
  known.
- "coverage": the largest of the three levels' shifts from nominal made as small as possible.

Few prompts say little about one served model: its numbers are moved towards those of all models together by a share, the
pooling. Which way and which pooling are kept, coverage on prompts that were not used decides, in cross-validation
(`choose`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

from predictors.modules import Calibration
from training.calibrating.residuals import CensoredCdf, Residuals
from training.evaluating.scoring import COVERAGE_LEVELS, percent

FloatArray = NDArray[np.float64]
#: Fewest answers that give a served model numbers of its own; with fewer it gets those of all models together.
MIN_ANSWERS = 100
#: What is tried of pooling: 0 = numbers of its own for each served model, 1 = the same for all.
POOLINGS = (0.0, 0.5, 0.75, 1.0)
_BOUNDS = (-10.0, 10.0)

#: Residuals of one served model -> (shift, scale).
Fit = Callable[[Residuals], tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen calibration.

    Attributes:
        method: Its name; "identity" if nothing is better than no change.
        pooling: Share of the numbers of all models together in those of each.
        calibration: Fitted on all of the data.
        trials: "method, pooling" -> coverage on held-out prompts, by served model, and its largest and mean shift.
    """

    method: str
    pooling: float
    calibration: Calibration
    trials: dict[str, Any]


def by_likelihood(residuals: Residuals) -> tuple[float, float]:
    """Shift and scale of largest censored likelihood."""
    z, finished, nu = residuals.z, residuals.finished, residuals.nu
    ended, cut = z[finished], z[~finished]
    nu_ended, nu_cut = nu[finished], nu[~finished]

    def loss(parameters: FloatArray) -> float:
        shift, log_scale = parameters
        density = stats.t.logpdf((ended - shift) * np.exp(-log_scale), nu_ended) - log_scale
        tail = stats.t.logsf((cut - shift) * np.exp(-log_scale), nu_cut)
        return -float((density.sum() + tail.sum()) / len(z))

    found = optimize.minimize(
        loss,
        by_quantiles_start(residuals),
        method="Nelder-Mead",
        bounds=[_BOUNDS, (-3.0, 3.0)],
        options={"xatol": 1e-4, "fatol": 1e-8, "maxiter": 400},
    )
    return float(found.x[0]), float(np.exp(found.x[1]))


def by_quantiles(residuals: Residuals) -> tuple[float, float]:
    """Weighted least squares of the residuals' quantiles over those of Student's t."""
    cdf = CensoredCdf.of(residuals.z, residuals.finished)
    nu = float(np.median(residuals.nu))
    found, standard, weight = [], [], []
    for level in COVERAGE_LEVELS:
        quantile = cdf.quantile(level)
        if np.isfinite(quantile):
            at = float(stats.t.ppf(level, nu))
            found.append(quantile)
            standard.append(at)
            # Variance of a sample quantile: p (1 - p) / f^2.
            weight.append(stats.t.pdf(at, nu) ** 2 / (level * (1 - level)))
    if len(found) < 2:
        return 0.0, 1.0
    x, y, w = np.array(standard), np.array(found), np.array(weight)
    w /= w.sum()
    mean_x, mean_y = float(w @ x), float(w @ y)
    scale = float(w @ ((x - mean_x) * (y - mean_y))) / float(w @ (x - mean_x) ** 2)
    if scale <= 1e-3:
        return mean_y, 1e-3
    return mean_y - scale * mean_x, scale


def by_quantiles_start(residuals: Residuals) -> FloatArray:
    """Where the searches begin: (shift, ln scale) within their bounds."""
    shift, scale = by_quantiles(residuals)
    return np.array([np.clip(shift, *_BOUNDS), np.clip(np.log(scale), -3.0, 3.0)])


def by_coverage(residuals: Residuals) -> tuple[float, float]:
    """Shift and scale with the smallest largest shift of coverage at P50, P90 and P99."""
    cdf = CensoredCdf.of(residuals.z, residuals.finished)
    nu = float(np.median(residuals.nu))
    levels = np.array(COVERAGE_LEVELS)
    standard = stats.t.ppf(levels, nu)
    x = np.concatenate([[-np.inf], cdf.at])
    y = np.concatenate([[0.0], cdf.value])

    def loss(parameters: FloatArray) -> float:
        quantiles = parameters[0] + np.exp(parameters[1]) * standard
        reached = y[np.searchsorted(x, quantiles, side="right") - 1]
        shifts = np.abs(reached - levels)
        # The largest decides; the sum leads where several are about as large.
        return float(shifts.max() + 0.1 * shifts.sum())

    start = by_quantiles_start(residuals)
    best = min(
        (
            optimize.minimize(loss, at, method="Nelder-Mead", options={"xatol": 1e-5, "fatol": 1e-7})
            for at in start + np.array([[0.0, 0.0], [0.0, 0.2], [0.0, -0.2]])
        ),
        key=lambda result: result.fun,
    )
    return float(np.clip(best.x[0], *_BOUNDS)), float(np.exp(np.clip(best.x[1], -3.0, 3.0)))


METHODS: dict[str, Fit] = {
    "likelihood": by_likelihood,
    "quantiles": by_quantiles,
    "coverage": by_coverage,
}


def fit_calibration(residuals: Residuals, num_models: int, method: str, pooling: float = 0.0) -> Calibration:
    """Tables for the unknown model (all answers together) and for each served model.

    Args:
        residuals: At least one.
        num_models: Served models that the predictor tells apart.
        method: One of METHODS, or "identity".
        pooling: Share of the numbers of all models together in those of each, in [0, 1].
    """
    if method == "identity":
        return Calibration.identity(num_models)
    return _mixed(*_fits(residuals, num_models, METHODS[method]), pooling)


def _fits(residuals: Residuals, num_models: int, fit: Fit) -> tuple[FloatArray, FloatArray]:
    """(shift, ln scale) of all answers together [2], and of each model's own [num_models, 2]."""
    pooled = fit(residuals)
    pairs = []
    for number in range(1, num_models + 1):
        own = residuals.model == number
        enough = own.sum() >= MIN_ANSWERS and residuals.finished[own].any()
        pairs.append(fit(residuals.take(own)) if enough else pooled)
    logs = np.array([(shift, np.log(scale)) for shift, scale in (pooled, *pairs)])
    return logs[0], logs[1:]


def _mixed(pooled: FloatArray, own: FloatArray, pooling: float) -> Calibration:
    table = np.vstack([pooled, pooling * pooled + (1 - pooling) * own])
    return Calibration(sigma_scale=tuple(np.exp(table[:, 1]).tolist()), mu_shift=tuple(table[:, 0].tolist()))


def choose(folds: Sequence[Residuals], num_models: int) -> Choice:
    """Fits in every way on all folds but one, judges on that one; the way with the best coverage is fitted on all.

    Args:
        folds: Residuals of different prompts each, two or more.
        num_models: Served models that the predictor tells apart.
    """
    ways = [("identity", 1.0), *product(METHODS, POOLINGS if num_models else (1.0,))]
    moved: dict[tuple[str, float], list[Residuals]] = {way: [] for way in ways}
    for number, held_out in enumerate(folds):
        fitting = together([*folds[:number], *folds[number + 1 :]])
        fits = {method: _fits(fitting, num_models, fit) for method, fit in METHODS.items()}
        for method, pooling in ways:
            found = (
                Calibration.identity(num_models) if method == "identity" else _mixed(*fits[method], pooling)
            )
            moved[method, pooling].append(moved_by(held_out, found))
    trials = {way: coverage_of(together(parts)) for way, parts in moved.items()}
    best = min(ways, key=lambda way: trials[way]["mean_largest_shift"])
    calibration = fit_calibration(together(folds), num_models, *best)
    return Choice(
        *best, calibration, {f"{method}, {pooling:g}": trials[method, pooling] for method, pooling in ways}
    )


def moved_by(residuals: Residuals, calibration: Calibration) -> Residuals:
    """Residuals under calibrated predictions."""
    return residuals.moved(np.array(calibration.mu_shift), np.array(calibration.sigma_scale))


def coverage_of(moved: Residuals) -> dict[str, Any]:
    """Coverage at P50, P90 and P99 by number of the served model; the largest shift, and its mean over models.

    As everywhere, of the answers of prompts whose quantile lies below the cap.
    """
    by_model: dict[str, dict[str, float | None]] = {}
    largest = []
    for number in np.unique(moved.model).tolist():
        own = moved.take(moved.model == number)
        found = {percent(level): _coverage(own, level) for level in COVERAGE_LEVELS}
        by_model[str(number)] = found
        shifts = [
            abs(value - level)
            for level, value in zip(COVERAGE_LEVELS, found.values(), strict=True)
            if value is not None
        ]
        largest.append(max(shifts, default=0.0))
    return {
        "by_model": by_model,
        "largest_shift": float(max(largest)),
        "mean_largest_shift": float(np.mean(largest)),
    }


def _coverage(residuals: Residuals, level: float) -> float | None:
    quantile = stats.t.ppf(level, residuals.nu)
    known = quantile <= residuals.z_cap
    if not known.any():
        return None
    return float((residuals.finished & (residuals.z <= quantile))[known].mean())


def together(parts: Sequence[Residuals]) -> Residuals:
    """The residuals of all parts."""
    names = ("z", "finished", "z_cap", "model", "prompt", "row", "nu")
    return Residuals(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))
