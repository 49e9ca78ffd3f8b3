"""Live migration between real schedulers: its stages by hand, every way in which it can end, and random walks."""

from typing import Any

import numpy as np
import pytest

from scheduler_core.batching import BATCH_FORMERS
from scheduler_core.engine.decision_log import DecisionLog
from scheduler_core.engine.plan import StepPlan, StepResult
from scheduler_core.errors import InputError
from scheduler_core.policies import make_policy
from scheduler_core.replay import replay
from scheduler_core.request import Phase, Status
from scheduler_core.routing.migration import (
    Aborted,
    AbortReason,
    Committed,
    Copy,
    KVLink,
    Migrations,
    Move,
    Outcome,
)
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from tests.scheduler_core.helpers import predicted, prediction, request, run_step

MOVE = Move("r", "a", "b")
ACTIONS = [*["add", "predict", "start", "copied"] * 4, *["step"] * 16, "drain", "drain", "fail", "give_up"]


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
        assert sides["b"].pool.kv.num_free_blocks == sides["b"].config.capacity_blocks
        assert not sides["b"].pool.reserved
    for core in sides.values():
        core.validate()


def test_a_request_of_ten_blocks_moves_in_ceil_ten_fourths_stages() -> None:
    """Paper, section 3.5: ceil(10/4) = 3 stages of 4, 4 and 2 blocks; only in the last one the request is stopped."""
    sides = pair()
    migrations = Migrations(sides, stage_blocks=4)
    assert migrations.start(MOVE, 0.0) == Copy(MOVE, 4, live=True)
    assert migrations.copied("r", 0.1) == Copy(MOVE, 4, live=True)
    assert "r" in sides["a"]
    assert not migrations.stopped("r")
    assert migrations.copied("r", 0.2) == Copy(MOVE, 2, live=False)
    assert migrations.stopped("r")
    assert not any("r" in core for core in sides.values())
    assert migrations.copied("r", 0.3) == Committed(MOVE, num_stages=3, num_blocks=10)
    assert (sides["a"].pool.kv.num_free_blocks, sides["b"].pool.kv.num_free_blocks) == (40, 30)
    assert migrations.in_flight == frozenset()
    for core in sides.values():
        core.validate()


def test_a_running_request_goes_on_where_it_left_off() -> None:
    """9 tokens during the first two copies: 47 tokens are 11 full blocks, so the third stage copies 3 and the last one the
    block that is not full; the destination then generates the 90 that are left."""
    sides = pair()
    a, b = sides["a"], sides["b"]
    a.update("r", predicted(15), 0.0)
    migrations = Migrations(sides, stage_blocks=4)
    migrations.start(MOVE, 0.0)
    generate(a, 5)
    assert migrations.copied("r", 0.1) == Copy(MOVE, 4, live=True)
    generate(a, 4)
    assert migrations.copied("r", 0.2) == Copy(MOVE, 3, live=True)
    assert migrations.copied("r", 0.3) == Copy(MOVE, 1, live=False)
    assert a.schedule(0.3) is None, "its only request is stopped"
    assert migrations.copied("r", 0.3) == Committed(MOVE, 4, 12)
    assert (b.state("r").num_output_tokens, b.state("r").prediction) == (10, prediction(15))
    finished = ()
    while not finished:
        finished = run_step(b, 4.0)
    assert (finished[0].output_tokens, finished[0].first_token_s) == (100, 0.0)
    assert (a.counters.num_moved_out, b.counters.num_moved_in) == (1, 1)


@pytest.mark.mend
@pytest.mark.parametrize("source", ["fcfs", "priority"])
def test_a_moved_request_has_the_level_of_its_destination(source: str) -> None:
    """It kept that of its source, and had its priority in a replay, also under policy priority: another one was preempted."""
    log = DecisionLog()
    sides = {"a": scheduler(source), "b": scheduler("priority", log)}
    a, b = sides["a"], sides["b"]
    a.add(request("r", prompt=38, cap=100, priority=5), 0.0)
    run_step(a, 0.0)
    migrations = Migrations(sides, stage_blocks=40)
    migrations.start(MOVE, 0.0)
    assert migrations.copied("r", 0.1) == Copy(MOVE, 1, live=False)
    assert migrations.copied("r", 0.2) == Committed(MOVE, num_stages=2, num_blocks=10)
    b.add(request("s", prompt=60, cap=80, priority=9), 0.2)
    finished = []
    while len(finished) < 2:
        finished += [(item.request_id, item.num_preemptions) for item in run_step(b, 1.0)]
    assert finished == [("r", 0), ("s", 1)]
    assert replay(log.entries).counters == b.counters


def test_a_copy_costs_the_bytes_of_its_tokens_over_the_bandwidth() -> None:
    """Llama-2-7B: 2 x 32 layers x 4096 x 2 bytes = 512 KiB per token; 16 blocks of 16 tokens over 100 Gb/s: 10.7 ms."""
    link = KVLink(kv_bytes_per_token=524_288)
    assert link.copy_s(256) == pytest.approx(5e-3 + 256 * 524_288 / 12.5e9)
    assert link.copy_s(0) == 5e-3
    with pytest.raises(InputError, match="bytes_per_s"):
        KVLink(bytes_per_s=0.0)


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
    with pytest.raises(InputError, match="destination"):
        migrations.start(Move("x", "a", "a"), 0.0)
    sides["c"] = scheduler(kv_block_tokens=8)
    with pytest.raises(InputError, match="the same block size"):
        migrations.start(Move("x", "a", "c"), 0.0)
    with pytest.raises(InputError, match="stage_blocks"):
        Migrations(sides, stage_blocks=0)


@pytest.mark.parametrize("batching", ["request_level", "orca"])
def test_batch_formers_whose_batches_belong_together_do_not_migrate(batching: str) -> None:
    assert not BATCH_FORMERS[batching].migratable
    with pytest.raises(InputError, match="chunked_prefill"):
        scheduler("fcfs", batching=batching).reserve("coming", 1, 0.0)


class Walk:
    """Schedulers a and b with small caches, so that preemptions and full destinations are common."""

    def __init__(self, policy: str, rng: np.random.Generator) -> None:
        self.rng, self.now = rng, 0.0
        self.logs: dict[str, DecisionLog] = {}
        self.sides: dict[str, Scheduler] = {}
        for side in "ab":
            self.logs[side] = log = DecisionLog()
            limits = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "num_kv_blocks": 12}
            self.sides[side] = scheduler(policy, log, **limits)
        self.migrations = Migrations(self.sides, stage_blocks=2)
        self.open: dict[str, StepPlan] = {}
        self.copies: dict[str, Copy] = {}
        self.tokens: dict[str, int] = {}
        self.ends: list[AbortReason | str] = []

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
            name, seen = self.pick(live), predicted(float(self.rng.uniform(1, 20)))
            self.sides[self.side_of(name) or ""].update(name, seen, self.now)

    def step(self) -> None:
        side = self.pick(["a", "b"])
        core, plan = self.sides[side], self.open.pop(side, None)
        if plan is None:
            plan = core.schedule(self.now)
            if plan is not None:
                self.open[side] = plan
                for name in plan.preempted:
                    self.note(self.migrations.left_source(name, AbortReason.PREEMPTED, self.now))
            return
        sampling = [*plan.decodes, *(chunk.request_id for chunk in plan.prefills if chunk.is_last)]
        stopped = tuple(name for name in sampling if self.rng.random() < 0.05)
        for name in sampling:
            if name in self.tokens:
                self.tokens[name] += 1
        for item in core.complete(StepResult(plan.step, stopped), self.now):
            assert item.output_tokens == self.tokens.pop(item.request_id), "tokens were lost on the way"
            self.note(self.migrations.left_source(item.request_id, AbortReason.FINISHED, self.now))

    def start(self) -> None:
        sides = {name: self.side_of(name) for name in self.tokens if name not in self.copies}
        movable = [name for name, side in sides.items() if side is not None and side not in self.open]
        if movable:
            name = self.pick(movable)
            source = sides[name] or ""
            self.note(self.migrations.start(Move(name, source, "b" if source == "a" else "a"), self.now))

    def copied(self) -> None:
        busy = self.open
        ready = [name for name, copy in self.copies.items() if not copy.live or copy.move.source not in busy]
        if ready:
            name = self.pick(ready)
            before, outcome = self.copies[name], self.migrations.copied(name, self.now)
            if isinstance(outcome, Copy):
                assert outcome.num_blocks <= 2
            if isinstance(outcome, Committed):
                assert not before.live
                assert self.side_of(name) == outcome.move.destination
            self.note(outcome)

    def drain(self) -> None:
        for aborted in self.migrations.on_draining(self.pick(["a", "b"]), self.now):
            self.note(aborted)

    def fail(self) -> None:
        side = self.pick(["a", "b"])
        core, plan = self.sides[side], self.open.pop(side, None)
        moves = {name: copy.move.source for name, copy in self.copies.items() if not copy.live}
        lost = [name for name in self.tokens if moves.get(name, self.side_of(name)) == side]
        for aborted in self.migrations.on_failed(side, self.now):
            self.note(aborted)
        for name in lost:
            assert core.abort(name, self.now) == (name not in moves)
            del self.tokens[name]
        if plan is not None:
            core.complete(StepResult(plan.step), self.now)
        assert core.pool.kv.num_free_blocks == 12, "a failed replica still has memory of a request"

    def give_up(self) -> None:
        """A client gives up a request, often one that migrates, wherever it is."""
        if self.tokens:
            name = self.pick([*self.copies] or [*self.tokens])
            side = self.side_of(name)
            assert (self.migrations.stopped(name) is None) == (side is not None)
            self.note(self.migrations.given_up(name, self.now))
            if side is not None:
                self.sides[side].abort(name, self.now)
            del self.tokens[name]

    def check(self) -> None:
        for core in self.sides.values():
            core.validate()
        for name, tokens in self.tokens.items():
            side = self.side_of(name)
            stopped = self.migrations.stopped(name) is not None
            assert (side is None) == stopped, "on one side, or stopped between them"
            if side is not None:
                assert self.sides[side].state(name).num_output_tokens == tokens


@pytest.mark.parametrize("policy", ["fcfs", "tie", "srpt", "las"])
def test_requests_keep_their_tokens_and_memory_is_conserved(policy: str) -> None:
    """All invariants after every call, no token lost but with a failed side, nearly every way out taken, and both decision logs replay."""
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
            assert core.pool.kv.num_free_blocks == 12
            assert replay(walk.logs[side].entries).counters == core.counters
        ends += walk.ends
    assert ends.count("committed") > 20
    assert set(AbortReason) - {AbortReason.STALLED, AbortReason.PREEMPTED} <= set(ends)
