"""The waiting requests of vLLM in the policy's order, behind the interface of vLLM's own queues."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from scheduler_core.adapters.live_order import LiveOrder


class EngineRequest(Protocol):
    """What the queue needs of vLLM's request."""

    request_id: str


class PolicyQueue:
    """vLLM's `RequestQueue` (v1/core/sched/request_queue.py), ordered by a `LiveOrder`.

    vLLM gives back preempted requests, and those it skipped in a step, by "prepending" them: here they go where their key
    says, as every other request. A request keeps its state, and with it its prediction, while it is not in the queue.

    Args:
        order: Knows every request before it is added (`LiveOrder.arrive`).
        clock: Time in seconds, that of the order.
    """

    def __init__(self, order: LiveOrder, clock: Callable[[], float]) -> None:
        self._order = order
        self._clock = clock
        self._requests: dict[str, EngineRequest] = {}

    def add_request(self, request: EngineRequest) -> None:
        """Puts a request where it belongs; O(log n)."""
        self._requests[request.request_id] = request
        self._order.enqueue(request.request_id, self._clock())

    def peek_request(self) -> EngineRequest:
        """The first request; IndexError if there is none."""
        state = self._order.waiting.peek()
        if state is None:
            raise IndexError("peek from an empty queue")
        return self._requests[state.request_id]

    def pop_request(self) -> EngineRequest:
        """Takes the first request out; IndexError if there is none."""
        state = self._order.waiting.peek()
        if state is None:
            raise IndexError("pop from an empty queue")
        self._order.dequeue(state.request_id)
        return self._requests.pop(state.request_id)

    def prepend_request(self, request: EngineRequest) -> None:
        """As `add_request`: the key decides."""
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[EngineRequest]) -> None:
        """As `add_request` for each, in the order given."""
        for request in requests:
            self.add_request(request)

    def remove_request(self, request: EngineRequest) -> None:
        """Takes a request out, O(log n); ValueError if it is not here."""
        if not self._drop(request):
            raise ValueError(f"request {request.request_id} is not in the queue")

    def remove_requests(self, requests: Iterable[EngineRequest]) -> None:
        """Takes those out that are here."""
        for request in requests:
            self._drop(request)

    def __bool__(self) -> bool:
        return bool(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: object) -> bool:
        return any(found is request for found in self._requests.values())

    def __iter__(self) -> Iterator[EngineRequest]:
        """The requests in order, of the moment of the call; the queue may change meanwhile."""
        return iter([self._requests[state.request_id] for state in self._order.waiting.ascending()])

    def _drop(self, request: EngineRequest) -> bool:
        if self._requests.pop(request.request_id, None) is None:
            return False
        self._order.dequeue(request.request_id)
        return True
