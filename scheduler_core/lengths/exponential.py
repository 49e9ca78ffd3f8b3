"""The exponential length distribution: P(X > x) = exp(-x/scale); the Weibull with shape 1."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from scheduler_core.lengths.arrays import FloatArray, Rows, parameter
from scheduler_core.lengths.base import LengthDistribution
from scheduler_core.lengths.law import Law
from scheduler_core.lengths.log_gamma_law import LogExponentialLaw


@dataclass(frozen=True, eq=False)
class Exponential(LengthDistribution):
    """Exponential distribution(s) of output length.

    Attributes:
        scale: Mean, > 0, in tokens.

    Raises:
        InputError: The scale is not finite or not positive.
    """

    scale: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", parameter("scale", self.scale, positive=True))

    def _parameters(self) -> dict[str, FloatArray]:
        return {"scale": self.scale}

    def _location_and_spread(self) -> tuple[FloatArray, FloatArray]:
        return np.log(self.scale), np.ones(())

    def _laws(self, parameter: FloatArray) -> Iterator[tuple[Rows, Law]]:
        yield slice(None), LogExponentialLaw()

    def _draws(self, rng: np.random.Generator, size: int | tuple[int, ...]) -> FloatArray:
        return np.asarray(rng.exponential(np.broadcast_to(self.scale, self.shape), size))
