"""Clusters around the very same schedulers: one replica is the loop of one, and with migration nothing is lost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scheduler_core.decision_log import DecisionLog
from scheduler_core.errors import InputError
from scheduler_core.policies import make_policy
from scheduler_core.replay import replay
from scheduler_core.routing import (
    ROUTERS,
    AutoScaler,
    Headroom,
    MigrationPlanner,
    ReplicaRole,
    Router,
    RoutingRequest,
    ScaleIn,
    ScaleOut,
    SchedulerView,
    make_router,
)
from scheduler_core.routing.disaggregated import Disaggregated
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from scheduler_core.simulator.loop import KvLink, ReplicaChange, Simulation, SimulationOutcome
from scheduler_core.simulator.predictions import no_predictions, trace_predictions
from scheduler_core.simulator.sources import ClosedLoop
from scheduler_core.simulator.step_time.base import LinearStepTime
from scheduler_core.simulator.trace import Trace, TraceRequest
from tests.scheduler_core.helpers import random_trace
from tests.scheduler_core.routing.helpers import router

LIMITS = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256, num_kv_blocks=120)


def core(policy: str = "fcfs", log: DecisionLog | None = None, **more: object) -> Scheduler:
    return Scheduler(replace(LIMITS, **more), make_policy(policy), log)  # type: ignore[arg-type]


def replica_of(out: SimulationOutcome) -> dict[str, str | None]:
    return {record.request_id: record.replica_id for record in out.records}


def simulate(trace: Trace, route: Router, num: int, policy: str = "tie", **more: object) -> SimulationOutcome:
    names = [f"n{number}" for number in range(num)]
    cores = {name: core(policy) for name in names}
    step_time = more.pop("step_time", LinearStepTime())
    out = Simulation(trace, cores, step_time, trace_predictions(trace), route, **more).run()  # type: ignore[arg-type]
    for one in cores.values():
        one.validate()
        assert one.num_waiting == one.num_running == 0
        assert one.num_free_kv_blocks == LIMITS.num_kv_blocks
        assert not one._pool.reserved
    assert sorted(record.request_id for record in out.records) == sorted(
        row.request_id for row in trace.requests
    )
    lengths = {row.request_id: row.output_tokens for row in trace.requests}
    assert all(record.output_tokens == lengths[record.request_id] for record in out.records)
    return out


@pytest.mark.parametrize("policy", ["fcfs", "tie"])
@pytest.mark.parametrize("exact_steps", [True, False])
def test_one_replica_gives_exactly_the_results_of_the_loop_of_one(policy: str, exact_steps: bool) -> None:
    trace = random_trace(80, seed=3, rate_rps=8.0)
    alone = Simulation(
        trace, core(policy), LinearStepTime(), trace_predictions(trace), exact_steps=exact_steps
    )
    expected = alone.run()
    found = simulate(trace, router("jsq"), 1, policy, exact_steps=exact_steps)
    for record in expected.records:
        record.replica_id = "n0"
    assert found == expected


@pytest.mark.parametrize("name", ["jsq", "least_kv", "predicted_work", "llumnix"])
def test_many_steps_at_once_are_the_same_as_single_ones_also_on_three_replicas(name: str) -> None:
    trace = random_trace(60, seed=4, rate_rps=15.0)
    single, many = (simulate(trace, router(name), 3, exact_steps=exact) for exact in (True, False))
    assert sorted(single.records, key=lambda record: record.request_id) == sorted(
        many.records, key=lambda record: record.request_id
    )
    assert replica_of(single) == replica_of(many)


def test_a_request_too_large_for_every_replica_is_refused() -> None:
    small = random_trace(5)
    trace = Trace((*small.requests[:4], replace(small.requests[4], max_tokens=4000)))
    cores = {name: core() for name in "ab"}
    out = Simulation(trace, cores, LinearStepTime(), trace_predictions(trace), router("jsq")).run()
    assert list(out.refused) == ["r4"]
    assert len(out.records) == 4


@pytest.mark.parametrize("name", sorted(set(ROUTERS) - {"disaggregated"}))
def test_every_router_serves_a_whole_trace_the_same_way_twice(name: str) -> None:
    trace = random_trace(40, seed=1, rate_rps=20.0)
    first, second = (simulate(trace, router(name), 3) for _ in range(2))
    assert first == second
    # INFaaS keeps to the replicas that it has used as long as they are fast enough.
    assert len(set(replica_of(first).values())) == (2 if name == "infaas" else 3)


def test_more_replicas_wait_less() -> None:
    trace = random_trace(60, seed=2, rate_rps=15.0)
    waits = [
        float(np.mean([record.queueing_delay_s for record in simulate(trace, router("jsq"), num).records]))
        for num in (1, 2, 4)
    ]
    assert waits[0] > 2 * waits[1] > 4 * waits[2]


class AllOnOne(Router):
    """Sends everything to the first replica: only migration can help."""

    name = "all_on_one"

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


def test_a_slow_link_ends_migrations_early_and_loses_nothing() -> None:
    """One block per stage at 20 ms each while two tokens are generated: some requests finish before they have moved."""
    trace = random_trace(60, seed=6, rate_rps=12.0, cap=64)
    out = simulate(
        trace, AllOnOne(), 3, planner=planner(), stage_blocks=1, link=KvLink(latency_s=0.02, bytes_per_s=1e9)
    )
    assert sum(out.aborted_migrations.values()) > 0
    assert out.num_migrations > 0


def test_decision_logs_with_migrations_replay_exactly() -> None:
    trace = random_trace(40, seed=7, rate_rps=12.0)
    logs = {name: DecisionLog() for name in ("n0", "n1")}
    cores = {name: core("tie", log) for name, log in logs.items()}
    simulation = Simulation(
        trace,
        cores,
        LinearStepTime(),
        trace_predictions(trace),
        AllOnOne(),
        planner=planner(),
        stage_blocks=2,
    )
    assert simulation.run().num_migrations > 0
    operations = {entry["op"] for log in logs.values() for entry in log.entries}
    assert {"reserve", "detach", "attach", "unreserve"} <= operations
    for name, log in logs.items():
        assert replay(log.entries).counters == cores[name].counters


def test_disaggregated_prompts_and_tokens_are_on_different_replicas() -> None:
    trace = random_trace(40, seed=8, rate_rps=6.0)
    roles = {"n0": ReplicaRole.PREFILL, "n1": ReplicaRole.DECODE, "n2": ReplicaRole.DECODE}
    split = Disaggregated()
    out = simulate(trace, split, 3, roles=roles, planner=split, interval_s=0.005, stage_blocks=None)
    share = np.mean([where != "n0" for where in replica_of(out).values()])
    assert share > 0.8, "short answers may be done before they can move"
    assert out.num_migrations >= 0.8 * 40


def test_tiers_reach_the_router_and_the_replicas() -> None:
    """With strict tiers at the replica and headroom at the router, tier 0 waits least of all on a busy cluster."""
    trace = random_trace(80, seed=9, rate_rps=30.0)
    tiered = tuple(replace(row, tier=0 if index % 5 == 0 else 4) for index, row in enumerate(trace.requests))
    out = simulate(
        replace(trace, requests=tiered), router("llumnix"), 2, policy="hpjf", planner=MigrationPlanner()
    )
    waits: dict[int, list[float]] = {0: [], 4: []}
    for record in out.records:
        waits[record.tier].append(record.queueing_delay_s)
    assert np.mean(waits[0]) < np.mean(waits[4]) / 3


def test_a_draining_replica_is_evacuated_and_gets_nothing_new() -> None:
    trace = random_trace(60, seed=10, rate_rps=10.0)
    middle = trace.requests[30].arrival_s
    drained = (ReplicaChange(middle, "n1", "drain"),)
    left = simulate(trace, router("jsq"), 2, changes=drained)
    moved = simulate(trace, router("jsq"), 2, changes=drained, planner=planner())
    last = [
        max(record.finish_s for record in out.records if replica_of(out)[record.request_id] == "n1")
        for out in (left, moved)
    ]
    assert last[1] < last[0], "requests that move away do not keep the replica busy"
    late = {row.request_id for row in trace.requests if row.arrival_s > middle}
    assert all(replica_of(moved)[name] == replica_of(left)[name] == "n0" for name in late)


@pytest.mark.parametrize("with_planner", [True, False])
def test_requests_of_a_failed_replica_begin_anew_elsewhere(with_planner: bool) -> None:
    trace = random_trace(60, seed=11, rate_rps=10.0)
    middle = trace.requests[30].arrival_s
    changes = (ReplicaChange(middle, "n0", "fail"), ReplicaChange(middle + 2.0, "n2", "join"))
    names = ["n0", "n1", "n2"]
    cores = {name: core("tie") for name in names}
    out = Simulation(
        trace,
        cores,
        LinearStepTime(),
        trace_predictions(trace),
        router("jsq"),
        changes=changes,
        planner=planner() if with_planner else None,
        stage_blocks=1,
    ).run()
    assert len(out.records) == 60
    assert out.num_restarts > 0
    assert all(
        record.finish_s <= middle for record in out.records if replica_of(out)[record.request_id] == "n0"
    )
    assert "n2" in replica_of(out).values()
    for name in ("n1", "n2"):
        cores[name].validate()
        assert cores[name].num_free_kv_blocks == LIMITS.num_kv_blocks


def test_requests_that_come_while_no_replica_is_there_wait_for_one() -> None:
    trace = random_trace(20, seed=12, rate_rps=10.0)
    out = simulate(trace, router("jsq"), 1, changes=(ReplicaChange(30.0, "n0", "join"),))
    assert all(record.first_scheduled_s >= 30.0 for record in out.records)
    with pytest.raises(InputError, match="in the end"):
        simulate(trace, router("jsq"), 1, changes=(ReplicaChange(0.0, "n0", "drain"),))


def test_the_cluster_grows_under_load_and_shrinks_after_it() -> None:
    """A burst of 60 requests on one replica, then one request every ten seconds. An idle replica of 120 blocks has
    F = 120, so that only a cluster with nearly nothing to do shrinks."""
    burst = random_trace(80, seed=13, rate_rps=50.0)
    rows = [
        *burst.requests[:60],
        *(replace(row, arrival_s=60.0 + 10 * n) for n, row in enumerate(burst.requests[60:])),
    ]
    out = simulate(
        Trace(tuple(rows)),
        router("jsq"),
        3,
        planner=planner(),
        scaler=AutoScaler(out_below=3.0, in_above=100.0, interval_s=0.5),
        standby={"n1", "n2"},
    )
    [grown, shrunk] = out.scaling
    assert isinstance(grown[1], ScaleOut)
    assert isinstance(shrunk[1], ScaleIn)
    assert grown[0] < 2.0 < shrunk[0] < 60.0
    assert set(replica_of(out).values()) == {"n0", "n1"}
    drained = shrunk[1].victim
    assert all(replica_of(out)[row.request_id] != drained for row in rows[60:])


def test_copies_take_latency_and_bandwidth() -> None:
    assert KvLink(bytes_per_s=1e6, block_bytes=1000, latency_s=0.01).copy_s(20) == pytest.approx(0.03)
    for values, field in (
        ({"bytes_per_s": 0.0}, "bytes_per_s"),
        ({"latency_s": -1.0}, "latency_s"),
        ({"block_bytes": -1}, "block_bytes"),
    ):
        with pytest.raises(InputError, match=field):
            KvLink(**values)  # type: ignore[arg-type]


def test_what_cannot_run_is_refused() -> None:
    trace = random_trace(3)
    with pytest.raises(InputError, match="schedulers"):
        Simulation(trace, {}, LinearStepTime(), trace_predictions(trace), router("jsq"))
    with pytest.raises(InputError, match="roles"):
        simulate(trace, Disaggregated(), 1, roles={"n0": ReplicaRole.DECODE})


def test_a_slower_replica_takes_longer_and_jsq_gives_it_less() -> None:
    trace = random_trace(60, seed=5, rate_rps=6.0)
    quick, slow = LinearStepTime(), LinearStepTime(base_s=0.1)
    out = simulate(trace, router("jsq"), 2, step_time={"n0": quick, "n1": slow})
    assert quick.base_s < slow.base_s
    served = list(replica_of(out).values())
    assert served.count("n1") < served.count("n0")
    gaps = {
        name: np.mean([r.tpot_s for r in out.records if replica_of(out)[r.request_id] == name and r.tpot_s])
        for name in ("n0", "n1")
    }
    assert gaps["n1"] > 3 * gaps["n0"]


def test_a_replica_that_the_scaler_asks_for_takes_time_to_start() -> None:
    trace = random_trace(120, seed=6, rate_rps=25.0)
    outcomes = []
    for startup_s in (0.0, 2.0):
        scaler = AutoScaler(out_below=8.0, in_above=1e9, max_replicas=3, interval_s=0.5)
        names = frozenset({"n1", "n2"})
        out = simulate(
            trace, router("least_kv"), 3, "fcfs", scaler=scaler, standby=names, startup_s=startup_s
        )
        first_asked_s = min(time_s for time_s, signal in out.scaling if isinstance(signal, ScaleOut))
        first_work_s = min(
            record.first_scheduled_s for record in out.records if replica_of(out)[record.request_id] != "n0"
        )
        assert first_work_s >= first_asked_s + startup_s
        assert sum(isinstance(signal, ScaleOut) for _, signal in out.scaling) == 2
        outcomes.append(float(np.mean([record.ttlt_s for record in out.records])))
    assert outcomes[0] < outcomes[1]


def test_replicas_that_fail_and_are_repaired_lose_nothing() -> None:
    trace = random_trace(150, seed=7, rate_rps=10.0)
    changes = [
        ReplicaChange(2.0 * number + after_s, f"n{number % 3}", kind)
        for number in range(1, 7)
        for after_s, kind in ((0.0, "fail"), (1.0, "join"))
    ]
    cores = {name: core("tie") for name in ("n0", "n1", "n2")}
    made: list[Scheduler] = []

    def rebuild(_: str) -> Scheduler:
        made.append(core("tie"))
        return made[-1]

    def run(**more: object) -> SimulationOutcome:
        return Simulation(
            trace,
            {name: core("tie") for name in cores},
            LinearStepTime(),
            trace_predictions(trace),
            router("jsq"),
            changes=changes,
            **more,  # type: ignore[arg-type]
        ).run()

    out = run(rebuild=rebuild)
    assert sorted(r.request_id for r in out.records) == sorted(r.request_id for r in trace.requests)
    assert out.num_restarts > 10
    for one in made:
        one.validate()
    with pytest.raises(InputError, match="rebuild"):
        run()


def test_a_cluster_waits_for_a_replica_that_is_being_repaired() -> None:
    trace = random_trace(10, seed=8, rate_rps=20.0)
    changes = [ReplicaChange(0.2, "a", "fail"), ReplicaChange(5.0, "a", "join")]
    out = Simulation(
        trace,
        {"a": core()},
        LinearStepTime(),
        trace_predictions(trace),
        router("jsq"),
        changes=changes,
        rebuild=lambda _: core(),
    ).run()
    assert len(out.records) == 10
    assert sum(record.finish_s > 5.0 for record in out.records) >= 8


def conversations(num: int) -> Trace:
    """Conversations of four turns, each with the ones before as its prefix."""
    rows = []
    for number in range(num):
        known = 0
        for place in range(4):
            prompt = known + 60
            rows.append(
                TraceRequest(
                    request_id=f"s{number}t{place}",
                    arrival_s=number * 0.05,
                    prompt_tokens=prompt,
                    output_tokens=20,
                    max_tokens=40,
                    session_id=f"s{number}",
                    turn=place,
                    think_time_s=None if place == 0 else 0.5,
                    prefix_tokens=known,
                )
            )
            known = prompt + 20
    return Trace(tuple(rows))


def test_prefix_affine_routing_finds_what_earlier_turns_have_left() -> None:
    trace = conversations(20)

    def mean_ttft_s(name: str, kept: int) -> float:
        cores = {f"n{number}": core() for number in range(3)}
        found = Simulation(
            trace, cores, LinearStepTime(), no_predictions(), router(name), prefix_cache_tokens=kept
        ).run()
        records = {record.request_id: record for record in found.records}
        assert len(records) == 80
        for number in range(20):
            for place in range(1, 4):
                now, before = records[f"s{number}t{place}"], records[f"s{number}t{place - 1}"]
                assert now.arrival_s == before.finish_s + 0.5
        return float(np.mean([record.ttft_s for record in records.values()]))

    without, kept = mean_ttft_s("prefix_affine", 0), mean_ttft_s("prefix_affine", 100_000)
    assert kept < 0.95 * without
    assert kept < mean_ttft_s("round_robin", 100_000), "a turn elsewhere finds nothing"


def test_a_closed_loop_of_clients_keeps_a_cluster_at_its_number() -> None:
    trace = random_trace(60, seed=9, rate_rps=1000.0)
    done: list[int] = []
    out = simulate(
        trace, router("jsq"), 2, clients=ClosedLoop(num_clients=6, think_time_s=0.0), progress=done.append
    )
    assert sum(done) == 60
    edges = [(record.finish_s, -1) for record in out.records]
    edges += [(record.arrival_s, 1) for record in out.records]
    assert np.cumsum([change for _, change in sorted(edges)]).max() == 6


def test_waiting_requests_alone_count_for_vidurs_least_outstanding() -> None:
    snapshots = {name: SchedulerView(core()).snapshot(name, keep_requests=False) for name in ("a", "b")}
    offered = [replace(snapshots["a"], num_running=7, num_waiting=1), replace(snapshots["b"], num_waiting=2)]
    item = RoutingRequest(request=random_trace(1).requests[0].request(), tier=2)
    assert make_router("jsq", {"waiting_only": True}).choose(item, offered, 0.0) == "a"
    assert make_router("jsq").choose(item, offered, 0.0) == "b"
