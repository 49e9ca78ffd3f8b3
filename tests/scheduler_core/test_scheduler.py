"""The scheduler's rules, one by one; who takes whose place: only if the policy allows it, and never in vain."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pytest

from scheduler_core.engine.plan import PrefillChunk, StepPlan, StepResult
from scheduler_core.errors import InputError
from scheduler_core.policies import POLICIES
from scheduler_core.policies.base import KeyChanges, Policy
from scheduler_core.prediction.predictions import Prediction, RankPrediction
from scheduler_core.request import Request, RequestState, Segment
from scheduler_core.scheduler import Scheduler, SchedulerStateError
from tests.scheduler_core.helpers import line, predicted, prediction, request, run_step, scheduler

FORMERS = ["chunked_prefill", "vllm"]


def plan_of(core: Scheduler, now: float = 0.0) -> StepPlan:
    plan = core.schedule(now)
    assert plan is not None
    return plan


def enter(core: Scheduler, *requests: Request) -> None:
    for one in requests:
        core.add(one, 0.0)


def test_a_request_prefills_then_decodes_until_the_model_stops() -> None:
    core = scheduler()
    core.add(request("a", prompt=10), 1.0)
    first = plan_of(core, 1.0)
    assert first.prefills == (PrefillChunk("a", 0, 10, True),)
    assert first.admitted == ("a",)
    assert core.complete(StepResult(first.step), 2.0) == ()
    second = plan_of(core, 2.0)
    assert (second.decodes, second.prefills, second.num_context_tokens) == (("a",), (), 10)
    assert core.complete(StepResult(second.step), 3.0) == ()
    third = plan_of(core, 3.0)
    assert third.num_context_tokens == 11
    (done,) = core.complete(StepResult(third.step, ("a",)), 4.0)
    assert (done.reason, done.output_tokens) == ("stop", 3)
    assert (done.first_scheduled_s, done.first_token_s) == (1.0, 2.0)
    assert core.schedule(5.0) is None
    assert core.pool.kv.num_free_blocks == core.config.capacity_blocks


def test_admission_waits_for_memory_and_keeps_the_watermark() -> None:
    core = scheduler(num_kv_blocks=10, kv_block_tokens=10, kv_watermark=0.2)
    core.add(request("a", prompt=60, cap=10), 0.0)
    core.add(request("b", prompt=30, cap=10), 0.0)
    core.add(request("c", prompt=10, cap=10), 0.0)
    assert plan_of(core).admitted == ("a",), "b would leave one block, c must not overtake b"


def test_memory_pressure_preempts_the_youngest_which_recomputes_everything() -> None:
    """Two requests of 10 + up to 20 tokens in 4 blocks of 10: both are admitted, only one can grow."""
    core = scheduler(num_kv_blocks=4, kv_block_tokens=10, kv_watermark=0.0)
    enter(core, request("a", prompt=10, cap=25), request("b", prompt=10, cap=25))
    core.update("b", predicted(20), 0.0)
    now = 0.0
    for _ in range(11):
        run_step(core, now)
        now += 1.0
    plan = plan_of(core, now)
    assert plan.preempted == ("b",)
    assert plan.decodes == ("a",)
    assert core.state("b").num_output_tokens == 11
    assert (core.state("b").num_preemptions, core.state("b").prediction) == (1, prediction(20))
    core.complete(StepResult(plan.step, ("a",)), now)
    again = plan_of(core, now)
    assert [(c.start_token, c.num_tokens, c.is_last) for c in again.prefills] == [(0, 21, True)]
    core.complete(StepResult(again.step), now)
    assert core.state("b").num_output_tokens == 12, "recomputing yields the next token, none twice"
    core.validate()


def test_nothing_is_admitted_in_a_step_that_preempts() -> None:
    """b gives back two blocks, a takes one; c would fit into the other and comes first, but waits a step."""
    core = scheduler("ssjf", num_kv_blocks=4, kv_block_tokens=10, kv_watermark=0.0)
    enter(core, request("a", prompt=10, cap=25), request("b", prompt=10, cap=25))
    for step in range(11):
        run_step(core, float(step))
    core.add(request("c", prompt=1, cap=5), 11.0)
    plan = plan_of(core, 11.0)
    assert plan.preempted == ("b",)
    assert plan.admitted == ()
    core.complete(StepResult(plan.step), 12.0)
    assert plan_of(core, 12.0).admitted == ("c",)


@pytest.mark.parametrize("cap", [31, 10**9])
def test_a_request_that_can_never_fit_is_refused_and_leaves_no_trace(cap: int) -> None:
    core = scheduler(num_kv_blocks=4, kv_block_tokens=10)
    with pytest.raises(InputError, match=r"prompt_tokens \+ max_tokens of request a"):
        core.add(request("a", prompt=10, cap=cap), 0.0)
    assert core.counters.num_added == 0
    assert "a" not in core
    core.add(request("a", prompt=10, cap=30), 0.0)


def test_an_id_may_be_used_once_at_a_time() -> None:
    """A request aborted in a step and its successor of the same id are two."""
    core = scheduler(max_num_seqs=2)
    core.add(request("a"), 0.0)
    with pytest.raises(InputError, match="request_id"):
        core.add(request("a"), 0.0)
    plan = plan_of(core)
    assert core.abort("a", 0.5)
    assert not core.abort("a", 0.5), "gone"
    core.add(request("a"), 0.6)
    assert core.complete(StepResult(plan.step, ("a",)), 1.0) == ()
    assert core.state("a").num_output_tokens == 0
    core.validate()


def test_failed_and_late_predictions_are_counted_and_change_nothing() -> None:
    core = scheduler("tie", max_num_seqs=1)
    enter(core, request("a"), request("b"))
    core.update("a", None, 0.0)
    core.update("b", predicted(99), 0.0)
    core.update("ghost", predicted(1), 0.0)
    assert plan_of(core).admitted == ("b",), "a failed prediction looks long, not short"
    assert (core.counters.num_failed_predictions, core.counters.num_late_predictions) == (1, 1)
    assert core.counters.num_predictions == 1


def test_tie_orders_the_queue_anew_when_pressure_rises() -> None:
    """At beta = 0.1 the wide request scores lower than the sure one, at beta = 0.5 higher."""
    wide, sure = predicted(30, sigma=1.0), predicted(66, sigma=0.01)
    for num_others, first in ((0, "wide"), (60, "sure")):
        core = scheduler("tie", max_num_seqs=10)
        enter(core, request("wide", cap=200), request("sure", cap=200))
        core.update("wide", wide, 0.0)
        core.update("sure", sure, 0.0)
        enter(core, *(request(f"other{index}", cap=200) for index in range(num_others)))
        assert plan_of(core).admitted[0] == first
        assert core.counters.num_rekeys == (1 if num_others else 0)


def test_calls_out_of_turn_are_refused() -> None:
    core = scheduler()
    with pytest.raises(SchedulerStateError, match="no step"):
        core.complete(StepResult(0), 0.0)
    with pytest.raises(SchedulerStateError, match="no step"):
        core.steady_steps(5)
    core.add(request("a"), 5.0)
    with pytest.raises(SchedulerStateError, match=r"time 4\.0"):
        core.schedule(4.0)
    with pytest.raises(SchedulerStateError, match="time nan"):
        core.schedule(math.nan)
    plan = plan_of(core, 5.0)
    with pytest.raises(SchedulerStateError, match="not complete"):
        core.schedule(5.0)
    with pytest.raises(SchedulerStateError, match="step 0 is open"):
        core.complete(StepResult(7), 5.0)
    with pytest.raises(InputError, match="stopped"):
        core.complete(StepResult(plan.step, ("b",)), 5.0)
    with pytest.raises(InputError, match="num_steps"):
        core.complete(StepResult(plan.step, (), 2), 5.0)
    core.complete(StepResult(plan.step), 5.0)
    plan = plan_of(core, 5.0)
    assert core.steady_steps(3) == 3
    for ends_s in ((6.0,), (6.0, 5.5), (6.0, 9.0)):
        with pytest.raises(InputError, match="ends_s"):
            core.complete(StepResult(plan.step, (), 3, ends_s), 8.0)
    core.complete(StepResult(plan.step, (), 3, (6.0, 7.0)), 8.0)


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_keys_are_served_in_order_of_arrival(policy: str) -> None:
    core = scheduler(policy, max_num_seqs=1)
    enter(core, *map(request, "cab"))
    order = []
    for step in range(3):
        order.append(plan_of(core, float(step)).admitted)
        core.complete(StepResult(step, order[-1]), float(step))
    assert order == [("c",), ("a",), ("b",)]


def test_a_bundle_replaces_only_what_it_contains() -> None:
    core = scheduler()
    core.add(request("a"), 0.0)
    core.update("a", Prediction(length=prediction(5), rank=RankPrediction(1.0)), 0.0)
    core.update("a", Prediction(rank=RankPrediction(2.0)), 0.0)
    state = core.state("a")
    assert (state.prediction, state.rank) == (prediction(5), RankPrediction(2.0))
    assert (state.urgency, state.bucket) == (None, None)
    core.update("a", None, 0.0)
    assert state.prediction == prediction(5)


@dataclass(kw_only=True, slots=True)
class Urgent(Policy):
    """The declared priority, preemptive; priority 99 is not to be evicted."""

    key_changes: ClassVar[KeyChanges] = "never"
    preemptive: ClassVar[bool] = True
    running_keys: ClassVar[Literal["on_event", "on_tokens"]] = "on_event"
    inputs: ClassVar[frozenset[str]] = frozenset({"priority"})

    def key(self, state: RequestState, now: float) -> float:
        return float(state.request.priority)

    def eviction_key(self, state: RequestState, now: float) -> float:
        return -math.inf if state.request.priority == 99 else float(state.request.priority)


def ask(name: str, priority: int, prompt: int = 4, cap: int = 20) -> Request:
    return request(name, prompt=prompt, cap=cap, priority=priority)


def core_of(policy: Policy | None = None, **limits: Any) -> Scheduler:
    values = {"kv_block_tokens": 1, "kv_watermark": 0.0, "num_kv_blocks": 1000, **limits}
    return scheduler(policy or Urgent(), **values)


def planned(core: Scheduler, now: float) -> StepPlan:
    """A step, which ends at once."""
    plan = plan_of(core, now)
    core.validate()
    core.complete(StepResult(plan.step), now)
    core.validate()
    return plan


def step(core: Scheduler, now: float = 0.0) -> str:
    return line(planned(core, now))


@pytest.mark.parametrize("former", [*FORMERS, "stage_aware"])
def test_the_running_request_of_the_largest_key_gives_up_its_seat(former: str) -> None:
    core = core_of(max_num_seqs=2, batching=former)
    enter(core, ask("low", 3), ask("middle", 2))
    step(core)
    core.add(ask("high", 1), 1.0)
    if former == "chunked_prefill":
        assert step(core, 1.0) == "high+4. middle -low"
    elif former == "vllm":
        assert (step(core, 1.0), step(core, 2.0)) == ("high+4. -low", "middle high")
    else:
        assert step(core, 1.0) == "high+4. middle", "its memory is its own; only the batch is limited"


@pytest.mark.parametrize("former", FORMERS)
def test_equal_keys_and_protected_requests_are_left_alone(former: str) -> None:
    core = core_of(max_num_seqs=2, batching=former)
    enter(core, ask("protected", 99), ask("equal", 1))
    step(core)
    core.add(ask("newcomer", 1), 1.0)
    assert step(core, 1.0) in ("protected equal", "equal protected")


@pytest.mark.parametrize("former", [*FORMERS, "stage_aware"])
def test_as_many_go_as_memory_needs_and_no_more(former: str) -> None:
    """20 blocks: a, b, c hold 5 each after their first decode, 5 are free. d needs 8: c must go, b may stay."""
    core = core_of(num_kv_blocks=20, batching=former)
    enter(core, ask("a", 2, cap=10), ask("b", 3, cap=10), ask("c", 4, cap=10))
    step(core)
    step(core)
    core.add(ask("d", 1, prompt=8, cap=10), 1.0)
    plan = planned(core, 1.0)
    assert (plan.preempted, plan.admitted) == (("c",), ("d",))


@pytest.mark.parametrize("former", FORMERS)
def test_nobody_is_evicted_in_vain(former: str) -> None:
    """Evicting low (5 blocks) would not make room for the 14 that d needs, and high may not be evicted for it."""
    core = core_of(num_kv_blocks=16, batching=former)
    enter(core, ask("high", 0, cap=10), ask("low", 5, cap=10))
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


@pytest.mark.mend  # working_set and depth_first: a swapped request that is first left the step empty
@pytest.mark.parametrize("policy", ["depth_first", "working_set"])
def test_policies_that_protect_running_requests_are_refused_by_stages(policy: str) -> None:
    with pytest.raises(InputError, match="policy under StageAware"):
        scheduler(policy, batching="stage_aware")


@pytest.mark.mend  # evicted again and again for turns whose keys were always smaller
@pytest.mark.parametrize("policy", ["continuum", "longest_prefix", "thunder_agent"])
def test_prompts_that_do_not_fit_together_are_not_evicted_for_each_other_without_end(policy: str) -> None:
    core = scheduler(
        policy, batching="stage_aware", max_num_seqs=6, max_num_batched_tokens=16, num_kv_blocks=25,
        kv_block_tokens=4, kv_watermark=0.0,
    )  # fmt: skip
    prompts = [70, 44, 65, 62, 75, 51, 30]
    for number, prompt in enumerate(prompts):
        session = "abc"[number % 3]
        content = (Segment(session, prompt),)
        core.add(request(str(number), 0.0, prompt=prompt, cap=9, session=session, content=content), 0.0)
    now = 0.0
    while core.num_waiting + core.num_running and now < 150.0:
        now += 1.0
        run_step(core, now)
    assert core.counters.num_finished == len(prompts)
