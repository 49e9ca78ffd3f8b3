"""What a run is watched for: gaps between tokens, load over time, who ran when; watching changes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from scheduler_core.decision_log import DecisionLog
from scheduler_core.errors import InputError
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.config import SimulationConfig
from scheduler_core.simulator.run import run_simulation
from scheduler_core.simulator.step_time import StepTime
from scheduler_core.simulator.step_time.base import LinearStepTime
from scheduler_core.simulator.step_time.decode_run import StepGroup
from scheduler_core.simulator.step_time.staircase import StaircaseStepTime
from scheduler_core.simulator.token_gaps import GapHistogram
from scheduler_core.simulator.trace import Trace
from scheduler_core.simulator.watch import MAX_POINTS, LoadPoint, LoadTimeline, RunWatch, write_chrome_trace
from tests.scheduler_core.helpers import random_trace, trace_row

#: 1 s per step and 0.1 s per prompt token, nothing else.
PLAIN = LinearStepTime(base_s=1.0, per_prefill_token_s=0.1, per_decode_s=0.0, per_context_token_s=0.0)


def config(**more: object) -> SimulationConfig:
    return SimulationConfig(trace="", policy="fcfs", step_time=PLAIN, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("exact", [False, True])
def test_gaps_of_a_small_run_worked_out_by_hand(exact: bool) -> None:
    """a: prefill 0 to 2, tokens at 2, then b's prefill (0.5 s more) at 3.5, then 4.5, 5.5. b: 3.5, 4.5."""
    trace = Trace((trace_row("a", 0.0, 10, 4, tier=0), trace_row("b", 1.0, 5, 2, tier=1, tenant="x")))
    watch = RunWatch(segments=[])
    result = run_simulation(config(exact_steps=exact), trace=trace, watch=watch)
    a, b = sorted(result.records, key=lambda one: one.request_id)
    assert a.max_tbt_s == pytest.approx(1.5)
    assert b.max_tbt_s == pytest.approx(1.0)
    assert watch.gaps is not None
    first, second = watch.gaps.by_class[0, ""], watch.gaps.by_class[1, "x"]
    assert (int(first.counts.sum()), int(second.counts.sum())) == (3, 1)
    assert first.total_s == pytest.approx(3.5)
    assert result.metrics["tbt_s"]["mean"] == pytest.approx(4.5 / 4)
    assert result.metrics["tbt_s"]["p50"] == pytest.approx(1.0, rel=0.005)
    assert result.metrics["groups"]["tier"]["0"]["tbt_s"]["max"] == pytest.approx(1.5)
    assert watch.segments is not None
    spans = [(one.request_id, one.kind, one.start_s, one.end_s, one.num_tokens) for one in watch.segments]
    assert spans == [
        ("a", "prefill", 0.0, 2.0, 10),
        ("b", "prefill", 2.0, 3.5, 5),
        ("a", "decode", 2.0, 5.5, 3),
        ("b", "decode", 3.5, 4.5, 1),
    ]


def test_the_longest_gap_is_that_of_the_token_times_also_after_preemptions() -> None:
    """Against the decision log: tokens come at the ends of the steps that sample them."""
    tight = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=48, num_kv_blocks=24)
    trace = random_trace(60, seed=2, rate_rps=20, cap=100, most_prompt=60)
    log = DecisionLog()
    result = run_simulation(
        SimulationConfig(trace="", policy="fcfs", scheduler=tight, exact_steps=True), trace=trace, log=log
    )
    assert result.metrics["num_preemptions"] > 0
    times: dict[str, list[float]] = {}
    sampling: list[str] = []
    for entry in log.entries:
        if entry["op"] == "schedule" and entry["plan"] is not None:
            plan = entry["plan"]
            sampling = [chunk["request_id"] for chunk in plan["prefills"] if chunk["is_last"]] + list(
                plan["decodes"]
            )
        elif entry["op"] == "complete":
            for name in sampling:
                times.setdefault(name, []).append(entry["now"])
    for record in result.records:
        gaps = np.diff(times[record.request_id])
        assert len(gaps) == record.output_tokens - 1
        if len(gaps):
            assert record.max_tbt_s == pytest.approx(gaps.max(), abs=1e-9)


@pytest.mark.parametrize("policy", ["fcfs", "srpt"])
@pytest.mark.parametrize("former", ["chunked_prefill", "vllm"])
@pytest.mark.parametrize("step_time", [LinearStepTime(), StaircaseStepTime()], ids=["linear", "staircase"])
def test_gaps_of_steps_taken_at_once_are_those_of_single_steps(
    step_time: StepTime, former: str, policy: str
) -> None:
    """Prompts of several chunks, preemptions by recompute and by swap; times to the last bit, gaps to rounding."""
    tokens = 30 if former == "chunked_prefill" else 170
    for preemption, blocks in (("recompute", 24), ("swap", 24), ("recompute", 400)):
        limits = SchedulerConfig(
            max_num_seqs=6,
            max_num_batched_tokens=tokens,
            num_kv_blocks=blocks,
            batching=former,
            preemption=preemption,  # type: ignore[arg-type]
        )
        trace = random_trace(40, seed=2, rate_rps=6, cap=100, most_prompt=60)
        single, several = (
            run_simulation(
                SimulationConfig(
                    trace="", policy=policy, scheduler=limits, step_time=step_time, exact_steps=exact
                ),
                trace=trace,
            )
            for exact in (True, False)
        )
        for one, other in zip(single.records, several.records, strict=True):
            assert (one.request_id, one.finish_s, one.first_token_s) == (
                other.request_id,
                other.finish_s,
                other.first_token_s,
            )
            assert one.max_tbt_s == pytest.approx(other.max_tbt_s, abs=1e-9)
        assert single.watch.gaps is not None
        assert several.watch.gaps is not None
        before, after = single.watch.gaps.total(), several.watch.gaps.total()
        assert before.counts.sum() == after.counts.sum()
        # A gap at the border of two bins may be in either.
        assert np.abs(np.cumsum(before.counts) - np.cumsum(after.counts)).max() <= 3
        assert before.total_s == pytest.approx(after.total_s, rel=1e-9)
        assert before.longest_s == pytest.approx(after.longest_s, abs=1e-9)


def test_rising_steps_are_counted_in_the_bins_of_each() -> None:
    group = StepGroup(0.01, 3e-5, 700)
    one_by_one, together = GapHistogram(), GapHistogram()
    for step in range(700):
        one_by_one.add(0.01 + 3e-5 * step, 2)
    together.add_steps([group], 2)
    assert np.abs(np.cumsum(one_by_one.counts) - np.cumsum(together.counts)).max() <= 2
    assert together.counts.sum() == 1400
    assert together.total_s == pytest.approx(one_by_one.total_s, rel=1e-12)
    assert together.longest_s == pytest.approx(one_by_one.longest_s, rel=1e-12)


def test_watching_changes_nothing() -> None:
    trace = random_trace(80, seed=5, rate_rps=12)
    runs = [
        run_simulation(config(), trace=trace, watch=watch)
        for watch in (RunWatch(), RunWatch(gaps=None, segments=[]))
    ]
    first, second = (
        [(one.request_id, one.finish_s, one.first_token_s) for one in run.records] for run in runs
    )
    assert first == second
    assert runs[1].metrics["tbt_s"] is None
    assert runs[1].records[0].max_tbt_s is None


def test_histogram_quantiles_are_right_to_half_a_percent() -> None:
    values = np.exp(np.random.default_rng(0).normal(-3, 1, 20_000))
    histogram = GapHistogram()
    for value in values:
        histogram.add(float(value))
    for share in (0.5, 0.9, 0.99):
        assert histogram.quantile(share) == pytest.approx(np.quantile(values, share), rel=0.01)
    assert histogram.total_s == pytest.approx(values.sum())
    assert histogram.longest_s == values.max()
    both = GapHistogram.merged([histogram, histogram])
    assert both.counts.sum() == 40_000
    assert GapHistogram().summary() is None


def test_a_long_timeline_stays_small_and_covers_the_run() -> None:
    line = LoadTimeline()
    for step in range(50_000):
        line.add(LoadPoint(float(step), 0.5, 1, 0))
    assert len(line.points) <= MAX_POINTS
    assert line.points[0].time_s == 0
    assert line.points[-1].time_s > 49_900
    gaps = np.diff([point.time_s for point in line.points])
    assert set(gaps) == {gaps[0]}


def test_the_chrome_trace_has_every_stretch_of_work(tmp_path: Path) -> None:
    watch = RunWatch(segments=[])
    result = run_simulation(config(), trace=random_trace(30, rate_rps=3), watch=watch)
    write_chrome_trace(watch, result.records, tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    work = [event for event in events if event["ph"] == "X" and event["name"] != "waiting"]
    assert watch.segments is not None
    assert len(work) == len(watch.segments)
    prefilled = sum(event["args"]["tokens"] for event in work if event["name"] == "prefill")
    assert prefilled == sum(one.prompt_tokens for one in result.records)
    assert all(event["dur"] >= 0 for event in work)
    waits = [event for event in events if event.get("name") == "waiting" and event["ph"] == "X"]
    assert sum(event["dur"] for event in waits) == pytest.approx(
        1e6 * sum(one.queueing_delay_s for one in result.records), rel=1e-9, abs=1e-3
    )
    with pytest.raises(InputError, match="segments"):
        write_chrome_trace(RunWatch(), result.records, tmp_path / "u.json")


def test_too_many_segments_are_refused() -> None:
    watch = RunWatch(segments=[], max_segments=10)
    with pytest.raises(InputError, match="shorter run"):
        run_simulation(config(), trace=random_trace(30), watch=watch)
