"""Policies by attained service, without predictions: LAS and skip-join MLFQ."""

import heapq
import math
from collections.abc import Collection
from dataclasses import dataclass, field

from scheduler_core.policies.base import Policy
from scheduler_core.ranges import FINITE, POSITIVE, check_ranges
from scheduler_core.request import Phase, RequestState, Status


@dataclass(kw_only=True, slots=True)
class Las(Policy):
    """Least attained service first (Kleinrock 1976, "Queueing Systems II", section 4.6; the baseline MLFQ+ of "Beyond
    Prediction: Tail-Aware Scheduling for LLM Inference", section 4).

    key = floor(w / q)

    | symbol | meaning | unit |
    | --- | --- | --- |
    | w | prompt tokens processed and output tokens generated so far | tokens |
    | q | quantum_tokens; 1 is LAS itself | tokens |

    Starves the longest requests when the load approaches 1, because new requests always come first.

    Differs from the paper: attained service is rounded down to multiples of a quantum. Otherwise two requests of equal
    service would displace each other at every token, each time with a recomputation or a swap. Work that was
    lost in a displacement does not count; otherwise a displaced request would be displaced repeatedly.
    """

    key_changes = "never"
    preemptive = True
    progress = "in_runs"

    quantum_tokens: float = 256

    def __post_init__(self) -> None:
        check_ranges(self, quantum_tokens=(1, FINITE))

    def key(self, state: RequestState, now: float) -> float:
        started = state.first_token_s is not None
        prompt = state.request.prompt_tokens if started else state.num_computed_tokens
        return float((prompt + state.num_output_tokens) // self.quantum_tokens)


@dataclass(kw_only=True, slots=True)
class Mlfq(Policy):
    """Skip-join MLFQ: feedback queues of increasing quantum; requests skip queues too short for their prompt (Wu et al.
    2023, "Fast Distributed Inference Serving for Large Language Models", FastServe, arXiv:2305.05920, section 4.1).

    q_i = q_1 f^i;   joins the first queue i with q_i >= n t;   key = i;   used up q_i: i + 1;   waited >= alpha: i = 0

    | symbol | meaning | unit |
    | --- | --- | --- |
    | q_1, f | base_quantum_s 0.01, factor 2 | s, - |
    | n, t | prompt tokens not in the prefix cache, prefill_token_s | tokens, s |
    | alpha | starvation_s, 3 | s |

    No starvation: a request that has waited alpha since its last step moves to the first queue, which is in arrival order.

    Differs from the paper: the time of the first iteration is linear in the prompt instead of profiled; service time is the
    duration of the steps of a request; promotion resets the used time; a prompt that takes several steps is
    one iteration, as in the paper, so no request is displaced during its prompt.
    """

    key_changes = "on_event"
    preemptive = True

    base_quantum_s: float = 0.01
    factor: float = 2.0
    starvation_s: float = 3.0
    prefill_token_s: float = 5.5e-5
    num_queues: float = 24
    _level: dict[str, int] = field(default_factory=dict, init=False, repr=False)
    _used_s: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    _served: list[RequestState] = field(default_factory=list, init=False, repr=False)
    _due: list[tuple[float, int, RequestState]] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        positive = (POSITIVE, FINITE)
        check_ranges(self, base_quantum_s=positive, starvation_s=positive, prefill_token_s=positive)
        check_ranges(self, factor=(math.nextafter(1.0, 2.0), FINITE), num_queues=(1, 64))

    def quantum_s(self, level: int) -> float:
        """q_i, in seconds; infinite for the last queue."""
        last = level >= self.num_queues - 1
        return float("inf") if last else self.base_quantum_s * self.factor**level

    def on_arrival(self, state: RequestState, now: float) -> None:
        request = state.request
        first_s = (request.prompt_tokens - state.cached_tokens) * self.prefill_token_s
        level = 0
        while self.quantum_s(level) < first_s:
            level += 1
        self._level[state.request_id] = level
        self._used_s[state.request_id] = 0.0
        heapq.heappush(self._due, (now + self.starvation_s, state.order, state))

    def on_tokens(self, state: RequestState, num_tokens: int, now: float) -> None:
        self._served.append(state)

    def on_step(self, now: float, step_s: float) -> None:
        for state in self._served:
            level = self._level.get(state.request_id)
            if level is None:
                continue
            used_s = self._used_s[state.request_id] + step_s
            if used_s >= self.quantum_s(level):
                self._level[state.request_id], used_s = level + 1, 0.0
            self._used_s[state.request_id] = used_s
        self._served.clear()

    def take_changed(self, now: float) -> Collection[RequestState]:
        promoted = []
        while self._due and self._due[0][0] <= now:
            _, order, state = heapq.heappop(self._due)
            if state.request_id not in self._level:
                continue
            served_s = state.request.arrival_s if state.last_scheduled_s is None else state.last_scheduled_s
            due_s = served_s + self.starvation_s
            if due_s <= now:
                due_s = now + self.starvation_s
                if state.status is Status.WAITING and self._level[state.request_id] > 0:
                    self._level[state.request_id], self._used_s[state.request_id] = 0, 0.0
                    promoted.append(state)
            heapq.heappush(self._due, (due_s, order, state))
        return promoted

    def on_finish(self, state: RequestState) -> None:
        self._level.pop(state.request_id, None)
        self._used_s.pop(state.request_id, None)

    def eviction_key(self, state: RequestState, now: float) -> float:
        return -math.inf if state.phase is Phase.PREFILL else self.key(state, now)

    def key(self, state: RequestState, now: float) -> float:
        return float(self._level.get(state.request_id, 0))
