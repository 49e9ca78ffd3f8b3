"""Declared levels: under every policy and batch former, requests of a less urgent one are preempted first and served later."""

import math
from typing import Any

import numpy as np
import pytest

from scheduler_core.batching import BATCH_FORMERS, make_former
from scheduler_core.engine.pool import Pool
from scheduler_core.errors import InputError
from scheduler_core.policies import make_policy
from scheduler_core.request import RequestState
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from scheduler_core.simulator.loop import Simulation
from scheduler_core.simulator.step_time.base import LinearStepTime
from scheduler_core.simulator.trace import Trace
from scheduler_core.simulator.trace_predictions import Predictions, oracle_predictions
from tests.scheduler_core.helpers import NEVER_PREEMPT, trace_row

pytestmark = pytest.mark.mend

RAD: dict[str, Any] = {"t_row": 16, "t_col": 12, "t_red": 8}
#: Preemptive, by eviction key, and neither.
POLICIES = ("fcfs", "edf", "srpt", "uniboost", "semantic")


def pairs() -> list[tuple[str, str]]:
    """Compatible policies and formers."""
    compatible = []
    for former in BATCH_FORMERS:
        for policy in POLICIES:
            try:
                make_former(former, RAD if former.startswith("rad") else {}).check_policy(make_policy(policy))
            except InputError:
                continue
            compatible.append((policy, former))
    return compatible


def trace_of(num: int, num_levels: int) -> Trace:
    """Chats at a rate at which memory runs out again and again."""
    rng = np.random.default_rng(0)
    times = np.cumsum(rng.exponential(0.1, num)).tolist()
    rows = [
        trace_row(
            f"r{index}", times[index], int(rng.integers(5, 60)), int(rng.integers(10, 120)), 120,
            priority=int(rng.integers(0, num_levels)), ttlt_slo_s=float(rng.uniform(1.0, 9.0)),
        )
        for index in range(num)
    ]  # fmt: skip
    return Trace(tuple(rows))


class Watched(Pool):
    """Notes each preemption and all requests that could have gone instead."""

    preempted: list[tuple[RequestState, list[RequestState]]]

    def preempt(self, state: RequestState, now: float, offload_tokens: int | None = None) -> int:
        policy = self.policy
        others = [
            other
            for other in self.running.values()
            if self.evictions is None or policy.eviction_key(other, now) > -math.inf
        ]
        self.preempted.append((state, others))
        return super().preempt(state, now, offload_tokens)


def run(trace: Trace, policy: str, former: str, **limits: Any) -> tuple[Scheduler, dict[str, float]]:
    """The scheduler after a simulation, and the latency of each request in s."""
    config = SchedulerConfig(
        max_num_seqs=12, max_num_batched_tokens=192, num_kv_blocks=40, kv_watermark=0.0, batching=former,
        batching_parameters=RAD if former.startswith("rad") else {}, **limits,
    )  # fmt: skip
    core = Scheduler(config, make_policy(policy))
    core.pool.__class__ = Watched
    core.pool.preempted = []  # type: ignore[attr-defined]
    predictions = oracle_predictions(trace) if policy == "srpt" else Predictions()
    records = Simulation(trace, core, LinearStepTime(), predictions).run().records
    assert len(records) == len(trace.requests)
    return core, {record.request_id: record.finish_s - record.arrival_s for record in records}


@pytest.mark.parametrize(("policy", "former"), pairs())
def test_the_less_urgent_level_is_preempted_first_and_served_later(policy: str, former: str) -> None:
    """Before, only planned batches of policies that do not evict by key preempted by level, and none in the simulator."""
    trace = trace_of(90, 3)
    core, latency_s = run(trace, policy, former)
    preempted = core.pool.preempted  # type: ignore[attr-defined]
    assert (len(preempted) > 0) == (former not in NEVER_PREEMPT)
    for state, others in preempted:
        assert state.declared_level >= max([other.declared_level for other in others], default=0)
    means = [
        np.mean([latency_s[row.request_id] for row in trace.requests if row.priority == level])
        for level in range(3)
    ]
    assert means[0] < means[1] < means[2]


def test_memguard_keeps_what_returned_also_from_more_urgent_levels() -> None:
    trace = trace_of(200, 3)
    core, _ = run(trace, "uniboost", "uniboost")
    assert len(core.pool.preempted) > 20  # type: ignore[attr-defined]
    counts = {state.request_id: state.num_preemptions for state, _ in core.pool.preempted}  # type: ignore[attr-defined]
    for row in trace.requests:
        work = row.prompt_tokens + row.output_tokens
        bound = 1 + math.floor(math.log2(max(1.0, work / core.policy.bin_tokens)))  # type: ignore[attr-defined]
        assert counts.get(row.request_id, 0) <= bound
