"""Monitors of a stream of predictions with their outputs: JSON lines in, JSON lines out.

| event | when | content beside event, line, served_model, time |
|---|---|---|
| alarm | the detector of a served model fires | statistic, threshold, reason, coverage, recalibration |
| state | every `every` outcomes of a served model, and at the end | see `ModelMonitor.state` |
| bad_line | a line cannot be used | field, value, allowed |
| end | the stream ends | num_lines, num_outcomes, num_bad_lines, bad_lines by field, num_alarms |
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from data_gen.feedback_record import FORMAT, FeedbackRecord, parse_object, validated
from scheduler_core.errors import InputError
from training.drift.monitor import ModelMonitor, ObservedOutput
from training.feedback import pair

#: Served models beyond this number share one monitor.
OTHERS = "(others)"
#: A line beyond this is not parsed.
MAX_LINE = 1_000_000


def parse_output(line: str | bytes) -> ObservedOutput:
    """Parses an object with the attributes of `ObservedOutput`, or a record of the feedback log.

    Raises:
        InputError: The line is neither, or a record without a prediction and a true length; names the key.
    """
    content = parse_object(line)
    if content.get("format") == FORMAT:
        values = pair(validated(FeedbackRecord, content), "main")
        if values is None:
            raise InputError("record", line[:80], "a record with a prediction and a true length")
        content = values
    return validated(ObservedOutput, content)


class DriftStream:
    """Monitors of all served models; memory is bounded by the number of models times the window.

    Args:
        window: See `ModelMonitor`.
        arl: See `ModelMonitor`.
        every: Outcomes of a served model between two states.
        max_models: Served models with a monitor of their own.
    """

    def __init__(
        self, window: int = 1000, arl: float = 100_000, every: int = 1000, max_models: int = 1000
    ) -> None:
        self._window, self._arl, self._every, self._max_models = window, arl, every, max_models
        self._monitors: dict[str, ModelMonitor] = {}
        self._bad: Counter[str] = Counter()
        self._num_lines = 0

    def feed(self, lines: Iterable[str | bytes]) -> Iterator[dict[str, Any]]:
        """Events of some lines; empty lines are skipped."""
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
        """Final states and totals."""
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
        name = output.served_model
        if name not in self._monitors and len(self._monitors) >= self._max_models:
            name = OTHERS
        if name not in self._monitors:
            self._monitors[name] = ModelMonitor(self._window, self._arl)
        monitor = self._monitors[name]
        alarm = monitor.update(output)
        head = {"line": self._num_lines, "served_model": name, "time": output.time}
        if alarm is not None:
            yield {"event": "alarm", **head, **alarm}
        if monitor.num_outcomes % self._every == 0:
            yield {"event": "state", **head, **monitor.state()}


def event_line(event: dict[str, Any]) -> str:
    """An event as a line of JSON without NaN."""
    return json.dumps(event, allow_nan=False) + "\n"
