"""`simulate run`: one policy on one workload, with one or more seeds."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scheduler_core.decision_log import DecisionLog
from scheduler_core.errors import InputError
from scheduler_core.files import writable_target, write_json
from scheduler_core.ranges import check_ranges
from scheduler_core.simulator.commands import progress_bar
from scheduler_core.simulator.config import MAX_SEEDS, SimulationConfig
from scheduler_core.simulator.records import SCHEMA, request_columns
from scheduler_core.simulator.run import SimulationResult, prepare_predictions, prepare_trace, run_simulation
from scheduler_core.simulator.step_time import rad_bounds
from scheduler_core.simulator.tables import Columns, check_table_path, write_table
from scheduler_core.simulator.trace import Trace
from scheduler_core.simulator.watch import STEPS_SCHEMA, RunWatch, StepTable
from scheduler_core.statistics import over_seeds

logger = logging.getLogger(__name__)
#: Mean number of waiting requests below which a policy has nothing to order.
HARDLY_ANY = 0.01


@dataclass(frozen=True, kw_only=True)
class RunConfig(SimulationConfig):
    """Simulate one scheduling policy on a request trace or a drawn workload and write its latencies as JSON."""

    OUTPUTS = ("json", "requests", "steps", "decisions", "report")

    json: str
    """Where to write the result: configuration, versions, metrics, statistics of the predictor; with batch former rad
    also T_R, T_max and n of its theorems."""
    overwrite: bool = False
    """Replace files at the outputs."""
    requests: str | None = None
    """Where to write a table with one row per request and seed (.parquet, .csv or .jsonl); `simulate compare` pairs the
    requests of two runs by it, if it is Parquet."""
    steps: str | None = None
    """Where to write a table with one row per step (.parquet, .csv or .jsonl): batch size, tokens, KV blocks in use,
    duration, queue. Steps that were taken at once are one row; with exact_steps every step has its own."""
    decisions: str | None = None
    """Where to write the decision log (JSON lines): every call to the scheduler and every plan, for exact replay."""
    report: str | None = None
    """Where to write a page with tables and figures (.html)."""
    num_seeds: int = 1
    """Runs with the seeds seed, seed + 1, ...; the result then has means with 95 % confidence intervals under
    `intervals`, and everything else is that of the first seed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, num_seeds=(1, MAX_SEEDS))
        if self.num_seeds > 1 and self.decisions is not None:
            raise InputError("decisions", self.decisions, "unset with more than one seed")
        for name in self.OUTPUTS:
            if getattr(self, name) == "":
                raise InputError(name, "", "a path")


def run(config: RunConfig) -> None:
    """Carries out `simulate run`."""
    for name in config.OUTPUTS:
        path = getattr(config, name)
        if path is not None:
            (check_table_path if name in ("requests", "steps") else writable_target)(path, name)
    first: SimulationResult | None = None
    runs: list[dict[str, Any]] = []
    requests: list[Columns] = []
    steps: list[Columns] = []
    for seed in range(config.seed, config.seed + config.num_seeds):
        simulation = config.simulation(seed=seed)
        trace = prepare_trace(simulation)
        result = _simulated(config, simulation, trace)
        runs.append({"seed": seed, "trace": trace.fingerprint(), "metrics": result.metrics})
        if config.requests is not None:
            requests.append(request_columns(result.records, seed))
        if result.watch.steps is not None:
            steps.append(result.watch.steps.columns(seed))
        if first is None:
            first, first_trace = result, trace
    assert first is not None
    if config.requests is not None:
        write_table(_joined(requests), config.requests, SCHEMA, "requests")
    if config.steps is not None:
        write_table(_joined(steps), config.steps, STEPS_SCHEMA, "steps")
    content = first.to_json() | {"num_seeds": config.num_seeds, "runs": runs, "requests": None}
    if config.requests is not None:  # from the folder of the result, so that both can be moved together
        content["requests"] = os.path.relpath(config.requests, Path(config.json).parent)
    if config.num_seeds > 1:
        content["intervals"] = over_seeds([one["metrics"] for one in runs])
    if config.scheduler.batching == "rad":
        bounds = rad_bounds(first_trace, config.scheduler, config.make_step_time())
        content["rad_bounds"] = asdict(bounds)
        logger.info(
            "T_R %.4g s, T_max %.4g s; stable at loads up to 0.9 with n = %d",
            bounds.expected_s,
            bounds.longest_s,
            bounds.num_per_cycle,
        )
    if config.report is not None:
        from scheduler_core.simulator.run_page import write_run_page

        write_run_page(first, config.report, content.get("intervals"))
    write_json(config.json, content)
    ttft = first.metrics["ttft_s"]
    summary = (config.policy, first.metrics["num_finished"], ttft["mean"], ttft["p99"])
    logger.info("%s: %d requests, ttft mean %.3f s p99 %.3f s", *summary)
    if first.metrics["mean_requests_waiting"] < HARDLY_ANY:
        slots = config.scheduler.max_num_seqs * first.metrics["mean_replicas"]
        logger.warning(
            "nobody waited: load %.2f of %g slots, so every policy gives the same latencies; a higher --load or --rate, or "
            "fewer --scheduler.max_num_seqs, makes them differ",
            first.metrics["mean_requests_in_system"],
            slots,
        )


def _joined(parts: Sequence[Columns]) -> Columns:
    """The tables of several seeds as one."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _simulated(config: RunConfig, simulation: SimulationConfig, trace: Trace) -> SimulationResult:
    """The run of one seed, with progress bars and the decision log."""
    log = DecisionLog() if config.decisions is not None else None
    if "://" in simulation.prediction_source:
        with progress_bar(len(trace), "predicting") as bar:
            predictions = prepare_predictions(simulation, trace, bar.update)
    else:
        predictions = prepare_predictions(simulation, trace)
    description = f"simulating {simulation.policy}"
    if config.num_seeds > 1:
        description += f", seed {simulation.seed}"
    watch = RunWatch(steps=None if config.steps is None else StepTable())
    with progress_bar(len(trace), description) as bar:
        result = run_simulation(
            simulation, trace=trace, predictions=predictions, log=log, progress=bar.update, watch=watch
        )
    if log is not None and config.decisions is not None:
        log.write(config.decisions)
    return result
