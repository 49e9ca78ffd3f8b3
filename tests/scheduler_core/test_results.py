"""Tables of requests and steps, quality of predictions, regret, and two runs request by request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy import stats

from scheduler_core.errors import InputError
from scheduler_core.lengths import LogT
from scheduler_core.predictions import LengthPrediction
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.commands.compare import (
    CompareConfig,
    RequestPairs,
    bootstrap_interval,
    latency_differences,
)
from scheduler_core.simulator.config import ClusterConfig, SimulationConfig
from scheduler_core.simulator.metrics import kendall_tau, prediction_quality
from scheduler_core.simulator.records import (
    COMPARED,
    LATENCIES,
    RequestColumns,
    RequestRecord,
    read_requests,
    request_columns,
    write_requests,
)
from scheduler_core.simulator.regret import simulated_regret, with_regret
from scheduler_core.simulator.run import run_simulation
from scheduler_core.simulator.step_time.base import LinearStepTime
from scheduler_core.simulator.tables import read_columns, write_columns
from scheduler_core.simulator.trace import Trace
from scheduler_core.simulator.watch import RunWatch, StepTable, write_steps
from tests.scheduler_core.helpers import random_trace, trace_row

RECORD = RequestRecord(
    request_id="r", arrival_s=1.0, first_scheduled_s=2.0, first_token_s=3.0, finish_s=7.0, prompt_tokens=10,
    output_tokens=5, max_tokens=50, finish_reason="stop", num_preemptions=0,
)  # fmt: skip
#: 1 s per step and 0.1 s per prompt token, nothing else.
PLAIN = LinearStepTime(base_s=1.0, per_prefill_token_s=0.1, per_decode_s=0.0, per_context_token_s=0.0)


def config(**more: Any) -> SimulationConfig:
    return SimulationConfig(**{"trace": "", "policy": "fcfs", "step_time": PLAIN, **more})


def test_columns_say_what_records_say() -> None:
    records = run_simulation(config(), trace=random_trace(60, rate_rps=3)).records
    records += [
        replace(RECORD, output_tokens=1, ttft_slo_s=1.0, tbt_slo_s=0.1),
        replace(RECORD, ttft_slo_s=2.0, tbt_slo_s=0.9, max_tbt_s=None),
        replace(RECORD, ttlt_slo_s=6.0, tbt_slo_s=1.0, max_tbt_s=1.1, tier=0, tenant="x"),
    ]
    columns = RequestColumns.of(records)
    for name in set(LATENCIES) - {"normalized_waiting_s"}:
        expected = [math.nan if (value := getattr(one, name)) is None else value for one in records]
        np.testing.assert_allclose(getattr(columns, name), expected, rtol=1e-12, atol=1e-12)
    assert columns.has_slo.tolist() == [False] * 60 + [True] * 3
    assert columns.meets_slo.tolist() == [True] * 60 + [False, False, False]
    groups = columns.groups("tier", 8)
    assert list(groups) == ["0", "2"]
    assert groups["0"].sum() == 1
    assert columns.groups("tier", 1) == columns.groups("category", 8) == {}


def test_the_table_of_requests_is_read_back(tmp_path: Path) -> None:
    runs = {seed: run_simulation(config(), trace=random_trace(20, seed=seed)).records for seed in (3, 4)}
    path = tmp_path / "requests.parquet"
    write_requests([request_columns(records, seed) for seed, records in runs.items()], path)
    table = read_requests(path, "requests")
    assert tuple(table) == COMPARED
    assert table["seed"].tolist() == [3] * 20 + [4] * 20
    everybody = [one for records in runs.values() for one in records]
    assert table["request_id"].tolist() == [one.request_id for one in everybody]
    assert table["ttlt_s"].tolist() == [one.ttlt_s for one in everybody]
    rows = pq.read_table(path).to_pylist()
    assert rows[0]["ttft_slo_s"] is None, "what is unset is empty, not NaN"
    assert [row["tpot_s"] for row in rows] == [one.tpot_s for one in everybody]
    with pytest.raises(InputError, match="another"):
        read_columns(path, ["seed"], "another/1", "requests")
    for name, field in (("missing.parquet", "a"), ("requests.txt", "requests")):
        with pytest.raises(InputError) as caught:
            if field == "a":
                read_requests(tmp_path / name, field)
            else:
                write_columns([table], tmp_path / name, "x", field)
        assert caught.value.field == field


@pytest.mark.parametrize("cluster", [ClusterConfig(), ClusterConfig(num_replicas=2, router="round_robin")])
def test_the_table_of_steps_adds_up_to_the_run(cluster: ClusterConfig, tmp_path: Path) -> None:
    tight = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=48, num_kv_blocks=24)
    trace = random_trace(60, seed=2, rate_rps=20, cap=100, most_prompt=60)
    tables = {}
    for exact in (False, True):
        watch = RunWatch(steps=StepTable())
        result = run_simulation(config(scheduler=tight, exact_steps=exact, cluster=cluster), trace=trace, watch=watch)  # fmt: skip
        assert watch.steps is not None
        steps = tables[exact] = watch.steps.columns(0)
        assert steps["num_steps"].sum() == result.metrics["num_steps"]
        assert (steps["num_prefills"] + steps["num_decodes"] == steps["batch_size"]).all()
        assert steps["batch_size"].max() <= 6
        assert steps["kv_usage"].max() <= 1
        assert steps["num_preempted"].sum() == result.metrics["num_preemptions"]
        assert steps["num_admitted"].sum() == 60 + result.metrics["num_preemptions"]
        generated = sum(one.output_tokens for one in result.records)
        # A prompt's last chunk samples the first token and, after a preemption, at most one more each time.
        with_prefills = generated - int((steps["num_steps"] * steps["num_decodes"]).sum())
        assert 60 <= with_prefills <= 60 + result.metrics["num_preemptions"]
        busy = (steps["end_s"] - steps["start_s"]).sum() / (
            result.metrics["makespan_s"] * cluster.num_replicas
        )
        assert busy == pytest.approx(result.metrics["busy_fraction"])
        assert set(steps["replica_id"]) == set(cluster.replica_ids)
    assert len(tables[False]["seed"]) < len(tables[True]["seed"])
    assert set(tables[True]["num_steps"]) == {1}
    write_steps([tables[True]], tmp_path / "steps.parquet")
    assert pq.read_table(tmp_path / "steps.parquet").num_rows == len(tables[True]["seed"])


def test_kendalls_tau_is_that_of_scipy() -> None:
    rng = np.random.default_rng(0)
    for size, high in ((2, 9), (7, 3), (400, 30), (1000, 10**6)):
        one, other = rng.integers(0, high, size).astype(float), rng.integers(0, high, size).astype(float)
        other[: size // 2] = one[: size // 2]
        expected = stats.kendalltau(one, other).statistic
        found = kendall_tau(one, other)
        assert found is None if math.isnan(expected) else found == pytest.approx(expected, abs=1e-12)
    assert kendall_tau(np.ones(5), np.arange(5.0)) is None


def predicted(lengths: Sequence[int], mu: Sequence[float], sigma: float, nu: float) -> RequestColumns:
    return RequestColumns.of(
        [
            replace(
                RECORD, output_tokens=length, predicted_mu=location, predicted_sigma=sigma, predicted_nu=nu
            )
            for length, location in zip(lengths, mu, strict=True)
        ]
    )


def test_a_calibrated_predictor_looks_like_one() -> None:
    """Lengths drawn from the predicted log-t itself, with a mu for each request."""
    rng = np.random.default_rng(1)
    mu = rng.uniform(4, 9, 4000)
    lengths = np.maximum(1, np.round(np.exp(mu + 0.5 * rng.standard_t(3.5, 4000)))).astype(int)
    found = prediction_quality(predicted(lengths.tolist(), mu.tolist(), 0.5, 3.5))
    assert found is not None
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        assert found["coverage"][name] == pytest.approx(share, abs=4 * (share * (1 - share) / 4000) ** 0.5)
    assert list(found["pit"].values()) == pytest.approx([0.1] * 10, abs=0.02)
    assert found["kendall_tau"] > 0.5
    quantile = np.asarray(LogT(mu, 0.5, 3.5).ppf(0.9))
    pinball = np.where(lengths > quantile, 0.9 * (lengths - quantile), 0.1 * (quantile - lengths)).mean()
    assert found["pinball_tokens"]["p90"] == pytest.approx(pinball)


@pytest.mark.parametrize("nu", [1.5, 3.5, 30.0, 1e9])
def test_the_crps_is_the_integral_of_the_brier_scores(nu: float) -> None:
    """Gneiting & Raftery 2007, eq. 20: the mean over all levels of twice the pinball loss; of ln length."""
    found = prediction_quality(predicted([20, 90], [4.0, 4.0], 0.7, nu))
    assert found is not None
    places = (np.arange(400_000) + 0.5) / 400_000
    quantiles = 4.0 + 0.7 * stats.t.ppf(places, nu)
    losses = [2 * ((math.log(y) - quantiles) * (places - (math.log(y) < quantiles))).mean() for y in (20, 90)]
    assert found["crps_log"] == pytest.approx(np.mean(losses), rel=2e-3)


def test_there_is_no_score_without_predictions_and_no_crps_without_a_mean() -> None:
    assert prediction_quality(RequestColumns.of([RECORD])) is None
    found = prediction_quality(predicted([20, 20], [3.0, 4.0], 0.5, 1.0))
    assert found is not None
    assert found["crps_log"] is found["r2_log"] is found["kendall_tau"] is None
    assert found["num"] == 2


def test_regret_worked_out_by_hand() -> None:
    """One seat; a prompt takes 2 s with its token, each further token 1 s: 11, 6 and 2 s for 10, 5 and 1 tokens.

    In order of arrival they end at 11, 17, 19, by length at 2, 8, 19, as predicted (last, first, second) at 17, 6, 19 in
    the order of the trace: 5 tokens, 10 tokens, 1 token.
    """
    trace = Trace((trace_row("a", 0.0, 10, 10), trace_row("b", 0.0, 10, 5), trace_row("c", 0.0, 10, 1)))
    told = [
        replace(row, prediction=LengthPrediction(mu, 0.1, 3.5))
        for row, mu in zip(trace.requests, (2.0, 1.0, 3.0), strict=True)
    ]
    trace = Trace(tuple(told))
    one = config(policy="ssjf", predictor="trace", scheduler=SchedulerConfig(max_num_seqs=1))
    result = run_simulation(one, trace=trace)
    found = simulated_regret(one, trace, result)
    assert result.metrics["ttlt_s"]["mean"] == pytest.approx((17 + 6 + 19) / 3)
    ttlt = found["ttlt_s"]
    assert ttlt["regret_s"] == pytest.approx((42 - 29) / 3)
    assert ttlt["fraction"] == pytest.approx((42 - 29) / (47 - 29))
    assert ttlt["of_predictions_s"] == pytest.approx(ttlt["regret_s"])
    assert ttlt["of_order_s"] == pytest.approx(0.0)
    assert found["normalized_latency_s"]["regret_s"] == pytest.approx(
        (17 / 10 + 6 / 5 + 19) / 3 - (19 / 10 + 8 / 5 + 2) / 3
    )
    assert found["slower_fraction"] == pytest.approx(1 / 3), "only c would have been faster"
    plain = config(scheduler=SchedulerConfig(max_num_seqs=1))
    first = simulated_regret(plain, trace, run_simulation(plain, trace=trace))
    assert first["ttlt_s"]["fraction"] == pytest.approx(1.0)
    assert first["ttlt_s"]["of_predictions_s"] is None


def test_a_sweep_tells_regrets_where_both_other_orders_are_there() -> None:
    def cell(policy: str, seed: int, mean: float) -> dict[str, Any]:
        latency = {"mean": mean}
        return {
            "settings": {"policy": policy, "load": 0.5, "seed": seed},
            "metrics": dict.fromkeys(("normalized_latency_s", "ttft_s", "ttlt_s"), latency),
        }

    given = [cell("fcfs", 0, 5.0), cell("tie", 0, 2.0), cell("sjf", 0, 1.0), cell("tie", 1, 3.0)]
    told = with_regret(given)
    shares = [one["metrics"].get("regret", {}).get("ttlt_s", {}).get("fraction") for one in told]
    assert shares == [1.0, 0.25, 0.0, None]
    assert "regret" not in given[1]["metrics"]


def test_the_bootstrap_covers_the_mean_of_correlated_differences() -> None:
    """Differences are an autoregression with mean 0.3; resampling one by one would cover it far too rarely."""
    rng, options = np.random.default_rng(3), CompareConfig(a="", b="", num_resamples=200)
    covered = 0
    for _ in range(150):
        values = np.zeros(900)
        for index in range(1, 900):
            values[index] = 0.7 * values[index - 1] + rng.normal()
        ends = bootstrap_interval(values + 0.3, np.repeat([0, 1, 2], 300), options, rng)
        assert ends is not None
        covered += ends[0] <= 0.3 <= ends[1]
    assert 0.84 <= covered / 150 <= 1.0
    assert bootstrap_interval(np.ones(1), np.zeros(1, int), options, rng) is None


def test_pairs_are_the_same_requests_in_the_order_of_arrival() -> None:
    first = run_simulation(config(), trace=random_trace(80, rate_rps=9)).records
    second = run_simulation(config(policy="sjf"), trace=random_trace(80, rate_rps=9)).records
    a, b = request_columns(first, 0), request_columns(second[:-1], 0)
    pairs = RequestPairs.of(a, b)
    assert len(pairs) == 79
    assert (pairs.num_only_a, pairs.num_only_b) == (1, 0)
    assert pairs.a["request_id"].tolist() == pairs.b["request_id"].tolist()
    assert (np.diff(pairs.a["arrival_s"]) >= 0).all()
    one = latency_differences(pairs, CompareConfig(a="", b="", num_resamples=100))["ttlt_s"]
    by_id = {record.request_id: record.ttlt_s for record in first}
    differences = np.array([record.ttlt_s - by_id[record.request_id] for record in second[:-1]])
    mean = one.statistics["mean"]
    assert mean.difference == pytest.approx(np.mean(differences))
    assert one.lower_fraction == pytest.approx(np.mean(differences < -1e-9))
    assert mean.low is not None
    assert mean.high is not None
    assert mean.low <= mean.difference <= mean.high
    assert len(pairs.ratios("ttlt_s")) == 79
    with pytest.raises(InputError, match="same requests"):
        RequestPairs.of(a, {**b, "request_id": b["request_id"] + "x"})
    with pytest.raises(InputError, match="output_tokens of request"):
        RequestPairs.of(a, {**b, "output_tokens": b["output_tokens"] + 1})


def test_a_fingerprint_is_of_the_requests_alone() -> None:
    trace = random_trace(20)
    assert trace.fingerprint() == replace(trace, source="elsewhere", sha256="1").fingerprint()
    for change in ({"arrival_s": 9.5}, {"output_tokens": 1}, {"tier": 0}, {"request_id": "z"}):
        changed = (replace(trace.requests[0], **change), *trace.requests[1:])  # type: ignore[arg-type]
        assert Trace(changed).fingerprint() != trace.fingerprint()
