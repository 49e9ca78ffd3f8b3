"""JSON lines in, JSON lines out: `evaluate --stream`.

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

from scheduler_core.errors import InputError
from training.drift.monitor import ModelMonitor
from training.drift.outcome import Outcome, parse_outcome

#: Served models beyond this number share one monitor.
OTHERS = "(others)"
#: A line beyond this is not parsed.
MAX_LINE = 1_000_000


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
        """Events of some lines; empty lines are passed over."""
        for line in lines:
            self._num_lines += 1
            try:
                if len(line) > MAX_LINE:
                    raise InputError("line", f"{len(line)} characters", f"at most {MAX_LINE}")
                if not line.strip():
                    continue
                outcome = parse_outcome(line)
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
            yield from self._take(outcome)

    def finish(self) -> Iterator[dict[str, Any]]:
        """The last states, and the sums."""
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

    def _take(self, outcome: Outcome) -> Iterator[dict[str, Any]]:
        name = outcome.served_model
        if name not in self._monitors and len(self._monitors) >= self._max_models:
            name = OTHERS
        if name not in self._monitors:
            self._monitors[name] = ModelMonitor(self._window, self._arl)
        monitor = self._monitors[name]
        alarm = monitor.update(outcome)
        head = {"line": self._num_lines, "served_model": name, "time": outcome.time}
        if alarm is not None:
            yield {"event": "alarm", **head, **alarm}
        if monitor.num_outcomes % self._every == 0:
            yield {"event": "state", **head, **monitor.state()}


def event_line(event: dict[str, Any]) -> str:
    """An event as a line of JSON without NaN."""
    return json.dumps(event, allow_nan=False) + "\n"
