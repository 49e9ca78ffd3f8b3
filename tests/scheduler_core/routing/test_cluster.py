"""Clusters around the very same schedulers: one replica is the loop of one, and with migration nothing is lost."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from scheduler_core.errors import InputError
from scheduler_core.policies import make_policy
from scheduler_core.policies.working_set import WorkingSet
from scheduler_core.request import Segment
from scheduler_core.routing import ROUTERS
from scheduler_core.routing.base import Router, ScaleIn, ScaleOut
from scheduler_core.routing.disaggregated import Disaggregated
from scheduler_core.routing.llumnix import AutoScaler, Headroom, MigrationPlanner
from scheduler_core.routing.migration import KVLink
from scheduler_core.routing.snapshot import ReplicaRole
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from scheduler_core.simulator.config import ClusterConfig, SimulationConfig
from scheduler_core.simulator.failures import FailurePlan
from scheduler_core.simulator.loop import Simulation, SimulationOutcome
from scheduler_core.simulator.records import RequestRecord
from scheduler_core.simulator.run import run_simulation
from scheduler_core.simulator.step_time.base import LinearStepTime
from scheduler_core.simulator.step_time.roofline import RooflineStepTime
from scheduler_core.simulator.trace import Trace
from scheduler_core.simulator.trace_predictions import Predictions, trace_predictions
from scheduler_core.simulator.workloads.agents import Agents
from scheduler_core.simulator.workloads.arrivals import Arrivals
from scheduler_core.simulator.workloads.lengths import Lengths, TokenDistribution
from scheduler_core.simulator.workloads.workload import Tiers, Workload
from tests.scheduler_core.helpers import random_trace, trace_row
from tests.scheduler_core.routing.helpers import router

LIMITS = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256, num_kv_blocks=120)


def core(policy: str = "fcfs", **limits: Any) -> Scheduler:
    return Scheduler(replace(LIMITS, **limits), make_policy(policy))


def replica_of(out: SimulationOutcome) -> dict[str, str | None]:
    return {record.request_id: record.replica_id for record in out.records}


def simulate(trace: Trace, route: Router, num: int, policy: str = "tie", **more: object) -> SimulationOutcome:
    cores = {name: core(policy) for name in [f"n{number}" for number in range(num)]}
    predictions = replace(trace_predictions(trace), latency_s=more.pop("latency_s", {}))
    out = Simulation(trace, cores, LinearStepTime(), predictions, route, **more).run()  # type: ignore[arg-type]
    for one in cores.values():
        one.validate()
        assert one.num_waiting == one.num_running == 0
        assert one.pool.kv.num_free_blocks == LIMITS.capacity_blocks
        assert not one.pool.reserved
    lengths = {row.request_id: row.output_tokens for row in trace.requests}
    assert sorted(record.request_id for record in out.records) == sorted(lengths)
    assert all(record.output_tokens == lengths[record.request_id] for record in out.records)
    return out


@pytest.mark.parametrize("policy", ["fcfs", "tie"])
@pytest.mark.parametrize("exact_steps", [True, False])
def test_one_replica_gives_exactly_the_results_of_the_loop_of_one(policy: str, exact_steps: bool) -> None:
    trace = random_trace(80, seed=3, rate_rps=8.0)
    predictions = trace_predictions(trace)
    expected = Simulation(trace, core(policy), LinearStepTime(), predictions, exact_steps=exact_steps).run()
    for record in expected.records:
        record.replica_id = "n0"
    assert simulate(trace, router("jsq"), 1, policy, exact_steps=exact_steps) == expected


@pytest.mark.parametrize("policy", ["tie", "uniboost"])
@pytest.mark.parametrize("most_prompt", [200, 1200])
@pytest.mark.parametrize("name", ["random", "jsq", "least_kv", "predicted_work", "llumnix"])
def test_many_steps_at_once_equal_single_ones_on_replicas(name: str, most_prompt: int, policy: str) -> None:
    """Runs of decodes or of chunks end where a request reaches that replica; another's arrivals do not matter."""
    trace = random_trace(60, seed=4, rate_rps=15.0 if most_prompt == 200 else 2.0, most_prompt=most_prompt)
    latency_s = {row.request_id: 0.3 for row in trace.requests}
    single, many = (
        simulate(trace, router(name), 3, policy, exact_steps=exact, latency_s=latency_s)
        for exact in (True, False)
    )
    assert sorted(single.records, key=lambda record: record.request_id) == sorted(
        many.records, key=lambda record: record.request_id
    )
    assert replica_of(single) == replica_of(many)


def test_a_request_too_large_for_every_replica_is_refused() -> None:
    small = random_trace(5)
    trace = Trace((*small.requests[:4], replace(small.requests[4], max_tokens=4000)))
    cores = {name: core() for name in "ab"}
    out = Simulation(trace, cores, LinearStepTime(), trace_predictions(trace), router("jsq")).run()
    assert (list(out.refused), len(out.records)) == (["r4"], 4)


@pytest.mark.parametrize("name", sorted(set(ROUTERS) - {"disaggregated"}))
def test_every_router_serves_a_whole_trace_the_same_way_twice(name: str) -> None:
    trace = random_trace(40, seed=1, rate_rps=20.0)
    first, second = (simulate(trace, router(name), 3) for _ in range(2))
    assert first == second
    # INFaaS keeps to the replicas that it has used as long as they are fast enough.
    assert len(set(replica_of(first).values())) == (2 if name == "infaas" else 3)


COUNTING = [
    name for name, kind in ROUTERS.items() if not (kind.sees_tokens or kind.scrapes or kind.needs_requests)
]


@pytest.mark.parametrize("name", COUNTING)
def test_a_router_of_counts_chooses_the_same_without_new_snapshots(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = random_trace(120, seed=6, rate_rps=25.0)
    fails = FailurePlan(failures=((2.0, "n1", 1.0),), restart_s=1.0)
    reused = simulate(trace, router(name), 3, failures=fails)
    monkeypatch.setattr(ROUTERS[name], "needs_requests", True)  # always new ones
    assert simulate(trace, router(name), 3, failures=fails) == reused


class AllOnOne(Router):
    """Sends everything to the first replica: only migration can help."""

    def choose(self, item: object, replicas: object, now: float) -> str:
        return "n0"


def planner(**more: float) -> MigrationPlanner:
    return MigrationPlanner(headroom=Headroom((0.0,) * 5), **more)


@pytest.mark.parametrize("stage_blocks", [1, 4, None])
def test_migration_uses_the_idle_replica_and_loses_nothing(stage_blocks: int | None) -> None:
    trace = random_trace(60, seed=5, rate_rps=12.0)
    without = simulate(trace, AllOnOne(), 2)
    moved = simulate(trace, AllOnOne(), 2, planner=planner(), stage_blocks=stage_blocks)
    assert set(replica_of(without).values()) == {"n0"}
    assert moved.num_migrations > 5
    assert moved.num_migrated_blocks > 0
    assert set(replica_of(moved).values()) == {"n0", "n1"}
    assert moved.end_s < without.end_s


def test_disaggregated_prompts_and_tokens_are_on_different_replicas() -> None:
    trace = random_trace(40, seed=8, rate_rps=6.0)
    roles = {"n0": ReplicaRole.PREFILL, "n1": ReplicaRole.DECODE, "n2": ReplicaRole.DECODE}
    split = Disaggregated()
    out = simulate(trace, split, 3, roles=roles, planner=split, interval_s=0.005, stage_blocks=None)
    share = np.mean([where != "n0" for where in replica_of(out).values()])
    assert share > 0.8, "short answers may be done before they can move"
    assert out.num_migrations >= 0.8 * 40


def test_the_cluster_grows_under_load_and_shrinks_after_it() -> None:
    """A burst of 60 requests on one replica, then one request every ten seconds. An idle replica of 120 blocks has
    F = 120, so that only a cluster with nearly nothing to do shrinks."""
    burst = random_trace(80, seed=13, rate_rps=50.0)
    late = (replace(row, arrival_s=60.0 + 10 * n) for n, row in enumerate(burst.requests[60:]))
    rows = [*burst.requests[:60], *late]
    out = simulate(
        Trace(tuple(rows)), router("jsq"), 3, planner=planner(),
        scaler=AutoScaler(out_below=3.0, in_above=100.0, interval_s=0.5), standby={"n1", "n2"},
    )  # fmt: skip
    kinds = [type(signal) for _, signal in out.scaling]
    num = kinds.count(ScaleOut)
    assert num > 0
    assert kinds == [ScaleOut] * num + [ScaleIn] * num
    assert out.scaling[0][0] < 2.0
    assert out.scaling[num - 1][0] < out.scaling[num][0] < 60.0
    drained = {signal.victim for _, signal in out.scaling if isinstance(signal, ScaleIn)}
    assert not drained & {replica_of(out)[row.request_id] for row in rows[60:]}


def test_what_cannot_run_is_refused() -> None:
    trace = random_trace(3)
    with pytest.raises(InputError, match="schedulers"):
        Simulation(trace, {}, LinearStepTime(), trace_predictions(trace), router("jsq"))
    with pytest.raises(InputError, match="roles"):
        simulate(trace, Disaggregated(), 1, roles={"n0": ReplicaRole.DECODE})


def conversations(num: int) -> Trace:
    """Conversations of four turns, each with the ones before as its prefix."""
    rows = []
    for number in range(num):
        known = 0
        for place in range(4):
            prompt = known + 60
            rows.append(
                trace_row(
                    f"s{number}t{place}", number * 0.05, prompt, 20, 40, session_id=f"s{number}",
                    turn=place, think_time_s=None if place == 0 else 0.5,
                    content=(Segment(f"s{number}", prompt),),
                )
            )  # fmt: skip
            known = prompt + 20
    return Trace(tuple(rows))


def test_a_replica_forgets_a_session_that_has_moved() -> None:
    agents = Agents(num_sessions=12, scale=0.01, max_pause_s=2.0, ramp_up_s=5.0, max_tokens_per_request=1500)
    trace = Workload(num_requests=240, agents=agents).trace(3)

    def run(name: str, exact: bool = False) -> tuple[list[RequestRecord], dict[str, set[str]]]:
        cores = {f"n{number}": core("working_set", num_kv_blocks=256, max_num_seqs=8) for number in range(3)}
        one = Simulation(trace, cores, LinearStepTime(), Predictions(), router(name), exact_steps=exact)
        outcome = one.run()
        known: dict[str, set[str]] = {}
        for replica_id, scheduler in cores.items():
            assert isinstance(scheduler.policy, WorkingSet)
            known[replica_id] = set(scheduler.policy.sessions)
        return outcome.records, known

    for name in ("session_affine", "jsq"):
        records, known = run(name)
        assert (records, known) == run(name, exact=True)
        last = {
            record.session_id: record.replica_id for record in sorted(records, key=lambda one: one.arrival_s)
        }
        for replica_id, sessions in known.items():
            assert sessions == {session for session, home in last.items() if home == replica_id}
        places = {(record.session_id, record.replica_id) for record in records}
        assert len(places) > len(last), f"sessions move under {name}"


def test_session_affine_routing_keeps_sessions_together_and_balances_their_contexts() -> None:
    agents = Agents(num_sessions=12, scale=0.01, max_pause_s=2.0, ramp_up_s=5.0, max_tokens_per_request=1500)
    trace = Workload(num_requests=240, agents=agents).trace(3)

    def run(name: str, blocks: int, exact: bool = False) -> list[RequestRecord]:
        cores = {f"n{number}": core(num_kv_blocks=blocks, max_num_seqs=8) for number in range(3)}
        one = Simulation(trace, cores, LinearStepTime(), Predictions(), router(name), exact_steps=exact)
        outcome = one.run()
        assert not outcome.refused
        return outcome.records

    ample = run("session_affine", 4096)
    assert sorted(record.request_id for record in ample) == sorted(row.request_id for row in trace.requests)
    homes = {record.session_id: record.replica_id for record in ample}
    assert all(record.replica_id == homes[record.session_id] for record in ample), "nothing was evicted"
    per_replica = Counter(homes.values())
    assert len(per_replica) == 3
    assert max(per_replica.values()) <= 3 * min(per_replica.values())
    tight = run("session_affine", 256)
    assert len(tight) == len(ample)
    assert tight == run("session_affine", 256, exact=True)
    moved = {record.session_id: set[str | None]() for record in tight}
    for record in tight:
        moved[record.session_id].add(record.replica_id)
    assert any(len(names) > 1 for names in moved.values()), "sessions move when they were evicted"
    others = run("jsq", 256)
    assert sum(record.ttft_s for record in tight) < sum(record.ttft_s for record in others)


def test_prefix_affine_routing_finds_what_earlier_turns_have_left() -> None:
    trace = conversations(20)

    def mean_ttft_s(name: str, kept: bool) -> float:
        cores, predictions = {f"n{number}": core(prefix_caching=kept) for number in range(3)}, Predictions()
        one = Simulation(trace, cores, LinearStepTime(), predictions, router(name))
        records = {record.request_id: record for record in one.run().records}
        assert len(records) == 80
        for number in range(20):
            for place in range(1, 4):
                now, before = records[f"s{number}t{place}"], records[f"s{number}t{place - 1}"]
                assert now.arrival_s == before.finish_s + 0.5
        return float(np.mean([record.ttft_s for record in records.values()]))

    without, kept = mean_ttft_s("prefix_affine", False), mean_ttft_s("prefix_affine", True)
    assert kept < 0.95 * without
    assert kept < mean_ttft_s("round_robin", True), "a turn elsewhere finds nothing"


def tiered(num: int = 60, **cluster: Any) -> SimulationConfig:
    """More requests at once than two replicas have slots for, in five tiers."""
    workload = Workload(
        num_requests=num, arrivals=Arrivals(process="at_once"), tiers=Tiers(num_tiers=5),
        lengths=Lengths(prompt=TokenDistribution(high=60), output=TokenDistribution(high=30)),
    )  # fmt: skip
    options = {"num_replicas": 2, "router": "llumnix"} | cluster
    return SimulationConfig(
        workload=workload, scheduler=SchedulerConfig(max_num_seqs=4), cluster=ClusterConfig(**options)
    )


@pytest.mark.mend  # with fcfs, the default, tier 0 waited longer than tier 4: 27.8 s against 17.3 s
def test_replicas_behind_llumnix_order_by_tier_unless_the_user_chooses_otherwise() -> None:
    result = run_simulation(tiered())
    assert result.config["policy"] == "llumlet"
    assert "tiers" not in result.warnings
    tiers = result.metrics["groups"]["tier"]
    ttft = [tiers[tier]["ttft_s"]["mean"] for tier in sorted(tiers)]
    assert ttft == sorted(ttft)
    plain = run_simulation(replace(tiered(), policy="fcfs"))
    assert "policy fcfs orders the queue of each replica without tiers" in plain.warnings["tiers"]
    assert plain.metrics["groups"]["tier"]["0"]["ttft_s"]["mean"] > 2 * ttft[0]
    others = run_simulation(tiered(router="jsq"))
    assert (others.config["policy"], "tiers" in others.warnings) == ("fcfs", False)


def test_headroom_that_has_nothing_to_adapt_to_is_reported() -> None:
    result = run_simulation(tiered(headroom_window_s=1.0))
    assert "no request has ttft_slo_s" in result.warnings["tiers"]
    with pytest.raises(InputError, match="headroom_window_s"):
        tiered(router="jsq", headroom_window_s=1.0)


def test_copies_cost_what_the_model_of_the_roofline_has_per_token() -> None:
    roofline = RooflineStepTime(model="llama-2-7b")
    assert ClusterConfig().link(roofline).kv_bytes_per_token == 524_288
    assert ClusterConfig().link(LinearStepTime()) == KVLink()
    own = ClusterConfig(kv_bytes_per_token=1000, link_bytes_per_s=1e6).link(roofline)
    assert own.copy_s(1000) == pytest.approx(5e-3 + 1.0)
