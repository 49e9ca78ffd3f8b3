"""Random sequences of calls: invariants after each, nothing lost, and an exact replay at the end."""

from __future__ import annotations

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler_core.decision_log import DecisionLog
from scheduler_core.errors import InputError
from scheduler_core.plan import StepPlan, StepResult
from scheduler_core.policies import POLICIES, make_policy
from scheduler_core.predictions import LengthPrediction
from scheduler_core.replay import replay
from scheduler_core.request import Request
from scheduler_core.scheduler import Scheduler, SchedulerConfig


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, predicts, steps and aborts at random, on a cache so small that preemptions are common."""

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        seqs=st.integers(1, 4),
        more_tokens=st.integers(0, 12),
        blocks=st.integers(2, 12),
        block_tokens=st.integers(1, 5),
        watermark=st.sampled_from([0.0, 0.01, 0.3]),
    )
    def start(
        self, policy: str, seqs: int, more_tokens: int, blocks: int, block_tokens: int, watermark: float
    ) -> None:
        config = SchedulerConfig(
            max_num_seqs=seqs,
            max_num_batched_tokens=seqs + more_tokens,
            num_kv_blocks=blocks,
            kv_block_tokens=block_tokens,
            kv_watermark=watermark,
        )
        self.log = DecisionLog()
        self.core = Scheduler(config, make_policy(policy), self.log)
        self.now = 0.0
        self.next_id = 0
        self.live: dict[str, Request] = {}
        self.tokens: dict[str, int] = {}
        self.open: StepPlan | None = None
        self.ended: list[str] = []

    @rule(passes=st.sampled_from([0.0, 0.25, 10.0]))
    def time_passes(self, passes: float) -> None:
        self.now += passes

    @rule(prompt=st.integers(1, 20), cap=st.integers(1, 20))
    def add(self, prompt: int, cap: int) -> None:
        name = f"r{self.next_id}"
        self.next_id += 1
        item = Request(request_id=name, arrival_s=self.now, prompt_tokens=prompt, max_tokens=cap)
        capacity = self.core.config.num_kv_blocks * self.core.config.kv_block_tokens
        if prompt + cap > capacity:
            try:
                self.core.add(item, self.now)
            except InputError:
                return
            raise AssertionError("a request that cannot fit was taken")
        self.core.add(item, self.now)
        self.live[name] = item
        self.tokens[name] = 0

    @precondition(lambda self: self.live)
    @rule(data=st.data(), median=st.floats(0.5, 50), sigma=st.floats(1e-3, 2), fails=st.booleans())
    def predict(self, data: st.DataObject, median: float, sigma: float, fails: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        self.core.update(name, None if fails else LengthPrediction(math.log(median), sigma, 3.5), self.now)

    @rule(name=st.sampled_from(["r0", "r1", "r99999"]))
    def predict_late(self, name: str) -> None:
        if name not in self.live:
            before = self.core.counters.num_late_predictions
            self.core.update(name, None, self.now)
            assert self.core.counters.num_late_predictions == before + 1

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        assert self.core.abort(name, self.now)
        del self.live[name]

    @precondition(lambda self: self.open is None)
    @rule()
    def schedule(self) -> None:
        plan = self.core.schedule(self.now)
        if plan is None:
            assert not self.live, "work conserving: an idle step with requests around"
            return
        limits = self.core.config
        planned = plan.num_prefill_tokens + len(plan.decodes)
        assert 0 < planned <= limits.max_num_batched_tokens
        names = [*plan.decodes, *(chunk.request_id for chunk in plan.prefills)]
        assert len(names) == len(set(names)) <= limits.max_num_seqs
        assert set(names) <= set(self.live)
        assert not (plan.admitted and plan.preempted)
        self.open = plan

    @precondition(lambda self: self.open is not None)
    @rule(data=st.data(), steps=st.integers(1, 6))
    def complete(self, data: st.DataObject, steps: int) -> None:
        plan = self.open
        assert plan is not None
        self.open = None
        sampling = [*plan.decodes, *(chunk.request_id for chunk in plan.prefills if chunk.is_last)]
        steps = self.core.steady_steps(steps) if not plan.prefills else 1
        stopped = data.draw(st.lists(st.sampled_from(sampling), unique=True)) if sampling else []
        finished = self.core.complete(StepResult(plan.step, tuple(stopped), steps), self.now)
        for name in sampling:
            if name in self.live:
                self.tokens[name] += steps
        for item in finished:
            cap = self.live.pop(item.request_id).max_tokens
            assert item.output_tokens == self.tokens[item.request_id] <= cap
            assert (item.reason == "stop") == (item.request_id in stopped)
            assert item.reason == "stop" or item.output_tokens == cap
        assert not set(stopped) & set(self.live)

    @invariant()
    def holds_together(self) -> None:
        if not hasattr(self, "core"):
            return
        self.core.validate()
        assert self.core.num_waiting + self.core.num_running == len(self.live)
        for name in self.live:
            assert self.core.state(name).num_output_tokens == self.tokens[name]

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        again = replay(self.log.entries)
        assert again.counters == self.core.counters
        self._drain()

    def _drain(self) -> None:
        """Whatever happened, every request left can be brought to its end."""
        if self.open is not None:
            self.complete_quietly(self.open)
        for _ in range(20_000):
            plan = self.core.schedule(self.now)
            if plan is None:
                break
            self.complete_quietly(plan)
        assert self.core.num_waiting == self.core.num_running == 0
        assert self.core.num_free_kv_blocks == self.core.config.num_kv_blocks

    def complete_quietly(self, plan: StepPlan) -> None:
        self.core.complete(StepResult(plan.step), self.now)
        self.core.validate()


SchedulerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase
