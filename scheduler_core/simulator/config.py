"""What is simulated: requests, policy, predictor, engine."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from scheduler_core.errors import InputError
from scheduler_core.policies import POLICIES, make_policy
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.cluster_config import ClusterConfig
from scheduler_core.simulator.step_time import LinearStepTime, StepTime
from scheduler_core.simulator.step_times import make_step_time
from scheduler_core.simulator.trace import MAX_TIME_S, MAX_TOKENS
from scheduler_core.simulator.workloads import Workload

#: Names for an order policy together with the true lengths: (policy, predictor).
BOUNDS = {"sjf": "ssjf"}

POLICY_NAMES = (*POLICIES, *BOUNDS)

#: Runs of one command that differ in their seed alone.
MAX_SEEDS = 10_000
#: Calls of a live predictor at the same time: each has a thread.
MAX_IN_FLIGHT = 10_000


def check_seeds(name: str, value: int) -> None:
    """Raises `InputError` for a number of seeds that is outside its range."""
    if not 1 <= value <= MAX_SEEDS:
        raise InputError(name, value, f"integers from 1 to {MAX_SEEDS}")


@dataclass(frozen=True, kw_only=True)
class SimulationConfig:
    """Simulate a scheduling policy on a request trace.

    Raises:
        InputError: A value is outside its range, or two values contradict each other.
    """

    INPUTS = ("trace", "workload", "step_time_parameters", "vary")

    policy: str
    """Order of the requests: fcfs (arrival), ssjf (shortest predicted median), sept (smallest predicted mean), tie (mean
    plus tail risk), uniboost, semantic, tail_guard and others, see scheduler_core/policies/README.md; or sjf (shortest
    true length: the bound)."""
    trace: str | None = None
    """Requests: JSON lines, CSV or Parquet with columns request_id, arrival_s, prompt_tokens, output_tokens (the true
    length), max_tokens; optional prompt, prompt_id, tier, priority, tenant, category, ttft_slo_s, tbt_slo_s, ttlt_slo_s,
    session_id, turn, think_time_s, prefix_tokens, and a predicted log-t length mu, sigma, nu. Instead of workload."""
    workload: Workload | None = None
    """Requests drawn from a description, with the seed. Instead of trace."""
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
    predictor_noise: float = 0.0
    """Oracle: standard deviation of the error of its ln length; the predicted distribution is as wide as that."""
    max_in_flight: int = 16
    """Live predictor: calls under way at the same time. They are made as fast as they are answered, so with many of
    them the measured latency, and with it the simulated delay, contains the wait in the service's own queue."""
    predictor_timeout_s: float = 60.0
    """Live predictor: a call without answer after this many seconds has failed."""
    rate: float | None = None
    """Requests per second. Trace: Poisson arrivals in the trace's order are drawn instead of its own. Workload: its own
    kind of arrivals at this rate."""
    load: float | None = None
    """Like rate, as a share of the rate at which the engine (all replicas together) is estimated to be always
    busy (1 = saturated)."""
    seed: int = 0
    """Seed of everything that is drawn: arrivals, the workload, the predictor's noise, routers that draw."""
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    """Limits of the simulated engine: of each replica."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """Replicas, router and migration."""
    step_time: LinearStepTime = field(default_factory=LinearStepTime)
    """How long the simulated engine's steps take."""
    step_time_model: str | None = None
    """Another model of how long steps take: quadratic (Semantic Scheduling), staircase (RAD, Eq. 7), roofline (data
    sheets), table (measured operators). Unset: linear, with the values of step_time."""
    step_time_parameters: dict[str, Any] = field(default_factory=dict)
    """Parameters of that model, such as {model: llama-2-7b, gpu: a100} for roofline; also what `simulate calibrate`
    found."""
    num_clients: int | None = None
    """A closed loop: so many clients, each of which sends its next request when it has the answer to its last. Unset:
    requests arrive at their times."""
    client_think_time_s: float = 0.0
    """Closed loop: mean seconds between an answer and the next request, exponential."""
    prefix_cache_tokens: int = 0
    """Tokens of earlier turns of conversations that each replica keeps; what a turn shares with the one before needs no
    prefill then. 0: none."""
    exact_steps: bool = False
    """Take every decode step by itself instead of many at once; slower, same result."""

    def __post_init__(self) -> None:
        if (self.trace is None) == (self.workload is None):
            raise InputError("trace, workload", (self.trace, self.workload), "one of them")
        if self.policy not in POLICY_NAMES:
            raise InputError("policy", self.policy, ", ".join(POLICY_NAMES))
        make_policy(self.order_policy, self.policy_parameters)
        if self.policy in BOUNDS and self.predictor not in (None, "oracle"):
            raise InputError("predictor", self.predictor, f"oracle for policy {self.policy}")
        if not 0 <= self.predictor_noise < math.inf:
            raise InputError("predictor_noise", self.predictor_noise, "numbers >= 0")
        if self.predictor_noise and self.prediction_source != "oracle":
            raise InputError("predictor_noise", self.predictor_noise, "0 for a predictor other than oracle")
        for name in ("predictor_delay_s", "client_think_time_s"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= MAX_TIME_S:
                raise InputError(name, value, f"seconds from 0 to {MAX_TIME_S:g}")
        if self.rate is not None and self.load is not None:
            raise InputError("rate, load", (self.rate, self.load), "one of them")
        for name in ("rate", "load"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InputError(name, value, "numbers > 0")
        if self.default_max_tokens is not None and not 1 <= self.default_max_tokens <= MAX_TOKENS:
            raise InputError(
                "default_max_tokens", self.default_max_tokens, f"integers from 1 to {MAX_TOKENS}, or unset"
            )
        if self.num_clients is not None and self.num_clients < 1:
            raise InputError("num_clients", self.num_clients, "integers > 0, or unset")
        if self.prefix_cache_tokens < 0:
            raise InputError("prefix_cache_tokens", self.prefix_cache_tokens, "integers >= 0")
        if self.step_time_model is None and self.step_time_parameters:
            raise InputError("step_time_model", None, "a model for step_time_parameters")
        if not 1 <= self.max_in_flight <= MAX_IN_FLIGHT:
            raise InputError("max_in_flight", self.max_in_flight, f"integers from 1 to {MAX_IN_FLIGHT}")
        if not 0 < self.predictor_timeout_s <= MAX_TIME_S:
            raise InputError(
                "predictor_timeout_s", self.predictor_timeout_s, f"seconds > 0, at most {MAX_TIME_S:g}"
            )
        if self.seed < 0:
            raise InputError("seed", self.seed, "integers >= 0")

    def make_step_time(self) -> StepTime:
        """The model of step times: `step_time`, or the one named by `step_time_model`.

        Raises:
            InputError: There is no such model or parameter, or a file of measurements cannot be used.
        """
        if self.step_time_model is None:
            return self.step_time
        return make_step_time(self.step_time_model, self.step_time_parameters)

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
