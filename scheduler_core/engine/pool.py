"""Live requests and their KV memory: the state that a batch former changes."""

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing

from scheduler_core.engine.kv_cache import KVCache, Preemption
from scheduler_core.engine.lockstep import LockstepGroup
from scheduler_core.engine.memory_victim import MemoryVictims, cheapest_last, least_urgent, may_displace
from scheduler_core.engine.prefix_cache import Hit
from scheduler_core.engine.queues import EvictionQueue, WaitingQueue
from scheduler_core.engine.step_costs import StepCosts
from scheduler_core.engine.step_times import StepTimes
from scheduler_core.policies.base import Policy
from scheduler_core.prediction.predictions import Prediction
from scheduler_core.request import RequestState, Segment, Status

#: Sessions whose contexts are remembered before those without any block are dropped.
_MIN_CONTEXTS = 4096


class Pool:
    """Consistent set of waiting queue, running requests and KV cache.

    A step has at most `max_num_seqs` requests; at most `max_running` hold memory at the same time.
    `preemption`: whether a preempted request keeps a copy of its cache on the host while that has free
    memory. `evicts_by_key`: choose victims by the policy's eviction key; False: as `memory_victims` says, the
    request admitted last or the cheapest one (see `cheapest_last`). A request of a less urgent declared level is preempted
    before, under every policy.
    `group`: see `WaitingQueue`. `lockstep`: advance decoding requests in lockstep, see `LockstepGroup`.
    """

    def __init__(
        self,
        policy: Policy,
        kv: KVCache,
        max_num_seqs: int,
        *,
        max_running: int,
        preemption: Preemption,
        evicts_by_key: bool,
        step_tokens: int,
        group: Callable[[RequestState], int] | None,
        lockstep: bool,
        memory_victims: MemoryVictims = "last_admitted",
    ) -> None:
        self.policy = policy
        self.kv = kv
        self.max_num_seqs = max_num_seqs
        self.max_running = max_running
        #: See `EngineView`.
        self.step_tokens = step_tokens
        self.preemption = preemption
        self._states: dict[str, RequestState] = {}
        self.waiting = WaitingQueue(policy, group)
        #: Tokens that the waiting requests have to process before their next output token.
        self.waiting_prefill_tokens = 0
        #: Number of live requests by the level they are scheduled at.
        self.num_by_level: Counter[int] = Counter()
        self._running: dict[str, RequestState] = {}
        self.evictions = EvictionQueue(policy) if evicts_by_key else None
        self.memory_victims = memory_victims
        # Victims of a preemptive policy, or of one whose keys change with tokens, depend on progress in every step.
        static = self.evictions is None or (not policy.preemptive and policy.running_keys == "on_event")
        #: The decoding requests, if they are advanced in lockstep.
        self.lockstep = LockstepGroup(kv) if lockstep and static else None
        #: With a lockstep group: the other running requests and their admission numbers, in that order.
        self._prefilling: dict[str, tuple[RequestState, int]] = {}
        self._num_admitted = 0
        #: Requests of other replicas that have blocks and a slot reserved here; `max_running` excludes those slots.
        self.reserved: set[str] = set()
        #: Tokens of admitted requests to process, and those of them that the prefix cache had.
        self.num_admitted_tokens = self.num_cached_tokens = 0
        self.costs = StepCosts()
        #: Of formers that read them (`BatchFormer.reads_step_times`).
        self.step_times = StepTimes()
        self._holds = type(policy).may_admit is not Policy.may_admit
        #: Content, prompt tokens and computed tokens of the last request of each session.
        self._contexts: dict[str, tuple[tuple[Segment, ...], int, int]] = {}
        self._max_contexts = _MIN_CONTEXTS
        if kv.prefixes is not None and policy.orders_retention:
            kv.prefixes.retention = policy.retention_key
        policy.bind(self)

    @property
    def capacity_tokens(self) -> int:
        """See `EngineView`."""
        return self.kv.capacity_tokens

    @property
    def has_host_tier(self) -> bool:
        """See `EngineView`."""
        return self.kv.prefixes is not None and self.kv.prefixes.num_host_blocks > 0

    @property
    def evicts_by_policy(self) -> bool:
        """See `EngineView`."""
        return self.policy.orders_retention

    @property
    def states(self) -> Mapping[str, RequestState]:
        """All live requests, read-only; O(running requests) after a step in lockstep."""
        self.sync()
        return self._states

    @property
    def running(self) -> Mapping[str, RequestState]:
        """The running requests in order of admission, read-only; cost as for `states`."""
        self.sync()
        return self._running

    @property
    def num_running(self) -> int:
        """Running requests."""
        return len(self._running)

    @property
    def num_live(self) -> int:
        """Running and waiting requests."""
        return len(self._states)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._states

    def find(self, request_id: str) -> RequestState | None:
        """A live request, read-only; None if there is no such request."""
        if self.lockstep is not None:
            self.lockstep.sync(request_id)
        return self._states.get(request_id)

    def sync(self) -> None:
        """Brings the states of requests in lockstep up to date."""
        if self.lockstep is not None:
            self.lockstep.sync_all()

    def by_phase(self) -> tuple[list[RequestState], list[RequestState]]:
        """The running requests in prefill and in decode, each in order of admission. The lists must not be
        changed. States of requests in lockstep are not in sync."""
        if self.lockstep is not None:
            prefilling = [state for state, _ in self._prefilling.values()] if self._prefilling else []
            return prefilling, self.lockstep.states()
        running = self._running.values()
        decodes = [s for s in running if s.num_computed_tokens >= s.prefill_target_tokens]
        if len(decodes) == len(running):
            return [], decodes
        return [s for s in running if s.num_computed_tokens < s.prefill_target_tokens], decodes

    def prefilled(self, state: RequestState) -> None:
        """Called when a running request has completed its prefill; its next step is a decode."""
        if self.lockstep is not None:
            _, rank = self._prefilling.pop(state.request_id)
            self.lockstep.join(state, rank)

    def end_lockstep(self) -> None:
        """Advances every request individually from now on."""
        if self.lockstep is not None:
            self.lockstep.sync_all()
            self.lockstep = None

    def enter(self, state: RequestState, now: float) -> None:
        """Adds a new request to the waiting queue."""
        self._states[state.request_id] = state
        self.num_by_level[state.effective_level()] += 1
        self._wait(state, now)

    def update(self, state: RequestState, prediction: Prediction | None) -> bool:
        """Applies a prediction to a live request; see `RequestState.apply_prediction`."""
        self.num_by_level[state.effective_level()] -= 1
        is_new = state.apply_prediction(prediction)
        self.num_by_level[state.effective_level()] += 1
        return is_new

    def rekey(self, state: RequestState, now: float) -> None:
        """Updates the queue entry of a request whose key has changed; ignores a request that has left."""
        if state.status is Status.WAITING:
            self.waiting.push(state, now)
        elif state.status is Status.RUNNING and self.evictions is not None:
            self.evictions.push(state, now)

    def start_step(self, now: float) -> None:
        """Updates keys that change from step to step; called before each step."""
        if self.evictions is not None:
            self.evictions.start_step()
        for state in self.policy.take_changed(now):
            self.rekey(state, now)

    def reserve_tokens(self, state: RequestState) -> int:
        """Number of tokens whose blocks a waiting request takes at its admission."""
        longest = state.request.prompt_tokens + state.request.max_tokens
        return min(max(self.policy.admission_tokens(state), state.known_tokens), longest)

    def admit(self, state: RequestState, now: float, reserve_tokens: int | None = None) -> bool:
        """Moves a waiting request to the running ones. It takes blocks for `reserve_tokens` tokens (default:
        those of the method of that name). Returns False if there is no free slot or too few blocks."""
        running = self._running
        tokens = self.reserve_tokens(state) if reserve_tokens is None else reserve_tokens
        if len(running) >= self.max_running or not self._may_admit(state, now):
            return False
        hit = self.kv.find(state)
        if not self.kv.admit(state.request_id, tokens, waive_watermark=not running, hit=hit):
            return False
        self._stop_waiting(state)
        self._set_cached(state, hit)
        self.num_admitted_tokens += state.known_tokens
        self.num_cached_tokens += state.cached_tokens
        state.status = Status.RUNNING
        if state.num_computed_tokens < state.prefill_target_tokens:
            state.prefill_target_tokens = state.known_tokens
            state.num_computed_tokens = max(state.num_computed_tokens, state.cached_tokens)
        if state.first_scheduled_s is None:
            state.first_scheduled_s = now
        running[state.request_id] = state
        self._on_running(state, now)
        if self.lockstep is not None:
            self._num_admitted = rank = self._num_admitted + 1
            if state.num_computed_tokens < state.prefill_target_tokens:
                self._prefilling[state.request_id] = (state, rank)
            else:
                self.lockstep.join(state, rank)
        return True

    def grow(self, state: RequestState, num_tokens: int) -> bool:
        """Grows a running request to the blocks for `num_tokens` tokens; False if too few are free."""
        if num_tokens <= state.kv_tokens:
            return True
        if not self.kv.grow(state.request_id, num_tokens):
            return False
        size = self.kv.block_tokens
        state.kv_tokens = -(-num_tokens // size) * size
        if self.lockstep is not None and state.request_id in self.lockstep:
            self.lockstep.on_grow(state)
        return True

    def preempt(self, state: RequestState, now: float, offload_tokens: int | None = None) -> int:
        """Frees the memory of a running request and returns it to the waiting queue.

        Copies the first `offload_tokens` tokens to the host (None: all if preemption is by swap, else none), or none
        if the host has too little memory. The other tokens are recomputed later. Returns the number of copied tokens.
        """
        self._stop_running(state)
        if offload_tokens is None:
            offload_tokens = state.num_computed_tokens if self.preemption == "swap" else 0
        if offload_tokens == 0 or not self.kv.offload(state.request_id, offload_tokens):
            offload_tokens = 0
            self._release(state)
        if offload_tokens < state.num_computed_tokens:
            state.prefill_target_tokens = state.known_tokens
        state.status = Status.WAITING
        state.num_computed_tokens = offload_tokens
        state.kv_tokens = 0
        state.num_preemptions += 1
        self.policy.on_preempt(state, now)
        self._wait(state, now)
        return offload_tokens

    def memory_victim(self, now: float) -> RequestState:
        """The running request to preempt when no free block is left for the growth of running requests."""
        if self.evictions is not None:
            return self.evictions.first(now)
        running = least_urgent(list(self.running.values()))
        return (cheapest_last(running) if self.memory_victims == "cheapest" else running)[-1]

    def victims_for(self, state: RequestState, now: float) -> list[RequestState] | None:
        """The minimum set of running requests to evict so that a waiting one can be admitted. None if it may
        not displace enough of them, or if none has to be evicted."""
        if self.evictions is None or not self._may_admit(state, now):
            return None
        tokens = self.reserve_tokens(state)
        first = self.evictions.first_displaceable(now)
        if first is None or not may_displace(self.policy, first, state, now):
            return None
        if self._would_fit(tokens, [first]):
            return [first]
        victims: list[RequestState] = []
        with closing(self.evictions.in_order(now)) as in_order:
            for running in in_order:
                is_protected = self.evictions.is_protected(running)
                if is_protected or not may_displace(self.policy, running, state, now):
                    return None
                victims.append(running)
                if self._would_fit(tokens, victims):
                    return victims
        return None

    def _would_fit(self, num_tokens: int, victims: list[RequestState]) -> bool:
        """Whether a request of `num_tokens` tokens could be admitted after the eviction of `victims`."""
        num_running = len(self._running) - len(victims)
        freed_blocks = sum(self.kv.freed_by(victim.request_id) for victim in victims)
        return num_running < self.max_running and self.kv.fits(
            num_tokens, waive_watermark=num_running == 0, freed_blocks=freed_blocks
        )

    def leave(self, state: RequestState) -> None:
        """Removes a request and frees its memory."""
        if state.status is Status.WAITING:
            self._stop_waiting(state)
        else:
            self._stop_running(state)
        self._release(state)
        self._forget(state)

    def find_tokens(self, state: RequestState) -> int:
        """Tokens of a waiting request that the prefix cache has now."""
        hit = self.kv.find(state)
        return (hit.num_blocks + hit.num_host_blocks) * self.kv.block_tokens

    def look_up(self, state: RequestState) -> None:
        """Updates `cached_tokens` of a request before its key is computed."""
        if self.kv.prefixes is not None and state.request.content:
            self._set_cached(state, self.kv.find(state))

    def _set_cached(self, state: RequestState, hit: Hit) -> None:
        size = self.kv.block_tokens
        state.cached_tokens = (hit.num_blocks + hit.num_host_blocks) * size
        state.host_cached_tokens = hit.num_host_blocks * size

    def look_up_all(self) -> None:
        """Updates what the policy reads of the prefix cache, before keys are computed."""
        if self.kv.prefixes is not None and self.policy.reads("cached"):
            for state in self.kv.prefixes.take_changed(self.waiting):
                self.look_up(state)

    def resident_tokens(self, session: str) -> int:
        """See `EngineView`."""
        context, prefixes = self._contexts.get(session), self.kv.prefixes
        if context is None or prefixes is None:
            return 0
        hit = prefixes.find(*context)
        return hit.num_blocks * self.kv.block_tokens

    def _may_admit(self, state: RequestState, now: float) -> bool:
        return not (self._holds and self._running) or self.policy.may_admit(state, now)

    def _release(self, state: RequestState) -> None:
        """Frees the memory of a request; the prefix cache keeps what it has computed."""
        request = state.request
        if self.kv.prefixes is not None and request.content and self.kv.held_by(state.request_id):
            self.kv.publish(state)
            if request.session:
                tokens = state.num_computed_tokens
                self._contexts[request.session] = (request.content, request.prompt_tokens, tokens)
                if len(self._contexts) > self._max_contexts:
                    self._contexts = {n: c for n, c in self._contexts.items() if self.resident_tokens(n)}
                    self._max_contexts = max(2 * len(self._contexts), _MIN_CONTEXTS)
        self.kv.release(state.request_id, request.session)

    def reserve(self, request_id: str, num_blocks: int) -> bool:
        """Reserves `num_blocks` more blocks for a request of another replica, and at its first call a slot.
        Returns False, without reserving anything, if they are not free."""
        held = self.kv.held_by(request_id)
        if request_id in self.reserved:
            return self.kv.grow(request_id, (held + num_blocks) * self.kv.block_tokens)
        if len(self._running) >= self.max_running:
            return False
        if not self.kv.admit(
            request_id, num_blocks * self.kv.block_tokens, waive_watermark=not self._running
        ):
            return False
        self.reserved.add(request_id)
        self.max_running -= 1
        return True

    def unreserve(self, request_id: str) -> None:
        """Frees the reservation of a request, if there is one."""
        if request_id in self.reserved:
            self.kv.release(request_id)
            self.reserved.remove(request_id)
            self.max_running += 1

    def take_out(self, state: RequestState) -> None:
        """Removes a request that moves to another replica. Blocks and slot of a running one stay reserved."""
        if state.status is Status.WAITING:
            self.leave(state)
            state.num_computed_tokens, state.prefill_target_tokens = 0, state.known_tokens
            return
        self.end_lockstep()
        self._stop_running(state)
        self.reserved.add(state.request_id)
        self.max_running -= 1
        state.kv_tokens = 0
        self._forget(state)

    def put_in(self, state: RequestState, now: float) -> None:
        """Adds a request of another replica; it runs in its reserved slot, or waits without a reservation."""
        name = state.request_id
        if name not in self.reserved:
            state.status = Status.WAITING
            self.enter(state, now)
            return
        self.end_lockstep()
        self.reserved.remove(name)
        self.max_running += 1
        self._states[name] = self._running[name] = state
        self.num_by_level[state.effective_level()] += 1
        state.status = Status.RUNNING
        self._on_running(state, now)

    def _wait(self, state: RequestState, now: float) -> None:
        self.look_up(state)
        self.waiting.push(state, now)
        self.waiting_prefill_tokens += state.known_tokens - state.num_computed_tokens

    def _stop_waiting(self, state: RequestState) -> None:
        self.waiting.remove(state)
        self.waiting_prefill_tokens -= state.known_tokens - state.num_computed_tokens

    def _forget(self, state: RequestState) -> None:
        state.status = Status.GONE
        self.num_by_level[state.effective_level()] -= 1
        del self._states[state.request_id]

    def _on_running(self, state: RequestState, now: float) -> None:
        state.kv_tokens = self.kv.held_by(state.request_id) * self.kv.block_tokens
        self.policy.on_admit(state, now)
        if self.evictions is not None:
            self.evictions.push(state, now)

    def _stop_running(self, state: RequestState) -> None:
        name = state.request_id
        del self._running[name]
        if self.lockstep is not None and self._prefilling.pop(name, None) is None:
            self.lockstep.leave(state)
        if self.evictions is not None:
            self.evictions.remove(state)

    def validate(self, now: float, *, keys_are_fresh: bool) -> None:
        """Checks the invariants, O(requests). AssertionError if one is violated.

        `keys_are_fresh`: also check the keys, because no event has occurred since they were updated.
        """
        waiting = {state.request_id for state in self.waiting}
        running = set(self.running)
        assert not waiting & running, "a request is both waiting and running"
        assert waiting | running == set(self.states), "a request is neither waiting nor running"
        levels = Counter(state.effective_level() for state in self.states.values())
        assert +self.num_by_level == levels, "a level is miscounted"
        unprocessed = sum(state.known_tokens - state.num_computed_tokens for state in self.waiting)
        assert self.waiting_prefill_tokens == unprocessed, "tokens of waiting requests are miscounted"
        assert len(running) <= self.max_running, "too many running requests"
        offloaded = {state.request_id for state in self.waiting if state.num_computed_tokens > 0}
        assert not self.reserved & set(self.states), "a live request also has a reservation"
        self.kv.validate(running | self.reserved, offloaded)
        # Keys that are recomputed at every use are not checked.
        policy = self.policy
        self.waiting.validate(now, keys_are_fresh=keys_are_fresh and policy.key_changes != "with_time")
        if self.evictions is not None:
            assert {state.request_id for state in self.evictions} == running
            is_fresh = keys_are_fresh and policy.running_keys == "on_event"
            self.evictions.validate(now, keys_are_fresh=is_fresh)
        if self.lockstep is not None:
            self.lockstep.validate(self._running.values())
        for state in self.states.values():
            self._validate_state(state)

    def _validate_state(self, state: RequestState) -> None:
        kv, name = self.kv, state.request_id
        assert state.status is (Status.RUNNING if name in self.running else Status.WAITING)
        assert 0 <= state.num_output_tokens < state.request.max_tokens, "a finished request was not removed"
        assert state.request.prompt_tokens <= state.prefill_target_tokens <= state.known_tokens
        assert 0 <= state.num_computed_tokens <= state.known_tokens
        assert (state.first_token_s is None) == (state.num_output_tokens == 0)
        assert state.kv_tokens == kv.held_by(name) * kv.block_tokens
        if state.status is Status.RUNNING:
            assert state.num_computed_tokens <= state.kv_tokens, "tokens without memory"
        else:
            assert kv.offloaded_by(name) == kv.blocks_for(state.num_computed_tokens)
