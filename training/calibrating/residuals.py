"""Normalized residuals z = (ln x - mu) / sigma of output lengths, their distribution and their coverage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from predictors.modules import Calibration
from training.evaluating.scores import COVERAGE_LEVELS, percent

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Residuals:
    """Residuals of N samples.

    Attributes:
        z: (ln x - mu) / sigma [N]; of a censored sample at the length it was truncated to.
        finished: False: z is a lower bound [N].
        z_limit: (ln max_tokens - mu) / sigma of the sample's row, infinite without a limit [N].
        model: Number of the served model, 0 = unknown or not told apart [N].
        prompt: Number of the prompt, equal for equal texts [N].
        row: Number of the row (prompt, served model, temperature) [N].
        nu: Degrees of freedom [N].
    """

    z: FloatArray
    finished: NDArray[np.bool_]
    z_limit: FloatArray
    model: NDArray[np.intp]
    prompt: NDArray[np.intp]
    row: NDArray[np.intp]
    nu: FloatArray

    def __len__(self) -> int:
        return len(self.z)

    def take(self, index: NDArray[np.bool_] | NDArray[np.intp]) -> Residuals:
        """Some of the samples."""
        return Residuals(*(getattr(self, field.name)[index] for field in fields(self)))

    def calibrated(self, calibration: Calibration) -> Residuals:
        """Residuals under mu' = mu + shift sigma, sigma' = sigma scale of each sample's served model."""
        shift = np.array(calibration.mu_shift)[self.model]
        scale = np.array(calibration.sigma_scale)[self.model]
        return replace(self, z=(self.z - shift) / scale, z_limit=(self.z_limit - shift) / scale)

    def coverage(self) -> dict[str, Any]:
        """Coverage at P50, P90 and P99 by number of the served model; the largest shift, and its mean over models.

        As everywhere, over the samples whose predicted quantile lies below the limit.
        """
        by_model: dict[str, dict[str, float | None]] = {}
        largest = []
        for number in np.unique(self.model).tolist():
            part = self.take(self.model == number)
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
    """The residuals of all parts."""
    return Residuals(
        *(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Residuals))
    )


def _coverage(residuals: Residuals, level: float) -> float | None:
    quantile = stats.t.ppf(level, residuals.nu)
    below_limit = quantile <= residuals.z_limit
    if not below_limit.any():
        return None
    return float((residuals.finished & (residuals.z <= quantile))[below_limit].mean())


@dataclass(frozen=True, slots=True)
class CensoredCdf:
    """Kaplan-Meier estimate of a distribution function.

    Attributes:
        at: Values where it rises, ascending [K].
        value: What it rises to [K]; it never reaches 1 if the largest residual is censored.
    """

    at: FloatArray
    value: FloatArray

    @classmethod
    def of(cls, z: FloatArray, finished: NDArray[np.bool_]) -> CensoredCdf:
        """The estimate; a lower bound equal to a value counts as beyond it."""
        at, first = np.unique(z, return_inverse=True)
        ended = np.bincount(first[finished], minlength=len(at))
        leaving = np.bincount(first, minlength=len(at))
        at_risk = len(z) - np.concatenate([[0], np.cumsum(leaving)[:-1]])
        survival = np.cumprod(1 - ended / at_risk)
        rises = ended > 0
        return cls(at[rises], 1 - survival[rises])

    def __call__(self, z: float | FloatArray) -> FloatArray:
        """Estimated P(Z <= z)."""
        steps = np.concatenate([[0.0], self.value])
        return np.asarray(steps[np.searchsorted(self.at, z, side="right")])

    def quantile(self, level: float) -> float:
        """Smallest z with P(Z <= z) >= level; infinite where the data do not reach so far."""
        number = int(np.searchsorted(self.value, level - 1e-12, side="left"))
        return float(self.at[number]) if number < len(self.at) else np.inf
