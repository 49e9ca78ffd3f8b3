"""A heap of requests whose entries may be replaced and removed: lazy deletion."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from heapq import heapify, heappop, heappush
from typing import Any

from scheduler_core.request import RequestState

#: What to compare by first, then a running number that no other entry has, the request last.
Entry = tuple[Any, ...]


class LazyHeap(ABC):
    """Min-heap of entries; a replaced entry, or a removed one that was not the first, stays in the heap until it surfaces.

    Push, replace and remove cost O(log n) amortised: when more than half of the heap is dead it is rebuilt.
    """

    __slots__ = ("_heap", "_live", "_pushes")

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._live: dict[str, Entry] = {}
        self._pushes = 0

    @abstractmethod
    def _entry(self, state: RequestState, now: float) -> Entry:
        """Where the request belongs."""

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[RequestState]:
        """The requests in no particular order."""
        return (entry[-1] for entry in self._live.values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    def push(self, state: RequestState, now: float) -> None:
        """Puts a request in, or moves it to where it now belongs."""
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
        seen: list[Entry] = []
        try:
            while heap:
                entry = heappop(heap)
                if live.get(entry[-1].request_id) is entry:
                    seen.append(entry)
                    yield entry[-1]
        finally:
            for entry in seen:
                heappush(heap, entry)

    def rekey_all(self, now: float) -> None:
        """Places every request anew, O(n)."""
        self._heap = []
        for state in list(self):
            entry = self._live[state.request_id] = self._entry(state, now)
            self._heap.append(entry)
        heapify(self._heap)

    def validate(self) -> None:
        """Checks that the heap covers the live entries."""
        assert {id(e) for e in self._live.values()} <= {id(e) for e in self._heap}
        assert all(request_id == e[-1].request_id for request_id, e in self._live.items())

    def validate_keys(self, now: float) -> None:
        """Checks that every request is where it would be put now."""
        for entry in self._live.values():
            expected = self._entry(entry[-1], now)
            assert entry[:-2] == expected[:-2], (
                f"stale key of {entry[-1].request_id} in {type(self).__name__}"
            )
