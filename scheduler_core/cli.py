"""The command `simulate`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from scheduler_core.command import run_command
from scheduler_core.decision_log import DecisionLog
from scheduler_core.errors import MissingExtraError
from scheduler_core.files import writable_target
from scheduler_core.simulator.records import check_table_path
from scheduler_core.simulator.run import (
    SimulationConfig,
    SimulationResult,
    prepare_predictions,
    prepare_trace,
    run_simulation,
)

USAGE = """usage: simulate COMMAND [OPTIONS]

Commands:
  run    simulate one scheduling policy on a request trace and write its metrics

simulate COMMAND --help explains the options.
"""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunConfig(SimulationConfig):
    """Simulate one scheduling policy on a request trace and write its latencies as JSON."""

    json: str
    """Where to write the result: configuration, versions, metrics, statistics of the predictor."""
    requests: str | None = None
    """Where to write a table with one row per request (.parquet, .csv or .jsonl)."""
    decisions: str | None = None
    """Where to write the decision log (JSON lines): every call to the scheduler and every plan, for exact replay."""

    def simulation(self) -> SimulationConfig:
        """The part that is not about files to write."""
        return SimulationConfig(**{item.name: getattr(self, item.name) for item in fields(SimulationConfig)})


def _progress_bar(total: int, what: str) -> Any:
    """A bar on stderr if that is a terminal."""
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise MissingExtraError("tqdm", "sim") from error
    return tqdm(total=total, desc=what, unit="req", disable=None, file=sys.stderr)


def run(config: RunConfig) -> None:
    """Carries out `simulate run`."""
    target = writable_target(config.json, "json")
    if config.requests is not None:
        check_table_path(config.requests)
    if config.decisions is not None:
        writable_target(config.decisions, "decisions")
    simulation = config.simulation()
    trace = prepare_trace(simulation)
    if "://" in simulation.prediction_source:
        with _progress_bar(len(trace), "predicting") as bar:
            predictions = prepare_predictions(simulation, trace, bar.update)
    else:
        predictions = prepare_predictions(simulation, trace)
    log = DecisionLog() if config.decisions is not None else None
    with _progress_bar(len(trace), f"simulating {config.policy}") as bar:
        result = run_simulation(
            simulation, trace=trace, predictions=predictions, log=log, progress=bar.update
        )
    if log is not None and config.decisions is not None:
        log.write(config.decisions)
    result.write(target, config.requests)
    logger.info("%s", _headline(config.policy, result))


def _headline(policy: str, result: SimulationResult) -> str:
    ttft, per_token = result.metrics["ttft_s"], result.metrics["per_token_latency_s"]
    return (
        f"{policy}: {result.metrics['num_finished']} requests, ttft mean {ttft['mean']:.3f} s p99 {ttft['p99']:.3f} s, "
        f"per-token latency mean {per_token['mean']:.4f} s p99 {per_token['p99']:.4f} s"
    )


def main(args: Sequence[str] | None = None) -> int:
    """Entry point of the console script `simulate`; returns the exit code."""
    words = list(sys.argv[1:] if args is None else args)
    if not words or words[0] in ("-h", "--help"):
        (sys.stdout if words else sys.stderr).write(USAGE)
        return 0 if words else 2
    if words[0] != "run":
        sys.stderr.write(f"simulate: error: COMMAND: got {words[0]!r}; allowed: run\n")
        return 2
    return run_command("simulate run", RunConfig, run, extra="sim", args=words[1:])
