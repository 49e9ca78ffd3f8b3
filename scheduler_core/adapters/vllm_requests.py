"""Requests of vLLM as policies see them, and its waiting queue in the policy's order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from scheduler_core.adapters.live_order import LiveOrder
from scheduler_core.errors import InputError
from scheduler_core.request import Request

#: Hints of a client about its request (OpenAI API: `vllm_xargs`) -> field of `Request`.
HINTS = {
    "tailcast_tier": "tier",
    "tailcast_tenant": "tenant",
    "tailcast_ttft_slo_s": "ttft_slo_s",
    "tailcast_tbt_slo_s": "tbt_slo_s",
    "tailcast_ttlt_slo_s": "ttlt_slo_s",
}


def request_of(request: Any, now: float) -> tuple[Request, list[str]]:
    """A `vllm.v1.request.Request` as a `Request` that arrives now, and the names of its hints of a wrong value.

    Those are left out: a client's mistake must not stop an engine.
    """
    values: dict[str, Any] = {
        "request_id": request.request_id,
        "arrival_s": now,
        "prompt_tokens": max(int(request.num_prompt_tokens), 1),
        "max_tokens": max(int(request.max_tokens), 1),
        "priority": int(request.priority),
    }
    bad_hints = []
    hints = getattr(request.sampling_params, "extra_args", None) or {}
    for hint, name in HINTS.items():
        if hint not in hints:
            continue
        value = hints[hint]
        try:
            if isinstance(value, bool) or isinstance(value, str) is not (name == "tenant"):
                raise TypeError(hint)
            Request(**values, **{name: value})
            values[name] = value
        except (InputError, TypeError):
            bad_hints.append(hint)
    return Request(**values), bad_hints


class PolicyQueue:
    """vLLM's `RequestQueue` (v1/core/sched/request_queue.py), ordered by a `LiveOrder`.

    vLLM returns preempted requests, and those it skipped in a step, by "prepending" them: here they go where their key
    puts them, as every other request. A request keeps its state, and with it its prediction, while it is not in the queue.
    """

    def __init__(self, order: LiveOrder, clock: Callable[[], float]) -> None:
        self._order = order
        self._clock = clock
        self._requests: dict[str, Any] = {}

    def add_request(self, request: Any) -> None:
        """Puts a request where its key puts it; O(log n)."""
        self._requests[request.request_id] = request
        self._order.enqueue(request.request_id, self._clock())

    def peek_request(self) -> Any:
        """The first request; IndexError if there is none."""
        state = self._order.waiting.peek()
        if state is None:
            raise IndexError("the queue is empty")
        return self._requests[state.request_id]

    def pop_request(self) -> Any:
        """Takes the first request out; IndexError if there is none."""
        request = self.peek_request()
        self.remove_request(request)
        return request

    prepend_request = add_request

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        """Puts requests where their keys put them."""
        for request in requests:
            self.add_request(request)

    def remove_request(self, request: Any) -> None:
        """Takes a request out, O(log n); ValueError if it is not here."""
        if self._requests.pop(request.request_id, None) is None:
            raise ValueError(f"request {request.request_id} is not in the queue")
        self._order.dequeue(request.request_id)

    def remove_requests(self, requests: Iterable[Any]) -> None:
        """Takes those out that are here."""
        for request in requests:
            if request.request_id in self._requests:
                self.remove_request(request)

    def __bool__(self) -> bool:
        return bool(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: object) -> bool:
        return any(item is request for item in self._requests.values())

    def __iter__(self) -> Iterator[Any]:
        """The requests in order, as of the call; the queue may change meanwhile."""
        return iter([self._requests[state.request_id] for state in self._order.waiting.ascending()])
