"""Two numbers for each served model, a shift of mu and a scale of sigma, estimated in one of three ways.

- "likelihood": maximum likelihood, censored samples right-censored.
- "quantiles": a line through the residuals' P50, P90 and P99 over those of Student's t, each weighted by its precision.
- "coverage": the smallest largest shift from nominal of the three levels.

Few prompts say little about one served model: its numbers are shrunk towards those of all models together (pooling).
Cross-validated coverage decides between estimators and poolings (`select_calibration`).
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
from training.calibrating.residuals import CensoredCdf, Residuals, concatenate
from training.evaluating.scores import COVERAGE_LEVELS

FloatArray = NDArray[np.float64]
#: Minimum number of samples for numbers of a served model's own; with fewer it gets those of all models together.
MIN_SAMPLES = 100
#: Candidates for pooling: 0 = each served model for itself, 1 = the same numbers for all.
POOLINGS = (0.0, 0.5, 0.75, 1.0)
MIN_SCALE = 1e-3
_SHIFT_BOUNDS, _LOG_SCALE_BOUNDS = (-10.0, 10.0), (-3.0, 3.0)

#: Residuals -> (shift, scale).
Estimator = Callable[[Residuals], tuple[float, float]]


@dataclass(frozen=True, slots=True)
class SelectedCalibration:
    """A calibration and how it was selected.

    Attributes:
        method: Name of the estimator; "identity" if nothing is better than no change.
        pooling: Weight of all models together in the numbers of each.
        calibration: Fitted on all of the data.
        trials: "method, pooling" -> coverage on held-out prompts.
    """

    method: str
    pooling: float
    calibration: Calibration
    trials: dict[str, Any]


def by_likelihood(residuals: Residuals) -> tuple[float, float]:
    """Shift and scale of maximum censored likelihood."""
    z, finished, nu = residuals.z, residuals.finished, residuals.nu

    def loss(parameters: FloatArray) -> float:
        shift, log_scale = parameters
        standard = (z - shift) * np.exp(-log_scale)
        density = stats.t.logpdf(standard[finished], nu[finished]) - log_scale
        tail = stats.t.logsf(standard[~finished], nu[~finished])
        return -float((density.sum() + tail.sum()) / len(z))

    best = optimize.minimize(
        loss,
        _start(residuals),
        method="Nelder-Mead",
        bounds=[_SHIFT_BOUNDS, _LOG_SCALE_BOUNDS],
        options={"xatol": 1e-4, "fatol": 1e-8, "maxiter": 400},
    )
    return float(best.x[0]), float(np.exp(best.x[1]))


def by_quantiles(residuals: Residuals) -> tuple[float, float]:
    """Weighted least squares of the residuals' quantiles over those of Student's t."""
    cdf = CensoredCdf.of(residuals.z, residuals.finished)
    nu = float(np.median(residuals.nu))
    levels = np.array(COVERAGE_LEVELS)
    observed = np.array([cdf.quantile(level) for level in COVERAGE_LEVELS])
    reached = np.isfinite(observed)
    if reached.sum() < 2:
        return 0.0, 1.0
    levels, observed = levels[reached], observed[reached]
    standard = stats.t.ppf(levels, nu)
    # Inverse variance of a sample quantile: f^2 / (p (1 - p)).
    weight = stats.t.pdf(standard, nu) ** 2 / (levels * (1 - levels))
    weight /= weight.sum()
    mean_standard, mean_observed = float(weight @ standard), float(weight @ observed)
    centered = standard - mean_standard
    scale = float(weight @ (centered * (observed - mean_observed)) / (weight @ centered**2))
    if scale <= MIN_SCALE:
        return mean_observed, MIN_SCALE
    return mean_observed - scale * mean_standard, scale


def by_coverage(residuals: Residuals) -> tuple[float, float]:
    """Shift and scale with the smallest largest shift of coverage at P50, P90 and P99."""
    cdf = CensoredCdf.of(residuals.z, residuals.finished)
    levels = np.array(COVERAGE_LEVELS)
    standard = stats.t.ppf(levels, float(np.median(residuals.nu)))

    def loss(parameters: FloatArray) -> float:
        shifts = np.abs(cdf(parameters[0] + np.exp(parameters[1]) * standard) - levels)
        # The largest decides; the sum leads where several are about as large.
        return float(shifts.max() + 0.1 * shifts.sum())

    starts = _start(residuals) + np.array([[0.0, 0.0], [0.0, 0.2], [0.0, -0.2]])
    best = min(
        (
            optimize.minimize(loss, start, method="Nelder-Mead", options={"xatol": 1e-5, "fatol": 1e-7})
            for start in starts
        ),
        key=lambda result: result.fun,
    )
    return float(np.clip(best.x[0], *_SHIFT_BOUNDS)), float(np.exp(np.clip(best.x[1], *_LOG_SCALE_BOUNDS)))


def _start(residuals: Residuals) -> FloatArray:
    """Where the searches begin: (shift, ln scale) within their bounds."""
    shift, scale = by_quantiles(residuals)
    return np.array([np.clip(shift, *_SHIFT_BOUNDS), np.clip(np.log(scale), *_LOG_SCALE_BOUNDS)])


METHODS: dict[str, Estimator] = {
    "likelihood": by_likelihood,
    "quantiles": by_quantiles,
    "coverage": by_coverage,
}


def fit_calibration(residuals: Residuals, num_models: int, method: str, pooling: float = 0.0) -> Calibration:
    """Tables for the unknown model (all samples together) and for each served model.

    Args:
        residuals: At least one.
        num_models: Served models that the predictor tells apart.
        method: One of METHODS, or "identity".
        pooling: Weight of all models together in the numbers of each, in [0, 1].
    """
    if method == "identity":
        return Calibration.identity(num_models)
    return _pool(*_estimates(residuals, num_models, METHODS[method]), pooling)


def _estimates(residuals: Residuals, num_models: int, estimator: Estimator) -> tuple[FloatArray, FloatArray]:
    """(shift, ln scale) of all samples together [2], and of each model [num_models, 2]."""
    together = estimator(residuals)
    pairs = [together]
    for number in range(1, num_models + 1):
        part = residuals.model == number
        enough = part.sum() >= MIN_SAMPLES and residuals.finished[part].any()
        pairs.append(estimator(residuals.take(part)) if enough else together)
    logs = np.array([(shift, np.log(scale)) for shift, scale in pairs])
    return logs[0], logs[1:]


def _pool(together: FloatArray, by_model: FloatArray, pooling: float) -> Calibration:
    table = np.vstack([together, pooling * together + (1 - pooling) * by_model])
    return Calibration(sigma_scale=tuple(np.exp(table[:, 1]).tolist()), mu_shift=tuple(table[:, 0].tolist()))


def select_calibration(folds: Sequence[Residuals], num_models: int) -> SelectedCalibration:
    """Cross-validates every method and pooling; the one with the best held-out coverage is fitted on all folds.

    Args:
        folds: Residuals of different prompts each, two or more.
        num_models: Served models that the predictor tells apart.
    """
    candidates = [("identity", 1.0), *product(METHODS, POOLINGS if num_models else (1.0,))]
    held_out: dict[tuple[str, float], list[Residuals]] = {candidate: [] for candidate in candidates}
    for number, fold in enumerate(folds):
        others = concatenate([*folds[:number], *folds[number + 1 :]])
        estimates = {name: _estimates(others, num_models, estimator) for name, estimator in METHODS.items()}
        for method, pooling in candidates:
            calibration = (
                Calibration.identity(num_models)
                if method == "identity"
                else _pool(*estimates[method], pooling)
            )
            held_out[method, pooling].append(fold.calibrated(calibration))
    trials = {candidate: concatenate(parts).coverage() for candidate, parts in held_out.items()}
    method, pooling = min(candidates, key=lambda candidate: trials[candidate]["mean_largest_shift"])
    return SelectedCalibration(
        method,
        pooling,
        fit_calibration(concatenate(folds), num_models, method, pooling),
        {f"{name}, {weight:g}": trials[name, weight] for name, weight in candidates},
    )
