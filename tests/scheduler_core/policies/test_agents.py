"""Policies for shared prefixes and sessions: orders by hand; full simulations of agents' sessions."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from scheduler_core.engine.decision_log import DecisionLog
from scheduler_core.policies import POLICIES, make_policy
from scheduler_core.policies.base import Policy
from scheduler_core.policies.continuum import time_to_live_s
from scheduler_core.policies.uniboost import boost_s
from scheduler_core.policies.work_left import TokenTimes, work_left_s
from scheduler_core.replay import replay
from scheduler_core.request import RequestState, Segment
from scheduler_core.routing import ROUTERS
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.config import ClusterConfig
from scheduler_core.simulator.run import SimulationResult
from scheduler_core.simulator.trace import Trace
from tests.scheduler_core.helpers import FixedCosts, FixedEngine, prediction, request, simulate, trace_row

#: Policies that read the prefix cache or sessions, with the parameters that make them.
CASES: dict[str, tuple[str, dict[str, float]]] = {
    name: (name, {}) for name, kind in POLICIES.items() if kind.inputs & {"cached", "session", "costs"}
}
CASES |= {
    f"{name}, work left": (name, {"work_left": True}) for name in ("bounded_shortest", "ssjf", "sept", "tie")
}
CASES["hrrn, with outputs"] = ("hrrn", {"count_outputs": True})


def policy(name: str, capacity_tokens: int = 1000, **parameters: float) -> Policy:
    rule = make_policy(name, parameters)
    rule.bind(FixedEngine(capacity_tokens))
    return rule


def state(name: str, order: int, prompt: int, cached: int = 0, **more: Any) -> RequestState:
    """A waiting request; its arrival is its order, in seconds."""
    item = RequestState(request(name, float(order), prompt=prompt, cap=1000, **more), order=order)
    item.cached_tokens = cached
    return item


def order_of(rule: Policy, *states: RequestState, now: float = 0.0) -> list[str]:
    """Names of the waiting requests in the order of keys that are recomputed now."""
    rule.on_pressure(len(states), 8)
    keys = {item.request_id: (rule.key(item, now), item.request.arrival_s) for item in states}
    return sorted(keys, key=keys.__getitem__)


def arrive(rule: Policy, *states: RequestState) -> None:
    for item in states:
        rule.on_arrival(item, item.request.arrival_s)


def end(rule: Policy, item: RequestState, now: float, outputs: int = 1, ended_by: str = "") -> None:
    """Ends a running request."""
    item.num_output_tokens, item.last_token_s, item.ended_by = outputs, now, ended_by
    rule.on_finish(item)


def test_work_left_is_uncached_prompt_copy_and_remaining_output() -> None:
    """500 tokens, 300 cached, 100 of them on the host, 40 outputs expected: 200 + 10 + 400 ms; after 15 outputs less."""
    times = TokenTimes.of(FixedCosts())
    item = state("a", 0, 500, 300)
    item.host_cached_tokens = 100
    assert work_left_s(item, times, 40) == pytest.approx(0.2 + 0.01 + 0.4)
    item.num_output_tokens = 15  # after a preemption they are to be computed again as well
    assert work_left_s(item, times, 40) == pytest.approx(0.215 + 0.01 + 0.25)
    item.cached_tokens, item.host_cached_tokens = 515, 0
    assert work_left_s(item, times) == pytest.approx(1e-3)


@pytest.mark.parametrize("name", ["ssjf", "sept", "tie"])
def test_a_long_prompt_comes_after_a_longer_output_only_by_work_left(name: str) -> None:
    """b: 10 outputs after 900 uncached tokens, 1 s; a: 40 after 100, 0.5 s. With 850 of them cached b takes 0.15 s."""
    a, b = state("a", 0, 100), state("b", 0, 900)
    a.prediction, b.prediction = prediction(40.0, 1e-6), prediction(10.0, 1e-6)
    for left, cached, expected in ((False, 0, "ba"), (True, 0, "ab"), (True, 850, "ba")):
        rule = policy(name, work_left=left)
        b.cached_tokens = cached
        arrive(rule, a, b)
        assert "".join(order_of(rule, a, b)) == expected
        assert rule.reads("cached") == rule.reads("costs") == left
        assert not rule.on_pressure(2, 8)  # not again without an event
        rule.on_admit(a, 1.0)
        assert rule.on_pressure(1, 8) == left


def test_hrrn_counts_waits_in_prefill_times() -> None:
    """a waits 10 s for 1 s of prefill, ratio 11; b 5 s for 0.4 s, 13.5; all but 200 tokens of a cached: 51."""
    rule, a, b = policy("hrrn"), state("a", 0, 1000), state("b", 5, 400)
    arrive(rule, a, b, state("c", 10, 1))
    assert order_of(rule, a, b) == ["b", "a"]
    assert rule.key(b, 99.0) == pytest.approx(-13.5)
    a.cached_tokens = 800
    rule.on_admit(state("c", 10, 1), 10.0)
    assert order_of(rule, a, b) == ["a", "b"]
    assert rule.key(a, 99.0) == pytest.approx(-51.0)
    counting = policy("hrrn", count_outputs=True)
    b.prediction = prediction(60.0, 1e-6)
    arrive(counting, b, state("c", 10, 1))
    order_of(counting, b)
    assert counting.key(b, 10.0) == pytest.approx(-1.0 - 5.0 / (0.4 + 0.6), rel=1e-4)


def test_longest_prefix_comes_first() -> None:
    rule = policy("longest_prefix")
    states = [state("a", 0, 100, 10), state("b", 1, 900, 300), state("c", 2, 50), state("d", 3, 400, 300)]
    assert order_of(rule, *states) == ["b", "d", "a", "c"]


def test_depth_first_takes_the_heaviest_branch_and_its_deepest_requests() -> None:
    """Three wait below x (one of them at x itself, one deeper in y, one in z), two below w, one has no prefix.

    x: y and z have one each, y came first; then x itself. w: the longer prefix first.
    """

    def content(*keys: str) -> tuple[Segment, ...]:
        return tuple(Segment(key, 100) for key in keys)

    states = [
        state("none", 0, 500, content=content("x")),
        state("w_short", 1, 500, 50, content=content("w")), state("w_long", 2, 500, 80, content=content("w")),
        state("x", 3, 500, 100, content=content("x", "v")),
        state("xy", 4, 500, 150, content=content("x", "y")), state("xz", 5, 500, 200, content=content("x", "z")),
    ]  # fmt: skip
    rule = policy("depth_first")
    arrive(rule, *states)
    assert order_of(rule, *states) == ["xy", "xz", "x", "w_long", "w_short", "none"]
    rule.on_admit(states[4], 6.0)
    left = [item for item in states if item.request_id != "xy"]
    assert order_of(rule, *left) == ["w_long", "w_short", "xz", "x", "none"]


def test_uniboost_of_the_waiting_queue_boosts_by_uncached_work() -> None:
    """Phi = a - b(w): 900 of 1,000 tokens cached, w = 0.1 s; gamma is that of the latencies' tail."""
    rule, a = (
        policy("uniboost_uncached", gamma_per_s=0.5, update_every=5, window=5, smoothing=1.0),
        state("a", 3, 1000, 900),
    )
    arrive(rule, a)
    order_of(rule, a)
    assert rule.key(a, 9.0) == pytest.approx(3.0 - boost_s(0.1, 0.5))
    for number in range(5):
        end(rule, state(f"e{number}", 0, 10), float(number + 1))
    order_of(rule, a)
    gamma = math.log(5.0) / (np.quantile(range(1, 6), 0.99) - np.quantile(range(1, 6), 0.95))
    assert rule.key(a, 9.0) == pytest.approx(3.0 - boost_s(0.1, float(gamma)))


def test_thunder_agent_pauses_the_smallest_idle_session_and_resumes_in_groups() -> None:
    """1,000 tokens of memory. a (300) and b (500) act; c (150) is new and fits. The next turn of b grows to 700: a is paused;
    its next turn waits until c's session ends, then comes before d, a new session that is smaller."""
    rule = policy("thunder_agent", buffer_tokens=0)

    def turn(name: str, order: int, prompt: int) -> RequestState:
        item = state(f"{name}{order}", order, prompt, session=name)
        rule.on_arrival(item, item.request.arrival_s)
        return item

    def admitted(*states: RequestState) -> list[str]:
        rule.on_pressure(len(states), 8)
        return [item.request_id for item in states if rule.may_admit(item, 99.0)]

    for item in (turn("a", 0, 299), turn("b", 1, 499)):
        assert admitted(item) == [item.request_id]
        rule.on_admit(item, 2.0)
        end(rule, item, 3.0, ended_by="tool_use")
    c = turn("c", 4, 150)
    assert admitted(c) == ["c4"]
    rule.on_admit(c, 4.0)
    b = turn("b", 5, 700)
    assert admitted(b) == ["b5"]
    rule.on_admit(b, 5.0)
    a, d = turn("a", 6, 301), turn("d", 7, 200)
    assert admitted(a, d) == []
    assert order_of(rule, a, d) == ["a6", "d7"]
    end(rule, c, 8.0, ended_by="tool_use")  # it may come back, but a's turn waits
    assert admitted(a, d) == []
    end(rule, b, 9.0, ended_by="end_turn")
    assert admitted(a, d) == ["a6", "d7"]
    rule.on_admit(a, 9.0)
    rule.on_admit(d, 9.0)
    e = turn("e", 10, 900)
    assert admitted(e) == []
    rule.on_arrival(state("f", 1811, 10), 1811.0)
    assert admitted(e) == ["e10"]  # held for half an hour


def test_time_to_live_has_the_largest_expected_gain() -> None:
    """Pauses 1, 1, 2, ..: half of them 1 s, the others 20 s. Worth 10 s, at 0.1 s a second: 5 - 0.1 < 10 - 2; at 0.5: 4.5 > 0."""
    pauses = [1.0, 20.0] * 10
    assert time_to_live_s(pauses, 10.0, 0.1, 2.0) == 20.0
    assert time_to_live_s(pauses, 10.0, 0.5, 2.0) == 1.0
    assert time_to_live_s(pauses, 10.0, 6.0, 2.0) == 0.0
    assert time_to_live_s([], 10.0, 0.5, 2.0) == pytest.approx(2.0 * math.log(10.0))
    assert time_to_live_s([], 0.5, 0.5, 2.0) == 0.0


def test_continuum_keeps_contexts_and_serves_who_comes_in_time_first() -> None:
    """The context of a, 200 of 1,000 tokens, is worth 0.2 s: 2 ln(0.2 / (0.2 * 2)) < 0, so it is not kept. After waits of 10 s
    in the mean it is kept for 2 ln(10.2 / 0.4) = 6.5 s; meanwhile no 900 tokens are admitted."""
    rule = policy("continuum")
    a = state("a0", 0, 199, session="a")
    arrive(rule, a)
    rule.on_admit(a, 0.0)
    end(rule, a, 1.0, ended_by="tool_use")
    rule.on_pressure(0, 8)
    assert rule.retention_key("a") == 0.0
    for number in range(400):
        waits = state(f"w{number}", 0, 10)
        arrive(rule, waits)
        rule.on_admit(waits, 10.0)
        end(rule, waits, 10.0)
    a, b, c = (
        state(name, at, size, session=name[0])
        for name, at, size in (("a1", 3, 200), ("b0", 2, 900), ("c0", 4, 100))
    )
    arrive(rule, b, a)
    rule.on_admit(a, 3.0)
    end(rule, a, 3.0, outputs=0, ended_by="tool_use")
    rule.on_pressure(1, 8)
    assert rule.retention_key("a") > rule.retention_key("b") == rule.retention_key("") == 0.0
    assert not rule.may_admit(b, 3.0)
    arrive(rule, c)
    late = state("a2", 9, 200, session="a")
    assert rule.may_admit(c, 4.0)
    arrive(rule, late)  # 6 s later: in time
    assert order_of(rule, b, c, late) == ["a2", "b0", "c0"]
    rule.on_admit(late, 9.0)
    end(rule, late, 9.0, ended_by="end_turn")
    rule.on_pressure(2, 8)
    assert rule.retention_key("a") == 0.0
    assert rule.may_admit(b, 9.0)


@pytest.mark.mend  # they stayed until a turn ended, for example for as long as the engine of a proxy was away
def test_continuum_forgets_sessions_whose_turns_were_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_core.policies.continuum._MAX_SESSIONS", 20)
    rule: Any = policy("continuum")
    for number in range(100):
        item = state(f"r{number}", number, 10, session=f"s{number}")
        arrive(rule, item)
        rule.on_finish(item)
        assert len(rule._sessions) <= 20


def agents(num_sessions: int, turns: int, longest: int, num_single: int = 0, seed: int = 0) -> Trace:
    """Growing sessions in a closed loop that share a system prompt of 500 tokens; and single requests without content."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(num_sessions):
        session, before = f"s{number}", ()
        context = 500 + int(rng.integers(500, longest))
        for turn in range(turns):
            output = int(rng.integers(10, 100))
            rows.append(
                trace_row(
                    f"{session}.{turn}", float(rng.uniform(0, 10)) if not turn else 0.0, context, output, 1000,
                    session_id=session, turn=turn, after=before, think_time_s=float(rng.exponential(2.0)),
                    content=(Segment("system", 500), Segment(session, context - 500)),
                    ended_by="end_turn" if turn == turns - 1 else "tool_use", prediction=prediction(output, 0.3),
                )
            )  # fmt: skip
            before = (f"{session}.{turn}",)
            context += output + int(rng.integers(20, 1000))
    rows += [
        trace_row(f"r{index}", float(rng.uniform(0, 60)), int(rng.integers(1, 300)), int(rng.integers(1, 40)))
        for index in range(num_single)
    ]
    return Trace(tuple(rows), source="test")


def run(
    case: str, trace: Trace, *, exact: bool = False, **limits: Any
) -> tuple[SimulationResult, DecisionLog]:
    name, parameters = CASES.get(case, (case, {}))
    log = DecisionLog()
    sizes: Mapping[str, Any] = {"num_kv_blocks": 2500, "max_num_seqs": 32, **limits}
    result = simulate(
        trace, name, policy_parameters=parameters, exact_steps=exact, log=log, predictor="trace",
        scheduler=SchedulerConfig(**sizes),
    )  # fmt: skip
    return result, log


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("host_blocks", [0, 4000])
def test_sessions_beyond_the_memory_are_served_in_full_exactly_and_replayed(
    case: str, host_blocks: int
) -> None:
    """Contexts of 16 sessions take about twice the memory."""
    trace = agents(16, 4, 10_000, num_single=20)
    result, log = run(case, trace, num_host_cache_blocks=host_blocks)
    assert {item.request_id: item.output_tokens for item in result.records} == {
        row.request_id: row.output_tokens for row in trace.requests
    }
    exact, _ = run(case, trace, exact=True, num_host_cache_blocks=host_blocks)
    for ours, single in zip(result.records, exact.records, strict=True):
        assert replace(ours, max_tbt_s=None) == replace(single, max_tbt_s=None)
    again = replay(log.entries)
    again.validate()
    assert again.counters.num_finished == len(trace)


@pytest.mark.mend  # A session moved to another replica before what earlier ones of the combined steps evict was chosen.
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_combined_steps_are_exact_with_sessions_that_move_between_replicas(policy: str) -> None:
    """Contexts beyond the memory, under every policy; seeds with which working_set differed."""
    limits = SchedulerConfig(num_kv_blocks=900, max_num_seqs=16)
    for seed in (1, 3):
        trace = agents(12, 4, 6000, seed=seed)
        combined, exact = (
            simulate(
                trace, policy, exact_steps=exact, predictor="trace", scheduler=limits,
                cluster=ClusterConfig(num_replicas=2),
            ).records
            for exact in (False, True)
        )  # fmt: skip
        assert len({record.replica_id for record in exact}) == 2
        for ours, single in zip(combined, exact, strict=True):
            assert replace(ours, max_tbt_s=None) == replace(single, max_tbt_s=None)


@pytest.mark.mend  # A turn that came earlier than the next event seen by a combined step was routed by old numbers of tokens.
@pytest.mark.parametrize("router", sorted(ROUTERS))
def test_routers_see_the_same_with_combined_steps(router: str) -> None:
    """A closed loop, with seeds with which predicted_work differed."""
    limits = SchedulerConfig(num_kv_blocks=900, max_num_seqs=16)
    cluster = ClusterConfig(
        num_replicas=3, router=router, num_prefill_replicas=1 if router == "disaggregated" else 0
    )
    for seed in (2, 5):
        trace = agents(12, 4, 6000, seed=seed)
        combined, exact = (
            simulate(
                trace, "fcfs", exact_steps=exact, predictor="trace", scheduler=limits, cluster=cluster
            ).records
            for exact in (False, True)
        )
        for ours, single in zip(combined, exact, strict=True):
            assert replace(ours, max_tbt_s=None) == replace(single, max_tbt_s=None)


def measured(case: str, trace: Trace) -> tuple[float, float, float]:
    """Duration of a run in 256,000 tokens of memory, mean and longest time to first token."""
    records = run(case, trace, num_kv_blocks=16_000, max_num_batched_tokens=4096)[0].records
    waits = [item.first_token_s - item.arrival_s for item in records]
    return max(item.finish_s for item in records), float(np.mean(waits)), max(waits)


@pytest.mark.mend
def test_the_bounded_order_by_work_left_keeps_its_bound() -> None:
    """40 sessions of 12 turns in half of the memory that they need: no turn waits longer than 1.25 times the longest wait under
    first come, first served; shortest first lets some wait three times as long."""
    trace = agents(40, 12, 20_000)
    _, mean_s, longest_s = measured("fcfs", trace)
    bounded, shortest = (measured(f"{name}, work left", trace) for name in ("bounded_shortest", "sept"))
    assert bounded[1] < 0.95 * mean_s
    assert bounded[2] < 1.25 * longest_s
    assert shortest[1] < 0.5 * mean_s
    assert shortest[2] > 3.0 * longest_s


def test_orders_for_agents_gain_what_their_sources_say() -> None:
    """Rules for sessions keep contexts; orders by prefix find more of them in the cache; HRRN starves no one."""
    trace = agents(40, 12, 20_000)
    end_s, mean_s, longest_s = measured("fcfs", trace)
    for case, less, mean_less in (
        ("thunder_agent", 0.7, 0.5), ("continuum", 0.7, 0.5), ("longest_prefix", 0.9, 0.9), ("depth_first", 0.9, 0.9),
    ):  # fmt: skip
        of_case = measured(case, trace)
        assert of_case[0] < less * end_s, case
        assert of_case[1] < mean_less * mean_s, case
    hrrn = measured("hrrn", trace)
    assert hrrn[1] < 0.9 * mean_s
    assert hrrn[2] < 1.5 * longest_s
