"""When to call, when to call again and when to give up: decisions without I/O, shared by both clients.

`attempts` is a generator: it yields what to do next (`Send`, `Wait`), gets the outcome sent back, and returns the
results. The asynchronous client awaits each step, the blocking one does it.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from predictors.client.errors import CircuitOpenError, PredictorError
from predictors.client.settings import FAILURE_CODES, RETRYABLE_CODES, BreakerSettings, RetrySettings
from predictors.proto import predictor_v1_pb2 as pb

Result = pb.PredictResponse | PredictorError
Clock = Callable[[], float]


class RetryBudget:
    """Retries that may be made, over all callers of a client. Threads may share it.

    Args:
        settings: How it grows.
        clock: Monotonic seconds.
    """

    def __init__(self, settings: RetrySettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._left = settings.max_budget
        self._seen = clock()
        self._lock = threading.Lock()

    @property
    def left(self) -> float:
        """What could be taken now."""
        with self._lock:
            return self._grow(0.0)

    def earn(self) -> None:
        """One call was made."""
        with self._lock:
            self._grow(self._settings.budget_per_call)

    def take(self) -> bool:
        """Whether one more call may be made; if so, it has been paid for."""
        with self._lock:
            if self._grow(0.0) < 1:
                return False
            self._left -= 1
            return True

    def _grow(self, extra: float) -> float:
        now = self._clock()
        earned = max(0.0, now - self._seen) * self._settings.budget_per_s + extra
        self._seen = now
        self._left = min(self._settings.max_budget, self._left + earned)
        return self._left


@dataclass(frozen=True, slots=True)
class Admission:
    """Whether a call may be made.

    Attributes:
        held_s: None: yes. Otherwise seconds until it is worth asking again.
        generation: Which failures were known when it was asked.
        is_probe: It may be made although calls are held back: its outcome decides whether they still are.
    """

    held_s: float | None
    generation: int
    is_probe: bool = False


class CircuitBreaker:
    """Stops calls to a service that fails, and tries again with one call at a time. Threads may share it.

    Args:
        settings: When it opens, and for how long.
        clock: Monotonic seconds.
    """

    def __init__(self, settings: BreakerSettings, clock: Clock) -> None:
        self.settings = settings
        self._clock = clock
        self._generation = 0
        self._num_failures = 0
        self._open_until: float | None = None
        self._probe: int | None = None
        self._lock = threading.Lock()

    @property
    def is_open(self) -> bool:
        """Whether calls are held back."""
        with self._lock:
            return self._open_until is not None

    def admit(self) -> Admission:
        """Asks whether a call may be made; if so, its outcome must be told with `record`."""
        with self._lock:
            if self._open_until is None:
                return Admission(None, self._generation)
            left = self._open_until - self._clock()
            if left <= 0 and self._probe is None:
                self._probe = self._generation
                return Admission(None, self._generation, is_probe=True)
            return Admission(left if left > 0 else min(0.05, self.settings.open_s), self._generation)

    def record(self, admission: Admission, failed: bool | None) -> None:
        """The outcome of an admitted call; None: it was given up before there was one."""
        with self._lock:
            if admission.generation == self._probe:
                self._probe = None
            if failed is False:
                self._num_failures = 0
                self._open_until = None
            elif failed and admission.generation == self._generation:
                self._generation += 1
                self._num_failures += 1
                if self._num_failures >= self.settings.max_failures:
                    self._open_until = self._clock() + self.settings.open_s


@dataclass(frozen=True, slots=True)
class Send:
    """Make this call; answer with one result per message."""

    messages: Sequence[pb.PredictRequest]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Wait:
    """Do nothing for some seconds; answer with None."""

    seconds: float


Attempts = Generator[Send | Wait, Sequence[Result] | None, list[Result]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """What all calls of one client share.

    Attributes:
        address: Named in errors.
        settings: When to try again.
        budget: Retries left.
        breaker: None: every call is made.
        clock: Monotonic seconds.
        rng: Randomness of the waits.
    """

    address: str
    settings: RetrySettings
    budget: RetryBudget
    breaker: CircuitBreaker | None
    clock: Clock
    rng: random.Random

    @classmethod
    def of(
        cls,
        address: str,
        retries: RetrySettings,
        breaker: BreakerSettings | None,
        clock: Clock,
        rng: random.Random,
    ) -> RetryPolicy:
        """A policy with a full budget and a closed breaker."""
        return cls(
            address=address,
            settings=retries,
            budget=RetryBudget(retries, clock),
            breaker=None if breaker is None else CircuitBreaker(breaker, clock),
            clock=clock,
            rng=rng,
        )

    def backoff_s(self, attempt: int) -> float:
        """Seconds to wait after failed try number `attempt` (the first is 1)."""
        longest = min(self.settings.max_backoff_s, self.settings.first_backoff_s * 2.0 ** (attempt - 1))
        return longest * self.rng.uniform(0.5, 1.0)

    def attempts(self, messages: Sequence[pb.PredictRequest], deadline: float) -> Attempts:
        """The steps of one call of one or more requests; only those that failed go into the next try.

        Args:
            messages: The requests.
            deadline: Second of the clock at which the results are needed.
        """
        results: list[Result] = [_late(self.address, message) for message in messages]
        todo = list(range(len(messages)))
        self.budget.earn()
        attempt = 0
        while todo:
            admission = None if self.breaker is None else self.breaker.admit()
            if admission is not None and admission.held_s is not None:
                for index in todo:
                    results[index] = _held(self.address, messages[index])
                if not (yield from self._outwaits(admission.held_s, deadline)):
                    break
                continue
            timeout_s = deadline - self.clock()
            if timeout_s <= 0:
                self._record(admission, None)
                break
            # Who waits for the service lends its calls to the breaker, which makes one at a time: they are no tries of
            # its own, or whoever comes to probe most often would be the first to give up.
            lent = admission is not None and admission.is_probe and self._waits
            attempt += 0 if lent else 1
            found: Sequence[Result] | None = None
            try:
                found = yield Send([messages[index] for index in todo], timeout_s)
                assert found is not None
            finally:
                self._record(admission, found)
            for index, result in zip(todo, found, strict=True):
                results[index] = result
            todo = [index for index in todo if _is(results[index], RETRYABLE_CODES)]
            if lent:
                continue
            if not todo or attempt >= self.settings.max_attempts:
                break
            wait_s = self.backoff_s(attempt)
            if self.clock() + wait_s >= deadline or not self.budget.take():
                break
            yield Wait(wait_s)
        return results

    @property
    def _waits(self) -> bool:
        return self.breaker is not None and self.breaker.settings.when_open == "wait"

    def _outwaits(self, held_s: float, deadline: float) -> Generator[Wait, Sequence[Result] | None, bool]:
        """Waits while the breaker is open; false where there is no time or will to."""
        if not self._waits or self.clock() + held_s >= deadline:
            return False
        yield Wait(held_s)
        return True

    def _record(self, admission: Admission | None, found: Sequence[Result] | None) -> None:
        if self.breaker is not None and admission is not None:
            failed = None if found is None else any(_is(result, FAILURE_CODES) for result in found)
            self.breaker.record(admission, failed)


def _is(result: Result, codes: frozenset[str]) -> bool:
    return isinstance(result, PredictorError) and result.code in codes


def _late(address: str, message: pb.PredictRequest) -> PredictorError:
    text = f"predictor {address}: request {message.request_id!r}: DEADLINE_EXCEEDED: there was no time to send it"
    return PredictorError(text, "DEADLINE_EXCEEDED", message.request_id)


def _held(address: str, message: pb.PredictRequest) -> CircuitOpenError:
    text = f"predictor {address}: request {message.request_id!r}: UNAVAILABLE: not sent, most of the last calls failed"
    return CircuitOpenError(text, "UNAVAILABLE", message.request_id)
