"""The command `evaluate-stream`: raise alarms when the outputs of a live stream drift from their predictions.

Reads JSON lines and writes events as JSON lines:

| event | when | keys in addition to event, line, served_model, time |
|---|---|---|
| alarm | the detector of a served model fires | statistic, threshold, reason, outcomes_since_restart, calibration |
| state | every `every` outcomes of a served model, and at the end | see `ModelMonitor.state` |
| bad_line | a line cannot be used | field, value, allowed |
| end | the stream ends | num_lines, num_outcomes, num_bad_lines, bad_lines by field, num_alarms |
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import IO, Annotated, Any

from pydantic import Field, ValidationInfo, field_validator

from data_gen.feedback_record import (
    FORMAT,
    FeedbackRecord,
    Mu,
    Nu,
    Quantiles,
    Sigma,
    Strict,
    bounded_lines,
    parse_object,
    validated,
)
from scheduler_core.errors import InputError
from scheduler_core.prediction.drift import DriftDetector
from scheduler_core.prediction.online_calibration import (
    MAX_WINDOW,
    MIN_OUTPUTS,
    OnlineCalibration,
    OnlineCalibrationConfig,
)
from scheduler_core.prediction.predictions import LengthPrediction
from scheduler_core.ranges import FINITE, INTEGERS, check_ranges
from scheduler_core.shell.command import command
from scheduler_core.shell.files import existing_file, writable_target
from training.correcting.feedback import pair

#: Name of the monitor that served models beyond `max_models` share.
OTHERS = "(others)"
#: Longer lines are not parsed.
MAX_LINE = 1_000_000
UNNAMED = "(unnamed)"


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """Monitor predictions against their outputs for each served model: coverage over a sliding window, a drift test and a running calibration."""

    INPUTS = ("stream",)
    OUTPUTS = ("out",)

    stream: str
    """File of JSON lines, or - for standard input. Keys: mu, sigma, output_tokens; optional nu, finished, served_model, prompt_tokens, max_tokens, time."""
    out: str = "-"
    """File of JSON lines to write, or - for standard output."""
    overwrite: bool = False
    """Replace files at the outputs."""
    window: int = 1000
    """Number of outputs in the sliding window of coverage and calibration."""
    arl: float = 100_000
    """Lower bound of the mean number of outputs of a served model until a false alarm (average run length)."""
    every: int = 1000
    """Number of outputs of a served model between two state events."""
    max_models: int = 1000
    """Maximum number of served models with separate monitors; further models share one."""

    def __post_init__(self) -> None:
        integers = {"window": (MIN_OUTPUTS, MAX_WINDOW), "every": (1, INTEGERS), "max_models": (1, INTEGERS)}
        check_ranges(self, arl=(10.0, FINITE), **integers)


Length = Annotated[int, Field(ge=1, lt=2**53)]


class ObservedOutput(Strict):
    """A prediction and the observed output length."""

    # mu, sigma, nu: predicted parameters of the log-t distribution, log tokens.
    mu: Mu
    sigma: Sigma
    nu: Nu = 3.5
    quantiles: Quantiles = ()  # predicted quantiles of ln tokens, see `LengthPrediction`; empty: log-t
    output_tokens: Length  # length of the output; the truncated length if it was truncated
    max_tokens: Length | None = None  # limit of the output, at least output_tokens; None if unlimited
    # Length of the prompt; None if unknown.
    prompt_tokens: Annotated[int, Field(ge=0, lt=2**53)] | None = None
    # False if the output was truncated; None: derived from output_tokens < max_tokens.
    finished: bool | None = None
    served_model: Annotated[str, Field(min_length=1)] | None = None  # None if unnamed
    time: Any = None  # copied to the events; any unit

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
        return LengthPrediction(self.mu, self.sigma, self.nu, quantiles=self.quantiles)


class ModelMonitor:
    """Drift test and running calibration of one served model; constant memory.

    The test applies to predictions corrected by the calibration in use, initially the identity. At an alarm the current
    running calibration is put in use, and the test restarts.

    Args:
        window: Number of outputs in the sliding window of coverage and calibration; at least 50.
        arl: Lower bound of the mean number of outputs until a false alarm.
    """

    def __init__(self, window: int, arl: float) -> None:
        self._config = OnlineCalibrationConfig(memory=window, window=window, arl=arl)
        self.num_outcomes = self.num_alarms = 0
        self.detector = DriftDetector(arl)
        self.running = OnlineCalibration(self._config)
        self.in_use = OnlineCalibration(self._config)

    def update(self, output: ObservedOutput) -> dict[str, Any] | None:
        """Updates the monitor with an output; returns the content of an alarm if the detector fires, else None."""
        self.num_outcomes += 1
        in_use = self.in_use.correct("", output.prediction, output.prompt_tokens)
        low, high = (in_use.cdf(output.output_tokens + half) for half in (-0.5, 0.5))
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
        """Counters, test statistic and calibration, as JSON content."""
        return {
            "num_outcomes": self.num_outcomes,
            "num_alarms": self.num_alarms,
            "statistic": self.detector.value,
            "threshold": self.detector.arl,
            "calibration": self.running.metrics(""),
        }


def parse_output(line: str | bytes) -> ObservedOutput:
    """Parses an object with the attributes of `ObservedOutput`, or a record of the feedback log; InputError names the key."""
    content = parse_object(line)
    if content.get("format") == FORMAT:
        values = pair(validated(FeedbackRecord, content), "main")
        if values is None:
            raise InputError("record", line[:80], "a record with a prediction and a true length")
        content = values
    return validated(ObservedOutput, content)


class DriftStream:
    """Monitors of all served models; memory is bounded by the number of models times the window."""

    def __init__(self, config: StreamConfig) -> None:
        self._config = config
        self._monitors: dict[str, ModelMonitor] = {}
        self._bad: Counter[str] = Counter()
        self._num_lines = 0

    def feed(self, lines: Iterable[str | bytes]) -> Iterator[dict[str, Any]]:
        """Processes lines and yields their events; empty lines are skipped."""
        for line in lines:
            self._num_lines += 1
            try:
                if len(line) > MAX_LINE:
                    raise InputError("line", f"{len(line)} characters", f"at most {MAX_LINE}")
                if not line.strip():
                    continue
                output = parse_output(line)
            except InputError as error:
                self._bad[error.field] += 1
                yield {
                    "event": "bad_line",
                    "line": self._num_lines,
                    "field": error.field,
                    "value": repr(error.value)[:160],
                    "allowed": error.allowed,
                }
                continue
            yield from self._update(output)

    def finish(self) -> Iterator[dict[str, Any]]:
        """Yields the final states and the totals."""
        for name, monitor in self._monitors.items():
            yield {
                "event": "state",
                "line": self._num_lines,
                "served_model": name,
                "time": None,
                **monitor.state(),
            }
        monitors = self._monitors.values()
        yield {
            "event": "end",
            "num_lines": self._num_lines,
            "num_outcomes": sum(monitor.num_outcomes for monitor in monitors),
            "num_bad_lines": sum(self._bad.values()),
            "bad_lines": dict(sorted(self._bad.items())),
            "num_alarms": sum(monitor.num_alarms for monitor in monitors),
        }

    def _update(self, output: ObservedOutput) -> Iterator[dict[str, Any]]:
        name = output.served_model or UNNAMED
        if name not in self._monitors and len(self._monitors) >= self._config.max_models:
            name = OTHERS
        if name not in self._monitors:
            self._monitors[name] = ModelMonitor(self._config.window, self._config.arl)
        monitor = self._monitors[name]
        alarm = monitor.update(output)
        head = {"line": self._num_lines, "served_model": name, "time": output.time}
        if alarm is not None:
            yield {"event": "alarm", **head, **alarm}
        if monitor.num_outcomes % self._config.every == 0:
            yield {"event": "state", **head, **monitor.state()}


def watch(config: StreamConfig) -> None:
    """Processes the stream to its end and writes each event immediately."""
    stream = DriftStream(config)
    with contextlib.ExitStack() as stack:
        source: IO[bytes] = sys.stdin.buffer
        if config.stream != "-":
            source = stack.enter_context(open(existing_file(config.stream, "stream"), "rb"))
        events = chain(stream.feed(bounded_lines(source, MAX_LINE)), stream.finish())
        # Read before the target is created, so that an unreadable stream leaves no file.
        first = next(events)
        target: IO[Any] = sys.stdout
        if config.out not in ("-", "/dev/stdout"):
            target = stack.enter_context(open(writable_target(config.out, "out"), "w", encoding="utf-8"))
        for event in chain([first], events):
            target.write(json.dumps(event, allow_nan=False) + "\n")
            target.flush()


main = command("evaluate-stream", StreamConfig, watch, positionals=("stream",), extra="train")


if __name__ == "__main__":
    raise SystemExit(main())
