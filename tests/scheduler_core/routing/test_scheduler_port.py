"""Requests that come and go between real schedulers, with their cache and without."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_core.errors import InputError
from scheduler_core.plan import StepResult
from scheduler_core.policies import make_policy
from scheduler_core.predictions import UrgencyPrediction
from scheduler_core.request import Request, RequestState
from scheduler_core.routing.migration import Holding, Migrations
from scheduler_core.routing.moves import Aborted, AbortReason, Committed, Copy, Move
from scheduler_core.routing.scheduler_port import MOVABLE, SchedulerPort
from scheduler_core.scheduler import Scheduler, SchedulerConfig, SchedulerStateError
from tests.scheduler_core.helpers import prediction, request, run_step

LIMITS = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "num_kv_blocks": 10, "kv_block_tokens": 4}


def port(policy: str = "tie", **more: object) -> SchedulerPort:
    return SchedulerPort(Scheduler(SchedulerConfig(**{**LIMITS, **more}), make_policy(policy)))  # type: ignore[arg-type]


def decoding(one: SchedulerPort, name: str = "r", prompt: int = 10, cap: int = 20) -> None:
    one.scheduler.add(request(name, prompt=prompt, cap=cap), 0.0)
    run_step(one.scheduler, 0.0)
    assert one.holding(name) is Holding.DECODING


def test_a_running_request_goes_on_where_it_left_off() -> None:
    """10 prompt and 1 output token on the source; after the move the destination generates the 19 that are left."""
    a, b = port(), port()
    decoding(a)
    a.scheduler.update("r", prediction(15), 0.0)
    migrations = Migrations({"a": a, "b": b}, stage_blocks=2)
    move = Move("r", "a", "b")
    assert migrations.start(move, 1.0) == Copy(move, 0, 2, live=True)
    run_step(a.scheduler, 1.5)
    assert migrations.copied("r", 2.0) == Copy(move, 2, 1, live=False)
    assert a.scheduler.schedule(2.0) is None, "its only request is stopped"
    assert migrations.copied("r", 3.0) == Committed(move, 2, 3)
    state = b.scheduler.state("r")
    assert (state.num_output_tokens, state.num_computed_tokens) == (2, 11)
    assert state.prediction == prediction(15)
    assert a.scheduler.num_free_kv_blocks == 10
    finished = ()
    while not finished:
        finished = run_step(b.scheduler, 4.0)
    assert finished[0].output_tokens == 20
    assert finished[0].first_token_s == 0.0
    for one in (a, b):
        one.scheduler.validate()
    assert (a.scheduler.counters.num_moved_out, b.scheduler.counters.num_moved_in) == (1, 1)


def test_a_waiting_request_waits_on_at_the_destination() -> None:
    a, b = port(), port()
    a.scheduler.add(request("r", prompt=10, cap=20), 0.0)
    move = Move("r", "a", "b")
    assert Migrations({"a": a, "b": b}).start(move, 1.0) == Committed(move, 0, 0)
    assert (a.scheduler.num_waiting, b.scheduler.num_waiting) == (0, 1)
    run_step(b.scheduler, 1.0)
    assert b.holding("r") is Holding.DECODING


def test_reserved_blocks_and_seats_are_nobody_elses() -> None:
    """b has 10 blocks and 2 seats. 3 blocks and a seat are reserved: one request of 5 blocks is admitted, another of 1
    block waits for the seat until the reservation is given back."""
    b = port("fcfs")
    assert b.reserve("coming", 3, 0.0)
    b.scheduler.add(request("x", prompt=20, cap=4), 0.0)
    b.scheduler.add(request("y", arrival_s=0.1, prompt=4, cap=4), 0.1)
    plan = b.scheduler.schedule(0.1)
    assert plan is not None
    assert plan.admitted == ("x",)
    b.scheduler.complete(StepResult(plan.step), 0.2)
    b.scheduler.validate()
    assert b.snapshot("b").num_free_blocks == b.scheduler.num_free_kv_blocks == 10 - 3 - 5
    b.unreserve("coming", 0.3)
    run_step(b.scheduler, 0.3)
    assert b.scheduler.num_running == 2
    b.scheduler.validate()


def test_a_full_destination_refuses_and_the_request_goes_on() -> None:
    a, b = port(), port()
    decoding(a)
    decoding(b, "big", prompt=30, cap=4)
    move = Move("r", "a", "b")
    assert Migrations({"a": a, "b": b}).start(move, 1.0) == Aborted(move, AbortReason.DESTINATION_FULL)
    run_step(a.scheduler, 1.0)
    assert a.scheduler.state("r").num_output_tokens == 2


def test_a_replica_with_nothing_but_a_reservation_has_waiting_requests_wait() -> None:
    b = port()
    assert b.reserve("coming", 9, 0.0)
    b.scheduler.add(request("x", prompt=20, cap=4), 0.0)
    assert b.scheduler.schedule(0.0) is None
    b.unreserve("coming", 1.0)
    run_step(b.scheduler, 1.0)
    assert b.scheduler.num_running == 1


def test_a_request_in_the_open_step_cannot_leave() -> None:
    a = port()
    decoding(a)
    plan = a.scheduler.schedule(1.0)
    assert plan is not None
    with pytest.raises(SchedulerStateError, match="takes part in step"):
        a.detach("r", 1.0)
    a.scheduler.complete(StepResult(plan.step), 1.1)
    assert a.detach("r", 1.1).num_output_tokens == 2


def test_no_memory_is_reserved_under_a_promise() -> None:
    a = port()
    decoding(a)
    a.scheduler.schedule(1.0)
    assert a.scheduler.steady_steps(5) == 5
    with pytest.raises(SchedulerStateError, match="promised 5 times"):
        a.reserve("coming", 1, 1.0)


def test_what_does_not_belong_here_is_refused() -> None:
    a, b = port(), port()
    decoding(a)
    with pytest.raises(InputError, match="request_id"):
        a.detach("nobody", 1.0)
    with pytest.raises(InputError, match="num_blocks"):
        a.reserve("coming", 0, 1.0)
    with pytest.raises(SchedulerStateError, match="here already"):
        a.reserve("r", 1, 1.0)
    state = a.detach("r", 1.0)
    assert b.reserve("r", 1, 1.0)
    with pytest.raises(SchedulerStateError, match="too few"):
        b.attach(state, 1.0)
    assert b.reserve("r", 2, 1.0)
    b.attach(state, 1.0)
    with pytest.raises(InputError, match="already"):
        b.attach(state, 1.0)
    huge = RequestState(Request(request_id="h", arrival_s=0.0, prompt_tokens=100, max_tokens=1), order=0)
    with pytest.raises(InputError, match="whole KV cache"):
        b.attach(huge, 1.0)
    a.unreserve("r", 1.0)
    for one in (a, b):
        one.scheduler.validate()


@pytest.mark.parametrize("batching", ["request_level", "orca"])
def test_batch_formers_whose_batches_belong_together_do_not_take_part(batching: str) -> None:
    assert batching not in MOVABLE
    with pytest.raises(InputError, match="chunked_prefill"):
        port("fcfs", batching=batching).reserve("coming", 1, 0.0)


def test_the_snapshot_shows_the_requests_as_they_are() -> None:
    a = port("fcfs")
    decoding(a)
    urgent = Request(request_id="u", arrival_s=1.0, prompt_tokens=9, max_tokens=5, tier=3)
    a.scheduler.add(urgent, 1.0)
    a.scheduler.update("r", prediction(15), 1.0)
    a.scheduler._pool.states["u"].urgency = UrgencyPrediction((0.9, 0.1, 0.0, 0.0, 0.0))
    shown = a.snapshot("a")
    assert (shown.num_running, shown.num_waiting, shown.used_blocks, shown.head_demand_blocks) == (1, 1, 3, 3)
    assert shown.tiers == (2,), "tier 3 rises by one level"
    running, waiting = shown.requests
    assert (running.decoding, running.num_output_tokens, running.prediction) == (True, 1, prediction(15))
    assert (waiting.running, waiting.prefill_left_tokens, waiting.tier) == (False, 9, 2)
    assert a.reserve("coming", 2, 1.0)
    assert a.snapshot("a", keep_requests=False) == replace(a.snapshot("a"), requests=())
    assert a.snapshot("a").num_free_blocks == 10 - 3 - 2
