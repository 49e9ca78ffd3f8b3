"""The gamma length distribution: f(x) = x^(k-1) exp(-x/theta) / (Gamma(k) theta^k), mean k theta."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from scheduler_core.lengths.arrays import FloatArray, Rows, broadcast, parameter
from scheduler_core.lengths.base import LengthDistribution
from scheduler_core.lengths.law import Law
from scheduler_core.lengths.log_gamma_law import LogGammaLaw


@dataclass(frozen=True, eq=False)
class Gamma(LengthDistribution):
    """Gamma distribution(s) of output length; parameters broadcast against each other and the arguments.

    Attributes:
        k: Shape, > 0, dimensionless.
        scale: theta > 0, in tokens; the mean is k theta.

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
        return np.log(self.k) + np.log(self.scale), np.ones(())

    def _law_parameter(self) -> FloatArray:
        return np.asarray(self.k)

    def _laws(self, parameter: FloatArray) -> Iterator[tuple[Rows, Law]]:
        yield slice(None), LogGammaLaw(parameter)

    def _draws(self, rng: np.random.Generator, size: int | tuple[int, ...]) -> FloatArray:
        return np.asarray(
            rng.gamma(np.broadcast_to(self.k, self.shape), np.broadcast_to(self.scale, self.shape), size)
        )
