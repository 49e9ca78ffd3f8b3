"""Policy order over the requests of an engine that forms its own batches."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from scheduler_core.batching import BATCH_FORMERS
from scheduler_core.engine.memory_victim import eviction_rank, may_displace
from scheduler_core.engine.queues import WaitingQueue
from scheduler_core.engine.step_costs import StepCosts
from scheduler_core.errors import InputError
from scheduler_core.policies import POLICIES, make_policy
from scheduler_core.policies.base import Costs, EngineView, Policy
from scheduler_core.prediction.predictions import LengthPrediction, Prediction
from scheduler_core.request import DEFAULT_TIER, Request, RequestState, Status

#: Number of predictions in the moving average of lengths.
_NUM_TYPICAL = 64


def order_policy(
    name: str, parameters: Mapping[str, float], *, sent_once: bool = False, planned: bool = False
) -> Policy:
    """A policy (see `make_policy`) for an engine that allocates its own memory. `InputError` if the policy or a
    parameter is unknown, or if the policy controls batches or memory.

    `sent_once`: each key is a single number that is sent to the engine with the request. `planned`: a batch former plans the
    engine's steps, so that the policy may reserve memory.
    """
    if name in BATCH_FORMERS and name not in POLICIES:
        raise InputError(
            f"policy {name} forms batches, but the engine forms its own: choose an order policy; inside vLLM the setting "
            f"batching: {name} adds these batches"
        )
    policy = make_policy(name, parameters)
    if policy.reserves_memory and not planned:
        raise InputError(
            f"policy {name} reserves KV memory, but the engine allocates its own: choose another policy"
        )
    follows_engine = any(map(policy.reads, ("cached", "costs", "session")))
    if sent_once and (policy.key_changes == "with_time" or policy.needs_queue or follows_engine):
        raise InputError(
            f"the key of policy {name} changes while a request waits and cannot be sent to the engine as a constant: "
            "choose another policy, or let the proxy hold the queue (--engine none)"
        )
    return policy


def declared_level(policy: Policy, default_tier: int = DEFAULT_TIER) -> Callable[[RequestState], int]:
    """A function for the level that a client declares for its request; a smaller one is served first under any policy.

    The level is the client's priority plus the difference of its tier from the default one: a tier is one step of
    priority. A policy that uses tiers itself (see `Policy.inputs`) orders by them within the level of priority.
    """
    uses_tier = "tier" in policy.inputs

    def level(state: RequestState) -> int:
        request = state.request
        return request.priority + (0 if uses_tier else request.tier - default_tier)

    return level


class TypicalLength:
    """Length of a typical request: the moving average of the last 64 predicted lengths, cut off at max_tokens.

    It stands in for a length that cannot be predicted, so that such a request is served neither before nor after all others.
    """

    def __init__(self) -> None:
        self._num = 0
        self._mu = self._sigma = self._nu = 0.0

    def observe(self, length: LengthPrediction, max_tokens: int) -> None:
        """Adds a predicted length of a request with a limit."""
        self._num = min(self._num + 1, _NUM_TYPICAL)
        self._mu += (min(length.mu, math.log(max_tokens)) - self._mu) / self._num
        self._sigma += (length.sigma - self._sigma) / self._num
        self._nu = length.nu

    def prediction(self) -> Prediction | None:
        """The typical length; None before the first observation."""
        return Prediction(length=LengthPrediction(self._mu, self._sigma, self._nu)) if self._num else None


class LiveEngine(EngineView, Protocol):
    """An engine with a prefix cache, as far as an adapter knows it."""

    def look_up(self, states: Iterable[RequestState]) -> None:
        """Updates `cached_tokens` of waiting requests."""
        ...

    def look_up_again(self, waiting: Iterable[RequestState]) -> None:
        """Updates `cached_tokens` of all waiting requests, each of which was looked up before."""
        ...


class UnknownEngine:
    """An engine of which only typical costs are known: all contexts have memory, and nothing is cached."""

    capacity_tokens, step_tokens = 2**62, 2**62
    has_host_tier = evicts_by_policy = False
    costs: Costs

    def __init__(self) -> None:
        self.costs = StepCosts()

    def resident_tokens(self, session: str) -> int:
        """0, see `EngineView`."""
        return 0

    def look_up(self, states: Iterable[RequestState]) -> None:
        """Nothing is cached."""

    look_up_again = look_up


class LiveOrder:
    """Tracks a `RequestState` for each live request of the engine and calls the hooks of the policy.

    The engine decides on admission, tokens per step and memory; this class mirrors its decisions. A state exists
    from `arrive` to `leave`, so predictions are kept across preemptions. All times are in seconds on one clock.

    `level` (see `declared_level`) comes before the policy's key; None: the policy alone decides. A request whose prediction
    has failed gets the typical length of the others. `engine` is what the policy may read of it; default: nothing is known.
    """

    def __init__(
        self,
        policy: Policy,
        max_num_seqs: int,
        level: Callable[[RequestState], int] | None = None,
        engine: LiveEngine | None = None,
    ) -> None:
        self.policy = policy
        self.engine: LiveEngine = engine or UnknownEngine()
        self._reads_cached = policy.reads("cached")
        # Not called where the policy does not implement it, once for every token of every request; a wrapper has none.
        self._has_on_tokens = getattr(type(policy), "on_tokens", None) is not Policy.on_tokens
        policy.bind(self.engine)
        self._level = level or (lambda state: 0)
        #: Declared levels so far, at most two of them.
        self.levels: set[int] = set()
        self.states: dict[str, RequestState] = {}
        self.waiting = WaitingQueue(policy)
        self._typical = TypicalLength()
        #: Requests whose prediction failed before there was a typical length.
        self._unknown: set[str] = set()
        self.max_num_seqs = max_num_seqs
        self._num_arrived = 0

    def arrive(self, request: Request, now: float) -> RequestState:
        """Adds a new request, which is not in the queue yet."""
        assert request.request_id not in self.states, "the request id is already in use"
        state = RequestState(request, order=self._num_arrived)
        state.declared_level = level = self._level(state)
        if len(self.levels) < 2:
            self.levels.add(level)
        self._num_arrived += 1
        self.states[request.request_id] = state
        self.engine.look_up([state])
        self.policy.on_arrival(state, now)
        return state

    def enqueue(self, request_id: str, now: float) -> None:
        """Puts a new or preempted request into the waiting queue."""
        self.waiting.push(self.states[request_id], now)

    def dequeue(self, request_id: str) -> None:
        """Removes a request from the waiting queue, if it is there."""
        if request_id in self.waiting:
            self.waiting.remove(self.states[request_id])

    def predict(self, request_id: str, prediction: Prediction | None, now: float) -> RequestState | None:
        """Applies a prediction (None: it failed). Returns the request; None if it is no longer live."""
        state = self.states.get(request_id)
        if state is None:
            return None
        if prediction is None or (prediction.missing and prediction.length is None):
            self._unknown.add(request_id)
        elif prediction.length is not None:
            self._typical.observe(prediction.length, state.request.max_tokens)
        self._apply(state, prediction, now)
        if self._unknown and (typical := self._typical.prediction()) is not None:
            for name in self._unknown:
                self._apply(self.states[name], typical, now)
            self._unknown.clear()
        return state

    def start_step(self, now: float) -> bool:
        """Updates the keys before the engine forms a step. Returns whether all were recomputed."""
        for state in self.policy.take_changed(now):
            self._rekey(state, now)
        pressed = self.policy.on_pressure(len(self.waiting), self.max_num_seqs)
        if pressed or self.policy.key_changes == "with_time":
            if self._reads_cached:
                self.engine.look_up_again(self.waiting)
            self.waiting.rekey_all(now)
            return True
        return False

    def schedule(self, request_ids: Iterable[str], now: float) -> None:
        """Marks the waiting ones among these requests of a step as running."""
        for request_id in request_ids:
            state = self.states.get(request_id)
            if state is None or state.status is not Status.WAITING:
                continue
            state.status = Status.RUNNING
            state.prefill_target_tokens = state.known_tokens
            if state.first_scheduled_s is None:
                state.first_scheduled_s = now
            self.policy.on_admit(state, now)

    def preempt(self, request_id: str, now: float) -> None:
        """Marks a running request as preempted, without its memory; the caller calls `enqueue` next."""
        state = self.states.get(request_id)
        if state is None:
            return
        state.status = Status.WAITING
        state.prefill_target_tokens = state.known_tokens
        state.num_computed_tokens = 0
        state.decode_entered_s = None
        state.num_preemptions += 1
        self.engine.look_up([state])
        self.policy.on_preempt(state, now)

    def progress(
        self, request_id: str, num_tokens: int, num_computed_tokens: int, num_output_tokens: int, now: float
    ) -> None:
        """Updates the progress of a running request at the end of a step; ignores other requests.

        `num_computed_tokens` includes prefix-cache hits; `num_output_tokens` includes those of this step.
        """
        state = self.states.get(request_id)
        if state is None or state.status is not Status.RUNNING:
            return
        state.num_computed_tokens = num_computed_tokens
        state.last_scheduled_s = now
        ends_prefill = False
        if num_output_tokens > state.num_output_tokens:
            state.num_output_tokens = num_output_tokens
            state.last_token_s = now
            if state.decode_entered_s is None:
                state.decode_entered_s = now
                ends_prefill = True
                if state.first_token_s is None:
                    state.first_token_s = now
        if self._has_on_tokens:
            self.policy.on_tokens(state, num_tokens, now)
        if ends_prefill:
            self.policy.on_prefill_end(state, now)

    def leave(self, request_id: str, ended_by: str = "") -> RequestState | None:
        """Removes a request that has finished or was aborted, in any state; None if it is not live. `ended_by`: see
        `RequestState`."""
        state = self.states.pop(request_id, None)
        self._unknown.discard(request_id)
        if state is None:
            return None
        if request_id in self.waiting:
            self.waiting.remove(state)
        state.status = Status.GONE
        state.ended_by = ended_by
        self.policy.on_finish(state)
        return state

    def worst_first(self, request_ids: Iterable[str], now: float) -> list[tuple[float, RequestState]]:
        """Running requests with their eviction keys, in the order of eviction (see `eviction_rank`)."""
        states = [self.states[request_id] for request_id in request_ids if request_id in self.states]
        ranked = [(self.policy.eviction_key(state, now), state) for state in states]
        ranked.sort(key=lambda pair: eviction_rank(pair[1], pair[0]), reverse=True)
        return ranked

    def victims_for(
        self,
        head: str,
        num_blocks: int,
        worst: Sequence[tuple[float, RequestState]],
        now: float,
        *,
        num_free_slots: int,
        num_free_blocks: int,
        held_blocks: Callable[[str], int | None],
    ) -> list[RequestState]:
        """The minimum set of running requests to preempt so that the waiting `head`, which needs `num_blocks`,
        can be admitted. Empty if it fits without, or if the policy does not allow it to displace enough of them.

        `worst` is a result of `worst_first`. `held_blocks` returns the KV blocks held by a running request,
        an upper bound of what it would free if prefixes are shared; None if they cannot be freed now.
        """
        waiting = self.states[head]
        victims: list[RequestState] = []
        for eviction_key, running in worst:
            if num_free_slots >= 1 and num_free_blocks >= num_blocks:
                break
            blocks = None if eviction_key == -math.inf else held_blocks(running.request_id)
            if blocks is None or not may_displace(self.policy, running, waiting, now):
                return []
            victims.append(running)
            num_free_slots += 1
            num_free_blocks += blocks
        return victims if num_free_slots >= 1 and num_free_blocks >= num_blocks else []

    def _apply(self, state: RequestState, prediction: Prediction | None, now: float) -> None:
        if state.apply_prediction(prediction):
            self.policy.on_prediction(state)
            self._rekey(state, now)

    def _rekey(self, state: RequestState, now: float) -> None:
        if state.request_id in self.waiting:
            self.waiting.push(state, now)
