"""Event sources of a simulated engine: closed loops, conversations, predictions."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_core.errors import InputError
from scheduler_core.policies import make_policy
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from scheduler_core.simulator.loop import Simulation, SimulationOutcome
from scheduler_core.simulator.predictions import Predictions
from scheduler_core.simulator.replica import PrefixCache
from scheduler_core.simulator.sources import ClosedLoop
from scheduler_core.simulator.trace import Trace
from tests.scheduler_core.helpers import ROUND, random_trace, trace_row


def run(trace: Trace, **more: object) -> SimulationOutcome:
    core = Scheduler(SchedulerConfig(num_kv_blocks=200), make_policy("fcfs"))
    return Simulation(trace, core, ROUND, Predictions(), **more).run()  # type: ignore[arg-type]


def test_a_client_sends_its_next_request_when_it_has_its_answer_and_has_thought() -> None:
    """Two clients, three requests of 10 prompt and 2 output tokens: 3 s for the first two together (2 prompts: 3 s, then
    1 s), c when the first answer is there and 5 s of thought are over."""
    trace = Trace(tuple(trace_row(name, 2.0 + place, 10, 2) for place, name in enumerate("abc")))
    out = run(trace, clients=ClosedLoop(num_clients=2, think_time_s=5.0))
    times = {record.request_id: (record.arrival_s, record.finish_s) for record in out.records}
    assert times == {"a": (2.0, 6.0), "b": (2.0, 6.0), "c": (11.0, 14.0)}


@given(st.integers(1, 6), st.floats(0.0, 3.0), st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_a_closed_loop_never_has_more_requests_under_way_than_clients(
    num: int, think_s: float, seed: int
) -> None:
    trace = random_trace(25, seed=seed, cap=20, most_prompt=30)
    clients = ClosedLoop(num_clients=num, think_time_s=think_s, rng=np.random.default_rng(seed))
    out = run(trace, clients=clients)
    assert len(out.records) == 25
    edges = [(record.finish_s, -1) for record in out.records]
    edges += [(record.arrival_s, 1) for record in out.records]
    under_way = np.cumsum([change for _, change in sorted(edges)])
    assert (under_way.max(), under_way.min()) == (num, 0)


def test_turns_wait_for_the_answer_before_and_find_their_prefix() -> None:
    """Turn 0: 20 tokens (3 s), 1 more step: ends at 4. Turn 1 thinks 2 s, comes at 6 with 40 tokens, 21 of them cached:
    1 + 1.9 s, 1 step: ends at 9.9. Turn 2 comes at its own time, 50."""
    rows = (
        trace_row("s0", 0.0, 20, 2, session_id="s"),
        trace_row("s1", 1.0, 40, 2, session_id="s", turn=1, think_time_s=2.0, prefix_tokens=21),
        trace_row("s2", 50.0, 60, 2, session_id="s", turn=2, think_time_s=2.0, prefix_tokens=41),
    )
    out = run(Trace(rows), prefix_cache_tokens=1000)
    assert [record.request_id for record in out.records] == ["s0", "s1", "s2"]
    assert [record.arrival_s for record in out.records] == [0.0, 6.0, 50.0]
    assert [record.finish_s for record in out.records] == pytest.approx([4.0, 9.9, 50 + 1 + 1.9 + 1])
    assert run(Trace(rows)).records[1].finish_s == pytest.approx(6 + 5 + 1), "nothing is kept without a cache"


def test_a_turn_after_a_refused_one_is_not_lost() -> None:
    rows = (
        trace_row("s0", 0.0, 5000, 2, session_id="s"),
        trace_row("s1", 1.0, 40, 2, session_id="s", turn=1, think_time_s=2.0),
    )
    out = run(Trace(rows))
    assert list(out.refused) == ["s0"]
    assert [(record.request_id, record.arrival_s) for record in out.records] == [("s1", 2.0)]
    without = Trace(tuple(replace(row, think_time_s=None) for row in rows))
    assert len(run(without, clients=ClosedLoop(num_clients=1)).records) == 1


def test_the_conversation_used_longest_ago_is_forgotten() -> None:
    cache = PrefixCache(60)
    rows = {name: trace_row(name, 0.0, 20, 5, session_id=name, prefix_tokens=10) for name in "abc"}
    for row in (rows["a"], rows["b"]):
        cache.keep(row)
    assert cache.hit(rows["a"]) == 10
    cache.keep(rows["c"])
    assert ([cache.hit(rows[name]) for name in "abc"], cache.num_tokens) == ([10, 0, 10], 50)
    cache.keep(trace_row("a2", 0.0, 90, 5, session_id="a"))
    assert cache.num_tokens == 0, "a turn larger than the cache is not kept"


def test_think_times_and_clients_do_not_go_together() -> None:
    rows = (
        trace_row("a", 0, 5, 5, session_id="s"),
        trace_row("b", 0, 5, 5, session_id="s", turn=1, think_time_s=1.0),
    )
    with pytest.raises(InputError, match="clients"):
        run(Trace(rows), clients=ClosedLoop(num_clients=2))
