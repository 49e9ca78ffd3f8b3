"""Normalization of training targets.

Source: TIE (z-scores of mu and log(1 + sigma)), SSJF (of ln(1 + tokens)). Only the training split is used.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scheduler_core.errors import InputError

# Minimum standard deviation of a target; with a smaller one, z-scores would only amplify rounding errors.
MIN_STD = 1e-6


@dataclass(frozen=True, slots=True)
class Normalization:
    """Means and standard deviations of mu (log tokens), log(1 + sigma), log(1 + sigma_within) and ln(1 + tokens).

    Statistics that no head uses are 0 and 1.
    """

    mu_mean: float = 0.0
    mu_std: float = 1.0
    sigma_log_mean: float = 0.0
    sigma_log_std: float = 1.0
    within_log_mean: float = 0.0
    within_log_std: float = 1.0
    regression_mean: float = 0.0
    regression_std: float = 1.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not math.isfinite(value) or (name.endswith("_std") and value <= 0):
                raise InputError(f"normalization, {name}", value, "finite numbers, standard deviations > 0")

    @classmethod
    def of(
        cls,
        mu: ArrayLike | None = None,
        sigma: ArrayLike | None = None,
        tokens: ArrayLike | None = None,
        within: ArrayLike | None = None,
    ) -> Normalization:
        """Statistics of training targets: fitted mu and sigma [N] in log tokens, tokens [M] of the regression
        head, and fitted sigma [K] as target of sigma_within. For None they are 0 and 1. InputError if a
        target has fewer than two values or all are equal."""
        targets = {
            "mu": ("mu", mu),
            "sigma": ("sigma_log", None if sigma is None else np.log1p(sigma)),
            "output_tokens": ("regression", None if tokens is None else np.log1p(tokens)),
            "within": ("within_log", None if within is None else np.log1p(within)),
        }
        statistics: dict[str, float] = {}
        for name, (prefix, target) in targets.items():
            if target is None:
                continue
            values = np.asarray(target, dtype=np.float64)
            if len(values) < 2:
                raise InputError(f"values of {name} in the training split", len(values), "at least 2")
            if values.std() < MIN_STD:
                allowed = "values that differ between prompts"
                raise InputError(f"{name} in the training split", float(values[0]), allowed)
            statistics |= {f"{prefix}_mean": float(values.mean()), f"{prefix}_std": float(values.std())}
        return cls(**statistics)

    def normalize(self, mu: ArrayLike, sigma: ArrayLike) -> tuple[NDArray[np.float64], ...]:
        """Targets [N] of mu, sigma and sigma_within: z-scores of mu, log(1 + sigma) and log(1 + sigma)."""
        mu, log = np.asarray(mu, dtype=np.float64), np.log1p(np.asarray(sigma, dtype=np.float64))
        return (
            (mu - self.mu_mean) / self.mu_std,
            (log - self.sigma_log_mean) / self.sigma_log_std,
            (log - self.within_log_mean) / self.within_log_std,
        )
