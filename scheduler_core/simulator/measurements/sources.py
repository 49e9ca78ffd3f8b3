"""Readers of measurements: files of several formats, recognized by their content."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scheduler_core.errors import InputError
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.shell.files import existing_file
from scheduler_core.shell.json_text import parse_json
from scheduler_core.simulator.engine_probe import Probe
from scheduler_core.simulator.measurements.engine_log import log_measurements
from scheduler_core.simulator.measurements.prometheus import (
    STEPS,
    kv_tokens,
    parse_range_query,
    parse_scrapes,
    scrape_measurements,
)
from scheduler_core.simulator.measurements.requests import (
    bench_probes,
    feedback_probe,
    from_zero,
    request_measurements,
)
from scheduler_core.simulator.measurements.steps import StepMeasurement, step_of_log, step_of_table

FORMATS = (
    "results of vllm bench serve --save-detailed, the feedback log of tailcast-proxy, a log of vLLM's server, scrapes of its "
    "/metrics, a range query of Prometheus, or a table of simulate run --steps (JSON lines)"
)
#: Name of all scrapes together.
METRICS = "metrics"
#: Columns of a step table, which are numbers.
STEP_COLUMNS = (
    "num_steps",
    "num_decodes",
    "num_context_tokens",
    "num_prefills",
    "num_prefill_tokens",
    "step_s",
)


@dataclass(slots=True)
class MeasurementSource:
    """What was read from one run of an engine.

    Attributes:
        name: File, or `METRICS`.
        measurements: Its steps, in the order of time.
        probes: Its requests, if they are known.
        left_out: Reasons with numbers of what was left out.
        kv_tokens: Size of the engine's KV cache, if it is known.
    """

    name: str
    measurements: list[StepMeasurement]
    probes: list[Probe] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    kv_tokens: int | None = None

    @property
    def num_rows(self) -> int:
        """Number of steps or intervals, and of what was left out."""
        return len(self.measurements) + sum(self.left_out.values())


def read_sources(paths: Sequence[str], limits: SchedulerConfig) -> list[MeasurementSource]:
    """The measurements in files and folders of segments of the proxy's log, a source for each replica that it names. Scrapes of
    /metrics in several files are one series, in the order of the files. `InputError`, naming the file, its line and the value, for
    what is malformed.

    `limits` are those of the measured engine.
    """
    sources: list[MeasurementSource] = []
    scrapes: defaultdict[tuple[str, ...], list[dict[str, float]]] = defaultdict(list)
    logs: defaultdict[str, list[Probe]] = defaultdict(list)
    for path in _files(paths):
        text = path.read_bytes().decode("utf-8", "replace")
        rows, problem = _json_rows(text, path)
        first = rows[0][1] if rows else None
        is_feedback = isinstance(first, dict) and "output_tokens" in first and "input_lens" not in first
        if problem is not None and not is_feedback:
            raise problem
        if not rows:
            if "\nvllm:" in f"\n{text}":
                for key, parts in parse_scrapes(text, str(path)).items():
                    scrapes[key] += parts
                continue
            steps, left_out, num_tokens = log_measurements(text.splitlines(), str(path))
            if not steps and not left_out:
                raise InputError("measurements", str(path), FORMATS)
            sources.append(MeasurementSource(str(path), steps, left_out=left_out, kv_tokens=num_tokens))
            continue
        if isinstance(first, dict) and "data" in first and "status" in first:
            for key, parts in parse_range_query(first, str(path)).items():
                scrapes[key] += parts
        elif isinstance(first, dict) and "input_lens" in first:
            for number, row in rows:
                name = str(path) if len(rows) == 1 else f"{path}, line {number}"
                sources.append(_requests(name, bench_probes(_object(row, name), name), limits))
        elif is_feedback:
            for number, row in rows:
                logs[_replica(row)].append(_logged(row, path, number))
        elif isinstance(first, list) or (isinstance(first, dict) and "num_decodes" in first):
            sources.append(
                MeasurementSource(str(path), [_step(row, f"{path}, line {number}") for number, row in rows])
            )
        else:
            raise InputError("measurements", str(path), FORMATS)
    for replica, probes in logs.items():
        sources.append(_requests(f"feedback log{replica and f' of {replica}'}", probes, limits))
    if scrapes:
        sources.append(metrics_source(scrapes, limits))
    return sources


def metrics_source(
    scrapes: Mapping[tuple[str, ...], list[dict[str, float]]], limits: SchedulerConfig
) -> MeasurementSource:
    """The steps between the scrapes of all engines; series without a number of steps are not those of an engine."""
    source = MeasurementSource(METRICS, [])
    engines = [parts for parts in scrapes.values() if any(STEPS in one for one in parts)]
    for parts in engines or scrapes.values():
        steps, left_out = scrape_measurements(parts, limits.max_num_batched_tokens)
        source.measurements += steps
        source.left_out += left_out
        source.kv_tokens = kv_tokens(parts[-1]) or source.kv_tokens
    return source


def _files(paths: Sequence[str]) -> Iterable[Path]:
    for text in paths:
        path = Path(text)
        if path.is_dir():
            segments = sorted(path.glob("feedback-*.jsonl"))
            if not segments:
                raise InputError("measurements", text, "a file, or a folder with feedback-*.jsonl")
            yield from segments
        else:
            yield existing_file(path, "measurements")


def _json_rows(text: str, path: Path) -> tuple[list[tuple[int, Any]], InputError | None]:
    """The JSON values in a file with their lines: one value, the members of a list of objects, or one value a line; and the
    error of the first malformed line. Empty if the file does not begin as JSON."""
    if text.lstrip()[:1] not in ("{", "["):
        return [], None
    try:
        value = parse_json(text, finite=True)
    except ValueError:
        pass
    else:
        is_list = isinstance(value, list) and value and isinstance(value[0], dict)
        return [(1, one) for one in value] if is_list else [(1, value)], None
    rows, problem = [], None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            rows.append((number, parse_json(line, finite=True)))
        except ValueError as error:
            allowed = f"valid JSON ({error})"
            problem = problem or InputError(f"measurements: {path}, line {number}", line[:60], allowed)
            rows.append((number, None))
    return rows, problem


def _replica(row: Any) -> str:
    """The replica in a line of the proxy's log; empty if it has none."""
    replica = row.get("replica") if isinstance(row, dict) else None
    return replica if isinstance(replica, str) else ""


def _logged(row: Any, path: Path, number: int) -> Probe:
    """The request in a line of the proxy's log; a line that a crash has torn is a failed request."""
    if row is None:
        return Probe(request_id="", error="not valid JSON")
    return feedback_probe(_object(row, f"{path}, line {number}"), str(path), number)


def _object(row: Any, name: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise InputError(name, json.dumps(row)[:60], "a JSON object")
    return row


def _requests(name: str, probes: list[Probe], limits: SchedulerConfig) -> MeasurementSource:
    steps, left_out = request_measurements(from_zero(probes), limits.max_num_batched_tokens)
    return MeasurementSource(name, steps, probes, left_out)


def _step(row: Any, name: str) -> StepMeasurement:
    """The measurement in a row of a step log or table."""
    if isinstance(row, list):
        if len(row) < 6 or not all(_is_number(value) for value in row):
            raise InputError(name, json.dumps(row)[:80], "a list of at least 6 numbers >= 0")
        return step_of_log(row)
    row = _object(row, name)
    for column in STEP_COLUMNS:
        if not _is_number(row.get(column)):
            raise InputError(f"{name}: {column}", row.get(column), "a number >= 0")
    return step_of_table(row)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e15
