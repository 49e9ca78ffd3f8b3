"""Parts of a plan: targets, changed logs, searches."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from scheduler_core.errors import InputError
from scheduler_core.request import Segment
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.clients import ClientPlan
from scheduler_core.simulator.config import SimulationConfig
from scheduler_core.simulator.planning.choices import parse_prices
from scheduler_core.simulator.planning.config import PlanConfig
from scheduler_core.simulator.planning.search import Probe, Search, drive, smallest_level
from scheduler_core.simulator.planning.simulations import TrafficCell, measured_from_s
from scheduler_core.simulator.planning.targets import MissedTargets, Target
from scheduler_core.simulator.planning.traffic import Traffic, at_drawn_times, drift, resampled, units_of
from scheduler_core.simulator.records import RequestRecord
from scheduler_core.simulator.step_time.base import LinearStepTime
from scheduler_core.simulator.trace import Trace, waits_for, write_trace
from tests.properties import examples
from tests.scheduler_core.helpers import trace_row


def log_of(num: int = 200, sessions: int = 30, seed: int = 0) -> Trace:
    """Single requests, and sessions of three turns with think times and a shared system prompt."""
    rng = np.random.default_rng(seed)
    rows = [
        trace_row(f"r{at}", float(time), int(rng.integers(10, 500)), int(rng.integers(1, 200)), 2000)
        for at, time in enumerate(np.sort(rng.uniform(0, 1000, num)))
    ]
    for number in range(sessions):
        start = float(rng.uniform(0, 900))
        for turn in range(3):
            content = (Segment("system", 50), Segment(f"s{number}", 100 * (turn + 1)))
            rows.append(
                trace_row(f"s{number}.{turn}", start + 20 * turn, 100 * (turn + 1) + 50, 40, 50, session_id=f"s{number}", turn=turn, think_time_s=5.0 if turn else None, content=content)
            )  # fmt: skip
    return Trace(tuple(sorted(rows, key=lambda row: row.arrival_s)))


@pytest.mark.parametrize(
    ("text", "canonical", "num"),
    [
        ("ttft_s.p99<2", "ttft_s.p99<2", 1000),
        (" itl_s.p90 <= 0.05", "tbt_s.p90<0.05", 100),
        ("e2e_s.mean<20", "ttlt_s.mean<20", 100),
        ("goodput>0.95", "slo_attainment>0.95", 200),
        ("cost_per_million_tokens<1.5", "cost_per_million_tokens<1.5", 100),
    ],
)
def test_targets_in_words(text: str, canonical: str, num: int) -> None:
    target = Target.of(text)
    assert str(target) == canonical
    assert target.min_requests == num
    assert target.slack(target.bound) == pytest.approx(1)


@pytest.mark.parametrize(
    "text",
    ["ttft_s<2", "ttft_s.p98<2", "ttft_s.p99>2", "goodput<0.9", "goodput>1", "ttft_s.p99<0", "ttft_s.p99<x", "ttft.p99<2", "2>ttft_s.p99", ""],
)  # fmt: skip
def test_other_targets_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="target"):
        Target.of(text)


def record(ttft_s: float, number: int) -> RequestRecord:
    return RequestRecord(request_id=str(number), arrival_s=0, first_scheduled_s=0, first_token_s=ttft_s, finish_s=ttft_s + 1, prompt_tokens=1, output_tokens=2, max_tokens=2, finish_reason="stop", num_preemptions=0, ttft_slo_s=1.0)  # fmt: skip


@given(
    st.lists(st.floats(0, 3), min_size=1, max_size=60),
    st.sampled_from(["ttft_s.p50<1", "ttft_s.p90<1", "ttft_s.mean<1", "ttft_s.max<1", "goodput>0.9"]),
)
@example([2.0] + [0.5] * 9, "goodput>0.9")  # at the bound, where 1 - 0.9 is below 0.1
@examples(100)
def test_a_run_is_only_stopped_if_its_target_is_missed_in_the_end(values: list[float], text: str) -> None:
    target = Target.of(text)
    level = {"p50": 0.5, "p90": 0.9, "max": 1.0}.get(target.metric.partition(".")[2])
    end = float(np.mean(values) if level is None else np.quantile(values, level))
    if target.at_least:
        end = float(np.mean(np.array(values) <= 1))
    missed = MissedTargets([target], len(values))
    stopped = any(missed(record(value, at)) for at, value in enumerate(values))
    if stopped:
        assert target.slack(end) > 1
        assert missed.missed == target
    elif not target.at_least:
        # Linear interpolation may be above the bound although the value below it is not.
        assert target.slack(end) <= 1 or (level is not None and level < 1)


def test_a_run_is_stopped_if_more_clients_give_up_than_a_target_allows() -> None:
    row = trace_row("r0", 0.0, 10, 10)
    missed = MissedTargets([Target.of("ttft_s.p90<1")], 100, from_s=-1.0)
    assert not any(missed(row) for _ in range(10))
    assert not missed(replace(row, arrival_s=-2.0)), "before what is measured"
    assert missed(row)
    assert str(missed.missed) == "ttft_s.p90<1"


def test_clients_that_give_up_stop_a_run(tmp_path: Path) -> None:
    log = Trace(tuple([trace_row(f"r{at}", at / 20, 500, 5) for at in range(400)]))
    write_trace(log, tmp_path / "log.parquet")
    step_time = LinearStepTime(base_s=0.1, per_prefill_token_s=1e-4, per_decode_s=0.0)
    config = SimulationConfig(
        trace=str(tmp_path / "log.parquet"), policy="fcfs", step_time=step_time, clients=ClientPlan(timeout_s=1.0),
        scheduler=SchedulerConfig(max_num_seqs=4, num_kv_blocks=1000),
    )  # fmt: skip
    whole, stopped = (
        TrafficCell(config, {}, Traffic(), targets).simulate()
        for targets in ((), (Target.of("ttft_s.p90<2"),))
    )
    assert whole.metrics["given_up_fraction"] > 0.5
    assert "missed" not in whole.metrics
    assert stopped.metrics["missed"] == "ttft_s.p90<2"
    assert stopped.metrics["num_failed"] == 41 < whole.metrics["num_failed"]
    assert stopped.metrics["makespan_s"] < whole.metrics["makespan_s"] / 2


@given(st.integers(1, 60), st.integers(1, 80), st.sampled_from([1.25, 2.0]))
@examples(100)
def test_the_smallest_level_is_found_from_any_guess(smallest: int, first: int, step: float) -> None:
    levels: list[int] = []

    def probe(level: int) -> Search[Probe]:
        levels.append(level)
        yield []
        return {"level": level, "meets": level >= smallest}

    best, probes = drive(smallest_level(probe, 64, first, step), lambda _: [])
    assert best is not None
    assert best["level"] == smallest
    assert len(set(levels)) == len(levels) == len(probes) <= 14
    assert drive(smallest_level(probe, smallest - 1, first, step), lambda _: [])[0] is None or smallest == 1


def test_a_log_is_unchanged_by_the_default_and_scaled_by_a_load() -> None:
    log = log_of()
    assert Traffic().apply(log) == log
    double = Traffic(load=2.0).apply(log)
    starts = [unit[0].arrival_s for unit in units_of(log.requests)]
    scaled = [unit[0].arrival_s for unit in units_of(double.requests)]
    assert scaled == pytest.approx([starts[0] + (start - starts[0]) / 2 for start in starts])
    for unit in units_of(double.requests):
        assert [b.arrival_s - a.arrival_s for a, b in pairwise(unit)] == pytest.approx(
            [20.0] * (len(unit) - 1)
        )
    longer = Traffic(outputs=1.5).apply(log)
    assert sum(row.output_tokens for row in longer.requests) == pytest.approx(
        1.5 * sum(row.output_tokens for row in log.requests), rel=0.01
    )
    assert all(row.output_tokens <= row.max_tokens for row in longer.requests)


@pytest.mark.parametrize(
    "traffic",
    [
        Traffic(seed=3),
        Traffic(seed=3, num_repeats=3),
        Traffic(fraction=0.3, num_requests=400),
        Traffic(num_requests=50),
        Traffic(seed=1, fraction=0.5, load=1.0, num_requests=100, num_repeats=2),
    ],
)
def test_changed_logs_are_valid_traces_with_whole_sessions(traffic: Traffic) -> None:
    log = log_of()
    changed = traffic.apply(log)
    rows = changed.requests
    assert len({row.request_id for row in rows}) == len(rows)
    assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(rows))
    waits_for(rows)
    for row in rows:
        for key, _ in row.content[1:]:
            assert {other.session_id for other in rows if key in dict(other.content)} == {row.session_id}
    if traffic.num_requests is None:
        turns = Counter(row.session_id for row in rows if row.session_id)
        assert set(turns.values()) == {3}
    assert any(row.content and row.content[0].key == "system" for row in rows)


def test_resampled_logs_keep_the_course_of_the_day() -> None:
    """Busy in the middle third: so is each resampled log."""
    rng = np.random.default_rng(2)
    times = np.sort(np.concatenate([rng.uniform(0, 900, 300), rng.uniform(300, 600, 1200)]))
    rows = [trace_row(f"r{at}", float(time), 10, 10) for at, time in enumerate(times)]
    units = units_of(rows)
    counts = []
    for seed in range(20):
        drawn = resampled(units, np.random.default_rng(seed), frozenset())
        starts = np.array([unit[0].arrival_s for unit in drawn])
        assert 0 <= starts.min() <= starts.max() <= 900
        counts.append(np.histogram(starts, bins=3, range=(0, 900))[0])
    assert np.mean(counts, axis=0) == pytest.approx(np.histogram(times, bins=3, range=(0, 900))[0], abs=100)
    assert np.std([sum(count) for count in counts]) == pytest.approx(np.sqrt(1500), rel=0.6)


def test_parts_for_one_replica_have_its_part_of_the_rate() -> None:
    log = log_of(3000, 0)
    part = Traffic(fraction=0.1, num_requests=3000).apply(log)
    assert log.mean_rate_rps is not None
    assert part.mean_rate_rps == pytest.approx(0.1 * log.mean_rate_rps, rel=0.1)
    assert len(part) == pytest.approx(3000, rel=0.1)


def test_sessions_at_drawn_times_are_in_their_steady_state() -> None:
    rows = [
        trace_row(f"{session}.{turn}", 100.0 * turn, 10, 10, session_id=f"s{session}", turn=turn, think_time_s=90.0 if turn else None, content=(Segment("system", 4), Segment(f"s{session}", 6)))
        for session in range(100)
        for turn in range(20)
    ]  # fmt: skip
    log = at_drawn_times(
        Trace(tuple(sorted(rows, key=lambda row: row.arrival_s))), 2.0, np.random.default_rng(0)
    )
    assert len(log) == 2000
    times = np.array([row.arrival_s for row in log.requests])
    counts, _ = np.histogram(times, bins=4, range=(0, 1000))
    assert counts == pytest.approx([500] * 4, rel=0.15)
    waits_for(log.requests)
    assert {row.content[0].key for row in log.requests} == {"system"}


def test_sessions_under_way_at_the_start_are_measured_after_a_warm_up() -> None:
    log = log_of()
    assert measured_from_s(log) == -math.inf
    cut = Traffic(num_requests=100).apply(log)
    assert any(row.turn for row in cut.requests[:20])
    start_s, end_s = cut.requests[0].arrival_s, cut.requests[-1].arrival_s
    from_s = measured_from_s(cut)
    assert from_s == pytest.approx(start_s + 0.2 * (end_s - start_s))
    missed = MissedTargets([Target.of("ttft_s.max<1")], 100, from_s)
    late = record(from_s + 9.0, 1)
    assert not missed(late)
    late.arrival_s = from_s
    assert missed(late)


def test_a_drift_is_said_and_noise_is_not() -> None:
    def log(second: float) -> Trace:
        times = [*np.linspace(0, 100, 400), *np.linspace(100.1, 200, int(400 * second))]
        return Trace(tuple([trace_row(f"r{at}", float(time), 100, 50) for at, time in enumerate(times)]))

    assert drift(log(1.0)) is None
    assert drift(log(1.05)) is None
    assert "1.6 times the requests" in str(drift(log(1.6)))


def plan(**options: Any) -> PlanConfig:
    return PlanConfig(**{"target": "ttft_s.p99<2", "gpus": "h100-80gb=2.5", "model": "llama-3-8b"} | options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"gpus": "h1=2"}, "gpu"),
        ({"gpus": "h100-80gb"}, "gpus"),
        ({"gpus": "h100-80gb=-1"}, "gpus.h100-80gb"),
        ({"gpus": {}}, "gpus"),
        ({"target": ""}, "target"),
        ({"target": "cost_per_million_tokens<2"}, "target"),
        ({"target": "ttft_s.p99<2,ttft_s.p99<3"}, "target"),
        ({"target": "goodput>0.9"}, "goodput"),
        ({"model": None}, "model, step_time_parameters"),
        ({"step_time_parameters": "x.json", "gpus": "a=1,b=2"}, "gpus"),
        ({"what_if": "traffic"}, "what_if"),
        ({"what_if": "traffic=0"}, "what_if"),
        ({"what_if": "rain=2"}, "what_if"),
        ({"what_if": "failed_replicas=1.5"}, "what_if"),
        ({"what_if": "restart_s=60"}, "what_if"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"client_retries": 2}, "client_retries"),
        ({"timeout_s": 5, "client_retries": -1}, "client_retries"),
        ({"startup_s": -1}, "startup_s"),
        ({"min_replicas": 0}, "min_replicas"),
        ({"orders": []}, "orders"),
        ({"orders": ["best"]}, "policy"),
        ({"routers": ["disaggregated"]}, "routers"),
        ({"prefill_fractions": [1.0]}, "prefill_fractions"),
        ({"max_seeds": 2}, "max_seeds"),
    ],
)  # fmt: skip
def test_options_out_of_range_are_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError) as error:
        plan(**options)
    assert error.value.field == named


def test_scenarios_and_prices_in_words() -> None:
    config = plan(what_if="traffic=1.5, outputs=2+failed_replicas=1", gpus={"h100-80gb": 2, "l40s-48gb": 0.9})
    assert config.scenarios() == {
        "traffic=1.5": {"traffic": 1.5},
        "outputs=2+failed_replicas=1": {"outputs": 2.0, "failed_replicas": 1.0},
    }
    assert parse_prices("h100-80gb=2, l40s-48gb=0.9") == config.prices
    with pytest.raises(InputError, match="one price for h100-80gb"):
        parse_prices("h100-80gb=2,h100-80gb=3")
    names: Sequence[str] = [choice.hardware for choice in config.hardware()]
    assert "8 x l40s-48gb" in names
    assert len(names) == 8
