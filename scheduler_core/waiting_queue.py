"""The waiting requests in the policy's order: a heap with lazy deletion."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from scheduler_core.policies.base import Policy
from scheduler_core.request import RequestState

Entry = tuple[float, float, int, int, RequestState]


class WaitingQueue:
    """Min-heap over (key, arrival, order); a changed or removed entry stays in the heap until it surfaces.

    Push, change and remove cost O(log n) amortised: when more than half of the heap is dead it is rebuilt.

    Args:
        policy: Gives the keys.
    """

    __slots__ = ("_heap", "_live", "_pushes", "policy")

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._heap: list[Entry] = []
        self._live: dict[str, Entry] = {}
        self._pushes = 0

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[RequestState]:
        """The waiting requests in no particular order."""
        return (entry[-1] for entry in self._live.values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    def push(self, state: RequestState, now: float) -> None:
        """Puts a request in, or moves it to where its key now belongs."""
        entry = self._entry(state, now)
        self._live[state.request_id] = entry
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._live) + 16:
            self._heap = list(self._live.values())
            heapq.heapify(self._heap)

    def remove(self, state: RequestState) -> None:
        """Takes a waiting request out."""
        del self._live[state.request_id]

    def peek(self) -> RequestState | None:
        """The request to be served next; None if nothing waits."""
        heap, live = self._heap, self._live
        while heap:
            entry = heap[0]
            if live.get(entry[-1].request_id) is entry:
                return entry[-1]
            heapq.heappop(heap)
        return None

    def rekey_all(self, now: float) -> None:
        """Computes every key anew, O(n)."""
        self._heap = []
        for state in list(self):
            entry = self._entry(state, now)
            self._live[state.request_id] = entry
            self._heap.append(entry)
        heapq.heapify(self._heap)

    def _entry(self, state: RequestState, now: float) -> Entry:
        key = self.policy.key(state, now)
        assert key == key, f"{type(self.policy).__name__} gave NaN for {state.request_id}"
        self._pushes += 1
        return (key, state.request.arrival_s, state.order, self._pushes, state)

    def validate(self, now: float) -> None:
        """Checks that the heap covers the live entries and, for static policies, that no key is stale."""
        assert {id(e) for e in self._live.values()} <= {id(e) for e in self._heap}
        if self.policy.key_changes == "never":
            assert all(e[0] == self.policy.key(e[-1], now) for e in self._live.values())
