"""The Weibull length distribution: P(X > x) = exp(-(x/scale)^k)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from scheduler_core.lengths.arrays import FloatArray, Rows, broadcast, parameter
from scheduler_core.lengths.base import LengthDistribution
from scheduler_core.lengths.law import Law
from scheduler_core.lengths.log_gamma_law import LogExponentialLaw


@dataclass(frozen=True, eq=False)
class Weibull(LengthDistribution):
    """Weibull distribution(s) of output length; parameters broadcast against each other and the arguments.

    Attributes:
        k: Shape, > 0, dimensionless; below 1 the tail is heavier than an exponential's.
        scale: Quantile of level 1 - 1/e, > 0, in tokens.

    Raises:
        InputError: A parameter is not finite or not positive.
    """

    k: Any
    scale: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "k", parameter("k", self.k, positive=True))
        object.__setattr__(self, "scale", parameter("scale", self.scale, positive=True))
        broadcast(self._parameters())

    def _parameters(self) -> dict[str, FloatArray]:
        return {"k": self.k, "scale": self.scale}

    def _location_and_spread(self) -> tuple[FloatArray, FloatArray]:
        # (X/scale)^k is exponential with mean 1.
        return np.log(self.scale), 1.0 / np.asarray(self.k)

    def _laws(self, parameter: FloatArray) -> Iterator[tuple[Rows, Law]]:
        yield slice(None), LogExponentialLaw()

    def _draws(self, rng: np.random.Generator, size: int | tuple[int, ...]) -> FloatArray:
        return np.asarray(self.scale * rng.weibull(np.broadcast_to(self.k, self.shape), size))
