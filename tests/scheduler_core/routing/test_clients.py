"""Clients that give up and send again: the engine aborts their requests at that time, wherever they are."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_core.engine.decision_log import DecisionLog
from scheduler_core.errors import InputError
from scheduler_core.policies import make_policy
from scheduler_core.prediction.correction import Correction
from scheduler_core.replay import replay
from scheduler_core.routing.llumnix import AutoScaler, Headroom, MigrationPlanner
from scheduler_core.routing.migration import AbortReason, KVLink
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from scheduler_core.simulator.clients import ClientPlan
from scheduler_core.simulator.commands.simulate import main as simulate_command
from scheduler_core.simulator.config import ClusterConfig, SimulationConfig
from scheduler_core.simulator.failures import FailurePlan
from scheduler_core.simulator.loop import Simulation, SimulationOutcome
from scheduler_core.simulator.run import run_simulation
from scheduler_core.simulator.step_time.base import LinearStepTime, delays_of
from scheduler_core.simulator.step_time.roofline import RooflineStepTime
from scheduler_core.simulator.trace import Trace
from scheduler_core.simulator.trace_predictions import Predictions, trace_predictions
from scheduler_core.simulator.watch import RunWatch
from scheduler_core.simulator.workloads.workload import RequestClass, Workload
from tests.scheduler_core.helpers import ROUND, SMALL_PARAMETERS, compatible_pairs, random_trace, trace_row
from tests.scheduler_core.routing.helpers import router
from tests.scheduler_core.routing.test_cluster import conversations

LIMITS = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256, num_kv_blocks=120)


def simulate(trace: Trace, num: int = 1, policy: str = "fcfs", **more: Any) -> SimulationOutcome:
    """A run in which every request ends exactly once, or is unfinished at the horizon; without one, nothing is left on a
    replica."""
    limits = replace(LIMITS, **more.pop("limits", {}))
    cores = {f"n{number}": Scheduler(limits, make_policy(policy)) for number in range(num)}
    more.pop("cores", {}).update(cores)
    step_time, name = more.pop("step_time", LinearStepTime()), more.pop("router", "jsq" if num > 1 else None)
    chosen = None if name is None else router(name)
    has_predictions = any(row.prediction is not None for row in trace.requests)
    predictions = trace_predictions(trace) if has_predictions else Predictions()
    out = Simulation(trace, cores, step_time, predictions, chosen, **more).run()
    lengths = {row.request_id: row.output_tokens for row in trace.requests}
    ended = [record.request_id for record in out.records] + [*out.refused, *out.failed]
    assert len(ended) == len(set(ended))
    assert set(ended) <= set(lengths)
    assert all(record.output_tokens == lengths[record.request_id] for record in out.records)
    if "horizon_s" not in more:
        assert len(ended) == len(lengths)
        assert out.num_unfinished == 0
        for core in cores.values():
            core.validate()
            assert core.num_waiting == core.num_running == 0
            assert core.pool.kv.num_free_blocks == limits.capacity_blocks
            assert not core.pool.reserved
    assert out.num_given_up == sum("client" in reason for reason in out.failed.values())
    return out


@pytest.mark.parametrize("exact_steps", [True, False])
@pytest.mark.parametrize("num", [1, 2])
def test_by_hand(exact_steps: bool, num: int) -> None:
    """Steps of 1 s and 0.1 s per prompt token, one request at a time on each replica. a0 (and a1) runs until 11; b is sent
    at 1, given up at 6 and sent again at 7, starts at 11, and is given up at 12, during its prompt of 10 tokens until 13."""
    rows = [*(trace_row(f"a{number}", 0.0, 10, 10) for number in range(num)), trace_row("b", 1.0, 10, 1)]
    more: dict[str, Any] = {"num": num, "step_time": ROUND, "limits": {"max_num_seqs": 1}}

    def run(**changes: Any) -> SimulationOutcome:
        plan = ClientPlan(timeout_s=5.0, **changes)
        return simulate(Trace(tuple(rows)), clients=plan, exact_steps=exact_steps, **more)

    def times(out: SimulationOutcome) -> tuple[float, ...]:
        [b] = [record for record in out.records if record.request_id == "b"]
        return (b.arrival_s, b.first_scheduled_s, b.first_token_s)

    left = run(retry_after_s=1.0)
    assert left.failed == {"b": "its client gave up"}
    assert (left.num_given_up, left.num_client_retries, left.failed_seconds) == (1, 0, 5.0)
    assert (left.end_s, left.num_aborted_tokens) == (11.0, 0)
    twice = run(retry_after_s=1.0, max_retries=1)
    assert twice.failed == {"b": "its client gave up after 1 retry"}
    assert (twice.num_given_up, twice.num_client_retries, twice.failed_seconds) == (1, 1, 11.0)
    assert twice.busy_s == 11.0 * num + 2.0, "the step that computes the prompt in vain"
    served = run(retry_after_s=1.0, max_retries=2)
    assert times(served) == (1.0, 13.0, 15.0), "sent at 13, and latencies count from the first sending"
    assert (served.num_given_up, served.num_client_retries) == (0, 2)
    in_time = run(retry_after_s=2.0, max_retries=1)
    assert times(in_time) == (1.0, 11.0, 13.0), "sent at 8: the token at 13 comes at the very time"
    assert in_time.request_seconds == 11.0 * num + 12.0


@pytest.mark.parametrize("exact_steps", [True, False])
def test_the_gap_between_two_tokens_counts_too(exact_steps: bool) -> None:
    """a has tokens at 2 and 3; then the prompt of b, 30 tokens, stops it until 7, as prompts come first (vllm). b was sent at
    2.5, so that its first token comes at the very time."""
    trace = Trace((trace_row("a", 0.0, 10, 10), trace_row("b", 2.5, 30, 3)))
    more: dict[str, Any] = {"limits": {"batching": "vllm"}, "step_time": ROUND, "exact_steps": exact_steps}

    def run(**plan: Any) -> SimulationOutcome:
        return simulate(trace, clients=ClientPlan(**plan), **more)

    out = run(timeout_s=4.5)
    assert out.failed == {"a": "its client gave up"}
    assert (out.failed_seconds, out.num_aborted_tokens) == (7.5, 11)
    assert {record.request_id: record.finish_s for record in out.records} == {"b": 9.0}
    again = run(timeout_s=4.5, max_retries=1)
    finish_s = {record.request_id: record.finish_s for record in again.records}
    assert finish_s == {"b": 11.0, "a": 19.0}, "sent at 7.5: its prompt is computed from 8 to 10"
    assert not run(timeout_s=5.0).failed, "its third token comes at 8"


STORM = ClientPlan(timeout_s=0.4, max_retries=2, retry_after_s=0.1)
#: A timeout of some steps, so that clients also give up between two tokens.
HASTY = ClientPlan(timeout_s=0.06, max_retries=1)
FORMERS = ("chunked_prefill", "vllm", "orca", "uniboost", "slai", "rad", "quantile_reserve", "stage_aware")


def all_of(trace: Trace, **more: Any) -> Any:
    """What must be the same with combined and with exact steps: requests, gaps between tokens, numbers, peaks of memory."""
    watch = RunWatch()
    cores: dict[str, Scheduler] = {}
    out = simulate(trace, watch=watch, cores=cores, **more)
    names = (
        "num_given_up",
        "num_client_retries",
        "num_aborted_tokens",
        "num_steps",
        "num_retries",
        "num_lost_tokens",
    )
    numbers = {name: getattr(out, name) for name in names}
    assert numbers["num_given_up"] > 0
    assert numbers["num_client_retries"] > 0
    peaks = [core.pool.kv.peak_blocks for core in cores.values()]
    hits = [core.pool.num_cached_tokens for core in cores.values()]
    records = sorted(out.records, key=lambda record: record.request_id)
    return records, out.failed, numbers, watch.gaps.merged().counts.tolist(), peaks, hits


@pytest.mark.parametrize(("policy", "former"), compatible_pairs(("fcfs", "bounded_shortest"), FORMERS))
@pytest.mark.parametrize("clients", [STORM, HASTY])
@pytest.mark.parametrize("memory", [{"prefix_caching": True}, {"preemption": "swap", "num_kv_blocks": 60}])
def test_combined_steps_change_nothing(
    former: str, policy: str, clients: ClientPlan, memory: dict[str, Any]
) -> None:
    """In an overload, with every batch former, with prefix caching or a small memory."""
    trace = Trace((*conversations(6).requests, *random_trace(120, seed=3, rate_rps=80.0).requests))
    limits = {"batching": former, "batching_parameters": SMALL_PARAMETERS.get(former, {}), **memory}
    limits["max_num_batched_tokens"] = 512  # for whole prompts
    one, other = (
        all_of(trace, policy=policy, limits=limits, clients=clients, exact_steps=exact_steps)
        for exact_steps in (True, False)
    )
    assert one == other


@pytest.mark.parametrize(
    ("name", "seed"),
    [(name, seed) for seed, name in enumerate(
        ("jsq", "least_kv", "kv_router", "cache_aware", "session_affine", "predicted_work", "predicted_wait",
         "power_of_two", "infaas", "endpoint_picker", "llumnix", "prefix_affine"))],
)  # fmt: skip
@pytest.mark.parametrize("plans_ahead", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_several_replicas_that_also_fail(name: str, seed: int, plans_ahead: bool, fails: bool) -> None:
    """Three replicas. Engines that plan a step ahead have requests that no step has seen, and time in a front end."""
    single = random_trace(150, seed=seed, rate_rps=200.0).requests
    trace = Trace((*conversations(6).requests, *single))
    more: dict[str, Any] = {"num": 3, "router": name, "limits": {"prefix_caching": True}}
    more["clients"] = (STORM, HASTY)[seed % 2]
    if fails:
        more["failures"] = FailurePlan(mtbf_s=2.0, restart_s=0.5, max_retries=seed % 3, seed=seed)
    if plans_ahead:
        more["step_time"] = RooflineStepTime(model="llama-3-8b", gpu="l40s", overhead_s=0.03)
    first, again, exact = (
        all_of(trace, exact_steps=exact_steps, **more) for exact_steps in (False, False, True)
    )
    assert first == again
    assert first == exact


@pytest.mark.parametrize("seed", range(4))
def test_requests_that_migrate_are_given_up(seed: int) -> None:
    """With copies that take long, also in the last stage, when the request is on no replica; with scaling, failures, kills."""
    out = simulate(
        random_trace(120, seed=seed, rate_rps=60.0), 4, "tie", clients=HASTY, link=KVLink(latency_s=0.05),
        failures=FailurePlan(mtbf_s=3.0, restart_s=0.3, seed=seed),
        planner=MigrationPlanner(headroom=Headroom((0.0,) * 5)), stage_blocks=2,
        scaler=AutoScaler(out_below=8.0, in_above=12.0, interval_s=0.3), standby={"n2", "n3"}, startup_s=0.2,
        drain_timeout_s=0.2,
    )  # fmt: skip
    assert out.num_given_up > 0
    assert out.num_migrations > 0
    assert out.aborted_migrations[AbortReason.GIVEN_UP] > 0


@pytest.mark.parametrize(
    "cluster",
    [
        {"num_replicas": 3, "router": "disaggregated", "num_prefill_replicas": 1},
        {"num_replicas": 3, "migration": True, "migration_threshold": 0.1},
    ],
)
def test_prefill_and_decode_replicas_and_migrations(cluster: dict[str, Any]) -> None:
    """An overload of small replicas; the time in the system is that of all requests."""
    limits = SchedulerConfig(max_num_seqs=16, num_kv_blocks=600)
    config = SimulationConfig(
        workload=Workload(num_requests=300), load=1.5, scheduler=limits, cluster=ClusterConfig(**cluster),
        clients=ClientPlan(timeout_s=1.0, max_retries=1),
    )  # fmt: skip
    metrics = run_simulation(config).metrics
    assert metrics["num_finished"] + metrics["num_failed"] == 300
    assert metrics["clients"]["num_given_up"] == metrics["num_failed"] > 0
    assert metrics["littles_law_error"] < 1e-9
    assert metrics["cluster"]["num_migrations"] > 0


def test_the_decision_log_has_what_was_aborted() -> None:
    log = DecisionLog()
    config = SimulationConfig(
        workload=Workload(num_requests=200), load=1.5, clients=ClientPlan(timeout_s=1.0, max_retries=1)
    )
    clients = run_simulation(config, log=log).metrics["clients"]
    assert replay(log.entries).counters.num_aborted == clients["num_given_up"] + clients["num_retries"] > 0


def test_a_search_for_the_highest_load_does_not_count_on_clients_that_give_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a timeout of 2 s no latency is above 2 s at any load, because all others were aborted."""
    options = "--workload.num_requests 400 --low 0.3 --high 3 --max_seeds 2 --at_most '{ttft_s.p99: 2.1}' --tolerance 0.2"
    line = f"{options} --clients.timeout_s 2 --json {tmp_path}/capacity.json"
    assert simulate_command(["capacity", *shlex.split(line)]) == 0
    found = json.loads((tmp_path / "capacity.json").read_text())
    assert 0.5 < found["level"] < 1.5
    problems = [probe["warnings"]["problem"] for probe in found["probes"] if not probe["meets"]]
    assert problems
    assert all("of the clients give up" in problem for problem in problems)
    line = "--workload.num_requests 300 --load 2 --clients.timeout_s 2"
    assert simulate_command(["run", *shlex.split(line), "--json", str(tmp_path / "run.json")]) == 0
    num = json.loads((tmp_path / "run.json").read_text())["runs"][0]["metrics"]["clients"]["num_given_up"]
    assert f"{num} requests were given up by their clients" in caplog.text
    assert "failed with their replicas" not in caplog.text


def test_clients_do_not_wait_for_a_replica_that_does_not_come() -> None:
    """The only replica fails at 4.5 and is down for 100 s: a had its last token at 4 and waits for the next one, b arrives
    meanwhile and is never on a replica."""
    trace = Trace((trace_row("a", 0.0, 10, 10), trace_row("b", 5.0, 10, 1)))
    fails = FailurePlan(failures=((4.5, "n0", 100.0),))
    out = simulate(
        trace, router="jsq", step_time=ROUND, failures=fails, clients=ClientPlan(timeout_s=3.0, max_retries=1)
    )
    assert list(out.failed) == ["a", "b"]
    assert out.failed_seconds == (4 + 3 + 3) + 2 * 3
    assert out.num_aborted_tokens == 0, "they were lost before"


def test_others_do_not_wait_for_a_request_that_was_given_up() -> None:
    """c waits for the end of b, which is given up at 6."""
    rows = [trace_row("a", 0.0, 10, 10), trace_row("b", 1.0, 10, 1)]
    rows.append(trace_row("c", 0.0, 10, 1, after=("b",), think_time_s=2.0))
    plan = ClientPlan(timeout_s=5.0)
    out = simulate(Trace(tuple(rows)), step_time=ROUND, limits={"max_num_seqs": 1}, clients=plan)
    assert [(record.request_id, record.arrival_s) for record in out.records] == [("a", 0.0), ("c", 8.0)]


def test_online_calibration_sees_only_whole_outputs() -> None:
    trace = random_trace(150, seed=1, rate_rps=60.0)
    calibration = Correction()
    out = simulate(trace, clients=STORM, calibration=calibration)
    assert out.num_given_up > 0
    num = sum(calibration.metrics(name)["num_outputs"] for name in calibration.served_models)
    assert num == len(out.records)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    num=st.integers(1, 3),
    rate_rps=st.sampled_from([5.0, 40.0, 300.0]),
    plan=st.builds(
        ClientPlan,
        timeout_s=st.floats(0.02, 3.0),
        max_retries=st.integers(0, 4),
        retry_after_s=st.sampled_from([0.0, 0.05, 1.0]),
    ),
    horizon_s=st.none() | st.floats(0.1, 4.0),
    num_kv_blocks=st.sampled_from([20, 120]),
    plans_ahead=st.booleans(),
)
def test_every_request_that_arrives_ends_once_or_is_unfinished(
    seed: int, num: int, rate_rps: float, plan: ClientPlan, horizon_s: float | None, num_kv_blocks: int, plans_ahead: bool
) -> None:  # fmt: skip
    """Arrived = finished + refused + failed + unfinished; and the time in the system is that of all of them (Little's law)."""
    trace = random_trace(60, seed=seed, rate_rps=rate_rps)
    more: dict[str, Any] = {"num": num, "clients": plan, "limits": {"num_kv_blocks": num_kv_blocks}}
    if plans_ahead:
        more["step_time"] = RooflineStepTime(model="llama-3-8b", gpu="l40s", overhead_s=0.03)
    if horizon_s is None:
        out = simulate(trace, **more)
        total_s = sum(record.ttlt_s for record in out.records) + out.failed_seconds
        assert out.request_seconds == pytest.approx(total_s)
        for record in out.records:
            assert record.arrival_s <= record.first_scheduled_s <= record.first_token_s <= record.finish_s
        return
    out = simulate(trace, horizon_s=horizon_s, **more)
    delay_s = delays_of(more.get("step_time")).frontend_s
    arrived = sum(row.arrival_s + delay_s <= horizon_s for row in trace.requests)
    assert len(out.records) + len(out.refused) + len(out.failed) + out.num_unfinished == arrived


def overload(**changes: Any) -> dict[str, Any]:
    """Metrics of a replica with 1.5 times the load that it can serve; clients have a target of 10 s to the first token."""
    workload = Workload(num_requests=1500, classes=(RequestClass(weight=1, ttft_slo_s=10.0),))
    return run_simulation(SimulationConfig(workload=workload, load=1.5, **changes)).metrics


def test_retries_keep_an_overload_going_and_aborts_end_it() -> None:
    """Without time-outs the queue grows, and most requests are late. Clients that leave in time make room for others; those
    that send again bring the load back, with what the engine has done for them in vain."""
    patient = overload()
    leaving = overload(clients=ClientPlan(timeout_s=10.0))
    goodput = {
        num: overload(clients=ClientPlan(timeout_s=10.0, max_retries=num, retry_after_s=1.0))
        for num in (1, 3)
    }
    assert leaving["goodput_rps"] > 2 * patient["goodput_rps"]
    assert leaving["goodput_rps"] > goodput[1]["goodput_rps"] > goodput[3]["goodput_rps"]
    for metrics in (leaving, *goodput.values()):
        assert metrics["littles_law_error"] < 1e-9
        assert metrics["num_finished"] + metrics["num_failed"] == 1500
        assert metrics["clients"]["num_given_up"] == metrics["num_failed"] > 0
    assert "clients" not in patient
    assert 0 == leaving["clients"]["num_retries"] < goodput[1]["clients"]["num_retries"]
    assert goodput[1]["clients"]["num_retries"] < goodput[3]["clients"]["num_retries"]


def test_the_configuration_of_clients() -> None:
    for changes, text in (
        ({"timeout_s": 0.0}, "clients.timeout_s: got 0"),
        ({"timeout_s": 1.0, "max_retries": -1}, "clients.max_retries: got -1"),
        ({"timeout_s": 1.0, "retry_after_s": -1.0}, "clients.retry_after_s: got -1"),
        ({"max_retries": 2}, "clients.max_retries: got 2; allowed: 0 without timeout_s"),
        ({"retry_after_s": 2.0}, "clients.retry_after_s: got 2.0; allowed: 0 without timeout_s"),
    ):
        with pytest.raises(InputError, match=re.escape(text)):
            ClientPlan(**changes)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="none of which finished: its client gave up"):
        overload(clients=ClientPlan(timeout_s=1e-6))
