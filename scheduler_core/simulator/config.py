"""Configuration of a simulation: requests, policy, predictor, engine, and the replicas with their router."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from scheduler_core.engine.decision_log import DecisionLog
from scheduler_core.errors import InputError
from scheduler_core.policies import make_policy, policy_class
from scheduler_core.prediction.service_access import ACCESS_FILES, ServiceAccess
from scheduler_core.ranges import FINITE, INTEGERS, POSITIVE, check_choice, check_ranges, construct
from scheduler_core.routing import ROUTERS, SCALERS, make_router
from scheduler_core.routing.base import Router, Scaler
from scheduler_core.routing.disaggregated import Disaggregated
from scheduler_core.routing.llumnix import (
    AdaptiveHeadroom,
    Headroom,
    Llumnix,
    MigrationPlanner,
    exponential_headroom,
)
from scheduler_core.routing.migration import KVLink
from scheduler_core.routing.snapshot import ReplicaRole
from scheduler_core.routing.target_tracking import TargetTracking
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from scheduler_core.simulator.clients import PATIENT, ClientPlan
from scheduler_core.simulator.failures import Failure, FailurePlan
from scheduler_core.simulator.step_time import calibrated_step_time, make_step_time
from scheduler_core.simulator.step_time.base import LinearStepTime, StepTime
from scheduler_core.simulator.step_time.roofline import RooflineStepTime
from scheduler_core.simulator.trace import MAX_REQUESTS, MAX_TIME_S, MAX_TOKENS
from scheduler_core.simulator.workloads.workload import Workload

#: Reference policies: an order policy that always gets the true lengths.
BOUNDS = {"sjf": "ssjf"}

#: Maximum number of runs of one command that only differ in their seed.
MAX_SEEDS = 10_000
#: Each replica has its own scheduler; 10,000 take about half a GB.
MAX_REPLICAS = 10_000


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Identical replicas of the simulated engine, and the router in front of them."""

    num_replicas: int = 1
    """Number of replicas; 1 needs no router."""
    router: str = "jsq"
    """Router that chooses the replica of each request: round_robin, random, jsq (least requests), power_of_two, session_hash,
    prefix_aware (vLLM's production-stack), cache_aware (SGLang), endpoint_picker (llm-d), kv_router (Dynamo), session_affine,
    prefix_affine, least_kv, predicted_work, predicted_wait, infaas, llumnix, disaggregated; see
    scheduler_core/routing/README.md."""
    router_parameters: dict[str, float | bool] = field(default_factory=dict)
    """Overrides of the router's parameters, such as {alpha: 2} for infaas or {whole_queue: true} for llumnix."""
    snapshot_interval_s: float = 0.0
    """endpoint_picker, least_kv, infaas and llumnix: how old the metrics of the engines are at most that the router sees, such
    as 0.05 (llm-d's default) or 15 (Prometheus). 0: they are current."""
    num_prefill_replicas: int = 0
    """disaggregated: number of replicas that process prompts; the others generate."""
    num_tiers: int = 5
    """llumnix and migration: number of tiers with headroom (K)."""
    headroom_fraction: float = 0.20
    """llumnix and migration: fraction of the KV cache kept free on replicas with requests of tier 0 (h_max)."""
    headroom_decay: float = 1.0
    """llumnix and migration: lambda; the headroom of tier p is exp(-lambda p) times that of tier 0."""
    migration: bool = False
    """Move running requests from the fullest to the freest replicas (multi-tier paper, section 3.5)."""
    migration_threshold: float = 0.3
    """Migration: minimum difference of freeness, in blocks per running request (theta)."""
    interval_s: float = 0.05
    """Seconds between two decisions of migration, disaggregation and auto-scaling."""
    headroom_window_s: float | None = None
    """llumnix: seconds between two adaptations of each tier's headroom to its missed targets (ttft_slo_s). Unset: fixed."""
    stage_blocks: int = 64
    """Migration: maximum number of KV blocks copied in one stage, during which the request generates."""
    link_bytes_per_s: float = 12.5e9
    """Migration and disaggregation: bandwidth between replicas; default: 100 Gb/s."""
    kv_bytes_per_token: int | None = None
    """Migration and disaggregation: bytes of keys and values of a token. Unset: those of the model of step_time_model
    roofline, else 131072 (Llama-3-8B, Mistral-7B)."""
    min_replicas: int | None = None
    """Auto-scaling: minimum number of replicas; the others start when needed. Unset: no auto-scaling."""
    startup_s: float = 0.0
    """Auto-scaling: seconds from the order of a replica until it serves: node, image, weights, compilation."""
    scaler: str | None = None
    """Auto-scaling: freeness (multi-tier Llumnix), or target_tracking (Kubernetes' horizontal pod autoscaler, KEDA). Unset:
    freeness."""
    scaler_parameters: dict[str, float | str] = field(default_factory=dict)
    """target_tracking: metric (waiting, running, concurrency, kv_usage) and its target for each replica, default {metric:
    waiting, target: 5}; also tolerance (0.1), window_s (300, of scale-in), interval_s (15)."""
    scale_out_below: float = -0.5
    """freeness: start a replica when the mean freeness is lower."""
    scale_in_above: float = 1.5
    """freeness: drain a replica when the mean freeness is higher."""
    drain_timeout_s: float | None = None
    """Auto-scaling: seconds after which a draining replica is killed with its requests, such as 30 (Kubernetes' default). Unset:
    it serves them to their end."""
    failures: tuple[Failure, ...] = ()
    """Failures of replicas at given times, such as [{at_s: 600, replica: 0}]."""
    mtbf_s: float | None = None
    """Mean seconds that a replica runs until it fails, exponentially distributed. Unset: no random failures."""
    restart_s: float | None = None
    """Seconds until a failed replica serves again, with empty caches. Unset: startup_s."""
    max_retries: int = 2
    """How often a request that was lost with its replica is sent again; 2 is the default of OpenAI's clients. 0: it fails."""
    retry_started: bool = True
    """Also send requests again of which the client may have had output tokens; false: they fail, as streams do."""

    def __post_init__(self) -> None:
        check_ranges(self, num_replicas=(1, MAX_REPLICAS), min_replicas=(1, self.num_replicas))
        check_ranges(self, interval_s=(POSITIVE, MAX_TIME_S), startup_s=(0, MAX_TIME_S))
        check_ranges(self, snapshot_interval_s=(0, MAX_TIME_S), drain_timeout_s=(0, MAX_TIME_S))
        check_ranges(
            self, mtbf_s=(POSITIVE, MAX_TIME_S), restart_s=(0, MAX_TIME_S), max_retries=(0, INTEGERS)
        )
        check_choice("router", self.router, ROUTERS)
        if self.scaler is not None:
            check_choice("scaler", self.scaler, SCALERS)
        if self.snapshot_interval_s and not ROUTERS[self.router].scrapes:
            names = ", ".join(name for name, kind in ROUTERS.items() if kind.scrapes)
            raise InputError("snapshot_interval_s", self.snapshot_interval_s, f"0, or a router of {names}")
        for failure in self.failures:
            if failure.replica >= self.num_replicas:
                raise InputError("failures.replica", failure.replica, "less than num_replicas")
        if self.min_replicas is None:
            for name in ("scaler", "scaler_parameters", "drain_timeout_s"):
                if getattr(self, name) not in ({}, None):
                    raise InputError(name, getattr(self, name), "unset without min_replicas")
        self.make_scaler()
        disaggregated, prefill = self.router == "disaggregated", self.num_prefill_replicas
        if disaggregated != (prefill > 0):
            raise InputError("num_prefill_replicas", prefill, "> 0 with router disaggregated, and only then")
        if not 0 <= prefill < self.num_replicas:
            raise InputError("num_prefill_replicas", prefill, "fewer than num_replicas")
        if self.migration and disaggregated:
            raise InputError(
                "migration", True, "false with router disaggregated, which has its own migrations"
            )
        if self.headroom_window_s is not None and self.router != "llumnix":
            raise InputError(
                "headroom_window_s", self.headroom_window_s, "unset with another router than llumnix"
            )
        self.headroom()
        self.link()
        self.make_router(0)

    @property
    def replica_ids(self) -> tuple[str, ...]:
        width = len(str(self.num_replicas - 1))
        return tuple(f"{index:0{width}d}" for index in range(self.num_replicas))

    def headroom(self) -> Headroom:
        headroom = exponential_headroom(self.num_tiers, self.headroom_fraction, self.headroom_decay)
        if self.headroom_window_s is None:
            return headroom
        return AdaptiveHeadroom(headroom.fractions, window_s=self.headroom_window_s)

    def link(self, step_time: object = None) -> KVLink:
        """The link for copies of the KV cache of the served model."""
        num_bytes = self.kv_bytes_per_token
        if num_bytes is None and isinstance(step_time, RooflineStepTime):
            num_bytes = step_time.size.kv_bytes_per_token
        if num_bytes is None:
            return KVLink(bytes_per_s=self.link_bytes_per_s)
        return KVLink(kv_bytes_per_token=num_bytes, bytes_per_s=self.link_bytes_per_s)

    def make_router(self, seed: int) -> Router:
        """A new router; `seed` is for routers that use random numbers."""
        if self.router == "llumnix":
            whole_queue = self.router_parameters.get("whole_queue", False)
            if set(self.router_parameters) - {"whole_queue"} or not isinstance(whole_queue, bool):
                allowed = "whole_queue: true or false for llumnix, and headroom_fraction"
                raise InputError("router_parameters", self.router_parameters, allowed)
            return Llumnix(headroom=self.headroom(), whole_queue=whole_queue)
        rng = np.random.default_rng([seed, 1]) if ROUTERS[self.router].needs_generator else None
        return make_router(self.router, self.router_parameters, rng)

    def make_scaler(self) -> Scaler | None:
        """A new scaler; None without auto-scaling."""
        if self.min_replicas is None:
            return None
        bounds = {"min_replicas": self.min_replicas, "max_replicas": self.num_replicas}
        for name in bounds:
            if name in self.scaler_parameters:
                allowed = "other parameters; use min_replicas and num_replicas"
                raise InputError(f"scaler_parameters.{name}", self.scaler_parameters[name], allowed)
        parameters = dict(self.scaler_parameters)
        for name, value in parameters.items():
            if isinstance(value, str) != (name == "metric"):
                allowed = ", ".join(TargetTracking.METRICS) if name == "metric" else "a number"
                raise InputError(f"scaler_parameters.{name}", value, allowed)
        name = self.scaler or "freeness"
        if name == "freeness":
            if parameters:
                allowed = "unset with scaler freeness; use scale_out_below and scale_in_above"
                raise InputError("scaler_parameters", parameters, allowed)
            parameters = {"out_below": self.scale_out_below, "in_above": self.scale_in_above}
        return construct("scaler", name, SCALERS[name], parameters | bounds)

    @property
    def failure_plan(self) -> FailurePlan | None:
        """When replicas fail, without a seed; None: never."""
        if not self.failures and self.mtbf_s is None and self.drain_timeout_s is None:
            return None
        names = self.replica_ids
        return FailurePlan(
            failures=tuple([(item.at_s, names[item.replica], item.down_s) for item in self.failures]),
            mtbf_s=self.mtbf_s,
            restart_s=self.startup_s if self.restart_s is None else self.restart_s,
            max_retries=self.max_retries,
            retry_started=self.retry_started,
        )

    def simulation_arguments(self, seed: int, step_time: object = None) -> Mapping[str, Any]:
        """Arguments of `Simulation` for this cluster; empty with one replica that does not fail. `step_time`: see `link`."""
        failures = self.failure_plan
        if self.num_replicas == 1 and failures is None:
            return {}
        names, router = self.replica_ids, self.make_router(seed)
        arguments: dict[str, Any] = {"router": router, "interval_s": self.interval_s}
        arguments["snapshot_interval_s"] = self.snapshot_interval_s
        if failures is not None:
            arguments["failures"] = replace(failures, seed=seed)
        arguments["link"] = self.link(step_time)
        if isinstance(router, Disaggregated):
            roles = [ReplicaRole.PREFILL] * self.num_prefill_replicas
            roles += [ReplicaRole.DECODE] * (self.num_replicas - len(roles))
            roles_by_name = dict(zip(names, roles, strict=True))
            arguments |= {"roles": roles_by_name, "planner": router, "stage_blocks": None}
        elif self.migration:
            arguments["planner"] = MigrationPlanner(
                headroom=router.headroom if isinstance(router, Llumnix) else self.headroom(),
                threshold=self.migration_threshold,
                interval_s=self.interval_s,
            )
            arguments["stage_blocks"] = self.stage_blocks
        scaler = self.make_scaler()
        if scaler is not None:
            if isinstance(scaler, TargetTracking) and "planner" not in arguments:
                arguments["interval_s"] = scaler.interval_s
            arguments |= {
                "scaler": scaler,
                "startup_s": self.startup_s,
                "drain_timeout_s": self.drain_timeout_s,
            }
            arguments["standby"] = frozenset(names[self.min_replicas :])
        return arguments


@dataclass(frozen=True, kw_only=True)
class SimulationConfig(ServiceAccess):
    """Simulate a scheduling policy on a request trace."""

    INPUTS = ("trace", "workload", "step_time_parameters", "vary", *ACCESS_FILES)
    SPELLINGS = (("served_model", "model"),)

    policy: str | None = None
    """Order of the requests: fcfs (arrival), bounded_shortest (shortest first, with bounded delay relative to
    fcfs), ssjf (shortest predicted median), sept (smallest predicted mean), tie (mean plus tail risk), uniboost,
    semantic and others, see scheduler_core/policies/README.md; or sjf (shortest true length, as a reference).
    Custom policies: package.module:Class, or the name of an entry point in the group tailcast.policies. Unset: llumlet
    (tiers) with cluster.router llumnix, else fcfs."""
    trace: str | None = None
    """Requests: JSON lines, CSV or Parquet with columns request_id, arrival_s, prompt_tokens, output_tokens (the true
    length), max_tokens; optional prompt, prompt_id, tier, priority, tenant, category, ttft_slo_s, tbt_slo_s, ttlt_slo_s,
    session_id, turn, think_time_s, prefix_tokens, content or hash_ids (shared prefixes), after (requests to wait for),
    ended_by, and a predicted log-t length mu, sigma, nu. Alternative to workload."""
    repeat: int = 1
    """Number of times that the trace is simulated in a row, with new ids of requests and conversations, so that a short
    trace reaches a steady state."""
    workload: Workload | None = None
    """Requests drawn from a description with the seed. Alternative to trace."""
    policy_parameters: dict[str, float] = field(default_factory=dict)
    """Overrides of the policy's parameters, such as {gamma: 0.95} for tie."""
    predictor: str | None = None
    """Source of predictions: pretrained or tiny (shipped with tailcast), an artifact folder or grpc://HOST:PORT (a running
    serve-predictor; grpcs:// with TLS), each called for every prompt; trace (columns mu, sigma, nu of the trace), oracle (true lengths),
    none. sjf always uses the oracle. Default: trace for policies that use predicted lengths, none for the others."""
    predictor_delay_s: float | None = None
    """Simulated seconds from a request's arrival to its prediction. Default: the measured time of each live call,
    which includes queueing in the service because 16 calls are made concurrently; 0 for trace and oracle."""
    default_max_tokens: int | None = None
    """max_tokens of requests without one, as in public traces; at least as large as their output lengths.
    Unset: the trace must have max_tokens."""
    served_model: str = ""
    """Name of the served model, for predictors of several models. Unset: the column model of the trace."""
    online_calibration: bool = False
    """Correct the predicted lengths of each served model with the lengths of finished requests, see
    docs/correcting.md. Policies and metrics then use the corrected predictions."""
    predictor_noise: float = 0.0
    """Oracle: standard deviation of the error of ln length, and scale of the predicted distribution."""
    rate: float | None = None
    """Requests per second. Trace: Poisson arrivals in the order of the trace replace its arrivals. Workload:
    its arrival process at this rate."""
    load: float | None = None
    """Like rate, as a fraction of the estimated rate at which the engine (all replicas together) is always busy
    (1 = saturated)."""
    seed: int = 0
    """Seed of all random numbers: arrivals, workload, noise of the oracle, routers."""
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    """Limits of each replica of the simulated engine."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """Replicas, router and migration."""
    clients: ClientPlan = PATIENT
    """How long clients wait for a token, and how often they send a request again."""
    step_time: LinearStepTime = field(default_factory=LinearStepTime)
    """Durations of the simulated engine's steps."""
    step_time_model: str | None = None
    """Model of step times: quadratic (Semantic Scheduling), staircase (RAD, Eq. 7), roofline (data sheets),
    table (measured operators). Unset: linear, with the values of step_time."""
    step_time_parameters: dict[str, Any] | str = field(default_factory=dict)
    """Parameters of step_time_model, such as {model: qwen3-14b, gpu: h100, tensor_parallel: 2, weights: fp8} for roofline, whose
    model is also a Hugging Face name or the path of a config.json (docs/accuracy.md); or the path of a result of
    `simulate calibrate` (JSON), which also has the model."""
    horizon_s: float | None = None
    """Simulated seconds after which the run ends although requests are not finished; for closed loops, in which better
    orders serve more turns in the same time. Unset: until all requests have finished."""
    stop_after: int | None = None
    """Number of finished requests after which the run ends, for offline generation of so many outputs from more prompts
    (workload.arrivals.process at_once); makespan_s is then the time for them. Unset: until all requests have finished."""
    exact_steps: bool = False
    """Simulate every decode step individually instead of many at once; slower, same result."""

    def __post_init__(self) -> None:
        if (self.trace is None) == (self.workload is None):
            raise InputError("trace, workload", (self.trace, self.workload), "one of them")
        if self.repeat != 1 and self.trace is None:
            raise InputError("repeat", self.repeat, "1 with a workload; use more workload.num_requests")
        make_policy(self.order_policy, self.policy_parameters)
        check_ranges(self, predictor_noise=(0.0, FINITE), predictor_delay_s=(0, MAX_TIME_S))
        check_ranges(
            self, rate=(POSITIVE, FINITE), load=(POSITIVE, FINITE), default_max_tokens=(1, MAX_TOKENS)
        )
        check_ranges(self, horizon_s=(POSITIVE, MAX_TIME_S), stop_after=(1, MAX_REQUESTS))
        check_ranges(self, seed=(0, 2**63 - 1), repeat=(1, MAX_REQUESTS))
        if self.predictor_noise and self.prediction_source != "oracle":
            raise InputError("predictor_noise", self.predictor_noise, "0 for a predictor other than oracle")
        if self.rate is not None and self.load is not None:
            raise InputError("rate, load", (self.rate, self.load), "one of them")
        is_file = isinstance(self.step_time_parameters, str)
        if self.step_time_model is None and self.step_time_parameters and not is_file:
            raise InputError("step_time_model", None, "a model for step_time_parameters")

    def simulation(self, **changes: Any) -> SimulationConfig:
        """The configuration of the simulation only, without other options of a command."""
        values = {item.name: getattr(self, item.name) for item in fields(SimulationConfig)}
        return SimulationConfig(**values | changes)

    @property
    def limits(self) -> SchedulerConfig:
        """`scheduler` with the size of the KV cache: if it is unset, with a roofline as many blocks as fit into the memory."""
        limits = self.scheduler
        if limits.num_kv_blocks is not None:
            return limits
        num = limits.capacity_blocks
        if self.step_time_model == "roofline" or isinstance(self.step_time_parameters, str):
            step_time = self.make_step_time()
            if isinstance(step_time, RooflineStepTime):
                num = step_time.num_kv_blocks(
                    limits.kv_block_tokens, limits.max_num_seqs, limits.max_num_batched_tokens
                )
        return replace(limits, num_kv_blocks=num)

    def make_scheduler(self, log: DecisionLog | None = None) -> Scheduler:
        """A new scheduler of one replica; `InputError` if policy and batch former are not compatible."""
        return Scheduler(self.limits, make_policy(self.order_policy, self.policy_parameters), log)

    def make_step_time(self) -> StepTime:
        """The model of step times; `InputError` if a name or parameter is unknown, or a file is invalid."""
        parameters = self.step_time_parameters
        if isinstance(parameters, str):
            return calibrated_step_time(parameters, self.step_time_model)
        if self.step_time_model is None:
            return self.step_time
        return make_step_time(self.step_time_model, parameters)

    @property
    def trace_repeat(self) -> int | None:
        """`repeat` of a trace; None for a workload, which has more requests instead."""
        return self.repeat if self.workload is None else None

    @property
    def policy_name(self) -> str:
        """`policy`, or its default for the router."""
        return self.policy or ("llumlet" if self.cluster.router == "llumnix" else "fcfs")

    @property
    def order_policy(self) -> str:
        """The policy that orders the queue: `policy_name`, or the policy behind a reference such as sjf."""
        return BOUNDS.get(self.policy_name, self.policy_name)

    @property
    def prediction_source(self) -> str:
        """`predictor`, or its default for the policy; always the oracle for a reference such as sjf."""
        if self.policy in BOUNDS:
            return "oracle"
        if self.predictor is not None:
            return self.predictor
        return "trace" if "length" in policy_class(self.policy_name).inputs else "none"
