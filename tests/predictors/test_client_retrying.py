"""When the client calls, calls again and gives up; no network, no waiting."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictors.client import BreakerSettings, CircuitOpenError, PredictorError, RetrySettings
from predictors.client.retrying import CircuitBreaker, Result, RetryBudget, RetryPolicy, Send
from predictors.proto import predictor_v1_pb2 as pb
from scheduler_core.errors import InputError

GOOD = pb.PredictResponse(mu=1.0, sigma=0.5, nu=3.5)


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def fault(code: str = "UNAVAILABLE") -> PredictorError:
    return PredictorError("failed", code)


def policy(
    clock: Clock, retries: RetrySettings | None = None, breaker: BreakerSettings | None = None
) -> RetryPolicy:
    return RetryPolicy.of("host:1", retries or RetrySettings(), breaker, clock, random.Random(0))


def messages(count: int) -> list[pb.PredictRequest]:
    return [pb.PredictRequest(request_id=f"r{index}", prompt="sea") for index in range(count)]


def drive(
    policy: RetryPolicy,
    clock: Clock,
    serve: Callable[[Send], Sequence[Result]],
    *,
    count: int = 1,
    timeout_s: float = 10.0,
    call_s: float = 0.0,
) -> tuple[list[Result], list[int], list[float]]:
    """Runs one call to its end: its results, the sizes of its tries, its waits."""
    steps = policy.attempts(messages(count), clock.now + timeout_s)
    sizes, waits = [], []
    try:
        step = next(steps)
        while True:
            if isinstance(step, Send):
                sizes.append(len(step.messages))
                results = serve(step)
                clock.now += call_s
                step = steps.send(results)
            else:
                waits.append(step.seconds)
                clock.now += step.seconds
                step = next(steps)
    except StopIteration as done:
        return done.value, sizes, waits


def test_success_takes_one_try() -> None:
    clock = Clock()
    results, sizes, waits = drive(policy(clock), clock, lambda step: [GOOD] * 3, count=3)
    assert (results, sizes, waits) == ([GOOD] * 3, [3], [])


def test_only_what_failed_is_sent_again_and_results_keep_their_places() -> None:
    clock = Clock()
    second = pb.PredictResponse(mu=2.0)
    answers = iter([[GOOD, fault(), fault("INVALID_ARGUMENT"), fault()], [second, second]])
    results, sizes, _ = drive(policy(clock), clock, lambda step: next(answers), count=4)
    assert sizes == [4, 2]
    assert [results[0], results[1], results[3]] == [GOOD, second, second]
    assert isinstance(results[2], PredictorError)
    assert results[2].code == "INVALID_ARGUMENT"


@pytest.mark.parametrize(
    "code", ["RESOURCE_EXHAUSTED", "INTERNAL", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "UNAUTHENTICATED"]
)
def test_what_a_server_has_decided_is_not_asked_again(code: str) -> None:
    clock = Clock()
    _, sizes, _ = drive(policy(clock), clock, lambda step: [fault(code)])
    assert sizes == [1]


def test_waits_grow_to_their_limit_and_are_random_within_their_upper_half() -> None:
    clock = Clock()
    settings = RetrySettings(max_attempts=8, first_backoff_s=0.1, max_backoff_s=1.0)
    _, sizes, waits = drive(policy(clock, settings), clock, lambda step: [fault()], timeout_s=100)
    assert len(sizes) == 8
    longest = [0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]
    assert all(limit / 2 <= wait <= limit for wait, limit in zip(waits, longest, strict=True))
    assert len({wait / limit for wait, limit in zip(waits, longest, strict=True)}) == 7


@given(
    timeout_s=st.floats(0.001, 20),
    call_s=st.floats(0, 3),
    max_attempts=st.integers(1, 20),
    seed=st.integers(),
)
def test_no_try_begins_and_no_wait_ends_after_the_deadline(
    timeout_s: float, call_s: float, max_attempts: int, seed: int
) -> None:
    clock = Clock()
    one = RetryPolicy.of("host:1", RetrySettings(max_attempts=max_attempts), None, clock, random.Random(seed))
    end = clock.now + timeout_s
    begins = []

    def serve(step: Send) -> Sequence[Result]:
        begins.append(clock.now)
        assert step.timeout_s == pytest.approx(end - clock.now)
        return [fault()]

    results, sizes, _ = drive(one, clock, serve, timeout_s=timeout_s, call_s=call_s)
    assert all(begin < end for begin in begins)
    assert 1 <= len(sizes) <= max_attempts
    assert isinstance(results[0], PredictorError)


def test_retries_stop_when_the_budget_is_spent_and_come_back_with_calls_and_time() -> None:
    clock = Clock()
    settings = RetrySettings(max_attempts=3, max_budget=4, budget_per_call=0.5, budget_per_s=0)
    shared = policy(clock, settings)
    tries = [len(drive(shared, clock, lambda step: [fault()])[1]) for _ in range(6)]
    # 4 saved, and half a retry for each call: 2 + 2, and then one for every other call.
    assert tries == [3, 3, 2, 1, 2, 1]
    slow = RetryBudget(RetrySettings(max_budget=2, budget_per_call=0, budget_per_s=10), clock)
    assert [slow.take() for _ in range(3)] == [True, True, False]
    clock.now += 0.15
    assert [slow.take(), slow.take()] == [True, False]
    clock.now += 1000
    assert slow.left == 2


def test_retries_are_a_bounded_share_of_the_load_however_long_a_fault_lasts() -> None:
    clock = Clock()
    shared = policy(clock, RetrySettings(max_budget=10, budget_per_call=0.2, budget_per_s=0))
    calls = 1000
    tries = sum(len(drive(shared, clock, lambda step: [fault()])[1]) for _ in range(calls))
    assert calls < tries <= calls * 1.2 + 10


def test_budget_does_not_shrink_when_the_clock_jumps_back() -> None:
    clock = Clock()
    budget = RetryBudget(RetrySettings(max_budget=2), clock)
    assert budget.take()
    clock.now -= 3600
    assert budget.left >= 1


BREAKER = BreakerSettings(max_failures=4, open_s=2.0)


def call(breaker: CircuitBreaker, failed: bool | None) -> None:
    admission = breaker.admit()
    assert admission.held_s is None
    breaker.record(admission, failed)


def test_breaker_opens_after_failures_in_a_row_and_not_before() -> None:
    breaker = CircuitBreaker(BREAKER, Clock())
    for failed in (True, True, True, False, True, None, True, True):
        call(breaker, failed)
        assert not breaker.is_open
    call(breaker, True)
    assert breaker.is_open
    assert breaker.admit().held_s == pytest.approx(2.0)


def test_calls_that_fail_together_count_once() -> None:
    breaker = CircuitBreaker(BREAKER, Clock())
    for _ in range(3):
        for admission in [breaker.admit() for _ in range(50)]:
            breaker.record(admission, True)
        assert not breaker.is_open
    call(breaker, True)
    assert breaker.is_open


@pytest.mark.parametrize("outcome", [True, False, None])
def test_one_call_probes_and_its_outcome_decides(outcome: bool | None) -> None:
    clock = Clock()
    breaker = CircuitBreaker(BREAKER, clock)
    earlier = breaker.admit()
    for _ in range(4):
        call(breaker, True)
    breaker.record(earlier, True)  # under way since before: says nothing new
    assert breaker.is_open
    clock.now += 2.0
    probe = breaker.admit()
    assert probe.held_s is None
    assert breaker.admit().held_s is not None, "a second call while the first one probes"
    breaker.record(probe, outcome)
    if outcome is None:
        assert breaker.admit().held_s is None, "the probe was given up: the next call is one"
    else:
        assert breaker.is_open is outcome
        assert (breaker.admit().held_s is None) is (not outcome)


def test_success_of_a_call_under_way_closes_it() -> None:
    breaker = CircuitBreaker(BREAKER, Clock())
    earlier = breaker.admit()
    for _ in range(4):
        call(breaker, True)
    breaker.record(earlier, False)
    assert not breaker.is_open


def test_open_breaker_fails_at_once_without_a_try() -> None:
    clock = Clock()
    shared = policy(clock, RetrySettings(max_attempts=1), BREAKER)
    for _ in range(4):
        drive(shared, clock, lambda step: [fault()])
    [result], sizes, waits = drive(shared, clock, lambda step: [GOOD])
    assert isinstance(result, CircuitOpenError)
    assert (result.code, result.request_id, sizes, waits) == ("UNAVAILABLE", "r0", [], [])
    clock.now += 2.0
    assert drive(shared, clock, lambda step: [GOOD])[0] == [GOOD]


def test_open_breaker_can_be_waited_for_within_the_deadline() -> None:
    clock = Clock()
    patient = BreakerSettings(max_failures=4, open_s=2.0, when_open="wait")
    shared = policy(clock, RetrySettings(max_attempts=1), patient)
    for _ in range(4):
        drive(shared, clock, lambda step: [fault()])
    [late], sizes, _ = drive(shared, clock, lambda step: [GOOD], timeout_s=1.0)
    assert isinstance(late, CircuitOpenError)
    assert sizes == []
    results, sizes, waits = drive(shared, clock, lambda step: [GOOD], timeout_s=5.0)
    assert (results, sizes, waits) == ([GOOD], [1], [pytest.approx(2.0)])


def test_who_waits_for_the_service_probes_until_the_deadline_and_not_until_its_tries_are_used_up() -> None:
    clock = Clock()
    patient = BreakerSettings(max_failures=4, open_s=2.0, when_open="wait")
    shared = policy(clock, RetrySettings(max_attempts=2, max_budget=1.0, budget_per_s=0.0), patient)
    for _ in range(4):
        drive(shared, clock, lambda step: [fault()])
    back = clock.now + 100.0
    results, sizes, waits = drive(
        shared, clock, lambda step: [GOOD if clock.now >= back else fault()], timeout_s=1000.0
    )
    assert results == [GOOD]
    assert len(sizes) == len(waits) == 50  # one every two seconds, which the whole client shares
    assert shared.breaker is not None
    assert not shared.breaker.is_open
    # A service that never comes back costs the call its deadline, not more.
    clock.now += 1.0
    for _ in range(4):
        drive(shared, clock, lambda step: [fault()])
    start = clock.now
    [late], _, _ = drive(shared, clock, lambda step: [fault()], timeout_s=20.0)
    assert isinstance(late, PredictorError)
    assert clock.now <= start + 20.0


def test_a_full_queue_does_not_open_the_breaker() -> None:
    clock = Clock()
    shared = policy(clock, None, BREAKER)
    for _ in range(50):
        drive(shared, clock, lambda step: [fault("RESOURCE_EXHAUSTED")])
    assert shared.breaker is not None
    assert not shared.breaker.is_open


def test_a_cancelled_probe_lets_the_next_call_probe() -> None:
    clock = Clock()
    shared = policy(clock, RetrySettings(max_attempts=1), BREAKER)
    for _ in range(4):
        drive(shared, clock, lambda step: [fault()])
    clock.now += 2.0
    steps = shared.attempts(messages(1), clock.now + 5)
    assert isinstance(next(steps), Send)
    steps.close()
    assert drive(shared, clock, lambda step: [GOOD])[0] == [GOOD]


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (RetrySettings, "max_attempts", 0),
        (RetrySettings, "max_attempts", 21),
        (RetrySettings, "first_backoff_s", 0.0),
        (RetrySettings, "first_backoff_s", 3.0),
        (RetrySettings, "budget_per_call", -0.1),
        (RetrySettings, "budget_per_s", float("nan")),
        (RetrySettings, "max_budget", float("inf")),
        (BreakerSettings, "max_failures", 0),
        (BreakerSettings, "open_s", 0.0),
        (BreakerSettings, "when_open", "maybe"),
    ],
)
def test_bad_setting_is_named(kind: Any, field: str, value: Any) -> None:
    with pytest.raises(InputError, match=field):
        kind(**{field: value})
