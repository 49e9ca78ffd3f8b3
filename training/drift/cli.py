"""The command `evaluate-stream`: alarms where the outputs of a live stream drift away from their predictions.

JSON lines in, JSON lines out:

| event | when | content beside event, line, served_model, time |
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
from typing import IO, Any

from data_gen.feedback_record import FORMAT, FeedbackRecord, bounded_lines, parse_object, validated
from scheduler_core.command import command
from scheduler_core.errors import InputError
from scheduler_core.files import existing_file, writable_target
from scheduler_core.online_calibration import MAX_WINDOW, MIN_OUTPUTS
from scheduler_core.ranges import FINITE, INTEGERS, check_ranges
from training.drift.monitor import ModelMonitor, ObservedOutput
from training.feedback import pair

#: Served models beyond this number share one monitor.
OTHERS = "(others)"
#: A line beyond this is not parsed.
MAX_LINE = 1_000_000
UNNAMED = "(unnamed)"


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """Watch predictions and their outputs: coverage over a sliding window, a test for drift, running calibration, for each served model."""

    INPUTS = ("stream",)
    OUTPUTS = ("out",)

    stream: str
    """File of JSON lines, or - for standard input. Keys: mu, sigma, output_tokens; optional nu, finished, served_model, prompt_tokens, max_tokens, time."""
    out: str = "-"
    """File of JSON lines to write, or - for standard output."""
    overwrite: bool = False
    """Replace files at the outputs."""
    window: int = 1000
    """Outputs that coverage is computed over, and memory of the calibration."""
    arl: float = 100_000
    """Lower bound of the mean number of outputs of a served model to a false alarm."""
    every: int = 1000
    """Outputs of a served model between two states."""
    max_models: int = 1000
    """Maximum number of served models with a monitor of their own; the others share one."""

    def __post_init__(self) -> None:
        integers = {"window": (MIN_OUTPUTS, MAX_WINDOW), "every": (1, INTEGERS), "max_models": (1, INTEGERS)}
        check_ranges(self, arl=(10.0, FINITE), **integers)


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
    """Monitors of all served models; memory is bounded by the number of models times the window."""

    def __init__(self, config: StreamConfig) -> None:
        self._config = config
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
    """Reads to the end of the stream; events are written as they happen."""
    stream = DriftStream(config)
    with contextlib.ExitStack() as stack:
        source: IO[bytes] = sys.stdin.buffer
        if config.stream != "-":
            source = stack.enter_context(open(existing_file(config.stream, "stream"), "rb"))
        events = chain(stream.feed(bounded_lines(source, MAX_LINE)), stream.finish())
        # Before the target is made: a stream that cannot be read leaves none.
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
