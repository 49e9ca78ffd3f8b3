"""The waiting requests in the policy's order."""

from __future__ import annotations

from collections.abc import Callable

from scheduler_core.lazy_heap import Entry, LazyHeap
from scheduler_core.policies.base import Policy
from scheduler_core.request import RequestState


class WaitingQueue(LazyHeap):
    """Min-heap over (group, key, arrival, order).

    Args:
        policy: Gives the keys.
        group: Requests of a smaller group go before those of a larger one, whatever their keys; None: all are of one.
    """

    __slots__ = ("_group", "policy")

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
