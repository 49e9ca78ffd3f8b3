"""Expected lengths, boosts of the arrival order, and the rates that policies estimate while the engine works."""

import math
from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from scheduler_core.predictions import LengthPrediction
from scheduler_core.ranges import INTEGERS, POSITIVE, check_ranges
from scheduler_core.request import RequestState

#: ln 5, and least t99 - t95 in seconds, against a tail that has collapsed.
_LOG_RATIO, _MIN_GAP_S = math.log(5.0), 1e-3


@lru_cache(maxsize=65_536)
def _risk(length: LengthPrediction, max_tokens: int) -> tuple[float, float]:
    return length.expected_and_cvar(max_tokens)


def risk_tokens(state: RequestState) -> tuple[float, float]:
    """(E[X~], CVaR_0.9(X~)) of X~ = min(X, max_tokens) in tokens; max_tokens where no length is predicted."""
    longest = state.request.max_tokens
    return (longest, longest) if state.prediction is None else _risk(state.prediction, longest)


def median_tokens(state: RequestState) -> float:
    """min(exp(mu), max_tokens) in tokens; max_tokens where no length is predicted."""
    longest = state.request.max_tokens
    if state.prediction is None or state.prediction.mu >= math.log(longest):
        return longest
    return math.exp(state.prediction.mu)


def boost_s(work_s: float, gamma_per_s: float) -> float:
    """By how many seconds a request of known work is moved ahead of its arrival; falls from infinity (w = 0) to 0.

    b(w) = (1/gamma) ln( 1 / (1 - exp(-gamma w)) )

    Least arrival - boost first makes P(response > t) fall fastest in the light-tailed M/G/1 queue (Yu & Scully 2024,
    "Strongly tail-optimal scheduling in the light-tailed M/G/1", Proc. ACM Meas. Anal. Comput. Syst. 8(2)).

    w is the engine time that the request needs, gamma > 0 the rate at which P(response > t) falls.
    """
    return -math.log(-math.expm1(-gamma_per_s * work_s)) / gamma_per_s


@dataclass(slots=True)
class TailRate:
    """gamma-Ada: the rate at which the tail of the latency falls, from finished requests (UniBoost, Eq. 9).

    gamma_hat = ln(0.05/0.01)/(t99 - t95) = ln 5/(t99 - t95);   gamma <- (1 - beta) gamma + beta gamma_hat, within bounds

    gamma_per_s is at first the value before there is an estimate, smoothing beta; the `window` latest latencies count, and
    there are `update_every` new ones between two estimates.
    """

    gamma_per_s: float
    window: int
    update_every: int
    smoothing: float
    min_per_s: float
    max_per_s: float
    _latencies: deque[float] = field(init=False, repr=False)
    _num_new: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        check_ranges(self, min_per_s=(POSITIVE, self.max_per_s), smoothing=(POSITIVE, 1.0))
        check_ranges(self, gamma_per_s=(self.min_per_s, self.max_per_s), window=(self.update_every, INTEGERS))
        self._latencies = deque(maxlen=self.window)

    def finished(self, latency_s: float) -> bool:
        """A request has finished after `latency_s` seconds; True if gamma was estimated again."""
        self._latencies.append(latency_s)
        self._num_new += 1
        if self._num_new < self.update_every or len(self._latencies) < self.update_every:
            return False
        self._num_new = 0
        t95, t99 = np.quantile(np.fromiter(self._latencies, float), (0.95, 0.99))
        estimate = _LOG_RATIO / max(float(t99 - t95), _MIN_GAP_S)
        gamma = (1.0 - self.smoothing) * self.gamma_per_s + self.smoothing * estimate
        self.gamma_per_s = min(max(gamma, self.min_per_s), self.max_per_s)
        return True


#: Weight of old steps in `WorkRate` falls by this with each new one.
_STEP_FADE = 0.5 ** (1.0 / 1000.0)


class WorkRate:
    """Engine seconds per prompt token and per output token, measured while the engine works.

    A step's duration is divided equally among the tokens processed in it; sums fade with a half-life of 1,000 steps. So the
    work of all requests adds up to the time the engine was busy, which is what work means in an M/G/1 queue: of a step with
    32 decodes each token costs a 32nd. It needs the duration of every step. `step_s` is the mean duration of a step in
    seconds: what a running request waits for its next token.
    """

    def __init__(self, prefill_token_s: float = 5e-5, decode_token_s: float = 1e-3) -> None:
        self.prefill_token_s = prefill_token_s
        self.decode_token_s = decode_token_s
        self.step_s = decode_token_s
        self._prefill_s = self._prefill_tokens = self._decode_s = self._decode_tokens = 0.0
        self._num_steps = self._steps_s = 0.0
        self._step_prefill = self._step_decode = 0

    def on_tokens(self, state: RequestState, num_tokens: int) -> None:
        """Tokens of a request were processed in the step that is ending."""
        if state.num_computed_tokens <= state.prefill_target_tokens:
            self._step_prefill += num_tokens
        else:
            self._step_decode += num_tokens

    def on_step(self, step_s: float, more: int = 0) -> None:
        """The step took `step_s` seconds; the tokens so far are also those of so many equal steps `more`."""
        prefill, decode = self._step_prefill // (more + 1), self._step_decode // (more + 1)
        self._step_prefill -= prefill
        self._step_decode -= decode
        if prefill + decode == 0 or step_s <= 0:
            return
        token_s = step_s / (prefill + decode)
        fade = _STEP_FADE
        self._prefill_s = self._prefill_s * fade + token_s * prefill
        self._prefill_tokens = self._prefill_tokens * fade + prefill
        self._decode_s = self._decode_s * fade + token_s * decode
        self._decode_tokens = self._decode_tokens * fade + decode
        self._steps_s = self._steps_s * fade + step_s
        self._num_steps = self._num_steps * fade + 1.0
        self.step_s = self._steps_s / self._num_steps
        if self._prefill_tokens >= 1.0:
            self.prefill_token_s = self._prefill_s / self._prefill_tokens
        if self._decode_tokens >= 1.0:
            self.decode_token_s = self._decode_s / self._decode_tokens
