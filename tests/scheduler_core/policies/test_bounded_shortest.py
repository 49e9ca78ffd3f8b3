"""The default order: what it gains, when it is given up, and its parts."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_core.adapters.live_order import order_policy
from scheduler_core.errors import InputError
from scheduler_core.policies.bounded_shortest import BoundedShortest
from scheduler_core.policies.fcfs_estimate import ArrivalOrder, Load, RecentValues
from scheduler_core.request import RequestState
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.config import SimulationConfig
from scheduler_core.simulator.run import run_simulation
from scheduler_core.simulator.step_time import saturation_rate_rps
from scheduler_core.simulator.trace import Trace
from scheduler_core.simulator.trace_predictions import Predictions, oracle_predictions
from tests.scheduler_core.helpers import predicted, request, run_step, scheduler, trace_row

CONFIG = SimulationConfig(trace="test", policy="fcfs", scheduler=SchedulerConfig(max_num_seqs=16))
#: Requests: choice, work, wait.
EVENTS = st.tuples(st.integers(0, 99), st.integers(1, 500), st.integers(0, 90))


def trace_of(seed: int, load: float, num: int = 800, *, is_bursty: bool = False) -> Trace:
    """Log-normal lengths, Poisson arrivals or ones in bursts of 40."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(4.5, 1.0, num), 1, 2000).astype(int)
    rows = [trace_row(f"r{index}", 0.0, 50, int(length), 2000) for index, length in enumerate(lengths)]
    trace = Trace(tuple(rows), source="test")
    rate = load * saturation_rate_rps(trace, CONFIG.scheduler, CONFIG.make_step_time())
    gaps = rng.exponential(1.0 / rate, num)
    if is_bursty:
        gaps = np.where(np.arange(num) % 40 == 0, 40.0 * gaps, 0.0)
    times = np.cumsum(gaps).tolist()
    rows = [replace(row, arrival_s=time) for row, time in zip(rows, times, strict=True)]
    return Trace(tuple(rows), source="test")


def random_predictions(trace: Trace, seed: int) -> Predictions:
    """Lengths of other requests."""
    lengths = np.random.default_rng([seed, 7]).permutation([row.output_tokens for row in trace.requests])
    return _predictions(trace, [float(length) for length in lengths])


def reversed_predictions(trace: Trace) -> Predictions:
    """The longest are predicted the shortest."""
    return _predictions(trace, [20_000.0 / row.output_tokens for row in trace.requests])


def _predictions(trace: Trace, medians: list[float]) -> Predictions:
    pairs = zip(trace.requests, medians, strict=True)
    return Predictions("test", {row.request_id: predicted(median, 0.3) for row, median in pairs})


def waits(
    policy: str, trace: Trace, predictions: Predictions, of: str = "queueing_delay_s", **parameters: float
) -> np.ndarray:
    """Seconds from arrival to admission, or another property of the records, in the order of the trace."""
    config = replace(CONFIG, policy=policy, policy_parameters=parameters)
    records = run_simulation(config, trace=trace, predictions=predictions).records
    by_id = {record.request_id: getattr(record, of) for record in records}
    return np.array([by_id[row.request_id] for row in trace.requests])


def excess(ours: np.ndarray, fcfs: np.ndarray) -> float:
    """Largest wait over what the promise allows at ratio 1: the own wait under FCFS, or the P99 there."""
    return float((ours / np.maximum(fcfs, np.quantile(fcfs, 0.99))).max())


@given(st.lists(EVENTS, max_size=150), st.integers(0, 99))
def test_who_is_due_is_what_the_definition_gives(events: list[tuple[int, int, int]], now: int) -> None:
    """Requests come, are overtaken and leave; numbers are such that sums are exact."""
    waiting, expected = ArrivalOrder(), {}
    waiting.set_bound(1.25, 20.0, 40.0, 1 / 64)
    for order, (choice, work, wait_s) in enumerate(events):
        state = RequestState(request(f"r{order}", prompt=1, cap=9), order=order)
        waiting.add(state, wait_s, work)
        expected[order] = [state, wait_s, work, 0.0]
        if choice % 2:
            chosen = sorted(expected)[choice % len(expected)]
            leaving, _, work, _ = expected.pop(chosen)
            waiting.remove(leaving)
            waiting.overtake(leaving, work)
            for earlier in expected:
                expected[earlier][3] += work * (earlier < chosen)
    due, ahead = [], 0.0
    for order, (_, wait_s, work, overtaken) in sorted(expected.items()):
        service_s = work / 64
        longest_s = min(1.25 * max(wait_s, 20.0), 1.25 * max(wait_s + service_s, 40.0) - service_s)
        if overtaken / 64 >= longest_s - wait_s or longest_s - ahead / 64 <= now:
            due.append(order)
        ahead += work
    assert waiting.orders(waiting.due(now, 1 / 64)).tolist() == due
    assert waiting.work_behind(0) == pytest.approx(ahead)


def test_bursts_are_no_overload() -> None:
    """Bursts of 20 requests that keep the engine busy for 20 s: how often the load is surely above 1.05."""

    def share(load: float, seed: int) -> float:
        estimate, bounds = Load(), []
        for time_s in np.cumsum(np.random.default_rng(seed).exponential(20.0 / load, 300)).tolist():
            for _ in range(20):
                estimate.arrived(time_s, 1.0, 1.0)
            bounds.append(estimate.lower_bound(1.0, 1.0))
        return float(np.mean(np.array(bounds[150:]) > 1.05))

    assert np.mean([share(0.95, seed) for seed in range(20)]) < 0.1
    assert np.mean([share(1.25, seed) for seed in range(20)]) > 0.8


def test_a_prediction_after_the_admission_counts_as_one_before() -> None:
    """In the load and in what runs; after short requests, whose mean stands for the unknown length."""
    loads = []
    for is_late in (False, True):
        policy = BoundedShortest()
        for order in range(200):
            max_tokens = 8 if order < 100 else 800
            now = float(order)
            state = RequestState(request(f"r{order}", now, prompt=1, cap=max_tokens), order=order)
            policy.on_arrival(state, now)
            if is_late:
                policy.on_admit(state, now)
            state.apply_prediction(predicted(max_tokens / 2, 0.3))
            policy.on_prediction(state)
            if not is_late:
                policy.on_admit(state, now)
        loads.append((policy._load.lower_bound(0.001, 0.1), policy._running.remaining(200.0, 1.0)))
    assert loads[0] == pytest.approx(loads[1])


def test_most_of_the_gain_is_kept_in_an_overload_that_starves_others() -> None:
    trace = trace_of(1, 1.2, 2000)
    predictions = oracle_predictions(trace)
    fcfs, shortest, ours = (waits(name, trace, predictions) for name in ("fcfs", "ssjf", "bounded_shortest"))
    assert excess(shortest, fcfs) > 3.0
    assert excess(ours, fcfs) < 1.4
    assert ours.mean() < 0.8 * fcfs.mean()


@pytest.mark.parametrize("kind", ["none", "random", "reversed"])
def test_without_useful_predictions_it_is_first_come_first_served(kind: str) -> None:
    trace = trace_of(2, 1.2, 2000)
    fcfs = waits("fcfs", trace, Predictions())
    predictions = {
        "none": Predictions(), "random": random_predictions(trace, 2), "reversed": reversed_predictions(trace),
    }[kind]  # fmt: skip
    ours = waits("bounded_shortest", trace, predictions)
    assert ours.mean() <= 1.05 * fcfs.mean()
    assert np.quantile(ours, 0.99) <= 1.05 * np.quantile(fcfs, 0.99)


def test_predictions_that_become_useless_are_given_up_and_used_again_when_they_are_right() -> None:
    trace = trace_of(3, 1.2, 3000)
    right, wrong = oracle_predictions(trace).by_id, random_predictions(trace, 3).by_id
    mixed = {name: wrong[name] if 1000 <= at < 2000 else right[name] for at, name in enumerate(right)}
    fcfs = waits("fcfs", trace, Predictions())
    ours = waits("bounded_shortest", trace, Predictions("test", mixed))
    lengths = np.array([row.output_tokens for row in trace.requests])
    short = lengths < np.median(lengths)
    last = np.arange(len(lengths)) > 2400
    assert ours[last & short].mean() < 0.9 * fcfs[last & short].mean()
    assert excess(ours, fcfs) < 1.6


@pytest.mark.parametrize("before", ["short outputs", "low load"])
def test_an_overload_is_noticed_whatever_was_before(before: str) -> None:
    """Short requests just before it, or many at a low load and a long time without any."""
    first = trace_of(5, 0.5, 200).requests
    if before == "short outputs":
        first = tuple(replace(row, output_tokens=8, max_tokens=8, arrival_s=0.0) for row in first[:60])
    pause_s = 10.0 if before == "short outputs" else 10_000.0
    start_s = first[-1].arrival_s + pause_s
    first = tuple(replace(row, request_id=f"before-{row.request_id}") for row in first)
    overload = trace_of(6, 1.25, 600).requests
    rows = [*first, *(replace(row, arrival_s=start_s + row.arrival_s) for row in overload)]
    trace = Trace(tuple(rows), source="test")
    predictions = oracle_predictions(trace)
    fcfs, ours = (waits(name, trace, predictions)[len(first) :] for name in ("fcfs", "bounded_shortest"))
    assert ours.mean() < 0.65 * fcfs.mean()


def test_two_requests_do_not_preempt_each_other_forever() -> None:
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 2, "num_kv_blocks": 11, "kv_block_tokens": 2}
    core = scheduler("bounded_shortest", batching="stage_aware", **limits)
    for number, prompt in enumerate((12, 16)):
        core.add(request(f"r{number}", float(number), prompt=prompt, cap=3), float(number))
        core.update(f"r{number}", predicted(90.0 - 50 * number), float(number))
        run_step(core, float(number))
    for step in range(100):
        if core.num_waiting + core.num_running:
            run_step(core, 2.0 + step)
    assert core.counters.num_finished == 2
    assert core.counters.num_preemptions <= 2


def test_it_is_refused_where_keys_are_sent_once() -> None:
    with pytest.raises(InputError, match="bounded_shortest"):
        order_policy("bounded_shortest", {}, sent_once=True)
    order_policy("bounded_shortest", {})


@pytest.mark.parametrize("num", [0, 1, 2, 7, 8, 9, 30])
def test_recent_values_are_those_of_the_window(num: int) -> None:
    values = np.random.default_rng(num).exponential(size=num)
    recent = RecentValues(8)
    for value in values.tolist():
        recent.append(value)
    latest = 2.0 * values[-8:] if num else np.zeros(1)
    recent.scale(2.0)
    assert (len(recent), recent.mean) == (min(num, 8), pytest.approx(latest.mean()))
    assert recent.quantile(0.99) == pytest.approx(np.quantile(latest, 0.99))
    recent.clear()
    assert (len(recent), recent.mean, recent.quantile(0.5)) == (0, 0.0, 0.0)
