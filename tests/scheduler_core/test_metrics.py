"""Metrics of runs: by hand, by their definitions, and over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from scheduler_core.errors import InputError
from scheduler_core.routing import Llumnix
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.config import ClusterConfig, SimulationConfig
from scheduler_core.simulator.metrics import jain_index, starvation_slope, summary
from scheduler_core.simulator.records import RequestColumns, RequestRecord
from scheduler_core.simulator.run import run_simulation
from scheduler_core.simulator.step_time import isolated_latency_s
from scheduler_core.simulator.step_time.base import LinearStepTime
from scheduler_core.simulator.trace import Trace
from scheduler_core.simulator.workloads import (
    Arrivals,
    Lengths,
    RequestClass,
    Sessions,
    Tiers,
    TokenDistribution,
    Workload,
)
from tests.scheduler_core.helpers import random_trace, trace_row

RECORD = RequestRecord(
    request_id="r", arrival_s=1.0, first_scheduled_s=2.0, first_token_s=3.0, finish_s=7.0, prompt_tokens=10,
    output_tokens=5, max_tokens=50, finish_reason="stop", num_preemptions=0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("targets", "longest", "met"),
    [
        ({}, None, True),
        ({"ttft_slo_s": 2.0}, None, True),
        ({"ttft_slo_s": 1.9}, None, False),
        ({"ttlt_slo_s": 6.0}, None, True),
        ({"ttlt_slo_s": 5.9}, None, False),
        ({"tbt_slo_s": 1.0}, None, True),
        ({"tbt_slo_s": 1.0}, 1.1, False),
        ({"tbt_slo_s": 1.2, "ttft_slo_s": 1.0}, 1.1, False),
    ],
)
def test_a_request_meets_its_targets_if_it_meets_all_of_them(
    targets: dict[str, float], longest: float | None, met: bool
) -> None:
    record = replace(RECORD, max_tbt_s=longest, **targets)  # type: ignore[arg-type]
    columns = RequestColumns.of([record])
    assert columns.meets_slo.tolist() == [met]
    assert columns.has_slo.tolist() == [bool(targets)]
    assert columns.normalized_waiting_s.tolist() == pytest.approx([0.2])


def test_attainment_counts_refused_requests_as_missed() -> None:
    """Two with a target, one of which met it, and one that could never run: 1 of 3, and goodput 1 per makespan."""
    rows = (
        trace_row("a", 0.0, 1, 1, ttft_slo_s=1.5),
        trace_row("b", 0.5, 1, 1, ttft_slo_s=1.4),
        trace_row("c", 0.6, 500, 1, ttft_slo_s=9.0),
        trace_row("d", 0.7, 1, 1),
    )
    config = SimulationConfig(
        trace="",
        policy="fcfs",
        scheduler=SchedulerConfig(num_kv_blocks=10),
        step_time=LinearStepTime(base_s=1.0, per_prefill_token_s=0, per_decode_s=0, per_context_token_s=0),
    )
    metrics = run_simulation(config, trace=Trace(rows)).metrics
    assert (metrics["num_finished"], metrics["num_refused"]) == (3, 1)
    assert metrics["slo_attainment"] == pytest.approx(1 / 3)
    assert metrics["goodput_rps"] == pytest.approx(1 / metrics["makespan_s"])


def test_alone_a_request_has_no_slowdown_and_the_time_of_its_steps() -> None:
    """Prompt of 10 in chunks of 4, 4 and 2, then 3 decodes with contexts 10, 11, 12."""
    step = LinearStepTime(base_s=1.0, per_prefill_token_s=0.1, per_decode_s=0.01, per_context_token_s=0.001)
    row = trace_row("a", 0.0, 10, 4)
    limits = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=4)
    by_hand = 3 + 10 * 0.1 + (4 + 8) * 0.001 + 3 * 1.01 + (10 + 11 + 12) * 0.001
    assert isolated_latency_s(row, limits, step) == pytest.approx(by_hand)
    config = SimulationConfig(trace="", policy="fcfs", scheduler=limits, step_time=step)
    metrics = run_simulation(config, trace=Trace((row,))).metrics
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
    assert starvation_slope(records) == pytest.approx(0.02)
    assert starvation_slope(records[:15]) is None


WORKLOAD = Workload(
    num_requests=120,
    arrivals=Arrivals(rate_rps=30.0),
    lengths=Lengths(prompt=TokenDistribution(high=100), output=TokenDistribution(high=60)),
    tiers=Tiers(num_tiers=3),
    classes=(RequestClass(weight=1, tenant="a"), RequestClass(weight=1, tenant="b")),
)


def groups_of(values: Sequence[RequestRecord], field: str) -> set[str]:
    return {str(getattr(one, field)) for one in values}


@pytest.mark.parametrize(
    "cluster",
    [
        ClusterConfig(num_replicas=3, router="jsq"),
        ClusterConfig(num_replicas=3, router="random"),
        ClusterConfig(num_replicas=2, router="llumnix", migration=True, num_tiers=3),
        ClusterConfig(num_replicas=2, router="disaggregated", num_prefill_replicas=1),
    ],
    ids=lambda one: one.router,
)
def test_clusters_finish_everything_and_say_where(cluster: ClusterConfig) -> None:
    config = SimulationConfig(policy="hpjf", workload=WORKLOAD, cluster=cluster, seed=1)
    result = run_simulation(config)
    metrics = result.metrics
    assert metrics["num_finished"] == 120
    assert metrics["littles_law_error"] < 1e-9
    assert groups_of(result.records, "replica_id") <= set(cluster.replica_ids)
    assert metrics["groups"]["tier"].keys() == groups_of(result.records, "tier")
    assert metrics["groups"]["tenant"].keys() == {"a", "b"}
    assert sum(group["num_finished"] for group in metrics["groups"]["tier"].values()) == 120
    assert metrics["cluster"]["num_restarts"] == 0
    assert run_simulation(config).metrics == metrics
    assert set(result.watch.loads) == set(cluster.replica_ids)


def test_a_load_is_a_share_of_all_replicas() -> None:
    one = run_simulation(SimulationConfig(policy="fcfs", workload=WORKLOAD, load=0.5))
    three = run_simulation(
        SimulationConfig(policy="fcfs", workload=WORKLOAD, load=0.5, cluster=ClusterConfig(num_replicas=3))
    )
    ratio = three.trace["arrival_rate_rps"] / one.trace["arrival_rate_rps"]
    assert ratio == pytest.approx(3.0)
    assert three.trace["saturation_rate_rps"] == pytest.approx(3 * one.trace["saturation_rate_rps"])


def test_an_oracle_with_noise_is_wrong_by_as_much_as_it_says() -> None:
    trace = random_trace(400, rate_rps=50)
    config = SimulationConfig(trace="", policy="ssjf", predictor="oracle", predictor_noise=0.4, seed=3)
    records = run_simulation(config, trace=trace).records
    errors = [
        one.predicted_mu - math.log(one.output_tokens) for one in records if one.predicted_mu is not None
    ]
    assert len(errors) == 400
    assert np.std(errors) == pytest.approx(0.4, rel=0.12)
    assert {one.predicted_sigma for one in records} == {0.4}


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"num_replicas": 0}, "num_replicas"),
        ({"router": "compass"}, "router"),
        ({"router": "disaggregated", "num_replicas": 2}, "num_prefill_replicas"),
        ({"num_replicas": 2, "min_replicas": 3}, "min_replicas"),
        ({"router": "llumnix", "router_parameters": {"a": 1.0}}, "router_parameters"),
        ({"headroom_fraction": 2.0}, "max_fraction"),
        ({"trace": "a", "workload": WORKLOAD}, "trace, workload"),
        ({"policy": "fcfs"}, "trace, workload"),
        ({"trace": "a", "predictor_noise": 0.1}, "predictor_noise"),
        ({"trace": "a", "predictor_noise": -1.0, "predictor": "oracle"}, "predictor_noise"),
    ],
)
def test_wrong_configurations_are_named(values: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError) as caught:
        if {"trace", "policy"} & set(values):
            SimulationConfig(**{"policy": "fcfs", **values})
        else:
            ClusterConfig(**values)
    assert caught.value.field == named


def test_llumnix_may_count_the_whole_queue() -> None:
    routers = [
        ClusterConfig(router="llumnix", router_parameters=parameters).make_router(0)
        for parameters in ({}, {"whole_queue": True})
    ]
    assert [isinstance(one, Llumnix) and one.whole_queue for one in routers] == [False, True]


def test_other_step_times_closed_loops_and_prefix_caches_reach_the_simulation() -> None:
    talk = replace(WORKLOAD, num_requests=60, sessions=Sessions(mean_turns=4, mean_think_time_s=1.0))
    plain = run_simulation(SimulationConfig(policy="fcfs", workload=talk, load=0.5))
    cached = run_simulation(
        SimulationConfig(policy="fcfs", workload=talk, load=0.5, prefix_cache_tokens=100_000)
    )
    assert cached.metrics["ttft_s"]["mean"] < plain.metrics["ttft_s"]["mean"]
    stairs = SimulationConfig(policy="fcfs", workload=WORKLOAD, step_time_model="staircase")
    linear = SimulationConfig(policy="fcfs", workload=WORKLOAD)
    assert run_simulation(stairs).metrics["ttlt_s"] != run_simulation(linear).metrics["ttlt_s"]
    for cluster in (ClusterConfig(), ClusterConfig(num_replicas=2)):
        closed = SimulationConfig(policy="fcfs", workload=WORKLOAD, num_clients=3, cluster=cluster)
        result = run_simulation(closed)
        assert result.metrics["num_finished"] == 120
        assert 2 < result.metrics["mean_requests_in_system"] <= 3
    with pytest.raises(InputError, match="step time"):
        run_simulation(replace(stairs, step_time_model="sundial"))
