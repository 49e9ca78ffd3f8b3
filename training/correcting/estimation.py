"""Estimators of `calibrate`: shift and scale for each served model, and conformal quantiles, fitted to residuals.

Shift of mu and scale of sigma are estimated in one of three ways:

- "likelihood": maximum likelihood with right-censored samples.
- "quantiles": weighted linear regression of the residuals' P50, P90 and P99 on those of Student's t.
- "coverage": minimize the largest deviation of the coverage at P50, P90 and P99 from its nominal level.

A predictor of quantiles has no Student's t: its residuals are replaced by those of a log-t with the same probability
(`Residuals.as_log_t`). For these, a shift of mu and a scale of the distances from mu are linear only approximately, so the estimators
are applied repeatedly to the calibrated residuals.

Estimates for one served model are noisy with few prompts, so they are shrunk towards those of all models (pooling).
Estimator and pooling are selected by cross-validated coverage (`select_calibration`).

Split conformal quantiles add an offset q for each level, so that exp(mu + q sigma) has guaranteed coverage.

Let z_1, ..., z_n be the residuals of n calibration rows and z of a new one, exchangeable with them. With
k = ceil((n + 1) p) and q the k-th smallest of the z_i (infinite if k > n),

    P(z <= q) >= p,

for every n, every predictor and every distribution, and P(z <= q) <= p + 1/(n + 1) if no two residuals are equal
(Vovk et al.; Lei et al. 2018). The probability is over the calibration rows and the new row.

- Samples of the same prompt are not exchangeable with samples of other prompts. Therefore one sample of each row is
  used, and for the quantiles of all models together one row of each prompt.
- A censored sample counts as infinitely long, so the guarantee does not depend on how outputs were truncated. Where many
  samples are censored, the quantile is conservative; beyond the observed samples it is infinite.
- A served model with fewer than 50 rows, or too few for a finite quantile at a level, uses the offset of all models
  together; its guarantee holds only on average over served models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

from predictors.modules.config import Calibration
from scheduler_core.lengths import LogQuantiles
from training.evaluating.evaluation import CONFORMAL_SCHEMA
from training.evaluating.scores import COVERAGE_LEVELS, finite, percent

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Residuals:
    """Residuals of N samples, of log-t distributions or of distributions given by quantiles."""

    z: FloatArray  # (ln x - mu) / sigma [N]; x is the truncated length for a censored sample
    finished: NDArray[np.bool_]  # False: z is a lower bound [N]
    z_limit: FloatArray  # (ln max_tokens - mu) / sigma of the sample's row, infinite without a limit [N]
    model: NDArray[np.intp]  # number of the served model, 0 = unknown or not distinguished [N]
    prompt: NDArray[np.intp]  # number of the prompt, equal for equal texts [N]
    row: NDArray[np.intp]  # number of the row (prompt, served model, temperature) [N]
    nu: FloatArray  # degrees of freedom [N]
    # (q - mu) / sigma of each predicted quantile q of ln x at `scheduler_core.lengths.quantiles.LEVELS` [N, K]; K = 0: log-t.
    quantiles: FloatArray

    def __len__(self) -> int:
        return len(self.z)

    def take(self, index: NDArray[np.bool_] | NDArray[np.intp]) -> Residuals:
        """The selected samples."""
        return Residuals(*(getattr(self, field.name)[index] for field in fields(self)))

    def calibrated(self, calibration: Calibration) -> Residuals:
        """Residuals under mu' = mu + shift sigma, sigma' = sigma scale of each sample's served model."""
        return self.moved(
            np.array(calibration.mu_shift)[self.model], np.array(calibration.sigma_scale)[self.model]
        )

    def moved(self, shift: float | FloatArray, scale: float | FloatArray) -> Residuals:
        """Residuals under mu' = mu + shift sigma, sigma' = sigma scale; both are numbers or [N]."""
        return replace(self, z=(self.z - shift) / scale, z_limit=(self.z_limit - shift) / scale)

    def as_log_t(self) -> Residuals:
        """Residuals of log-t distributions with the same probabilities: z is the quantile of Student's t at P(X <= x)."""
        if not self.quantiles.shape[1]:
            return self
        distribution = LogQuantiles(self.quantiles)

        def score(z: FloatArray) -> FloatArray:
            with np.errstate(over="ignore"):
                x = np.exp(z)
            # From the closer tail, because a probability near 1 has no relative accuracy.
            upper = stats.t.isf(distribution.sf(x), self.nu)
            return np.asarray(np.where(z > 0, upper, stats.t.ppf(distribution.cdf(x), self.nu)))

        none = np.zeros((len(self), 0))
        return replace(self, z=score(self.z), z_limit=score(self.z_limit), quantiles=none)

    def coverage(self) -> dict[str, Any]:
        """Coverage at P50, P90 and P99 by served model, with the maximum and the mean over models of the largest shift."""
        by_model: dict[str, dict[str, float | None]] = {}
        largest = []
        log_t = self.as_log_t()
        for number in np.unique(self.model).tolist():
            part = log_t.take(self.model == number)
            estimates = {level: _coverage(part, level) for level in COVERAGE_LEVELS}
            by_model[str(number)] = {percent(level): value for level, value in estimates.items()}
            shifts = [abs(value - level) for level, value in estimates.items() if value is not None]
            largest.append(max(shifts, default=0.0))
        return {
            "by_model": by_model,
            "largest_shift": float(max(largest)),
            "mean_largest_shift": float(np.mean(largest)),
        }


def concatenate(parts: Sequence[Residuals]) -> Residuals:
    """Concatenates the residuals of all parts."""
    return Residuals(
        *(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Residuals))
    )


def _coverage(residuals: Residuals, level: float) -> float | None:
    """Coverage of log-t distributions over the samples whose predicted quantile lies below the limit; None without any."""
    quantile = stats.t.ppf(level, residuals.nu)
    below_limit = quantile <= residuals.z_limit
    if not below_limit.any():
        return None
    return float((residuals.finished & (residuals.z <= quantile))[below_limit].mean())


def censored_cdf(residuals: Residuals) -> Any:
    """Kaplan-Meier estimate of the residuals' distribution function (scipy); a censored residual equal to a finished
    one counts as larger."""
    z, finished = residuals.z, residuals.finished
    return stats.ecdf(stats.CensoredData(z[finished], right=z[~finished])).cdf


MIN_ROWS = 50


def conformal_offset(z: FloatArray, finished: NDArray[np.bool_], level: float) -> float:
    """The k-th smallest residual, k = ceil((n + 1) level), censored ones infinite; infinite if k > n."""
    rank = math.ceil((len(z) + 1) * level - 1e-9)
    if rank > len(z):
        return math.inf
    return float(np.partition(np.where(finished, z, np.inf), rank - 1)[rank - 1])


def fit_conformal(
    residuals: Residuals, served_models: Sequence[str], rng: np.random.Generator
) -> dict[str, Any]:
    """Content of `conformal.json`: offsets in units of the calibrated sigma for each served model, and for all of them
    together ("unknown").

    `rng` draws one sample of each row, and one row of each prompt. An offset is null if the data do not determine it;
    num_rows is the number of rows used; own is false if a served model uses the offset of all models together.
    """
    one_per_row = residuals.take(_sample_one(residuals.row, rng))
    pooled = one_per_row.take(_sample_one(one_per_row.prompt, rng))
    offsets: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(("unknown", *served_models)):
        by_model = one_per_row.take(one_per_row.model == number) if number else pooled
        offsets[name] = {}
        for level in COVERAGE_LEVELS:
            own = number == 0 or len(by_model) >= max(MIN_ROWS, level / (1 - level))
            rows = by_model if own else pooled
            offset = finite(conformal_offset(rows.z, rows.finished, level))
            offsets[name][percent(level)] = {"offset": offset, "num_rows": len(rows), "own": own}
    return {
        "schema": CONFORMAL_SCHEMA,
        "levels": list(COVERAGE_LEVELS),
        "served_models": list(served_models),
        "guarantee": "P(length <= exp(mu + offset sigma)) >= level for a row exchangeable with the calibration rows",
        "offsets": offsets,
    }


def _sample_one(groups: NDArray[np.intp], rng: np.random.Generator) -> NDArray[np.intp]:
    """Position of one member of each group, drawn at random."""
    order = rng.permutation(len(groups))
    _, first = np.unique(groups[order], return_index=True)
    return np.sort(order[first])


#: Minimum number of samples for estimates of a served model; with fewer it gets those of all models together.
MIN_SAMPLES = 100
#: Candidates for pooling: 0 = separate estimates for each served model, 1 = the same estimates for all.
POOLINGS = (0.0, 0.5, 0.75, 1.0)
MIN_SCALE = 1e-3
#: Number of steps of an estimator for a predictor of quantiles.
QUANTILE_STEPS = 4
_SHIFT_BOUNDS, _LOG_SCALE_BOUNDS = (-10.0, 10.0), (-3.0, 3.0)

#: Residuals -> (shift, scale).
Estimator = Callable[[Residuals], tuple[float, float]]


@dataclass(frozen=True, slots=True)
class SelectedCalibration:
    """A calibration fitted to all of the data, and how it was selected."""

    method: str  # name of the estimator; "identity" if no estimator improves coverage
    pooling: float  # weight of the estimates of all models together
    calibration: Calibration
    trials: dict[str, Any]  # "method, pooling" -> coverage on held-out prompts


def by_likelihood(residuals: Residuals) -> tuple[float, float]:
    """Shift and scale by maximum censored likelihood."""
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
    """Shift and scale by weighted least squares of the residuals' quantiles on those of Student's t."""
    cdf = censored_cdf(residuals)
    nu = float(np.median(residuals.nu))
    levels = np.array(COVERAGE_LEVELS)
    reached = levels - 1e-12 <= cdf.probabilities.max()
    if reached.sum() < 2:
        return 0.0, 1.0
    levels = levels[reached]
    observed = cdf.quantiles[np.searchsorted(cdf.probabilities, levels - 1e-12)]
    standard = stats.t.ppf(levels, nu)
    # The inverse variance of a sample quantile is f^2 / (p (1 - p)).
    weight = stats.t.pdf(standard, nu) / np.sqrt(levels * (1 - levels))
    scale, shift = np.polyfit(standard, observed, 1, w=weight)
    if scale <= MIN_SCALE:
        return float(np.average(observed, weights=weight**2)), MIN_SCALE
    return float(shift), float(scale)


def by_coverage(residuals: Residuals) -> tuple[float, float]:
    """Shift and scale that minimize the largest deviation of coverage from nominal at P50, P90 and P99."""
    cdf = censored_cdf(residuals)
    levels = np.array(COVERAGE_LEVELS)
    standard = stats.t.ppf(levels, float(np.median(residuals.nu)))

    def loss(parameters: FloatArray) -> float:
        shifts = np.abs(cdf.evaluate(parameters[0] + np.exp(parameters[1]) * standard) - levels)
        # The sum, with a small weight, breaks near ties of the largest deviation.
        return float(shifts.max() + 0.1 * shifts.sum())

    starts = _start(residuals) + np.array([[0.0, 0.0], [0.0, 0.2], [0.0, -0.2]])
    tolerances = {"xatol": 1e-5, "fatol": 1e-7}
    trials = [optimize.minimize(loss, start, method="Nelder-Mead", options=tolerances) for start in starts]
    best = min(trials, key=lambda result: result.fun)
    return float(np.clip(best.x[0], *_SHIFT_BOUNDS)), float(np.exp(np.clip(best.x[1], *_LOG_SCALE_BOUNDS)))


def _start(residuals: Residuals) -> FloatArray:
    """Initial (shift, ln scale) of the searches, within their bounds."""
    shift, scale = by_quantiles(residuals)
    return np.array([np.clip(shift, *_SHIFT_BOUNDS), np.clip(np.log(scale), *_LOG_SCALE_BOUNDS)])


METHODS: dict[str, Estimator] = {
    "identity": lambda residuals: (0.0, 1.0),
    "likelihood": by_likelihood,
    "quantiles": by_quantiles,
    "coverage": by_coverage,
}


def fit_calibration(residuals: Residuals, num_models: int, method: str, pooling: float) -> Calibration:
    """Fits a calibration for the unknown model (all samples together) and for each served model.

    `pooling` in [0, 1] is the weight of the estimates of all models together in those of each served model.
    """
    return _pool(*_estimates(residuals, num_models, METHODS[method]), pooling)


def _estimates(residuals: Residuals, num_models: int, estimator: Estimator) -> tuple[FloatArray, FloatArray]:
    """(shift, ln scale) of all samples together [2], and of each model [num_models, 2]."""
    together = _estimate(residuals, estimator)
    pairs = [together]
    for number in range(1, num_models + 1):
        part = residuals.model == number
        enough = part.sum() >= MIN_SAMPLES and residuals.finished[part].any()
        pairs.append(_estimate(residuals.take(part), estimator) if enough else together)
    logs = np.array([(shift, np.log(scale)) for shift, scale in pairs])
    return logs[0], logs[1:]


def _estimate(residuals: Residuals, estimator: Estimator) -> tuple[float, float]:
    """(shift, scale) by an estimator for log-t distributions; for quantiles by repeated steps (see `as_log_t`)."""
    shift, scale = 0.0, 1.0
    for _ in range(QUANTILE_STEPS if residuals.quantiles.shape[1] else 1):
        step = estimator(residuals.moved(shift, scale).as_log_t())
        shift, scale = shift + scale * step[0], scale * step[1]
    return shift, scale


def _pool(together: FloatArray, by_model: FloatArray, pooling: float) -> Calibration:
    table = np.vstack([together, pooling * together + (1 - pooling) * by_model])
    return Calibration(sigma_scale=tuple(np.exp(table[:, 1]).tolist()), mu_shift=tuple(table[:, 0].tolist()))


def select_calibration(
    folds: Sequence[Residuals], num_models: int, methods: Sequence[str]
) -> SelectedCalibration:
    """Cross-validates methods and poolings on two or more folds with different prompts, and fits the combination with the
    best held-out coverage to all folds."""
    poolings = POOLINGS if num_models else (1.0,)
    candidates = [
        (name, pooling) for name in methods for pooling in (poolings if name != "identity" else (1.0,))
    ]
    held_out: dict[tuple[str, float], list[Residuals]] = {candidate: [] for candidate in candidates}
    for number, fold in enumerate(folds):
        others = concatenate([*folds[:number], *folds[number + 1 :]])
        estimates = {name: _estimates(others, num_models, METHODS[name]) for name in methods}
        for method, pooling in candidates:
            held_out[method, pooling].append(fold.calibrated(_pool(*estimates[method], pooling)))
    trials = {candidate: concatenate(parts).coverage() for candidate, parts in held_out.items()}
    method, pooling = min(candidates, key=lambda candidate: trials[candidate]["mean_largest_shift"])
    return SelectedCalibration(
        method,
        pooling,
        fit_calibration(concatenate(folds), num_models, method, pooling),
        {f"{name}, {weight:g}": trials[name, weight] for name, weight in candidates},
    )
