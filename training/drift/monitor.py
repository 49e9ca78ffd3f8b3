"""Monitor of one served model: sliding coverage, drift detector, running recalibration.

The recalibration follows the outputs by the stochastic natural gradient of the censored log-t likelihood.
With z = ((ln x - mu) / sigma - shift) / scale and w = (nu + 1) / (nu + z^2), a finished output moves

    shift <- shift + h scale w z (nu + 3) / (nu + 1),    ln scale <- ln scale + h (w z^2 - 1) (nu + 3) / (2 nu),

where h = max(1 / (n + 20), 1 / memory) falls to a constant, so that old outputs are forgotten; n starts again at an
alarm. A truncated output counts with the score of P(T > z): hazard(z) in place of w z, and z hazard(z) in place of w z^2 - 1.

The sequential test is of u ~ uniform on [0, 1], u = F(x): are predicted distributions still right?

Bets. Each bet j multiplies by b_j(u) = 1 + l g(u), where g has mean 0 over [0, 1] and values in [-1, 1], 0 < |l| < 1, so
that E b_j(u) = 1 while the predictions are right. Three g, each for both signs of l:

- 2 u - 1: outputs have become longer or shorter;
- 2 |2 u - 1| - 1: they vary more or less than predicted;
- 1 if u > 0.9 and -1/9 else: the long tail has changed.

Of u only an interval [a, b] is observed: a length of x tokens stands for [F(x - 1/2), F(x + 1/2)], a truncated output
for [F(max_tokens - 1/2), 1]. A bet then multiplies by its mean over the interval, which is its conditional expectation and so keeps
the mean of 1.

Alarm. R_j <- (1 + R_j) b_j(u), from 0 (Shiryaev-Roberts: a bet opened at every step); S = mean of the R_j. S - t is a
martingale while predictions are right, so with an alarm at S >= A the mean time to a false alarm is at least A,
whatever nu, mu, sigma and max_tokens the requests have (e-detectors: Shin, Ramdas, Rinaldo 2023). A is the option `arl`.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationInfo, field_validator
from scipy import special

from data_gen.feedback_record import Mu, Nu, Sigma, Strict
from scheduler_core.lengths.student_t import student_t_hazard

FloatArray = NDArray[np.float64]
STAKES = (0.05, 0.15, 0.4, 0.8)
TAIL = 0.9
KINDS = ("longer", "shorter", "wider", "narrower", "more_tail", "less_tail")


def interval_means(low: float, high: float) -> tuple[float, float, float]:
    """Means of the three g over [low, high], 0 <= low <= high <= 1."""
    if high - low < 1e-9:
        u = 0.5 * (low + high)
        return 2 * u - 1, 2 * abs(2 * u - 1) - 1, (1.0 if u > TAIL else 0.0) * 10 / 9 - 1 / 9
    width = high - low
    beyond = max(high - max(low, TAIL), 0.0) / width
    return low + high - 1, (_scale_integral(high) - _scale_integral(low)) / width, beyond * 10 / 9 - 1 / 9


def _scale_integral(u: float) -> float:
    """Integral of 2 |2 v - 1| - 1 from 0 to u."""
    return u - 2 * u * u if u <= 0.5 else 2 * u * u - 3 * u + 1


class DriftDetector:
    """The test of one served model; constant memory.

    Args:
        arl: Alarm at this value of S: the mean number of outcomes to a false alarm is at least that.

    Attributes:
        value: S.
        num_steps: Outcomes since the start or the last alarm.
    """

    def __init__(self, arl: float) -> None:
        self.arl = arl
        stakes = np.array(STAKES)
        self._stakes = np.stack([sign * stakes for _ in range(3) for sign in (1.0, -1.0)])
        self.reset()

    def reset(self) -> None:
        """Starts the test again."""
        self._sums = np.zeros_like(self._stakes)
        self.value = 0.0
        self.num_steps = 0

    def update(self, low: float, high: float) -> bool:
        """Updates the test with an interval that holds u; returns whether there is an alarm.

        Args:
            low, high: Ends of the interval.
        """
        location, scale, tail = interval_means(low, high)
        gains = np.array([location, location, scale, scale, tail, tail])[:, None]
        # Far beyond the alarm; keeps the sums finite.
        self._sums = np.minimum((1.0 + self._sums) * (1.0 + self._stakes * gains), 1e100)
        self.value = float(self._sums.mean())
        self.num_steps += 1
        return self.value >= self.arl

    @property
    def reason(self) -> str:
        """The kind of bet with the largest gain."""
        return KINDS[int(np.argmax(self._sums.sum(axis=1)))]


LEVELS = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
Length = Annotated[int, Field(ge=1, lt=2**53)]
_FIRST = 20


class ObservedOutput(Strict):
    """A prediction with the length of its output.

    Attributes:
        mu, sigma, nu: Predicted parameters of the log-t distribution, log tokens.
        output_tokens: Length of the output; of a truncated one the length it was truncated at.
        max_tokens: Limit of the output, at least output_tokens; None if there is none.
        finished: False where it was truncated; by default whether output_tokens is below max_tokens.
        served_model: Name of the model; None if it has none.
        time: In the unit of the stream, if it has one; it is only repeated.
    """

    mu: Mu
    sigma: Sigma
    nu: Nu = 3.5
    output_tokens: Length
    max_tokens: Length | None = None
    finished: bool | None = None
    served_model: Annotated[str, Field(min_length=1)] | None = None
    time: Any = None

    @field_validator("max_tokens")
    @classmethod
    def _not_exceeded(cls, value: int | None, info: ValidationInfo) -> int | None:
        tokens = info.data.get("output_tokens", 0)
        if value is not None and value < tokens:
            raise ValueError(f"at least output_tokens = {tokens}")
        return value

    @property
    def is_finished(self) -> bool:
        """Whether the output was not truncated."""
        if self.finished is None:
            return self.max_tokens is None or self.output_tokens < self.max_tokens
        return self.finished


class RunningCalibration:
    """Shift and scale of one served model, as `Calibration` has them; constant memory.

    Args:
        memory: Number of outputs after which an old one has lost most of its weight.
    """

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self.shift = 0.0
        self.scale = 1.0
        self.num_outcomes = 0

    def update(self, z: float, nu: float, finished: bool) -> None:
        """Updates with the residual z = (ln x - mu) / sigma of an output; of a truncated one at max_tokens."""
        self.num_outcomes += 1
        step = max(1 / (self.num_outcomes + _FIRST), 1 / self._memory)
        own = (z - self.shift) / self.scale
        if finished:
            weight = (nu + 1) / (nu + own * own)
            by_shift, by_scale = weight * own, weight * own * own - 1
        else:
            rate = student_t_hazard(own, nu)
            by_shift, by_scale = rate, own * rate
        self.shift += self.scale * min(max(step * by_shift * (nu + 3) / (nu + 1), -1.0), 1.0)
        growth = math.exp(min(max(step * by_scale * (nu + 3) / (2 * nu), -1.0), 1.0))
        self.scale = min(max(self.scale * growth, 1e-3), 1e3)


class ModelMonitor:
    """Sliding coverage, drift detector and running recalibration of one served model.

    Coverage is that of the original predictions. The detector tests predictions after the recalibration in use: none at
    first; at an alarm the running one is put in use and the detector starts again.

    Args:
        window: Outputs that coverage is computed over, and the memory of the recalibration.
        arl: Lower bound of the mean number of outputs to a false alarm.
    """

    def __init__(self, window: int, arl: float) -> None:
        self.num_outcomes = 0
        self.num_truncated = 0
        self.num_alarms = 0
        self.detector = DriftDetector(arl)
        self.running = RunningCalibration(window)
        self.in_use = (0.0, 1.0)
        # By output and level: 1 covered, 0 not covered, None where the quantile is beyond max_tokens.
        self._covered: deque[tuple[int | None, ...]] = deque(maxlen=window)

    def update(self, output: ObservedOutput) -> dict[str, Any] | None:
        """Updates with an output; returns the content of an alarm, if there is one."""
        self.num_outcomes += 1
        self.num_truncated += not output.is_finished
        finished, tokens, nu = output.is_finished, output.output_tokens, output.nu

        def residual(length: float) -> float:
            return (math.log(length) - output.mu) / output.sigma

        # scipy's functions of one number: `student_t_cdf` takes 90 times as long.
        at_length, at_limit = special.stdtr(nu, residual(tokens)), 1.0
        if output.max_tokens is not None or not finished:
            at_limit = special.stdtr(nu, residual(output.max_tokens or tokens))
        self._covered.append(
            tuple(
                None if at_limit < level else int(finished and at_length <= level)
                for level in LEVELS.values()
            )
        )
        shift, scale = self.in_use
        low, high = (special.stdtr(nu, (residual(tokens + half) - shift) / scale) for half in (-0.5, 0.5))
        self.running.update(residual(tokens), nu, finished)
        if not self.detector.update(low, high if finished else 1.0):
            return None
        self.num_alarms += 1
        alarm = {
            "statistic": self.detector.value,
            "threshold": self.detector.arl,
            "reason": self.detector.reason,
            "outcomes_since_restart": self.detector.num_steps,
            "coverage": self.coverage(),
            "recalibration": self.recalibration(),
        }
        self.in_use = (self.running.shift, self.running.scale)
        self.detector.reset()
        self.running.num_outcomes = 0  # after a change the old outputs do not count
        return alarm

    def coverage(self) -> dict[str, dict[str, float | int | None]]:
        """Level -> observed coverage over the window (None if unknown), and the number of outputs behind it."""
        coverage: dict[str, dict[str, float | int | None]] = {}
        for column, (name, level) in enumerate(LEVELS.items()):
            flags = [row[column] for row in self._covered if row[column] is not None]
            estimate = sum(flags) / len(flags) if flags else None  # type: ignore[arg-type]
            coverage[name] = {"level": level, "estimate": estimate, "num_outcomes": len(flags)}
        return coverage

    def recalibration(self) -> dict[str, float]:
        """Running shift and scale, with the keys of `calibrate`."""
        return {"mu_shift": self.running.shift, "sigma_scale": self.running.scale}

    def state(self) -> dict[str, Any]:
        """All of it as JSON content."""
        return {
            "num_outcomes": self.num_outcomes,
            "num_truncated": self.num_truncated,
            "num_alarms": self.num_alarms,
            "coverage": self.coverage(),
            "statistic": self.detector.value,
            "threshold": self.detector.arl,
            "recalibration": self.recalibration(),
            "recalibration_in_use": {"mu_shift": self.in_use[0], "sigma_scale": self.in_use[1]},
        }
