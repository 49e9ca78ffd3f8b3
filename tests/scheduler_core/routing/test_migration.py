"""Live migration between real schedulers: its stages by hand, every way in which it can end, and random walks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from scheduler_core.batching import BATCH_FORMERS
from scheduler_core.decision_log import DecisionLog
from scheduler_core.errors import InputError
from scheduler_core.plan import StepPlan, StepResult
from scheduler_core.policies import make_policy
from scheduler_core.predictions import UrgencyPrediction
from scheduler_core.replay import replay
from scheduler_core.request import Phase, Request, RequestState, Status
from scheduler_core.routing import SchedulerView
from scheduler_core.routing.migration import (
    Aborted,
    AbortReason,
    Committed,
    Copy,
    MigrationError,
    Migrations,
    Move,
    Outcome,
)
from scheduler_core.scheduler import Scheduler, SchedulerConfig, SchedulerStateError
from tests.scheduler_core.helpers import prediction, request, run_step

MOVE = Move("r", "a", "b")


def scheduler(policy: str = "tie", log: DecisionLog | None = None, **limits: Any) -> Scheduler:
    """A replica of 40 blocks of 4 tokens and 4 slots."""
    defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_kv_blocks": 40, "kv_block_tokens": 4}
    return Scheduler(SchedulerConfig(**{**defaults, "kv_watermark": 0.0, **limits}), make_policy(policy), log)


def decoding(core: Scheduler, name: str = "r", prompt: int = 10, cap: int = 20) -> None:
    core.add(request(name, prompt=prompt, cap=cap), 0.0)
    run_step(core, 0.0)
    assert core.state(name).phase is Phase.DECODE


def pair(**destination: Any) -> dict[str, Scheduler]:
    """Request r decodes on a with 38 tokens in its cache: 10 blocks of 4, the last half full."""
    sides = {"a": scheduler(), "b": scheduler(**destination)}
    decoding(sides["a"], prompt=38, cap=100)
    return sides


def generate(core: Scheduler, num_tokens: int) -> None:
    for _ in range(num_tokens):
        run_step(core, 0.0)


def check_stays(sides: dict[str, Scheduler]) -> None:
    """The request decodes on a, and b has its memory back."""
    assert sides["a"].state("r").status is Status.RUNNING
    if "b" in sides:
        assert sides["b"].num_free_kv_blocks == sides["b"].config.num_kv_blocks
        assert not sides["b"].pool.reserved
    for core in sides.values():
        core.validate()


def test_a_request_of_ten_blocks_moves_in_ceil_ten_fourths_stages() -> None:
    """Paper, section 3.5: ceil(10/4) = 3 stages of 4, 4 and 2 blocks; only in the last one the request is stopped."""
    sides = pair()
    migrations = Migrations(sides, stage_blocks=4)
    assert migrations.start(MOVE, 0.0) == Copy(MOVE, 0, 4, live=True)
    assert migrations.copied("r", 0.1) == Copy(MOVE, 4, 4, live=True)
    assert "r" in sides["a"]
    assert not migrations.stopped("r")
    assert migrations.copied("r", 0.2) == Copy(MOVE, 8, 2, live=False)
    assert migrations.stopped("r")
    assert "r" not in sides["a"]
    assert "r" not in sides["b"]
    assert migrations.copied("r", 0.3) == Committed(MOVE, num_stages=3, num_blocks=10)
    assert (sides["a"].num_free_kv_blocks, sides["b"].num_free_kv_blocks) == (40, 30)
    assert migrations.in_flight == frozenset()
    for core in sides.values():
        core.validate()


def test_a_running_request_goes_on_where_it_left_off() -> None:
    """9 tokens during the first two copies: 47 tokens are 12 blocks, so the last stage copies 4; the destination then
    generates the 90 that are left."""
    sides = pair()
    a, b = sides["a"], sides["b"]
    a.update("r", prediction(15), 0.0)
    migrations = Migrations(sides, stage_blocks=4)
    migrations.start(MOVE, 0.0)
    generate(a, 5)
    assert migrations.copied("r", 0.1) == Copy(MOVE, 4, 4, live=True)
    generate(a, 4)
    assert migrations.copied("r", 0.2) == Copy(MOVE, 8, 4, live=False)
    assert a.schedule(0.2) is None, "its only request is stopped"
    assert migrations.copied("r", 0.3) == Committed(MOVE, 3, 12)
    assert (b.state("r").num_output_tokens, b.state("r").prediction) == (10, prediction(15))
    finished = ()
    while not finished:
        finished = run_step(b, 4.0)
    assert (finished[0].output_tokens, finished[0].first_token_s) == (100, 0.0)
    assert (a.counters.num_moved_out, b.counters.num_moved_in) == (1, 1)


def test_all_at_once_stops_the_request_for_the_whole_copy() -> None:
    migrations = Migrations(pair(), stage_blocks=None)
    assert migrations.start(MOVE, 0.0) == Copy(MOVE, 0, 10, live=False)
    assert migrations.copied("r", 1.0) == Committed(MOVE, 1, 10)


def test_a_waiting_request_changes_its_queue_at_once() -> None:
    sides = {"a": scheduler(), "b": scheduler()}
    sides["a"].add(request("r", prompt=10, cap=20), 0.0)
    assert Migrations(sides).start(MOVE, 0.0) == Committed(MOVE, 0, 0)
    assert (sides["a"].num_waiting, sides["b"].num_waiting) == (0, 1)
    run_step(sides["b"], 1.0)
    assert sides["b"].state("r").phase is Phase.DECODE


def test_a_request_in_its_prefill_or_not_there_does_not_move() -> None:
    sides = {"a": scheduler(max_num_batched_tokens=16), "b": scheduler()}
    assert Migrations(sides).start(MOVE, 0.0) == Aborted(MOVE, AbortReason.NOT_MOVABLE)
    sides["a"].add(request("r", prompt=38, cap=20), 0.0)
    run_step(sides["a"], 0.0)
    assert Migrations(sides).start(MOVE, 0.0) == Aborted(MOVE, AbortReason.NOT_MOVABLE)


@pytest.mark.parametrize("stages", [0, 1, 2])
def test_the_destination_fills_up_before_any_stage(stages: int) -> None:
    """Memory for 3, 7 and 9 of 10 blocks: the first, second and third stage find none."""
    sides = pair(num_kv_blocks=(3, 7, 9)[stages])
    migrations = Migrations(sides, stage_blocks=4)
    outcome = migrations.start(MOVE, 0.0)
    for _ in range(stages):
        assert isinstance(outcome, Copy)
        outcome = migrations.copied("r", 0.1)
    assert outcome == Aborted(MOVE, AbortReason.DESTINATION_FULL)
    check_stays(sides)


def test_a_destination_without_a_slot_is_full() -> None:
    sides = pair(max_num_seqs=1)
    decoding(sides["b"], "other")
    assert Migrations(sides).start(MOVE, 0.0) == Aborted(MOVE, AbortReason.DESTINATION_FULL)


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        ("on_finished", AbortReason.FINISHED),
        ("on_preempted", AbortReason.PREEMPTED),
        ("on_aborted", AbortReason.ABORTED),
    ],
)
def test_the_request_leaves_while_it_is_copied(event: str, reason: AbortReason) -> None:
    sides = pair()
    migrations = Migrations(sides, stage_blocks=4)
    migrations.start(MOVE, 0.0)
    sides["a"].abort("r", 0.0)
    assert getattr(migrations, event)("r", 0.05) == Aborted(MOVE, reason)
    assert getattr(migrations, event)("r", 0.05) is None
    assert sides["a"].num_free_kv_blocks == sides["b"].num_free_kv_blocks == 40
    with pytest.raises(MigrationError, match="not being migrated"):
        migrations.copied("r", 0.1)


def test_a_stopped_request_is_aborted() -> None:
    sides = pair()
    migrations = Migrations(sides, stage_blocks=None)
    migrations.start(MOVE, 0.0)
    with pytest.raises(MigrationError, match="stopped for its handover"):
        migrations.on_finished("r", 0.05)
    assert migrations.on_aborted("r", 0.05) == Aborted(MOVE, AbortReason.ABORTED)
    assert sides["a"].num_free_kv_blocks == sides["b"].num_free_kv_blocks == 40


@pytest.mark.parametrize("stage_blocks", [4, None], ids=["copying", "handover"])
@pytest.mark.parametrize("event", ["destination_drains", "destination_fails", "source_fails"])
def test_a_replica_drains_or_fails(stage_blocks: int | None, event: str) -> None:
    sides = pair()
    migrations = Migrations(sides, stage_blocks=stage_blocks)
    migrations.start(MOVE, 0.0)
    if event == "destination_drains":
        assert migrations.on_draining("a", 0.05) == (), "a request goes on leaving a draining replica"
        assert migrations.on_draining("b", 0.05) == (Aborted(MOVE, AbortReason.DESTINATION_DRAINING),)
        check_stays(sides)
    elif event == "destination_fails":
        del sides["b"]
        assert migrations.on_failed("b", 0.05) == (Aborted(MOVE, AbortReason.DESTINATION_FAILED),)
        check_stays(sides)
    else:
        del sides["a"]
        assert migrations.on_failed("a", 0.05) == (Aborted(MOVE, AbortReason.SOURCE_FAILED),)
        assert sides["b"].num_free_kv_blocks == 40
        assert migrations.in_flight == frozenset()


def test_a_request_that_grows_as_fast_as_it_is_copied_stays() -> None:
    sides = pair()
    migrations = Migrations(sides, stage_blocks=2)
    migrations.start(MOVE, 0.0)
    generate(sides["a"], 8)
    assert migrations.copied("r", 0.1) == Aborted(MOVE, AbortReason.STALLED)
    check_stays(sides)


def test_calls_in_the_wrong_state_are_refused() -> None:
    sides = pair()
    migrations = Migrations(sides, stage_blocks=4)
    migrations.start(MOVE, 0.0)
    with pytest.raises(MigrationError, match="already"):
        migrations.start(MOVE, 0.0)
    with pytest.raises(InputError, match="replica"):
        migrations.start(Move("x", "a", "nowhere"), 0.0)
    with pytest.raises(InputError, match="destination"):
        migrations.start(Move("x", "a", "a"), 0.0)
    sides["c"] = scheduler(kv_block_tokens=8)
    with pytest.raises(InputError, match="as many tokens per block"):
        migrations.start(Move("x", "a", "c"), 0.0)
    with pytest.raises(InputError, match="stage_blocks"):
        Migrations(sides, stage_blocks=0)


def test_reserved_blocks_and_slots_are_not_given_to_others() -> None:
    """b has 10 blocks and 2 slots. 3 blocks and a slot are reserved: one request of 5 blocks is admitted, another of 1
    block waits for the slot until the reservation is given back."""
    b = scheduler("fcfs", num_kv_blocks=10, max_num_seqs=2)
    assert b.reserve("coming", 3, 0.0)
    b.add(request("x", prompt=20, cap=4), 0.0)
    b.add(request("y", arrival_s=0.1, prompt=4, cap=4), 0.1)
    plan = b.schedule(0.1)
    assert plan is not None
    assert plan.admitted == ("x",)
    b.complete(StepResult(plan.step), 0.2)
    b.validate()
    assert SchedulerView(b).snapshot("b").num_free_blocks == b.num_free_kv_blocks == 10 - 3 - 5
    b.unreserve("coming", 0.3)
    run_step(b, 0.3)
    assert b.num_running == 2
    b.validate()


def test_a_replica_with_nothing_but_a_reservation_has_waiting_requests_wait() -> None:
    b = scheduler(num_kv_blocks=10)
    assert b.reserve("coming", 9, 0.0)
    b.add(request("x", prompt=20, cap=4), 0.0)
    assert b.schedule(0.0) is None
    b.unreserve("coming", 1.0)
    run_step(b, 1.0)
    assert b.num_running == 1


def test_detach_attach_and_reserve_check_their_arguments() -> None:
    a, b = scheduler(), scheduler(num_kv_blocks=10)
    decoding(a)
    with pytest.raises(InputError, match="request_id"):
        a.detach("nobody", 1.0)
    with pytest.raises(InputError, match="num_blocks"):
        a.reserve("coming", 0, 1.0)
    with pytest.raises(SchedulerStateError, match="here already"):
        a.reserve("r", 1, 1.0)
    plan = a.schedule(1.0)
    assert plan is not None
    with pytest.raises(SchedulerStateError, match="takes part in step"):
        a.detach("r", 1.0)
    assert a.steady_steps(5) == 5
    with pytest.raises(SchedulerStateError, match="promised 5 times"):
        a.reserve("coming", 1, 1.0)
    a.complete(StepResult(plan.step), 1.1)
    state = a.detach("r", 1.1)
    assert state.num_output_tokens == 2
    assert b.reserve("r", 1, 1.0)
    with pytest.raises(SchedulerStateError, match="too few"):
        b.attach(state, 1.0)
    assert b.reserve("r", 2, 1.0)
    b.attach(state, 1.0)
    with pytest.raises(InputError, match="already"):
        b.attach(state, 1.0)
    huge = RequestState(Request(request_id="h", arrival_s=0.0, prompt_tokens=100, max_tokens=1), order=0)
    with pytest.raises(InputError, match="whole KV cache"):
        b.attach(huge, 1.0)
    a.unreserve("r", 1.1)
    a.validate()
    b.validate()


@pytest.mark.parametrize("batching", ["request_level", "orca"])
def test_batch_formers_whose_batches_belong_together_do_not_migrate(batching: str) -> None:
    assert not BATCH_FORMERS[batching].migratable
    with pytest.raises(InputError, match="chunked_prefill"):
        scheduler("fcfs", batching=batching).reserve("coming", 1, 0.0)


def test_a_snapshot_has_the_requests_as_they_are() -> None:
    a = scheduler("fcfs", num_kv_blocks=10)
    decoding(a)
    a.add(Request(request_id="u", arrival_s=1.0, prompt_tokens=9, max_tokens=5, tier=3), 1.0)
    a.update("r", prediction(15), 1.0)
    a.state("u").urgency = UrgencyPrediction((0.9, 0.1, 0.0, 0.0, 0.0))
    view = SchedulerView(a)
    snapshot = view.snapshot("a")
    assert (snapshot.num_running, snapshot.num_waiting) == (1, 1)
    assert (snapshot.used_blocks, snapshot.head_demand_blocks) == (3, 3)
    assert snapshot.tiers == (2,), "tier 3 rises by one level"
    running, waiting = snapshot.requests
    assert (running.decoding, running.num_output_tokens, running.prediction) == (True, 1, prediction(15))
    assert (waiting.running, waiting.prefill_left_tokens, waiting.tier) == (False, 9, 2)
    assert a.reserve("coming", 2, 1.0)
    assert view.snapshot("a", keep_requests=False) == replace(view.snapshot("a"), requests=())
    assert view.snapshot("a").num_free_blocks == 10 - 3 - 2


ACTIONS = [*["add", "predict", "start", "copied"] * 4, *["step"] * 16, "abort", "abort", "drain", "fail"]


class Walk:
    """Schedulers a and b with small caches, so that preemptions and full destinations are common."""

    def __init__(self, policy: str, rng: np.random.Generator) -> None:
        self.policy, self.rng, self.now = policy, rng, 0.0
        self.logs: dict[str, DecisionLog] = {}
        self.sides: dict[str, Scheduler] = {}
        for side in "ab":
            self.restart(side)
        self.migrations = Migrations(self.sides, stage_blocks=2)
        self.open: dict[str, StepPlan] = {}
        self.copies: dict[str, Copy] = {}
        self.tokens: dict[str, int] = {}
        self.ends: list[AbortReason | str] = []

    def restart(self, side: str) -> None:
        self.logs[side] = log = DecisionLog()
        limits = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "num_kv_blocks": 12}
        self.sides[side] = scheduler(self.policy, log, **limits)

    def pick(self, names: list[str]) -> str:
        return names[int(self.rng.integers(len(names)))]

    def note(self, outcome: Outcome | None) -> None:
        if isinstance(outcome, Copy):
            self.copies[outcome.move.request_id] = outcome
        elif outcome is not None:
            self.copies.pop(outcome.move.request_id, None)
            self.ends.append(outcome.reason if isinstance(outcome, Aborted) else "committed")

    def side_of(self, name: str) -> str | None:
        sides = [side for side, core in self.sides.items() if name in core]
        assert len(sides) <= 1, "a request is on two sides"
        return sides[0] if sides else None

    def add(self) -> None:
        name = f"r{len(self.tokens)}-{self.now}"
        prompt, cap = int(self.rng.integers(1, 25)), int(self.rng.integers(1, 20))
        self.sides[self.pick(["a", "a", "b"])].add(request(name, self.now, prompt=prompt, cap=cap), self.now)
        self.tokens[name] = 0

    def predict(self) -> None:
        live = [name for name in self.tokens if self.side_of(name) is not None]
        if live:
            name = self.pick(live)
            self.sides[self.side_of(name) or ""].update(
                name, prediction(float(self.rng.uniform(1, 20))), self.now
            )

    def step(self) -> None:
        side = self.pick(["a", "b"])
        core, plan = self.sides[side], self.open.pop(side, None)
        if plan is None:
            plan = core.schedule(self.now)
            if plan is not None:
                self.open[side] = plan
                for name in plan.preempted:
                    self.note(self.migrations.on_preempted(name, self.now))
            return
        sampling = [*plan.decodes, *(chunk.request_id for chunk in plan.prefills if chunk.is_last)]
        stopped = tuple(name for name in sampling if self.rng.random() < 0.05)
        for name in sampling:
            if name in self.tokens:
                self.tokens[name] += 1
        for item in core.complete(StepResult(plan.step, stopped), self.now):
            assert item.output_tokens == self.tokens.pop(item.request_id), "tokens were lost on the way"
            self.note(self.migrations.on_finished(item.request_id, self.now))

    def start(self) -> None:
        sides = {name: self.side_of(name) for name in self.tokens if name not in self.copies}
        movable = [name for name, side in sides.items() if side is not None and side not in self.open]
        if movable:
            name = self.pick(movable)
            source = sides[name] or ""
            self.note(self.migrations.start(Move(name, source, "b" if source == "a" else "a"), self.now))

    def copied(self) -> None:
        ready = [
            name for name, copy in self.copies.items() if not copy.live or copy.move.source not in self.open
        ]
        if ready:
            name = self.pick(ready)
            before, outcome = self.copies[name], self.migrations.copied(name, self.now)
            if isinstance(outcome, Copy):
                assert outcome.first_block == before.first_block + before.num_blocks
                assert outcome.num_blocks <= 2
            if isinstance(outcome, Committed):
                assert not before.live
                assert self.side_of(name) == outcome.move.destination
            self.note(outcome)

    def abort(self) -> None:
        if self.tokens:
            name = self.pick(list(self.tokens))
            side = self.side_of(name)
            if side is not None:
                assert self.sides[side].abort(name, self.now)
            self.note(self.migrations.on_aborted(name, self.now))
            del self.tokens[name]

    def drain(self) -> None:
        for aborted in self.migrations.on_draining(self.pick(["a", "b"]), self.now):
            self.note(aborted)

    def fail(self) -> None:
        side = self.pick(["a", "b"])
        stopped = [name for name, copy in self.copies.items() if not copy.live and copy.move.source == side]
        for name in [name for name in self.tokens if self.side_of(name) == side] + stopped:
            del self.tokens[name]
        self.restart(side)
        self.open.pop(side, None)
        for aborted in self.migrations.on_failed(side, self.now):
            self.note(aborted)

    def check(self) -> None:
        for core in self.sides.values():
            core.validate()
        for name, tokens in self.tokens.items():
            side = self.side_of(name)
            assert (side is None) == self.migrations.stopped(name), "on one side, or stopped between them"
            if side is not None:
                assert self.sides[side].state(name).num_output_tokens == tokens


@pytest.mark.parametrize("policy", ["fcfs", "tie", "srpt", "las"])
def test_requests_keep_their_tokens_and_memory_is_conserved(policy: str) -> None:
    """All invariants after every call, no token lost, nearly every way out taken, and both decision logs replay."""
    ends: list[AbortReason | str] = []
    for seed in range(8):
        walk = Walk(policy, np.random.default_rng(seed))
        for _ in range(300):
            walk.now += 0.25
            getattr(walk, ACTIONS[int(walk.rng.integers(len(ACTIONS)))])()
            walk.check()
        for _ in range(2000):
            if not walk.tokens:
                break
            walk.now += 0.25
            walk.step()
            walk.copied()
            walk.check()
        assert not walk.tokens, "every request left can be brought to its end"
        for side, core in walk.sides.items():
            assert core.num_free_kv_blocks == 12
            assert replay(walk.logs[side].entries).counters == core.counters
        ends += walk.ends
    assert ends.count("committed") > 20
    assert set(AbortReason) - {AbortReason.STALLED, AbortReason.PREEMPTED} <= set(ends)
