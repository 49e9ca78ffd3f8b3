"""Baselines: constant and linear predictions, fitted to the training split and stored with the predictor
(`training.json`, the manifest)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from scheduler_core.errors import InputError
from training.fitting.estimate import SortedLengths, estimate, family_of
from training.fitting.fits import NOT_FITTED, FittedGroups
from training.fitting.rows import Rows, rows_of

FloatArray = NDArray[np.float64]
SIGMA_FLOOR = 1e-6
#: Minimum number of outputs of a served model for a separate distribution.
MIN_OUTPUTS = 10


@dataclass(frozen=True, slots=True)
class Baselines:
    """Parameters of the baselines; lengths in log tokens, prompts in ln(1 + characters)."""

    # constant_mu, constant_sigma: from the means of the fitted mu and log(1 + sigma), the best constant parameters.
    constant_mu: float
    constant_sigma: float
    # marginal_mu, marginal_sigma: one distribution fitted to all outputs of all prompts.
    marginal_mu: float
    marginal_sigma: float
    # mu_intercept, mu_slope: least-squares line of mu over prompt length, shifted to the median of the outputs.
    mu_intercept: float
    mu_slope: float
    line_sigma: float  # scale of the outputs around that line
    nu: float  # degrees of freedom of all baselines
    # Served model -> (mu, sigma) of one distribution fitted to all of its outputs; empty if the data name at most one.
    served_models: Mapping[str, Sequence[float]]

    @classmethod
    def of(cls, rows: Rows, nu: float) -> Baselines:
        """Fits baselines to training rows; InputError if no output is finished.

        If no row has a fit, as with a single output per prompt, mu is the mean log length of each row, and sigma the
        marginal scale."""
        if not rows.finished.any():
            raise InputError("finished outputs, for baselines", 0, "at least one")
        size = _size(rows.prompts)[rows.prompt]
        marginal = _pooled(rows.lengths, rows.finished, nu)
        logs = np.log(rows.lengths.astype(np.float64))
        fitted = np.isfinite(rows.mu) & np.isfinite(rows.sigma)
        usable = fitted if fitted.any() else np.ones(len(rows), dtype=bool)
        centers = np.where(fitted, rows.mu, rows.row_means(logs))[usable]
        scales = rows.sigma[usable] if fitted.any() else np.array([marginal[1]])
        slope, intercept = _line(size[usable], centers)
        residuals = logs - np.repeat(intercept + slope * size, rows.counts)
        center = float(np.median(residuals))
        distance = float(np.median(np.abs(residuals - center)))
        quartile = float(stdtrit(nu, 0.75))
        return cls(
            constant_mu=float(centers.mean()),
            constant_sigma=float(np.expm1(np.log1p(scales).mean())),
            marginal_mu=marginal[0],
            marginal_sigma=marginal[1],
            mu_intercept=intercept + center,
            mu_slope=slope,
            line_sigma=max(distance / quartile, SIGMA_FLOOR),
            nu=nu,
            served_models=_by_served_model(rows, nu),
        )

    def predict(
        self, prompts: Sequence[str], served_models: Sequence[str | None]
    ) -> dict[str, tuple[FloatArray, FloatArray]]:
        """Predicts (mu [N], sigma [N]) of N prompts for each baseline, by name.

        A served model that is None, or not in the training split, gets the marginal distribution.
        """
        ones = np.ones(len(prompts))
        size = _size(prompts)
        predictions = {
            "constant": (self.constant_mu * ones, self.constant_sigma * ones),
            "marginal": (self.marginal_mu * ones, self.marginal_sigma * ones),
            "prompt_length": (self.mu_intercept + self.mu_slope * size, self.line_sigma * ones),
        }
        if self.served_models:
            other = (self.marginal_mu, self.marginal_sigma)
            pairs = np.array([self.served_models.get(name or "", other) for name in served_models]).reshape(
                -1, 2
            )
            predictions["per_model"] = (pairs[:, 0], pairs[:, 1])
        return predictions


def baselines_of(fits: FittedGroups) -> Baselines:
    """Fits baselines to fitted groups."""
    fitted = ~fits.has_flag(*NOT_FITTED)
    mu, sigma = (np.where(fitted, values, np.nan) for values in (fits.mu, fits.sigma))
    return Baselines.of(rows_of(fits.groups, mu, sigma), fits.nu)


def _by_served_model(rows: Rows, nu: float) -> dict[str, tuple[float, float]]:
    """(mu, sigma) of each served model with enough outputs; empty unless there are several models."""
    of_output = np.repeat(rows.model, rows.counts)
    parameters = {}
    for number, name in enumerate(rows.models, start=1):
        own = of_output == number
        if len(rows.models) > 1 and own.sum() >= MIN_OUTPUTS and rows.finished[own].any():
            parameters[name] = _pooled(rows.lengths[own], rows.finished[own], nu)
    return dict(sorted(parameters.items()))


def _pooled(lengths: NDArray[np.integer[Any]], finished: NDArray[np.bool_], nu: float) -> tuple[float, float]:
    """(mu, sigma) of one log-t distribution fitted to all of the outputs."""
    ends = np.array([0, len(lengths)])
    solution = estimate(
        SortedLengths.of(lengths.astype(np.int64), finished, ends), family_of("log-t", nu)
    ).solution
    return float(solution.m[0]), float(np.exp(solution.s[0]))


def _size(prompts: Sequence[str]) -> FloatArray:
    return np.log1p(np.array([len(prompt) for prompt in prompts], dtype=np.float64))


def _line(x: FloatArray, y: FloatArray) -> tuple[float, float]:
    """Slope and intercept of the least-squares line; the slope is 0 for constant x."""
    centered = x - x.mean()
    total = float((centered**2).sum())
    slope = float((centered * y).sum()) / total if total > 1e-12 else 0.0
    return slope, float(y.mean()) - slope * float(x.mean())
