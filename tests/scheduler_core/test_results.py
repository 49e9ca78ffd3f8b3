"""Results of runs: metrics by hand and by their definitions, tables, quality of predictions, statistics, figures."""

import csv
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy import stats

from scheduler_core.errors import InputError
from scheduler_core.prediction.predictions import LengthPrediction
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.commands.compare import bootstrap_interval, latency_differences, paired
from scheduler_core.simulator.commands.run import distribution_functions
from scheduler_core.simulator.config import ClusterConfig, SimulationConfig
from scheduler_core.simulator.metrics import jain_index, prediction_quality, starvation_slope, summary
from scheduler_core.simulator.records import RequestRecord, has_slo, meets_slo, request_columns
from scheduler_core.simulator.run import SimulationResult, run_simulation
from scheduler_core.simulator.step_time import isolated_latency_s
from scheduler_core.simulator.tables import columns_of, write_table
from scheduler_core.simulator.trace import Trace
from scheduler_core.simulator.watch import RunWatch, StepTable
from scheduler_core.simulator.workloads.arrivals import Arrivals
from scheduler_core.simulator.workloads.lengths import Lengths, TokenDistribution
from scheduler_core.simulator.workloads.workload import RequestClass, Sessions, Tiers, Workload
from scheduler_core.statistics import interval, kendall_tau
from tests.scheduler_core.helpers import PLAIN, ROUND, random_trace, simulate, trace_row

RECORD = RequestRecord(
    request_id="r", arrival_s=1.0, first_scheduled_s=2.0, first_token_s=3.0, finish_s=7.0, prompt_tokens=10,
    output_tokens=5, max_tokens=50, finish_reason="stop", num_preemptions=0,
)  # fmt: skip


def drawn(**more: Any) -> SimulationResult:
    return run_simulation(SimulationConfig(**{"policy": "fcfs", "workload": WORKLOAD, **more}))


@pytest.mark.parametrize(
    ("targets", "longest", "met"),
    [
        ({}, None, True), ({"ttft_slo_s": 2.0}, None, True), ({"ttft_slo_s": 1.9}, None, False),
        ({"ttlt_slo_s": 6.0}, None, True), ({"ttlt_slo_s": 5.9}, None, False),
        ({"tbt_slo_s": 1.0}, None, True), ({"tbt_slo_s": 1.0}, 1.1, False),
        ({"tbt_slo_s": 1.2, "ttft_slo_s": 1.0}, 1.1, False),
    ],
)  # fmt: skip
def test_targets_are_met_together(targets: dict[str, float], longest: float | None, met: bool) -> None:
    columns = request_columns([replace(RECORD, max_tbt_s=longest, **targets)])
    assert (meets_slo(columns).tolist(), has_slo(columns).tolist()) == ([met], [bool(targets)])


def test_attainment_counts_refused_requests_as_missed() -> None:
    """Two with a target, one of which met it, and one that could never run: 1 of 3, and goodput 1 per makespan."""
    rows = (
        trace_row("a", 0.0, 1, 1, ttft_slo_s=1.5), trace_row("b", 0.5, 1, 1, ttft_slo_s=1.4),
        trace_row("c", 0.6, 500, 1, ttft_slo_s=9.0), trace_row("d", 0.7, 1, 1),
    )  # fmt: skip
    step_time = replace(ROUND, per_prefill_token_s=0)
    metrics = simulate(Trace(rows), scheduler=SchedulerConfig(num_kv_blocks=10), step_time=step_time).metrics
    assert (metrics["num_finished"], metrics["num_refused"]) == (3, 1)
    assert metrics["slo_attainment"] == pytest.approx(1 / 3)
    assert metrics["goodput_rps"] == pytest.approx(1 / metrics["makespan_s"])


def test_alone_a_request_has_no_slowdown_and_the_time_of_its_steps() -> None:
    """Prompt of 10 in chunks of 4, 4 and 2, then 3 decodes with contexts 10, 11, 12."""
    row = trace_row("a", 0.0, 10, 4)
    limits = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=4)
    by_hand = 3 + 10 * 0.1 + (4 + 8) * 0.001 + 3 * 1.01 + (10 + 11 + 12) * 0.001
    assert isolated_latency_s(row, limits, PLAIN) == pytest.approx(by_hand)
    metrics = simulate(Trace((row,)), scheduler=limits, step_time=PLAIN).metrics
    assert metrics["slowdown"]["max"] == pytest.approx(1.0)
    assert metrics["fairness_requests"] == pytest.approx(1.0)


def test_summaries_and_indices() -> None:
    found = summary([1.0, 2.0, 3.0, 4.0, None])
    assert found is not None
    assert (found["mean"], found["p50"], found["max"]) == (2.5, 2.5, 4.0)
    assert found["tail_ratio"] == pytest.approx(found["p99"] / 2.5)
    assert summary([None]) is None
    assert "tail_ratio" not in (summary([0.0, 0.0, 1.0]) or {})
    assert jain_index([2.0, 2.0, 2.0]) == pytest.approx(1.0)
    assert jain_index([5.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain_index([0.0]) is None


def test_the_starvation_slope_is_that_of_the_long_requests() -> None:
    records = []
    for place in range(200):
        long = place % 10 == 0
        latency = 5.0 + 0.02 * place if long else 1.0
        records.append(
            replace(RECORD, request_id=str(place), arrival_s=float(place), finish_s=place + latency,
                    output_tokens=1000 if long else 10)
        )  # fmt: skip
    assert starvation_slope(request_columns(records)) == pytest.approx(0.02)
    assert starvation_slope(request_columns(records[:15])) is None


WORKLOAD = Workload(
    num_requests=120, arrivals=Arrivals(rate_rps=30.0),
    lengths=Lengths(prompt=TokenDistribution(high=100), output=TokenDistribution(high=60)),
    tiers=Tiers(num_tiers=3),
    classes=(RequestClass(weight=1, tenant="a"), RequestClass(weight=1, tenant="b")),
)  # fmt: skip


@pytest.mark.parametrize(
    "cluster",
    [
        ClusterConfig(num_replicas=3, router="jsq"),
        ClusterConfig(num_replicas=2, router="llumnix", migration=True, num_tiers=3),
        ClusterConfig(num_replicas=3, min_replicas=3),
        ClusterConfig(num_replicas=2, router="disaggregated", num_prefill_replicas=1),
    ],
)
def test_clusters_finish_everything_and_say_where(cluster: ClusterConfig) -> None:
    result = drawn(policy="hpjf", cluster=cluster, seed=1)
    metrics = result.metrics
    assert metrics["num_finished"] == 120
    assert metrics["littles_law_error"] < 1e-9
    assert {one.replica_id for one in result.records} <= set(cluster.replica_ids)
    assert metrics["groups"]["tier"].keys() == {str(one.tier) for one in result.records}
    assert metrics["groups"]["tenant"].keys() == {"a", "b"}
    assert sum(group["num_finished"] for group in metrics["groups"]["tier"].values()) == 120
    assert drawn(policy="hpjf", cluster=cluster, seed=1).metrics == metrics
    assert metrics["mean_replicas"] == pytest.approx(cluster.num_replicas)
    assert metrics["cost_per_latency"] == pytest.approx(cluster.num_replicas * metrics["ttlt_s"]["p99"])


def test_a_load_is_a_fraction_of_all_replicas() -> None:
    one, three = (drawn(load=0.5, cluster=ClusterConfig(num_replicas=num)).trace for num in (1, 3))
    assert three["arrival_rate_rps"] / one["arrival_rate_rps"] == pytest.approx(3.0)
    assert three["saturation_rate_rps"] == pytest.approx(3 * one["saturation_rate_rps"])


def test_an_oracle_with_noise_is_wrong_by_as_much_as_it_says() -> None:
    trace = random_trace(400, rate_rps=50)
    result = simulate(trace, "ssjf", predictor="oracle", predictor_noise=0.4, seed=3, step_time=ROUND)
    columns = request_columns(result.records)
    assert np.std(columns["predicted_mu"] - np.log(columns["output_tokens"])) == pytest.approx(0.4, rel=0.12)
    assert set(columns["predicted_sigma"]) == {0.4}


def test_other_step_times_and_prefix_caches_reach_the_simulation() -> None:
    talk = replace(WORKLOAD, num_requests=60, sessions=Sessions(mean_turns=4, mean_think_time_s=1.0))
    cached, plain = (
        drawn(workload=talk, load=0.5, scheduler=SchedulerConfig(prefix_caching=kept)).metrics
        for kept in (True, False)
    )
    assert cached["ttft_s"]["mean"] < plain["ttft_s"]["mean"]
    assert drawn(step_time_model="staircase").metrics["ttlt_s"] != drawn().metrics["ttlt_s"]
    with pytest.raises(InputError, match="step time"):
        drawn(step_time_model="sundial")


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl"])
def test_columns_of_any_kind_are_written_in_every_format(suffix: str, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"a": 1, "b": 0.5, "c": "x, y"}, {"a": 2, "b": math.nan, "d": [1]}, {"d": "z"},
    ]  # fmt: skip
    path = tmp_path / f"t{suffix}"
    write_table(columns_of(rows), path, "x/1", "table")
    if suffix == ".parquet":
        found = pq.read_table(path).to_pylist()
    elif suffix == ".jsonl":
        found = [json.loads(line) for line in path.read_text().splitlines()]
    else:
        with path.open(newline="") as stream:
            found = [{name: cell or None for name, cell in row.items()} for row in csv.DictReader(stream)]
    assert [row["b"] and float(row["b"]) for row in found] == [0.5, None, None]
    assert [row["c"] for row in found] == ["x, y", None, None]
    assert [row["d"] for row in found] == [None, "[1]", "z"]
    with pytest.raises(InputError, match="table"):
        write_table(columns_of(rows), tmp_path / "t.txt", "x/1", "table")


@pytest.mark.parametrize("cluster", [ClusterConfig(), ClusterConfig(num_replicas=2, router="round_robin")])
def test_the_table_of_steps_adds_up_to_the_run(cluster: ClusterConfig) -> None:
    tight = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=48, num_kv_blocks=24)
    trace = random_trace(60, seed=2, rate_rps=20, cap=100, most_prompt=60)
    tables = {}
    for exact in (False, True):
        watch = RunWatch(steps=StepTable())
        config = {"scheduler": tight, "cluster": cluster, "step_time": ROUND}
        result = simulate(trace, exact_steps=exact, watch=watch, **config)
        assert watch.steps is not None
        steps = tables[exact] = watch.steps.columns(0)
        assert steps["num_steps"].sum() == result.metrics["num_steps"]
        assert steps["num_preempted"].sum() == result.metrics["num_preemptions"]
        assert steps["num_admitted"].sum() == 60 + result.metrics["num_preemptions"]
        busy_s = (steps["end_s"] - steps["start_s"]).sum() / cluster.num_replicas
        assert busy_s == pytest.approx(result.metrics["busy_fraction"] * result.metrics["makespan_s"])
        assert set(steps["replica_id"]) == set(cluster.replica_ids)
    assert len(tables[False]["seed"]) < len(tables[True]["seed"])
    assert set(tables[True]["num_steps"]) == {1}


def test_the_bootstrap_covers_the_mean_of_correlated_differences() -> None:
    """Differences are an autoregression with mean 0.3; resampling one by one would cover it far too rarely."""
    rng = np.random.default_rng(3)
    covered = 0
    for _ in range(150):
        values = np.zeros(900)
        for index in range(1, 900):
            values[index] = 0.7 * values[index - 1] + rng.normal()
        ends = bootstrap_interval(values + 0.3, np.repeat([0, 1, 2], 300), rng)
        assert ends is not None
        covered += ends[0] <= 0.3 <= ends[1]
    assert 0.84 <= covered / 150 <= 1.0
    assert bootstrap_interval(np.ones(1), np.zeros(1, int), rng) is None


def test_pairs_are_the_same_requests_in_the_order_of_arrival() -> None:
    trace = random_trace(80, rate_rps=9)
    first, second = (simulate(trace, policy, step_time=ROUND).records for policy in ("fcfs", "sjf"))
    a, b = request_columns(first), request_columns(second[:-1])
    own, other = paired(a, b)
    assert len(own["seed"]) == 79
    assert (np.diff(own["arrival_s"]) >= 0).all()
    one = latency_differences(own, other)["ttlt_s"]
    by_id = {record.request_id: record.ttlt_s for record in first}
    differences = np.array([record.ttlt_s - by_id[record.request_id] for record in second[:-1]])
    assert one["lower_fraction"] == pytest.approx(np.mean(differences < -1e-9))
    with pytest.raises(InputError, match="same requests"):
        paired(a, {**b, "request_id": b["request_id"] + "x"})
    with pytest.raises(InputError, match="output_tokens of request"):
        paired(a, {**b, "output_tokens": b["output_tokens"] + 1})


def test_predictions_of_known_quality() -> None:
    """Lengths drawn from the predicted log-t itself, with a mu for each request; every other request has another nu."""
    assert prediction_quality(request_columns([RECORD])) is None
    rng = np.random.default_rng(1)
    mu, nu = rng.uniform(4, 9, 4000), np.tile([3.5, 30.0], 2000)
    lengths = np.maximum(1, np.round(np.exp(mu + 0.5 * rng.standard_t(nu)))).astype(int)
    records = [
        replace(
            RECORD,
            output_tokens=length,
            predicted_mu=one,
            predicted_probability=LengthPrediction(one, 0.5, free).cdf(length),
        )
        for length, one, free in zip(lengths.tolist(), mu.tolist(), nu.tolist(), strict=True)
    ]
    found = prediction_quality(request_columns(records))
    assert found is not None
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        assert found["coverage"][name] == pytest.approx(share, abs=4 * (share * (1 - share) / 4000) ** 0.5)
    assert found["num"] == 4000
    assert found["kendall_tau"] > 0.5
    assert found["rmse_log"] == pytest.approx(np.std(mu - np.log(lengths)), rel=0.01)


@pytest.mark.parametrize(("low", "high"), [(0.021, 0.024), (0.1, 3.0), (1e-3, 100.0)])
def test_an_axis_has_marks_whatever_its_range(low: float, high: float) -> None:
    drawn = distribution_functions({"TBT": {"all": (np.geomspace(low, high, 50), np.linspace(0, 1, 50))}})
    axis = drawn[drawn.index('id="matplotlib.axis_1"') : drawn.index('id="matplotlib.axis_2"')]
    marks = [float(text) for text in re.findall(r">([0-9.e+-]+)</text>", axis)]
    assert 3 <= len(marks) <= 9
    assert all(0.9 * low <= mark <= 1.2 * high for mark in marks)


def test_tau_b_is_that_of_scipy() -> None:
    rng = np.random.default_rng(0)
    for size, digits in ((2, 3), (40, 0), (300, 1), (5000, 3)):
        one = rng.normal(size=size).round(digits)
        other = (one + rng.normal(size=size)).round(digits)
        assert kendall_tau(one, other) == pytest.approx(stats.kendalltau(one, other).statistic, abs=1e-12)
    assert kendall_tau([1.0, 1.0], [1.0, 2.0]) is kendall_tau([], []) is None


def test_intervals_cover_the_mean_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(2000):
        found = interval(list(rng.normal(3.0, 2.0, 4)))
        covered += found.low <= 3.0 <= found.high
    assert covered / 2000 == pytest.approx(0.95, abs=4 * (0.95 * 0.05 / 2000) ** 0.5)
    # t_0.975 with 3 degrees of freedom is 3.18245.
    four = interval([1.0, 2.0, 3.0, 4.0])
    assert four.high - four.mean == pytest.approx(3.182446305284263 * np.std([1, 2, 3, 4], ddof=1) / 2)
    one = interval([3.0])
    assert (one.mean, one.low, one.high) == (3.0, -math.inf, math.inf)
    with pytest.raises(InputError, match="values"):
        interval([])
