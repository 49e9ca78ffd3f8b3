"""How mu and sigma are scaled for training, and back.

Source: TIE, predictor targets: z-score of mu and z-score of log(1 + sigma), from the training split only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scheduler_core.errors import InputError

# Below this spread a target carries no signal and a z-score would only amplify rounding.
MIN_STD = 1e-6


@dataclass(frozen=True, slots=True)
class Normalization:
    """Means and standard deviations of mu (log tokens) and of log(1 + sigma)."""

    mu_mean: float
    mu_std: float
    sigma_log_mean: float
    sigma_log_std: float

    def __post_init__(self) -> None:
        for name in ("mu_mean", "mu_std", "sigma_log_mean", "sigma_log_std"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise InputError(f"normalization, {name}", value, "a finite number")
        for name in ("mu_std", "sigma_log_std"):
            if getattr(self, name) <= 0:
                raise InputError(f"normalization, {name}", getattr(self, name), "a number above 0")

    @classmethod
    def of(cls, mu: ArrayLike, sigma: ArrayLike) -> Normalization:
        """Statistics of fitted parameters.

        Args:
            mu: Fitted mu [N], log tokens.
            sigma: Fitted sigma [N], log tokens, above 0.

        Raises:
            InputError: Fewer than two fits, or all of them alike, so that there is nothing to learn.
        """
        mus = np.asarray(mu, dtype=np.float64)
        logs = np.log1p(np.asarray(sigma, dtype=np.float64))
        if len(mus) < 2:
            raise InputError("fits in the training split", len(mus), "at least 2")
        for name, values in (("mu", mus), ("sigma", logs)):
            if values.std() < MIN_STD:
                raise InputError(
                    f"column {name} in the training split",
                    float(values[0]),
                    "values that differ between prompts",
                )
        return cls(float(mus.mean()), float(mus.std()), float(logs.mean()), float(logs.std()))

    @classmethod
    def from_json(cls, content: Mapping[str, object]) -> Normalization:
        """From the content of `normalization.json`.

        Raises:
            InputError: A statistic is missing or not a finite number.
        """
        names = ("mu_mean", "mu_std", "sigma_log_mean", "sigma_log_std")
        missing = [name for name in names if name not in content]
        if missing:
            raise InputError("normalization", sorted(content), f"also {', '.join(missing)}")
        return cls(*(content[name] for name in names))  # type: ignore[arg-type]

    def to_json(self) -> dict[str, float]:
        """The content of `normalization.json`."""
        return asdict(self)

    def normalize(self, mu: ArrayLike, sigma: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Training targets: z-scores of mu [N] and of log(1 + sigma) [N]."""
        mu_z = (np.asarray(mu, dtype=np.float64) - self.mu_mean) / self.mu_std
        sigma_z = (np.log1p(np.asarray(sigma, dtype=np.float64)) - self.sigma_log_mean) / self.sigma_log_std
        return mu_z, sigma_z
