"""The live requests and the memory they hold: what a batch former works on."""

from __future__ import annotations

from scheduler_core.kv_cache import KVCache
from scheduler_core.policies.base import Policy
from scheduler_core.request import RequestState, Status
from scheduler_core.waiting_queue import WaitingQueue


class Pool:
    """Waiting queue, running requests and KV cache, kept consistent.

    Args:
        policy: Orders the waiting requests.
        kv: The KV cache.
        max_num_seqs: Most requests running at the same time.
    """

    __slots__ = ("kv", "max_num_seqs", "running", "states", "waiting")

    def __init__(self, policy: Policy, kv: KVCache, max_num_seqs: int) -> None:
        self.kv = kv
        self.max_num_seqs = max_num_seqs
        self.states: dict[str, RequestState] = {}
        self.waiting = WaitingQueue(policy)
        #: In order of admission.
        self.running: dict[str, RequestState] = {}

    def enter(self, state: RequestState, now: float) -> None:
        """A new request starts to wait."""
        self.states[state.request_id] = state
        self.waiting.push(state, now)

    def admit(self, state: RequestState, now: float) -> bool:
        """Moves a waiting request to the running ones, with blocks for all it has to process; False if too few."""
        alone = not self.running
        if not self.kv.admit(state.request_id, state.known_tokens, alone=alone):
            return False
        self.waiting.remove(state)
        state.status = Status.RUNNING
        state.prefill_target_tokens = state.known_tokens
        if state.first_scheduled_s is None:
            state.first_scheduled_s = now
        self.running[state.request_id] = state
        return True

    def preempt(self, state: RequestState, now: float) -> None:
        """Takes a running request's memory away; it waits again and will process all its tokens anew."""
        del self.running[state.request_id]
        self.kv.release(state.request_id)
        state.status = Status.WAITING
        state.num_computed_tokens = 0
        state.num_preemptions += 1
        self.waiting.push(state, now)

    def leave(self, state: RequestState) -> None:
        """Forgets a request."""
        if state.status is Status.WAITING:
            self.waiting.remove(state)
        else:
            del self.running[state.request_id]
            self.kv.release(state.request_id)
        state.status = Status.GONE
        del self.states[state.request_id]

    def validate(self, now: float) -> None:
        """Checks the invariants; AssertionError names the one that does not hold."""
        waiting = {state.request_id for state in self.waiting}
        running = set(self.running)
        assert not waiting & running, "a request both waits and runs"
        assert waiting | running == set(self.states), "a request is lost"
        assert len(running) <= self.max_num_seqs, "too many running requests"
        self.kv.validate(running)
        self.waiting.validate(now)
        for state in self.states.values():
            request = state.request
            assert state.status is (Status.RUNNING if state.request_id in running else Status.WAITING)
            assert 0 <= state.num_output_tokens < request.max_tokens, "a finished request is still here"
            if state.status is Status.WAITING:
                assert state.num_computed_tokens == 0
            else:
                assert state.num_computed_tokens <= state.known_tokens
                capacity = self.kv.held_by(state.request_id) * self.kv.block_tokens
                assert state.num_computed_tokens <= capacity, "tokens without memory"
