"""Queues of requests: a heap with lazy deletion, the waiting requests, and the running ones in order of eviction."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from heapq import heapify, heappop, heappush
from typing import Any

from scheduler_core.policies.base import Policy
from scheduler_core.request import RequestState

#: What to compare by first, then a running number that no other entry has, the request last.
Entry = tuple[Any, ...]


class LazyHeap(ABC):
    """Min-heap of entries; a replaced entry, or a removed one that was not the first, stays in the heap until it surfaces.

    Push, replace and remove cost O(log n) amortized: when more than half of the heap is dead it is rebuilt.
    """

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._live: dict[str, Entry] = {}
        self._pushes = 0

    @abstractmethod
    def _entry(self, state: RequestState, now: float) -> Entry:
        """The request's entry now."""

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[RequestState]:
        """The requests in no particular order."""
        return (entry[-1] for entry in self._live.values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    def push(self, state: RequestState, now: float) -> None:
        """Puts a request in, or replaces its entry."""
        entry = self._live[state.request_id] = self._entry(state, now)
        heap = self._heap
        heappush(heap, entry)
        if len(heap) > 2 * len(self._live) + 16:
            self._heap = list(self._live.values())
            heapify(self._heap)

    def remove(self, state: RequestState) -> None:
        """Takes a request out; the first one is out of the heap at once, the others when they surface."""
        entry = self._live.pop(state.request_id)
        heap = self._heap
        if heap and heap[0] is entry:
            heappop(heap)

    def peek(self) -> RequestState | None:
        """The first request; None if there is none."""
        heap, live = self._heap, self._live
        while heap:
            entry = heap[0]
            state: RequestState = entry[-1]
            if live.get(state.request_id) is entry:
                return state
            heappop(heap)
        return None

    def ascending(self) -> Generator[RequestState, None, None]:
        """The requests in order, O(log n) for each that is looked at.

        The heap must not be changed before the iterator is exhausted or closed.
        """
        heap, live = self._heap, self._live
        popped: list[Entry] = []
        try:
            while heap:
                entry = heappop(heap)
                if live.get(entry[-1].request_id) is entry:
                    popped.append(entry)
                    yield entry[-1]
        finally:
            for entry in popped:
                heappush(heap, entry)

    def rekey_all(self, now: float) -> None:
        """Recomputes every entry, O(n)."""
        self._heap = []
        for state in list(self):
            entry = self._live[state.request_id] = self._entry(state, now)
            self._heap.append(entry)
        heapify(self._heap)

    def validate(self, now: float, *, keys_are_fresh: bool) -> None:
        """Checks that the heap covers the live entries, and that each is what it would be now if keys are fresh."""
        assert {id(e) for e in self._live.values()} <= {id(e) for e in self._heap}
        for entry in self._live.values() if keys_are_fresh else ():
            same = entry[:-2] == self._entry(entry[-1], now)[:-2]
            assert same, f"stale key of {entry[-1].request_id} in {type(self).__name__}"


class WaitingQueue(LazyHeap):
    """The waiting requests in the policy's order: min-heap over (group, key, arrival, order).

    Requests of a smaller `group` go before those of a larger one, whatever their keys; None: all are of one.
    """

    def __init__(self, policy: Policy, group: Callable[[RequestState], int] | None = None) -> None:
        super().__init__()
        self.policy = policy
        self._group = group

    def _entry(self, state: RequestState, now: float) -> Entry:
        key = self.policy.key(state, now)
        assert key == key, f"{type(self.policy).__name__} gave NaN for {state.request_id}"
        self._pushes = pushes = self._pushes + 1
        if self._group is None:
            return (key, state.request.arrival_s, state.order, pushes, state)
        return (self._group(state), key, state.request.arrival_s, state.order, pushes, state)


class EvictionQueue(LazyHeap):
    """The running requests in the order of eviction: largest eviction key first, of equal ones the latest arrival.

    For a policy whose running keys change "on_event" the heap is always right. For the others the keys are recomputed,
    O(n), when the first of a step is read.
    """

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

    def first(self, now: float) -> RequestState:
        """The request to be evicted first, be it protected or not; there must be one."""
        if self._is_stale:
            return self._latest_of_largest(*self._current_keys(now))
        state = self.peek()
        assert state is not None, "nothing runs"
        return state

    def first_displaceable(self, now: float) -> RequestState | None:
        """The request to be evicted first for a waiting one; None if all are protected."""
        if not self._is_stale:
            state = self.peek()
            return None if state is None or self.key_of(state) == -math.inf else state
        # Comparing all once is cheaper than a new heap, and mostly enough.
        states, keys = self._current_keys(now)
        return self._latest_of_largest(states, keys) if max(keys, default=-math.inf) > -math.inf else None

    def _current_keys(self, now: float) -> tuple[list[RequestState], list[float]]:
        states = [entry[-1] for entry in self._live.values()]
        eviction_key = self.policy.eviction_key
        return states, [eviction_key(state, now) for state in states]

    @staticmethod
    def _latest_of_largest(states: list[RequestState], keys: list[float]) -> RequestState:
        largest = max(keys)
        candidates = [state for state, key in zip(states, keys, strict=True) if key == largest]
        return max(candidates, key=lambda state: (state.request.arrival_s, state.order))

    def in_order(self, now: float) -> Generator[RequestState, None, None]:
        """The requests in the order of eviction; see `ascending`."""
        if self._is_stale:
            self.rekey_all(now)
            self._is_stale = False
        return self.ascending()

    def key_of(self, state: RequestState) -> float:
        """The eviction key as of its last computation."""
        return -float(self._live[state.request_id][0])
