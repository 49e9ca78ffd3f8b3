"""What a predictor must beat: predictions that need no model, made from the training split alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler_core.errors import InputError
from training.fitting.estimate import Sample, estimate
from training.fitting.families import family_of
from training.fitting.fits import FittedGroups

FloatArray = NDArray[np.float64]
SIGMA_FLOOR = 1e-6


@dataclass(frozen=True, slots=True)
class Baselines:
    """Parameters of the three baselines; lengths in log tokens, prompts in ln(1 + characters).

    Attributes:
        constant_mu, constant_sigma: Means of the fitted mu and log(1 + sigma): the best constant guess of parameters.
        marginal_mu, marginal_sigma: One distribution fitted to all answers of all prompts.
        mu_intercept, mu_slope: Least-squares line of mu over the prompt's length.
        sigma_log_intercept, sigma_log_slope: The same of log(1 + sigma).
    """

    constant_mu: float
    constant_sigma: float
    marginal_mu: float
    marginal_sigma: float
    mu_intercept: float
    mu_slope: float
    sigma_log_intercept: float
    sigma_log_slope: float

    @classmethod
    def of(cls, fits: FittedGroups, prompts: Sequence[str]) -> Baselines:
        """Baselines of the training split.

        Args:
            fits: Fitted groups [G] that are used as targets, G >= 2.
            prompts: Their prompts [G].
        """
        logs = np.log1p(fits.sigma)
        groups = fits.groups
        everything = np.array([0, len(groups.flat_lengths)])
        pooled = estimate(
            Sample.of(groups.flat_lengths, groups.flat_finished, everything), family_of("log-t", fits.nu)
        ).solution
        mu_slope, mu_intercept = _line(_size(prompts), fits.mu)
        sigma_slope, sigma_intercept = _line(_size(prompts), logs)
        return cls(
            constant_mu=float(fits.mu.mean()),
            constant_sigma=float(np.expm1(logs.mean())),
            marginal_mu=float(pooled.m[0]),
            marginal_sigma=float(np.exp(pooled.s[0])),
            mu_intercept=mu_intercept,
            mu_slope=mu_slope,
            sigma_log_intercept=sigma_intercept,
            sigma_log_slope=sigma_slope,
        )

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Baselines:
        """From what `to_json` gave.

        Raises:
            InputError: A number is missing.
        """
        names = [name for name in cls.__dataclass_fields__ if not isinstance(content.get(name), int | float)]
        if names:
            raise InputError("baselines", sorted(content), f"numbers {', '.join(names)}")
        return cls(**{name: float(content[name]) for name in cls.__dataclass_fields__})

    def to_json(self) -> dict[str, float]:
        """JSON content."""
        return asdict(self)

    def predict(self, prompts: Sequence[str]) -> dict[str, tuple[FloatArray, FloatArray]]:
        """Name of the baseline -> (mu [N], sigma [N])."""
        ones = np.ones(len(prompts))
        size = _size(prompts)
        by_size = np.expm1(self.sigma_log_intercept + self.sigma_log_slope * size)
        return {
            "constant": (self.constant_mu * ones, self.constant_sigma * ones),
            "marginal": (self.marginal_mu * ones, self.marginal_sigma * ones),
            "prompt_length": (self.mu_intercept + self.mu_slope * size, np.maximum(by_size, SIGMA_FLOOR)),
        }


def _size(prompts: Sequence[str]) -> FloatArray:
    return np.log1p(np.array([len(prompt) for prompt in prompts], dtype=np.float64))


def _line(x: FloatArray, y: FloatArray) -> tuple[float, float]:
    """Slope and intercept of the least-squares line; slope 0 where x does not vary."""
    centred = x - x.mean()
    spread = float((centred**2).sum())
    slope = float((centred * y).sum()) / spread if spread > 1e-12 else 0.0
    return slope, float(y.mean()) - slope * float(x.mean())
