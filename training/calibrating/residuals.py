"""Normalised residuals z = (ln x - mu) / sigma of answers under uncalibrated predictions, and their distribution."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Residuals:
    """Residuals of N answers.

    Attributes:
        z: (ln x - mu) / sigma [N]; of a cut answer at the length it was cut at.
        finished: False: z is a lower bound [N].
        z_cap: (ln cap - mu) / sigma of the answer's prompt, infinite without a cap [N].
        model: Number of the served model, 0 = unknown or not told apart [N].
        prompt: Number of the prompt, equal for equal texts [N].
        row: Number of the row (prompt, served model, temperature) [N].
        nu: Degrees of freedom [N].
    """

    z: FloatArray
    finished: NDArray[np.bool_]
    z_cap: FloatArray
    model: NDArray[np.intp]
    prompt: NDArray[np.intp]
    row: NDArray[np.intp]
    nu: FloatArray

    def __len__(self) -> int:
        return len(self.z)

    def take(self, chosen: NDArray[np.bool_] | NDArray[np.intp]) -> Residuals:
        """Some of the answers."""
        return Residuals(
            self.z[chosen],
            self.finished[chosen],
            self.z_cap[chosen],
            self.model[chosen],
            self.prompt[chosen],
            self.row[chosen],
            self.nu[chosen],
        )

    def moved(self, shift: FloatArray, scale: FloatArray) -> Residuals:
        """Residuals after mu' = mu + shift[m] sigma, sigma' = sigma scale[m]; tables by number of the model."""
        at, by = shift[self.model], scale[self.model]
        return Residuals(
            (self.z - at) / by,
            self.finished,
            (self.z_cap - at) / by,
            self.model,
            self.prompt,
            self.row,
            self.nu,
        )


@dataclass(frozen=True, slots=True)
class CensoredCdf:
    """Kaplan-Meier estimate of a distribution function from values of which some are lower bounds.

    Attributes:
        at: Where it rises, ascending [K].
        value: To what [K]; it never reaches 1 if the largest value is a lower bound.
    """

    at: FloatArray
    value: FloatArray

    @classmethod
    def of(cls, z: FloatArray, finished: NDArray[np.bool_]) -> CensoredCdf:
        """The estimate; a bound at the same place as a value counts as beyond it."""
        at, first = np.unique(z, return_inverse=True)
        ended = np.bincount(first[finished], minlength=len(at))
        leaving = np.bincount(first, minlength=len(at))
        at_risk = len(z) - np.concatenate([[0], np.cumsum(leaving)[:-1]])
        survival = np.cumprod(1 - ended / at_risk)
        rises = ended > 0
        return cls(at[rises], 1 - survival[rises])

    def __call__(self, z: float) -> float:
        """Estimated P(Z <= z)."""
        number = int(np.searchsorted(self.at, z, side="right"))
        return float(self.value[number - 1]) if number else 0.0

    def quantile(self, level: float) -> float:
        """Smallest z with P(Z <= z) >= level; infinite where the data do not reach so far."""
        number = int(np.searchsorted(self.value, level - 1e-12, side="left"))
        return float(self.at[number]) if number < len(self.at) else np.inf
