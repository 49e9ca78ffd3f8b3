"""Tail guard: shortest expected length first, but nobody much later than first come, first served would have him. Ours; see
Friedman & Henderson 2003 (virtual service) and Li, Harchol-Balter & Scheller-Wolf 2026, "SPLIT" (sympathy for large jobs)."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np

from scheduler_core.errors import InputError
from scheduler_core.indices.length_table import LengthTable
from scheduler_core.indices.virtual_fcfs import VirtualFcfs
from scheduler_core.indices.work_rate import WorkRate
from scheduler_core.lengths import expected_and_cvar
from scheduler_core.policies.base import KeyChanges, Policy
from scheduler_core.request import RequestState, Status

#: In front of every expected length, and behind all of them.
_PROMOTED, _LAST = -1e12, 1e12

#: Arrivals between two looks at which predictions are the longest.
_LOOK_EVERY = 50

#: Of the requests that may be late, the share that is known by its prediction; the others are found out while they run.
_KNOWN_BEFORE = 0.75

#: An answer so many times as long as it was expected is expected anew.
_OUTLIVED = 1.5


@dataclass(kw_only=True, slots=True)
class TailGuard(Policy):
    """Shortest first, until a request would end later than `ratio` times the P99 of a virtual FCFS queue; then it is due.

    key = E[X~];   from a + R - E[X~] t on: in front, by a - E[X~] t;   R = ratio Q
    of the longest at most a share epsilon of arrivals: last, and due after patience R

    | symbol | meaning | unit |
    | --- | --- | --- |
    | a | arrival | s |
    | X~ = min(X, M) | predicted output length, log-t; max_tokens, also the length without a prediction | tokens |
    | t | mean duration of a step, measured | s |
    | Q | P99 latency of the latest requests in a virtual FCFS queue that gets the same work, or what a request that
      arrives now will have there if that is more; at least prior_s | s |
    | v | prompt_weight: work of a prompt token, 1 being that of an output token | - |
    | ratio, epsilon, patience | 1.25, 0.0085, 8 | - |

    Argument: with load rho > 1 every order has the same work left over, the share (rho - 1)/rho of what has come; they differ in
    whose it is. Shortest first leaves the longest, so the fewest requests wait. If nobody may wait for longer than c times what
    FCFS makes wait, then what is left over has all come within that time, so requests with the share 1/(c rho) of the work
    are put off (if that is more): for c = 1.3 and rho = 1.2 the longest with 64 % of the work instead of 17 %. That is the price
    of the bound, and to put off the longest of them and serve them just in time pays no more. But a P99 does not see the
    longest 1 %. If these, with the share s of the work, may be late then (1 - rho s/(rho - 1))/(c rho) is enough: a fourth
    less for s = 4 %. Three quarters of them are known by their prediction; the others are answers that run on and on: longer
    than nearly all that have finished, they give their seat to who waits.

    Whoever knows what P99 FCFS would reach before it does (`prior_s`: from earlier peaks, or the target) can put off more in the
    beginning, and keeps more of the gain.

    No starvation: everybody is due after patience * R at the latest, and the due go before all others, by time.

    Raises:
        InputError: A parameter is outside its range.
    """

    key_changes: ClassVar[KeyChanges] = "on_event"
    preemptive: ClassVar[bool] = True
    running_keys: ClassVar[Literal["on_event", "on_tokens"]] = "on_event"
    sees_every_step: ClassVar[bool] = True
    inputs: ClassVar[frozenset[str]] = frozenset({"length"})

    ratio: float = 1.25
    exempt_share: float = 0.0085
    patience: float = 8.0
    prior_s: float = 0.0
    prompt_weight: float = 0.1
    window: float = 5000
    _rate: WorkRate = field(default_factory=WorkRate, init=False, repr=False)
    _virtual: VirtualFcfs = field(init=False, repr=False)
    _expected: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    _outlived: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    _promoted: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    _due: list[tuple[float, int, RequestState]] = field(default_factory=list, init=False, repr=False)
    _late_due: list[tuple[float, int, RequestState]] = field(default_factory=list, init=False, repr=False)
    _predicted: deque[float] = field(init=False, repr=False)
    _longest_predicted: float = field(default=math.inf, init=False, repr=False)
    _lengths: deque[float] = field(init=False, repr=False)
    _longest: float = field(default=math.inf, init=False, repr=False)
    _changed: list[RequestState] = field(default_factory=list, init=False, repr=False)
    _may_exempt: float = field(default=0.0, init=False, repr=False)
    _exempt: set[str] = field(default_factory=set, init=False, repr=False)
    _num_done: int = field(default=0, init=False, repr=False)
    _tokens_done: float = field(default=0.0, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.ratio < math.inf:
            raise InputError("ratio", self.ratio, "numbers > 0")
        if not 0 <= self.exempt_share < 1:
            raise InputError("exempt_share", self.exempt_share, "numbers in [0, 1)")
        if not 1 <= self.patience < math.inf:
            raise InputError("patience", self.patience, "numbers >= 1")
        if not 0 < self.prompt_weight < math.inf:
            raise InputError("prompt_weight", self.prompt_weight, "numbers > 0")
        if not 0 <= self.prior_s < math.inf:
            raise InputError("prior_s", self.prior_s, "seconds >= 0")
        if not 1 <= self.window <= 1_000_000:
            raise InputError("window", self.window, "numbers from 1 to 1000000")
        self._virtual = VirtualFcfs(window=int(self.window))
        self._predicted = deque(maxlen=int(self.window))
        self._lengths = deque(maxlen=int(self.window))

    @property
    def limit_s(self) -> float | None:
        """R, in seconds; None before the virtual queue knows a P99."""
        known_s = self.prior_s
        if self._virtual.quantile_s is not None:
            known_s = max(known_s, self._virtual.quantile_s, self._latency_now_s())
        return self.ratio * known_s if known_s > 0 else None

    def on_arrival(self, state: RequestState, now: float) -> None:
        self._may_exempt += self.exempt_share
        prompt = state.request.prompt_tokens - state.request.cached_prefix_tokens
        self._virtual.arrived(state, self.prompt_weight * prompt, _decodes(self._length(state)))
        self._watch(state)

    def on_prediction(self, state: RequestState) -> None:
        seen = state.prediction
        if seen is None:
            return
        mean, _ = expected_and_cvar(seen.mu, seen.sigma, seen.nu, state.request.max_tokens)
        self._expected[state.request_id] = mean
        self._outlived[state.request_id] = _OUTLIVED * mean
        self._virtual.predicted(state, _decodes(mean))
        self._predicted.append(mean)
        if state.order % _LOOK_EVERY == _LOOK_EVERY - 1:
            self._longest_predicted = _upper_quantile(self._predicted, _KNOWN_BEFORE * self.exempt_share)
            if self._lengths:
                self._longest = _upper_quantile(self._lengths, (1.0 - _KNOWN_BEFORE) * self.exempt_share)
        if mean > self._longest_predicted and state.first_scheduled_s is None:
            self._exempt_one(state)
        self._watch(state)

    def on_tokens(self, state: RequestState, num_tokens: int, now: float) -> None:
        self._rate.saw(state, num_tokens)
        decodes = state.num_computed_tokens > state.prefill_target_tokens
        self._virtual.served(num_tokens if decodes else self.prompt_weight * num_tokens)
        done = state.num_output_tokens
        if state.prediction is not None and done > self._outlived.get(state.request_id, math.inf):
            left = LengthTable(state.prediction, state.request.max_tokens).expected_remaining(done)
            self._virtual.predicted(state, _decodes(done + left))
            self._outlived[state.request_id] = _OUTLIVED * done
        if done > self._longest and self._exempt_one(state):
            self._lengths.append(float(done))
            self._changed.append(state)

    def on_step(self, now: float, step_s: float) -> None:
        self._rate.step_ended(step_s)

    def on_finish(self, state: RequestState) -> None:
        for kept in (self._expected, self._outlived, self._promoted):
            kept.pop(state.request_id, None)
        self._exempt.discard(state.request_id)
        if state.first_token_s is None:
            self._virtual.dropped(state)
            return
        self._virtual.finished(state, _decodes(state.num_output_tokens))
        self._lengths.append(float(state.num_output_tokens))
        self._num_done += 1
        self._tokens_done += state.num_output_tokens

    def take_changed(self, now: float) -> Collection[RequestState]:
        self._virtual.advance(now, self._own_s())
        changed, self._changed = self._changed, []
        limit_s = self.limit_s
        if limit_s is None:
            return changed
        for heap, within_s in ((self._due, limit_s), (self._late_due, self.patience * limit_s)):
            while heap and heap[0][0] + within_s <= now:
                start_s, _, state = heapq.heappop(heap)
                if state.status is Status.GONE or state.request_id in self._promoted:
                    continue
                if heap is self._due and state.request_id in self._exempt:
                    continue
                if self._start_s(state) > start_s:
                    heapq.heappush(heap, (self._start_s(state), state.order, state))  # Predicted since.
                else:
                    self._promoted[state.request_id] = start_s
                    changed.append(state)
        return changed

    def key(self, state: RequestState, now: float) -> float:
        start_s = self._promoted.get(state.request_id)
        if start_s is not None:
            return _PROMOTED + start_s
        return _LAST if state.request_id in self._exempt else self._length(state)

    def eviction_key(self, state: RequestState, now: float) -> float:
        paused = state.request_id in self._exempt and state.request_id not in self._promoted
        return _LAST if paused else -math.inf

    def _latency_now_s(self) -> float:
        """What a request of mean length that arrives now would have in the virtual queue."""
        mean = self._tokens_done / max(self._num_done, 1)
        return self._virtual.backlog * self._rate.decode_token_s + mean * self._own_s()

    def _own_s(self) -> float:
        """Seconds that an output token takes its own request beyond its share of the engine's work."""
        return max(self._rate.step_s - self._rate.decode_token_s, 0.0)

    def _length(self, state: RequestState) -> float:
        return self._expected.get(state.request_id, float(state.request.max_tokens))

    def _start_s(self, state: RequestState) -> float:
        """a - E[X~] t: with R added, when it has to start to end within R."""
        return state.request.arrival_s - self._length(state) * self._rate.step_s

    def _watch(self, state: RequestState) -> None:
        heapq.heappush(self._due, (self._start_s(state), state.order, state))

    def _exempt_one(self, state: RequestState) -> bool:
        """Whether the request has become one of the share that may be late."""
        if self._may_exempt < 1.0 or state.request_id in self._exempt:
            return False
        self._may_exempt -= 1.0
        self._exempt.add(state.request_id)
        self._promoted.pop(state.request_id, None)
        heapq.heappush(self._late_due, (self._start_s(state), state.order, state))
        return True


def _upper_quantile(values: deque[float], share: float) -> float:
    """What the largest `share` of the values exceed."""
    return float(np.quantile(np.fromiter(values, float), 1.0 - share))


def _decodes(output_tokens: float) -> float:
    """Output tokens that take a step of their own: the first one comes with the prompt."""
    return max(output_tokens - 1.0, 0.0)
