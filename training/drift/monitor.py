"""What is kept of each served model while outcomes stream by."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from training.drift.detector import DriftDetector
from training.drift.outcome import Outcome
from training.drift.recalibration import RunningCalibration
from training.drift.student import cdf

LEVELS = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


class ModelMonitor:
    """Sliding coverage, drift detector and running recalibration of one served model.

    Coverage is always that of the predictions as they came. The detector judges predictions after the recalibration
    that is in use: none at first; at an alarm the running one is put in use and the detector starts again.

    Args:
        window: Outcomes that coverage looks back on, and the memory of the recalibration.
        arl: Least mean number of outcomes to a false alarm.
    """

    def __init__(self, window: int, arl: float) -> None:
        self.num_outcomes = 0
        self.num_cut = 0
        self.num_alarms = 0
        self.detector = DriftDetector(arl)
        self.running = RunningCalibration(window)
        self.in_use = (0.0, 1.0)
        # Of each outcome and level: 1 covered, 0 not covered, None not known because the quantile is beyond the cap.
        self._seen: deque[tuple[int | None, ...]] = deque(maxlen=window)

    def update(self, outcome: Outcome) -> dict[str, Any] | None:
        """Takes an outcome; returns what an alarm says, if there is one."""
        self.num_outcomes += 1
        self.num_cut += not outcome.finished
        low, high, at_length, at_cap = _probabilities(outcome, self.in_use)
        self._seen.append(
            tuple(
                None if at_cap < level else int(outcome.finished and at_length <= level)
                for level in LEVELS.values()
            )
        )
        z = (math.log(outcome.output_tokens) - outcome.mu) / outcome.sigma
        self.running.update(z, outcome.nu, outcome.finished)
        if not self.detector.update(low, high):
            return None
        self.num_alarms += 1
        found = {
            "statistic": self.detector.value,
            "threshold": self.detector.arl,
            "reason": self.detector.reason,
            "outcomes_since_restart": self.detector.num_steps,
            "coverage": self.coverage(),
            "recalibration": self.recalibration(),
        }
        self.in_use = (self.running.shift, self.running.scale)
        self.detector.reset()
        self.running.hurry()
        return found

    def coverage(self) -> dict[str, dict[str, float | int | None]]:
        """Level -> observed coverage over the window (None if unknown), and how many outcomes it is made from."""
        found: dict[str, dict[str, float | int | None]] = {}
        for column, (name, level) in enumerate(LEVELS.items()):
            known = [row[column] for row in self._seen if row[column] is not None]
            estimate = sum(known) / len(known) if known else None  # type: ignore[arg-type]
            found[name] = {"level": level, "estimate": estimate, "num_outcomes": len(known)}
        return found

    def recalibration(self) -> dict[str, float]:
        """Running shift and scale, in the form of `calibrate`'s tables."""
        return {"mu_shift": self.running.shift, "sigma_scale": self.running.scale}

    def state(self) -> dict[str, Any]:
        """All of it as JSON content."""
        return {
            "num_outcomes": self.num_outcomes,
            "num_cut": self.num_cut,
            "num_alarms": self.num_alarms,
            "coverage": self.coverage(),
            "statistic": self.detector.value,
            "threshold": self.detector.arl,
            "recalibration": self.recalibration(),
            "recalibration_in_use": {"mu_shift": self.in_use[0], "sigma_scale": self.in_use[1]},
        }


def _probabilities(outcome: Outcome, in_use: tuple[float, float]) -> tuple[float, float, float, float]:
    """Ends of the interval of u under the recalibrated prediction; F(length) and F(cap) under the original one."""
    shift, scale = in_use

    def place(tokens: float) -> float:
        return (math.log(tokens) - outcome.mu) / outcome.sigma

    def used(tokens: float) -> float:
        return cdf((place(tokens) - shift) / scale, outcome.nu)

    length = float(outcome.output_tokens)
    at_length = cdf(place(length), outcome.nu)
    at_cap = 1.0 if outcome.max_tokens is None else cdf(place(float(outcome.max_tokens)), outcome.nu)
    if not outcome.finished and outcome.max_tokens is None:
        at_cap = at_length
    high = used(length + 0.5) if outcome.finished else 1.0
    return used(length - 0.5), high, at_length, at_cap
