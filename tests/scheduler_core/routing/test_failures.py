"""Replicas that fail, are drained, started and scraped: every request ends exactly once, whatever happens."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.scheduling import clusters
from scheduler_core.errors import InputError
from scheduler_core.policies import make_policy
from scheduler_core.routing.base import ScaleIn, ScaleOut, Scaler
from scheduler_core.routing.llumnix import AutoScaler, Headroom, MigrationPlanner
from scheduler_core.routing.snapshot import ReplicaSnapshot
from scheduler_core.routing.target_tracking import TargetTracking
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from scheduler_core.simulator.config import ClusterConfig, SimulationConfig
from scheduler_core.simulator.failures import Failure, FailurePlan
from scheduler_core.simulator.loop import Simulation, SimulationOutcome
from scheduler_core.simulator.metrics import metric
from scheduler_core.simulator.run import run_simulation
from scheduler_core.simulator.step_time.base import LinearStepTime
from scheduler_core.simulator.step_time.roofline import RooflineStepTime
from scheduler_core.simulator.trace import Trace
from scheduler_core.simulator.trace_predictions import Predictions, trace_predictions
from scheduler_core.simulator.watch import RunWatch
from scheduler_core.simulator.workloads.agents import Agents
from scheduler_core.simulator.workloads.arrivals import Arrivals
from scheduler_core.simulator.workloads.lengths import Lengths, TokenDistribution
from scheduler_core.simulator.workloads.workload import RequestClass, Workload
from tests.scheduler_core.helpers import ROUND, random_trace, trace_row
from tests.scheduler_core.routing.helpers import replica, router, running, waiting
from tests.scheduler_core.routing.test_cluster import conversations

LIMITS = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256, num_kv_blocks=120)


def simulate(trace: Trace, name: str, num: int, policy: str = "fcfs", **more: Any) -> SimulationOutcome:
    """A run in which every request ends exactly once, and nothing of it is left on a replica."""
    limits = replace(LIMITS, prefix_caching=more.pop("prefix_caching", False))
    cores = {f"n{number}": Scheduler(limits, make_policy(policy)) for number in range(num)}
    has_predictions = any(row.prediction is not None for row in trace.requests)
    predictions = trace_predictions(trace) if has_predictions else Predictions()
    step_time = more.pop("step_time", LinearStepTime())
    out = Simulation(trace, cores, step_time, predictions, router(name), **more).run()
    for core in cores.values():
        core.validate()
        assert core.num_waiting == core.num_running == 0
        assert core.pool.kv.num_free_blocks == limits.capacity_blocks
        assert not core.pool.reserved
    lengths = {row.request_id: row.output_tokens for row in trace.requests}
    finished = [record.request_id for record in out.records]
    assert sorted([*finished, *out.refused, *out.failed]) == sorted(lengths)
    assert all(record.output_tokens == lengths[record.request_id] for record in out.records)
    return out


@pytest.mark.parametrize("exact_steps", [True, False])
def test_a_lost_request_starts_again_elsewhere(exact_steps: bool) -> None:
    """Steps of 1 s and 0.1 s per prompt token: prompt until 2, tokens at 2, 3, 4; its replica fails at 4.5, with 12 tokens in
    its cache. The prompt is computed on the other one until 6.5, and nine more tokens until 15.5."""
    trace, fails = (
        Trace((trace_row("a", 0.0, 10, 10),)),
        FailurePlan(failures=((4.5, "n0", None),), restart_s=3.0),
    )
    watch = RunWatch()
    out = simulate(trace, "jsq", 2, step_time=ROUND, failures=fails, exact_steps=exact_steps, watch=watch)
    [record] = out.records
    assert (record.first_token_s, record.finish_s, record.replica_id) == (6.5, 15.5, "n1")
    assert (out.num_failures, out.num_retried, out.num_retries, out.num_lost_tokens) == (1, 1, 1, 12)
    assert (out.busy_s, out.replica_seconds) == (15.5, 31.0), "the step that was lost is 0.5 s; n0 restarts"
    assert watch.gaps.longest_s == {"a": 1.0}, "not from the last token of the first attempt"


def test_a_lost_request_fails_if_it_may_not_be_sent_again_and_others_do_not_wait_for_it() -> None:
    rows = (trace_row("a", 0.0, 10, 10), trace_row("b", 0.0, 10, 1, after=("a",), think_time_s=1.0))
    plan = FailurePlan(failures=((4.5, "n0", None),), restart_s=3.0)
    for changes in ({"max_retries": 0}, {"retry_started": False}):
        out = simulate(Trace(rows), "jsq", 2, step_time=ROUND, failures=replace(plan, **changes))
        assert list(out.failed) == ["a"]
        assert [(record.request_id, record.arrival_s) for record in out.records] == [("b", 5.5)]
        assert (out.num_retried, out.failed_seconds) == (0, 4.5)
    early = replace(plan, failures=((1.5, "n0", None),), retry_started=False)
    out = simulate(Trace(rows), "jsq", 2, step_time=ROUND, failures=early)
    assert not out.failed, "it had no token yet"


def test_requests_wait_for_the_restart_of_the_only_replica() -> None:
    trace = Trace((trace_row("a", 0.0, 10, 10), trace_row("b", 5.0, 10, 1)))
    plan = FailurePlan(failures=((4.5, "n0", 2.5), (5.0, "n0", 1.0)), restart_s=100.0)
    out = simulate(trace, "jsq", 1, step_time=ROUND, failures=plan)
    assert {record.request_id: record.first_scheduled_s for record in out.records} == {"a": 7.0, "b": 7.0}
    assert out.num_failures == 1, "it did not run at 5 s"


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        *zip(("jsq", "least_kv", "kv_router", "cache_aware", "session_affine", "predicted_work"), range(6), strict=True),
        *(("jsq", seed) for seed in range(6, 10)),
    ],
)  # fmt: skip
def test_every_request_ends_once_however_often_replicas_fail(name: str, seed: int) -> None:
    """Conversations and single requests; each of three replicas fails about every 2 s and restarts after 0.5 s. From seed 6 on,
    engines plan a step ahead, so that a failed one also has requests that no step has seen."""
    single = random_trace(40, seed=seed, rate_rps=8.0).requests
    trace = Trace((*conversations(6).requests, *single))
    plan = FailurePlan(
        mtbf_s=2.0, restart_s=0.5, max_retries=seed % 3, retry_started=seed % 2 == 0, seed=seed
    )
    policy = ("fcfs", "tie", "uniboost")[seed % 3]
    more: dict[str, Any] = {"failures": plan, "prefix_caching": True}
    if seed >= 6:
        more["step_time"] = RooflineStepTime(model="llama-3-8b", gpu="l40s", overhead_s=0.03)
    first, again, exact = (
        simulate(trace, name, 3, policy, exact_steps=exact_steps, **more)
        for exact_steps in (False, False, True)
    )
    assert first.num_failures > 3
    assert first == again
    assert sorted(first.records, key=lambda record: record.request_id) == sorted(
        exact.records, key=lambda record: record.request_id
    )
    assert first.failed == exact.failed
    assert first.num_lost_tokens == exact.num_lost_tokens
    if plan.max_retries == 0:
        assert first.num_retries == 0
        assert first.failed


@pytest.mark.parametrize("seed", range(4))
def test_every_request_ends_once_with_migrations_scaling_and_kills(seed: int) -> None:
    trace = random_trace(80, seed=seed, rate_rps=20.0)
    out = simulate(
        trace, "jsq", 4, "tie", failures=FailurePlan(mtbf_s=3.0, restart_s=0.3, seed=seed),
        planner=MigrationPlanner(headroom=Headroom((0.0,) * 5)), stage_blocks=2,
        scaler=AutoScaler(out_below=8.0, in_above=12.0, interval_s=0.3), standby={"n2", "n3"}, startup_s=0.2,
        drain_timeout_s=0.2,
    )  # fmt: skip
    assert out.num_failures > 2
    assert out.num_migrations > 0
    assert {type(signal) for _, signal in out.scaling} == {ScaleIn, ScaleOut}


def test_caches_are_cold_after_a_failure_and_sessions_stay_elsewhere() -> None:
    """Sessions never move while their contexts are there; those of the failed replica do, once, and prompts cost more."""
    agents = Agents(num_sessions=12, scale=0.01, max_pause_s=2.0, ramp_up_s=5.0, max_tokens_per_request=1500)
    trace = Workload(num_requests=240, agents=agents).trace(3)
    hits, moved = [], []
    for fails in (FailurePlan(), FailurePlan(failures=((20.0, "n1", None),), restart_s=5.0)):
        limits = SchedulerConfig(num_kv_blocks=4096, prefix_caching=True)
        cores = {f"n{number}": Scheduler(limits, make_policy("fcfs")) for number in range(3)}
        one = Simulation(
            trace, cores, LinearStepTime(), Predictions(), router("session_affine"), failures=fails
        )
        records = sorted(one.run().records, key=lambda record: record.arrival_s)
        homes: dict[str | None, list[str | None]] = {}
        for record in records:
            homes.setdefault(record.session_id, []).append(record.replica_id)
        moved.append([names for names in homes.values() if len(set(names)) > 1])
        hits.append(sum(core.pool.num_cached_tokens for core in cores.values()))
        assert len(records) == len(trace)
    assert not moved[0]
    assert moved[1]
    assert all("n1" in names for names in moved[1])
    assert hits[1] < hits[0]


class Script(Scaler):
    """Given decisions at given times."""

    min_replicas, max_replicas, interval_s = 1, 9, 0.5

    def __init__(self, **decisions: ScaleIn | ScaleOut) -> None:
        self.decisions = {float(at.strip("t")): decision for at, decision in decisions.items()}

    def decide(
        self, replicas: Sequence[ReplicaSnapshot], num_starting: int, now: float
    ) -> Sequence[ScaleIn | ScaleOut]:
        return [self.decisions.pop(at) for at in [*self.decisions] if at <= now]


def test_a_drain_ends_with_its_requests_or_is_killed_and_both_are_paid_until_then() -> None:
    """a needs 11 s on n0, which drains from 3 s on; b arrives after 20 s."""
    trace = Trace((trace_row("a", 0.0, 10, 10), trace_row("b", 20.0, 10, 1)))
    more: dict[str, Any] = {"step_time": ROUND, "interval_s": 0.5}
    out = simulate(trace, "jsq", 2, scaler=Script(t3=ScaleIn("n0")), **more)
    assert [(record.finish_s, record.replica_id) for record in out.records] == [(11.0, "n0"), (22.0, "n1")]
    assert out.replica_seconds == 11 + 22
    killed = simulate(trace, "jsq", 2, scaler=Script(t3=ScaleIn("n0")), drain_timeout_s=1.5, **more)
    assert [(record.finish_s, record.replica_id) for record in killed.records] == [(15.5, "n1"), (22.0, "n1")]
    assert killed.replica_seconds == 4.5 + 22
    assert (killed.num_killed, killed.num_failures, killed.num_retried) == (1, 0, 1)


@pytest.mark.mend  # it was counted as killed after a time-out, also without one
def test_a_draining_replica_that_fails_is_a_failure_and_does_not_restart() -> None:
    trace = Trace((trace_row("a", 0.0, 10, 10), trace_row("b", 20.0, 10, 1)))
    out = simulate(
        trace, "jsq", 2, step_time=ROUND, interval_s=0.5, scaler=Script(t3=ScaleIn("n0")),
        failures=FailurePlan(failures=((4.5, "n0", 1.0),)),
    )  # fmt: skip
    assert (out.num_killed, out.num_failures, out.num_retried) == (0, 1, 1)
    assert out.replica_seconds == 4.5 + 22


def test_a_started_replica_is_paid_from_its_order_and_serves_after_its_start() -> None:
    trace = Trace(tuple(trace_row(name, at, 10, 10) for name, at in (("a", 0.0), ("b", 2.0), ("c", 7.0))))
    out = simulate(
        trace, "jsq", 2, step_time=ROUND, interval_s=0.5, scaler=Script(t1=ScaleOut()), standby={"n1"}, startup_s=5.0
    )  # fmt: skip
    homes = {record.request_id: record.replica_id for record in out.records}
    assert homes == {"a": "n0", "b": "n0", "c": "n1"}
    assert out.replica_seconds == pytest.approx(2 * out.end_s - 1)


@pytest.mark.mend  # an idle cluster kept its replicas until the next request, for a whole night
def test_an_idle_cluster_shrinks_before_the_next_request() -> None:
    burst = random_trace(30, seed=1, rate_rps=30.0).requests
    trace = Trace((*burst, replace(burst[0], request_id="late", arrival_s=3600.0)))
    scaler = TargetTracking(metric="concurrency", target=4.0, min_replicas=1, max_replicas=3, window_s=60.0)
    out = simulate(trace, "jsq", 3, scaler=scaler, interval_s=scaler.interval_s)
    assert [type(signal) for _, signal in out.scaling] == [ScaleIn, ScaleIn]
    assert all(60.0 < at < 120.0 for at, _ in out.scaling)
    assert out.replica_seconds < 3600 + 2 * 120


def busy(name: str, num_running: int, num_waiting: int = 0) -> ReplicaSnapshot:
    rows = [running(f"{name}{number}", 1) for number in range(num_running)]
    return replica(name, *rows, *[waiting(f"{name}w{number}", 1) for number in range(num_waiting)])


def decisions(
    scaler: Scaler, now: float, *replicas: ReplicaSnapshot, starting: int = 0
) -> tuple[int, list[str]]:
    """Replicas to start, and those to drain."""
    signals = scaler.decide(replicas, starting, now)
    drained = [signal.victim for signal in signals if isinstance(signal, ScaleIn)]
    return len(signals) - len(drained), drained


def test_target_tracking_by_hand() -> None:
    """Target: 5 waiting requests per replica. 11 on two replicas: ceil(11 / 5) = 3, and 11 / 10 = 1.1 is within the tolerance.
    12: ceil(2.4) = 3. Two starting ones count. 100: ceil(20), but at most n + 4 = 6."""
    scaler = TargetTracking(max_replicas=50)
    assert decisions(scaler, 0.0, busy("a", 8, 6), busy("b", 8, 5)) == (0, [])
    assert decisions(scaler, 14.0, busy("a", 8, 6), busy("b", 8, 6)) == (0, []), "15 s are not over"
    assert decisions(scaler, 15.0, busy("a", 8, 6), busy("b", 8, 6)) == (1, [])
    assert decisions(scaler, 30.0, busy("a", 8, 6), busy("b", 8, 9), starting=1) == (0, [])
    assert decisions(scaler, 45.0, busy("a", 8, 50), busy("b", 8, 50)) == (4, [])
    many = [busy(f"n{number:02d}", 8, 10) for number in range(10)]
    assert decisions(scaler, 60.0, *many) == (10, []), "twice as many"
    assert decisions(TargetTracking(max_replicas=12), 0.0, *many) == (2, [])


def test_target_tracking_scales_in_after_its_window_the_latest_first() -> None:
    scaler = TargetTracking(metric="concurrency", target=10.0, window_s=300.0, max_replicas=9)
    low = [busy(name, 3) for name in "abcd"]
    times = [15.0 * number for number in range(22)]
    answers = [decisions(scaler, at, *low) for at in times]
    assert answers[:20] == [(0, [])] * 20, "the start counts as four replicas for 300 s"
    assert answers[20] == (0, ["c", "d"]), "12 / 10: two replicas"
    assert decisions(scaler, 1000.0, *low[:1], starting=3) == (0, []), "one that runs stays"


def test_target_tracking_measures() -> None:
    one = busy("a", 40, 2)
    values = {
        metric: TargetTracking(metric=metric, target=0.5).value(one) for metric in TargetTracking.METRICS
    }
    assert values == {"waiting": 2, "running": 40, "concurrency": 42, "kv_usage": pytest.approx(0.4)}
    with pytest.raises(InputError, match="metric"):
        TargetTracking(metric="cpu")
    with pytest.raises(InputError, match="target"):
        TargetTracking(metric="kv_usage", target=80.0)


def test_a_router_that_scrapes_sends_all_requests_between_two_scrapes_to_one_replica() -> None:
    """20 requests in 2 s. With current metrics every replica gets some; with those of the first one, replica n0 gets all but the
    first, which are in the metrics of no replica."""
    trace = Trace(tuple(trace_row(f"r{number}", 0.1 * number, 64, 40) for number in range(20)))
    homes = {}
    for interval_s in (0.0, 1.0):
        out = simulate(trace, "least_kv", 4, snapshot_interval_s=interval_s)
        homes[interval_s] = [
            record.replica_id for record in sorted(out.records, key=lambda record: int(record.request_id[1:]))
        ]
    assert len(set(homes[0.0][:8])) == 4
    assert set(homes[1.0][:10]) == {"n0"}
    assert "n0" not in homes[1.0][10:], "at 1 s all others are empty"
    assert len(set(homes[1.0][10:])) == 1


def test_the_configuration_and_results_of_failures_and_slo_classes() -> None:
    """Every request of both classes ends; those that failed missed their targets."""
    short = Lengths(prompt=TokenDistribution(high=60), output=TokenDistribution(high=30))
    workload = Workload(
        num_requests=120, arrivals=Arrivals(rate_rps=20.0), lengths=short,
        classes=(RequestClass(weight=1, ttft_slo_s=5.0), RequestClass(weight=1, ttlt_slo_s=60.0), RequestClass(weight=1)),
    )  # fmt: skip
    cluster = ClusterConfig(
        num_replicas=3,
        failures=(Failure(at_s=1.0), Failure(at_s=2.0, replica=1)),
        restart_s=2.0,
        max_retries=0,
    )
    result = run_simulation(SimulationConfig(workload=workload, cluster=cluster))
    metrics = result.metrics
    assert (metrics["num_finished"] + metrics["num_failed"], metrics["cluster"]["num_failures"]) == (120, 2)
    assert metrics["num_failed"] == len(result.failed) > 0
    assert metrics["littles_law_error"] < 1e-9
    assert metrics["replica_seconds"] == pytest.approx(3 * metrics["makespan_s"])
    classes = metrics["groups"]["slo"]
    assert set(classes) == {"", "ttft 5 s", "ttlt 60 s"}
    assert classes[""]["slo_attainment"] is None
    assert metric(metrics, "groups.slo.ttft 5 s.goodput_rps") > 0, "targets of searches can name it"
    failed = [row for row in workload.trace(0).requests if row.request_id in result.failed]
    for name, field in (("ttft 5 s", "ttft_slo_s"), ("ttlt 60 s", "ttlt_slo_s")):
        num_failed = sum(getattr(row, field) is not None for row in failed)
        num = classes[name]["num_finished"]
        assert classes[name]["slo_attainment"] == pytest.approx(num / (num + num_failed)), (
            "all others met them"
        )
    assert f"{metrics['num_failed']} failed" in str(result)
    assert "ttft 5 s" in str(result)
    retried = run_simulation(SimulationConfig(workload=workload, cluster=replace(cluster, max_retries=1)))
    assert (retried.metrics["num_failed"], retried.metrics["cluster"]["num_retried"] > 0) == (0, True)
    one = run_simulation(
        SimulationConfig(workload=workload, cluster=ClusterConfig(failures=(Failure(at_s=1.0),)))
    )
    assert one.metrics["cluster"]["num_failures"] == 1


def test_the_benchmark_prints_a_row_for_every_router_and_failure(capsys: pytest.CaptureFixture[str]) -> None:
    clusters.routers(12, range(1))
    clusters.failures(12, range(1))
    lines = capsys.readouterr().out.splitlines()
    for name in clusters.ROUTERS:
        assert sum(line.startswith(f"| {name} |") for line in lines) >= len(clusters.WORKLOADS)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"snapshot_interval_s": 1.0}, "snapshot_interval_s"), ({"scaler": "hpa"}, "scaler"), ({"scaler": "target_tracking"}, "scaler"),
        ({"failures": (Failure(at_s=1.0, replica=3),)}, "failures.replica"), ({"mtbf_s": 0.0}, "mtbf_s"),
        ({"drain_timeout_s": 30.0}, "drain_timeout_s"), ({"scaler_parameters": {"target": 3.0}}, "scaler_parameters"),
        ({"min_replicas": 1, "scaler_parameters": {"target": 3.0}}, "scaler_parameters"), ({"max_retries": -1}, "max_retries"),
        ({"min_replicas": 1, "scaler": "target_tracking", "scaler_parameters": {"target": "high"}}, "scaler_parameters.target"),
        ({"min_replicas": 1, "scaler": "target_tracking", "scaler_parameters": {"metric": 3.0}}, "scaler_parameters.metric"),
        ({"min_replicas": 1, "scaler": "target_tracking", "scaler_parameters": {"max_replicas": 9}}, "scaler_parameters.max_replicas"),
        ({"min_replicas": 1, "scaler": "target_tracking", "scaler_parameters": {"goal": 9}}, "parameter of scaler"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError, match=rf"^{field}\b"):
        ClusterConfig(num_replicas=3, **settings)
    with pytest.raises(InputError, match=r"failures\.at_s"):
        Failure(at_s=-1.0)
