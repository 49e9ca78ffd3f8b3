"""Shift and scale that follow the answers: stochastic natural gradient of the censored log-t likelihood.

With z = ((ln x - mu) / sigma - shift) / scale and w = (nu + 1) / (nu + z^2), a finished answer moves

    shift <- shift + h scale w z (nu + 3) / (nu + 1),    ln scale <- ln scale + h (w z^2 - 1) (nu + 3) / (2 nu),

where h = max(1 / (n + 20), 1 / memory) falls to a constant, so that old answers are forgotten; n begins again at an
alarm. A cut answer counts with
the score of P(T > z): hazard(z) in place of w z, and z hazard(z) in place of w z^2 - 1.
"""

from __future__ import annotations

import math

from training.drift.student import hazard

_FIRST = 20
_MOST_STEP = 1.0


class RunningCalibration:
    """Shift and scale of one served model, as `Calibration` has them; constant memory.

    Args:
        memory: Outcomes after which an old one has lost most of its weight.
    """

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self.shift = 0.0
        self.scale = 1.0
        self.num_outcomes = 0

    def hurry(self) -> None:
        """Takes the next answers for the first ones: after a change the old ones say nothing."""
        self.num_outcomes = 0

    def update(self, z: float, nu: float, finished: bool) -> None:
        """Takes the residual z = (ln x - mu) / sigma of an answer; of a cut one at its cap."""
        self.num_outcomes += 1
        step = max(1 / (self.num_outcomes + _FIRST), 1 / self._memory)
        own = (z - self.shift) / self.scale
        if finished:
            weight = 1.0 if math.isinf(nu) else (nu + 1) / (nu + own * own)
            by_shift, by_scale = weight * own, weight * own * own - 1
        else:
            rate = hazard(own, nu)
            by_shift, by_scale = rate, own * rate
        shift_gain = 1.0 if math.isinf(nu) else (nu + 3) / (nu + 1)
        scale_gain = 0.5 if math.isinf(nu) else (nu + 3) / (2 * nu)
        self.shift += self.scale * _limited(step * by_shift * shift_gain)
        self.scale = min(max(self.scale * math.exp(_limited(step * by_scale * scale_gain)), 1e-3), 1e3)


def _limited(step: float) -> float:
    return min(max(step, -_MOST_STEP), _MOST_STEP)
