"""A waiting request takes the place of running ones: only if the policy allows it, and never in vain."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pytest

from scheduler_core.plan import StepPlan, StepResult
from scheduler_core.policies.base import KeyChanges, Policy
from scheduler_core.request import Request, RequestState
from scheduler_core.scheduler import Scheduler
from tests.scheduler_core.driving import line
from tests.scheduler_core.helpers import request, scheduler


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


def ask(name: str, priority: int, prompt: int = 4, cap: int = 20) -> Request:
    return request(name, prompt=prompt, cap=cap, priority=priority)


def core_of(policy: Policy | None = None, **limits: Any) -> Scheduler:
    return scheduler(
        policy or Urgent(), **{"kv_block_tokens": 1, "kv_watermark": 0.0, "num_kv_blocks": 1000, **limits}
    )


def planned(core: Scheduler, now: float) -> StepPlan:
    """A step, which ends at once."""
    plan = core.schedule(now)
    assert plan is not None
    core.validate()
    core.complete(StepResult(plan.step), now)
    core.validate()
    return plan


def step(core: Scheduler, now: float = 0.0) -> str:
    return line(planned(core, now))


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
    plan = planned(core, 1.0)
    assert (plan.preempted, plan.admitted) == (("c",), ("d",))


@pytest.mark.parametrize("former", FORMERS)
def test_nobody_is_evicted_in_vain(former: str) -> None:
    """Evicting low (5 blocks) would not make room for the 14 that d needs, and high may not be evicted for it."""
    core = core_of(num_kv_blocks=16, batching=former)
    core.add(ask("high", 0, cap=10), 0.0)
    core.add(ask("low", 5, cap=10), 0.0)
    step(core)
    step(core)
    core.add(ask("d", 1, prompt=14, cap=2), 1.0)
    plan = planned(core, 1.0)
    assert plan.preempted == ()
    assert set(plan.decodes) == {"high", "low"}


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
