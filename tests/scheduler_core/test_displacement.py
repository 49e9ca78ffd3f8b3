"""A waiting request takes the place of running ones: only if the policy allows it, and never in vain."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pytest

from scheduler_core.plan import StepResult
from scheduler_core.policies.base import KeyChanges, Policy
from scheduler_core.queues import EvictionQueue
from scheduler_core.request import Request, RequestState
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from tests.scheduler_core.driving import Drive, line
from tests.scheduler_core.helpers import request


@dataclass(kw_only=True, slots=True)
class Urgent(Policy):
    """The declared priority, preemptive; priority 99 is not to be evicted."""

    key_changes: ClassVar[KeyChanges] = "never"
    preemptive: ClassVar[bool] = True
    running_keys: ClassVar[Literal["on_event", "on_tokens"]] = "on_event"

    def key(self, state: RequestState, now: float) -> float:
        return float(state.request.priority)

    def eviction_key(self, state: RequestState, now: float) -> float:
        return -math.inf if state.request.priority == 99 else float(state.request.priority)


class Attained(Urgent):
    """Least attained service, looked up when it is needed."""

    running_keys: ClassVar[Literal["on_event", "on_tokens"]] = "on_tokens"

    def key(self, state: RequestState, now: float) -> float:
        return float(state.attained_tokens)

    def eviction_key(self, state: RequestState, now: float) -> float:
        return float(state.attained_tokens)


def ask(name: str, priority: int, prompt: int = 4, arrival_s: float = 0.0, cap: int = 20) -> Request:
    return Request(
        request_id=name, arrival_s=arrival_s, prompt_tokens=prompt, max_tokens=cap, priority=priority
    )


def core_of(policy: Policy | None = None, **limits: Any) -> Scheduler:
    values = {"kv_block_tokens": 1, "kv_watermark": 0.0, "num_kv_blocks": 1000, **limits}
    return Scheduler(SchedulerConfig(**values), policy or Urgent())


def step(core: Scheduler, now: float = 0.0) -> str:
    plan = core.schedule(now)
    assert plan is not None
    core.validate()
    core.complete(StepResult(plan.step), now)
    core.validate()
    return line(plan)


FORMERS = ["chunked_prefill", "vllm"]


@pytest.mark.parametrize("former", [*FORMERS, "stage_aware"])
def test_the_running_request_of_the_largest_key_gives_up_its_seat(former: str) -> None:
    core = core_of(max_num_seqs=2, batching=former)
    core.add(ask("low", 3), 0.0)
    core.add(ask("middle", 2), 0.0)
    step(core)
    core.add(ask("high", 1), 1.0)
    if former == "chunked_prefill":
        assert step(core, 1.0) == "high+4. middle -low"
    elif former == "vllm":
        assert step(core, 1.0) == "high+4. -low"
        assert step(core, 2.0) == "middle high"
    else:
        assert step(core, 1.0) == "high+4. middle", "its memory is its own; only the batch is limited"


@pytest.mark.parametrize("former", FORMERS)
def test_equal_keys_and_protected_requests_are_left_alone(former: str) -> None:
    core = core_of(max_num_seqs=2, batching=former)
    core.add(ask("protected", 99), 0.0)
    core.add(ask("equal", 1), 0.0)
    step(core)
    core.add(ask("newcomer", 1), 1.0)
    assert step(core, 1.0) in ("protected equal", "equal protected")


@pytest.mark.parametrize("former", [*FORMERS, "stage_aware"])
def test_as_many_go_as_memory_needs_and_no_more(former: str) -> None:
    """20 blocks: a, b, c hold 5 each after their first decode, 5 are free. d needs 8: c must go, b may stay."""
    core = core_of(num_kv_blocks=20, batching=former)
    for name, priority in (("a", 2), ("b", 3), ("c", 4)):
        core.add(ask(name, priority, cap=10), 0.0)
    step(core)
    step(core)
    core.add(ask("d", 1, prompt=8, cap=10), 1.0)
    plan = core.schedule(1.0)
    assert plan is not None
    assert plan.preempted == ("c",)
    assert plan.admitted == ("d",)
    core.complete(StepResult(plan.step), 1.0)
    core.validate()


@pytest.mark.parametrize("former", FORMERS)
def test_nobody_is_evicted_in_vain(former: str) -> None:
    """Evicting low (5 blocks) would not make room for the 14 that d needs, and high may not be evicted for it."""
    core = core_of(num_kv_blocks=16, batching=former)
    core.add(ask("high", 0, cap=10), 0.0)
    core.add(ask("low", 5, cap=10), 0.0)
    step(core)
    step(core)
    core.add(ask("d", 1, prompt=14, cap=2), 1.0)
    plan = core.schedule(1.0)
    assert plan is not None
    assert plan.preempted == ()
    assert set(plan.decodes) == {"high", "low"}


def test_memory_shortage_hits_the_largest_key_not_the_youngest() -> None:
    core = core_of(num_kv_blocks=10)
    core.add(ask("old", 9, cap=6), 0.0)
    core.add(ask("young", 1, cap=6), 0.0)
    step(core)
    step(core)
    assert step(core) == "young -old"


def test_prompts_are_processed_in_order_of_key_whether_they_run_or_not() -> None:
    core = core_of(max_num_seqs=4, max_num_batched_tokens=6)
    core.add(ask("long", 3, prompt=20), 0.0)
    assert step(core) == "long+6"
    core.add(ask("quick", 1, prompt=4), 1.0)
    assert step(core, 1.0) == "quick+4. long+2"


def test_an_evicted_chunk_gives_its_tokens_back() -> None:
    """Attained service: "b" (0 tokens so far) takes the only seat of "a", which is in the middle of its prompt."""
    core = core_of(Attained(), max_num_seqs=1, max_num_batched_tokens=6)
    core.add(ask("a", 0, prompt=20), 0.0)
    assert step(core) == "a+6"
    core.add(ask("b", 0, prompt=4), 1.0)
    assert step(core, 1.0) == "b+4. -a"
    assert core.state("a").attained_tokens == 6, "kept, so that a does not come back at once"
    assert core.state("a").num_computed_tokens == 0


@pytest.mark.parametrize("former", [*FORMERS, "stage_aware"])
@pytest.mark.parametrize("kind", [Urgent, Attained])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_all_are_served_in_the_end(former: str, kind: type[Policy], preemption: str) -> None:
    core = core_of(kind(), max_num_seqs=3, num_kv_blocks=30, batching=former, preemption=preemption)
    given = [
        (ask(f"r{k}", 5 - k // 4, prompt=1 + (5 * k) % 9, arrival_s=0.4 * k), 1 + (3 * k) % 11)
        for k in range(20)
    ]
    run = Drive(core, given)
    run.run()
    assert {name: item.output_tokens for name, item in run.finished.items()} == {
        item.request_id: length for item, length in given
    }
    assert core.counters.num_preemptions > 0


def test_a_policy_that_is_not_preemptive_is_never_asked() -> None:
    class Patient(Urgent):
        preemptive: ClassVar[bool] = False

        def eviction_key(self, state: RequestState, now: float) -> float:
            raise AssertionError("asked")

    core = core_of(Patient(), max_num_seqs=1)
    core.add(ask("low", 9), 0.0)
    step(core)
    core.add(ask("high", 1), 1.0)
    assert step(core, 1.0) == "low"


def test_a_key_that_changed_behind_the_schedulers_back_is_noticed() -> None:
    class Drifting(Urgent):
        def eviction_key(self, state: RequestState, now: float) -> float:
            return float(state.attained_tokens)

    core = core_of(Drifting(), max_num_seqs=2)
    core.add(ask("a", 1), 0.0)
    plan = core.schedule(0.0)
    assert plan is not None
    core.complete(StepResult(plan.step), 0.0)
    core.schedule(1.0)
    with pytest.raises(AssertionError, match="stale key of a"):
        core.validate()


def test_the_eviction_order_is_largest_key_first_then_youngest() -> None:
    order = EvictionQueue(Urgent())
    states = [RequestState(request(f"r{k}", arrival_s=float(k)), order=k) for k in range(4)]
    for state in states:
        order.push(state, 0.0)
    assert [state.request_id for state in order.in_order(0.0)] == ["r3", "r2", "r1", "r0"]
    order.remove(states[3])
    assert order.first(0.0) is order.first_displaceable(0.0) is states[2]
    assert order.key_of(states[2]) == 0.0
    assert len(order) == 3
