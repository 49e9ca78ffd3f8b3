"""vLLM's waiting queue in the order of a policy, or of a plan."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from scheduler_core.adapters.live_order import LiveOrder
from scheduler_core.policies.base import Policy


class PolicyQueue:
    """vLLM's `RequestQueue` (v1/core/sched/request_queue.py), ordered by a `LiveOrder`.

    vLLM prepends preempted requests and those it skipped in a step; here they are also inserted in key order.
    The state of a request, including its prediction, is kept while it is not in the queue.

    Before each admission vLLM asks whether the queue is empty. It counts as empty while the policy holds the first request
    back (`Policy.may_admit`) and others run. `on_admitted` is called before that with a request that was admitted in the same
    step, so that the policy knows. Its length always counts all requests, and vLLM's engine goes on while there are any.

    An exception of the policy is passed to `on_error`; from then on the queue is first in, first out.
    """

    def __init__(
        self,
        order: LiveOrder,
        clock: Callable[[], float],
        running: Callable[[], Sequence[Any]] = tuple,
        on_admitted: Callable[[Any], None] = lambda request: None,
        on_error: Callable[[str, Exception], None] | None = None,
    ) -> None:
        self._order = order
        self._clock = clock
        self._running = running
        self._on_admitted = on_admitted
        self._on_error = on_error
        self._has_failed = False
        self._holds = type(order.policy).may_admit is not Policy.may_admit
        self._popped: Any = None
        self._requests: dict[str, Any] = {}

    def fail(self) -> None:
        """Serves the requests first in, first out from now on."""
        self._has_failed = True

    def _try(self, hook: Callable[[], Any]) -> Any:
        """Result of a hook; None if it has failed, or once one has."""
        if self._has_failed:
            return None
        try:
            return hook()
        except Exception as error:
            self.fail()
            if self._on_error is None:
                raise
            self._on_error("queue", error)
            return None

    def add_request(self, request: Any) -> None:
        """Inserts a request in key order; O(log n)."""
        self._requests[request.request_id] = request
        self._try(lambda: self._order.enqueue(request.request_id, self._clock()))

    def peek_request(self) -> Any:
        """The first request; IndexError if there is none."""
        state = self._try(self._order.waiting.peek)
        if state is not None:
            return self._requests[state.request_id]
        if self._has_failed and self._requests:
            return next(iter(self._requests.values()))
        raise IndexError("the queue is empty")

    def pop_request(self) -> Any:
        """Removes and returns the first request; IndexError if there is none."""
        request = self.peek_request()
        self.remove_request(request)
        self._popped = request
        return request

    def prepend_request(self, request: Any) -> None:
        """Inserts a request in key order."""
        self.add_request(request)
        if self._has_failed:
            self._requests = {request.request_id: request} | self._requests

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        """Inserts requests in key order."""
        for request in requests:
            self.prepend_request(request)

    def remove_request(self, request: Any) -> None:
        """Removes a request, O(log n); ValueError if it is not in the queue."""
        if self._requests.pop(request.request_id, None) is None:
            raise ValueError(f"request {request.request_id} is not in the queue")
        self._try(lambda: self._order.dequeue(request.request_id))

    def remove_requests(self, requests: Iterable[Any]) -> None:
        """Removes the requests that are in the queue; ignores others."""
        for request in requests:
            if request.request_id in self._requests:
                self.remove_request(request)

    def __bool__(self) -> bool:
        running = self._running() if self._holds and self._requests else ()
        if not running or self._has_failed:
            return bool(self._requests)
        if running[-1] is self._popped:
            self._try(lambda: self._on_admitted(self._popped))
        self._popped = None
        return bool(self._try(self._may_admit)) or self._has_failed

    def _may_admit(self) -> bool:
        head = self._order.waiting.peek()
        return head is not None and self._order.policy.may_admit(head, self._clock())

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: object) -> bool:
        return any(item is request for item in self._requests.values())

    def __iter__(self) -> Iterator[Any]:
        """The requests in order, as a copy: the queue may change during iteration."""
        states = self._try(lambda: list(self._order.waiting.ascending()))
        if states is None:
            return iter(list(self._requests.values()))
        return iter([self._requests[state.request_id] for state in states])


class PlannedQueue(PolicyQueue):
    """The waiting queue while a batch former plans each step: vLLM sees the requests that the plan admits.

    Requests that cannot be scheduled yet (`is_blocked`, such as those whose grammar is being compiled) are not in the order.
    """

    def __init__(
        self,
        order: LiveOrder,
        clock: Callable[[], float],
        is_blocked: Callable[[Any], bool],
        on_error: Callable[[str, Exception], None] | None = None,
    ) -> None:
        super().__init__(order, clock, on_error=on_error)
        self._is_blocked = is_blocked
        self._blocked: dict[str, Any] = {}
        self._planned: deque[str] = deque()

    def plan(self, request_ids: Iterable[str]) -> None:
        """Sets the requests that vLLM sees, in their order; ignores those that are not in the queue."""
        self._planned = deque([name for name in request_ids if name in self._requests])

    def holds(self, request_id: str) -> bool:
        """Whether a request is in the queue."""
        return request_id in self._requests

    def release(self, is_ready: Callable[[Any], bool]) -> None:
        """Adds the blocked requests that are ready to the order."""
        for request in list(self._blocked.values()):
            if is_ready(request):
                del self._blocked[request.request_id]
                self.add_request(request)

    def add_request(self, request: Any) -> None:
        """See `PolicyQueue`."""
        if self._has_failed or not self._is_blocked(request):
            super().add_request(request)
        else:
            self._requests[request.request_id] = self._blocked[request.request_id] = request

    def peek_request(self) -> Any:
        """See `PolicyQueue`."""
        if self._has_failed:
            return super().peek_request()
        return self._requests[self._planned[0]]

    def remove_request(self, request: Any) -> None:
        """See `PolicyQueue`."""
        super().remove_request(request)
        self._blocked.pop(request.request_id, None)
        if request.request_id in self._planned:
            self._planned.remove(request.request_id)

    def __bool__(self) -> bool:
        return bool(self._requests) if self._has_failed else bool(self._planned)

    def __iter__(self) -> Iterator[Any]:
        """The requests, first in, first out, as a copy."""
        return iter(list(self._requests.values()))
