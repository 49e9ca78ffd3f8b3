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
from pathlib import Path
from typing import IO, Any

from scheduler_core.errors import InputError
from scheduler_core.prediction.correction import (
    MAX_WINDOW,
    MIN_OUTPUTS,
    Correction,
    CorrectionConfig,
    RequestContext,
)
from scheduler_core.prediction.drift import DriftDetector
from scheduler_core.prediction.linear_correction import Coefficients, features_of
from scheduler_core.prediction.outcome import Outcome, bounded_lines, parse_outcome, segments_of
from scheduler_core.prediction.predictions import LengthPrediction
from scheduler_core.ranges import FINITE, INTEGERS, check_ranges
from scheduler_core.shell.command import command
from scheduler_core.shell.files import existing_file, writable_target

#: Name of the monitor that served models beyond `max_models` share.
OTHERS = "(others)"
UNNAMED = "(unnamed)"


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """Monitor predictions against their outputs for each served model: coverage over a sliding window, a drift test and a running calibration."""

    INPUTS = ("stream",)
    OUTPUTS = ("out",)

    stream: str
    """Outcomes as JSON lines: the folder of the proxy's feedback log, or a file of lines with at least mu, sigma and output_tokens; - for standard input."""
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


class ModelMonitor:
    """Drift test and running calibration of one served model; constant memory.

    The test applies to predictions corrected by the calibration in use, initially the identity. At an alarm the current
    running calibration is put in use, and the test restarts.

    Args:
        window: Number of outputs in the sliding window of coverage and calibration; at least 50.
        arl: Lower bound of the mean number of outputs until a false alarm.
    """

    def __init__(self, window: int, arl: float) -> None:
        self.num_outcomes = self.num_alarms = 0
        self.detector = DriftDetector(arl)
        self.running = Correction(CorrectionConfig(memory=window, window=window, arl=arl))
        self.in_use = Coefficients()

    def update(self, output: Outcome, prediction: LengthPrediction) -> dict[str, Any] | None:
        """Updates the monitor with an output; returns the content of an alarm if the detector fires, else None."""
        self.num_outcomes += 1
        corrected = self.in_use.corrected(prediction, features_of(prediction, output.prompt_tokens))
        self.running.observe(RequestContext(), output)
        alarm = self.detector.observe(corrected, output.output_tokens, finished=output.is_finished)
        if alarm is None:
            return None
        self.num_alarms += 1
        self.in_use = self.running.coefficients("") or Coefficients()
        return {
            "statistic": alarm.statistic,
            "threshold": self.detector.arl,
            "reason": alarm.reason,
            "outcomes_since_restart": alarm.num_outputs,
            "calibration": self.running.metrics(""),
        }

    def state(self) -> dict[str, Any]:
        """Counters, test statistic and calibration, as JSON content."""
        return {
            "num_outcomes": self.num_outcomes,
            "num_alarms": self.num_alarms,
            "statistic": self.detector.value,
            "threshold": self.detector.arl,
            "calibration": self.running.metrics(""),
        }


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
                if not line.strip():
                    continue
                output = parse_outcome(line)
                if output.prediction is None or not output.has_length:
                    raise InputError(
                        "record", line[:80], "a record with a prediction and a length by the model"
                    )
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
            yield from self._update(output, output.prediction)

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

    def _update(self, output: Outcome, prediction: LengthPrediction) -> Iterator[dict[str, Any]]:
        name = output.served_model or UNNAMED
        if name not in self._monitors and len(self._monitors) >= self._config.max_models:
            name = OTHERS
        if name not in self._monitors:
            self._monitors[name] = ModelMonitor(self._config.window, self._config.arl)
        monitor = self._monitors[name]
        alarm = monitor.update(output, prediction)
        head = {"line": self._num_lines, "served_model": name, "time": output.time}
        if alarm is not None:
            yield {"event": "alarm", **head, **alarm}
        if monitor.num_outcomes % self._config.every == 0:
            yield {"event": "state", **head, **monitor.state()}


def watch(config: StreamConfig) -> None:
    """Processes the stream to its end and writes each event immediately."""
    stream = DriftStream(config)
    with contextlib.ExitStack() as stack:
        lines = bounded_lines(sys.stdin.buffer)
        if config.stream != "-":
            path = Path(config.stream)
            files = segments_of(path) if path.is_dir() else [existing_file(config.stream, "stream")]
            opened = (stack.enter_context(open(file, "rb")) for file in files)
            lines = chain.from_iterable(map(bounded_lines, opened))
        events = chain(stream.feed(lines), stream.finish())
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
