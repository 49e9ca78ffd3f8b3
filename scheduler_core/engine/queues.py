"""Queues of requests: heap with lazy deletion, waiting queue, and running requests in eviction order."""

import math
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable, Generator, Iterator
from heapq import heapify, heappop, heappush
from typing import Any

from scheduler_core.engine.memory_victim import eviction_rank
from scheduler_core.errors import InputError
from scheduler_core.policies.base import Policy
from scheduler_core.request import RequestState

#: Sort keys, then a unique running number, then the request.
Entry = tuple[Any, ...]
#: Declared level, key less what the request is ahead; ties by arrival; then the key and the request.
Ranked = tuple[int, float, float, int, float, RequestState]


def _checked_key(key: Any, policy: Policy, method: str, state: RequestState) -> float:
    """The key as a float; `InputError` if it is not a number, which only policies of users return."""
    try:
        number = float(key)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if math.isnan(number):
        raise InputError(
            f"{type(policy).__name__}.{method} of request {state.request_id}", key, "numbers, not NaN"
        )
    return number


class LazyHeap(ABC):
    """Min-heap with lazy deletion: replaced and removed entries stay until they are popped.

    Push, replace and remove cost O(log n) amortized, because the heap is rebuilt when more than half of it is stale.
    """

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._live: dict[str, Entry] = {}
        self._pushes = 0

    @abstractmethod
    def _entry(self, state: RequestState, now: float) -> Entry:
        """The heap entry of a request at time `now`."""

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[RequestState]:
        """The requests in no particular order."""
        return (entry[-1] for entry in self._live.values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    def push(self, state: RequestState, now: float) -> None:
        """Inserts a request or replaces its entry."""
        entry = self._live[state.request_id] = self._entry(state, now)
        heap = self._heap
        heappush(heap, entry)
        if len(heap) > 2 * len(self._live) + 16:
            self._heap = list(self._live.values())
            heapify(self._heap)

    def remove(self, state: RequestState) -> None:
        """Removes a request; its heap entry is removed at once if it is the first, else when it is popped."""
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
        """The requests in order; O(log n) for each.

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
        """Checks that the heap contains all live entries; with fresh keys, also that no entry is stale."""
        assert {id(e) for e in self._live.values()} <= {id(e) for e in self._heap}
        for entry in self._live.values() if keys_are_fresh else ():
            same = entry[:-2] == self._entry(entry[-1], now)[:-2]
            assert same, f"stale key of {entry[-1].request_id} in {type(self).__name__}"


class WaitingQueue(LazyHeap):
    """The waiting requests in the policy's order: min-heap over (declared level, group, key, arrival, order).

    Requests of a smaller `group` come first, regardless of their keys; None: there is only one group.
    """

    def __init__(self, policy: Policy, group: Callable[[RequestState], int] | None = None) -> None:
        super().__init__()
        self.policy = policy
        self._group = group

    def _entry(self, state: RequestState, now: float) -> Entry:
        key = self.policy.key(state, now)
        if type(key) is not float or key != key:
            key = _checked_key(key, self.policy, "key", state)
        self._pushes = pushes = self._pushes + 1
        level, arrival_s = state.declared_level, state.request.arrival_s
        if self._group is None:
            return (level, key, arrival_s, state.order, pushes, state)
        return (level, self._group(state), key, arrival_s, state.order, pushes, state)


class EvictionQueue(LazyHeap):
    """The running requests in the order of eviction: largest `eviction_rank` first.

    If the running keys of the policy change "on_event", the heap is always up to date. Otherwise all keys are
    recomputed, O(n), at the first access in a step.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy
        self._is_stale = False
        #: Requests whose key may have changed since the last `ranked`; None: all.
        self._changed: set[RequestState] | None = None
        self._ranked: list[Ranked] = []
        self._items: dict[RequestState, Ranked] = {}
        self._ahead: frozenset[str] = frozenset()

    def push(self, state: RequestState, now: float) -> None:
        """See `LazyHeap`."""
        super().push(state, now)
        self._touch(state)

    def remove(self, state: RequestState) -> None:
        """See `LazyHeap`."""
        super().remove(state)
        self._touch(state)

    def rekey_all(self, now: float) -> None:
        """See `LazyHeap`."""
        super().rekey_all(now)
        self._changed = None

    def _touch(self, state: RequestState) -> None:
        if self._changed is not None:
            self._changed.add(state)

    def ranked(self, ahead: frozenset[str], ahead_s: float, now: float) -> list[Ranked]:
        """The running requests in the order of their declared levels and keys; the keys of those `ahead` count as smaller by
        `ahead_s`. Read-only, and valid until the next call.

        Under policies whose keys only change with events, the others keep their order: O(log n) for each request with an event,
        and for each that is ahead now and was not, or the other way round.
        """
        live, policy = self._live, self.policy
        if self._changed is None or policy.key_changes == "with_time" or policy.running_keys == "on_tokens":
            states = [entry[-1] for entry in live.values()]
            self._items = {state: self._ranked_item(state, ahead, ahead_s, now) for state in states}
            self._ranked = sorted(self._items.values())
        else:
            moved = [live[name][-1] for name in ahead ^ self._ahead if name in live]
            for state in self._changed.union(moved):
                if (item := self._items.pop(state, None)) is not None:
                    del self._ranked[bisect_left(self._ranked, item)]
                if state.request_id in live and live[state.request_id][-1] is state:
                    self._items[state] = item = self._ranked_item(state, ahead, ahead_s, now)
                    insort(self._ranked, item)
        self._ahead, self._changed = ahead, set()
        return self._ranked

    def _ranked_item(self, state: RequestState, ahead: frozenset[str], ahead_s: float, now: float) -> Ranked:
        key, request = self.policy.key(state, now), state.request
        first = key - ahead_s if state.request_id in ahead else key
        return state.declared_level, first, request.arrival_s, state.order, key, state

    def _entry(self, state: RequestState, now: float) -> Entry:
        key = self.policy.eviction_key(state, now)
        if type(key) is not float or key != key:
            key = _checked_key(key, self.policy, "eviction_key", state)
        self._pushes += 1
        protected, level = key == -math.inf, state.declared_level
        return (protected, -level, -key, -state.request.arrival_s, -state.order, self._pushes, state)

    def start_step(self) -> None:
        """Marks the keys as stale if they change with tokens or time; called before each step."""
        self._is_stale = self.policy.running_keys == "on_tokens"

    def first(self, now: float) -> RequestState:
        """The request to evict first, protected or not. AssertionError if no request is running."""
        if self._is_stale:
            return self._latest_of_largest(*self._current_keys(now))
        state = self.peek()
        assert state is not None, "no request is running"
        return state

    def first_displaceable(self, now: float) -> RequestState | None:
        """The request to evict first for a waiting one; None if all are protected, at -infinity."""
        if not self._is_stale:
            state = self.peek()
            return None if state is None or self.is_protected(state) else state
        # A single pass over all is cheaper than a new heap, and usually sufficient.
        states, keys = self._current_keys(now)
        return self._latest_of_largest(states, keys) if max(keys, default=-math.inf) > -math.inf else None

    def _current_keys(self, now: float) -> tuple[list[RequestState], list[float]]:
        states = [entry[-1] for entry in self._live.values()]
        eviction_key = self.policy.eviction_key
        return states, [eviction_key(state, now) for state in states]

    @staticmethod
    def _latest_of_largest(states: list[RequestState], keys: list[float]) -> RequestState:
        if len({state.declared_level for state in states}) == 1:
            largest = max(keys)
            candidates = [state for state, key in zip(states, keys, strict=True) if key == largest]
            return max(candidates, key=lambda state: (state.request.arrival_s, state.order))
        ranks = [eviction_rank(state, key) for state, key in zip(states, keys, strict=True)]
        return states[ranks.index(max(ranks))]

    def in_order(self, now: float) -> Generator[RequestState, None, None]:
        """The requests in the order of eviction; see `ascending`."""
        if self._is_stale:
            self.rekey_all(now)
            self._is_stale = False
        return self.ascending()

    def is_protected(self, state: RequestState) -> bool:
        """Whether the eviction key was -infinity at its last computation."""
        return bool(self._live[state.request_id][0])
