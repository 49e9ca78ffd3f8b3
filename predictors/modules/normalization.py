"""Scaling of training targets, and back.

Source: TIE, predictor targets: z-score of mu and z-score of log(1 + sigma); SSJF: z-score of ln(1 + tokens); all from
the training split only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scheduler_core.errors import InputError

# Below this standard deviation a target carries no signal and a z-score would only amplify rounding.
MIN_STD = 1e-6


@dataclass(frozen=True, slots=True)
class Normalization:
    """Means and standard deviations of mu (log tokens), log(1 + sigma), log(1 + sigma_within) and ln(1 + tokens).

    Those that no head of a predictor needs stay at 0 and 1.
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
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise InputError(f"normalization, {name}", value, "finite numbers")
            if name.endswith("_std") and value <= 0:
                raise InputError(f"normalization, {name}", value, "numbers > 0")

    @classmethod
    def of(
        cls,
        mu: ArrayLike | None = None,
        sigma: ArrayLike | None = None,
        tokens: ArrayLike | None = None,
        within: ArrayLike | None = None,
    ) -> Normalization:
        """Statistics of training targets; those of an unset one stay at 0 and 1.

        Args:
            mu: Fitted mu [N], log tokens.
            sigma: Fitted sigma [N], log tokens, above 0.
            tokens: Targets of the regression head [M], tokens, at least 0.
            within: Fitted sigma as target of sigma_within [K], log tokens, above 0.

        Raises:
            InputError: Fewer than two targets, or all of them alike, so that there is nothing to learn.
        """
        targets = {
            "mu": mu,
            "sigma_log": None if sigma is None else np.log1p(sigma),
            "regression": None if tokens is None else np.log1p(tokens),
            "within_log": None if within is None else np.log1p(within),
        }
        statistics: dict[str, float] = {}
        for prefix, target in targets.items():
            if target is not None:
                values = np.asarray(target, dtype=np.float64)
                name = {"regression": "output_tokens"}.get(prefix, prefix.partition("_")[0])
                if len(values) < 2:
                    raise InputError(f"values of {name} in the training split", len(values), "at least 2")
                if values.std() < MIN_STD:
                    raise InputError(
                        f"{name} in the training split",
                        float(values[0]),
                        "values that differ between prompts",
                    )
                statistics |= {f"{prefix}_mean": float(values.mean()), f"{prefix}_std": float(values.std())}
        return cls(**statistics)

    @classmethod
    def from_json(cls, content: Mapping[str, object]) -> Normalization:
        """From the content of `normalization.json`.

        Raises:
            InputError: A statistic is missing or not a finite number.
        """
        names = [field.name for field in fields(cls)]
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
        return mu_z, (_log1p(sigma) - self.sigma_log_mean) / self.sigma_log_std

    def normalize_within(self, sigma: ArrayLike) -> NDArray[np.float64]:
        """Training targets of sigma_within: z-scores of log(1 + sigma) [N]."""
        return (_log1p(sigma) - self.within_log_mean) / self.within_log_std


def _log1p(values: ArrayLike) -> NDArray[np.float64]:
    return np.asarray(np.log1p(np.asarray(values, dtype=np.float64)))
