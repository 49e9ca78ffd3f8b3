"""When requests that decode together will have their true length."""

from __future__ import annotations

from heapq import heapify, heappop, heappush


class Endings:
    """A heap of requests by the step after which they are done; steps count for all of them.

    See `Scheduler.num_common_steps` for the number of a step.
    """

    __slots__ = ("_at", "_heap")

    def __init__(self) -> None:
        self._heap: list[tuple[int, str]] = []
        self._at: dict[str, int] = {}

    def add(self, request_id: str, step: int) -> None:
        """The request is done when so many steps have been taken."""
        self._at[request_id] = step
        heap = self._heap
        heappush(heap, (step, request_id))
        if len(heap) > 2 * len(self._at) + 64:
            self._heap = [(step, name) for name, step in self._at.items()]
            heapify(self._heap)

    def drop(self, request_id: str) -> None:
        """The request does not decode any more, and is not done; nothing happens if it did not."""
        self._at.pop(request_id, None)

    def next_step(self) -> int | None:
        """Steps taken when the first request is done; None if there is no request."""
        heap, at = self._heap, self._at
        while heap and at.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap[0][0] if heap else None

    def pop_until(self, step: int) -> list[str]:
        """Takes out those who are done when so many steps have been taken, in no particular order."""
        heap, at = self._heap, self._at
        done: list[str] = []
        while heap and heap[0][0] <= step:
            due, name = heappop(heap)
            if at.get(name) == due:
                del at[name]
                done.append(name)
        return done
