"""The scheduler's rules, one by one."""

from __future__ import annotations

import math

import pytest

from scheduler_core.errors import InputError
from scheduler_core.kv_cache import KVCache
from scheduler_core.plan import StepPlan, StepResult
from scheduler_core.policies import POLICIES
from scheduler_core.request import Request
from scheduler_core.scheduler import Scheduler, SchedulerConfig, SchedulerStateError
from tests.scheduler_core.helpers import prediction, request, run_step, scheduler


def plan_of(core: Scheduler, now: float = 0.0) -> StepPlan:
    plan = core.schedule(now)
    assert plan is not None
    return plan


def test_a_request_prefills_then_decodes_until_the_model_stops() -> None:
    core = scheduler()
    core.add(request("a", prompt=10), 1.0)
    first = plan_of(core, 1.0)
    assert [(c.request_id, c.start_token, c.num_tokens, c.is_last) for c in first.prefills] == [
        ("a", 0, 10, True)
    ]
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
    assert core.num_free_kv_blocks == core.config.num_kv_blocks


def test_max_tokens_end_a_request_without_being_told() -> None:
    core = scheduler()
    core.add(request("a", cap=2), 0.0)
    assert run_step(core, 0.0) == ()
    (done,) = run_step(core, 1.0)
    assert (done.reason, done.output_tokens) == ("length", 2)


def test_prompts_are_chunked_and_decodes_come_first() -> None:
    core = scheduler(max_num_seqs=4, max_num_batched_tokens=8)
    core.add(request("a", prompt=3), 0.0)
    core.add(request("b", prompt=12), 0.0)
    first = plan_of(core)
    assert [(c.request_id, c.num_tokens, c.is_last) for c in first.prefills] == [
        ("a", 3, True),
        ("b", 5, False),
    ]
    core.complete(StepResult(first.step), 1.0)
    second = plan_of(core, 1.0)
    assert second.decodes == ("a",)
    assert [(c.request_id, c.start_token, c.num_tokens, c.is_last) for c in second.prefills] == [
        ("b", 5, 7, True)
    ]
    assert second.num_context_tokens == 3 + 5


def test_no_more_than_max_num_seqs_run() -> None:
    core = scheduler(max_num_seqs=2)
    for name in "abc":
        core.add(request(name), 0.0)
    assert plan_of(core).admitted == ("a", "b")
    assert (core.num_running, core.num_waiting) == (2, 1)


def test_running_requests_are_never_displaced_by_shorter_ones() -> None:
    core = scheduler("ssjf", max_num_seqs=1)
    core.add(request("long"), 0.0)
    core.update("long", prediction(90), 0.0)
    run_step(core, 0.0)
    core.add(request("short"), 1.0)
    core.update("short", prediction(2), 1.0)
    assert plan_of(core, 1.0).decodes == ("long",)


def test_a_prediction_moves_a_waiting_request() -> None:
    core = scheduler("ssjf", max_num_seqs=1)
    core.add(request("first"), 0.0)
    core.add(request("second"), 1.0)
    core.update("second", prediction(3), 2.0)
    assert plan_of(core, 2.0).admitted == ("second",)


def test_admission_waits_for_memory_and_keeps_the_watermark() -> None:
    core = scheduler(num_kv_blocks=10, kv_block_tokens=10, kv_watermark=0.2)
    core.add(request("a", prompt=60, cap=10), 0.0)
    core.add(request("b", prompt=30, cap=10), 0.0)
    core.add(request("c", prompt=10, cap=10), 0.0)
    assert plan_of(core).admitted == ("a",), "b would leave one block, c must not overtake b"


def test_a_lone_request_may_use_the_watermark() -> None:
    core = scheduler(num_kv_blocks=10, kv_block_tokens=10, kv_watermark=0.5)
    core.add(request("a", prompt=90, cap=10), 0.0)
    assert plan_of(core).admitted == ("a",)


def test_memory_pressure_preempts_the_youngest_which_recomputes_everything() -> None:
    """Two requests of 10 + up to 20 tokens in 4 blocks of 10: both are admitted, only one can grow."""
    core = scheduler(num_kv_blocks=4, kv_block_tokens=10, kv_watermark=0.0)
    core.add(request("a", prompt=10, cap=25), 0.0)
    core.add(request("b", prompt=10, cap=25), 0.0)
    now = 0.0
    for _ in range(11):
        run_step(core, now)
        now += 1.0
    plan = plan_of(core, now)
    assert plan.preempted == ("b",)
    assert plan.decodes == ("a",)
    assert core.state("b").num_output_tokens == 11
    assert core.state("b").num_preemptions == 1
    core.complete(StepResult(plan.step, ("a",)), now)
    again = plan_of(core, now)
    assert [(c.start_token, c.num_tokens, c.is_last) for c in again.prefills] == [(0, 21, True)]
    core.complete(StepResult(again.step), now)
    assert core.state("b").num_output_tokens == 12, "recomputing yields the next token, none twice"
    core.validate()


def test_a_preempted_request_keeps_its_prediction() -> None:
    core = scheduler("tie", num_kv_blocks=4, kv_block_tokens=10, kv_watermark=0.0)
    for name in "ab":
        core.add(request(name, prompt=10, cap=25), 0.0)
        core.update(name, prediction(20), 0.0)
    for step in range(12):
        run_step(core, float(step))
    assert core.state("b").num_preemptions == 1
    assert core.state("b").prediction == prediction(20)


def test_nothing_is_admitted_in_a_step_that_preempts() -> None:
    """b gives back two blocks, a takes one; c would fit into the other and comes first, but waits a step."""
    core = scheduler("ssjf", num_kv_blocks=4, kv_block_tokens=10, kv_watermark=0.0)
    core.add(request("a", prompt=10, cap=25), 0.0)
    core.add(request("b", prompt=10, cap=25), 0.0)
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


@pytest.mark.parametrize(
    ("field", "value"),
    [("prompt_tokens", 0), ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", True), ("prompt_tokens", 1.5),
     ("arrival_s", math.nan), ("request_id", "")],
)  # fmt: skip
def test_a_senseless_request_is_refused(field: str, value: object) -> None:
    values = {"request_id": "a", "arrival_s": 0.0, "prompt_tokens": 1, "max_tokens": 1, field: value}
    with pytest.raises(InputError, match=field):
        Request(**values)  # type: ignore[arg-type]


def test_an_id_may_be_used_once_at_a_time() -> None:
    core = scheduler()
    core.add(request("a"), 0.0)
    with pytest.raises(InputError, match="request_id"):
        core.add(request("a"), 0.0)
    core.abort("a", 0.0)
    core.add(request("a"), 0.0)
    core.validate()


def test_abort_while_waiting_running_and_in_the_middle_of_a_step() -> None:
    core = scheduler(max_num_seqs=2)
    for name in "abc":
        core.add(request(name), 0.0)
    plan = plan_of(core)
    assert core.abort("a", 0.5), "in the step under way"
    assert core.abort("c", 0.5), "waiting"
    core.add(request("a"), 0.6)
    assert core.complete(StepResult(plan.step, ("a",)), 1.0) == (), (
        "the new a has nothing to do with the old one"
    )
    assert core.state("b").num_output_tokens == 1
    assert core.abort("b", 1.0), "running"
    assert not core.abort("b", 1.0), "gone"
    assert core.num_waiting == 1
    core.validate()
    assert core.counters.num_aborted == 3


def test_failed_and_late_predictions_are_counted_and_change_nothing() -> None:
    core = scheduler("tie", max_num_seqs=1)
    core.add(request("a"), 0.0)
    core.add(request("b"), 0.0)
    core.update("a", None, 0.0)
    assert core.state("a").prediction_failed
    core.update("b", prediction(99), 0.0)
    core.update("ghost", prediction(1), 0.0)
    assert plan_of(core).admitted == ("b",), "a failed prediction looks long, not short"
    assert core.counters.num_failed_predictions == 1
    assert core.counters.num_late_predictions == 1
    assert core.counters.num_predictions == 1


def test_tie_orders_the_queue_anew_when_pressure_rises() -> None:
    """At beta = 0.1 the wide request scores lower than the sure one, at beta = 0.5 higher."""
    wide, sure = prediction(30, sigma=1.0), prediction(66, sigma=0.01)
    for num_others, first in ((0, "wide"), (60, "sure")):
        core = scheduler("tie", max_num_seqs=10)
        core.add(request("wide", cap=200), 0.0)
        core.add(request("sure", cap=200), 0.0)
        core.update("wide", wide, 0.0)
        core.update("sure", sure, 0.0)
        for index in range(num_others):
            core.add(request(f"other{index}", cap=200), 0.0)
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


def test_a_long_run_equals_single_steps() -> None:
    """steady_steps is bounded by max_tokens and by memory; taking them at once leaves the same state."""
    cores = [scheduler(num_kv_blocks=8, kv_block_tokens=10, kv_watermark=0.0) for _ in range(2)]
    for core in cores:
        core.add(request("a", prompt=10, cap=35), 0.0)
        core.add(request("b", prompt=15, cap=45), 0.0)
        run_step(core, 0.0)
    at_once, single = cores
    plan = plan_of(at_once, 1.0)
    steps = at_once.steady_steps(1000)
    assert steps == 25, "in step 26 both together need a ninth block of 10 tokens"
    at_once.complete(StepResult(plan.step, (), steps), 2.0)
    for step in range(steps):
        single_plan = plan_of(single, 1.0 + step / steps)
        assert single_plan.decodes == plan.decodes
        single.complete(StepResult(single_plan.step), 1.0 + (step + 1) / steps)
    for name in "ab":
        assert at_once.state(name).num_output_tokens == single.state(name).num_output_tokens == 26
    assert at_once.num_free_kv_blocks == single.num_free_kv_blocks == 0
    assert at_once.peak_kv_blocks == single.peak_kv_blocks
    assert plan_of(at_once, 2.0).preempted == plan_of(single, 2.0).preempted == ("b",)


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_keys_are_served_in_order_of_arrival(policy: str) -> None:
    core = scheduler(policy, max_num_seqs=1)
    for name in "cab":
        core.add(request(name), 0.0)
    order = []
    for step in range(3):
        order.append(plan_of(core, float(step)).admitted)
        core.complete(StepResult(step, order[-1]), float(step))
    assert order == [("c",), ("a",), ("b",)]


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_num_seqs", 0), ("max_num_batched_tokens", 3), ("num_kv_blocks", 0), ("kv_block_tokens", -1),
     ("kv_watermark", 1.0), ("batching", "magic")],
)  # fmt: skip
def test_wrong_limits_are_named(field: str, value: object) -> None:
    with pytest.raises(InputError, match=field):
        SchedulerConfig(**{field: value})  # type: ignore[arg-type]


def test_the_cache_counts_its_peak_and_refuses_without_taking() -> None:
    cache = KVCache(4, 10, 0.0)
    assert cache.admit("a", 25, waive_watermark=True)
    assert not cache.admit("b", 11, waive_watermark=False)
    assert cache.admit("b", 10, waive_watermark=False)
    assert not cache.grow("b", 11)
    assert (cache.held_by("a"), cache.held_by("b"), cache.num_free_blocks) == (3, 1, 0)
    cache.release("a")
    assert cache.grow("b", 30)
    assert cache.peak_blocks == 4
    cache.validate({"b"}, set())
