"""The working set of sessions: who enters and leaves by hand; its promises in full simulations."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from scheduler_core.engine.plan import StepResult
from scheduler_core.policies.base import Policy
from scheduler_core.policies.static import Fcfs
from scheduler_core.policies.working_set import WorkingSet
from scheduler_core.request import RequestState
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from scheduler_core.simulator.loop import Simulation, SimulationOutcome
from scheduler_core.simulator.step_time.base import LinearStepTime
from scheduler_core.simulator.trace import Trace
from scheduler_core.simulator.trace_predictions import Predictions
from scheduler_core.simulator.workloads.agents import Agents
from scheduler_core.simulator.workloads.lengths import TokenDistribution
from scheduler_core.simulator.workloads.workload import Workload
from tests.scheduler_core.helpers import FixedCosts, FixedEngine, prediction, request

HORIZON_S = 1200.0
STEP = LinearStepTime(
    base_s=0.012, per_prefill_token_s=1 / 30_000, per_decode_s=2.5e-4, per_context_token_s=0.0,
    per_swapped_token_s=1 / 150_000,
)  # fmt: skip


#: A prompt token takes 10 ms, as one of output, the copy of a token 1 ms.
COSTS = FixedCosts(prefill_token_s=1e-2, decode_token_s=1e-2, reload_token_s=1e-3)


def policy(**parameters: Any) -> WorkingSet:
    made = WorkingSet(fill=1.0, ratio=10.0, **parameters)
    made.bind(FixedEngine(costs=COSTS))
    return made


def turn(made: WorkingSet, session: str, at: float, prompt: int) -> RequestState:
    """A turn that arrives; its output is expected to be short."""
    item = RequestState(request(f"{session}@{at}", at, prompt=prompt, session=session), order=int(10 * at))
    item.prediction = prediction(1.0)
    made.on_arrival(item, at)
    return item


def admitted(made: WorkingSet, *items: RequestState) -> list[str]:
    """The sessions of turns that may be admitted, in the order of their keys."""
    made.on_pressure(len(items), 8)
    may = [item for item in items if made.may_admit(item, 0.0)]
    return [item.request.session for item in sorted(may, key=lambda item: made.key(item, 0.0))]


def run(made: WorkingSet, item: RequestState, now: float) -> None:
    made.on_pressure(1, 8)
    made.on_admit(item, now)


def end(made: WorkingSet, item: RequestState, now: float) -> None:
    item.num_output_tokens, item.last_token_s, item.ended_by = 1, now, "tool_use"
    made.on_finish(item)


def test_sessions_are_active_as_long_as_their_contexts_fit() -> None:
    made = policy()
    a, b, c = (
        turn(made, name, at, size) for name, at, size in (("a", 0.0, 500), ("b", 0.1, 400), ("c", 0.2, 300))
    )
    assert admitted(made, a, b, c) == ["b", "a"]
    for item in (a, b):
        made.on_admit(item, 1.0)
    assert admitted(made, c) == []
    assert {name for name, item in made.sessions.items() if item.is_active} == {"a", "b"}


@pytest.mark.parametrize(("pause_s", "expected"), [(10.0, []), (100.0, ["c"])])
def test_an_idle_session_leaves_if_its_context_saves_less_than_it_costs(
    pause_s: float, expected: list[str]
) -> None:
    """A miss of a takes 10 ms a token, and delays the 400 tokens of b: v C = 4 s / pause. At 10 s, b is kept; above 4 s
    of delayed turns per idle second it leaves. With a mean pause of 10 s v C = 0.4: it leaves for c in both cases, unless
    more tokens run."""
    made = policy(predict_returns=False)
    made._pause_s, made._num_pauses = pause_s, 100
    running = 1500 if not expected else 100
    made.bind(FixedEngine(capacity_tokens=running + 700, costs=COSTS))
    a, b = turn(made, "a", 0.0, 500), turn(made, "b", 0.1, running)
    for item in (a, b):
        run(made, item, 1.0)
    end(made, a, 2.0)
    c = turn(made, "c", 3.0, 400)
    assert admitted(made, c) == expected
    assert made.sessions["a"].is_active is not bool(expected)


def test_a_session_that_has_ended_leaves_its_place_to_others() -> None:
    made = policy()
    first = turn(made, "a", 0.0, 900)
    run(made, first, 0.0)
    end(made, first, 1.0)
    other = turn(made, "b", 1.1, 500)
    assert admitted(made, other) == [], "the first pauses are short"
    made.on_session_end("a", 1.2)
    assert admitted(made, other) == ["b"]
    assert made.returns.forecast("a") is None
    assert made.retention_key("a") == -float("inf"), "its blocks are evicted first"


@pytest.mark.mend
def test_contexts_are_not_all_given_away_when_all_turns_end_at_once() -> None:
    """Nothing runs for a moment: the first turn that waits gets memory, but its own prefill would delay those that follow."""
    made = policy(predict_returns=False)
    made._pause_s, made._num_pauses = 0.4, 100
    first = [turn(made, name, 0.0, 240) for name in "abcd"]
    for item in first:
        run(made, item, 1.0)
    for item in first:
        end(made, item, 2.0)
    others = [turn(made, name, 2.0, 230) for name in "efgh"]
    assert len(admitted(made, *others)) == 1
    assert sum(made.sessions[name].is_active for name in "abcd") == 3


@pytest.mark.mend
def test_no_turn_is_due_before_the_speed_of_the_engine_is_known() -> None:
    """On an engine that is slower than the typical one, the first deadlines would pass at once, and all sessions would get in."""
    made = WorkingSet(fill=1.0, ratio=1.0)
    costs = replace(COSTS, is_measured=False)
    made.bind(FixedEngine(costs=costs))
    first, second = turn(made, "a", 0.0, 900), turn(made, "b", 0.1, 900)
    assert admitted(made, first, second) == ["a"]
    run(made, first, 0.2)
    made.on_prefill_end(first, 500.0)
    assert admitted(made, second) == []
    costs.is_measured = True
    made.on_prefill_end(first, 501.0)
    made.on_pressure(1, 8)
    assert made.key(second, 501.0) < 0, "it is due now"


@pytest.mark.mend
def test_a_session_may_have_the_id_of_a_request_without_one() -> None:
    """The end of the request removed the session, and the admission of its turn raised KeyError."""
    made = policy()
    alone = RequestState(request("a", 0.0), order=0)
    made.on_arrival(alone, 0.0)
    item = turn(made, "a", 1.0, 100)
    run(made, alone, 1.0)
    end(made, alone, 2.0)
    run(made, item, 2.0)
    assert made.sessions["a"].num_running == 1


def test_a_turn_that_is_due_comes_first_and_others_leave_for_it() -> None:
    made = policy()
    a, b = turn(made, "a", 0.0, 600), turn(made, "b", 0.1, 400)
    for item in (a, b):
        run(made, item, 0.2)
    c = turn(made, "c", 0.3, 900)
    assert admitted(made, c) == []
    deadline_s = made._deadlines[c.request_id]
    end(made, a, deadline_s - 1.0)
    a = turn(made, "a", deadline_s - 0.9, 610)
    assert admitted(made, a, c) == []
    assert not made.sessions["a"].is_active, "a leaves for c, which does not fit beside b"
    end(made, b, deadline_s)
    assert admitted(made, a, c) == ["c"]


def agents(num_sessions: int, context: int, seed: int = 0, turns: int = 60) -> Trace:
    """Growing sessions in a closed loop; they end after 30 turns."""
    workload = Workload(
        num_requests=num_sessions * turns,
        agents=Agents(
            num_sessions=num_sessions,
            first_prompt=TokenDistribution(kind="uniform", low=context // 2, high=context),
            growth=TokenDistribution(kind="fixed", low=300),
            output=TokenDistribution(kind="uniform", low=50, high=300),
            turns=TokenDistribution(kind="fixed", low=30),
            max_pause_s=60.0,
            ramp_up_s=20.0,
        ),
    )
    return workload.trace(seed)


def simulated(
    trace: Trace, made: Policy, kv_tokens: int, host_tokens: int = 0, horizon_s: float | None = HORIZON_S
) -> tuple[SimulationOutcome, Scheduler]:
    config = SchedulerConfig(
        max_num_seqs=64, max_num_batched_tokens=4160, num_kv_blocks=kv_tokens // 64, kv_block_tokens=64,
        num_host_cache_blocks=host_tokens // 64, batching_parameters={"chunk_tokens": 4096},
    )  # fmt: skip
    core = Scheduler(config, made)
    return Simulation(trace, core, STEP, Predictions(), horizon_s=horizon_s).run(), core


def longest_wait_s(outcome: SimulationOutcome, core: Scheduler) -> float:
    waits = [record.first_scheduled_s - record.arrival_s for record in outcome.records]
    return max(*waits, *[HORIZON_S - state.request.arrival_s for state in core.pool.waiting])


def turns_of(outcome: SimulationOutcome, num_sessions: int) -> list[int]:
    """Turns of the sessions of each place, fewest first."""
    counts = Counter(
        int(record.session_id[1:]) % num_sessions for record in outcome.records if record.session_id
    )
    return sorted(counts[place] for place in range(num_sessions))


class Deadlines(WorkingSet):
    """Records by how much turns start after their deadlines, and the longest turn."""

    __slots__ = ("late_s", "longest_turn_s")

    def on_admit(self, state: RequestState, now: float) -> None:
        self.late_s = [*getattr(self, "late_s", []), now - self._deadlines.get(state.request_id, now)]
        WorkingSet.on_admit(self, state, now)

    def on_finish(self, state: RequestState) -> None:
        if state.first_scheduled_s is not None and state.last_token_s is not None:
            turn_s = state.last_token_s - state.first_scheduled_s
            self.longest_turn_s = max(getattr(self, "longest_turn_s", 0.0), turn_s)
        WorkingSet.on_finish(self, state)


@pytest.mark.mend
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("host_tokens", [0, 20_000_000])
def test_turns_start_by_their_deadlines_or_when_a_turn_ends(seed: int, host_tokens: int) -> None:
    made = Deadlines()
    outcome, _ = simulated(agents(30, 60_000, seed), made, 900_000, host_tokens)
    assert len(outcome.records) > 300
    assert max(made.late_s) <= made.longest_turn_s


@pytest.mark.mend
@pytest.mark.parametrize("seed", range(2))
def test_no_session_starves_and_each_has_the_progress_of_fcfs(seed: int) -> None:
    """Contexts take twice the memory: at least 1.3 times the turns, the slowest place has as many as the slowest under first
    come, first served, and no wait is longer than 1.5 times its longest and a turn."""
    num, trace = 30, agents(30, 60_000, seed)
    fcfs, fcfs_core = simulated(trace, Fcfs(), 900_000)
    made = Deadlines()
    ours, core = simulated(trace, made, 900_000)
    assert len(ours.records) > 1.3 * len(fcfs.records)
    assert turns_of(ours, num)[0] >= turns_of(fcfs, num)[0] > 0
    assert longest_wait_s(ours, core) <= 1.5 * longest_wait_s(fcfs, fcfs_core) + made.longest_turn_s


@pytest.mark.mend
def test_nothing_changes_while_all_contexts_fit() -> None:
    trace = agents(10, 40_000)
    fcfs, _ = simulated(trace, Fcfs(), 2_000_000)
    ours, core = simulated(trace, WorkingSet(), 2_000_000)
    assert len(ours.records) >= 0.98 * len(fcfs.records)
    made = core.policy
    assert isinstance(made, WorkingSet)
    assert all(session.is_active for session in made.sessions.values() if session.num_turns)
    mean_s = [
        float(np.mean([item.first_token_s - item.arrival_s for item in run.records])) for run in (ours, fcfs)
    ]
    assert mean_s[0] <= 1.02 * mean_s[1]


@pytest.mark.mend
def test_the_engine_is_never_idle_while_a_turn_waits() -> None:
    """Also if each context takes most of the memory: every turn ends, and the engine works whenever a turn waits."""
    trace = agents(6, 60_000, turns=8)
    outcome, _ = simulated(trace, WorkingSet(), 70_000, horizon_s=None)
    served = [row for row in trace.requests if row.request_id not in outcome.refused]
    assert len(outcome.records) == len(served) > 10
    in_system = sorted(
        [(record.arrival_s, 1) for record in outcome.records]
        + [(record.finish_s, -1) for record in outcome.records]
    )
    busy_s = number = 0.0
    last_s = in_system[0][0]
    for at, change in in_system:
        busy_s += (at - last_s) * (number > 0)
        number, last_s = number + change, at
    assert outcome.busy_s == pytest.approx(busy_s, rel=1e-6)


def test_single_requests_without_sessions_are_forgotten() -> None:
    rows = [
        replace(row, session_id=None, think_time_s=None, after=(), content=())
        for row in agents(5, 2000, turns=4).requests
    ]
    made = WorkingSet()
    outcome, _ = simulated(Trace(tuple(rows)), made, 900_000, horizon_s=None)
    assert len(outcome.records) == 20
    assert not made.sessions


def test_many_sessions_are_remembered_only_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_core.policies.working_set._MAX_SESSIONS", 20)
    made = policy()
    for number in range(60):
        item = turn(made, f"s{number}", float(number), 10)
        run(made, item, number + 0.1)
        end(made, item, number + 0.2)
    assert 0 < len(made.sessions) <= 20
    assert "s59" in made.sessions


@pytest.mark.mend
def test_keys_are_fresh_after_a_session_is_admitted_because_nothing_ran() -> None:
    """The other turn of the session became active within the step, with the key of one outside of the set."""
    core = Scheduler(
        SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=64, num_kv_blocks=10, kv_block_tokens=10),
        WorkingSet(),
    )
    for number in range(2):
        core.add(request(f"r{number}", 0.0, prompt=60, cap=30, session="s"), 0.0)
    core.add(request("other", 0.0, prompt=60, cap=30, session="t"), 0.0)
    now = 0.0
    for _ in range(300):
        plan = core.schedule(now)
        core.validate()
        if plan is None:
            break
        now += 0.1
        core.complete(StepResult(plan.step), now)
    assert core.counters.num_finished == 3
