"""Monitor of one served model: drift test, sliding coverage, and the correction that would restore the predictions."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator

from data_gen.feedback_record import Mu, Nu, Sigma, Strict
from scheduler_core.drift_detector import DriftDetector
from scheduler_core.lengths.student_t import student_t_cdf
from scheduler_core.online_calibration import OnlineCalibration, OnlineCalibrationConfig
from scheduler_core.predictions import LengthPrediction

Length = Annotated[int, Field(ge=1, lt=2**53)]


class ObservedOutput(Strict):
    """A prediction with the length of its output.

    Attributes:
        mu, sigma, nu: Predicted parameters of the log-t distribution, log tokens.
        output_tokens: Length of the output; of a truncated one the length it was truncated at.
        max_tokens: Limit of the output, at least output_tokens; None if there is none.
        prompt_tokens: Length of the prompt; None where it is not known.
        finished: False where it was truncated; by default whether output_tokens is below max_tokens.
        served_model: Name of the model; None if it has none.
        time: In the unit of the stream, if it has one; it is only repeated.
    """

    mu: Mu
    sigma: Sigma
    nu: Nu = 3.5
    output_tokens: Length
    max_tokens: Length | None = None
    prompt_tokens: Annotated[int, Field(ge=0, lt=2**53)] | None = None
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

    @property
    def prediction(self) -> LengthPrediction:
        """The predicted distribution."""
        return LengthPrediction(self.mu, self.sigma, self.nu)


class ModelMonitor:
    """Drift test and running calibration of one served model; constant memory.

    The test is of the predictions after the calibration in use: none at first; at an alarm the running one is put in
    use as it is then, and the test starts again.

    Args:
        window: Outputs that coverage is computed over, and the memory of the calibration; at least 50.
        arl: Lower bound of the mean number of outputs to a false alarm.
    """

    def __init__(self, window: int, arl: float) -> None:
        self._config = OnlineCalibrationConfig(memory=window, window=window, arl=arl)
        self.num_outcomes = self.num_alarms = 0
        self.detector = DriftDetector(arl)
        self.running = OnlineCalibration(self._config)
        self.in_use = OnlineCalibration(self._config)

    def update(self, output: ObservedOutput) -> dict[str, Any] | None:
        """Updates with an output; returns the content of an alarm, if there is one."""
        self.num_outcomes += 1
        in_use = self.in_use.correct("", output.prediction, output.prompt_tokens)
        low, high = (
            student_t_cdf((math.log(output.output_tokens + half) - in_use.mu) / in_use.sigma, in_use.nu)
            for half in (-0.5, 0.5)
        )
        self.running.observe(
            "",
            output.prediction,
            output.prompt_tokens,
            output.output_tokens,
            finished=output.is_finished,
            max_tokens=output.max_tokens,
        )
        if not self.detector.update(low, high if output.is_finished else 1.0):
            return None
        self.num_alarms += 1
        alarm = {
            "statistic": self.detector.value,
            "threshold": self.detector.arl,
            "reason": self.detector.reason,
            "outcomes_since_restart": self.detector.num_steps,
            "calibration": self.running.metrics(""),
        }
        self.in_use.restore(self.running.state())
        self.detector.reset()
        return alarm

    def state(self) -> dict[str, Any]:
        """All of it as JSON content."""
        return {
            "num_outcomes": self.num_outcomes,
            "num_alarms": self.num_alarms,
            "statistic": self.detector.value,
            "threshold": self.detector.arl,
            "calibration": self.running.metrics(""),
        }
