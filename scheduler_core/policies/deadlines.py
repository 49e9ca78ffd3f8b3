"""Policies with deadlines: EDF, and TIE with latency targets."""

import heapq
import math
from collections.abc import Collection
from dataclasses import dataclass, field

from scheduler_core.policies.base import Policy
from scheduler_core.policies.estimates import risk_tokens
from scheduler_core.ranges import FINITE, POSITIVE, check_ranges
from scheduler_core.request import MAX_TIERS, RequestState, Status

#: Distance between two levels of the urgent class, and an offset that puts this class before all other keys.
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
    | D | target of the first token until it is generated, then of the last one; the other one if only one is set | s |
    | default_slo_s | D of a request without targets | s |

    No starvation: deadlines are fixed, and only requests that arrive less than the largest D later can overtake.

    Differs from the paper: a request has two consecutive deadlines.
    """

    key_changes = "on_event"
    evicts_by_key = True
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
    """TIE until the slack of a request is used up; then the request is urgent and comes first, by level.
    tailcast's own policy with the score of TIE (section 4, Eqs. 9-12).

    latest start  L = a + D - E[X~] t;   urgent from L - m until L + m
    key = ln(E + beta CVaR) + a ln(1/gamma)/tau;   urgent requests first, by level, then by key

    | symbol | meaning | unit |
    | --- | --- | --- |
    | a, D | arrival; target of the last token, else of the first one (without E[X~] t), else none: never urgent | s |
    | X~ = min(X, M) | predicted output length, log-t; max_tokens, also the length without a prediction | tokens |
    | t, m | token_s, time of an output token; margin_s | s |
    | level | declared tier, raised by at most one level by predicted urgency (`RequestState.effective_level`) | - |
    | E, CVaR, beta, gamma, tau | as in TIE, with alpha = 0.9 and a fixed beta | tokens, -, -, s |

    Until their slack is used up, requests are ordered for a low mean latency. A request that can no longer
    meet its target returns to TIE's order, because it would take time from requests that still can.

    Starvation: TIE's decay prevents it for requests that are not urgent, unless the urgent ones saturate the engine.
    """

    key_changes = "on_event"
    evicts_by_key = True
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
                continue  # outdated: a prediction has moved the time
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
        """Start (L - m) or end (L + m) of the urgent time; infinite without a target."""
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
