"""Boosts from predicted lengths while the predictor is calibrated, else from prompts alone. Ours; the boosts are those of
Yu & Scully 2024 and of Harlev, Yu & Scully 2025, "A Gittins policy for optimizing tail latency", Proc. ACM Meas. Anal.
Comput. Syst. 9(2)."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from scheduler_core.errors import InputError
from scheduler_core.lengths.table import LengthTable
from scheduler_core.policies.base import Policy
from scheduler_core.policies.estimates import TailRate, WorkRate, boost_s
from scheduler_core.request import RequestState

_MAX_EXPONENT = 600.0


@dataclass(kw_only=True, slots=True)
class PredictedBoost(Policy):
    """Arrival order with boosts for short work; the work is predicted as long as the predictor is calibrated.

    key = a - b;   trusted: b = (1/gamma) ln(E[exp(gamma W)] / (E[exp(gamma W)] - 1)), W = s_pre + X~ t;   else: b(s_pre)

    | symbol | meaning | unit |
    | --- | --- | --- |
    | X~ = min(X, M) | predicted output length, log-t | tokens |
    | s_pre, t | engine time of the prompt, and of an output token, measured | s |
    | gamma | ln 5/(t99 - t95) of the latest latencies, smoothed (gamma-Ada) | 1/s |
    | max_gap | trusted while |coverage - level| <= 0.2 at all levels, again from 0.7 of that | - |

    Argument: boosts of known work are tail optimal in the light-tailed M/G/1 queue, and with work known in distribution the
    exchange argument gives the boost above (no displacement: W is run to its end). UniBoost forgoes predictions since they
    can be wrong. Finished requests show it: by how often lengths fell below the predicted quantiles. While that is right
    boosts use the lengths; else they use what is certain, the prompt.

    No starvation: boosts are finite and change with gamma and trust only.
    """

    key_changes = "on_event"
    inputs = frozenset({"length"})

    gamma_per_s: float = 0.02
    adapt_gamma: bool = True
    max_gap: float = 0.2
    window: float = 300
    refresh: float = 0.1
    _rate: WorkRate = field(default_factory=WorkRate, init=False, repr=False)
    _tail: TailRate = field(init=False, repr=False)
    _coverage: Coverage = field(init=False, repr=False)
    _used: tuple[float, float, float] = field(init=False, repr=False)
    _trusted: bool = field(default=True, init=False, repr=False)
    _moved: bool = field(default=False, init=False, repr=False)
    _tables: dict[str, LengthTable] = field(default_factory=dict, init=False, repr=False)
    _boosts: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    _last_step_s: float = field(default=-math.inf, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.max_gap <= 1:
            raise InputError("max_gap", self.max_gap, "numbers in (0, 1]")
        if not 0 < self.refresh < 1:
            raise InputError("refresh", self.refresh, "numbers in (0, 1)")
        self._tail = TailRate(self.gamma_per_s)
        self._coverage = Coverage(int(self.window), min(50, int(self.window)))
        self._used = (self.gamma_per_s, self._rate.prefill_token_s, self._rate.decode_token_s)

    @property
    def trusted(self) -> bool:
        """Whether boosts come from predictions now."""
        return self._trusted

    def on_prediction(self, state: RequestState) -> None:
        length = state.prediction
        if length is not None:
            self._tables[state.request_id] = LengthTable(
                length.mu, length.sigma, length.nu, state.request.max_tokens
            )
            self._boosts.pop(state.request_id, None)

    def on_tokens(self, state: RequestState, num_tokens: int, now: float) -> None:
        self._rate.on_tokens(state, num_tokens)

    def on_step(self, now: float, step_s: float) -> None:
        self._rate.on_step(step_s)
        self._last_step_s = now

    def on_finish(self, state: RequestState) -> None:
        # A token later than the last step that has ended: it finishes now. Otherwise it was aborted.
        if state.last_token_s is not None and state.last_token_s > self._last_step_s:
            self._learn(state, state.last_token_s - state.request.arrival_s)
        self._tables.pop(state.request_id, None)
        self._boosts.pop(state.request_id, None)

    def on_pressure(self, num_waiting: int, max_num_seqs: int) -> bool:
        rates = (self._tail.gamma_per_s, self._rate.prefill_token_s, self._rate.decode_token_s)
        near = all(abs(a - b) <= self.refresh * b for a, b in zip(rates, self._used, strict=True))
        if near and not self._moved:
            return False
        self._used, self._moved = rates, False
        self._boosts.clear()
        return True

    def key(self, state: RequestState, now: float) -> float:
        boost = self._boosts.get(state.request_id)
        if boost is None:
            boost = self._boosts[state.request_id] = self._boost_s(state)
        return state.request.arrival_s - boost

    def _boost_s(self, state: RequestState) -> float:
        gamma, prefill_token_s, decode_token_s = self._used
        prompt_s = prefill_token_s * (state.request.prompt_tokens - state.request.cached_prefix_tokens)
        if not self._trusted:
            return boost_s(prompt_s, gamma)
        table = self._tables.get(state.request_id)
        if table is None:
            return boost_s(prompt_s + decode_token_s * state.request.max_tokens, gamma)
        return predicted_boost_s(table, gamma, decode_token_s, prompt_s)

    def _learn(self, state: RequestState, latency_s: float) -> None:
        if self.adapt_gamma:
            self._tail.finished(latency_s)
        table = self._tables.get(state.request_id)
        if table is None:
            return
        self._coverage.finished(table, state.num_output_tokens)
        gap = self._coverage.gap
        if gap is not None:
            trusted = gap <= (self.max_gap if self._trusted else 0.7 * self.max_gap)
            self._moved |= trusted != self._trusted
            self._trusted = trusted


def predicted_boost_s(length: LengthTable, gamma_per_s: float, token_s: float, prefill_s: float) -> float:
    """b(W) = (1/gamma) ln(E[exp(gamma W)] / (E[exp(gamma W)] - 1)) in seconds, W = prefill_s + X token_s.

    A length table is a mixture of known lengths (its points), so the expectation is a sum over it.

    Args:
        length: Predicted length X.
        gamma_per_s: gamma > 0.
        token_s: Engine time per output token, in seconds > 0.
        prefill_s: Engine time of the prompt, in seconds >= 0.
    """
    mass = -np.diff(length.survival)
    middle = np.maximum(0.5 * (length.points[1:] + length.points[:-1]), 0.5)
    exponent = np.minimum(gamma_per_s * (prefill_s + token_s * middle), _MAX_EXPONENT)
    ratio = float(np.sum(mass * np.exp(exponent)) / np.sum(mass * np.expm1(exponent)))
    return math.log(max(ratio, 1.0)) / gamma_per_s


class Coverage:
    """Largest gap between how often lengths fall below predicted quantiles and how often they should.

    gap = max over levels of |fraction of u <= level - level|, the Kolmogorov distance of the PIT histogram from uniform on a
    grid. A length x is an integer, so its u is uniform over [F(x - 1/2), F(x + 1/2)] (Czado, Gneiting & Held
    2009, "Predictive model assessment for count data", Biometrics 65): an exact predictor has no gap.

    Args:
        window: Latest finished requests that count.
        min_count: With fewer requests there is no gap.
    """

    __slots__ = ("_min_count", "_values")

    levels = np.linspace(0.1, 0.9, 9)

    def __init__(self, window: int = 300, min_count: int = 50) -> None:
        if not 1 <= min_count <= window:
            raise InputError("window, min_count", (window, min_count), "1 <= min_count <= window")
        self._values: deque[tuple[float, float]] = deque(maxlen=window)
        self._min_count = min_count

    def finished(self, predicted: LengthTable, output_tokens: int) -> None:
        """A request with this prediction had so many output tokens."""
        self._values.append((predicted.cdf(output_tokens - 0.5), predicted.cdf(output_tokens + 0.5)))

    @property
    def gap(self) -> float | None:
        """The gap in [0, 1]; None until enough requests have finished."""
        if len(self._values) < self._min_count:
            return None
        low, high = np.array(self._values).T[:, :, None]
        below = np.clip((self.levels - low) / np.maximum(high - low, 1e-12), 0.0, 1.0)
        fractions = below.mean(axis=0)
        return float(np.abs(fractions - self.levels).max())
