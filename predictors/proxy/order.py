"""Order of requests by a policy: keys for engines that order by themselves, or a queue for those that do not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from predictors.proxy.errors import too_many
from scheduler_core.adapters.live_order import LiveOrder
from scheduler_core.errors import InputError
from scheduler_core.policies import POLICIES, make_policy
from scheduler_core.policies.base import KeyChanges, Policy
from scheduler_core.predictions import Prediction
from scheduler_core.request import Request, RequestState


class AgingPolicy(Policy):
    """key = the policy's key + aging_per_s * arrival.

    A request that arrived w seconds earlier is ahead by w * aging_per_s of the policy's own unit (tokens for `sept`, ln
    tokens for `tie`), so it is not overtaken for ever. The term does not change while a request waits: a heap stays exact,
    and one number, sent to an engine once, ages by itself.
    """

    __slots__ = ("aging_per_s", "policy")

    def __init__(self, policy: Policy, aging_per_s: float) -> None:
        self.policy = policy
        self.aging_per_s = aging_per_s

    @property
    def key_changes(self) -> KeyChanges:  # type: ignore[override]
        return self.policy.key_changes

    def key(self, state: RequestState, now: float) -> float:
        return self.policy.key(state, now) + self.aging_per_s * state.request.arrival_s

    def on_pressure(self, num_waiting: int, max_num_seqs: int) -> bool:
        return self.policy.on_pressure(num_waiting, max_num_seqs)

    def take_changed(self, now: float) -> Collection[RequestState]:
        return self.policy.take_changed(now)

    def on_arrival(self, state: RequestState, now: float) -> None:
        self.policy.on_arrival(state, now)

    def on_prediction(self, state: RequestState) -> None:
        self.policy.on_prediction(state)

    def on_admit(self, state: RequestState, now: float) -> None:
        self.policy.on_admit(state, now)

    def on_finish(self, state: RequestState) -> None:
        self.policy.on_finish(state)


def aging_policy(name: str, parameters: dict[str, float], aging_per_s: float) -> AgingPolicy:
    """A policy by name with aging.

    Raises:
        InputError: Name or parameter is unknown, or a value outside its range.
    """
    return AgingPolicy(make_policy(name, parameters), aging_per_s)


class SentOrder:
    """Keys of requests that an engine orders by itself: each is computed once, when the request is sent.

    The engine runs `max_num_seqs` at a time; what is beyond it waits there, and is the queue length that TIE's beta
    depends on.

    Raises:
        InputError: The policy's key changes while a request waits, so that one number cannot stand for it.
    """

    def __init__(self, name: str, policy: AgingPolicy, max_num_seqs: int) -> None:
        if policy.key_changes == "with_time":
            allowed = ", ".join(name for name, kind in POLICIES.items() if kind.key_changes != "with_time")
            raise InputError("policy for an engine that orders by itself", name, allowed)
        self._order = LiveOrder(policy, max_num_seqs)
        self._max_num_seqs = max_num_seqs

    @property
    def num_in_flight(self) -> int:
        """Requests that have entered and not left."""
        return len(self._order.states)

    def enter(self, request: Request) -> RequestState:
        """A request has arrived."""
        return self._order.arrive(request, request.arrival_s)

    def key(self, state: RequestState, prediction: Prediction | None, now: float) -> float:
        """Its key with its prediction, smaller first. It counts as sent from here on."""
        policy = self._order.policy
        self._order.predict(state.request_id, prediction, now)
        policy.on_pressure(max(0, self.num_in_flight - self._max_num_seqs), self._max_num_seqs)
        policy.take_changed(now)
        key = policy.key(state, now)
        self._order.schedule([state.request_id], now)
        return key

    def leave(self, request_id: str) -> None:
        """It has its response, or is aborted."""
        self._order.leave(request_id)


class HoldQueue:
    """Lets up to `max_running` requests through at a time, in a policy's order; refuses those beyond `max_waiting`.

    A request is in the queue from its arrival on: until its prediction comes it has the policy's key for unknown lengths,
    and with a free slot no request waits for a prediction. A request that is through is never taken back, so policies
    that preempt act on the waiting requests only. Belongs to one event loop.
    """

    def __init__(
        self, policy: AgingPolicy, *, max_running: int, max_waiting: int, clock: Callable[[], float]
    ) -> None:
        self._order = LiveOrder(policy, max_running)
        self._max_running, self._max_waiting = max_running, max_waiting
        self._clock = clock
        self._turns: dict[str, asyncio.Future[None]] = {}

    @property
    def num_waiting(self) -> int:
        """Requests that are held."""
        return len(self._order.waiting)

    @property
    def num_running(self) -> int:
        """Requests that were let through and have not left."""
        return len(self._order.states) - len(self._order.waiting)

    async def enter(self, request: Request) -> None:
        """Waits for the request's turn; a cancelled one has left.

        Raises:
            Refusal: The queue is full (429).
        """
        if self.num_running >= self._max_running and self.num_waiting >= self._max_waiting:
            raise too_many(f"the queue of the proxy is full: {self._max_waiting} requests wait", "queue_full")
        name, now = request.request_id, self._clock()
        turn = self._turns[name] = asyncio.get_running_loop().create_future()
        self._order.arrive(request, now)
        self._order.enqueue(name, now)
        self._release()
        try:
            await turn
        except BaseException:
            self.leave(name)
            raise

    def update(self, request_id: str, prediction: Prediction | None) -> None:
        """The prediction of a request, None without one."""
        self._order.predict(request_id, prediction, self._clock())

    def leave(self, request_id: str) -> None:
        """The request has its response, or is aborted; the next one gets its slot. Further calls do nothing."""
        if self._order.leave(request_id) is not None:
            del self._turns[request_id]
            self._release()

    def _release(self) -> None:
        order = self._order
        while order.waiting and self.num_running < self._max_running:
            now = self._clock()
            order.start_step(now)
            head = order.waiting.peek()
            assert head is not None
            order.dequeue(head.request_id)
            order.schedule([head.request_id], now)
            turn = self._turns[head.request_id]
            if not turn.done():
                turn.set_result(None)
