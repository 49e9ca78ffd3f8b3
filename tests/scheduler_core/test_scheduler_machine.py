"""Random calls on every policy and batch former: invariants after each, nothing lost, exact replay; lockstep."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler_core.batching import BATCH_FORMERS
from scheduler_core.engine.decision_log import DecisionLog
from scheduler_core.engine.plan import StepPlan, StepResult
from scheduler_core.errors import InputError
from scheduler_core.policies import POLICIES
from scheduler_core.policies.base import KeyChanges, Policy, Progress
from scheduler_core.prediction.predictions import (
    BucketPrediction,
    Prediction,
    RankPrediction,
    UrgencyPrediction,
)
from scheduler_core.replay import replay
from scheduler_core.request import Request, RequestState, Segment
from scheduler_core.scheduler import Scheduler
from tests.scheduler_core import helpers

PAIRS = helpers.compatible_pairs(POLICIES, BATCH_FORMERS)

slos = st.none() | st.sampled_from([0.1, 1.0, 30.0])

contents = st.lists(st.builds(Segment, st.sampled_from("ab"), st.integers(1, 12)), max_size=2).map(tuple)

bundles = st.builds(
    Prediction,
    length=st.builds(helpers.prediction, st.floats(0.5, 50), st.floats(1e-3, 2)),
    urgency=st.none() | st.just(UrgencyPrediction((0.1, 0.6, 0.1, 0.1, 0.1))),
    bucket=st.none() | st.just(BucketPrediction((0.2, 0.8), (10.0,))),
    rank=st.none() | st.builds(RankPrediction, st.floats(-3, 3)),
)  # fmt: skip


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, predicts, steps and aborts at random, on a cache so small that preemptions are common."""

    @initialize(
        pair=st.sampled_from(PAIRS), max_num_seqs=st.integers(1, 4), more_tokens=st.integers(0, 12),
        num_kv_blocks=st.integers(2, 12), kv_block_tokens=st.integers(1, 5),
        num_host_cache_blocks=st.sampled_from([0, 3, 20]),
        kv_watermark=st.sampled_from([0.0, 0.01, 0.3]), num_swap_blocks=st.sampled_from([None, 0, 2, 20]),
    )  # fmt: skip
    def start(self, pair: tuple[str, str], more_tokens: int, **limits: Any) -> None:
        policy, former = pair
        self.log = DecisionLog()
        limits["max_num_batched_tokens"] = limits["max_num_seqs"] + more_tokens
        limits["preemption"] = "recompute" if limits["num_swap_blocks"] is None else "swap"
        limits |= {"batching": former, "batching_parameters": helpers.SMALL_PARAMETERS.get(former, {})}
        self.core = helpers.scheduler(policy, log=self.log, **limits)
        self.now = 0.0
        self.next_id = 0
        self.live: dict[str, Request] = {}
        self.tokens: dict[str, int] = {}
        self.open: StepPlan | None = None

    @rule(passes=st.sampled_from([0.0, 0.25, 10.0]))
    def time_passes(self, passes: float) -> None:
        self.now += passes

    @rule(
        prompt=st.integers(1, 20), cap=st.integers(1, 20), content=contents, session=st.sampled_from(["", "s", "t"]),
        priority=st.integers(-1, 1), tier=st.integers(0, 9), tenant=st.sampled_from(["", "other"]),
        tbt_slo_s=slos, ttft_slo_s=slos,
    )  # fmt: skip
    def add(self, prompt: int, cap: int, content: tuple[Segment, ...], **fields: Any) -> None:
        name = f"r{self.next_id}"
        self.next_id += 1
        if sum(item.num_tokens for item in content) <= prompt:
            fields["content"] = content
        item = helpers.request(name, self.now, prompt, cap, **fields)
        refusal = self.core.refusal(item)
        capacity = self.core.config.capacity_blocks * self.core.config.kv_block_tokens
        assert refusal is not None or prompt + cap <= capacity
        if refusal is not None:
            with pytest.raises(InputError):
                self.core.add(item, self.now)
            return
        self.core.add(item, self.now)
        self.live[name] = item
        self.tokens[name] = 0

    @precondition(lambda self: self.live)
    @rule(data=st.data(), bundle=st.none() | bundles)
    def predict(self, data: st.DataObject, bundle: Prediction | None) -> None:
        self.core.update(data.draw(st.sampled_from(sorted(self.live))), bundle, self.now)

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

    @rule(session=st.sampled_from(["s", "t", "unknown"]))
    def end_session(self, session: str) -> None:
        is_live = any(item.session == session for item in self.live.values())
        assert self.core.end_session(session, self.now) is not is_live

    @precondition(lambda self: self.open is None)
    @rule()
    def schedule(self) -> None:
        plan = self.core.schedule(self.now)
        if plan is None:
            assert not self.live, "work conserving: an idle step with requests around"
            return
        self.core.validate()
        limits = self.core.config
        assert 0 < plan.num_prefill_tokens + len(plan.decodes) <= limits.max_num_batched_tokens
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
        assert replay(self.log.entries).counters == self.core.counters
        # Whatever happened, every request left can be brought to its end.
        plan = self.open or self.core.schedule(self.now)
        for _ in range(20_000):
            if plan is None:
                break
            self.now += 0.001  # short against the times after which policies promote who waits
            self.core.complete(StepResult(plan.step), self.now)
            self.core.validate()
            plan = self.core.schedule(self.now)
        assert self.core.num_waiting == self.core.num_running == 0
        assert self.core.pool.kv.num_free_blocks == self.core.config.capacity_blocks


SchedulerMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase


FORMERS = [name for name, kind in BATCH_FORMERS.items() if kind.lockstep]


def core_of(
    policy: str | Policy, former: str, blocks: int = 40, preemption: str = "recompute", *, individually: bool
) -> Scheduler:
    """In lockstep, or with requests advanced one by one."""
    core = helpers.scheduler(
        policy, max_num_seqs=6, max_num_batched_tokens=200 if former != "chunked_prefill" else 24,
        num_kv_blocks=blocks, kv_block_tokens=4, num_swap_blocks=12 if preemption == "swap" else None,
        preemption=preemption, batching=former,
    )  # fmt: skip
    if individually:
        core.pool.end_lockstep()
    return core


def drive(core: Scheduler, *, read: bool = False, max_steps: int = 1, predict: bool = False) -> list[object]:
    """Arrivals, predictions, stops and aborts at random; all that comes out.

    At most `max_steps` steps are taken at once; with `read` every state is read in every step.
    """
    rng = np.random.default_rng(7)
    outcomes: list[object] = []
    arrived, now = 0, 0.0
    while arrived < 35 or core.num_running or core.num_waiting:
        while arrived < 35 and rng.random() < 0.4:
            item = helpers.request(
                f"r{arrived}", now, int(rng.integers(1, 90)), int(rng.integers(1, 40)),
                priority=int(rng.integers(9)), tier=int(rng.integers(5)), tenant=f"t{arrived % 3}",
            )  # fmt: skip
            core.add(item, now)
            arrived += 1
        if predict and rng.random() < 0.5:
            core.update(f"r{int(rng.integers(35))}", helpers.full_prediction(float(rng.uniform(2, 40))), now)
        plan = core.schedule(now)
        now += 1.0
        if plan is None:
            continue
        if read:
            decoded = sum(state.num_computed_tokens for state in core.decoding)
            assert decoded + sum(chunk.start_token for chunk in plan.prefills) == plan.num_context_tokens
        promised = core.steady_steps(int(rng.integers(1, max_steps + 1)))
        steps = int(rng.integers(1, promised + 1))
        stopped = [name for name in plan.decodes if rng.random() < 0.02]
        if rng.random() < 0.05 and plan.decodes:
            core.abort(plan.decodes[int(rng.integers(len(plan.decodes)))], now)
        outcomes.append((plan, steps, core.complete(StepResult(plan.step, tuple(stopped), steps), now)))
        if read:
            core.validate()
    outcomes.append((core.counters, core.pool.kv.peak_blocks, core.pool.kv.num_free_blocks))
    return outcomes


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("blocks", [34, 200])
@pytest.mark.parametrize("former", FORMERS)
def test_lockstep_equals_single_requests(former: str, blocks: int, preemption: str) -> None:
    def run(read: bool, individually: bool, max_steps: int) -> list[object]:
        core = core_of("fcfs", former, blocks, preemption, individually=individually)
        assert core.num_common_steps == (None if individually else 0)
        return drive(core, read=read, max_steps=max_steps)

    together = run(read=False, individually=False, max_steps=30)
    assert together == run(read=True, individually=False, max_steps=30)
    # Individually, chunks are not taken several at once: then the draws would be others.
    max_steps = 1 if former == "chunked_prefill" else 30
    assert run(False, False, max_steps) == run(True, True, max_steps)


@dataclass(kw_only=True, slots=True)
class WrongDeclaration(Policy):
    """Reads running requests although it declares that it does not."""

    key_changes: ClassVar[KeyChanges] = "with_time"
    progress: ClassVar[Progress] = "unused"
    _running: list[RequestState] = field(default_factory=list, init=False, repr=False)

    def on_admit(self, state: RequestState, now: float) -> None:
        self._running.append(state)

    def key(self, state: RequestState, now: float) -> float:
        return (sum(other.num_output_tokens for other in self._running) * (1 + state.order)) % 7


def decides_the_same(make: Callable[[], Policy], former: str) -> bool:
    ways = (core_of(make(), former, individually=individually) for individually in (False, True))
    together, individually = (drive(core, predict=True) for core in ways)
    return together == individually


@pytest.mark.parametrize(("policy", "former"), [pair for pair in PAIRS if pair[1] in FORMERS])
def test_every_policy_decides_the_same_both_ways(policy: str, former: str) -> None:
    assert decides_the_same(POLICIES[policy], former)


def test_a_wrong_declaration_would_be_seen() -> None:
    assert not decides_the_same(WrongDeclaration, "vllm")
