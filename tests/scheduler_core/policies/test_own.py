"""Our own policies: what each promises, in small; the figures are in `benchmarks/policies.py`."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.policies import Job, fluid_gain
from scheduler_core.policies import SloTie
from scheduler_core.policies.estimates import boost_s
from scheduler_core.policies.predicted_boost import PredictedBoost
from scheduler_core.policies.tail_guard import TailGuard
from scheduler_core.predictions import LengthPrediction, UrgencyPrediction
from scheduler_core.request import MAX_TIERS, Request, Status
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.config import SimulationConfig
from scheduler_core.simulator.run import run_simulation
from scheduler_core.simulator.step_time.base import LinearStepTime
from scheduler_core.simulator.trace import Trace, TraceRequest
from tests.scheduler_core.policies.test_papers import enter, generate, state, sure

STEP = LinearStepTime(base_s=1.0, per_prefill_token_s=0, per_decode_s=0, per_context_token_s=0)


def simulate(
    trace: Trace, policy: str, parameters: dict[str, float] | None = None, **limits: int
) -> dict[str, float]:
    """Mean and P99 time to last token, and preemptions, when a step takes one second."""
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
    return {
        "mean": float(spent.mean()),
        "p99": float(np.percentile(spent, 99)),
        "preemptions": float(result.metrics["num_preemptions"]),
    }


def overload(num: int, slots: int, load: float, seed: int, *, shift: float = 0.0, prompt: int = 1) -> Trace:
    """Heavy-tailed lengths, more of them than the slots can serve; `shift` falsifies the predicted ln lengths."""
    rng = np.random.default_rng(seed)
    mu = rng.normal(3.5, 0.9, num)
    tokens = np.clip(np.round(np.exp(mu + 0.3 * rng.standard_t(3.5, num))), 1, 4000).astype(int)
    arrivals = np.cumsum(rng.exponential(tokens.mean() / slots / load, num))
    rows = [
        TraceRequest(
            request_id=f"r{index}",
            arrival_s=float(arrivals[index]),
            prompt_tokens=prompt,
            output_tokens=int(tokens[index]),
            max_tokens=4000,
            prediction=LengthPrediction(float(mu[index] + shift * rng.standard_normal()), 0.3, 3.5),
        )
        for index in range(num)
    ]
    return Trace(tuple(rows))


def learn(policy: PredictedBoost, shift: float, num: int, seed: int = 0) -> None:
    """Finishes requests whose predictions are right but for a shift of ln length."""
    rng = np.random.default_rng(seed)
    for index in range(num):
        mu = float(rng.normal(4.0, 1.0))
        tokens = int(max(1, round(math.exp(mu + 0.5 * rng.standard_t(3.5)))))
        seen = LengthPrediction(mu + shift, 0.5, 3.5)
        item = state(f"r{index}", prediction=seen, cap=10_000, prompt=int(rng.integers(5, 500)))
        enter(policy, item)
        policy.on_step(float(index), 1.0)
        item.num_output_tokens, item.last_token_s, item.status = tokens, index + 0.5, Status.GONE
        policy.on_finish(item)
        policy.on_pressure(0, 8)


def test_predicted_boost_falls_back_when_lengths_leave_their_quantiles_and_comes_back() -> None:
    """gamma 0.02, 50 us and 1 ms per token. Trusted: 100 and 1000 tokens sure are told apart; not trusted: only the prompt
    (10 tokens, 0.5 ms) counts, b = 50 ln(1/(1 - exp(-0.00001)))."""
    policy = PredictedBoost(adapt_gamma=False)
    short, long = state("s", prediction=sure(100), cap=2000), state("l", prediction=sure(1000), cap=2000)
    enter(policy, short, long)
    assert policy.trusted
    assert policy.key(short, 0.0) == pytest.approx(-boost_s(0.0005 + 0.1, 0.02), rel=1e-3)
    assert policy.key(short, 0.0) < policy.key(long, 0.0) - 40
    learn(policy, shift=1.5, num=60)
    assert not policy.trusted
    assert policy.key(short, 0.0) == policy.key(long, 0.0) == pytest.approx(-boost_s(0.0005, 0.02))
    learn(policy, shift=0.0, num=300)
    assert policy.trusted


def test_an_aborted_request_teaches_nothing() -> None:
    policy = PredictedBoost(adapt_gamma=False)
    for index in range(100):
        item = state(f"r{index}", prediction=sure(1000), cap=2000, num_output_tokens=2, last_token_s=0.5)
        enter(policy, item)
        policy.on_step(1.0, 1.0)
        policy.on_finish(item)
    assert policy.trusted


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


def test_slo_tie_keeps_as_many_tiers_apart_as_there_may_be() -> None:
    """All urgent, tiers 0, 9 and the last: in this order, and before one that has time, at a late hour of a long day."""
    policy, arrival_s = SloTie(), 1e6
    first, tenth, last = (
        state(
            f"t{tier}",
            arrival_s=arrival_s,
            prediction=sure(50),
            cap=100,
            ttft_slo_s=1.0,
            tier=tier,
            order=order,
        )
        for order, tier in enumerate((0, 9, MAX_TIERS - 1))
    )
    patient = state("p", arrival_s=arrival_s, prediction=sure(1), cap=100, order=3)
    enter(policy, patient, last, tenth, first)
    assert set(policy.take_changed(arrival_s + 1.0)) == {first, tenth, last}
    ordered = sorted([patient, last, tenth, first], key=lambda item: policy.key(item, arrival_s + 1.0))
    assert ordered == [first, tenth, last, patient]


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


def test_tail_guard_promotes_when_the_limit_says_so() -> None:
    """P99 known as 10 s, ratio 0.95: limit 9.5 s. Steps of 10 ms, 100 tokens sure: due 9.5 - 1 = 8.5 s after arrival."""
    policy = TailGuard(prior_s=10.0, ratio=0.95, prompt_weight=0.1)
    item, other = (
        state("a", prediction=sure(100), cap=1000),
        state("b", prediction=sure(5), cap=1000, order=1),
    )
    enter(policy, item, other)
    worker = state("w", prediction=sure(20), cap=1000, order=2)
    enter(policy, worker)
    generate(policy, worker, 5, 0.0)
    assert list(policy.take_changed(8.4)) == []
    assert policy.key(other, 8.4) < policy.key(item, 8.4)
    assert list(policy.take_changed(8.6)) == [item]
    assert policy.key(item, 8.6) < policy.key(other, 8.6)


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


def test_the_fluid_queue_of_the_study_by_hand() -> None:
    """Load 1.5: half as much as can be served is left over. Lengths 5 x 1, 5 x 3, sum 20, mean 2. FCFS: 0.5/2 wait. Shortest first:
    a third of the work, 3 + 3 + 3: 0.5/3. Within 0.8 of FCFS's wait: 1/(0.8 1.5) = 5/6 of it, five of 3 and two of 1 with the
    mean 17/7: 0.5 7/17. Within twice that wait no more than a third need wait: all is kept. One of 3 exempt, 0.15 of the work:
    1.5 0.85 - 1 = 0.275 is left over, within 0.8 of the wait 0.275/0.5/1.2 = 0.458 of the work, four of 3: 0.275/3."""
    jobs = [
        Job(
            Request(request_id=f"r{index}", arrival_s=0.0, prompt_tokens=1, max_tokens=9),
            tokens,
            sure(tokens),
        )
        for index, tokens in enumerate([1, 3] * 5)
    ]
    fcfs, sept = 0.25, 0.5 / 3
    assert fluid_gain(jobs, 1.5, 0.8, 0.0) == pytest.approx((fcfs - 3.5 / 17) / (fcfs - sept))
    assert fluid_gain(jobs, 1.5, 2.0, 0.0) == pytest.approx(1.0)
    assert fluid_gain(jobs, 1.5, 0.8, 0.1) == pytest.approx((fcfs - 0.275 / 3) / (fcfs - sept))
