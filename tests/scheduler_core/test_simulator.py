"""The simulator: exact times and gaps by hand, the closed form against single steps, predictions, event sources."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scheduler_core.batching.uniboost import OneOrder
from scheduler_core.engine.decision_log import DecisionLog
from scheduler_core.errors import InputError, TailcastError
from scheduler_core.policies import POLICIES, make_policy
from scheduler_core.prediction import predictions as heads
from scheduler_core.prediction.predictions import LengthPrediction, Prediction
from scheduler_core.prediction.predictor import PredictionRequest
from scheduler_core.replay import replay
from scheduler_core.request import Request, RequestState, Segment
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from scheduler_core.simulator.config import BOUNDS, ClusterConfig, SimulationConfig
from scheduler_core.simulator.loop import Simulation, SimulationOutcome
from scheduler_core.simulator.run import SimulationResult
from scheduler_core.simulator.step_time.base import LinearStepTime, StepTime
from scheduler_core.simulator.step_time.staircase import StaircaseStepTime
from scheduler_core.simulator.trace import Trace, load_trace, write_trace
from scheduler_core.simulator.trace_predictions import Predictions, fetch_predictions, trace_predictions
from scheduler_core.simulator.watch import GapHistogram, RunWatch
from tests.scheduler_core import helpers
from tests.scheduler_core.helpers import random_trace, scheduler, simulate, trace_row

TIGHT = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=48, num_kv_blocks=40, kv_block_tokens=16)


def test_times_of_a_small_run_worked_out_by_hand() -> None:
    """a arrives at 2 with 10 prompt tokens: prefill 1 + 1.0 s, first token at 4. b (5 tokens) arrives at 3 and joins.

    Step 2: b's prefill (0.5), a's decode (0.01), a's context 10 (0.01): 1.52 s, ends 5.52; a has 2 tokens, b 1.
    Step 3: two decodes (0.02), context 11 + 5 (0.016): 1.036 s, ends 6.556; a is done (3), b has 2.
    Step 4: one decode (0.01), context 6 (0.006): 1.016 s, ends 7.572; b is done (3).
    """
    result = simulate(Trace((trace_row("a", 2.0, 10, 3), trace_row("b", 3.0, 5, 3))), step_time=helpers.PLAIN)
    a, b = result.records
    assert (a.request_id, b.request_id) == ("a", "b")
    assert (a.first_scheduled_s, a.first_token_s) == (2.0, 4.0)
    assert a.finish_s == pytest.approx(6.556, abs=1e-12)
    assert (b.first_scheduled_s, b.finish_reason) == (4.0, "stop")
    assert b.first_token_s == pytest.approx(5.52, abs=1e-12)
    assert b.finish_s == pytest.approx(7.572, abs=1e-12)
    assert (b.ttft_s, b.queueing_delay_s) == (pytest.approx(2.52, abs=1e-12), 1.0)
    assert b.tpot_s == pytest.approx((7.572 - 5.52) / 2, abs=1e-12)
    assert b.normalized_latency_s == pytest.approx(4.572 / 3, abs=1e-12)
    metrics = result.metrics
    assert metrics["makespan_s"] == pytest.approx(5.572, abs=1e-12)
    assert (metrics["busy_fraction"], metrics["num_steps"]) == (pytest.approx(1.0), 4)
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


def check_many_steps_at_once(trace: Trace, policy: str, **values: Any) -> SimulationResult:
    """Many steps at once equal single steps to the last bit."""
    fast, slow = (simulate(trace, policy, exact_steps=exact, **values) for exact in (False, True))
    assert comparable(fast) == comparable(slow)
    assert len(fast.records) == len(trace)
    assert fast.metrics["littles_law_error"] < 1e-9
    return fast


@pytest.mark.parametrize("policy", [*POLICIES, *BOUNDS])
@pytest.mark.parametrize("limits", [TIGHT, SchedulerConfig(max_num_seqs=16)], ids=["tight", "roomy"])
def test_many_steps_at_once_equal_single_steps(policy: str, limits: SchedulerConfig) -> None:
    trace = random_trace(80, seed=3, rate_rps=8)
    result = check_many_steps_at_once(trace, policy, scheduler=limits, predictor_delay_s=0.02)
    assert limits is not TIGHT or result.metrics["num_preemptions"] > 0


def test_predictions_come_after_their_delay() -> None:
    """At 0, a is admitted alone; b and c wait. c's prediction (short) comes before a is done only if it is quick."""
    seen = LengthPrediction(0.0, 0.1, 3.5)
    rows = (trace_row("a", 0.0, 1, 5), trace_row("b", 0.5, 1, 5), trace_row("c", 0.6, 1, 5, prediction=seen))
    config: dict[str, Any] = {"scheduler": SchedulerConfig(max_num_seqs=1), "step_time": helpers.PLAIN}
    for delay_s, order in ((1.0, "acb"), (100.0, "abc")):
        result = simulate(Trace(rows), "tie", predictor_delay_s=delay_s, **config)
        assert "".join(record.request_id for record in result.records) == order
        assert result.predictor["num_failed"] == 2
        assert result.predictor["num_late"] == (3 if delay_s == 100.0 else 0)


def test_requests_that_never_fit_are_reported_not_lost() -> None:
    result = simulate(Trace((trace_row("big", 0.0, 1000, 5), trace_row("ok", 0.5, 10, 5))), scheduler=TIGHT)
    assert [record.request_id for record in result.records] == ["ok"]
    assert "whole KV cache" in result.refused["big"]
    assert result.metrics["num_refused"] == 1
    with pytest.raises(InputError, match="none of which fits"):
        simulate(Trace((trace_row("big", 0.0, 1000, 5),)), scheduler=TIGHT)


class Echo:
    """A live predictor with all heads, each of which has an order of its own; it fails on some prompts."""

    def __init__(self, failing: str = "-") -> None:
        self.failing = failing
        self.closed = False

    async def predict(
        self, requests: Sequence[PredictionRequest], *, timeout_s: float | None = None
    ) -> list[Prediction]:
        if self.failing in requests[0].prompt:
            raise TailcastError("no prediction for this one")
        return [self.prediction("abcd".index(request.prompt[0])) for request in requests]

    def prediction(self, number: int) -> Prediction:
        """Of a, b, c or d: by length d c b a, by point b d a c, by rank c a d b, by bucket b c d a, by urgency d a c b."""
        levels, bucket = [0.0] * 5, [0.0] * 4
        levels[(1, 4, 3, 0)[number]] = bucket[(3, 0, 1, 2)[number]] = 1.0
        return Prediction(
            length=LengthPrediction(4.0 - number, 0.5, 3.5, "echo", "7"),
            point=heads.PointPrediction((3.0, 1.0, 4.0, 2.0)[number]),
            rank=heads.RankPrediction((2.0, 4.0, 1.0, 3.0)[number]),
            bucket=heads.BucketPrediction(tuple(bucket), (8.0, 16.0, 32.0)),
            urgency=heads.UrgencyPrediction(tuple(levels)),
        )

    async def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("policy", "parameters", "order"),
    [
        ("fcfs", {}, "abcd"), ("tie", {}, "dcba"), ("ssjf", {}, "bdac"), ("ltr", {}, "cadb"),
        ("s3", {"reserve": 0}, "bcda"), ("hpjf", {"max_promotion": math.inf}, "dacb"),
        ("hpjf", {}, "adbc"),  # a and d are promoted from tier 2 to 1
        ("semantic", {"max_promotion": math.inf}, "dacb"),
        ("semantic", {}, "dabc"),  # by bucket among a and d, and among b and c
        ("slo_tie", {}, "dacb"),  # by length among a and d, and among b and c
    ],
)  # fmt: skip
def test_every_live_head_reaches_the_policy(policy: str, parameters: dict[str, float], order: str) -> None:
    trace = Trace(tuple(trace_row(name, 0.0, 4, 3, prompt=name, ttlt_slo_s=1.0) for name in "abcd"))
    predictions = fetch_predictions(trace, Echo())
    assert predictions.num_failed == 0
    config: dict[str, Any] = {"predictor": "grpc://unused:1", "predictor_delay_s": 0.0}
    config |= {"policy_parameters": parameters, "scheduler": SchedulerConfig(max_num_seqs=1)}
    result = simulate(trace, policy, predictions=predictions, **config)
    assert "".join(record.request_id for record in result.records) == order


def test_the_model_of_a_row_is_the_served_model(tmp_path: Path) -> None:
    class Names(Echo):
        async def predict(
            self, requests: Sequence[PredictionRequest], *, timeout_s: float | None = None
        ) -> list[Prediction]:
            names.extend(request.served_model for request in requests)
            return await super().predict(requests)

    rows = [trace_row(name, 0.0, 4, 3, prompt=name, model=f"model-{name}") for name in "ab"]
    path = tmp_path / "trace.parquet"
    write_trace(Trace(tuple(rows)), path)
    for served_model, expected in (("", ["model-a", "model-b"]), ("all", ["all", "all"])):
        names: list[str] = []
        fetch_predictions(load_trace(path), Names(), served_model=served_model)
        assert sorted(names) == expected


def test_live_predictions_are_fetched_once_with_their_latency() -> None:
    predictor, done = Echo("3"), []
    trace = Trace(tuple(trace_row(f"r{i}", i * 0.1, 4, 5, prompt=f"a prompt {i}") for i in range(10)))
    predictions = fetch_predictions(trace, predictor, max_in_flight=4, progress=done.append)
    assert predictor.closed
    assert (sum(done), predictions.num_failed) == (10, 1)
    assert predictions.errors == {"r3": "no prediction for this one"}
    assert set(predictions.latency_s) == {f"r{i}" for i in range(10)}
    result = simulate(trace, "tie", predictor="grpc://unused:1", predictions=predictions)
    assert result.predictor["num_predicted"] == 9
    assert result.predictor["latency_s"]["mean"] > 0
    assert (result.predictor["artifacts"], result.config["predictor"]) == (["echo 7"], "Echo")


def test_a_predictor_that_always_fails_is_an_error() -> None:
    trace = Trace(tuple(trace_row(f"r{i}", i * 0.1, 4, 5, prompt="x") for i in range(100)))
    predictor = Echo("x")
    with pytest.raises(TailcastError, match="first 8 predictions failed: no prediction for this one"):
        fetch_predictions(trace, predictor, max_in_flight=8)
    assert predictor.closed
    without = Trace((trace_row("a", 0.0, 4, 5),))
    with pytest.raises(InputError, match="prompt of request a"):
        fetch_predictions(without, Echo())
    with pytest.raises(InputError, match="mu, sigma and nu"):
        trace_predictions(without)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"trace": None}, "trace, workload"), ({"policy": "lifo"}, "policy"),
        ({"rate": 1.0, "load": 1.0}, "rate, load"), ({"rate": 0.0}, "rate"),
        ({"predictor_noise": -1.0, "predictor": "oracle"}, "predictor_noise"),
        ({"step_time_parameters": {"gpu": "h200-141gb"}}, "step_time_model"),
        ({"router": "compass"}, "router"),
        ({"router": "disaggregated", "num_replicas": 2}, "num_prefill_replicas"),
        ({"num_replicas": 2, "min_replicas": 3}, "min_replicas"),
        ({"router": "llumnix", "router_parameters": {"a": 1.0}}, "router_parameters"),
        ({"headroom_fraction": 2.0}, "max_fraction"),
    ],
)  # fmt: skip
def test_wrong_configurations_are_named(values: dict[str, Any], named: str) -> None:
    names = {item.name for item in dataclasses.fields(ClusterConfig)}
    with pytest.raises(InputError, match=named):
        if set(values) <= names:
            ClusterConfig(**values)
        else:
            SimulationConfig(**{"trace": "t", "policy": "fcfs", **values})


@pytest.mark.parametrize("exact", [False, True])
def test_gaps_of_a_small_run_worked_out_by_hand(exact: bool) -> None:
    """a: prefill 0 to 2, tokens at 2, then b's prefill (0.5 s more) at 3.5, then 4.5, 5.5. b: 3.5, 4.5."""
    trace = Trace((trace_row("a", 0.0, 10, 4, tier=0), trace_row("b", 1.0, 5, 2, tier=1, tenant="x")))
    watch = RunWatch()
    result = simulate(trace, step_time=helpers.ROUND, exact_steps=exact, watch=watch)
    a, b = sorted(result.records, key=lambda one: one.request_id)
    assert (a.max_tbt_s, b.max_tbt_s) == (pytest.approx(1.5), pytest.approx(1.0))
    first, second = watch.gaps.by_class[0, ""], watch.gaps.by_class[1, "x"]
    assert (int(first.counts.sum()), int(second.counts.sum())) == (3, 1)
    assert first.total_s == pytest.approx(3.5)
    assert result.metrics["tbt_s"]["mean"] == pytest.approx(4.5 / 4)
    assert result.metrics["tbt_s"]["p50"] == pytest.approx(1.0, rel=0.005)
    assert result.metrics["groups"]["tier"]["0"]["tbt_s"]["max"] == pytest.approx(1.5)


def test_the_longest_gap_is_that_of_the_token_times_also_after_preemptions() -> None:
    """Against the decision log."""
    tight = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=48, num_kv_blocks=24)
    trace = random_trace(60, seed=2, rate_rps=20, cap=100, most_prompt=60)
    log = DecisionLog()
    result = simulate(trace, scheduler=tight, exact_steps=True, log=log)
    assert result.metrics["num_preemptions"] > 0
    times = helpers.token_times(log)
    for record in result.records:
        gaps = np.diff(times[record.request_id])
        assert len(gaps) == record.output_tokens - 1
        if len(gaps):
            assert record.max_tbt_s == pytest.approx(gaps.max(), abs=1e-9)


@pytest.mark.parametrize("policy", ["fcfs", "srpt"])
@pytest.mark.parametrize("former", ["chunked_prefill", "vllm"])
@pytest.mark.parametrize("step_time", [LinearStepTime(), StaircaseStepTime()], ids=["linear", "staircase"])
def test_gaps_of_many_steps_are_those_of_single_ones(step_time: StepTime, former: str, policy: str) -> None:
    """Prompts of several chunks, preemptions by recompute and by swap; times to the last bit, gaps to rounding."""
    tokens = 30 if former == "chunked_prefill" else 170
    for preemption, blocks in (("recompute", 24), ("swap", 24), ("recompute", 400)):
        limits = SchedulerConfig(
            max_num_seqs=6, max_num_batched_tokens=tokens, num_kv_blocks=blocks, batching=former,
            preemption=preemption,  # type: ignore[arg-type]
        )  # fmt: skip
        trace = random_trace(40, seed=2, rate_rps=6, cap=100, most_prompt=60)
        options = {"scheduler": limits, "step_time": step_time}
        single, several = (simulate(trace, policy, exact_steps=exact, **options) for exact in (True, False))
        assert single.records == several.records
        assert several.metrics["littles_law_error"] < 1e-9
        for one, other in zip(single.records, several.records, strict=True):
            assert one.max_tbt_s == pytest.approx(other.max_tbt_s, abs=1e-9)
        before, after = single.watch.gaps.merged(), several.watch.gaps.merged()
        assert before.counts.sum() == after.counts.sum()
        # A gap at the border of two bins may be in either.
        assert np.abs(np.cumsum(before.counts) - np.cumsum(after.counts)).max() <= 3
        assert before.total_s == pytest.approx(after.total_s, rel=1e-9)
        assert before.longest_s == pytest.approx(after.longest_s, abs=1e-9)


def test_histogram_quantiles_are_right_to_half_a_percent() -> None:
    values = np.exp(np.random.default_rng(0).normal(-3, 1, 20_000))
    histogram = GapHistogram()
    for value in values:
        histogram.add(float(value))
    for share in (0.5, 0.9, 0.99):
        assert histogram.quantile(share) == pytest.approx(np.quantile(values, share), rel=0.01)
    assert histogram.total_s == pytest.approx(values.sum())
    assert histogram.longest_s == values.max()
    assert GapHistogram.merged([histogram, histogram]).counts.sum() == 40_000
    assert GapHistogram().summary() is None


def shorter_than_predicted(num_requests: int) -> Trace:
    """Every output has half the tokens of its predicted median."""
    rng = np.random.default_rng(4)
    rows = []
    for number in range(num_requests):
        tokens = int(rng.integers(10, 400))
        row = trace_row(f"r{number}", 2.0 * number, 10, tokens)
        prediction = LengthPrediction(math.log(2 * tokens) + 0.2 * float(rng.standard_t(3.5)), 0.2, 3.5)
        rows.append(dataclasses.replace(row, prediction=prediction, max_tokens=10_000))
    return Trace(tuple(rows))


def test_online_calibration_corrects_by_the_requests_that_have_finished_before() -> None:
    trace = shorter_than_predicted(400)
    raw = simulate(trace, "ssjf")
    corrected = simulate(trace, "ssjf", online_calibration=True)
    by_id = {record.request_id: record for record in corrected.records}
    mu = {row.request_id: row.prediction.mu for row in trace.requests if row.prediction}
    first_end_s = min(record.finish_s for record in corrected.records)
    before = [record for record in corrected.records if record.arrival_s < first_end_s]
    assert before
    assert all(record.predicted_mu == mu[record.request_id] for record in before)
    assert by_id["r399"].predicted_mu == pytest.approx(mu["r399"] - math.log(2), abs=0.15)
    quality = [result.metrics["prediction"] for result in (raw, corrected)]
    assert quality[1]["mae_log"] < 0.5 * quality[0]["mae_log"]
    metrics = corrected.predictor["online_calibration"][""]
    assert metrics["num_outputs"] == 400
    assert metrics["after"]["crps"] < 0.5 * metrics["before"]["crps"]
    assert "online_calibration" not in raw.predictor
    json.dumps(corrected.to_json(), allow_nan=False)


def test_online_calibration_does_not_depend_on_steps_taken_at_once() -> None:
    trace = shorter_than_predicted(60)
    runs = [simulate(trace, "tie", online_calibration=True, exact_steps=exact) for exact in (0, 1)]
    assert runs[0].records == runs[1].records
    assert len({record.predicted_sigma for record in runs[0].records}) > 30


@pytest.mark.parametrize("former", ["chunked_prefill", "uniboost"])
@pytest.mark.parametrize("guard", [True, False], ids=["guarded", "unguarded"])
def test_rates_that_a_policy_measures_do_not_depend_on_steps_taken_at_once(former: str, guard: bool) -> None:
    """UniBoost's gamma and times per token move many times here, also within and at the ends of runs; its bins do, too."""
    parameters = {"window": 20, "update_every": 10, "refresh": 0.002, "bin_tokens": 16, "mem_guard": guard}
    limits = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=64, num_kv_blocks=60, batching=former)
    trace = random_trace(150, seed=8, rate_rps=2.0)
    config = {"policy_parameters": parameters, "scheduler": limits}
    assert check_many_steps_at_once(trace, "uniboost", **config).metrics["num_preemptions"] > 0
    keys = []
    for exact in (False, True):
        core = Scheduler(limits, make_policy("uniboost", parameters), log := DecisionLog())
        Simulation(trace, core, LinearStepTime(), trace_predictions(trace), exact_steps=exact).run()
        at_end = RequestState(Request(request_id="new", arrival_s=0.0, prompt_tokens=9, max_tokens=9), 0)
        at_end.num_output_tokens = 5
        keys.append(core.policy.key(at_end, 0.0))
        if not exact:
            steps = [entry["result"]["num_steps"] for entry in log.entries if entry["op"] == "complete"]
            assert sum(steps) > 1.3 * len(steps)
            assert replay(log.entries).policy.key(at_end, 0.0) == keys[0]
    assert keys[0] == keys[1]


@pytest.mark.parametrize("num_kv_blocks", [20, 30, 60])
@pytest.mark.parametrize("policy", ["uniboost", "fcfs", "trail"])
def test_uniboosts_former_forms_the_same_batches_without_the_order_where_that_decides_nothing(
    policy: str, num_kv_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times are equal to rounding: the order of the decodes in a plan says when their run of steps is timed anew."""
    limits = SchedulerConfig(
        max_num_seqs=8, max_num_batched_tokens=64, num_kv_blocks=num_kv_blocks, preemption="swap",
        batching="uniboost",
    )  # fmt: skip
    parameters = {"bin_tokens": 16} if policy == "uniboost" else {}
    trace = random_trace(80, seed=4, rate_rps=6.0)

    def batches() -> tuple[list[Any], list[float]]:
        log = DecisionLog()
        config = {"policy_parameters": parameters, "scheduler": limits, "exact_steps": True}
        result = simulate(trace, policy, log=log, **config)
        plans = [entry["plan"] for entry in log.entries if entry["op"] == "schedule" and entry["plan"]]
        kept = [plan | {"decodes": sorted(plan["decodes"])} for plan in plans]
        return kept, [record.finish_s for record in result.records]

    calls = []
    quick = OneOrder._decode_only

    def counted(*arguments: Any) -> bool:
        calls.append(quick(*arguments))
        return calls[-1]

    monkeypatch.setattr(OneOrder, "_decode_only", counted)
    fast = batches()
    monkeypatch.setattr(OneOrder, "_decode_only", lambda *arguments: False)
    slow = batches()
    assert set(calls) == {True, False}
    assert fast[0] == slow[0]
    assert fast[1] == pytest.approx(slow[1], abs=1e-9)


def run(trace: Trace, **more: object) -> SimulationOutcome:
    core = scheduler(num_kv_blocks=200)
    return Simulation(trace, core, helpers.ROUND, Predictions(), **more).run()  # type: ignore[arg-type]


def test_turns_wait_for_the_answer_before_and_find_their_prefix() -> None:
    """Turn 0: 20 tokens (3 s), 1 more step: ends at 4. Turn 1 thinks 2 s, comes at 6 with 40 tokens, of which the block of
    the first 16 is cached: 1 + 2.4 s, 1 step: ends at 10.4. Turn 2 comes at its own time, 50, and finds two blocks."""
    rows = tuple(
        trace_row(f"s{turn}", at, prompt, 2, session_id="s", turn=turn, think_time_s=2.0 if turn else None,
                  content=(Segment("s", prompt),))
        for turn, (at, prompt) in enumerate(((0.0, 20), (1.0, 40), (50.0, 60)))
    )  # fmt: skip
    out = run(Trace(rows))
    assert [record.request_id for record in out.records] == ["s0", "s1", "s2"]
    assert [record.arrival_s for record in out.records] == [0.0, 6.0, 50.0]
    assert [record.finish_s for record in out.records] == pytest.approx([4.0, 10.4, 50 + 1 + 2.8 + 1])
    without = Simulation(
        Trace(rows), scheduler(num_kv_blocks=200, prefix_caching=False), helpers.ROUND, Predictions()
    ).run()
    assert without.records[1].finish_s == pytest.approx(6 + 5 + 1), "nothing is kept without a cache"


def test_a_run_ends_at_its_horizon_and_counts_what_is_not_finished() -> None:
    rows = tuple(trace_row(f"r{number}", float(number), 20, 2) for number in range(9))
    whole, part = run(Trace(rows)), run(Trace(rows), horizon_s=7.0)
    assert part.end_s == 7.0
    ended = [record for record in whole.records if record.finish_s <= 7.0]
    assert [record.request_id for record in part.records] == [record.request_id for record in ended]
    arrived = sum(row.arrival_s <= 7.0 for row in rows)
    assert part.num_unfinished == arrived - len(ended) > 0


def test_a_turn_after_a_refused_one_is_not_lost() -> None:
    too_large = trace_row("s0", 0.0, 5000, 2, session_id="s")
    rows = (too_large, trace_row("s1", 1.0, 40, 2, session_id="s", turn=1, think_time_s=2.0))
    out = run(Trace(rows))
    assert list(out.refused) == ["s0"]
    assert [(record.request_id, record.arrival_s) for record in out.records] == [("s1", 2.0)]


def test_a_run_that_stops_after_some_outputs_is_the_start_of_the_whole_run() -> None:
    rows = [dataclasses.replace(row, arrival_s=0.0) for row in random_trace(60, seed=4).requests]
    trace, limits = Trace(tuple(rows)), SchedulerConfig(max_num_seqs=8)
    whole = simulate(trace, "tie", scheduler=limits)
    part = simulate(trace, "tie", scheduler=limits, stop_after=18)
    ends = sorted(record.finish_s for record in whole.records)
    assert part.metrics["makespan_s"] == ends[17] < ends[18]
    assert part.metrics["num_unfinished"] == 42
    assert [record.finish_s for record in part.records] == ends[:18]
    assert simulate(trace, "tie", scheduler=limits, stop_after=60).metrics == whole.metrics
