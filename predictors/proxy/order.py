"""Order of requests by a policy: keys for engines that order by themselves, or a queue for those that do not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

from predictors.proxy.errors import Refusal
from scheduler_core.adapters.live_order import LiveOrder
from scheduler_core.policies.base import Policy
from scheduler_core.predictions import Prediction
from scheduler_core.request import Request, RequestState


class AgingPolicy:
    """key = the policy's key + aging_per_s * arrival, in the policy's own unit (tokens for `sept`, ln tokens for `tie`); all
    else is the policy's. The term does not change while a request waits: a heap stays exact, and one number, sent to an engine
    once, ages by itself."""

    def __init__(self, policy: Policy, aging_per_s: float) -> None:
        self._policy = policy
        self._aging_per_s = aging_per_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def key(self, state: RequestState, now: float) -> float:
        return self._policy.key(state, now) + self._aging_per_s * state.request.arrival_s


@dataclass
class EngineOrder:
    """Live requests of an engine, with the policy's hooks for what a proxy sees of them.

    It sees a request's arrival, when it is let through, each piece of its output and its end. The first piece ends the
    prefill. In one step of an engine each running request gets at most one token, so a step is taken to end where a request
    gets its second piece; a response that comes as a whole ends one as well. The engine runs `max_num_seqs` requests at a
    time; `num_running` were let through and have not left.
    """

    policy: Policy
    max_num_seqs: int
    clock: Callable[[], float]
    aging_per_s: float = 0.0
    num_running: int = field(default=0, init=False)
    _in_step: set[str] = field(default_factory=set, init=False)
    _step_start_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.policy = cast(Policy, AgingPolicy(self.policy, self.aging_per_s))
        self._order = LiveOrder(self.policy, self.max_num_seqs)

    @property
    def uses_outputs(self) -> bool:
        """Whether the policy has a use for `on_output`."""
        return self.policy.progress != "unused" or self.policy.needs_queue

    def update(
        self, request_id: str, prediction: Prediction | None, prompt_tokens: int | None = None
    ) -> None:
        """The prediction of a request, None without one, and the length of its prompt where that has been counted."""
        state = self._order.states.get(request_id)
        if state is not None and prompt_tokens is not None and state.first_scheduled_s is None:
            state.request = replace(state.request, prompt_tokens=prompt_tokens)
            state.prefill_target_tokens = prompt_tokens
        self._order.predict(request_id, prediction, self.clock())

    def on_output(self, request_id: str, num_tokens: int) -> None:
        """A piece of a request's output has come, of one token in a stream."""
        state, now = self._order.states.get(request_id), self.clock()
        if state is None or num_tokens < 1:
            return
        if request_id in self._in_step:
            self._end_step(now)
        self._in_step.add(request_id)
        prompt_tokens, num_output_tokens = state.request.prompt_tokens, state.num_output_tokens + num_tokens
        if state.first_token_s is None:
            self._order.progress(request_id, prompt_tokens, prompt_tokens, 1, now)
            num_tokens -= 1
        if num_tokens:
            num_computed = prompt_tokens + num_output_tokens - 1
            self._order.progress(request_id, num_tokens, num_computed, num_output_tokens, now)
        if num_tokens > 1:
            self._end_step(now)

    def leave(self, request_id: str) -> None:
        """The request has its response, or is aborted; nothing if it has left before."""
        state = self._order.leave(request_id)
        self.num_running -= state is not None and state.first_scheduled_s is not None

    def _admit(self, request_id: str, now: float) -> None:
        if not self.num_running:
            self._in_step.clear()
            self._step_start_s = now
        self.num_running += 1
        self._order.schedule([request_id], now)

    def _end_step(self, now: float) -> None:
        self.policy.on_step(now, now - self._step_start_s)
        self._in_step.clear()
        self._step_start_s = now


class SentOrder(EngineOrder):
    """Keys of requests that an engine orders by itself: each is computed once, when the request is sent. What is beyond
    `max_num_seqs` waits in the engine, and is the queue length that TIE's beta depends on."""

    def enter(self, request: Request) -> RequestState:
        """A request has arrived."""
        return self._order.arrive(request, request.arrival_s)

    def key(self, state: RequestState) -> float:
        """Its key, smaller first. It counts as sent from here on."""
        now, num_in_flight = self.clock(), len(self._order.states)
        self.policy.on_pressure(max(0, num_in_flight - self.max_num_seqs), self.max_num_seqs)
        self.policy.take_changed(now)
        key = self.policy.key(state, now)
        self._admit(state.request_id, now)
        return key


@dataclass
class HoldQueue(EngineOrder):
    """Lets up to `max_num_seqs` requests through at a time, in a policy's order; refuses those beyond `max_waiting`.

    A request is in the queue from its arrival on: until its prediction comes it has the policy's key for unknown lengths,
    and with a free slot no request waits for a prediction. A request that is through is never taken back, so policies
    that preempt act on the waiting requests only. Belongs to one event loop.
    """

    max_waiting: int = 10_000
    _turns: dict[str, asyncio.Future[None]] = field(default_factory=dict, init=False)

    @property
    def num_waiting(self) -> int:
        """Requests that are held."""
        return len(self._order.waiting)

    async def enter(self, request: Request) -> None:
        """Waits for the request's turn; a cancelled one has left. Refusal (429) if the queue is full."""
        if self.num_running >= self.max_num_seqs and self.num_waiting >= self.max_waiting:
            text = f"the queue of the proxy is full: {self.max_waiting} requests wait"
            raise Refusal(429, text, "queue_full")
        name, now = request.request_id, self.clock()
        turn = self._turns[name] = asyncio.get_running_loop().create_future()
        self._order.arrive(request, now)
        self._order.enqueue(name, now)
        self._release()
        try:
            await turn
        except BaseException:
            self.leave(name)
            raise

    def leave(self, request_id: str) -> None:
        """As of `EngineOrder`; the next request gets its slot."""
        super().leave(request_id)
        if self._turns.pop(request_id, None) is not None:
            self._release()

    def _release(self) -> None:
        order = self._order
        while order.waiting and self.num_running < self.max_num_seqs:
            now = self.clock()
            order.start_step(now)
            head = order.waiting.peek()
            assert head is not None
            order.dequeue(head.request_id)
            self._admit(head.request_id, now)
            turn = self._turns[head.request_id]
            if not turn.done():
                turn.set_result(None)
