"""Order of requests by a policy: keys for engines with priorities, a queue for other engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from heapq import nsmallest
from itertools import islice
from typing import Any, cast

from predictors.proxy.config import ProxyConfig
from predictors.proxy.engine_model import CacheSize, End, EngineModel
from predictors.proxy.errors import EngineGoneError, Refusal
from predictors.proxy.session_context import resized
from scheduler_core.adapters.live_order import LiveOrder, declared_level, order_policy
from scheduler_core.policies.base import Policy
from scheduler_core.prediction.predictions import Prediction
from scheduler_core.request import Request, RequestState, Status

NO_END = End()


class AgingPolicy:
    """Wraps a policy: key = the policy's key + aging_per_s * arrival, in units of the policy's key (tokens
    for `sept`, ln tokens for `tie`). The added term is constant while a request waits, so heaps stay valid,
    and a priority that was sent to an engine needs no update."""

    def __init__(self, policy: Policy, aging_per_s: float) -> None:
        self._policy = policy
        self._aging_per_s = aging_per_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def key(self, state: RequestState, now: float) -> float:
        return self._policy.key(state, now) + self._aging_per_s * state.request.arrival_s


@dataclass
class EngineOrder:
    """Live requests of an engine; calls the hooks of the policy for the events that a proxy observes.

    These are arrival, sending to the engine, output chunks and end. The first chunk ends the prefill. In one
    engine step each running request gets at most one token, so a step is assumed to end when a request gets
    its second chunk or a complete response. The engine runs at most `max_num_seqs` requests; `num_running`
    are sent but not finished. What a client declares, its priority and its tier, comes before the policy's key
    (see `declared_level`). `model` is that of the engine's prefix cache, None if the policy does not use one.
    """

    policy: Policy
    max_num_seqs: int
    clock: Callable[[], float]
    aging_per_s: float = 0.0
    model: EngineModel | None = None
    num_running: int = field(default=0, init=False)
    _in_step: set[str] = field(default_factory=set, init=False)
    _step_start_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        level = declared_level(self.policy)
        if self.aging_per_s:
            self.policy = cast(Policy, AgingPolicy(self.policy, self.aging_per_s))
        self._order = LiveOrder(self.policy, self.max_num_seqs, level, self.model)

    @property
    def uses_outputs(self) -> bool:
        """Whether the policy needs calls of `on_output`."""
        return self.policy.progress != "unused" or self.policy.needs_queue or self.model is not None

    @property
    def num_live(self) -> int:
        """Number of requests between arrival and end."""
        return len(self._order.states)

    def resize(self, max_num_seqs: int) -> None:
        """Changes the number of requests that run at a time; running ones stay."""
        self.max_num_seqs = self._order.max_num_seqs = max_num_seqs

    def update(
        self, request_id: str, prediction: Prediction | None, prompt_tokens: int | None = None
    ) -> None:
        """Sets the prediction of a request (None: unknown) and its prompt length, if known."""
        state = self._order.states.get(request_id)
        if state is not None and prompt_tokens is not None and state.first_scheduled_s is None:
            content = resized(state.request.content, prompt_tokens)
            state.request = replace(state.request, prompt_tokens=prompt_tokens, content=content)
            state.prefill_target_tokens = prompt_tokens
            if self.model is not None:
                self.model.look_up([state])
        self._order.predict(request_id, prediction, self.clock())

    def on_output(self, request_id: str, num_tokens: int) -> None:
        """Handles an output chunk of `num_tokens` tokens, in a stream usually one."""
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
        if self.model is not None:
            self.model.compute(state)
        if num_tokens > 1:
            self._end_step(now)

    def leave(self, request_id: str, end: End = NO_END) -> None:
        """Handles the end or abort of a request; does nothing if it has left before."""
        state = self._order.states.get(request_id)
        if state is not None and self.model is not None:
            self.model.end(state, end)
        state = self._order.leave(request_id, end.ended_by)
        self.num_running -= state is not None and state.first_scheduled_s is not None
        if end.ends_session and state is not None:
            self.end_session(state.request.session)

    def end_session(self, session: str) -> None:
        """Handles that a session does not return to this engine, unless a request of it is live."""
        if all(other.request.session != session for other in self._order.states.values()):
            self.policy.on_session_end(session, self.clock())

    def first(self, num: int) -> list[RequestState]:
        """The first `num` requests in their order, those that have no output yet as far as the proxy knows."""
        raise NotImplementedError

    def rank(self, request_id: str, num: int) -> tuple[int, int | None] | None:
        """The declared level of a live request, and its position, from 1, if it is among the first `num` that wait in the
        proxy. None if it is not live."""
        state = self._order.states.get(request_id)
        return None if state is None else (state.declared_level, None)

    def running(self) -> list[RequestState]:
        """The requests in the engine that are not in the order any more, in the order of sending."""
        sent = [state for state in self._order.states.values() if self._is_running(state)]
        return sorted(sent, key=lambda state: state.first_scheduled_s or 0.0)

    def _is_running(self, state: RequestState) -> bool:
        return state.status is Status.RUNNING

    def _admit(self, request_id: str, now: float) -> None:
        if not self.num_running:
            self._in_step.clear()
            self._step_start_s = now
        self.num_running += 1
        state = self._order.states[request_id]
        if self.model is not None:
            self.model.send(state)
        self._order.schedule([request_id], now)
        state.num_computed_tokens = state.cached_tokens

    def _end_step(self, now: float) -> None:
        self.policy.on_step(now, now - self._step_start_s)
        self._in_step.clear()
        self._step_start_s = now


class SentOrder(EngineOrder):
    """Keys for an engine with priorities; each key is computed once, when the request is sent. Requests above
    `max_num_seqs` wait in the engine and are the queue length that TIE's beta depends on."""

    def enter(self, request: Request) -> RequestState:
        """Handles the arrival of a request."""
        return self._order.arrive(request, request.arrival_s)

    def key(self, state: RequestState) -> tuple[int, float]:
        """The declared level of a request and the policy's key, smaller first; marks the request as sent."""
        now, num_in_flight = self.clock(), len(self._order.states)
        self.policy.on_pressure(max(0, num_in_flight - self.max_num_seqs), self.max_num_seqs)
        self.policy.take_changed(now)
        key = self.policy.key(state, now)
        self._admit(state.request_id, now)
        return state.declared_level, key

    def first(self, num: int) -> list[RequestState]:
        """The first `num` sent requests without output in the order of their keys, smaller first."""
        now = self.clock()
        sent = (state for state in self._order.states.values() if super(SentOrder, self)._is_running(state))
        keys = {
            state: (state.declared_level, self.policy.key(state, now))
            for state in sent
            if state.first_token_s is None
        }
        return nsmallest(num, keys, key=lambda state: (*keys[state], state.order))

    def _is_running(self, state: RequestState) -> bool:
        return super()._is_running(state) and state.first_token_s is not None


@dataclass
class HoldQueue(EngineOrder):
    """Admits up to `max_num_seqs` requests in the order of a policy, and fewer if the policy holds the first one back
    (`Policy.may_admit`) while others run; rejects requests above `max_waiting`.

    A request is queued at its arrival, with the policy's key for unknown lengths until its prediction is
    available. It never waits for a prediction if a slot is free. Admitted requests are never preempted, so
    preemptive policies affect only waiting requests. Must be used in one event loop.
    """

    max_waiting: int = 10_000
    _turns: dict[str, asyncio.Future[None]] = field(default_factory=dict, init=False)

    @property
    def num_waiting(self) -> int:
        """Number of queued requests."""
        return len(self._order.waiting)

    def resize(self, max_num_seqs: int) -> None:
        """As in `EngineOrder`, and admits requests for new slots."""
        super().resize(max_num_seqs)
        self._release()

    def first(self, num: int) -> list[RequestState]:
        """The first `num` waiting requests in the order of their latest keys."""
        with closing(self._order.waiting.ascending()) as waiting:
            return list(islice(waiting, num))

    def rank(self, request_id: str, num: int) -> tuple[int, int | None] | None:
        rank = super().rank(request_id, num)
        waiting = enumerate(self.first(num), 1)
        position = next((number for number, state in waiting if state.request_id == request_id), None)
        return None if rank is None else (rank[0], position)

    async def enter(self, request: Request) -> None:
        """Waits for admission of the request; cancellation removes it. Refusal (429) if the queue is full;
        EngineGoneError after `give_up`."""
        is_held = self.num_running >= self.max_num_seqs or self.num_waiting
        if is_held and self.num_waiting >= self.max_waiting:
            text = f"the queue of the proxy is full: {self.max_waiting} requests are waiting"
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

    def give_up(self) -> None:
        """Removes all waiting requests, because the engine is gone."""
        for state in [*self._order.waiting]:
            super().leave(state.request_id)
            turn = self._turns.pop(state.request_id)
            if not turn.done():
                turn.set_exception(EngineGoneError("the engine is gone"))

    def set_size(self, size: CacheSize) -> None:
        """Handles that the size of the engine's KV cache has become known; its cache is empty."""
        assert self.model is not None
        self.model.clear(size)
        self.policy.bind(self.model)
        self._release()

    def cached_tokens(self, request_id: str) -> int:
        """Tokens of a sent request that the engine had cached, by the model of it."""
        state = self._order.states.get(request_id)
        return 0 if state is None or state.first_scheduled_s is None else state.cached_tokens

    def waiting(self) -> Iterator[RequestState]:
        """The waiting requests in no particular order."""
        return iter(self._order.waiting)

    def leave(self, request_id: str, end: End = NO_END) -> None:
        """As in `EngineOrder`, and admits the next request."""
        super().leave(request_id, end)
        if self._turns.pop(request_id, None) is not None:
            self._release()

    def _release(self) -> None:
        order = self._order
        now = self.clock()
        order.start_step(now)  # also without waiting requests: the policy follows ends
        while order.waiting and self.num_running < self.max_num_seqs:
            head = order.waiting.peek()
            assert head is not None
            if self.num_running and not self.policy.may_admit(head, now):
                return
            order.dequeue(head.request_id)
            self._admit(head.request_id, now)
            turn = self._turns[head.request_id]
            if not turn.done():
                turn.set_result(None)
            order.start_step(now)


def policy_name(config: ProxyConfig) -> str:
    """The name of the policy of a proxy."""
    return config.policy or ("tie" if config.engine != "none" else "bounded_shortest")


def make_order(config: ProxyConfig, clock: Callable[[], float]) -> SentOrder | HoldQueue:
    """The order of a proxy in front of an engine with priorities, or without (`config.engine` none)."""
    sent_once = config.engine != "none"
    name = policy_name(config)
    policy = order_policy(name, config.policy_parameters, sent_once=sent_once)
    if sent_once:
        return SentOrder(policy, config.max_num_seqs, clock, config.aging_per_s)
    model = None
    if any(map(policy.reads, ("session", "cached", "costs"))):
        model = EngineModel(None if config.engine_kv_tokens is None else CacheSize(config.engine_kv_tokens))
    return HoldQueue(policy, config.release, clock, config.aging_per_s, model, max_waiting=config.max_waiting)
