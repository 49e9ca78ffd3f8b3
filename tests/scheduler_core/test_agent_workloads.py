"""Workloads whose prompts share prefixes: agent sessions in a closed loop, recorded and drawn, and groups with a shared prefix."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_core.errors import InputError
from scheduler_core.simulator.commands.simulate import main
from scheduler_core.simulator.config import SimulationConfig
from scheduler_core.simulator.loop import Simulation
from scheduler_core.simulator.run import run_simulation
from scheduler_core.simulator.trace import Trace, TraceRequest, load_trace, waits_for
from scheduler_core.simulator.trace_predictions import Predictions
from scheduler_core.simulator.workloads.agents import Agents, PauseDistribution
from scheduler_core.simulator.workloads.arrivals import Arrivals
from scheduler_core.simulator.workloads.lengths import Lengths, TokenDistribution
from scheduler_core.simulator.workloads.workload import RequestClass, Sessions, SharedPrefix, Workload
from tests.scheduler_core.helpers import ROUND, scheduler
from tests.scheduler_core.test_trace_content import context, num_shared


def turn(session: str, tokens: tuple[int, int, int], **more: Any) -> dict[str, Any]:
    """A row of a recording: input, known input and output tokens."""
    counts = dict(zip(("input_tokens", "cached_tokens", "output_tokens"), tokens, strict=True))
    common = {"agent": "main", "depth": 0, "time_s": 0.0, "stop": "tool_use", "think_time_s": 0.0}
    return {"session": session, "input_types": "tool_result"} | common | counts | more


#: A session of four turns with a compaction; its second turn starts two sub-agents. One of two turns.
RECORDED = [
    turn("a", (700, 0, 9), input_types="text"),
    turn("a", (900, 640, 8), think_time_s=3.0, time_s=5.0),
    turn("a", (1500, 896, 7), think_time_s=40.0, time_s=90.0),
    turn("a", (400, 128, 6), think_time_s=5.0, time_s=100.0, stop="end_turn"),
    turn("a", (100, 0, 5), agent="main/agent_001", time_s=9.0, input_types="text"),
    turn("a", (160, 64, 5), agent="main/agent_001", time_s=20.0, think_time_s=2.0, stop=""),
    turn("a", (120, 0, 4), agent="main/agent_002", time_s=10.0),
    turn("b", (3000, 0, 0), input_types="text+thinking"),
    turn("b", (3100, 2944, 50), think_time_s=float("nan"), input_types="text+tool_result", stop=None),
]


@pytest.fixture
def recording(tmp_path: Path) -> str:
    path = tmp_path / "sessions.parquet"
    pq.write_table(pa.Table.from_pylist(RECORDED), path)
    return str(path)


def by_id(rows: list[TraceRequest]) -> dict[str, TraceRequest]:
    return {row.request_id: row for row in rows}


def of_first(rows: list[TraceRequest], prompt_tokens: int) -> dict[str, TraceRequest]:
    """Rows of the first session that starts with such a prompt, by the rest of their ids."""
    first = next(row for row in rows if row.prompt_tokens == prompt_tokens and row.request_id.endswith("t0"))
    session = first.request_id.removesuffix("t0")
    names = [row.request_id for row in rows if row.session_id in (session,) or str(row.session_id).startswith(f"{session}/")]  # fmt: skip
    return {name.removeprefix(session): by_id(rows)[name] for name in names}


def test_recorded_sessions_keep_their_turns_and_the_parent_waits_for_its_sub_agents(recording: str) -> None:
    rows, problem = Agents(num_sessions=1, file=recording, ramp_up_s=0.0).requests(50, 0)
    assert problem == ""
    session = of_first(rows, 700)
    assert list(session) == ["t0", "t1", "/agent_001t0", "/agent_001t1", "/agent_002t0", "t2", "t3"]
    waits = waits_for(rows)
    name = session["t0"].session_id
    later = [*session.values()][1:]
    assert [[other.removeprefix(str(name)) for other in waits[row.request_id]] for row in later] == [
        ["t0"], ["t1"], ["/agent_001t0"], ["t1"], ["t1", "/agent_001t1", "/agent_002t0"], ["t2"],
    ]  # fmt: skip
    assert [row.think_time_s for row in later] == [3.0, 0.0, 2.0, 0.0, 40.0, 5.0]
    assert session["t2"].arrival_s - session["t1"].arrival_s == 42.0, "after the longer sub-agent"
    assert [row.ended_by for row in session.values()] == ["tool_use"] * 3 + [
        "",
        "tool_use",
        "tool_use",
        "end_turn",
    ]
    assert [row.category for row in session.values()] == ["text", "tool_result", "text"] + ["tool_result"] * 4
    for before, after, shared in (("t0", "t1", 640), ("t1", "t2", 896), ("t2", "t3", 128)):
        assert num_shared(context(session[before]), session[after].content) == shared
    assert num_shared(session["t1"].content, session["/agent_001t0"].content) == 0
    other = of_first(rows, 3000)
    assert [(row.output_tokens, row.think_time_s, row.ended_by) for row in other.values()] == [
        (1, other["t0"].think_time_s, "tool_use"), (50, 0.0, ""),
    ]  # fmt: skip
    assert {row.max_tokens for row in rows} == {50}


def test_sessions_are_shuffled_and_come_back_under_new_ids(recording: str) -> None:
    agents = Agents(num_sessions=1, file=recording)
    rows, _ = agents.requests(400, 0)
    starts = [row.prompt_tokens for row in rows if row.turn == 0 and "/" not in str(row.session_id)]
    assert all(set(pair) == {700, 3000} for pair in zip(starts[::2], starts[1::2], strict=False))
    assert len(set(zip(starts[::2], starts[1::2], strict=False))) == 2, "in both orders"
    assert len({row.request_id for row in rows}) == len(rows) == 400
    keys = [{segment.key for row in rows if row.session_id == name for segment in row.content}
            for name in {row.session_id for row in rows}]  # fmt: skip
    assert sum(map(len, keys)) == len(set.union(*keys)), "no session shares with another"
    first = next(row for row in rows if row.session_id == "s1")
    assert (first.after[0].startswith("s0"), first.think_time_s) == (True, 0.0)
    assert agents.requests(400, 1)[0] != rows
    assert agents.requests(100, 0)[0] == [replace(row, max_tokens=50) for row in rows[:100]]


def test_long_sessions_end_early_or_are_left_out_which_is_said(recording: str) -> None:
    rows, problem = Agents(num_sessions=1, file=recording, max_tokens_per_request=1400).requests(20, 0)
    assert problem.endswith("1400 tokens are left out: 1 of 2 sessions end early, 1 are left out")
    assert Counter(row.prompt_tokens for row in rows).keys() == {700, 900, 100, 160, 120}
    with pytest.raises(InputError, match="agents.max_tokens_per_request: got 60; allowed: more"):
        Agents(file=recording, max_tokens_per_request=60).requests(20, 0)
    rows, problem = Agents(
        num_sessions=1, file=recording, scale=0.1, max_tokens_per_request=140, max_tokens=3,
    ).requests(20, 0)  # fmt: skip
    assert "1 of 2 sessions end early, 1 are left out" in problem
    assert {(row.prompt_tokens, row.output_tokens) for row in rows} == {
        (70, 1),
        (90, 1),
        (10, 1),
        (16, 1),
        (12, 1),
    }
    assert {row.max_tokens for row in rows} == {3}


def test_turns_and_pauses_can_be_drawn_and_limited(recording: str) -> None:
    two = TokenDistribution(kind="fixed", low=2)
    rows, _ = Agents(file=recording, turns=two, pause=PauseDistribution(mu=0.0, sigma=0.0)).requests(200, 0)
    main = [row for row in rows if "/" not in str(row.session_id)]
    assert {row.turn for row in main} == {0, 1}
    assert {row.think_time_s for row in rows if row.turn} == {1.0}
    rows, _ = Agents(file=recording, max_pause_s=4.0).requests(200, 0)
    assert {row.think_time_s for row in rows if row.turn} == {3.0, 4.0, 2.0, 0.0}


@given(
    agents=st.builds(
        Agents,
        num_sessions=st.integers(1, 4),
        turns=st.sampled_from([TokenDistribution(kind="fixed", low=3), TokenDistribution(low=1, high=6)]),
        first_prompt=st.just(TokenDistribution(low=1, high=300)),
        growth=st.just(TokenDistribution(low=1, high=50)),
        output=st.just(TokenDistribution(low=1, high=20)),
        pause=st.just(PauseDistribution(mu=1.0)),
        max_pause_s=st.sampled_from([0.0, 5.0]),
        scale=st.sampled_from([0.07, 1.0, 1.7]),
        max_tokens_per_request=st.sampled_from([None, 60, 300]),
        max_tokens=st.sampled_from([None, 4]),
    ),
    seed=st.integers(0, 99),
)
@settings(max_examples=40)
def test_sessions_grow_and_their_number_is_constant(agents: Agents, seed: int) -> None:
    """Simulated: a turn arrives its pause after the end of the one before; a session starts when the one before it ends."""
    trace = Workload(num_requests=60, agents=agents).trace(seed)
    assert len(trace) == -(-60 // agents.num_sessions) * agents.num_sessions
    limit = agents.max_tokens_per_request or 10**9
    core = scheduler(num_kv_blocks=400, prefix_caching=True)
    out = Simulation(trace, core, ROUND, Predictions()).run()
    ended = {record.request_id: record for record in out.records}
    assert len(ended) == len(trace)
    waits = waits_for(trace.requests)
    sessions: dict[str, list[TraceRequest]] = {}
    for row in trace.requests:
        assert row.prompt_tokens + row.output_tokens <= limit
        sessions.setdefault(str(row.session_id), []).append(row)
        if row.request_id in waits:
            last = max(ended[name].finish_s for name in waits[row.request_id])
            assert row.think_time_s is not None
            assert ended[row.request_id].arrival_s == pytest.approx(last + row.think_time_s)
    for turns in sessions.values():
        turns.sort(key=lambda row: row.turn)
        for before, after in pairwise(turns):
            assert num_shared(context(before), after.content) == before.prompt_tokens + before.output_tokens
    firsts = [row for row in trace.requests if row.request_id not in waits]
    assert len(firsts) == agents.num_sessions
    assert all(row.arrival_s <= agents.ramp_up_s for row in firsts)


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([{"session": "a", "input_tokens": 3}], "row 1 column output_tokens: .*; allowed: a table with this column"),
        ([turn("", (3, 0, 1))], "row 1 column session: got ''"),
        ([turn("a", (0, 0, 1))], "row 1 column input_tokens: got 0; allowed: integers from 1"),
        ([turn("a", (3, 0, -1))], "row 1 column output_tokens: got -1; allowed: integers from 0"),
        ([turn("a", (3, 0, 1), think_time_s=-1.0)], "row 1 column think_time_s: got -1"),
        ([turn("a", (3, 0, 1), output_tokens=None)], "row 1 column output_tokens: got None"),
    ],
)  # fmt: skip
def test_recordings_that_are_none_are_named(rows: list[dict[str, Any]], named: str, tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "s.parquet")
    with pytest.raises(InputError, match=named):
        Agents(file=str(tmp_path / "s.parquet")).requests(5, 0)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Agents(num_sessions=0), "num_sessions"),
        (lambda: Agents(file="x", growth=TokenDistribution()), "agents.growth"),
        (lambda: Agents(file="missing.parquet").requests(5, 0), "agents.file"),
        (lambda: PauseDistribution(nu=0.0), "nu"),
        (lambda: Workload(agents=Agents(), arrivals=Arrivals(rate_rps=2.0)), "arrivals"),
        (lambda: Workload(agents=Agents(), classes=(RequestClass(),)), "classes"),
        (lambda: Workload(agents=Agents(), sessions=Sessions()), "sessions, agents"),
        (lambda: SharedPrefix(num_groups=0), "num_groups"),
    ],
)
def test_a_wrong_value_is_named(make: Any, named: str) -> None:
    with pytest.raises(InputError) as caught:
        make()
    assert caught.value.field == named


def test_groups_share_their_prefix_and_nothing_else() -> None:
    lengths = Lengths(prompt=TokenDistribution(low=1, high=20), output=TokenDistribution(low=1, high=5))
    prefix = SharedPrefix(num_groups=7, prefix=TokenDistribution(low=100, high=200))
    rows = Workload(num_requests=70, lengths=lengths, shared_prefix=prefix).trace(3).requests
    plain = Workload(num_requests=70, lengths=lengths).trace(3).requests
    groups = Counter(row.content[0] for row in rows)
    assert set(groups.values()) == {10}
    for row, without in zip(rows, plain, strict=True):
        shared = row.content[0].num_tokens
        assert (row.arrival_s, row.prompt_tokens - shared) == (without.arrival_s, without.prompt_tokens)
        for other in rows:
            expected = shared if other.content[0] == row.content[0] else 0
            assert num_shared(row.content, other.content) == (row.prompt_tokens if other is row else expected)


def test_agents_without_turns_before_the_horizon_are_said() -> None:
    for num_requests, runs_out in ((6, True), (600, False)):
        small = TokenDistribution(low=1, high=30)
        agents = Agents(num_sessions=2, first_prompt=small, growth=small, output=small, ramp_up_s=0.0)
        workload = Workload(num_requests=num_requests, agents=agents)
        config = SimulationConfig(policy="fcfs", workload=workload, horizon_s=300.0, step_time=ROUND)
        assert ("closed_loop" in run_simulation(config).warnings) is runs_out


def test_agents_are_simulated_from_the_command_line(recording: str, tmp_path: Path) -> None:
    config = {
        "policy": "fcfs", "horizon_s": 300.0, "scheduler": {"prefix_caching": True, "num_kv_blocks": 500},
        "workload": {
            "num_requests": 100,
            "agents": {"num_sessions": 3, "file": recording, "max_tokens_per_request": 2000},
        },
    }  # fmt: skip
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    assert main(["run", "--config", str(path), "--json", str(tmp_path / "a.json")]) == 0
    result = yaml.safe_load((tmp_path / "a.json").read_text())
    assert "1 are left out" in result["warnings"]["trace"]
    words = ["workload", "--agents.num_sessions", "3", "--agents.file", recording, "--num_requests", "30"]
    assert main([*words, "--out", str(tmp_path / "t.csv")]) == 0
    trace = Workload(num_requests=30, agents=Agents(num_sessions=3, file=recording)).trace(0)
    assert load_trace(tmp_path / "t.csv").requests == trace.requests
    assert isinstance(trace, Trace)
