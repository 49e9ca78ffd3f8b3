"""The live requests and the memory they hold: what a batch former works on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Literal

from scheduler_core.decode_cohort import DecodeCohort
from scheduler_core.eviction import EvictionOrder
from scheduler_core.kv_cache import KVCache
from scheduler_core.policies.base import Policy
from scheduler_core.request import RequestState, Status
from scheduler_core.waiting_queue import WaitingQueue

Preemption = Literal["recompute", "swap"]


class Pool:
    """Waiting queue, running requests and KV cache, kept consistent.

    Args:
        policy: Orders the requests.
        kv: The KV cache.
        max_num_seqs: Most requests in one step.
        max_running: Most requests that hold memory at the same time; None: max_num_seqs.
        preemption: Whether a preempted request keeps a copy of its cache on the host, if there is room.
        evicts_by_key: Victims are found by the policy's eviction key; False: the youngest goes.
        group: See `WaitingQueue`.
        lazily: Those who decode are counted together, see `DecodeCohort`: for batch formers that let all of them decode
            whenever one does, and policies that do not look at them meanwhile.
    """

    __slots__ = ("_num_seats", "_prefilling", "_running", "_states", "cohort", "evictions", "kv", "max_num_seqs", "max_running", "policy", "preemption", "reserved", "waiting")  # fmt: skip

    def __init__(
        self,
        policy: Policy,
        kv: KVCache,
        max_num_seqs: int,
        *,
        max_running: int | None = None,
        preemption: Preemption = "recompute",
        evicts_by_key: bool = False,
        group: Callable[[RequestState], int] | None = None,
        lazily: bool = False,
    ) -> None:
        self.policy = policy
        self.kv = kv
        self.max_num_seqs = max_num_seqs
        self.max_running = max_num_seqs if max_running is None else max_running
        self.preemption = preemption
        self._states: dict[str, RequestState] = {}
        self.waiting = WaitingQueue(policy, group)
        self._running: dict[str, RequestState] = {}
        self.evictions = EvictionOrder(policy) if evicts_by_key else None
        #: Those who decode, if they are counted together.
        self.cohort = DecodeCohort(kv) if lazily and self.evictions is None else None
        #: With a cohort: the running requests that are not in it, in order of admission, with the number of that.
        self._prefilling: dict[str, tuple[RequestState, int]] = {}
        self._num_seats = 0
        #: Requests that are not here but have blocks and a seat here; `max_running` is without those seats.
        self.reserved: set[str] = set()

    @property
    def states(self) -> Mapping[str, RequestState]:
        """All live requests, to read; O(running requests) if they were counted together."""
        self.settle()
        return self._states

    @property
    def running(self) -> Mapping[str, RequestState]:
        """The running requests in order of admission, to read; costs as much."""
        self.settle()
        return self._running

    @property
    def num_running(self) -> int:
        """Running requests."""
        return len(self._running)

    @property
    def is_empty(self) -> bool:
        """There is no live request."""
        return not self._states

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._states

    def find(self, request_id: str) -> RequestState | None:
        """A live request, to read; None if it is not here."""
        if self.cohort is not None:
            self.cohort.settle(request_id)
        return self._states.get(request_id)

    def settle(self) -> None:
        """Brings the states of those up to date that are counted together."""
        if self.cohort is not None:
            self.cohort.settle_all()

    def by_phase(self) -> tuple[list[RequestState], list[RequestState]]:
        """The running requests in prefill and those that decode, each in order of admission; not to be changed, and those
        that decode are perhaps not settled.
        """
        if self.cohort is not None:
            prefilling = [state for state, _ in self._prefilling.values()] if self._prefilling else []
            return prefilling, self.cohort.states()
        running = self._running.values()
        decodes = [s for s in running if s.num_computed_tokens >= s.prefill_target_tokens]
        if len(decodes) == len(running):
            return [], decodes
        return [s for s in running if s.num_computed_tokens < s.prefill_target_tokens], decodes

    def prefilled(self, state: RequestState) -> None:
        """A running request has processed its prompt; its next step is a decode."""
        if self.cohort is not None:
            _, seat = self._prefilling.pop(state.request_id)
            self.cohort.join(state, seat)

    def _sit_down(self, state: RequestState) -> None:
        """A request has been admitted."""
        if self.cohort is None:
            return
        self._num_seats = seat = self._num_seats + 1
        if state.num_computed_tokens < state.prefill_target_tokens:
            self._prefilling[state.request_id] = (state, seat)
        else:
            self.cohort.join(state, seat)

    def count_singly(self) -> None:
        """From now on everybody is counted by themselves, as what comes next does not fit into a cohort."""
        if self.cohort is not None:
            self.cohort.settle_all()
            self.cohort = None

    def enter(self, state: RequestState, now: float) -> None:
        """A new request starts to wait."""
        self._states[state.request_id] = state
        self.waiting.push(state, now)

    def rekey(self, state: RequestState, now: float) -> None:
        """The keys of a request have changed; nothing happens if it is gone."""
        if state.status is Status.WAITING:
            self.waiting.push(state, now)
        elif state.status is Status.RUNNING and self.evictions is not None:
            self.evictions.push(state, now)

    def start_step(self, now: float) -> None:
        """Called before each step; brings the keys up to date that change with the steps."""
        if self.evictions is not None:
            self.evictions.start_step()
        for state in self.policy.take_changed(now):
            self.rekey(state, now)

    def reserve_tokens(self, state: RequestState) -> int:
        """Tokens for which a waiting request gets blocks when it is admitted."""
        most = state.request.prompt_tokens + state.request.max_tokens
        return min(max(self.policy.admission_tokens(state), state.known_tokens), most)

    def admit(self, state: RequestState, now: float, reserve_tokens: int | None = None) -> bool:
        """Moves a waiting request to the running ones, with blocks for all it has to process; False if there is no
        seat or too few blocks.

        Args:
            state: Waits.
            now: Time in seconds.
            reserve_tokens: Take blocks for so many tokens; None: as many as the policy asks for.
        """
        running = self._running
        tokens = self.reserve_tokens(state) if reserve_tokens is None else reserve_tokens
        if len(running) >= self.max_running:
            return False
        if not self.kv.admit(state.request_id, tokens, alone=not running):
            return False
        self.waiting.remove(state)
        state.status = Status.RUNNING
        if state.num_computed_tokens < state.prefill_target_tokens:
            state.prefill_target_tokens = state.known_tokens
            if state.first_scheduled_s is None:
                state.num_computed_tokens = state.request.cached_prefix_tokens
        if state.first_scheduled_s is None:
            state.first_scheduled_s = now
        self._note_room(state)
        running[state.request_id] = state
        self._sit_down(state)
        self.policy.on_admit(state, now)
        if self.evictions is not None:
            self.evictions.push(state, now)
        return True

    def grow(self, state: RequestState, num_tokens: int) -> bool:
        """Makes room for `num_tokens` tokens of a running request in all; False if there are too few blocks."""
        if num_tokens <= state.kv_tokens:
            return True
        if not self.kv.grow(state.request_id, num_tokens):
            return False
        size = self.kv.block_tokens
        state.kv_tokens = -(-num_tokens // size) * size
        if self.cohort is not None and state.request_id in self.cohort:
            self.cohort.grown(state)
        return True

    def preempt(self, state: RequestState, now: float, kept_tokens: int | None = None) -> int:
        """Takes a running request's memory away; it waits again.

        Args:
            state: Runs.
            now: Time in seconds.
            kept_tokens: Keep a copy of the first so many tokens on the host; None: of all if preemption is by swap,
                else of none. The others will be processed anew, and all if the host has no room.

        Returns:
            The tokens kept.
        """
        self._stop_running(state)
        if kept_tokens is None:
            kept_tokens = state.num_computed_tokens if self.preemption == "swap" else 0
        if kept_tokens == 0 or not self.kv.offload(state.request_id, kept_tokens):
            kept_tokens = 0
            self.kv.release(state.request_id)
        if kept_tokens < state.num_computed_tokens:
            state.prefill_target_tokens = state.known_tokens
        state.status = Status.WAITING
        state.num_computed_tokens = kept_tokens
        state.kv_tokens = 0
        state.num_preemptions += 1
        self.policy.on_preempt(state, now)
        self.waiting.push(state, now)
        return kept_tokens

    def memory_victim(self, now: float) -> RequestState:
        """The running request to be preempted when the running ones have no memory left to grow."""
        if self.evictions is not None:
            return self.evictions.worst(now)
        return next(reversed(self._running.values()))

    def victims_for(self, state: RequestState, now: float) -> list[RequestState] | None:
        """The fewest running requests that must go for a waiting one to be admitted; None if it may not displace
        enough of them, or needs none.
        """
        if self.evictions is None:
            return None
        tokens = self.reserve_tokens(state)
        worst = self.evictions.displaceable(now)
        if worst is None or not self.policy.may_preempt(worst, state, now):
            return None
        if self._would_fit(tokens, [worst]):
            return [worst]
        victims: list[RequestState] = []
        with closing(self.evictions.worst_first(now)) as worst_first:
            for running in worst_first:
                protected = self.evictions.key_of(running) == -math.inf
                if protected or not self.policy.may_preempt(running, state, now):
                    return None
                victims.append(running)
                if self._would_fit(tokens, victims):
                    return victims
        return None

    def _would_fit(self, num_tokens: int, victims: list[RequestState]) -> bool:
        """Whether a newcomer of so many tokens could be admitted without the victims."""
        left = len(self._running) - len(victims)
        freed_blocks = sum(self.kv.held_by(victim.request_id) for victim in victims)
        return left < self.max_running and self.kv.fits(
            num_tokens, alone=left == 0, freed_blocks=freed_blocks
        )

    def leave(self, state: RequestState) -> None:
        """Forgets a request."""
        if state.status is Status.WAITING:
            self.waiting.remove(state)
        else:
            self._stop_running(state)
        self.kv.release(state.request_id)
        state.status = Status.GONE
        del self._states[state.request_id]

    def reserve(self, request_id: str, num_blocks: int) -> bool:
        """Keeps that many blocks more for a request that is on its way here, and with the first ones a seat; False
        (and nothing taken) if there are none.
        """
        held = self.kv.held_by(request_id)
        if request_id in self.reserved:
            return self.kv.grow(request_id, (held + num_blocks) * self.kv.block_tokens)
        if len(self._running) >= self.max_running:
            return False
        if not self.kv.admit(request_id, num_blocks * self.kv.block_tokens, alone=not self._running):
            return False
        self.reserved.add(request_id)
        self.max_running -= 1
        return True

    def unreserve(self, request_id: str) -> None:
        """Gives back what is kept for the request, if anything is."""
        if request_id in self.reserved:
            self.kv.release(request_id)
            self._free_reserved(request_id)

    def take_out(self, state: RequestState) -> None:
        """A request leaves for another replica. Blocks and seat of a running one stay reserved for it."""
        name = state.request_id
        if state.status is Status.WAITING:
            self.leave(state)
            state.num_computed_tokens, state.prefill_target_tokens = 0, state.known_tokens
            return
        self.count_singly()
        self._stop_running(state)
        self.reserved.add(name)
        self.max_running -= 1
        state.status, state.kv_tokens = Status.GONE, 0
        del self._states[name]

    def put_in(self, state: RequestState, now: float) -> None:
        """A request comes from another replica: it runs on what is reserved for it, or waits if nothing is."""
        name = state.request_id
        if name not in self.reserved:
            state.status = Status.WAITING
            self.enter(state, now)
            return
        self.count_singly()
        self._free_reserved(name)
        self._states[name] = self._running[name] = state
        state.status = Status.RUNNING
        self._note_room(state)
        self.policy.on_admit(state, now)
        if self.evictions is not None:
            self.evictions.push(state, now)

    def _free_reserved(self, request_id: str) -> None:
        self.reserved.remove(request_id)
        self.max_running += 1

    def _stop_running(self, state: RequestState) -> None:
        name = state.request_id
        del self._running[name]
        if self.cohort is not None and self._prefilling.pop(name, None) is None:
            self.cohort.leave(state)
        if self.evictions is not None:
            self.evictions.remove(state)

    def _note_room(self, state: RequestState) -> None:
        state.kv_tokens = self.kv.held_by(state.request_id) * self.kv.block_tokens

    def validate(self, now: float, *, keys_are_fresh: bool) -> None:
        """Checks the invariants; AssertionError names the one that does not hold.

        Args:
            now: Time of the last call.
            keys_are_fresh: Nothing has happened since keys were brought up to date: check that they are.
        """
        waiting = {state.request_id for state in self.waiting}
        running = set(self.running)
        assert not waiting & running, "a request both waits and runs"
        assert waiting | running == set(self.states), "a request is lost"
        assert len(running) <= self.max_running, "too many running requests"
        offloaded = {state.request_id for state in self.waiting if state.num_computed_tokens > 0}
        assert not self.reserved & set(self.states), "a request is here and on its way here"
        self.kv.validate(running | self.reserved, offloaded)
        self.waiting.validate()
        if self.evictions is not None:
            assert {state.request_id for state in self.evictions} == running
            self.evictions.validate()
        if self.cohort is not None:
            self.cohort.validate(self._running.values())
        if keys_are_fresh:
            self._validate_keys(now)
        for state in self.states.values():
            self._validate_state(state)

    def _validate_keys(self, now: float) -> None:
        """Those that are not computed anew whenever they are needed."""
        if self.policy.key_changes != "with_time":
            self.waiting.validate_keys(now)
        if self.evictions is not None and self.policy.running_keys == "on_event":
            self.evictions.validate_keys(now)

    def _validate_state(self, state: RequestState) -> None:
        kv, name = self.kv, state.request_id
        assert state.status is (Status.RUNNING if name in self.running else Status.WAITING)
        assert 0 <= state.num_output_tokens < state.request.max_tokens, "a finished request is still here"
        assert state.request.prompt_tokens <= state.prefill_target_tokens <= state.known_tokens
        assert 0 <= state.num_computed_tokens <= state.known_tokens
        assert (state.first_token_s is None) == (state.num_output_tokens == 0)
        assert state.kv_tokens == kv.held_by(name) * kv.block_tokens
        if state.status is Status.RUNNING:
            assert state.num_computed_tokens <= state.kv_tokens, "tokens without memory"
        else:
            assert kv.offloaded_by(name) == kv.blocks_for(state.num_computed_tokens)
