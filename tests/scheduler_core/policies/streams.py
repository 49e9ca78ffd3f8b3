"""A small engine under a random stream of requests, step by step, for checks that hold for every policy."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scheduler_core.plan import StepResult
from scheduler_core.policies import make_policy
from scheduler_core.predictions import (
    BucketPrediction,
    LengthPrediction,
    Prediction,
    RankPrediction,
    UrgencyPrediction,
)
from scheduler_core.request import Request
from scheduler_core.scheduler import Scheduler, SchedulerConfig

STEP_S = 0.05
CAP = 60


@dataclass(slots=True)
class Item:
    """A request, what is predicted for it, and the truth."""

    request: Request
    prediction: Prediction
    output_tokens: int


@dataclass(slots=True)
class Run:
    """A scheduler and how far its requests have come."""

    core: Scheduler
    items: dict[str, Item] = field(default_factory=dict)
    now: float = 0.0
    served: dict[str, int] = field(default_factory=dict)
    finished_s: dict[str, float] = field(default_factory=dict)
    plans: list[tuple[Any, ...]] = field(default_factory=list)
    aborted: set[str] = field(default_factory=set)

    def add(self, item: Item, *, predict: bool = True) -> None:
        name = item.request.request_id
        self.items[name] = item
        self.core.add(item.request, self.now)
        if predict:
            self.core.update(name, item.prediction, self.now)

    def abort(self, name: str) -> None:
        if self.core.abort(name, self.now):
            self.aborted.add(name)

    def step(self) -> bool:
        """One step of STEP_S seconds; False if there was nothing to do."""
        plan = self.core.schedule(self.now)
        self.core.validate()
        self.now += STEP_S
        if plan is None:
            return False
        self.plans.append((plan.prefills, plan.decodes, plan.admitted, plan.preempted))
        sampling = [chunk.request_id for chunk in plan.prefills if chunk.is_last] + list(plan.decodes)
        stopped = []
        for name in sampling:
            self.served[name] = self.served.get(name, 0) + 1
            if self.served[name] == self.items[name].output_tokens < self.items[name].request.max_tokens:
                stopped.append(name)
        for done in self.core.complete(StepResult(plan.step, tuple(stopped)), self.now):
            self.finished_s[done.request_id] = self.now
        self.core.validate()
        return True

    def drain(self, most_steps: int = 20_000) -> None:
        for _ in range(most_steps):
            if not self.core.num_waiting + self.core.num_running:
                return
            self.step()
        raise AssertionError("requests are left over")


def start(policy: str, parameters: dict[str, float] | None = None, **limits: Any) -> Run:
    chosen: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 64, **limits}
    return Run(Scheduler(SchedulerConfig(**chosen), make_policy(policy, parameters)))


def full_prediction(median: float, sigma: float = 0.4, level: int = 2) -> Prediction:
    """All heads of one artifact, in agreement."""
    edges = (8.0, 16.0, 32.0)
    hot = sum(median > edge for edge in edges)
    urgency = [0.0] * 5
    urgency[level] = 1.0
    return Prediction(
        length=LengthPrediction(math.log(median), sigma, 3.5),
        urgency=UrgencyPrediction(tuple(urgency)),
        bucket=BucketPrediction(tuple(float(index == hot) for index in range(4)), edges),
        rank=RankPrediction(math.log(median)),
    )


def random_items(num: int, seed: int, *, spacing_s: float = 0.04) -> list[Item]:
    """Requests in order of arrival, no two alike in any respect that a policy orders by."""
    rng = np.random.default_rng(seed)
    prompts = rng.permutation(np.arange(2, 2 + num))
    medians = rng.permutation(np.linspace(3.0, 45.0, num))
    items = []
    for index in range(num):
        median = float(medians[index])
        output = int(min(CAP, max(1, round(median * math.exp(0.4 * rng.standard_normal())))))
        request = Request(
            request_id=f"r{index}",
            arrival_s=index * spacing_s,
            prompt_tokens=int(prompts[index]),
            max_tokens=CAP,
            priority=int(prompts[num - 1 - index]),
            tier=int(rng.integers(10)),
            tenant=f"t{index % 3}",
            ttft_slo_s=1.0 + 0.01 * float(prompts[index]),
            ttlt_slo_s=3.0 + 0.1 * median,
        )
        items.append(Item(request, full_prediction(median, level=int(rng.integers(5))), output))
    return items


def run_stream(
    policy: str,
    seed: int,
    *,
    num: int = 40,
    abort_share: float = 0.0,
    late_steps: int = 0,
    **limits: Any,
) -> Run:
    """Feeds a random stream to the end; predictions come `late_steps` steps after their requests."""
    rng = np.random.default_rng(seed + 1)
    run = start(policy, **limits)
    arriving = random_items(num, seed)
    late: list[tuple[int, Item]] = []
    step = 0
    while arriving or late or run.core.num_waiting + run.core.num_running:
        while arriving and arriving[0].request.arrival_s <= run.now:
            item = arriving.pop(0)
            run.add(item, predict=late_steps == 0)
            late.append((step + late_steps, item))
        while late and late[0][0] <= step:
            item = late.pop(0)[1]
            if late_steps:
                run.core.update(item.request.request_id, item.prediction, run.now)
        if abort_share and rng.random() < abort_share:
            run.abort(f"r{int(rng.integers(num))}")
        run.step()
        step += 1
        assert step < 20_000
    return run
