"""`simulate run`: one policy on one workload, with as many seeds as wanted."""

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
from scheduler_core.simulate.progress import progress_bar
from scheduler_core.simulator.column_file import Columns, check_table_path
from scheduler_core.simulator.config import SimulationConfig, check_seeds
from scheduler_core.simulator.fingerprint import trace_fingerprint
from scheduler_core.simulator.metrics import with_cluster
from scheduler_core.simulator.regret import counterfactuals, regret
from scheduler_core.simulator.request_table import request_columns, write_table
from scheduler_core.simulator.run import SimulationResult, prepare_predictions, prepare_trace, run_simulation
from scheduler_core.simulator.statistics import over_seeds
from scheduler_core.simulator.step_table import StepTable, write_steps
from scheduler_core.simulator.sweep.tables import metric_rows, write_rows
from scheduler_core.simulator.watch import RunWatch

logger = logging.getLogger(__name__)

_PATHS = ("json", "requests", "steps", "metrics", "decisions", "report", "chrome_trace")


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
    say what the policy costs against them, in `metrics.regret`."""
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
        for name in _PATHS:
            if getattr(self, name) == "":
                raise InputError(name, "", "a path")

    def simulation(self, seed: int) -> SimulationConfig:
        """The part that is not about files to write."""
        values = {item.name: getattr(self, item.name) for item in fields(SimulationConfig)}
        return SimulationConfig(**{**values, "seed": seed})


@dataclass(frozen=True, slots=True)
class SeedRun:
    """What is kept of the run with one seed.

    Attributes:
        seed: Which.
        trace: See `trace_fingerprint`.
        metrics: All of them.
        requests: Its table; None if nobody wants it.
        steps: Its table; None if nobody wants it.
    """

    seed: int
    trace: str
    metrics: Mapping[str, Any]
    requests: Columns | None
    steps: Columns | None


def run(config: RunConfig) -> None:
    """Carries out `simulate run`."""
    _check_targets(config)
    first, one = _simulated(config, config.seed, is_first=True)
    later = range(config.seed + 1, config.seed + config.num_seeds)
    seeds = [one, *(_simulated(config, seed, is_first=False)[1] for seed in later)]
    intervals = over_seeds([each.metrics for each in seeds])
    _write_tables(config, seeds, intervals)
    if config.chrome_trace is not None:
        from scheduler_core.simulator.report.chrome_trace import write_chrome_trace

        write_chrome_trace(first.watch, first.records, config.chrome_trace)
    several = intervals if config.num_seeds > 1 else None
    if config.report is not None:
        from scheduler_core.simulator.report.run_page import write_run_page

        write_run_page(first, config.report, several, one.metrics.get("regret"))
    content = first.to_json() | {
        "metrics": one.metrics,
        "num_seeds": config.num_seeds,
        "runs": [{"seed": each.seed, "trace": each.trace, "metrics": each.metrics} for each in seeds],
        "requests": _beside(config.json, config.requests),
    }
    if several is not None:
        content["intervals"] = several
    write_json(config.json, content)
    logger.info("%s", _headline(config.policy, first))


def _check_targets(config: RunConfig) -> None:
    for name in ("requests", "steps"):
        if getattr(config, name) is not None:
            check_table_path(getattr(config, name), name)
    if config.metrics is not None and Path(config.metrics).suffix not in (".parquet", ".csv"):
        raise InputError("metrics", config.metrics, "a name that ends in .parquet or .csv")
    for name in _PATHS:
        if getattr(config, name) is not None:
            writable_target(getattr(config, name), name)


def _write_tables(config: RunConfig, seeds: Sequence[SeedRun], intervals: Mapping[str, Any]) -> None:
    if config.requests is not None:
        write_table([one.requests for one in seeds if one.requests is not None], config.requests)
    if config.steps is not None:
        write_steps([one.steps for one in seeds if one.steps is not None], config.steps)
    if config.metrics is not None:
        write_rows(metric_rows(intervals), config.metrics)


def _beside(json: str, table: str | None) -> str | None:
    """The path of the table as seen from the folder of the result, so that both can be moved together."""
    return None if table is None else os.path.relpath(table, Path(json).parent)


def _simulated(config: RunConfig, seed: int, *, is_first: bool) -> tuple[SimulationResult, SeedRun]:
    """The run with one seed; figures, decisions and timelines are of the first alone."""
    simulation = config.simulation(seed)
    log = DecisionLog() if config.decisions is not None else None
    drawn = is_first and (config.gantt or config.chrome_trace is not None)
    watch = RunWatch(segments=[] if drawn else None, steps=StepTable() if config.steps is not None else None)
    trace = prepare_trace(simulation)
    if "://" in simulation.prediction_source:
        with progress_bar(len(trace), "predicting") as bar:
            predictions = prepare_predictions(simulation, trace, bar.update)
    else:
        predictions = prepare_predictions(simulation, trace)
    what = f"simulating {simulation.policy}" + (f", seed {seed}" if config.num_seeds > 1 else "")
    with progress_bar(len(trace), what) as bar:
        result = run_simulation(
            simulation, trace=trace, predictions=predictions, log=log, progress=bar.update, watch=watch
        )
    if log is not None and config.decisions is not None:
        log.write(config.decisions)
    metrics = with_cluster(result.metrics, result.cluster)
    if config.regret:
        metrics["regret"] = regret(result, counterfactuals(simulation, trace))
    one = SeedRun(
        seed,
        trace_fingerprint(trace),
        metrics,
        None if config.requests is None else request_columns(result.records, seed),
        None if watch.steps is None else watch.steps.columns(seed),
    )
    return result, one


def _headline(policy: str, result: SimulationResult) -> str:
    ttft, per_token = result.metrics["ttft_s"], result.metrics["per_token_latency_s"]
    return (
        f"{policy}: {result.metrics['num_finished']} requests, ttft mean {ttft['mean']:.3f} s p99 {ttft['p99']:.3f} s, "
        f"per-token latency mean {per_token['mean']:.4f} s p99 {per_token['p99']:.4f} s"
    )
