"""TIE (tail inflated expectation): shortest first by mean plus adaptive tail risk (section 4, Eqs. 9-12)."""

import math
import sys
from dataclasses import dataclass, field

from scheduler_core.policies.work_left import WorkLeft
from scheduler_core.ranges import FINITE, POSITIVE, check_ranges
from scheduler_core.request import RequestState

#: Minimum score, so that the logarithm exists if a predicted length underflows to 0 tokens.
_SMALLEST = sys.float_info.min


@dataclass(kw_only=True, slots=True)
class Tie(WorkLeft):
    """Shortest expected length first, with a penalty for heavy tails that grows with the queue.

    score = E[min(X, M)] + beta * CVaR_alpha(min(X, M)),   beta = clip(0.1 * Lq / B, beta_min, beta_max)
    score decays with waiting as score * gamma^(wait / tau). With `work_left` it is that of the engine time of prompt and
    output, W = prefill + decode(min(X, M)), instead of min(X, M).
    key = ln score + arrival * ln(1/gamma) / tau

    | symbol | meaning | unit |
    | --- | --- | --- |
    | X | predicted output length, log-t | tokens |
    | M | max_tokens of the request | tokens |
    | alpha | CVaR level, 0.9 | - |
    | Lq, B | waiting requests, max_num_seqs | requests |
    | pressure_gain | the 0.1 of beta's formula | - |
    | gamma, tau_s | decay 0.9 per 30 s of waiting | -, s |

    The key does not depend on time: ln(score * gamma^((now - arrival)/tau)) = ln score - (now - arrival) * ln(1/gamma)/tau,
    and the term in `now` is the same for all requests. A heap is therefore exact.

    Differs from the paper: (1) E and CVaR are integrated exactly instead of estimated from 10,000 random draws, both with
    M = max_tokens of the request; (2) there is no periodic re-heapify, see above; (3) beta is rounded to a grid of
    `beta_step`, and a change applies to all waiting requests (the released code fixes beta per request); (4) without a
    prediction the score is its maximum, (1 + beta_max) * M (released code: the constants 2048 and 100); (5) a preempted
    request keeps its prediction.
    """

    inputs = frozenset({"length"})

    alpha: float = 0.9
    beta_min: float = 0.1
    beta_max: float = 0.5
    beta_step: float = 0.05
    pressure_gain: float = 0.1
    gamma: float = 0.9
    tau_s: float = 30.0
    _beta: float = field(default=0.0, init=False, repr=False)
    _aging_per_s: float = field(default=0.0, init=False, repr=False)

    def __post_init__(self) -> None:
        check_ranges(self, alpha=(0.5, 1 - 1e-9), gamma=(POSITIVE, 1.0), pressure_gain=(0, FINITE))
        check_ranges(self, beta_min=(0, self.beta_max), beta_max=(0, FINITE))
        check_ranges(self, beta_step=(POSITIVE, FINITE), tau_s=(POSITIVE, FINITE))
        self._beta = self.beta_min
        self._aging_per_s = -math.log(self.gamma) / self.tau_s

    def beta(self, num_waiting: int, max_num_seqs: int) -> float:
        """beta = clip(pressure_gain * Lq / B, beta_min, beta_max), on the grid (Eq. 12)."""
        exact = self.pressure_gain * num_waiting / max_num_seqs
        exact = min(max(exact, self.beta_min), self.beta_max)
        steps = round((exact - self.beta_min) / self.beta_step)
        return min(self.beta_min + steps * self.beta_step, self.beta_max)

    def on_pressure(self, num_waiting: int, max_num_seqs: int) -> bool:
        before, self._beta = self._beta, self.beta(num_waiting, max_num_seqs)
        is_due = WorkLeft.on_pressure(self, num_waiting, max_num_seqs)
        return is_due or self._beta != before

    def score(self, state: RequestState) -> float:
        """Tail inflated expectation of the output length (Eq. 11), in tokens; with `work_left` of the work, in seconds."""
        risk = state.expected_and_cvar(self.alpha)
        if risk is None:
            return (1.0 + self.beta_max) * self.work(state, state.request.max_tokens)
        mean, tail_mean = risk
        return self.work(state, mean) + self._beta * self.work(state, tail_mean)

    def key(self, state: RequestState, now: float) -> float:
        return math.log(max(self.score(state), _SMALLEST)) + state.request.arrival_s * self._aging_per_s
