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
from scheduler_core.indices.virtual_fcfs import VirtualFcfs
from scheduler_core.indices.work_rate import WorkRate
from scheduler_core.lengths import expected_and_cvar
from scheduler_core.policies.base import KeyChanges, Policy
from scheduler_core.request import RequestState, Status

#: In front of every expected length, and behind all of them.
_PROMOTED, _LAST = -1e12, 1e12


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
    | ratio, epsilon, patience | 1.25, 0.008, 4 | - |

    Argument: under overload every shortest-first order puts off the same few percent of requests, the longest, until the
    queue empties; they are the P99. FCFS shows that all can be done within Q; so there is always room to do what has
    become due at ratio Q, if ratio >= 1, and up to then the room belongs to the short. How much room there is depends on
    who is due: of heavy-tailed lengths the longest 1 % hold a tenth of the work or more, and a P99 does not see them. Some
    are known before (expected length beyond the 1 - epsilon/2 quantile of the predicted ones), others are found out: an
    answer longer than the 1 - epsilon quantile of the finished ones gives its seat to who waits and comes back when it is
    due itself. The work set free serves hundreds of short requests, for one displacement each.

    No starvation: everybody is due after patience * ratio * Q at the latest, and the due go before all others, by time.

    Raises:
        InputError: A parameter is outside its range.
    """

    key_changes: ClassVar[KeyChanges] = "on_event"
    preemptive: ClassVar[bool] = True
    running_keys: ClassVar[Literal["on_event", "on_tokens"]] = "on_event"
    sees_every_step: ClassVar[bool] = True
    inputs: ClassVar[frozenset[str]] = frozenset({"length"})

    ratio: float = 1.25
    exempt_share: float = 0.008
    patience: float = 4.0
    prior_s: float = 0.0
    prompt_weight: float = 0.1
    window: float = 5000
    _rate: WorkRate = field(default_factory=WorkRate, init=False, repr=False)
    _virtual: VirtualFcfs = field(init=False, repr=False)
    _expected: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    _promoted: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    _due: list[tuple[float, int, RequestState]] = field(default_factory=list, init=False, repr=False)
    _late_due: list[tuple[float, int, RequestState]] = field(default_factory=list, init=False, repr=False)
    _recent: deque[float] = field(init=False, repr=False)
    _since: int = field(default=0, init=False, repr=False)
    _longest: float = field(default=math.inf, init=False, repr=False)
    _predicted: deque[float] = field(init=False, repr=False)
    _longest_predicted: float = field(default=math.inf, init=False, repr=False)
    _may_exempt: float = field(default=0.0, init=False, repr=False)
    _exempt: set[str] = field(default_factory=set, init=False, repr=False)
    _changed: list[RequestState] = field(default_factory=list, init=False, repr=False)

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
        self._recent = deque(maxlen=int(self.window))
        self._predicted = deque(maxlen=int(self.window))

    @property
    def limit_s(self) -> float | None:
        """R, in seconds; None before the virtual queue knows a P99."""
        measured = self._virtual.quantile_s
        known = (
            self.prior_s
            if measured is None
            else max(measured, self._virtual.backlog * self._rate.decode_token_s, self.prior_s)
        )
        return self.ratio * known if known > 0 else None

    def on_arrival(self, state: RequestState, now: float) -> None:
        self._may_exempt += self.exempt_share
        self._virtual.arrived(state, self._work(state, self._length(state)))
        self._watch(state)

    def on_prediction(self, state: RequestState) -> None:
        seen = state.prediction
        if seen is None:
            return
        mean, _ = expected_and_cvar(seen.mu, seen.sigma, seen.nu, state.request.max_tokens)
        self._expected[state.request_id] = mean
        self._virtual.predicted(state, self._work(state, mean))
        self._predicted.append(mean)
        if state.order % 50 == 49:
            values = np.fromiter(self._predicted, float)
            self._longest_predicted = float(np.quantile(values, 1.0 - 0.5 * self.exempt_share))
        if mean > self._longest_predicted and state.first_scheduled_s is None:
            self._exempt_one(state)
        self._watch(state)

    def on_tokens(self, state: RequestState, num_tokens: int, now: float) -> None:
        self._rate.saw(state, num_tokens)
        decodes = state.num_computed_tokens > state.prefill_target_tokens
        self._virtual.served(num_tokens if decodes else self.prompt_weight * num_tokens)
        if state.num_output_tokens > self._longest and self._exempt_one(state):
            self._changed.append(state)

    def on_step(self, now: float, step_s: float) -> None:
        self._rate.step_ended(step_s)

    def on_finish(self, state: RequestState) -> None:
        done = state.first_token_s is not None
        self._virtual.finished(state, self._work(state, state.num_output_tokens) if done else 0.0)
        self._expected.pop(state.request_id, None)
        self._promoted.pop(state.request_id, None)
        self._exempt.discard(state.request_id)
        if done:
            self._learn(state.num_output_tokens)

    def take_changed(self, now: float) -> Collection[RequestState]:
        self._virtual.advance(now)
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

    def _length(self, state: RequestState) -> float:
        return self._expected.get(state.request_id, float(state.request.max_tokens))

    def _work(self, state: RequestState, output_tokens: float) -> float:
        """In output tokens; the first one comes with the prompt."""
        prompt = state.request.prompt_tokens - state.request.cached_prefix_tokens
        return self.prompt_weight * prompt + max(output_tokens - 1.0, 0.0)

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

    def _learn(self, output_tokens: int) -> None:
        self._recent.append(output_tokens)
        self._since += 1
        if self._since >= 50:
            self._since = 0
            self._longest = float(np.quantile(np.fromiter(self._recent, float), 1.0 - self.exempt_share))
