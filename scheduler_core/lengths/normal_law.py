"""The standard normal: the limit nu -> infinity of Student's t. The coordinate is T itself."""

from __future__ import annotations

import math

import numpy as np

from scheduler_core.lengths.arrays import FloatArray
from scheduler_core.lengths.law import Law

#: ln of the density's constant, 1/sqrt(2 pi).
LOG_NORMALISER = -0.5 * math.log(2.0 * math.pi)


class NormalLaw(Law):
    """The standard normal."""

    def __init__(self) -> None:
        self.split = np.zeros((1, 1))

    def coordinate(self, height: FloatArray) -> FloatArray:
        return height

    def height(self, t: FloatArray) -> FloatArray:
        return t

    def rise(self, t: FloatArray, w: FloatArray) -> FloatArray:
        return w

    def travel(self, t: FloatArray, rise: FloatArray) -> FloatArray:
        return rise

    def log_stretch(self, t: FloatArray) -> FloatArray:
        return np.zeros_like(t)

    def log_density(self, t: FloatArray) -> FloatArray:
        return np.asarray(LOG_NORMALISER - 0.5 * t * t)

    def drop(self, t: FloatArray, w: FloatArray) -> FloatArray:
        return np.asarray(-w * (t + 0.5 * w))

    def reach(self, t: FloatArray, side: FloatArray | float, cut: FloatArray | float) -> FloatArray:
        steep = np.abs(t)
        return np.asarray(2.0 * cut / (steep + np.sqrt(steep * steep + 2.0 * cut) + 1e-300))

    def pieces(
        self, spread: FloatArray, start: FloatArray, origin: FloatArray, end: FloatArray
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        # exp(spread t) q(t) is the density of a normal with mean `spread`, up to a constant.
        middle = np.minimum(np.maximum(spread, start), end)
        width = self.width(middle - spread, 1.0)
        return np.maximum(start, middle - width), middle, np.minimum(end, middle + width)
