"""`simulate run`: one policy on one workload, with one or more seeds."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from scheduler_core.decision_log import DecisionLog
from scheduler_core.errors import InputError
from scheduler_core.files import writable_target, write_json
from scheduler_core.simulator.commands import progress_bar
from scheduler_core.simulator.config import SimulationConfig, check_seeds
from scheduler_core.simulator.records import request_columns, write_requests
from scheduler_core.simulator.regret import simulated_regret
from scheduler_core.simulator.run import SimulationResult, prepare_predictions, prepare_trace, run_simulation
from scheduler_core.simulator.tables import Columns, check_table_path, write_rows
from scheduler_core.simulator.watch import RunWatch, StepTable, write_chrome_trace, write_steps
from scheduler_core.statistics import over_seeds

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunConfig(SimulationConfig):
    """Simulate one scheduling policy on a request trace or a drawn workload and write its latencies as JSON."""

    OUTPUTS = ("json", "requests", "steps", "metrics", "decisions", "report", "chrome_trace")

    json: str
    """Where to write the result: configuration, versions, metrics, statistics of the predictor."""
    requests: str | None = None
    """Where to write a table with one row per request and seed (.parquet, .csv or .jsonl); `simulate compare` pairs the
    requests of two runs by it, if it is Parquet."""
    steps: str | None = None
    """Where to write a table with one row per step (.parquet, .csv or .jsonl): batch size, tokens, KV blocks in use,
    duration, queue. Steps that were taken at once are one row; with exact_steps every step has its own."""
    metrics: str | None = None
    """Where to write a table with one row per metric (.parquet or .csv): mean, low, high over seeds."""
    regret: bool = False
    """Simulate the same requests in arrival order, by true length, and under the same policy with true lengths too, and
    write the cost of the policy compared with them, in `metrics.regret`."""
    decisions: str | None = None
    """Where to write the decision log (JSON lines): every call to the scheduler and every plan, for exact replay."""
    report: str | None = None
    """Where to write a page with tables and figures (.html)."""
    chrome_trace: str | None = None
    """Where to write a timeline for chrome://tracing or Perfetto (.json); for runs of some thousand requests."""
    gantt: bool = False
    """Show in the report who ran when, for the first 60 requests."""
    num_seeds: int = 1
    """Runs with the seeds seed, seed + 1, ...; the result then has means with 95 % confidence intervals under
    `intervals`, and everything else is that of the first seed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seeds("num_seeds", self.num_seeds)
        if self.num_seeds > 1 and self.decisions is not None:
            raise InputError("decisions", self.decisions, "unset with more than one seed")
        if self.gantt and self.report is None:
            raise InputError("gantt", True, "a report to show it in")
        for name in self.OUTPUTS:
            if getattr(self, name) == "":
                raise InputError(name, "", "a path")

    def simulation(self, seed: int) -> SimulationConfig:
        """The fields of `SimulationConfig`, with this seed."""
        values = {item.name: getattr(self, item.name) for item in fields(SimulationConfig)}
        return SimulationConfig(**{**values, "seed": seed})


@dataclass(frozen=True, slots=True)
class SeedRun:
    """The run with one seed: fingerprint of its trace, metrics, and its tables if they are written."""

    seed: int
    trace: str
    metrics: Mapping[str, Any]
    requests: Columns | None
    steps: Columns | None


def run(config: RunConfig) -> None:
    """Carries out `simulate run`."""
    _check_targets(config)
    first, first_run = _simulated(config, config.seed, is_first=True)
    later = range(config.seed + 1, config.seed + config.num_seeds)
    runs = [first_run, *(_simulated(config, seed, is_first=False)[1] for seed in later)]
    intervals = over_seeds([one.metrics for one in runs])
    if config.requests is not None:
        write_requests([one.requests for one in runs if one.requests is not None], config.requests)
    if config.steps is not None:
        write_steps([one.steps for one in runs if one.steps is not None], config.steps)
    if config.metrics is not None:
        write_rows(metric_rows(intervals), config.metrics)
    if config.chrome_trace is not None:
        write_chrome_trace(first.watch, first.records, config.chrome_trace)
    if config.report is not None:
        from scheduler_core.simulator.run_page import write_run_page

        several = intervals if config.num_seeds > 1 else None
        write_run_page(first, config.report, several, first_run.metrics.get("regret"))
    content = first.to_json() | {
        "metrics": first_run.metrics,
        "num_seeds": config.num_seeds,
        "runs": [{"seed": one.seed, "trace": one.trace, "metrics": one.metrics} for one in runs],
        "requests": _relative_path(config.json, config.requests),
    }
    if config.num_seeds > 1:
        content["intervals"] = intervals
    write_json(config.json, content)
    logger.info("%s", _headline(config.policy, first))


def _check_targets(config: RunConfig) -> None:
    for name in config.OUTPUTS:
        path = getattr(config, name)
        if path is None:
            continue
        if name in ("requests", "steps"):
            check_table_path(path, name)
        elif name == "metrics":
            check_table_path(path, name, (".parquet", ".csv"))
        else:
            writable_target(path, name)


def _relative_path(json: str, table: str | None) -> str | None:
    """The path of the table from the folder of the result, so that both can be moved together."""
    return None if table is None else os.path.relpath(table, Path(json).parent)


def _simulated(config: RunConfig, seed: int, *, is_first: bool) -> tuple[SimulationResult, SeedRun]:
    """The run with one seed; figures, decisions and timelines are of the first alone."""
    simulation = config.simulation(seed)
    log = DecisionLog() if config.decisions is not None else None
    has_timeline = is_first and (config.gantt or config.chrome_trace is not None)
    steps = StepTable() if config.steps is not None else None
    watch = RunWatch(segments=[] if has_timeline else None, steps=steps)
    trace = prepare_trace(simulation)
    if "://" in simulation.prediction_source:
        with progress_bar(len(trace), "predicting") as bar:
            predictions = prepare_predictions(simulation, trace, bar.update)
    else:
        predictions = prepare_predictions(simulation, trace)
    description = f"simulating {simulation.policy}" + (f", seed {seed}" if config.num_seeds > 1 else "")
    with progress_bar(len(trace), description) as bar:
        result = run_simulation(
            simulation, trace=trace, predictions=predictions, log=log, progress=bar.update, watch=watch
        )
    if log is not None and config.decisions is not None:
        log.write(config.decisions)
    metrics = result.metrics
    if config.regret:
        metrics = metrics | {"regret": simulated_regret(simulation, trace, result)}
    requests = None if config.requests is None else request_columns(result.records, seed)
    return result, SeedRun(
        seed, trace.fingerprint(), metrics, requests, None if steps is None else steps.columns(seed)
    )


def metric_rows(intervals: Mapping[str, Any], prefix: str = "") -> Sequence[dict[str, Any]]:
    """One row per metric of a tree made by `over_seeds`: metric, mean, low, high, num_seeds."""
    rows: list[dict[str, Any]] = []
    for key, value in intervals.items():
        if not isinstance(value, Mapping):
            continue
        if set(value) == {"mean", "low", "high", "num"} and not isinstance(value["num"], Mapping):
            ends = {name: value[name] for name in ("mean", "low", "high")}
            rows.append({"metric": f"{prefix}{key}", **ends, "num_seeds": value["num"]})
        else:
            rows += metric_rows(value, f"{prefix}{key}.")
    return rows


def _headline(policy: str, result: SimulationResult) -> str:
    ttft, normalized = result.metrics["ttft_s"], result.metrics["normalized_latency_s"]
    return (
        f"{policy}: {result.metrics['num_finished']} requests, ttft mean {ttft['mean']:.3f} s p99 {ttft['p99']:.3f} s, "
        f"normalized latency mean {normalized['mean']:.4f} s/token p99 {normalized['p99']:.4f} s/token"
    )
