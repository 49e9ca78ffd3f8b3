"""Post-hoc calibration of the predicted distribution: a shift of mu and a scale of sigma for each served model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import ConfigDict

from scheduler_core.errors import InputError


@dataclass(frozen=True, slots=True)
class Calibration:
    """mu' = mu + mu_shift[m] sigma, sigma' = sigma sigma_scale[m], m the served model's number.

    Attributes:
        sigma_scale: Above 0 [num_models + 1]; entry 0 is for an unknown served model (unused where that is the mean over
            the known ones), and for predictors that are not conditioned on it.
        mu_shift: In units of the uncalibrated sigma [num_models + 1].
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")

    sigma_scale: tuple[float, ...]
    mu_shift: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("sigma_scale", "mu_shift"):
            object.__setattr__(self, name, tuple(float(value) for value in getattr(self, name)))
        if not self.sigma_scale or not all(0 < value < math.inf for value in self.sigma_scale):
            raise InputError("sigma_scale", self.sigma_scale, "finite numbers > 0")
        if len(self.mu_shift) != len(self.sigma_scale) or not all(map(math.isfinite, self.mu_shift)):
            raise InputError("mu_shift", self.mu_shift, f"{len(self.sigma_scale)} finite numbers")

    @classmethod
    def identity(cls, num_models: int = 0) -> Calibration:
        """No shift, scale 1."""
        return cls((1.0,) * (num_models + 1), (0.0,) * (num_models + 1))

    @property
    def num_models(self) -> int:
        """Served models without the unknown one."""
        return len(self.sigma_scale) - 1

    @property
    def is_identity(self) -> bool:
        """Whether it changes nothing."""
        return self == Calibration.identity(self.num_models)

    def to_json(self) -> dict[str, Any]:
        """Lists in place of tuples."""
        return {"sigma_scale": list(self.sigma_scale), "mu_shift": list(self.mu_shift)}
