"""Our own policies: what each promises, in small; the figures are in `benchmarks/policies.py`."""

from __future__ import annotations

import math

import numpy as np

from scheduler_core.policies.deadlines import SloTie
from scheduler_core.policies.tail_guard import TailGuard
from scheduler_core.predictions import LengthPrediction, UrgencyPrediction
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.config import SimulationConfig
from scheduler_core.simulator.run import run_simulation
from scheduler_core.simulator.step_time.base import LinearStepTime
from scheduler_core.simulator.trace import Trace
from tests.scheduler_core.helpers import trace_row
from tests.scheduler_core.policies.test_papers import enter, generate, state, sure

STEP = LinearStepTime(base_s=1.0, per_prefill_token_s=0, per_decode_s=0, per_context_token_s=0)


def simulate(
    trace: Trace, policy: str, parameters: dict[str, float] | None = None, **limits: int
) -> dict[str, float]:
    """Mean and P99 time to last token when a step takes one second."""
    config = SimulationConfig(
        trace="",
        policy=policy,
        policy_parameters=parameters or {},
        predictor="trace",
        scheduler=SchedulerConfig(**{"num_kv_blocks": 100_000, "max_num_batched_tokens": 4096, **limits}),  # type: ignore[arg-type]
        step_time=STEP,
    )
    result = run_simulation(config, trace=trace)
    assert len(result.records) == len(trace)
    spent = np.array([record.ttlt_s for record in result.records])
    return {"mean": float(spent.mean()), "p99": float(np.percentile(spent, 99))}


def overload(num: int, slots: int, load: float, seed: int) -> Trace:
    """Heavy-tailed lengths, more of them than the slots can serve."""
    rng = np.random.default_rng(seed)
    mu = rng.normal(3.5, 0.9, num)
    tokens = np.clip(np.round(np.exp(mu + 0.3 * rng.standard_t(3.5, num))), 1, 4000).astype(int)
    arrivals = np.cumsum(rng.exponential(tokens.mean() / slots / load, num))
    rows = [
        trace_row(f"r{index}", float(arrivals[index]), 1, int(tokens[index]), 4000, prediction=prediction)
        for index, prediction in enumerate(LengthPrediction(float(center), 0.3, 3.5) for center in mu)
    ]
    return Trace(tuple(rows))


def test_slo_tie_lets_the_late_overtake_by_urgency_and_gives_up_the_missed() -> None:
    """token_s = 0.02, sure of 500 tokens: 10 s. Targets of 30 s: latest start 20 s, urgent from 18 s to 22 s. Before, the
    short one is first; at 18 s both long ones are, the more urgent level first; after 22 s TIE's order holds again."""
    policy = SloTie()
    short = state("s", prediction=sure(50), cap=1000)
    late = state("l", prediction=sure(500), cap=1000, ttlt_slo_s=30.0, order=1)
    grave = state(
        "g",
        prediction=sure(500),
        cap=1000,
        ttlt_slo_s=30.0,
        order=2,
        urgency=UrgencyPrediction((1.0, 0, 0, 0, 0)),
    )
    enter(policy, short, late, grave)

    def order() -> str:
        return "".join(
            item.request_id
            for item in sorted([short, late, grave], key=lambda s: (policy.key(s, 0.0), s.order))
        )

    assert list(policy.take_changed(17.9)) == []
    assert order() == "slg"
    assert set(policy.take_changed(18.1)) == {late, grave}
    assert order() == "gls"
    assert set(policy.take_changed(22.1)) == {late, grave}
    assert order() == "slg"


def test_tail_guard_keeps_the_tail_of_fcfs_and_most_of_the_gain() -> None:
    """Small version of the study: 8 slots, load 1.2. Shortest first multiplies the P99; the guard does not. Who lets the longest
    1 % be late keeps more of the gain."""
    trace = overload(500, 8, 1.2, seed=6)
    fcfs, sept = (simulate(trace, name, max_num_seqs=8) for name in ("fcfs", "sept"))
    assert sept["p99"] > 2.0 * fcfs["p99"]
    nobody, some = (
        simulate(trace, "tail_guard", {"exempt_fraction": share}, max_num_seqs=8) for share in (0.0, 0.0085)
    )
    assert max(nobody["p99"], some["p99"]) <= 1.3 * fcfs["p99"]
    assert nobody["mean"] <= fcfs["mean"] - 0.5 * (fcfs["mean"] - sept["mean"])
    assert some["mean"] < nobody["mean"]


def test_tail_guard_lets_the_longest_predicted_be_late() -> None:
    """A tenth may be late. 99 predictions of 10 tokens, then twelve of 500: those are last while there is a budget for it, which is
    11 requests after 111 arrivals, less what has not come yet."""
    policy = TailGuard(exempt_fraction=0.1)
    every = [state(f"r{index}", prediction=sure(10), cap=1000, order=index) for index in range(99)]
    long = [state(f"l{index}", prediction=sure(500), cap=1000, order=99 + index) for index in range(12)]
    enter(policy, *every, *long)
    assert all(policy.key(item, 0.0) < 1e12 for item in every)
    assert sum(policy.key(item, 0.0) >= 1e12 for item in long) in (10, 11)
    assert policy.eviction_key(every[0], 0.0) == -math.inf
    exempt = next(item for item in long if policy.key(item, 0.0) >= 1e12)
    assert policy.eviction_key(exempt, 0.0) > 0.0, "gives way where it runs"


def test_tail_guard_finds_out_the_longest_while_they_run() -> None:
    """A fifth may be late, a quarter of them by their age: beyond the 95 % quantile of the finished ones, all of 10 tokens. An
    answer that was expected to have 10 and has 11 gives way, once there is a budget for it."""
    policy = TailGuard(exempt_fraction=0.2)
    for index in range(50):
        item = state(f"r{index}", prediction=sure(10), cap=1000, order=index)
        enter(policy, item)
        item.first_token_s = generate(policy, item, 10, float(index))
        policy.on_finish(item)
    runaway = state("x", prediction=sure(10), cap=1000, order=49)
    enter(policy, runaway)
    now = generate(policy, runaway, 10, 50.0)
    assert list(policy.take_changed(now)) == []
    now = generate(policy, runaway, 1, now)
    assert list(policy.take_changed(now)) == [runaway]
    assert policy.key(runaway, now) >= 1e12
    assert policy.eviction_key(runaway, now) > 0.0
