"""Small builders shared by the scheduler's tests."""

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

from scheduler_core.engine.decision_log import DecisionLog
from scheduler_core.engine.plan import Finished, StepPlan, StepResult
from scheduler_core.errors import InputError
from scheduler_core.policies import make_policy
from scheduler_core.policies.base import Policy
from scheduler_core.prediction import predictions as heads
from scheduler_core.prediction.predictions import LengthPrediction, Prediction
from scheduler_core.request import Request
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from scheduler_core.simulator.config import SimulationConfig
from scheduler_core.simulator.run import SimulationResult, run_simulation
from scheduler_core.simulator.step_time.base import LinearStepTime
from scheduler_core.simulator.trace import Trace, TraceRequest

#: 1 s per step and 0.1 s per prompt token, nothing else.
ROUND = LinearStepTime(base_s=1.0, per_prefill_token_s=0.1, per_decode_s=0.0, per_context_token_s=0.0)
#: As `ROUND`, and 0.01 s per decode, 0.001 s per token of context.
PLAIN = LinearStepTime(base_s=1.0, per_prefill_token_s=0.1, per_decode_s=0.01, per_context_token_s=0.001)


async def settle() -> None:
    """Lets every task that can run do so until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def request(name: str, arrival_s: float = 0.0, prompt: int = 10, cap: int = 100, **more: Any) -> Request:
    """A request; `more` are its other fields."""
    return Request(request_id=name, arrival_s=arrival_s, prompt_tokens=prompt, max_tokens=cap, **more)


def prediction(median: float, sigma: float = 0.5, nu: float = 3.5) -> LengthPrediction:
    """A prediction with the given median in tokens."""
    return LengthPrediction(math.log(median), sigma, nu)


def predicted(median: float, sigma: float = 0.5, nu: float = 3.5) -> Prediction:
    """As `prediction`, as what a predictor returns."""
    return Prediction(length=prediction(median, sigma, nu))


def full_prediction(median: float, sigma: float = 0.4, level: int = 2) -> Prediction:
    """All heads of one artifact, in agreement."""
    edges = (8.0, 16.0, 32.0)
    hot = sum(median > edge for edge in edges)
    urgency = [0.0] * 5
    urgency[level] = 1.0
    return Prediction(
        length=LengthPrediction(math.log(median), sigma, 3.5), urgency=heads.UrgencyPrediction(tuple(urgency)),
        bucket=heads.BucketPrediction(tuple(float(index == hot) for index in range(4)), edges),
        rank=heads.RankPrediction(math.log(median)), point=heads.PointPrediction(median),
    )  # fmt: skip


def scheduler(policy: str | Policy = "fcfs", *, log: DecisionLog | None = None, **limits: Any) -> Scheduler:
    """A scheduler with default limits but for those given."""
    chosen = make_policy(policy) if isinstance(policy, str) else policy
    return Scheduler(SchedulerConfig(**limits), chosen, log)


#: Parameters with which a batch former works on the small engines of the tests.
SMALL_PARAMETERS: dict[str, dict[str, Any]] = {
    "rad": {"n": 3, "t_row": 1, "t_red": 1},
    "rad_prefill_first": {"n": 3, "t_row": 1, "t_red": 1},
    "slai": {"max_decodes": 2, "paying_first": True},
    "quantile_reserve": {"quantile": 0.2},
}

#: Batch formers that never preempt under a policy that is not preemptive, because memory is reserved for the longest output.
NEVER_PREEMPT = {"orca", "request_level"}
#: Batch formers that process every prompt in one step.
WHOLE_PROMPTS = {"orca", "request_level", "vllm"}


def compatible_pairs(policies: Iterable[str], formers: Iterable[str]) -> list[tuple[str, str]]:
    """Policies and batch formers that a scheduler takes together."""
    pairs = []
    for former, policy in product(formers, policies):
        with suppress(InputError):
            scheduler(policy, batching=former, batching_parameters=SMALL_PARAMETERS.get(former, {}))
            pairs.append((policy, former))
    return pairs


def run_step(core: Scheduler, now: float, stopped: Sequence[str] = ()) -> tuple[Finished, ...]:
    plan = core.schedule(now)
    assert plan is not None
    return core.complete(StepResult(plan.step, tuple(stopped)), now)


def simulate(trace: Trace, policy: str = "fcfs", **more: Any) -> SimulationResult:
    """A simulation of a trace; `more` are predictions, log and watch, and fields of the configuration."""
    parts = {name: more.pop(name) for name in ("predictions", "log", "watch") if name in more}
    return run_simulation(SimulationConfig(trace="", policy=policy, **more), trace=trace, **parts)


def token_times(log: DecisionLog) -> dict[str, list[float]]:
    """By request: times of its tokens, which come at the ends of the steps that sample them; of single steps."""
    times: dict[str, list[float]] = {}
    sampling: list[str] = []
    for entry in log.entries:
        if entry["op"] == "schedule" and entry["plan"] is not None:
            prefills, decodes = entry["plan"]["prefills"], entry["plan"]["decodes"]
            sampling = [*decodes, *(chunk["request_id"] for chunk in prefills if chunk["is_last"])]
        elif entry["op"] == "complete":
            for name in sampling:
                times.setdefault(name, []).append(entry["now"])
    return times


def trace_row(
    name: str, arrival_s: float, prompt_tokens: int, output_tokens: int, max_tokens: int = 50, **more: Any
) -> TraceRequest:
    return TraceRequest(
        request_id=name, arrival_s=arrival_s, prompt_tokens=prompt_tokens, output_tokens=output_tokens,
        max_tokens=max_tokens, **more,
    )  # fmt: skip


def random_trace(
    num: int, seed: int = 0, rate_rps: float = 10.0, cap: int = 256, most_prompt: int = 200
) -> Trace:
    """Requests with log-t lengths, Poisson arrivals and honest predictions."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate_rps, num))
    rows = []
    for index in range(num):
        seen = LengthPrediction(float(rng.normal(4.0, 0.8)), float(rng.uniform(0.2, 0.9)), 3.5)
        drawn = float(np.exp(np.clip(seen.mu + seen.sigma * rng.standard_t(seen.nu), 0, 20)))
        rows.append(
            trace_row(
                f"r{index}", float(arrivals[index]), int(rng.integers(1, most_prompt)),
                int(min(cap, max(1, round(drawn)))), cap, prediction=seen,
            )
        )  # fmt: skip
    return Trace(tuple(rows))


def line(plan: StepPlan) -> str:
    """One step in words: "a+4" a chunk of 4 tokens, "a+4." the last chunk, "b" a decode, "-c" preempted.

    "-c(5)" keeps 5 tokens on the host, "<c(5)" brings them back.
    """
    kept = {moved.request_id: f"({moved.num_tokens})" for moved in plan.swapped_out}
    words = [f"<{moved.request_id}({moved.num_tokens})" for moved in plan.swapped_in]
    words += [f"{c.request_id}+{c.num_tokens}{'.' if c.is_last else ''}" for c in plan.prefills]
    words += plan.decodes
    words += [f"-{name}{kept.get(name, '')}" for name in plan.preempted]
    return " ".join(words)


@dataclass
class FixedCosts:
    """Costs of an engine that are given: seconds of a step without prompts, and per token."""

    is_measured: bool = True
    step_s: float = 0.02
    prefill_token_s: float = 1e-3
    decode_token_s: float = 1e-2
    reload_token_s: float = 1e-4

    def prefill_s(self, num_tokens: float) -> float:
        return self.prefill_token_s * num_tokens

    def decode_s(self, num_tokens: float) -> float:
        return self.decode_token_s * num_tokens

    def reload_s(self, num_tokens: float) -> float:
        return self.reload_token_s * num_tokens


@dataclass
class FixedEngine:
    """What a policy sees of an engine whose cache is empty."""

    capacity_tokens: int = 1000
    step_tokens: int = 100_000
    has_host_tier: bool = False
    evicts_by_policy: bool = True
    costs: FixedCosts = field(default_factory=FixedCosts)

    def resident_tokens(self, session: str) -> int:
        return 0


class Drive:
    """Steps of `step_s` seconds until everything is done; the scheduler is validated after every call.

    Args:
        core: Fresh.
        rows: Requests and their true output lengths.
        step_s: Duration of each step.
        predictions: By request; they come with it.
    """

    def __init__(
        self,
        core: Scheduler,
        rows: Sequence[tuple[Request, int]],
        step_s: float = 1.0,
        predictions: Mapping[str, Prediction] | None = None,
    ) -> None:
        self.predictions = predictions or {}
        self.core = core
        self.lengths: Mapping[str, int] = {item.request_id: length for item, length in rows}
        self.coming = sorted((item for item, _ in rows), key=lambda item: item.arrival_s)
        self.step_s = step_s
        self.now = 0.0
        self.plans: list[StepPlan] = []
        self.finished: dict[str, Finished] = {}
        self.finish_s: dict[str, float] = {}

    def step(self) -> StepPlan | None:
        """One step; None if nobody is there."""
        self._deliver()
        plan = self.core.schedule(self.now)
        self.core.validate()
        if plan is None:
            return None
        self.plans.append(plan)
        self.now += self.step_s
        self._deliver(before_end=True)
        sampling = [*plan.decodes, *(chunk.request_id for chunk in plan.prefills if chunk.is_last)]
        stopped = [
            name
            for name in sampling
            if name in self.core
            and self.core.state(name).num_output_tokens + 1 == self.lengths[name]
            and self.lengths[name] < self.core.state(name).request.max_tokens
        ]
        for item in self.core.complete(StepResult(plan.step, tuple(stopped)), self.now):
            assert item.request_id not in self.finished, "finished twice"
            self.finished[item.request_id] = item
            self.finish_s[item.request_id] = self.now
        self.core.validate()
        return plan

    def run(self, most_steps: int = 10_000) -> list[str]:
        """All steps; idle times are skipped."""
        for _ in range(most_steps):
            if self.step() is None:
                if not self.coming:
                    return self.lines
                self.now = self.coming[0].arrival_s
        raise AssertionError("it does not end")

    @property
    def lines(self) -> list[str]:
        return [line(plan) for plan in self.plans]

    @property
    def prefill_tokens(self) -> dict[str, int]:
        """By request: tokens processed in prefill."""
        found = dict.fromkeys(self.lengths, 0)
        for plan in self.plans:
            for chunk in plan.prefills:
                found[chunk.request_id] += chunk.num_tokens
        return found

    def _deliver(self, before_end: bool = False) -> None:
        while self.coming and (
            self.coming[0].arrival_s < self.now or (not before_end and self.coming[0].arrival_s == self.now)
        ):
            item = self.coming.pop(0)
            now = item.arrival_s if before_end else self.now
            self.core.add(item, now)
            if item.request_id in self.predictions:
                self.core.update(item.request_id, self.predictions[item.request_id], now)
