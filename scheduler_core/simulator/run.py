"""One simulation from configuration to result."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from scheduler_core.decision_log import DecisionLog
from scheduler_core.errors import InputError
from scheduler_core.files import write_json
from scheduler_core.policies import POLICIES, make_policy
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from scheduler_core.simulator.arrivals import poisson_arrivals, saturation_rate_rps
from scheduler_core.simulator.fetch import Predictions, fetch_predictions
from scheduler_core.simulator.loop import Progress, Simulation
from scheduler_core.simulator.metrics import predictor_statistics, run_metrics
from scheduler_core.simulator.records import RequestRecord, write_table
from scheduler_core.simulator.step_time import LinearStepTime
from scheduler_core.simulator.trace import Trace, load_trace

SCHEMA = "tailcast.simulation/1"

#: Names for an order policy together with the true lengths: (policy, predictor).
BOUNDS = {"sjf": "ssjf"}

POLICY_NAMES = (*POLICIES, *BOUNDS)


@dataclass(frozen=True, kw_only=True)
class SimulationConfig:
    """Simulate a scheduling policy on a request trace.

    Raises:
        InputError: A value is outside its range, or two values contradict each other.
    """

    trace: str
    """Requests: JSON lines, CSV or Parquet with columns request_id, arrival_s, prompt_tokens, output_tokens (the true
    length), max_tokens; optional prompt, prompt_id, and a predicted log-t length mu, sigma, nu."""
    policy: str
    """Order of the requests: fcfs (arrival), ssjf (shortest predicted median), sept (smallest predicted mean), tie (mean
    plus tail risk), uniboost, semantic, tail_guard and others, see scheduler_core/policies/README.md; or sjf (shortest
    true length: the bound)."""
    policy_parameters: dict[str, float] = field(default_factory=dict)
    """Parameters of the policy that shall not have their default, such as {gamma: 0.95} for tie."""
    predictor: str | None = None
    """Source of predictions: SCHEME://ADDRESS (such as grpc://127.0.0.1:50051: a running serve-predictor, asked about
    every prompt), trace (the trace's columns mu, sigma, nu), oracle (true lengths), none. Default: oracle for sjf,
    trace for policies that use predicted lengths, none for the others."""
    predictor_delay_s: float | None = None
    """Simulated seconds from a request's arrival to its prediction. Default: what was measured for each live call;
    0 for trace and oracle."""
    default_max_tokens: int | None = None
    """Cap of requests for which the trace has none, as public traces; at least as long as their answers. Unset: the
    trace must have caps."""
    served_model: str = ""
    """Name of the served model, for predictors that know several."""
    max_in_flight: int = 16
    """Live predictor: calls under way at the same time. They are made as fast as they are answered, so with many of
    them the measured latency, and with it the simulated delay, contains the wait in the service's own queue."""
    predictor_timeout_s: float = 60.0
    """Live predictor: a call without answer after this many seconds has failed."""
    rate: float | None = None
    """Draw Poisson arrivals with this many requests per second, in the trace's order, instead of the trace's own."""
    load: float | None = None
    """Like rate, as a share of the rate at which the engine is estimated to be always busy (1 = saturated)."""
    seed: int = 0
    """Seed of the drawn arrivals."""
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    """Limits of the simulated engine."""
    step_time: LinearStepTime = field(default_factory=LinearStepTime)
    """How long the simulated engine's steps take."""
    exact_steps: bool = False
    """Take every decode step by itself instead of many at once; slower, same result."""

    def __post_init__(self) -> None:
        if self.policy not in POLICY_NAMES:
            raise InputError("policy", self.policy, ", ".join(POLICY_NAMES))
        make_policy(self.order_policy, self.policy_parameters)
        if self.policy in BOUNDS and self.predictor not in (None, "oracle"):
            raise InputError("predictor", self.predictor, f"oracle for policy {self.policy}")
        if self.predictor_delay_s is not None and not 0 <= self.predictor_delay_s < math.inf:
            raise InputError("predictor_delay_s", self.predictor_delay_s, "seconds >= 0")
        if self.rate is not None and self.load is not None:
            raise InputError("rate, load", (self.rate, self.load), "one of them")
        for name in ("rate", "load"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InputError(name, value, "numbers > 0")
        if self.default_max_tokens is not None and self.default_max_tokens < 1:
            raise InputError("default_max_tokens", self.default_max_tokens, "integers > 0, or unset")
        if self.max_in_flight <= 0:
            raise InputError("max_in_flight", self.max_in_flight, "integers > 0")
        if not 0 < self.predictor_timeout_s < math.inf:
            raise InputError("predictor_timeout_s", self.predictor_timeout_s, "seconds > 0")
        if self.seed < 0:
            raise InputError("seed", self.seed, "integers >= 0")

    @property
    def order_policy(self) -> str:
        """The policy that orders the queue: that of `policy`, or the one a bound is built on."""
        return BOUNDS.get(self.policy, self.policy)

    @property
    def prediction_source(self) -> str:
        """`predictor`, or its default for the policy."""
        if self.predictor is not None:
            return self.predictor
        if self.policy in BOUNDS:
            return "oracle"
        return "trace" if "length" in POLICIES[self.policy].inputs else "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """Result of one run.

    Attributes:
        config: The resolved configuration.
        versions: Versions of tailcast, Python and numpy.
        trace: Source, hash, number of requests and mean arrival rate of the trace that was run.
        metrics: See `metrics.run_metrics`.
        predictor: See `metrics.predictor_statistics`.
        records: Finished requests, in the order they finished.
        refused: By request id: why it could never run.
    """

    config: dict[str, Any]
    versions: dict[str, str]
    trace: dict[str, Any]
    metrics: dict[str, Any]
    predictor: dict[str, Any]
    records: list[RequestRecord]
    refused: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """Everything but the records, ready to be written as JSON."""
        return {
            "schema": SCHEMA,
            "config": self.config,
            "versions": self.versions,
            "trace": self.trace,
            "metrics": self.metrics,
            "predictor": self.predictor,
            "refused": self.refused,
        }

    def write(self, path: str | Path, requests: str | Path | None = None) -> None:
        """Writes the JSON result, and the table of requests if a path is given for it."""
        if requests is not None:
            write_table(self.records, requests)
        write_json(path, self.to_json())


def prepare_trace(config: SimulationConfig) -> Trace:
    """Reads the trace and draws its arrivals if the configuration says so.

    Raises:
        InputError: The file cannot be used; names row, column and value.
    """
    draws = config.rate is not None or config.load is not None
    trace = load_trace(config.trace, need_arrivals=not draws, default_max_tokens=config.default_max_tokens)
    if not draws:
        return trace
    rate = config.rate
    if config.load is not None:
        rate = config.load * saturation_rate_rps(trace, config.scheduler, config.step_time)
    assert rate is not None
    return poisson_arrivals(trace, rate, np.random.default_rng(config.seed))


def prepare_predictions(
    config: SimulationConfig, trace: Trace, progress: Progress | None = None
) -> Predictions:
    """Fetches the predictions that the configuration asks for, live ones over the network."""
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
) -> SimulationResult:
    """Simulates one policy until every request has finished.

    To compare policies on the same arrivals and predictions, call `prepare_trace` and `fetch_predictions` once and
    hand the results to every run.

    Args:
        config: What to simulate.
        trace: Requests with their arrivals, used as they are; None prepares `config.trace`.
        predictions: What the predictor says; None prepares what `config.predictor` asks for. Not used by a bound
            such as sjf, which always sees the true lengths.
        log: Records all decisions.
        progress: Called with the number of requests done since the last call.

    Raises:
        InputError: The configuration or trace cannot be used, or no request of the trace fits into the engine.
        TailcastError: The predictor answers nobody.
    """
    if trace is None:
        trace = prepare_trace(config)
    if predictions is None or config.policy in BOUNDS:
        predictions = prepare_predictions(config, trace)
    scheduler = Scheduler(config.scheduler, make_policy(config.order_policy, config.policy_parameters), log)
    if config.predictor_delay_s is None:
        delays = dict(predictions.latency_s)
    else:
        delays = dict.fromkeys(predictions.answers, config.predictor_delay_s)
    simulation = Simulation(
        trace,
        scheduler,
        config.step_time,
        predictions,
        delays_s=delays,
        exact_steps=config.exact_steps,
        progress=progress,
    )
    outcome = simulation.run()
    if not outcome.records:
        reason = next(iter(outcome.refused.values()))
        raise InputError("trace", f"{len(trace)} requests, none of which fits: {reason}", "a larger KV cache")
    span = trace.requests[-1].arrival_s - trace.requests[0].arrival_s
    resolved = asdict(config)
    resolved["predictor"] = predictions.source
    return SimulationResult(
        config=resolved,
        versions=_versions(),
        trace={
            "source": trace.source,
            "sha256": trace.sha256,
            "num_requests": len(trace),
            "arrival_rate_rps": (len(trace) - 1) / span if span > 0 else None,
            "saturation_rate_rps": saturation_rate_rps(trace, config.scheduler, config.step_time),
        },
        metrics=run_metrics(outcome, scheduler),
        predictor=predictor_statistics(predictions, scheduler),
        records=outcome.records,
        refused=outcome.refused,
    )


def _versions() -> dict[str, str]:
    return {
        "tailcast": metadata.version("tailcast"),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
