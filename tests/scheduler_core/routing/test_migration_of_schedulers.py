"""Random walks over two real schedulers with migrations between them: all invariants after every call, no token lost, and the
decision logs of both replay exactly."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler_core.decision_log import DecisionLog
from scheduler_core.plan import StepPlan, StepResult
from scheduler_core.policies import make_policy
from scheduler_core.replay import replay
from scheduler_core.routing.migration import Holding, Migrations
from scheduler_core.routing.moves import Aborted, AbortReason, Committed, Copy, Move, Outcome
from scheduler_core.routing.scheduler_port import SchedulerPort
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from tests.scheduler_core.helpers import prediction, request

ACTIONS = [*["add", "predict", "start", "copied"] * 2, *["step"] * 8, "abort"]


class Pair:
    """Schedulers a and b with small caches, so that preemptions and full destinations are common."""

    def __init__(self, policy: str, rng: np.random.Generator) -> None:
        config = SchedulerConfig(
            max_num_seqs=3, max_num_batched_tokens=16, num_kv_blocks=12, kv_block_tokens=4, kv_watermark=0.0
        )
        self.rng = rng
        self.logs = {name: DecisionLog() for name in "ab"}
        self.ports = {
            name: SchedulerPort(Scheduler(config, make_policy(policy), log))
            for name, log in self.logs.items()
        }
        self.migrations = Migrations(self.ports, stage_blocks=2)
        self.open: dict[str, StepPlan] = {}
        self.copying: dict[str, Copy] = {}
        self.tokens: dict[str, int] = {}
        self.ends: list[AbortReason | str] = []
        self.now = 0.0

    def one_of(self, names: list[str]) -> str:
        return names[int(self.rng.integers(len(names)))]

    def heard(self, outcome: Outcome | None) -> None:
        if isinstance(outcome, Copy):
            self.copying[outcome.move.request_id] = outcome
        elif outcome is not None:
            self.copying.pop(outcome.move.request_id, None)
            self.ends.append(outcome.reason if isinstance(outcome, Aborted) else "committed")

    def place(self, name: str) -> str | None:
        found = [side for side, port in self.ports.items() if port.holding(name) is not Holding.NOTHING]
        assert len(found) <= 1, "a request is on two sides"
        return found[0] if found else None

    def add(self) -> None:
        name = f"r{len(self.tokens)}-{self.now}"
        asked = request(
            name, self.now, prompt=int(self.rng.integers(1, 25)), cap=int(self.rng.integers(1, 20))
        )
        self.ports[self.one_of(["a", "a", "b"])].scheduler.add(asked, self.now)
        self.tokens[name] = 0

    def predict(self) -> None:
        placed = [name for name in self.tokens if self.place(name) is not None]
        if placed:
            name = self.one_of(placed)
            core = self.ports[self.place(name) or ""].scheduler
            core.update(name, prediction(float(self.rng.uniform(1, 20))), self.now)

    def step(self) -> None:
        side = self.one_of(["a", "b"])
        core = self.ports[side].scheduler
        plan = self.open.pop(side, None)
        if plan is None:
            plan = core.schedule(self.now)
            if plan is not None:
                self.open[side] = plan
                for name in plan.preempted:
                    self.heard(self.migrations.on_preempted(name, self.now))
            return
        sampling = [*plan.decodes, *(chunk.request_id for chunk in plan.prefills if chunk.is_last)]
        stopped = tuple(name for name in sampling if self.rng.random() < 0.05)
        for name in sampling:
            if name in self.tokens:
                self.tokens[name] += 1
        for item in core.complete(StepResult(plan.step, stopped), self.now):
            assert item.output_tokens == self.tokens.pop(item.request_id), "tokens were lost on the way"
            self.heard(self.migrations.on_finished(item.request_id, self.now))

    def start(self) -> None:
        movable = [
            name
            for name in self.tokens
            if name not in self.copying and (side := self.place(name)) is not None and side not in self.open
        ]
        if movable:
            name = self.one_of(movable)
            source = self.place(name)
            assert source is not None
            self.heard(self.migrations.start(Move(name, source, "b" if source == "a" else "a"), self.now))

    def copied(self) -> None:
        ready = [
            name for name, copy in self.copying.items() if not copy.live or copy.move.source not in self.open
        ]
        if ready:
            name = self.one_of(ready)
            outcome = self.migrations.copied(name, self.now)
            if isinstance(outcome, Committed):
                state = self.ports[outcome.move.destination].scheduler.state(name)
                assert state.num_output_tokens == self.tokens[name]
            self.heard(outcome)

    def abort(self) -> None:
        if self.tokens:
            name = self.one_of(list(self.tokens))
            where = self.place(name)
            if where is not None:
                assert self.ports[where].scheduler.abort(name, self.now)
            self.heard(self.migrations.on_aborted(name, self.now))
            del self.tokens[name]

    def check(self) -> None:
        for port in self.ports.values():
            port.scheduler.validate()
        for name, tokens in self.tokens.items():
            where = self.place(name)
            assert (where is None) == self.migrations.stopped(name), "on one side, or stopped between them"
            if where is not None:
                assert self.ports[where].scheduler.state(name).num_output_tokens == tokens


@pytest.mark.parametrize("policy", ["fcfs", "tie", "srpt", "las"])
def test_requests_keep_their_tokens_and_memory_is_conserved(policy: str) -> None:
    ends: list[AbortReason | str] = []
    for seed in range(8):
        pair = Pair(policy, np.random.default_rng(seed))
        for _ in range(250):
            pair.now += 0.25
            getattr(pair, ACTIONS[int(pair.rng.integers(len(ACTIONS)))])()
            pair.check()
        for _ in range(2000):
            if not pair.tokens:
                break
            pair.now += 0.25
            pair.step()
            pair.copied()
            pair.check()
        assert not pair.tokens, "every request left can be brought to its end"
        for name, port in pair.ports.items():
            assert port.scheduler.num_free_kv_blocks == 12
            assert replay(pair.logs[name].entries).counters == port.scheduler.counters
        ends += pair.ends
    assert ends.count("committed") > 20
    assert {AbortReason.FINISHED, AbortReason.DESTINATION_FULL} <= set(ends)
