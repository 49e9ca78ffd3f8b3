"""The running requests in the order in which they would be evicted."""

from __future__ import annotations

import math
from collections.abc import Generator

from scheduler_core.lazy_heap import Entry, LazyHeap
from scheduler_core.policies.base import Policy
from scheduler_core.request import RequestState


class EvictionOrder(LazyHeap):
    """Largest eviction key first; of equal ones the request that arrived last.

    For a policy whose running keys change "on_event" the heap is always right. For the others the keys are computed
    anew, O(n), when somebody asks for the first of a step.

    Args:
        policy: Gives the eviction keys.
    """

    __slots__ = ("_is_stale", "policy")

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy
        self._is_stale = False

    def _entry(self, state: RequestState, now: float) -> Entry:
        key = self.policy.eviction_key(state, now)
        assert key == key, f"{type(self.policy).__name__} gave NaN for {state.request_id}"
        self._pushes += 1
        return (-key, -state.request.arrival_s, -state.order, self._pushes, state)

    def start_step(self) -> None:
        """Tokens have been processed or time has passed since the last call."""
        self._is_stale = self.policy.running_keys == "on_tokens"

    def worst(self, now: float) -> RequestState:
        """The request to be evicted first, be it protected or not; there must be one."""
        if self._is_stale:
            return self._youngest_of_largest(*self._scan(now))
        state = self.peek()
        assert state is not None, "nothing runs"
        return state

    def displaceable(self, now: float) -> RequestState | None:
        """The request to be evicted first for one that waits; None if all are protected."""
        if not self._is_stale:
            state = self.peek()
            return None if state is None or self.key_of(state) == -math.inf else state
        # One look at each is cheaper than a new heap, and mostly enough.
        states, keys = self._scan(now)
        if not keys or max(keys) == -math.inf:
            return None
        return self._youngest_of_largest(states, keys)

    def _scan(self, now: float) -> tuple[list[RequestState], list[float]]:
        states = [entry[-1] for entry in self._live.values()]
        eviction_key = self.policy.eviction_key
        return states, [eviction_key(state, now) for state in states]

    @staticmethod
    def _youngest_of_largest(states: list[RequestState], keys: list[float]) -> RequestState:
        largest = max(keys)
        found = [state for state, key in zip(states, keys, strict=True) if key == largest]
        return max(found, key=lambda state: (state.request.arrival_s, state.order))

    def worst_first(self, now: float) -> Generator[RequestState, None, None]:
        """The requests in the order of eviction; see `ascending`."""
        if self._is_stale:
            self.rekey_all(now)
            self._is_stale = False
        return self.ascending()

    def key_of(self, state: RequestState) -> float:
        """The eviction key of a request that `worst_first` or, if keys change on events, anybody has given."""
        return -float(self._live[state.request_id][0])
