"""Gittins policy on predicted output lengths: for the mean response time, and its form for the tail."""

import math
from dataclasses import dataclass, field

import numpy as np

from scheduler_core.lengths.standard import FloatArray
from scheduler_core.lengths.table import LengthTable
from scheduler_core.policies.work_left import EventOrder, work_left_s
from scheduler_core.ranges import FINITE, POSITIVE, check_ranges
from scheduler_core.request import RequestState, Status

#: Keys are recomputed when a measured time per token has changed by this fraction.
_REFRESH = 0.1
#: Limit of gamma times the remaining seconds, before exp overflows.
_MAX_EXPONENT = 600.0


def remaining_tokens(
    length: LengthTable | None, max_tokens: int, generated: float
) -> tuple[FloatArray, FloatArray]:
    """Distribution of the tokens that remain after `generated` tokens, of X~ - g given X~ > g: points [K] from 0 on, and the
    probabilities [K] of more tokens, linear between points (two equal points: a jump).

    `length` None, or refuted by the tokens generated: the output has `max_tokens`.
    """
    if length is not None and generated < length.max_tokens:
        later = int(np.searchsorted(length.points, generated, side="right"))
        (left, right), (before, after) = (
            length.points[later - 1 : later + 1],
            length.survival[later - 1 : later + 1],
        )
        alive = before + (after - before) * (generated - left) / (right - left)
        if alive > 0.0:
            tokens = np.concatenate([[0.0], length.points[later:] - generated])
            return tokens, np.concatenate([[1.0], length.survival[later:] / alive])
    left = max(max_tokens - generated, 0.0)
    return np.array([0.0, left, left]), np.array([1.0, 1.0, 0.0])


def gittins_rank(tokens: FloatArray, survival: FloatArray, setup_s: float, token_s: float) -> float:
    """r = inf over b > 0 of E[min(W, w_b)] / P(W <= w_b), W = setup_s + token_s Y, w_b = setup_s + token_s b.

    The reciprocal of the Gittins index: the least expected work in seconds for each request that ends, over all plans to
    work until b more tokens at most, b >= 1. Y has the distribution of `remaining_tokens`; between points its hazard rises,
    so that the best b is one of them.
    """
    spent = setup_s + token_s * np.cumsum(np.diff(tokens) * (survival[1:] + survival[:-1]) * 0.5)
    ended = 1.0 - survival[1:]
    is_plan = (ended > 0.0) & (tokens[1:] >= 1.0)
    return float(np.min(np.divide(spent, ended, out=np.full_like(spent, math.inf), where=is_plan)))


def gittins_boost(
    tokens: FloatArray, survival: FloatArray, setup_s: float, token_s: float, gamma_per_s: float
) -> float:
    """b = (1/gamma) ln sup over b > 0 of E[exp(gamma W); W <= w_b] / (E[exp(gamma min(W, w_b))] - 1) in seconds, with W and
    w_b as in `gittins_rank`.

    For known work it is the boost of Yu & Scully 2024, (1/gamma) ln(1/(1 - exp(-gamma W))).
    """
    ends = np.expm1(np.minimum(gamma_per_s * (setup_s + token_s * tokens), _MAX_EXPONENT))
    middle = setup_s + token_s * 0.5 * (tokens[1:] + tokens[:-1])
    within = np.expm1(np.minimum(gamma_per_s * middle, _MAX_EXPONENT))
    mass = survival[:-1] - survival[1:]
    cost = np.cumsum(mass * within) + survival[1:] * ends[1:]
    reward = np.cumsum(mass * (within + 1.0))
    is_plan = (cost > 0.0) & (tokens[1:] >= 1.0)
    ratio = float(np.max(np.divide(reward, cost, out=np.zeros_like(cost), where=is_plan)))
    return math.log(max(ratio, 1.0)) / gamma_per_s


@dataclass(kw_only=True, slots=True)
class Gittins(EventOrder):
    """Least expected work for each request that ends, given what it has generated (Gittins 1979, "Bandit processes and dynamic
    allocation indices", J. R. Stat. Soc. B 41, 148-177; as a queue, Aalto, Ayesta & Righter 2009, "On the Gittins
    index in the M/G/1 queue", Queueing Systems 63, 437-458).

    key = r(g) = inf over b of E[P + d min(Y, b)] / P(Y <= b),   Y = X~ - g given X~ > g
    j displaces i if r_j + c_i < r_i

    | symbol | meaning | unit |
    | --- | --- | --- |
    | X~ = min(X, M) | predicted output length; M, max_tokens, also the length without a prediction | tokens |
    | g | tokens generated, rounded down to a multiple of `update_tokens` | tokens |
    | P, d | engine time of its tokens without a KV cache, and of an output token, as measured | s |
    | c_i | engine time to compute the tokens of i again | s |

    With known lengths it is SRPT, for a constant hazard any order, and r is at most the expected remaining work. In the M/G/1
    queue none that knows the distributions and not the lengths has a smaller mean response time. Long requests may starve.

    Differs from the theory: an engine serves many requests at once, and a displaced one computes its prefix again, which
    c_i makes it pay before it is displaced; keys are recomputed after events, and when a time per token has changed by a
    tenth.
    """

    preemptive = True
    running_keys = "on_tokens"
    progress = "in_runs"
    inputs = frozenset({"cached", "costs", "length"})

    update_tokens: float = 16
    _tables: dict[str, LengthTable] = field(default_factory=dict, init=False, repr=False)
    #: By request: (generated tokens, P, d) and the index for them.
    _indices: dict[str, tuple[tuple[float, float, float], float]] = field(
        default_factory=dict, init=False, repr=False
    )

    def __post_init__(self) -> None:
        check_ranges(self, update_tokens=(1, FINITE))

    def on_prediction(self, state: RequestState) -> None:
        EventOrder.on_prediction(self, state)
        if state.prediction is not None:
            self._tables[state.request_id] = state.prediction.table(state.request.max_tokens)
            self._indices.pop(state.request_id, None)

    def on_finish(self, state: RequestState) -> None:
        EventOrder.on_finish(self, state)
        self._tables.pop(state.request_id, None)
        self._indices.pop(state.request_id, None)

    def on_pressure(self, num_waiting: int, max_num_seqs: int) -> bool:
        before = self._times
        is_due = EventOrder.on_pressure(self, num_waiting, max_num_seqs)
        if all(abs(new - old) <= _REFRESH * old for new, old in zip(self._times, before, strict=True)):
            self._times = before
        return is_due

    def index(self, state: RequestState) -> float:
        """r(g) in seconds."""
        setup_s = 0.0
        if state.status is Status.WAITING:
            setup_s = work_left_s(state, self._times)
        elif state.num_computed_tokens < state.prefill_target_tokens:
            setup_s = self._times.prefill_s * (state.prefill_target_tokens - state.num_computed_tokens)
        generated = state.num_output_tokens - state.num_output_tokens % self.update_tokens
        work = (generated, setup_s, self._times.decode_s)
        cached = self._indices.get(state.request_id)
        if cached is None or cached[0] != work:
            length = self._tables.get(state.request_id)
            remaining = remaining_tokens(length, state.request.max_tokens, generated)
            cached = self._indices[state.request_id] = (work, self._index(*remaining, *work[1:]))
        return cached[1]

    def _index(self, tokens: FloatArray, survival: FloatArray, setup_s: float, token_s: float) -> float:
        return gittins_rank(tokens, survival, setup_s, token_s)

    def key(self, state: RequestState, now: float) -> float:
        return self.index(state)

    def may_preempt(self, running: RequestState, waiting: RequestState, now: float) -> bool:
        again_s = self._times.prefill_s * running.num_computed_tokens
        return self.key(waiting, now) + again_s < self.key(running, now)


@dataclass(kw_only=True, slots=True)
class BoostGittins(Gittins):
    """Gittins index for the tail: earliest boosted arrival, with boosts from the distribution of the remaining work (Harlev, Yu &
    Scully 2025, "A Gittins policy for optimizing tail latency", Proc. ACM Meas. Anal. Comput. Syst. 9(2)).

    key = a - b(g),   b(g) = (1/gamma) ln sup over b of E[exp(gamma W); Y <= b] / (E[exp(gamma min(W, P + d b))] - 1)
    W = P + d Y

    | symbol | meaning | unit |
    | --- | --- | --- |
    | a | arrival | s |
    | Y, g, P, d | as for `gittins` | tokens, s |
    | gamma | gamma_per_s, the decay rate of P(latency > t); ln 5/(t99 - t95) of latencies under FCFS | 1/s |

    With known lengths it is UniBoost's boost of the whole work; large gamma: FCFS, small gamma: `gittins`. Among the policies that
    know distributions and not lengths it is asymptotically best for P(latency > t) in the light-tailed M/G/1 queue. No
    starvation: boosts of waiting requests are finite.

    Differs from the paper: as for `gittins`; gamma is given instead of solved for.
    """

    gamma_per_s: float = 0.1

    def __post_init__(self) -> None:
        check_ranges(self, update_tokens=(1, FINITE), gamma_per_s=(POSITIVE, FINITE))

    def _index(self, tokens: FloatArray, survival: FloatArray, setup_s: float, token_s: float) -> float:
        return gittins_boost(tokens, survival, setup_s, token_s, self.gamma_per_s)

    def key(self, state: RequestState, now: float) -> float:
        return state.request.arrival_s - self.index(state)
