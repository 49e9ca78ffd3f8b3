"""LTR: learning to rank, with starvation prevention (Fu et al. 2024, "Efficient LLM Scheduling by Learning to
Rank", NeurIPS 37, sections 4.2-4.3)."""

import heapq
from collections.abc import Collection
from dataclasses import dataclass, field

from scheduler_core.policies.base import Policy
from scheduler_core.ranges import FINITE, check_ranges
from scheduler_core.request import RequestState, Status

#: Keys after and before all scores.
_LAST, _PROMOTED = 1e300, -1e300


@dataclass(kw_only=True, slots=True)
class Ltr(Policy):
    """Requests in the order of a ranking model; starved requests are promoted for a quantum of steps.

    key = score;   after `starvation_steps` steps without service: before all others, for `quantum_steps` steps

    | symbol | meaning | unit |
    | --- | --- | --- |
    | score | output of the ranking model, smaller = shorter; its magnitude has no meaning | - |
    | starvation_steps | consecutive steps without service before promotion, 200 | steps |
    | quantum_steps | steps of service until demotion, which resets the counter, 10 | steps |

    No starvation: promoted requests are in arrival order, and each one finishes or uses up its quantum.

    Differs from the paper: without a rank the predicted ln length is the score, and without both the request is last;
    starved requests are determined with a heap of due times, not with a counter in every request.
    """

    key_changes = "on_event"
    preemptive = True
    inputs = frozenset({"rank", "length"})

    starvation_steps: float = 200
    quantum_steps: float = 10
    _step: int = field(default=0, init=False, repr=False)
    _served: dict[str, int] = field(default_factory=dict, init=False, repr=False)
    _quantum: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    _due: list[tuple[float, int, RequestState]] = field(default_factory=list, init=False, repr=False)
    _changed: list[RequestState] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        check_ranges(self, starvation_steps=(1, FINITE), quantum_steps=(1, FINITE))

    def on_arrival(self, state: RequestState, now: float) -> None:
        self._served[state.request_id] = self._step
        self._watch(state)

    def on_tokens(self, state: RequestState, num_tokens: int, now: float) -> None:
        self._served[state.request_id] = self._step + 1
        remaining = self._quantum.get(state.request_id)
        if remaining is not None:
            if remaining > 1:
                self._quantum[state.request_id] = remaining - 1
            else:
                del self._quantum[state.request_id]
                self._changed.append(state)

    def on_step(self, now: float, step_s: float) -> None:
        self._step += 1
        while self._due and self._due[0][0] <= self._step:
            state = heapq.heappop(self._due)[-1]
            served = self._served.get(state.request_id)
            if served is None:
                continue
            if state.status is Status.WAITING and served + self.starvation_steps <= self._step:
                self._quantum[state.request_id] = self.quantum_steps
                self._served[state.request_id] = self._step
                self._changed.append(state)
            self._watch(state)

    def _watch(self, state: RequestState) -> None:
        """Schedules the next starvation check of the request, at the earliest in the next step."""
        due = max(self._served[state.request_id] + self.starvation_steps, self._step + 1)
        heapq.heappush(self._due, (due, state.order, state))

    def take_changed(self, now: float) -> Collection[RequestState]:
        changed, self._changed = self._changed, []
        return changed

    def on_finish(self, state: RequestState) -> None:
        self._served.pop(state.request_id, None)
        self._quantum.pop(state.request_id, None)

    def key(self, state: RequestState, now: float) -> float:
        if state.request_id in self._quantum:
            return _PROMOTED
        if state.rank is not None:
            return state.rank.score
        return _LAST if state.prediction is None else state.prediction.mu
