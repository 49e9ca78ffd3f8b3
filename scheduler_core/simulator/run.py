"""One simulation from configuration to result."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from scheduler_core.decision_log import DecisionLog
from scheduler_core.errors import InputError
from scheduler_core.files import write_json
from scheduler_core.policies import make_policy
from scheduler_core.scheduler import Scheduler
from scheduler_core.simulator.arrivals import poisson_arrivals
from scheduler_core.simulator.cluster import ClusterSimulation
from scheduler_core.simulator.config import BOUNDS, POLICY_NAMES, SimulationConfig
from scheduler_core.simulator.fetch import Predictions, fetch_predictions, noisy_predictions
from scheduler_core.simulator.loop import Outcome, Progress, Simulation
from scheduler_core.simulator.metrics import predictor_statistics, run_metrics
from scheduler_core.simulator.prefix_cache import PrefixCache
from scheduler_core.simulator.records import RequestRecord
from scheduler_core.simulator.request_table import request_columns, write_table
from scheduler_core.simulator.service_time import alone_s, saturation_rate_rps
from scheduler_core.simulator.sources import ClosedLoop
from scheduler_core.simulator.trace import Trace
from scheduler_core.simulator.trace_file import load_trace
from scheduler_core.simulator.watch import RunWatch
from scheduler_core.simulator.workloads import Workload, check_rate
from scheduler_core.simulator.workloads.workload import mean_rate_rps

SCHEMA = "tailcast.simulation/2"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """Result of one run.

    Attributes:
        config: The resolved configuration.
        versions: Versions of tailcast, Python and numpy.
        trace: Source, hash, number of requests and mean arrival rate of the trace that was run.
        metrics: See `metrics.run_metrics`.
        predictor: See `metrics.predictor_statistics`.
        cluster: Migrations, restarts and scaling; None with one replica.
        records: Finished requests, in the order they finished.
        refused: By request id: why it could never run.
        watch: Gaps between tokens, load over time, and who ran when if that was asked for.
    """

    config: dict[str, Any]
    versions: dict[str, str]
    trace: dict[str, Any]
    metrics: dict[str, Any]
    predictor: dict[str, Any]
    cluster: dict[str, Any] | None
    records: list[RequestRecord]
    refused: dict[str, str]
    watch: RunWatch

    def to_json(self) -> dict[str, Any]:
        """Everything but the records and what was watched, ready to be written as JSON."""
        return {
            "schema": SCHEMA,
            "config": self.config,
            "versions": self.versions,
            "trace": self.trace,
            "metrics": self.metrics,
            "predictor": self.predictor,
            "cluster": self.cluster,
            "refused": self.refused,
        }

    def write(self, path: str | Path, requests: str | Path | None = None) -> None:
        """Writes the JSON result, and the table of requests if a path is given for it."""
        if requests is not None:
            write_table([request_columns(self.records, self.config["seed"])], requests)
        write_json(path, self.to_json())


def prepare_trace(config: SimulationConfig) -> Trace:
    """Reads or draws the requests, at the rate or load that the configuration says.

    Raises:
        InputError: The file cannot be used; names row, column and value.
    """
    draws = config.rate is not None or config.load is not None
    if config.workload is not None:
        return _drawn(config, config.workload)
    assert config.trace is not None
    trace = load_trace(config.trace, need_arrivals=not draws, default_max_tokens=config.default_max_tokens)
    if not draws:
        return trace
    rate = _rate(config, trace)
    check_rate("rate" if config.load is None else "load, as a rate", rate, len(trace))
    return poisson_arrivals(trace, rate, np.random.default_rng(config.seed))


def _drawn(config: SimulationConfig, workload: Workload) -> Trace:
    if config.rate is None and config.load is None:
        return workload.trace(config.seed)
    # Lengths do not depend on the rate, so that the load can be found from any.
    rate = config.rate if config.rate is not None else _rate(config, workload.trace(config.seed))
    check_rate("rate" if config.load is None else "load, as a rate", rate, workload.num_requests)
    return replace(workload, arrivals=replace(workload.arrivals, rate_rps=rate)).trace(config.seed)


def _rate(config: SimulationConfig, trace: Trace) -> float:
    if config.rate is not None:
        return config.rate
    assert config.load is not None
    alone = saturation_rate_rps(trace, config.scheduler, config.make_step_time())
    return config.load * alone * config.cluster.num_replicas


def prepare_predictions(
    config: SimulationConfig, trace: Trace, progress: Progress | None = None
) -> Predictions:
    """Fetches the predictions that the configuration asks for, live ones over the network."""
    if config.predictor_noise:
        return noisy_predictions(trace, config.predictor_noise, np.random.default_rng([config.seed, 2]))
    return fetch_predictions(
        trace,
        config.prediction_source,
        served_model=config.served_model,
        max_in_flight=config.max_in_flight,
        timeout_s=config.predictor_timeout_s,
        progress=progress,
    )


def run_simulation(
    config: SimulationConfig,
    *,
    trace: Trace | None = None,
    predictions: Predictions | None = None,
    log: DecisionLog | None = None,
    progress: Callable[[int], None] | None = None,
    watch: RunWatch | None = None,
) -> SimulationResult:
    """Simulates one policy until every request has finished.

    To compare policies on the same arrivals and predictions, call `prepare_trace` and `fetch_predictions` once and
    hand the results to every run.

    Args:
        config: What to simulate.
        trace: Requests with their arrivals, used as they are; None prepares those of the configuration.
        predictions: What the predictor says; None prepares what `config.predictor` asks for. Not used by a bound
            such as sjf, which always sees the true lengths.
        log: Records all decisions; one replica only.
        progress: Called with the number of requests done since the last call.
        watch: What to look at; None: gaps between tokens and load over time.

    Raises:
        InputError: The configuration or trace cannot be used, or no request of the trace fits into the engine.
        TailcastError: The predictor answers nobody.
    """
    if trace is None:
        trace = prepare_trace(config)
    if predictions is None or config.policy in BOUNDS:
        predictions = prepare_predictions(config, trace)
    watch = watch or RunWatch()
    if config.predictor_delay_s is None:
        delays = dict(predictions.latency_s)
    else:
        delays = dict.fromkeys(predictions.answers, config.predictor_delay_s)
    schedulers: dict[str, Scheduler] = {
        name: watch.scheduler(
            config.scheduler, make_policy(config.order_policy, config.policy_parameters), log, name
        )
        for name in config.cluster.replica_ids
    }
    step_time = config.make_step_time()
    arguments = {
        "step_time": step_time,
        "predictions": predictions,
        "delays_s": delays,
        "clients": _clients(config),
        "exact_steps": config.exact_steps,
        "progress": progress,
    }
    if config.cluster.is_single:
        outcome, replica_of, cluster = _run_one(config, trace, schedulers, arguments)
    else:
        if log is not None:
            raise InputError("decisions", config.cluster.num_replicas, "a log of one replica only")
        outcome, replica_of, cluster = _run_cluster(config, trace, schedulers, arguments)
    if not outcome.records:
        reason = next(iter(outcome.refused.values()))
        raise InputError("trace", f"{len(trace)} requests, none of which fits: {reason}", "a larger KV cache")
    records = _completed(outcome.records, watch, replica_of)
    alone = {row.request_id: alone_s(row, config.scheduler, step_time) for row in trace.requests}
    resolved = asdict(config)
    resolved["predictor"] = predictions.source
    return SimulationResult(
        config=resolved,
        versions=_versions(),
        trace={
            "source": trace.source,
            "sha256": trace.sha256,
            "num_requests": len(trace),
            "arrival_rate_rps": mean_rate_rps(trace),
            "saturation_rate_rps": saturation_rate_rps(trace, config.scheduler, step_time)
            * config.cluster.num_replicas,
        },
        metrics=run_metrics(replace(outcome, records=records), schedulers, watch, alone),
        predictor=predictor_statistics(predictions, schedulers),
        cluster=cluster,
        records=records,
        refused=outcome.refused,
        watch=watch,
    )


Run = tuple[Outcome, Mapping[str, str], dict[str, Any] | None]


def _clients(config: SimulationConfig) -> ClosedLoop | None:
    if config.num_clients is None:
        return None
    rng = np.random.default_rng([config.seed, 3])
    return ClosedLoop(num_clients=config.num_clients, think_time_s=config.client_think_time_s, rng=rng)


def _run_one(
    config: SimulationConfig,
    trace: Trace,
    schedulers: Mapping[str, Scheduler],
    arguments: Mapping[str, Any],
) -> Run:
    (core,) = schedulers.values()
    cache = PrefixCache(config.prefix_cache_tokens) if config.prefix_cache_tokens else None
    simulation = Simulation(trace, core, prefix_cache=cache, **arguments)
    return simulation.run(), {}, None


def _run_cluster(
    config: SimulationConfig,
    trace: Trace,
    schedulers: Mapping[str, Scheduler],
    arguments: Mapping[str, Any],
) -> Run:
    simulation = ClusterSimulation(
        trace,
        schedulers,
        prefix_cache_tokens=config.prefix_cache_tokens,
        **arguments,
        **config.cluster.arguments(config.seed, None),
    )
    outcome = simulation.run()
    told = {
        "num_migrations": outcome.num_migrations,
        "num_migrated_blocks": outcome.num_migrated_blocks,
        "ended_migrations": {reason.value: count for reason, count in outcome.ended.items()},
        "num_restarts": outcome.num_restarts,
        "num_scalings": len(outcome.scaling),
    }
    return outcome.total, outcome.replica_of, told


def _completed(
    records: list[RequestRecord], watch: RunWatch, replica_of: Mapping[str, str]
) -> list[RequestRecord]:
    """The records with what only the watch and the router know."""
    longest = {} if watch.gaps is None else watch.gaps.longest_s
    for one in records:
        one.max_tbt_s = longest.get(one.request_id)
        one.replica_id = replica_of.get(one.request_id)
    return records


def _versions() -> dict[str, str]:
    return {
        "tailcast": metadata.version("tailcast"),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


__all__ = [
    "BOUNDS",
    "POLICY_NAMES",
    "SimulationConfig",
    "SimulationResult",
    "prepare_predictions",
    "prepare_trace",
    "run_simulation",
]
