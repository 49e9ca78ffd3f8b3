"""Boosts from predicted lengths while the predictor is calibrated, else from prompts alone. Ours; the boosts are those of
Yu & Scully 2024 and Harlev, Yu & Scully 2025 (see `indices.boost`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from scheduler_core.errors import InputError
from scheduler_core.indices.boost import boost_s, predicted_boost_s
from scheduler_core.indices.coverage import Coverage
from scheduler_core.indices.length_table import LengthTable
from scheduler_core.indices.tail_rate import TailRate
from scheduler_core.indices.work_rate import WorkRate
from scheduler_core.policies.base import KeyChanges, Policy
from scheduler_core.request import RequestState


@dataclass(kw_only=True, slots=True)
class PredictedBoost(Policy):
    """Arrival order with boosts for short work, where the work is predicted as long as the predictions hold good.

    key = a - b;   trusted: b = (1/gamma) ln(E[exp(gamma W)] / (E[exp(gamma W)] - 1)), W = s_pre + X~ t;   else: b(s_pre)

    | symbol | meaning | unit |
    | --- | --- | --- |
    | X~ = min(X, M) | predicted output length, log-t | tokens |
    | s_pre, t | engine time of the prompt, and of an output token, measured | s |
    | gamma | ln 5/(t99 - t95) of the latest latencies, smoothed (gamma-Ada) | 1/s |
    | max_gap | trusted while |coverage - level| <= 0.2 at all levels, again from 0.7 of that | - |

    Argument: boosts of known work are tail optimal in the light-tailed M/G/1 queue, and with work known in distribution the
    exchange argument gives the boost above (no displacement: W is run to its end). UniBoost forgoes predictions since they
    can be wrong. They are wrong in a way that shows: finished requests tell how often lengths fell below the predicted
    quantiles. While that is right boosts use the lengths; when it is not they use what is certain, the prompt.

    No starvation: boosts are finite and change with gamma and trust only.

    Raises:
        InputError: A parameter is outside its range.
    """

    key_changes: ClassVar[KeyChanges] = "on_event"
    sees_every_step: ClassVar[bool] = True
    inputs: ClassVar[frozenset[str]] = frozenset({"length"})

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
    _seen_s: float = field(default=-math.inf, init=False, repr=False)

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
        if state.prediction is not None:
            self._tables[state.request_id] = LengthTable(state.prediction, state.request.max_tokens)
            self._boosts.pop(state.request_id, None)

    def on_tokens(self, state: RequestState, num_tokens: int, now: float) -> None:
        self._rate.saw(state, num_tokens)

    def on_step(self, now: float, step_s: float) -> None:
        self._rate.step_ended(step_s)
        self._seen_s = now

    def on_finish(self, state: RequestState) -> None:
        # A token later than the last step that has ended: it finishes now. Otherwise it was aborted.
        if state.last_token_s is not None and state.last_token_s > self._seen_s:
            self._learn(state, state.last_token_s - state.request.arrival_s)
        self._tables.pop(state.request_id, None)
        self._boosts.pop(state.request_id, None)

    def on_pressure(self, num_waiting: int, max_num_seqs: int) -> bool:
        found = (self._tail.gamma_per_s, self._rate.prefill_token_s, self._rate.decode_token_s)
        near = all(abs(a - b) <= self.refresh * b for a, b in zip(found, self._used, strict=True))
        if near and not self._moved:
            return False
        self._used, self._moved = found, False
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
        return predicted_boost_s(table, gamma, decode_token_s, prefill_s=prompt_s, preemptive=False)

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
