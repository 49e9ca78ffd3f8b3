"""The simulator: exact times by hand, the closed form against single steps, and an independent little loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_core.errors import InputError, TailcastError
from scheduler_core.policies import POLICIES
from scheduler_core.predictions import LengthPrediction
from scheduler_core.predictor import PredictionRequest
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.config import BOUNDS, SimulationConfig
from scheduler_core.simulator.predictions import Predictions, fetch_predictions
from scheduler_core.simulator.run import SimulationResult, run_simulation
from scheduler_core.simulator.step_time.base import LinearStepTime
from scheduler_core.simulator.trace import Trace
from tests.scheduler_core.helpers import random_trace, trace_row

#: 1 s per step, 0.1 s per prompt token, 0.01 s per decode, 0.001 s per token of context.
PLAIN = LinearStepTime(base_s=1.0, per_prefill_token_s=0.1, per_decode_s=0.01, per_context_token_s=0.001)
ALL_POLICIES = (*POLICIES, *BOUNDS)
TIGHT = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=48, num_kv_blocks=40, kv_block_tokens=16)


def simulate(trace: Trace, policy: str = "fcfs", **values: Any) -> SimulationResult:
    return run_simulation(SimulationConfig(trace="", policy=policy, **values), trace=trace)


def test_times_of_a_small_run_worked_out_by_hand() -> None:
    """a arrives at 2 with 10 prompt tokens: prefill 1 + 1.0 s, first token at 4. b (5 tokens) arrives at 3 and joins.

    Step 2: b's prefill (0.5), a's decode (0.01), a's context 10 (0.01): 1.52 s, ends 5.52; a has 2 tokens, b 1.
    Step 3: two decodes (0.02), context 11 + 5 (0.016): 1.036 s, ends 6.556; a is done (3), b has 2.
    Step 4: one decode (0.01), context 6 (0.006): 1.016 s, ends 7.572; b is done (3).
    """
    result = simulate(Trace((trace_row("a", 2.0, 10, 3), trace_row("b", 3.0, 5, 3))), step_time=PLAIN)
    a, b = result.records
    assert (a.request_id, b.request_id) == ("a", "b")
    assert (a.first_scheduled_s, a.first_token_s) == (2.0, 4.0)
    assert a.finish_s == pytest.approx(6.556, abs=1e-12)
    assert (b.first_scheduled_s, b.finish_reason) == (4.0, "stop")
    assert b.first_token_s == pytest.approx(5.52, abs=1e-12)
    assert b.finish_s == pytest.approx(7.572, abs=1e-12)
    assert b.ttft_s == pytest.approx(2.52, abs=1e-12)
    assert b.queueing_delay_s == 1.0
    assert b.tpot_s == pytest.approx((7.572 - 5.52) / 2, abs=1e-12)
    assert b.normalized_latency_s == pytest.approx(4.572 / 3, abs=1e-12)
    metrics = result.metrics
    assert metrics["makespan_s"] == pytest.approx(5.572, abs=1e-12)
    assert metrics["busy_fraction"] == pytest.approx(1.0)
    assert metrics["num_steps"] == 4
    assert metrics["ttft_s"]["mean"] == pytest.approx((2.0 + 2.52) / 2, abs=1e-12)


def comparable(result: SimulationResult) -> tuple[Any, ...]:
    metrics = {k: v for k, v in result.metrics.items() if k != "littles_law_error"}
    integrals = ("mean_requests_in_system", "mean_requests_waiting", "busy_fraction")
    rounded = {name: pytest.approx(metrics.pop(name), rel=1e-12) for name in integrals}
    # Gaps within a stretch of steps count as their mean, and memory is looked at between stretches alone.
    metrics.pop("kv_usage", None)
    gaps = metrics.pop("tbt_s", None) or {}
    rounded |= {f"tbt {name}": pytest.approx(value, rel=0.1) for name, value in gaps.items()}
    metrics.pop("groups", None)
    return sorted(result.records, key=lambda record: record.request_id), metrics, rounded


@pytest.mark.parametrize("policy", ALL_POLICIES)
@pytest.mark.parametrize("limits", [TIGHT, SchedulerConfig(max_num_seqs=16)], ids=["tight", "roomy"])
def test_many_steps_at_once_equal_single_steps_to_the_last_bit(policy: str, limits: SchedulerConfig) -> None:
    trace = random_trace(80, seed=3, rate_rps=8)
    fast, slow = (
        simulate(trace, policy, scheduler=limits, predictor_delay_s=0.02, exact_steps=exact)
        for exact in (False, True)
    )
    assert comparable(fast) == comparable(slow)
    assert fast.metrics["num_steps"] == slow.metrics["num_steps"]
    if limits is TIGHT:
        assert fast.metrics["num_preemptions"] > 0


@given(st.integers(0, 10_000), st.floats(0.5, 50.0), st.sampled_from(ALL_POLICIES), st.integers(1, 8))
@settings(max_examples=30, deadline=None)
def test_many_steps_at_once_equal_single_steps_for_any_trace(
    seed: int, rate: float, policy: str, seqs: int
) -> None:
    trace = random_trace(25, seed=seed, rate_rps=rate, cap=60, most_prompt=60)
    limits = dataclasses.replace(TIGHT, max_num_seqs=seqs, num_kv_blocks=12, kv_watermark=0.1)
    fast, slow = (
        simulate(trace, policy, scheduler=limits, step_time=PLAIN, exact_steps=exact)
        for exact in (False, True)
    )
    assert comparable(fast) == comparable(slow)
    assert len(fast.records) == 25
    assert fast.metrics["littles_law_error"] < 1e-9


def naive_fcfs(
    trace: Trace, limits: SchedulerConfig, step_time: LinearStepTime
) -> dict[str, tuple[float, float]]:
    """First-come-first-served with chunked prefill and enough memory, written straight down: step by step, no heap."""
    waiting = sorted(trace.requests, key=lambda r: r.arrival_s)
    running: list[dict[str, Any]] = []
    times: dict[str, tuple[float, float]] = {}
    now = 0.0
    while waiting or running:
        if not running:
            now = max(now, waiting[0].arrival_s)
        while waiting and waiting[0].arrival_s <= now:
            left = limits.max_num_batched_tokens - sum(
                1 if r["todo"] == 0 else min(r["todo"], limits.max_num_batched_tokens) for r in running
            )
            if len(running) == limits.max_num_seqs or left <= 0:
                break
            head = waiting.pop(0)
            running.append({"row": head, "todo": head.prompt_tokens, "cache": 0, "out": 0, "first": None})
        budget = limits.max_num_batched_tokens - sum(r["todo"] == 0 for r in running)
        seconds = step_time.base_s
        sampled = []
        for r in running:
            if r["todo"] == 0:
                seconds += step_time.per_decode_s + step_time.per_context_token_s * r["cache"]
                r["cache"] += 1
                sampled.append(r)
            elif budget > 0:
                tokens = min(r["todo"], budget)
                budget -= tokens
                seconds += step_time.per_prefill_token_s * tokens + step_time.per_context_token_s * r["cache"]
                r["cache"] += tokens
                r["todo"] -= tokens
                if r["todo"] == 0:
                    sampled.append(r)
        now += seconds
        for r in sampled:
            r["out"] += 1
            r["first"] = now if r["first"] is None else r["first"]
            if r["out"] == r["row"].output_tokens:
                times[r["row"].request_id] = (r["first"], now)
                running.remove(r)
    return times


def test_times_agree_with_an_independent_loop() -> None:
    trace = random_trace(300, seed=11, rate_rps=12)
    limits = SchedulerConfig(max_num_seqs=12, max_num_batched_tokens=64, num_kv_blocks=100_000)
    step_time = LinearStepTime(base_s=0.0113, per_context_token_s=3.1e-6)
    expected = naive_fcfs(trace, limits, step_time)
    result = simulate(trace, scheduler=limits, step_time=step_time)
    assert len(result.records) == 300
    assert result.metrics["mean_requests_waiting"] > 5, "queues form"
    for record in result.records:
        first, last = expected[record.request_id]
        assert record.first_token_s == pytest.approx(first, abs=1e-9)
        assert record.finish_s == pytest.approx(last, abs=1e-9)


@given(st.integers(1, 64), st.integers(0, 10**5), st.integers(1, 400), st.floats(0.001, 100))
def test_steps_to_reach_is_the_fewest(num: int, context: int, limit: int, wait: float) -> None:
    run = PLAIN.run([context] * num, 5.0)
    steps = run.steps_to_reach(5.0 + wait, limit)
    assert 1 <= steps <= limit
    assert steps == 1 or run.end_s(steps - 1) < 5.0 + wait
    assert steps == limit or run.end_s(steps) >= 5.0 + wait


def test_the_duration_of_a_run_is_the_sum_of_its_steps() -> None:
    total = sum(1.0 + 0.01 * 7 + 0.001 * (90 + 7 * k) for k in range(40))
    assert PLAIN.run([30, 20, 40, 0, 0, 0, 0], 0.0).end_s(40) == pytest.approx(total, rel=1e-14)


def test_predictions_come_after_their_delay() -> None:
    """At 0, a is admitted alone; b and c wait. c's prediction (short) comes before a is done only if it is quick."""
    seen = LengthPrediction(0.0, 0.1, 3.5)
    rows = (trace_row("a", 0.0, 1, 5), trace_row("b", 0.5, 1, 5), trace_row("c", 0.6, 1, 5, prediction=seen))
    limits = SchedulerConfig(max_num_seqs=1)
    for delay_s, order in ((1.0, "acb"), (100.0, "abc")):
        result = simulate(Trace(rows), "tie", scheduler=limits, predictor_delay_s=delay_s, step_time=PLAIN)
        assert "".join(record.request_id for record in result.records) == order
        assert result.predictor["num_failed"] == 2
        assert result.predictor["num_late"] == (3 if delay_s == 100.0 else 0)


def test_oracle_orders_by_true_length_and_bounds_the_others() -> None:
    trace = random_trace(400, seed=5, rate_rps=40)
    limits = SchedulerConfig(max_num_seqs=8)
    means = {
        policy: simulate(trace, policy, scheduler=limits).metrics["ttft_s"]["mean"]
        for policy in ("fcfs", "ssjf", "sept", "tie", "sjf")
    }
    assert means["sjf"] < min(means["ssjf"], means["sept"], means["tie"])
    assert max(means["ssjf"], means["sept"], means["tie"]) < 0.8 * means["fcfs"]


def test_every_policy_serves_with_failed_or_no_predictions() -> None:
    trace = random_trace(40, rate_rps=40)
    failed = Predictions("broken", dict.fromkeys(r.request_id for r in trace.requests))
    fcfs = simulate(trace, "fcfs")
    for policy in ("ssjf", "sept", "tie"):
        result = run_simulation(SimulationConfig(trace="", policy=policy), trace=trace, predictions=failed)
        assert result.predictor["num_failed"] == 40
        assert [r.request_id for r in result.records] == [r.request_id for r in fcfs.records]


def test_requests_that_never_fit_are_reported_not_lost() -> None:
    trace = Trace((trace_row("big", 0.0, 1000, 5), trace_row("ok", 0.5, 10, 5)))
    result = simulate(trace, scheduler=TIGHT)
    assert [record.request_id for record in result.records] == ["ok"]
    assert "whole KV cache" in result.refused["big"]
    assert result.metrics["num_refused"] == 1
    with pytest.raises(InputError, match="none of which fits"):
        simulate(Trace((trace_row("big", 0.0, 1000, 5),)), scheduler=TIGHT)


class Echo:
    """A live predictor that knows every length but fails on some prompts."""

    def __init__(self, failing: str) -> None:
        self.failing = failing
        self.closed = False

    async def predict(self, requests: Sequence[PredictionRequest]) -> list[LengthPrediction]:
        if self.failing in requests[0].prompt:
            raise TailcastError("no answer for this one")
        return [LengthPrediction(1.0, 0.5, 3.5, "echo", "7") for _ in requests]

    async def close(self) -> None:
        self.closed = True


def test_live_predictions_are_fetched_once_with_their_latency() -> None:
    predictor = Echo("3")
    trace = Trace(tuple(trace_row(f"r{i}", i * 0.1, 4, 5, prompt=f"prompt {i}") for i in range(10)))
    done: list[int] = []
    seen = fetch_predictions(trace, predictor, max_in_flight=4, progress=done.append)
    assert predictor.closed
    assert sum(done) == 10
    assert seen.num_failed == 1
    assert seen.errors == {"r3": "no answer for this one"}
    assert set(seen.latency_s) == {f"r{i}" for i in range(10)}
    config = SimulationConfig(trace="", policy="tie", predictor="grpc://unused:1")
    result = run_simulation(config, trace=trace, predictions=seen)
    assert result.predictor["num_predicted"] == 9
    assert result.predictor["latency_s"]["mean"] > 0
    assert result.predictor["artifacts"] == ["echo 7"]
    assert result.config["predictor"] == "Echo"


def test_a_predictor_that_answers_nobody_is_an_error() -> None:
    trace = Trace(tuple(trace_row(f"r{i}", i * 0.1, 4, 5, prompt="x") for i in range(100)))
    predictor = Echo("x")
    with pytest.raises(TailcastError, match="first 8 predictions failed: no answer for this one"):
        fetch_predictions(trace, predictor, max_in_flight=8)
    assert predictor.closed


def test_a_live_predictor_needs_prompts() -> None:
    with pytest.raises(InputError, match="prompt of request a"):
        fetch_predictions(Trace((trace_row("a", 0.0, 4, 5),)), Echo("x"))
    with pytest.raises(InputError, match="mu, sigma and nu"):
        fetch_predictions(Trace((trace_row("a", 0.0, 4, 5),)), "trace")


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"policy": "lifo"}, "policy"),
        ({"policy": "sjf", "predictor": "trace"}, "predictor"),
        ({"policy_parameters": {"gamma": 1}}, "gamma"),
        ({"rate": 1.0, "load": 1.0}, "rate, load"),
        ({"rate": 0.0}, "rate"),
        ({"load": float("nan")}, "load"),
        ({"predictor_delay_s": -1.0}, "predictor_delay_s"),
        ({"default_max_tokens": 0}, "default_max_tokens"),
        ({"max_in_flight": 0}, "max_in_flight"),
        ({"predictor_timeout_s": 0.0}, "predictor_timeout_s"),
        ({"seed": -1}, "seed"),
    ],
)
def test_wrong_configuration_is_named(values: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        SimulationConfig(**{"trace": "t", "policy": "fcfs", **values})


@pytest.mark.parametrize(
    "values", [{"base_s": -1.0}, {"base_s": 0.0, "per_decode_s": 0.0}, {"per_context_token_s": float("inf")}]
)
def test_wrong_step_times_are_named(values: dict[str, float]) -> None:
    with pytest.raises(InputError):
        LinearStepTime(**values)
