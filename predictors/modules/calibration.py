"""Post-hoc calibration of the predicted distribution: a shift of mu and a scale of sigma for each served model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from scheduler_core.errors import InputError


@dataclass(frozen=True, slots=True)
class Calibration:
    """mu' = mu + mu_shift[m] sigma, sigma' = sigma sigma_scale[m], m the served model's number.

    Attributes:
        sigma_scale: Above 0 [num_models + 1]; entry 0 is for an unknown served model, and for predictors that are
            not conditioned on it.
        mu_shift: In units of the uncalibrated sigma [num_models + 1].
    """

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

    @classmethod
    def from_json(cls, content: object) -> Calibration:
        """From the content of `to_json`; raises InputError if a table is missing or wrong."""
        if not isinstance(content, Mapping) or set(content) != {"sigma_scale", "mu_shift"}:
            raise InputError("calibration", content, "a JSON object with sigma_scale and mu_shift")
        try:
            return cls(**content)
        except (TypeError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError("calibration", content, "tables of numbers") from error

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {"sigma_scale": list(self.sigma_scale), "mu_shift": list(self.mu_shift)}


class CalibrationTable(nn.Module):
    """A `Calibration` inside the graph."""

    sigma_scale: Tensor
    mu_shift: Tensor

    def __init__(self, calibration: Calibration) -> None:
        super().__init__()
        # Not in the weights file: config.json is the one place that holds them.
        for name in ("sigma_scale", "mu_shift"):
            table = torch.tensor(getattr(calibration, name), dtype=torch.float32)
            self.register_buffer(name, table, persistent=False)

    def forward(self, mu: Tensor, sigma: Tensor, served_model: Tensor | None) -> tuple[Tensor, Tensor]:
        """mu [B], sigma [B] in log tokens, numbers of served models int64 [B] (None: entry 0) -> mu' [B], sigma' [B]."""
        if served_model is None:
            shift, scale = self.mu_shift[0], self.sigma_scale[0]
        else:
            shift, scale = self.mu_shift[served_model], self.sigma_scale[served_model]
        return mu + shift * sigma, sigma * scale
