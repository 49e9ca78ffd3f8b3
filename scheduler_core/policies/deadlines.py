"""Orders by deadlines: EDF, and TIE with targets."""

import heapq
import math
from collections.abc import Collection
from dataclasses import dataclass, field

from scheduler_core.policies.base import Policy
from scheduler_core.policies.estimates import risk_tokens
from scheduler_core.ranges import FINITE, POSITIVE, check_ranges
from scheduler_core.request import MAX_TIERS, RequestState, Status

#: Between two levels of the urgent class, and in front of every key of the other class, however many levels there are.
_LEVEL = 1e8
_URGENT = -2.0 * MAX_TIERS * _LEVEL


@dataclass(kw_only=True, slots=True)
class Edf(Policy):
    """Earliest deadline first (Liu & Layland 1973, "Scheduling algorithms for multiprogramming in a hard-real-time
    environment", J. ACM 20, 46-61; for latency targets of requests: llm-d).

    key = a + D

    | symbol | meaning | unit |
    | --- | --- | --- |
    | a | arrival | s |
    | D | target for the first token until it is there, then for the last one; the other if there is but one | s |
    | default_slo_s | D of a request without targets | s |

    No starvation: a deadline is a fixed time, and only requests that arrive less than the largest D later can pass.

    Differs from the paper: two deadlines follow each other in one request.
    """

    key_changes = "on_event"
    running_keys = "on_event"
    progress = "in_runs"
    inputs = frozenset({"slo"})

    default_slo_s: float = 60.0
    _changed: list[RequestState] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        check_ranges(self, default_slo_s=(POSITIVE, FINITE))

    def key(self, state: RequestState, now: float) -> float:
        request = state.request
        first, last = request.ttft_slo_s, request.ttlt_slo_s
        target = first if state.first_token_s is None else last
        if target is None:
            target = last if state.first_token_s is None else first
        return request.arrival_s + (self.default_slo_s if target is None else target)

    def on_tokens(self, state: RequestState, num_tokens: int, now: float) -> None:
        if state.first_token_s == now:
            self._changed.append(state)

    def take_changed(self, now: float) -> Collection[RequestState]:
        changed, self._changed = self._changed, []
        return changed


@dataclass(kw_only=True, slots=True)
class SloTie(Policy):
    """TIE, until a request's slack is used up; from then on it goes first, by urgency. Ours; the score is that of TIE
    (section 4, Eqs. 9-12).

    latest start  L = a + D - E[X~] t;   urgent from L - m until the target is missed by m as well
    key = ln(E + beta CVaR) + a ln(1/gamma)/tau;   urgent: level, then that, in front of all others

    | symbol | meaning | unit |
    | --- | --- | --- |
    | a, D | arrival; target for the last token, else for the first one (then E[X~] t is 0), else none: never urgent | s |
    | X~ = min(X, M) | predicted output length, log-t; max_tokens, also the length without a prediction | tokens |
    | t, m | token_s, time of an output token; margin_s | s |
    | level | declared tier, raised by at most one level where the text is predicted to be urgent (`RequestState.effective_level`) | - |
    | E, CVaR, beta, gamma, tau | as in TIE, with alpha = 0.9 and a fixed beta | tokens, -, -, s |

    Slack is spent on the mean, and only what is about to be late overtakes. A request that cannot make its target any more
    goes on by TIE's order: it would take time from those that can.

    Starvation: TIE's decay prevents it among those that are not urgent, as long as the urgent ones alone do not fill the
    engine; if they do, the others wait.
    """

    key_changes = "on_event"
    running_keys = "on_event"
    inputs = frozenset({"length", "urgency", "tier", "slo"})

    token_s: float = 0.02
    margin_s: float = 2.0
    beta: float = 0.3
    gamma: float = 0.9
    tau_s: float = 30.0
    _urgent: set[str] = field(default_factory=set, init=False, repr=False)
    _due: list[tuple[float, int, bool, RequestState]] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        positive = (POSITIVE, FINITE)
        check_ranges(self, token_s=positive, tau_s=positive, margin_s=positive)
        check_ranges(self, beta=(0, FINITE), gamma=(POSITIVE, 1.0))

    def on_arrival(self, state: RequestState, now: float) -> None:
        self._watch(state)

    def on_prediction(self, state: RequestState) -> None:
        self._watch(state)

    def take_changed(self, now: float) -> Collection[RequestState]:
        changed = []
        while self._due and self._due[0][0] <= now:
            due_s, _, begins, state = heapq.heappop(self._due)
            if state.status is Status.GONE or due_s != self._due_s(state, begins=begins):
                continue  # Where a prediction has moved it the other entry counts.
            if begins:
                self._urgent.add(state.request_id)
            else:
                self._urgent.discard(state.request_id)
            changed.append(state)
        return changed

    def on_finish(self, state: RequestState) -> None:
        self._urgent.discard(state.request_id)

    def key(self, state: RequestState, now: float) -> float:
        mean, tail = risk_tokens(state)
        score = mean + self.beta * tail
        aging_per_s = -math.log(self.gamma) / self.tau_s
        tie = math.log(max(score, 1e-300)) + state.request.arrival_s * aging_per_s
        if state.request_id not in self._urgent:
            return tie
        return _URGENT + state.effective_level() * _LEVEL + min(max(tie, -0.4 * _LEVEL), 0.4 * _LEVEL)

    def _due_s(self, state: RequestState, *, begins: bool) -> float:
        """When the request becomes urgent, L - m, and when no more, L + m; infinite without a target."""
        request, margin_s = state.request, -self.margin_s if begins else self.margin_s
        if request.ttlt_slo_s is not None:
            return request.arrival_s + request.ttlt_slo_s - risk_tokens(state)[0] * self.token_s + margin_s
        return math.inf if request.ttft_slo_s is None else request.arrival_s + request.ttft_slo_s + margin_s

    def _watch(self, state: RequestState) -> None:
        self._urgent.discard(state.request_id)
        for begins in (True, False):
            due_s = self._due_s(state, begins=begins)
            if due_s < math.inf:
                heapq.heappush(self._due, (due_s, 2 * state.order + (not begins), begins, state))
