"""Tail guard: shortest expected length first, no request much later than under first come, first served. Ours; see Friedman &
Henderson 2003 (virtual service) and Li, Harchol-Balter & Scheller-Wolf 2026, "SPLIT" (sympathy for large jobs)."""

import heapq
import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from scheduler_core.lengths.table import LengthTable
from scheduler_core.policies.base import Policy
from scheduler_core.policies.estimates import WorkRate, risk_tokens
from scheduler_core.policies.fcfs_estimate import PredictionBias
from scheduler_core.ranges import FINITE, POSITIVE, check_ranges
from scheduler_core.request import RequestState, Status

#: In front of every expected length, and behind all of them.
_PROMOTED, _LAST = -1e12, 1e12

#: Arrivals between two looks at which predictions are the longest.
_LOOK_EVERY = 50

#: Of the requests that may be late, the fraction selected by prediction; the others are selected while they run.
_FRACTION_PREDICTED = 0.75

#: The expectation of an output so many times as long as expected is recomputed.
_OUTLIVED = 1.5

#: Virtual departures between two computations of the quantile.
_REFRESH_EVERY = 25


@dataclass(slots=True)
class _Job:
    """Work of a request: expected output tokens of a group of predictions; group None: they are the true ones.

    `served` are the corrected tokens that the virtual queue has served it, None before it has left that.
    """

    prompt_work: float
    decode_tokens: float
    group: int | None
    served: float | None = None


class VirtualFcfs:
    """What the latency would be now under first come, first served: a fluid FCFS queue fed with the same work.

    A policy that reorders requests does as much work as FCFS would. So FCFS needs no second engine: its queue serves, in
    order of arrival, as much work as the real engine has done, and both have the same work left at any time. As the virtual
    service of Friedman & Henderson 2003 ("Fairness and efficiency in web server protocols", SIGMETRICS), with FCFS in place
    of processor sharing.

    Work is in output tokens; the sum of `served` is the work of the finished. A request's work is the expected one, corrected
    by the bias of earlier predictions of its size, until it finishes, then the true one; after a virtual departure the
    difference is credited. `quantile_s` is the P99 of the latest `window` latencies in seconds, None before it has been
    computed.
    """

    def __init__(self, window: int) -> None:
        self._queue: deque[tuple[str, float]] = deque()
        self._jobs: dict[str, _Job] = {}
        self._bias = PredictionBias()
        self._expected: dict[int, float] = {}
        self._certain_work = 0.0
        self._credit = 0.0
        self._latencies: deque[float] = deque(maxlen=window)
        self._num_new = 0
        self.quantile_s: float | None = None

    def arrived(self, state: RequestState, prompt_work: float, decode_tokens: float) -> None:
        """A request joins the virtual queue, with the work of its prompt and its expected output tokens."""
        job = _Job(prompt_work, decode_tokens, PredictionBias.group(decode_tokens))
        self._queue.append((state.request_id, state.request.arrival_s))
        self._jobs[state.request_id] = job
        self._count(job, 1.0)

    def predicted(self, state: RequestState, decode_tokens: float) -> None:
        """A better idea of the output tokens."""
        job = self._jobs.get(state.request_id)
        if job is not None:
            self._revise(job, job.prompt_work, decode_tokens, PredictionBias.group(decode_tokens))

    def finished(self, state: RequestState, decode_tokens: float) -> None:
        """The real request has ended after so many output tokens."""
        job = self._jobs.get(state.request_id)
        if job is not None:
            self._bias.learn(job.decode_tokens, decode_tokens)
            self._end(state, job, job.prompt_work, decode_tokens)

    def dropped(self, state: RequestState) -> None:
        """The real request was aborted before its first token: no work at all."""
        job = self._jobs.get(state.request_id)
        if job is not None:
            self._end(state, job, 0.0, 0.0)

    def served(self, work: float) -> None:
        """The real engine has done work."""
        self._credit += work

    def advance(self, now: float, token_s: float = 0.0) -> None:
        """Ends the virtual requests that the work done so far has served.

        `token_s` are the seconds that a request's own output token takes beyond its part of the engine's work: 0 for a
        server that serves one request at a time.
        """
        queue = self._queue
        while queue:
            request_id, arrival_s = queue[0]
            job = self._jobs[request_id]
            decode = self._corrected(job.decode_tokens, job.group)
            if self._credit < job.prompt_work + decode:
                break
            queue.popleft()
            self._count(job, -1.0)
            self._credit -= job.prompt_work + decode
            job.served = decode
            if job.group is None:
                del self._jobs[request_id]
            self._latencies.append(now - arrival_s + token_s * decode)
            self._num_new += 1
        if not queue:
            self._credit, self._certain_work = min(self._credit, 0.0), 0.0
            self._expected.clear()
        if self._num_new >= _REFRESH_EVERY:
            self._num_new = 0
            self.quantile_s = float(np.quantile(np.fromiter(self._latencies, float), 0.99))

    @property
    def backlog(self) -> float:
        """Work left, in both queues; at the engine's speed the latency of a virtual request that arrives now."""
        ratio = self._bias.ratio
        expected = sum(ratio(group) * tokens for group, tokens in self._expected.items())
        return max(self._certain_work + expected - self._credit, 0.0)

    def _corrected(self, tokens: float, group: int | None) -> float:
        return tokens if group is None else self._bias.ratio(group) * tokens

    def _end(self, state: RequestState, job: _Job, prompt_work: float, decode_tokens: float) -> None:
        self._revise(job, prompt_work, decode_tokens, None)
        if job.served is not None:
            del self._jobs[state.request_id]

    def _revise(self, job: _Job, prompt_work: float, decode_tokens: float, group: int | None) -> None:
        """The work of a job is another than was thought; what it was served too much is given back."""
        if job.served is None:
            self._count(job, -1.0)
        else:
            tokens = self._corrected(decode_tokens, group)
            self._credit -= prompt_work + tokens - job.prompt_work - job.served
            job.served = tokens
        job.prompt_work, job.decode_tokens, job.group = prompt_work, decode_tokens, group
        if job.served is None:
            self._count(job, 1.0)

    def _count(self, job: _Job, sign: float) -> None:
        """Into the work left, or out of it."""
        self._certain_work += sign * job.prompt_work
        if job.group is None:
            self._certain_work += sign * job.decode_tokens
        else:
            self._expected[job.group] = self._expected.get(job.group, 0.0) + sign * job.decode_tokens


@dataclass(kw_only=True, slots=True)
class TailGuard(Policy):
    """Shortest first, until a request would end later than `ratio` times the P99 of a virtual FCFS queue; then it is due.

    key = E[X~];   from a + R - E[X~] t on: in front, by a - E[X~] t;   R = ratio Q
    of the longest at most a fraction epsilon of arrivals: last, and due after patience R

    | symbol | meaning | unit |
    | --- | --- | --- |
    | a | arrival | s |
    | X~ = min(X, M) | predicted output length, log-t; max_tokens, also the length without a prediction | tokens |
    | t | mean duration of a step, measured | s |
    | Q | P99 latency of the latest requests in a virtual FCFS queue that gets the same work, or what a request that
      arrives now will have there if that is more; at least prior_s | s |
    | v | prompt_weight: work of a prompt token, 1 being that of an output token | - |
    | ratio, epsilon, patience | 1.25, 0.0085, 8 | - |

    A P99 does not contain the longest 1 %, so these may be late. Three quarters of them are selected by their prediction; the
    others by having run longer than nearly all that have finished. With an estimate of the P99 that FCFS will reach
    (`prior_s`: from earlier peaks, or the target) more can be delayed in the beginning, which keeps more of the gain.

    No starvation: every request is due after patience * R at the latest, and the due go before all others, by time.
    """

    key_changes = "on_event"
    preemptive = True
    running_keys = "on_event"
    inputs = frozenset({"length"})

    ratio: float = 1.25
    exempt_fraction: float = 0.0085
    patience: float = 8.0
    prior_s: float = 0.0
    prompt_weight: float = 0.1
    window: float = 5000
    _rate: WorkRate = field(default_factory=WorkRate, init=False, repr=False)
    _virtual: VirtualFcfs = field(init=False, repr=False)
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
        check_ranges(self, exempt_fraction=(0.0, 0.999), window=(1, 1_000_000), prior_s=(0, FINITE))
        check_ranges(self, ratio=(POSITIVE, FINITE), prompt_weight=(POSITIVE, FINITE), patience=(1, FINITE))
        self._virtual = VirtualFcfs(int(self.window))
        self._predicted = deque(maxlen=int(self.window))
        self._lengths = deque(maxlen=int(self.window))

    @property
    def limit_s(self) -> float | None:
        """R, in seconds; None before the virtual queue has a P99."""
        p99_s = self.prior_s
        if self._virtual.quantile_s is not None:
            p99_s = max(p99_s, self._virtual.quantile_s, self._latency_now_s())
        return self.ratio * p99_s if p99_s > 0 else None

    def on_arrival(self, state: RequestState, now: float) -> None:
        self._may_exempt += self.exempt_fraction
        prompt = state.request.prompt_tokens - state.request.cached_prefix_tokens
        self._virtual.arrived(state, self.prompt_weight * prompt, _decodes(risk_tokens(state)[0]))
        self._watch(state)

    def on_prediction(self, state: RequestState) -> None:
        if state.prediction is None:
            return
        mean, _ = risk_tokens(state)
        self._outlived[state.request_id] = _OUTLIVED * mean
        self._virtual.predicted(state, _decodes(mean))
        self._predicted.append(mean)
        if state.order % _LOOK_EVERY == _LOOK_EVERY - 1:
            fraction = _FRACTION_PREDICTED * self.exempt_fraction
            self._longest_predicted = _upper_quantile(self._predicted, fraction)
            if self._lengths:
                fraction = (1.0 - _FRACTION_PREDICTED) * self.exempt_fraction
                self._longest = _upper_quantile(self._lengths, fraction)
        if mean > self._longest_predicted and state.first_scheduled_s is None:
            self._exempt_one(state)
        self._watch(state)

    def on_tokens(self, state: RequestState, num_tokens: int, now: float) -> None:
        self._rate.on_tokens(state, num_tokens)
        decodes = state.num_computed_tokens > state.prefill_target_tokens
        self._virtual.served(num_tokens if decodes else self.prompt_weight * num_tokens)
        done = state.num_output_tokens
        length = state.prediction
        if length is not None and done > self._outlived.get(state.request_id, math.inf):
            table = LengthTable(length.mu, length.sigma, length.nu, state.request.max_tokens)
            left = table.expected_remaining(done)
            self._virtual.predicted(state, _decodes(done + left))
            self._outlived[state.request_id] = _OUTLIVED * done
        if done > self._longest and self._exempt_one(state):
            self._lengths.append(float(done))
            self._changed.append(state)

    def on_step(self, now: float, step_s: float) -> None:
        self._rate.on_step(step_s)

    def on_finish(self, state: RequestState) -> None:
        for values in (self._outlived, self._promoted):
            values.pop(state.request_id, None)
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
        return _LAST if state.request_id in self._exempt else risk_tokens(state)[0]

    def eviction_key(self, state: RequestState, now: float) -> float:
        paused = state.request_id in self._exempt and state.request_id not in self._promoted
        return _LAST if paused else -math.inf

    def _latency_now_s(self) -> float:
        """What a request of mean length that arrives now would have in the virtual queue."""
        mean = self._tokens_done / max(self._num_done, 1)
        return self._virtual.backlog * self._rate.decode_token_s + mean * self._own_s()

    def _own_s(self) -> float:
        """Seconds that an output token takes its own request beyond its part of the engine's work."""
        return max(self._rate.step_s - self._rate.decode_token_s, 0.0)

    def _start_s(self, state: RequestState) -> float:
        """a - E[X~] t: with R added, when it has to start to end within R."""
        return state.request.arrival_s - risk_tokens(state)[0] * self._rate.step_s

    def _watch(self, state: RequestState) -> None:
        heapq.heappush(self._due, (self._start_s(state), state.order, state))

    def _exempt_one(self, state: RequestState) -> bool:
        """Whether the request has become one of the fraction that may be late."""
        if self._may_exempt < 1.0 or state.request_id in self._exempt:
            return False
        self._may_exempt -= 1.0
        self._exempt.add(state.request_id)
        self._promoted.pop(state.request_id, None)
        heapq.heappush(self._late_due, (self._start_s(state), state.order, state))
        return True


def _upper_quantile(values: deque[float], fraction: float) -> float:
    """What the largest `fraction` of the values exceed."""
    return float(np.quantile(np.fromiter(values, float), 1.0 - fraction))


def _decodes(output_tokens: float) -> float:
    """Output tokens that take a step of their own: the first one comes with the prompt."""
    return max(output_tokens - 1.0, 0.0)
