"""Llumlet: the local queue of multi-tier Llumnix (Vestrum et al., "Beyond Binary Priorities: Multi-Tier SLA Scheduling",
sections 3.1 and 6.5)."""

import heapq
import math
from collections.abc import Collection
from dataclasses import dataclass, field

from scheduler_core.policies.base import Policy
from scheduler_core.ranges import POSITIVE, check_ranges
from scheduler_core.request import RequestState, Status


@dataclass(kw_only=True, slots=True)
class Llumlet(Policy):
    """The most urgent tier first, in order of arrival within a tier; a waiting request moves up a tier at every quota.

    key = max(0, p - floor((t - a) / quota_s))

    | symbol | meaning | unit |
    | --- | --- | --- |
    | p | tier, see `RequestState.effective_level`; 0 = most urgent | - |
    | t - a | time since the arrival, as of the latest step before which the request waited | s |
    | quota_s | time quota of a tier; infinite: a tier is fixed at the arrival, as in the paper's experiments | s |

    No starvation with a finite quota: when p quota_s have passed since the arrival of a waiting request, only requests that
    arrived before it are admitted before it. With an infinite one, lower tiers starve while higher ones saturate the engine.

    Differs from the paper, which leaves the promotion to future work ("promote requests that have waited longer than a
    tier-specific time quota", as in an MLFQ): all tiers have the same quota, so that tier p is in tier 0 after p of them.
    A promotion changes the order of the local queue and of evictions; headroom and migration use the declared tier. An engine
    that gets each key only once does not promote.
    """

    key_changes = "on_event"
    evicts_by_key = True
    running_keys = "on_event"
    progress = "unused"
    inputs = frozenset({"urgency", "tier"})

    quota_s: float = math.inf
    #: Number of quotas that a live request has waited.
    _promotions: dict[str, int] = field(default_factory=dict, init=False, repr=False)
    _due: list[tuple[float, int, RequestState]] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        check_ranges(self, quota_s=(POSITIVE, math.inf))

    @property
    def reorders_next(self) -> bool:
        return bool(self._due)

    def on_arrival(self, state: RequestState, now: float) -> None:
        self._promotions[state.request_id] = 0
        self._watch(state)

    def on_preempt(self, state: RequestState, now: float) -> None:
        self._watch(state)

    def on_finish(self, state: RequestState) -> None:
        self._promotions.pop(state.request_id, None)

    def take_changed(self, now: float) -> Collection[RequestState]:
        promoted = {}
        while self._due and self._due[0][0] <= now:
            due_s, _, state = heapq.heappop(self._due)
            # An entry is stale if the request has left, runs, or was promoted because of another entry.
            waits = state.status is Status.WAITING and state.request_id in self._promotions
            if waits and due_s == self._due_s(state):
                self._promotions[state.request_id] += 1
                promoted[state.request_id] = state
                self._watch(state)
        return promoted.values()

    def key(self, state: RequestState, now: float) -> float:
        return float(max(0, state.effective_level() - self._promotions.get(state.request_id, 0)))

    def _due_s(self, state: RequestState) -> float:
        return state.request.arrival_s + (self._promotions[state.request_id] + 1) * self.quota_s

    def _watch(self, state: RequestState) -> None:
        """Schedules the next promotion of a waiting request, if there is one."""
        if self.quota_s < math.inf and self.key(state, 0.0) > 0:
            heapq.heappush(self._due, (self._due_s(state), state.order, state))
