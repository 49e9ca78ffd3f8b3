"""`simulate run`: simulates one policy on one workload, with one or more seeds."""

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scheduler_core.engine.decision_log import DecisionLog
from scheduler_core.errors import InputError
from scheduler_core.ranges import check_ranges
from scheduler_core.report.page import Page
from scheduler_core.report.plotting import svg
from scheduler_core.shell.files import writable_target, write_json
from scheduler_core.shell.progress import progress_bar
from scheduler_core.simulator.commands.last_lines import end_with_warnings, few_seeds, seed_warnings
from scheduler_core.simulator.config import MAX_SEEDS, SimulationConfig
from scheduler_core.simulator.latencies import (
    NAMES,
    Curve,
    distribution_figure,
    group_field,
    latency_curves,
    latency_table,
)
from scheduler_core.simulator.metrics import flat, over_seeds
from scheduler_core.simulator.records import SCHEMA, request_columns
from scheduler_core.simulator.run import SimulationResult, prepare_predictions, prepare_trace, run_simulation
from scheduler_core.simulator.tables import Columns, check_table_path, write_table
from scheduler_core.simulator.trace import Trace
from scheduler_core.simulator.watch import STEPS_SCHEMA, RunWatch, StepTable

logger = logging.getLogger(__name__)
#: Mean number of waiting requests below which policies make no difference.
HARDLY_ANY = 0.01
_GROUP_COLUMNS = {
    "requests": "num_finished", "TTFT mean": "ttft_s.mean", "TTFT P99": "ttft_s.p99", "TBT P99": "tbt_s.p99",
    "TTLT mean": "ttlt_s.mean", "TTLT P99": "ttlt_s.p99", "targets met": "slo_attainment",
    "goodput, requests/s": "goodput_rps",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RunConfig(SimulationConfig):
    """Simulate one scheduling policy on a request trace or a drawn workload and write its latencies as JSON."""

    OUTPUTS = ("json", "requests", "steps", "decisions", "report")

    json: str
    """Path of the result: configuration, versions, metrics, statistics of the predictor."""
    overwrite: bool = False
    """Replace existing output files."""
    requests: str | None = None
    """Path of a table with one row per request and seed (.parquet, .csv or .jsonl); `simulate compare` needs
    it as Parquet for the comparison by request."""
    steps: str | None = None
    """Path of a table with one row per step (.parquet, .csv or .jsonl): batch size, tokens, KV blocks in use,
    duration, queue. A run of equal steps is one row; with exact_steps every step has its own row."""
    decisions: str | None = None
    """Path of the decision log (JSON lines): every call to the scheduler and every plan, for exact replay."""
    report: str | None = None
    """Path of a page with tables and figures (.html)."""
    num_seeds: int = 1
    """Number of runs, with the seeds seed, seed + 1, ...; the result then has means with 95 % confidence
    intervals under `intervals`; everything else is from the first seed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, num_seeds=(1, MAX_SEEDS))
        if self.num_seeds > 1 and self.decisions is not None:
            raise InputError("decisions", self.decisions, "unset with more than one seed")
        for name in self.OUTPUTS:
            if getattr(self, name) == "":
                raise InputError(name, "", "a path")


def run(config: RunConfig) -> int:
    """Runs `simulate run`."""
    for name in config.OUTPUTS:
        path = getattr(config, name)
        if path is not None:
            (check_table_path if name in ("requests", "steps") else writable_target)(path, name)
    config.make_step_time()  # before the predictor is called for every prompt
    first: SimulationResult | None = None
    runs: list[dict[str, Any]] = []
    tables: dict[str, list[Columns]] = {"requests": [], "steps": []}
    for seed in range(config.seed, config.seed + config.num_seeds):
        simulation = config.simulation(seed=seed)
        trace = prepare_trace(simulation)
        result = _simulated(config, simulation, trace)
        one = {"seed": seed, "trace": trace.fingerprint(), "metrics": result.metrics}
        runs.append(one | {"warnings": result.warnings})
        if config.requests is not None:
            tables["requests"].append(request_columns(result.records, seed))
        if result.watch.steps is not None:
            tables["steps"].append(result.watch.steps.columns(seed))
        if first is None:
            first = result
    assert first is not None
    for name, schema in (("requests", SCHEMA), ("steps", STEPS_SCHEMA)):
        if parts := tables[name]:
            columns = {column: np.concatenate([part[column] for part in parts]) for column in parts[0]}
            write_table(columns, getattr(config, name), schema, name)
    warnings = seed_warnings(config, runs) | few_seeds(config.num_seeds)
    content = first.to_json() | {"num_seeds": config.num_seeds, "runs": runs, "requests": None}
    content["warnings"] = warnings
    if (
        config.requests is not None
    ):  # relative to the folder of the result, so that both can be moved together
        content["requests"] = os.path.relpath(config.requests, Path(config.json).parent)
    if config.num_seeds > 1:
        intervals = over_seeds(item["metrics"] for item in runs)
        content["intervals"] = {name: one.to_json() for name, one in intervals.items()}
    if config.report is not None:
        write_run_page(first, config.report, content.get("intervals"), warnings)
    write_json(config.json, content)
    _log_summary(config, first)
    reason = next(iter(first.refused.values()), "with another seed")
    return end_with_warnings(warnings, [item["metrics"] for item in runs], reason)


def _log_summary(config: RunConfig, result: SimulationResult) -> None:
    """Logs the latencies of a run, and that no request waited."""
    ttft = result.metrics["ttft_s"]
    summary = (config.policy_name, result.metrics["num_finished"], ttft["mean"], ttft["p99"])
    logger.info("%s: %d requests, ttft mean %.3f s p99 %.3f s", *summary)
    if result.metrics["slo_attainment"] is not None:
        goodput = result.metrics["goodput_rps"]
        logger.info("targets met: %.2f %%, %.3g requests/s", 100 * result.metrics["slo_attainment"], goodput)
    if result.metrics["mean_requests_waiting"] < HARDLY_ANY:
        slots = config.scheduler.max_num_seqs * result.metrics["mean_replicas"]
        text = (
            "no request waited: on average %.2f of %g slots were in use, so all policies have the same latencies; use a "
            "higher --load or --rate, or a smaller --scheduler.max_num_seqs"
        )
        logger.warning(text, result.metrics["mean_requests_in_system"], slots)


def _simulated(config: RunConfig, simulation: SimulationConfig, trace: Trace) -> SimulationResult:
    """Runs one seed, with progress bars and the decision log."""
    log = DecisionLog() if config.decisions is not None else None
    if "://" in simulation.prediction_source:
        with progress_bar(len(trace), "req", enabled=None, desc="predicting") as bar:
            predictions = prepare_predictions(simulation, trace, bar.update)
    else:
        predictions = prepare_predictions(simulation, trace)
    description = f"simulating {simulation.policy_name}"
    if config.num_seeds > 1:
        description += f", seed {simulation.seed}"
    watch = RunWatch(steps=None if config.steps is None else StepTable())
    with progress_bar(len(trace), "req", enabled=None, desc=description) as bar:
        result = run_simulation(
            simulation, trace=trace, predictions=predictions, log=log, progress=bar.update, watch=watch
        )
    if log is not None and config.decisions is not None:
        log.write(config.decisions)
    return result


def write_run_page(
    result: SimulationResult,
    path: str | Path,
    intervals: Mapping[str, Any] | None = None,
    warnings: Mapping[str, str] | None = None,
) -> None:
    """Writes the HTML report of a run: latencies (also by group), a figure of their distributions, and all other metrics.
    With several seeds it is that of the first one; `intervals` (see `metrics.over_seeds`) and `warnings` (None: those of
    `result`) are those of all seeds."""
    metrics, seed = result.metrics, result.config["seed"]
    page = Page(f"Simulation: {result.config['policy']}, {result.trace['num_requests']} requests")
    page.note(_summary(result))
    for warning in (result.warnings if warnings is None else warnings).values():
        page.paragraph(f"Warning: {warning}.")
    page.heading("Latencies, seconds (slowdown: a ratio)")
    page.table(*latency_table(metrics))
    if intervals is not None:
        page.heading("Means over seeds, 95 % confidence")
        page.note(f"Student's t: wide with few seeds. Everything else on this page is for seed {seed} only.")
        rows = []
        for name in NAMES:
            if f"{name}.mean" in intervals:
                mean, p99 = (intervals[f"{name}.{statistic}"] for statistic in ("mean", "p99"))
                ends = [one[end] for one in (mean, p99) for end in ("mean", "low", "high")]
                rows.append([name, *ends, mean["num"]])
        page.table(["seconds", "mean", "low", "high", "P99", "low", "high", "seeds"], rows)
    for name, groups in metrics["groups"].items():
        if groups:
            page.heading(f"By {name}, seconds")
            numbers = {key or "(none)": dict(flat(group)) for key, group in groups.items()}
            rows = [[key, *map(group.get, _GROUP_COLUMNS.values())] for key, group in numbers.items()]
            page.table([name, *_GROUP_COLUMNS], rows)
    field = group_field(metrics)
    page.heading("Distribution of latencies")
    caption = "TTFT, TBT and TTLT" + (f" by {field}." if field else ".")
    page.figure(distribution_functions(latency_curves(result.records, result.watch.gaps, field)), caption)
    page.heading("All other metrics")
    page.note("simulator/README.md explains them.")
    others = {name: value for name, value in metrics.items() if name not in (*NAMES, "groups")}
    page.table(["", "value"], [[name, value] for name, value in flat(others)])
    page.heading("Configuration")
    page.code(json.dumps(result.config, indent=1, sort_keys=True))
    page.write(path)


def _summary(result: SimulationResult) -> str:
    rate, saturation = result.trace["arrival_rate_rps"], result.trace["saturation_rate_rps"]
    load = "all at once"
    if rate is not None:
        load = f"{rate:.3g} requests/s, {rate / saturation:.2f} of the estimated capacity"
    replicas = f"replicas: {result.config['cluster']['num_replicas']}"
    source, version = result.predictor["source"], result.versions["tailcast"]
    return f"{load}; {replicas}; predictor: {source}; tailcast {version}; seed {result.config['seed']}"


def distribution_functions(panels: Mapping[str, Mapping[str, Curve]]) -> str:
    """`distribution_figure` as SVG text with a legend."""
    figure, axes = distribution_figure(panels)
    return svg(figure, axes[0])
