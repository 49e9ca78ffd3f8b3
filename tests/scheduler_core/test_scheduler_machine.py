"""Random sequences of calls on every policy and batch former: invariants after each call, nothing lost, exact replay."""

import math
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler_core.batching import BATCH_FORMERS
from scheduler_core.decision_log import DecisionLog
from scheduler_core.errors import InputError
from scheduler_core.plan import StepPlan, StepResult
from scheduler_core.policies import POLICIES
from scheduler_core.predictions import (
    BucketPrediction,
    LengthPrediction,
    Prediction,
    RankPrediction,
    UrgencyPrediction,
)
from scheduler_core.replay import replay
from scheduler_core.request import Request
from tests.scheduler_core.helpers import SMALL_PARAMETERS, compatible_pairs, scheduler

PAIRS = compatible_pairs(POLICIES, BATCH_FORMERS)

slos = st.none() | st.sampled_from([0.1, 1.0, 30.0])

bundles = st.builds(
    Prediction,
    length=st.builds(
        lambda median, sigma: LengthPrediction(math.log(median), sigma, 3.5), st.floats(0.5, 50),
        st.floats(1e-3, 2),
    ),
    urgency=st.none() | st.just(UrgencyPrediction((0.1, 0.6, 0.1, 0.1, 0.1))),
    bucket=st.none() | st.just(BucketPrediction((0.2, 0.8), (10.0,))),
    rank=st.none() | st.builds(RankPrediction, st.floats(-3, 3)),
)  # fmt: skip


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, predicts, steps and aborts at random, on a cache so small that preemptions are common."""

    @initialize(
        pair=st.sampled_from(PAIRS), seqs=st.integers(1, 4), more_tokens=st.integers(0, 12),
        blocks=st.integers(2, 12), block_tokens=st.integers(1, 5),
        watermark=st.sampled_from([0.0, 0.01, 0.3]), swap=st.sampled_from([None, 0, 2, 20]),
    )  # fmt: skip
    def start(
        self,
        pair: tuple[str, str],
        seqs: int,
        more_tokens: int,
        blocks: int,
        block_tokens: int,
        watermark: float,
        swap: int | None,
    ) -> None:
        policy, former = pair
        self.log = DecisionLog()
        limits: dict[str, Any] = {
            "max_num_seqs": seqs, "max_num_batched_tokens": seqs + more_tokens, "num_kv_blocks": blocks,
            "kv_block_tokens": block_tokens, "kv_watermark": watermark,
            "preemption": "recompute" if swap is None else "swap", "num_swap_blocks": swap,
        }  # fmt: skip
        self.core = scheduler(
            policy, log=self.log, batching=former, batching_parameters=SMALL_PARAMETERS.get(former, {}),
            **limits,
        )  # fmt: skip
        self.now = 0.0
        self.next_id = 0
        self.live: dict[str, Request] = {}
        self.tokens: dict[str, int] = {}
        self.open: StepPlan | None = None

    @rule(passes=st.sampled_from([0.0, 0.25, 10.0]))
    def time_passes(self, passes: float) -> None:
        self.now += passes

    @rule(
        prompt=st.integers(1, 20), cap=st.integers(1, 20), cached=st.integers(0, 5),
        priority=st.integers(-1, 1), tier=st.integers(0, 9), tenant=st.sampled_from(["", "other"]),
        tbt_slo_s=slos, ttft_slo_s=slos,
    )  # fmt: skip
    def add(self, prompt: int, cap: int, cached: int, **fields: Any) -> None:
        name = f"r{self.next_id}"
        self.next_id += 1
        item = Request(
            request_id=name, arrival_s=self.now, prompt_tokens=prompt, max_tokens=cap,
            cached_prefix_tokens=min(cached, prompt - 1), **fields,
        )  # fmt: skip
        refusal = self.core.refusal(item)
        capacity = self.core.config.num_kv_blocks * self.core.config.kv_block_tokens
        assert refusal is not None or prompt + cap <= capacity
        if refusal is not None:
            try:
                self.core.add(item, self.now)
            except InputError:
                return
            raise AssertionError("a request that cannot be served was taken")
        self.core.add(item, self.now)
        self.live[name] = item
        self.tokens[name] = 0

    @precondition(lambda self: self.live)
    @rule(data=st.data(), bundle=st.none() | bundles)
    def predict(self, data: st.DataObject, bundle: Prediction | None) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        self.core.update(name, bundle, self.now)

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
        self.core.validate()
        limits = self.core.config
        planned = plan.num_prefill_tokens + len(plan.decodes)
        assert 0 < planned <= limits.max_num_batched_tokens
        names = [*plan.decodes, *(chunk.request_id for chunk in plan.prefills)]
        assert len(names) == len(set(names)) <= limits.max_num_seqs
        assert set(names) <= set(self.live)
        assert set(plan.preempted).isdisjoint(names)
        for chunk in plan.prefills:
            assert chunk.start_token == self.core.state(chunk.request_id).num_computed_tokens
        assert {moved.request_id for moved in plan.swapped_out} <= set(plan.preempted)
        assert {moved.request_id for moved in plan.swapped_in} <= set(plan.admitted)
        assert limits.preemption == "swap" or plan.num_swapped_tokens == 0
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
        assert self.core.pool.kv.num_free_blocks == self.core.config.num_kv_blocks

    def complete_quietly(self, plan: StepPlan) -> None:
        self.now += 0.001  # short against the times after which policies promote who waits
        self.core.complete(StepResult(plan.step), self.now)
        self.core.validate()


SchedulerMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase
