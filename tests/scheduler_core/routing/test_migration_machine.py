"""Random sequences of migrations, generation, finishes, preemptions, aborts, draining and failures: blocks are conserved on
every side, each request is on exactly one, and every way out is taken by some sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from scheduler_core.routing.migration import Holding, Migrations
from scheduler_core.routing.moves import Aborted, AbortReason, Committed, Copy, Move, Outcome
from tests.scheduler_core.routing.kv_replica import KvReplica

#: Picks one of several things.
Choose = Callable[[Sequence[Any]], Any]

NUM_BLOCKS = 14


class World:
    """Three small replicas, one of them very small; what fails is replaced by an empty one of a new name."""

    def __init__(self) -> None:
        sizes = (("n0", NUM_BLOCKS), ("n1", NUM_BLOCKS), ("n2", 4))
        self.sides = {name: KvReplica(blocks, seats=3) for name, blocks in sizes}
        self.migrations = Migrations(self.sides, stage_blocks=2)
        self.draining: set[str] = set()
        self.live: set[str] = set()
        self.copying: dict[str, Copy] = {}
        self.generated: dict[str, int] = {}
        self.ends: set[AbortReason | str] = set()
        self.names = 0

    def new_name(self, prefix: str) -> str:
        self.names += 1
        return f"{prefix}{self.names}"

    def heard(self, outcome: Outcome | None) -> None:
        """Keeps the test's own books."""
        if isinstance(outcome, Copy):
            self.copying[outcome.move.request_id] = outcome
        elif outcome is not None:
            self.copying.pop(outcome.move.request_id, None)
            self.ends.add(outcome.reason if isinstance(outcome, Aborted) else "committed")

    def place(self, name: str) -> str | None:
        """The replica that has the request; None while it is stopped."""
        found = [side for side, one in self.sides.items() if one.holding(name) is not Holding.NOTHING]
        assert len(found) <= 1, "a request is on two sides"
        return found[0] if found else None

    def pick(self, choose: Choose, *holdings: Holding) -> tuple[str, KvReplica] | None:
        """A request in one of these states, rather one that is being copied, and where it is."""
        found = []
        for name in sorted(self.live):
            where = self.place(name)
            if where is not None and self.sides[where].holding(name) in holdings:
                found.append((name, self.sides[where]))
        moving = [pair for pair in found if pair[0] in self.copying]
        picked: tuple[str, KvReplica] | None = choose(moving or found) if found else None
        return picked

    def pick_side(self, choose: Choose) -> str:
        """A replica, rather one that takes part in a migration."""
        moving = {
            side for copy in self.copying.values() for side in (copy.move.source, copy.move.destination)
        }
        return str(choose(sorted(moving or self.sides)))

    def add(self, choose: Choose) -> None:
        side = self.sides[choose(sorted(self.sides))]
        name, state = self.new_name("r"), choose(["runs", "runs", "waits", "prefills"])
        side.add(name, choose([1, 7, 16, 21, 30]))
        if state != "waits":
            side.admit(name, prefilled=state == "runs")
        self.live.add(name)
        self.generated[name] = 0

    def generate(self, choose: Choose) -> None:
        picked = self.pick(choose, Holding.DECODING)
        if picked is not None:
            tokens = choose([1, 4, 12])
            if picked[1].generate(picked[0], tokens):
                self.generated[picked[0]] += tokens

    def start(self, choose: Choose) -> None:
        free = sorted(self.live - self.migrations.in_flight)
        targets = sorted(set(self.sides) - self.draining)
        if not free or not targets:
            return
        name, target = choose(free), choose(targets)
        source = self.place(name)
        assert source is not None
        if source != target:
            self.heard(self.migrations.start(Move(name, source, target), 0.0))

    def copied(self, choose: Choose) -> None:
        if not self.copying:
            return
        name = choose(sorted(self.copying))
        copy = self.copying[name]
        outcome = self.migrations.copied(name, 0.0)
        if isinstance(outcome, Copy):
            assert outcome.first_block == copy.first_block + copy.num_blocks
            assert outcome.num_blocks <= 2
        if isinstance(outcome, Committed):
            assert not copy.live
            assert self.place(name) == copy.move.destination
            state = self.sides[copy.move.destination].running[name]
            assert outcome.num_blocks * 4 >= state.num_computed_tokens > (outcome.num_blocks - 1) * 4
        self.heard(outcome)

    def preempt(self, choose: Choose) -> None:
        picked = self.pick(choose, Holding.DECODING)
        if picked is not None:
            picked[1].preempt(picked[0])
            self.heard(self.migrations.on_preempted(picked[0], 0.0))

    def finish(self, choose: Choose) -> None:
        picked = self.pick(choose, Holding.DECODING)
        if picked is not None:
            self.drop(*picked)
            self.heard(self.migrations.on_finished(picked[0], 0.0))

    def abort(self, choose: Choose) -> None:
        picked = self.pick(choose, Holding.DECODING, Holding.WAITING)
        if picked is not None:
            self.drop(*picked)
            self.heard(self.migrations.on_aborted(picked[0], 0.0))

    def abort_stopped(self, choose: Choose) -> None:
        stopped = sorted(name for name in self.migrations.in_flight if self.migrations.stopped(name))
        if stopped:
            name = choose(stopped)
            self.heard(self.migrations.on_aborted(name, 0.0))
            self.live.remove(name)

    def drop(self, name: str, side: KvReplica) -> None:
        side.drop(name)
        self.live.remove(name)

    def drain(self, choose: Choose) -> None:
        name = self.pick_side(choose)
        self.draining.add(name)
        for ended in self.migrations.on_draining(name, 0.0):
            self.heard(ended)

    def fail(self, choose: Choose) -> None:
        name = self.pick_side(choose)
        gone = self.sides.pop(name)
        lost = set(gone.waiting) | set(gone.running)
        for ended in self.migrations.on_failed(name, 0.0):
            self.heard(ended)
            if ended.reason is AbortReason.SOURCE_FAILED:
                lost.add(ended.move.request_id)
        self.live -= lost
        self.draining.discard(name)
        self.sides[self.new_name("m")] = KvReplica(choose([5, NUM_BLOCKS]), seats=3)

    def check(self) -> None:
        """Blocks are conserved, nobody is lost or doubled, and memory is kept for nobody but those under way."""
        for side in self.sides.values():
            side.validate()
        assert set(self.copying) == self.migrations.in_flight
        for name in self.live:
            where = self.place(name)
            assert (where is None) == self.migrations.stopped(name), "on one side, or stopped between them"
            if where is not None and name in self.sides[where].running:
                assert self.sides[where].running[name].num_output_tokens == self.generated[name]
        moving = [copy.move for copy in self.copying.values()]
        for side_name, side in self.sides.items():
            arriving = {move.request_id for move in moving if move.destination == side_name}
            leaving = {move.request_id for move in moving if move.source == side_name}
            handing = {name for name in leaving if self.migrations.stopped(name)}
            assert side.reserved == arriving | handing, "memory is kept for nobody"

    def settle(self) -> None:
        """Whatever is under way can be brought to its end, and then nothing is reserved."""
        while self.copying:
            self.heard(self.migrations.copied(sorted(self.copying)[0], 0.0))
        self.check()


#: What can happen; what makes migrations interesting is listed more than once.
ACTIONS = (
    *["add", "start", "copied", "generate"] * 4,
    *("preempt", "finish", "abort", "abort_stopped", "drain", "fail"),
)


class MigrationMachine(RuleBasedStateMachine):
    """Sequences that Hypothesis thinks of, and shrinks when one breaks the books."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    @rule(data=st.data(), action=st.sampled_from(ACTIONS))
    def act(self, data: st.DataObject, action: str) -> None:
        getattr(self.world, action)(lambda things: data.draw(st.sampled_from(things)))

    @invariant()
    def holds_together(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        self.world.settle()


MigrationMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestMigrationMachine = MigrationMachine.TestCase


def test_long_random_walks_keep_the_books_and_reach_every_end() -> None:
    ends: set[AbortReason | str] = set()
    for seed in range(60):
        rng, world = np.random.default_rng(seed), World()
        for _ in range(150):
            action = ACTIONS[rng.integers(len(ACTIONS))]
            getattr(world, action)(lambda things, rng=rng: things[rng.integers(len(things))])
            world.check()
        world.settle()
        ends |= world.ends
    assert ends == {*AbortReason, "committed"}
