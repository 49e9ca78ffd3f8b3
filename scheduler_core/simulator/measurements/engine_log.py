"""Steps from the log of vLLM's server."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import pairwise

from scheduler_core.errors import InputError
from scheduler_core.simulator.measurements.steps import StepMeasurement

#: vLLM 0.32, v1/metrics/loggers.py and v1/core/kv_cache_utils.py.
_SIZE = re.compile(r"KV cache size: ([\d,]+) tokens")
_STEP = re.compile(
    r"Iteration\(\d+\): (\d+) context requests, (\d+) context tokens, (\d+) generation requests, "
    r"(\d+) generation tokens, iteration elapsed time: ([\d.]+) ms( \(dummy\))?(?:.*?KV cache usage: ([\d.]+)%)?"
)
_MEAN = re.compile(
    r"(?:Engine (\d+): )?Avg prompt throughput: ([\d.]+) tokens/s, Avg generation throughput: ([\d.]+) tokens/s, "
    r"Running: (\d+) reqs.*?KV cache usage: ([\d.]+)%"
)
_TIME = re.compile(r"\b(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)\b")
#: Seconds between two lines of mean throughput (VLLM_LOG_STATS_INTERVAL), if they have no time.
INTERVAL_S = 10.0
#: Minimum seconds of uninterrupted steps to compare with the wall clock.
MIN_BUSY_S = 5.0


def log_measurements(
    lines: Iterable[str], name: str
) -> tuple[list[StepMeasurement], Counter[str], int | None]:
    """The steps in a log of vLLM, reasons with numbers of what was left out, and the tokens in the KV cache.

    With `--enable-logging-iteration-details` each step is a line, with the time of the model only: `_between_steps_s` is added
    to it. Otherwise the lines of mean throughput are used, between
    which a step lasts as long as the running requests need for a token each: running / tokens per second. They only
    describe an engine that is never idle in between; pairs of lines with an idle end are left out.
    Empty if no line is of either kind; `InputError`, with the file's `name`, if a number is not one.
    """
    size = 0
    rows: list[tuple[float | None, StepMeasurement]] = []
    means: defaultdict[str, list[tuple[float | None, float, float, int, float]]] = defaultdict(list)
    left_out: Counter[str] = Counter()
    for number, line in enumerate(lines, 1):
        try:
            if match := _SIZE.search(line):
                size = int(match[1].replace(",", ""))
            elif match := _STEP.search(line):
                prompts, prefill, decodes, _, elapsed, is_dummy, usage = match.groups()
                if is_dummy or not float(elapsed) > 0:
                    left_out["steps without a duration"] += 1
                    continue
                context = size * float(usage or 0.0) / 100  # not in every version
                step = StepMeasurement(
                    float(elapsed) / 1e3, int(decodes), context, int(prefill), int(prompts)
                )
                rows.append((_seconds(line), step))
            elif match := _MEAN.search(line):
                engine, prefill, generated, running, usage = match.groups()
                values = (float(prefill), float(generated), int(running), float(usage) / 100)
                means[engine or ""].append((_seconds(line), *values))
        except ValueError as error:
            raise InputError(f"{name}, line {number}", line.strip()[:120], "numbers of vLLM's log") from error
    if rows:
        host_s = _between_steps_s(rows)
        return (
            [replace(step, duration_s=step.duration_s + host_s) for _, step in rows],
            left_out,
            size or None,
        )
    steps: list[StepMeasurement] = []
    for lines_of_engine in means.values():
        for before, after in pairwise(lines_of_engine):
            mean = _mean_step(before, after, size)
            if mean is None:
                left_out["intervals with an idle engine"] += 1
            else:
                steps.append(mean)
    return steps, left_out, size or None


def _between_steps_s(rows: Sequence[tuple[float | None, StepMeasurement]]) -> float:
    """Seconds of the engine between two steps: the mean difference of the wall clock, with its resolution of a second, and
    the steps, while it is busy. A step with decodes follows directly on the one before, which has left their requests."""
    total_s, num_steps = 0.0, 0
    begin_s: float | None = None
    last_s, elapsed_s, num = 0.0, 0.0, 0
    for at_s, step in [*rows, (None, StepMeasurement(1.0, 0))]:
        if at_s is not None and begin_s is not None and step.decodes:
            elapsed_s, num, last_s = elapsed_s + step.duration_s, num + 1, at_s
            continue
        if begin_s is not None and num and last_s - begin_s >= MIN_BUSY_S:
            total_s, num_steps = total_s + last_s - begin_s - elapsed_s, num_steps + num
        begin_s, elapsed_s, num = at_s, 0.0, 0
    return max(total_s / num_steps, 0.0) if num_steps else 0.0


def _mean_step(
    before: tuple[float | None, float, float, int, float],
    after: tuple[float | None, float, float, int, float],
    size: int,
) -> StepMeasurement | None:
    """The mean step between two lines: time, prompt and generated tokens per second, running requests, used fraction of
    the KV cache of `size` tokens. None if the engine was idle at one of them."""
    before_s, _, _, was_running, was_used = before
    after_s, prefill, generated, running, used = after
    if not (running and was_running and generated):
        return None
    mean = (running + was_running) / 2
    duration_s = mean / generated
    seconds = INTERVAL_S if before_s is None or after_s is None else (after_s - before_s) % 86_400
    return StepMeasurement(
        duration_s,
        mean,
        size * (used + was_used) / 2,
        prefill * duration_s,
        min(1.0, prefill * duration_s),
        weight=max(seconds / duration_s, 1.0),
    )


def _seconds(line: str) -> float | None:
    """Seconds since the beginning of the year in a line of vLLM's log."""
    match = _TIME.search(line)
    if match is None:
        return None
    month, day, hour, minute, second = (int(part) for part in match.groups())
    # A leap year, so that every date exists.
    return datetime(2000, month, day, hour, minute, second).timestamp()
