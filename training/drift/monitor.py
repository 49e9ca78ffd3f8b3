"""Monitor of one served model: sliding coverage, drift detector, running recalibration.

The recalibration follows the outputs by the stochastic natural gradient of the censored log-t likelihood.
With z = ((ln x - mu) / sigma - shift) / scale and w = (nu + 1) / (nu + z^2), a finished output moves

    shift <- shift + h scale w z (nu + 3) / (nu + 1),    ln scale <- ln scale + h (w z^2 - 1) (nu + 3) / (2 nu),

where h = max(1 / (n + 20), 1 / memory) falls to a constant, so that old outputs are forgotten; n starts again at an
alarm. A truncated output counts with the score of P(T > z): hazard(z) in place of w z, and z hazard(z) in place of w z^2 - 1.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator
from scipy import special

from data_gen.feedback_record import Mu, Nu, Sigma, Strict
from scheduler_core.lengths.student_t import student_t_hazard
from training.drift.detector import DriftDetector

LEVELS = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
UNNAMED = "(unnamed)"
Length = Annotated[int, Field(ge=1, lt=2**53)]
_FIRST = 20
_MOST_STEP = 1.0


class ObservedOutput(Strict):
    """A prediction with the length of its output.

    Attributes:
        mu, sigma, nu: Predicted parameters of the log-t distribution, log tokens.
        output_tokens: Length of the output; of a truncated one the length it was truncated at.
        max_tokens: Limit of the output, at least output_tokens; None if there is none.
        finished: False where it was truncated; by default whether output_tokens is below max_tokens.
        served_model: Name of the model.
        time: In the unit of the stream; None if it has none.
    """

    mu: Mu
    sigma: Sigma
    nu: Nu = 3.5
    output_tokens: Length
    max_tokens: Length | None = None
    finished: bool = Field(default=None, validate_default=True)
    served_model: str = Field(default=UNNAMED, min_length=1)
    time: float | str | None = None

    @field_validator("max_tokens")
    @classmethod
    def _not_exceeded(cls, value: int | None, info: ValidationInfo) -> int | None:
        tokens = info.data.get("output_tokens", 0)
        if value is not None and value < tokens:
            raise ValueError(f"at least output_tokens = {tokens}")
        return value

    @field_validator("finished", mode="before")
    @classmethod
    def _below_max_tokens(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None:
            return value
        limit = info.data.get("max_tokens")
        return limit is None or info.data.get("output_tokens", 0) < limit

    @field_validator("served_model", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        return UNNAMED if value is None else value

    @field_validator("time", mode="plain")
    @classmethod
    def _number_or_text(cls, value: Any) -> Any:
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 2**63:
            raise ValueError("a number below 2**63 or text")
        return value


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

    def reset_rate(self) -> None:
        """Resets the learning rate: after a change the old outputs do not count."""
        self.num_outcomes = 0

    def update(self, z: float, nu: float, finished: bool) -> None:
        """Updates with the residual z = (ln x - mu) / sigma of an output; of a truncated one at max_tokens."""
        self.num_outcomes += 1
        step = max(1 / (self.num_outcomes + _FIRST), 1 / self._memory)
        own = (z - self.shift) / self.scale
        if finished:
            weight = 1.0 if math.isinf(nu) else (nu + 1) / (nu + own * own)
            by_shift, by_scale = weight * own, weight * own * own - 1
        else:
            rate = student_t_hazard(own, nu)
            by_shift, by_scale = rate, own * rate
        shift_gain = 1.0 if math.isinf(nu) else (nu + 3) / (nu + 1)
        scale_gain = 0.5 if math.isinf(nu) else (nu + 3) / (2 * nu)
        self.shift += self.scale * _limited(step * by_shift * shift_gain)
        self.scale = min(max(self.scale * math.exp(_limited(step * by_scale * scale_gain)), 1e-3), 1e3)


def _limited(step: float) -> float:
    return min(max(step, -_MOST_STEP), _MOST_STEP)


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
        self.num_truncated += not output.finished
        low, high, at_length, at_limit = _probabilities(output, self.in_use)
        self._covered.append(
            tuple(
                None if at_limit < level else int(output.finished and at_length <= level)
                for level in LEVELS.values()
            )
        )
        z = (math.log(output.output_tokens) - output.mu) / output.sigma
        self.running.update(z, output.nu, output.finished)
        if not self.detector.update(low, high):
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
        self.running.reset_rate()
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


def _probabilities(output: ObservedOutput, in_use: tuple[float, float]) -> tuple[float, float, float, float]:
    """Ends of the interval of u under the recalibrated prediction; F(length) and F(max_tokens) under the original one."""
    shift, scale = in_use

    def residual(tokens: float) -> float:
        return (math.log(tokens) - output.mu) / output.sigma

    def recalibrated(tokens: float) -> float:
        return _cdf((residual(tokens) - shift) / scale, output.nu)

    length = float(output.output_tokens)
    at_length = _cdf(residual(length), output.nu)
    at_limit = 1.0 if output.max_tokens is None else _cdf(residual(float(output.max_tokens)), output.nu)
    if not output.finished and output.max_tokens is None:
        at_limit = at_length
    high = recalibrated(length + 0.5) if output.finished else 1.0
    return recalibrated(length - 0.5), high, at_length, at_limit


def _cdf(z: float, nu: float) -> float:
    """Student's t of one number by scipy: `student_t_cdf` takes 90 times as long."""
    return float(special.ndtr(z) if math.isinf(nu) else special.stdtr(nu, z))
