"""The queue that the proxy holds itself, before an engine that knows no priorities."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable

from predictors.proxy.aged import Aged
from predictors.proxy.order import take_prediction
from predictors.proxy.problems import Refusal
from predictors.proxy.shares import SharedQueue
from predictors.proxy.tenants import TenantBook, limit_reached
from scheduler_core.errors import InputError
from scheduler_core.predictions import Prediction
from scheduler_core.request import RequestState, Status
from scheduler_core.waiting_queue import WaitingQueue


class HoldQueue:
    """Lets up to N requests through at a time, in a policy's order.

    A request is in the queue from its arrival on: while its prediction is on the way it has the policy's key for unknown
    lengths, and where a seat is free nobody waits for a prediction. Nothing that is through is ever taken back, so
    policies that preempt act on the waiting requests alone. Belongs to one event loop.

    Args:
        policy: Gives the keys.
        max_running: N, at least 1.
        max_waiting: Further requests are refused, at least 1.
        clock: Time in seconds; the arrivals are on it.
        book: Limits of tenants: how many may wait, and, where there are weights, their shares of the N.

    Raises:
        InputError: A limit is below 1.
    """

    def __init__(
        self,
        policy: Aged,
        *,
        max_running: int,
        max_waiting: int,
        clock: Callable[[], float],
        book: TenantBook | None = None,
    ) -> None:
        for name, value in (("release", max_running), ("max_waiting", max_waiting)):
            if value < 1:
                raise InputError(name, value, "an integer >= 1")
        self._policy = policy
        self._key_changes = policy.policy.key_changes
        self._max_running, self._max_waiting = max_running, max_waiting
        self._clock = clock
        self._book = TenantBook() if book is None else book
        self._shared = SharedQueue(policy, self._book.weight, clock) if self._book.has_weights else None
        self._waiting: WaitingQueue | SharedQueue = (
            WaitingQueue(policy) if self._shared is None else self._shared
        )
        self._waiting_of = Counter[str]()
        self._turns: dict[str, asyncio.Future[None]] = {}
        self._running: set[str] = set()
        self._order = itertools.count()

    @property
    def num_waiting(self) -> int:
        """Requests that are held."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that were let through and have not left."""
        return len(self._running)

    def next_order(self) -> int:
        """A running number, for the next request's state."""
        return next(self._order)

    async def enter(self, state: RequestState) -> None:
        """Waits for the request's turn; who is cancelled has left.

        Raises:
            Refusal: The queue is full, or this tenant's part of it (429).
        """
        tenant, is_full = state.request.tenant, len(self._running) >= self._max_running
        most = self._book.limits(tenant).max_waiting
        if is_full and most is not None and self._waiting_of[tenant] >= most:
            found = f"waiting requests: got {most + 1}; allowed: {most}"
            raise limit_reached(found, "tenant_queue", 1)
        if is_full and len(self._waiting) >= self._max_waiting:
            raise Refusal(
                429,
                f"the queue of the proxy is full: {self._max_waiting} requests wait",
                kind="rate_limit_exceeded",
                code="queue_full",
                retry_after_s=1,
            )
        now = self._clock()
        turn = asyncio.get_running_loop().create_future()
        self._turns[state.request_id] = turn
        self._policy.on_arrival(state, now)
        self._waiting.push(state, now)
        self._waiting_of[tenant] += 1
        self._release()
        try:
            await turn
        except BaseException:
            self.leave(state)
            raise

    def update(self, state: RequestState, prediction: Prediction | None) -> None:
        """The prediction of a request has come; None: there is none. Nothing happens to one that is through."""
        if state.request_id not in self._waiting:
            return
        take_prediction(self._policy, state, prediction)
        self._waiting.push(state, self._clock())

    def leave(self, state: RequestState) -> None:
        """The request is answered, or gone; the next one gets its seat. Once is enough."""
        if self._turns.pop(state.request_id, None) is None:
            return
        if state.request_id in self._running:
            self._running.remove(state.request_id)
            if self._shared is not None:
                self._shared.left(state)
        else:
            self._take_out(state)
        state.status = Status.GONE
        self._policy.on_finish(state)
        self._release()

    def _release(self) -> None:
        while self._waiting and len(self._running) < self._max_running:
            now = self._clock()
            self._refresh(now)
            state = self._waiting.peek()
            assert state is not None
            self._take_out(state)
            if self._shared is not None:
                self._shared.let_through(state)
            state.status = Status.RUNNING
            state.first_scheduled_s = now
            self._running.add(state.request_id)
            self._policy.on_admit(state, now)
            turn = self._turns[state.request_id]
            if not turn.done():
                turn.set_result(None)

    def _take_out(self, state: RequestState) -> None:
        self._waiting.remove(state)
        tenant = state.request.tenant
        self._waiting_of[tenant] -= 1
        if not self._waiting_of[tenant]:
            del self._waiting_of[tenant]

    def _refresh(self, now: float) -> None:
        """Brings keys up to date."""
        for state in self._policy.take_changed(now):
            if state.request_id in self._waiting:
                self._waiting.push(state, now)
        pressed = self._policy.on_pressure(len(self._waiting), self._max_running)
        if pressed or self._key_changes == "with_time":
            self._waiting.rekey_all(now)
