"""`simulate run`: one policy on one workload, with as many seeds as wanted."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from typing import Any

from scheduler_core.decision_log import DecisionLog
from scheduler_core.errors import InputError
from scheduler_core.files import writable_target, write_json
from scheduler_core.simulate.progress import progress_bar
from scheduler_core.simulator.config import SimulationConfig
from scheduler_core.simulator.records import check_table_path, write_table
from scheduler_core.simulator.run import SimulationResult, prepare_predictions, prepare_trace, run_simulation
from scheduler_core.simulator.statistics import over_seeds
from scheduler_core.simulator.watch import RunWatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunConfig(SimulationConfig):
    """Simulate one scheduling policy on a request trace or a drawn workload and write its latencies as JSON."""

    json: str
    """Where to write the result: configuration, versions, metrics, statistics of the predictor."""
    requests: str | None = None
    """Where to write a table with one row per request (.parquet, .csv or .jsonl)."""
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
        if self.num_seeds < 1:
            raise InputError("num_seeds", self.num_seeds, "integers > 0")
        if self.num_seeds > 1 and self.decisions is not None:
            raise InputError("decisions", self.decisions, "unset with more than one seed")
        if self.gantt and self.report is None:
            raise InputError("gantt", True, "a report to show it in")
        for name in ("json", "report", "chrome_trace", "decisions"):
            if getattr(self, name) == "":
                raise InputError(name, "", "a path")

    def simulation(self, seed: int) -> SimulationConfig:
        """The part that is not about files to write."""
        values = {item.name: getattr(self, item.name) for item in fields(SimulationConfig)}
        return SimulationConfig(**{**values, "seed": seed})


def run(config: RunConfig) -> None:
    """Carries out `simulate run`."""
    for name in ("json", "report", "chrome_trace", "decisions"):
        if getattr(config, name) is not None:
            writable_target(getattr(config, name), name)
    if config.requests is not None:
        check_table_path(config.requests)
    first = _first(config)
    content = first.to_json()
    intervals: dict[str, Any] | None = None
    if config.num_seeds > 1:
        later = range(config.seed + 1, config.seed + config.num_seeds)
        runs = [first.metrics, *(_one(config.simulation(seed)).metrics for seed in later)]
        intervals = over_seeds(runs)
        content |= {"intervals": intervals, "num_seeds": config.num_seeds}
    if config.requests is not None:
        write_table(first.records, config.requests)
    if config.chrome_trace is not None:
        from scheduler_core.simulator.report.chrome_trace import write_chrome_trace

        write_chrome_trace(first.watch, first.records, config.chrome_trace)
    if config.report is not None:
        from scheduler_core.simulator.report.run_page import write_run_page

        write_run_page(first, config.report, intervals)
    write_json(config.json, content)
    logger.info("%s", _headline(config.policy, first))


def _first(config: RunConfig) -> SimulationResult:
    log = DecisionLog() if config.decisions is not None else None
    watch = RunWatch(segments=[] if config.gantt or config.chrome_trace is not None else None)
    result = _one(config.simulation(config.seed), log, watch)
    if log is not None and config.decisions is not None:
        log.write(config.decisions)
    return result


def _one(
    simulation: SimulationConfig, log: DecisionLog | None = None, watch: RunWatch | None = None
) -> SimulationResult:
    trace = prepare_trace(simulation)
    if "://" in simulation.prediction_source:
        with progress_bar(len(trace), "predicting") as bar:
            predictions = prepare_predictions(simulation, trace, bar.update)
    else:
        predictions = prepare_predictions(simulation, trace)
    with progress_bar(len(trace), f"simulating {simulation.policy}") as bar:
        return run_simulation(
            simulation, trace=trace, predictions=predictions, log=log, progress=bar.update, watch=watch
        )


def _headline(policy: str, result: SimulationResult) -> str:
    ttft, per_token = result.metrics["ttft_s"], result.metrics["per_token_latency_s"]
    return (
        f"{policy}: {result.metrics['num_finished']} requests, ttft mean {ttft['mean']:.3f} s p99 {ttft['p99']:.3f} s, "
        f"per-token latency mean {per_token['mean']:.4f} s p99 {per_token['p99']:.4f} s"
    )
