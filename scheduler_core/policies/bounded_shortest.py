"""The default policy, by tailcast: shortest first, with delays bounded relative to first come, first served."""

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from scheduler_core.policies.estimates import median_tokens, risk_tokens
from scheduler_core.policies.fcfs_estimate import (
    ArrivalOrder,
    Load,
    RecentValues,
    RunningWork,
    ServiceRate,
)
from scheduler_core.policies.work_left import WorkLeft
from scheduler_core.ranges import FINITE, POSITIVE, check_ranges
from scheduler_core.request import RequestState
from scheduler_core.statistics import FloatArray, kendall_tau

#: Key below all lengths.
_FRONT = -1e12

#: r, g and h without overload, below the promised `ratio` to leave a margin for errors of the estimates.
_WAIT_RATIO, _WAIT_FRACTION, _LATENCY_FRACTION = 1.05, 0.9, 0.8

#: Overload at which r is `ratio`: load less its standard error, minus 1.
_OVERLOAD = 0.05

#: With `work_left`: waits before this number of requests have ended do not count, because costs are not known yet.
_NUM_LEARNT = 64

#: Decay factor of the weights in the mean work, per new request; weight of an ended one in the mean output.
_WORK_FADE, _OUTPUT_WEIGHT = 0.999, 0.01

#: Arrivals between updates of the quantiles, and ended requests between updates of the rank correlation.
_REFRESH_EVERY, _RANK_EVERY = 20, 40

#: With a longer queue than the first number, due requests are only computed every so many output token times.
_LONG_QUEUE, _DUE_EVERY_TOKENS = 256, 4

#: Predictions are used while tau-b over the latest ended requests is above 0.1; without correlation its standard error is
#: 0.04. (A shorter window may give a negative tau for good predictions, because short requests of a burst end in turn.)
_NUM_RANKED, _MIN_TAU = 256, 0.1

#: Groups of predictions per octave, and number of correctly predicted requests in the prior of a group.
_GROUPS_PER_OCTAVE, _PRIOR_REQUESTS = 2, 4.0


def _are_in(values: FloatArray, others: FloatArray) -> NDArray[np.bool_]:
    """Mask [N] of the values that are among the others; both must be ascending."""
    if not len(others):
        return np.zeros(len(values), dtype=bool)
    are_equal: NDArray[np.bool_] = others.take(others.searchsorted(values), mode="clip") == values
    return are_equal


class PredictionBias:
    """ratio(g) = (sum of true + k m_g) / (sum of predicted + k m_g), over the finished requests of group g.

    The expectation of a fitted log-t depends on its tail, for which there are few samples: its mean error may
    be a sixth although all quantiles are correct. A single ratio over all finished requests would be biased,
    because under shortest first those with long predictions finish late. Given the prediction, the time of
    the end does not depend on the true length.

    A group is half an octave of predicted lengths, m_g its geometric mean, k = 4 the number of correctly
    predicted requests in its prior.
    """

    def __init__(self) -> None:
        self._true: dict[int, float] = {}
        self._predicted: dict[int, float] = {}

    @staticmethod
    def _group(predicted_tokens: float) -> int:
        """The group of a prediction in tokens; all predictions below one token are in one group."""
        return math.floor(_GROUPS_PER_OCTAVE * math.log2(max(predicted_tokens, 1.0)))

    def learn(self, predicted_tokens: float, true_tokens: float) -> None:
        """Adds a finished request with its expected and true output tokens."""
        group = self._group(predicted_tokens)
        self._predicted[group] = self._predicted.get(group, 0.0) + predicted_tokens
        self._true[group] = self._true.get(group, 0.0) + true_tokens

    def ratio(self, predicted_tokens: float) -> float:
        """Expected true tokens per predicted token; 1 without finished requests."""
        group = self._group(predicted_tokens)
        prior = _PRIOR_REQUESTS * math.pow(2.0, (group + 0.5) / _GROUPS_PER_OCTAVE)
        return (self._true.get(group, 0.0) + prior) / (self._predicted.get(group, 0.0) + prior)


@dataclass(kw_only=True, slots=True)
class BoundedShortest(WorkLeft):
    """Shortest predicted length first; requests that reach their maximum wait come first, by arrival.

    key = min(exp(mu), M);   first as soon as   o t >= L - W   or   a + L - c t <= now
    L = min( r max(W, g Q),   r max(W + S, h R) - S )

    | symbol | meaning | unit |
    | --- | --- | --- |
    | exp(mu), M | median of the predicted length; max_tokens | tokens |
    | a, W | arrival; wait under first come, first served, estimated at the arrival | s |
    | S | expected running time: expected work times the measured time per output token | s |
    | Q, R | P99 of W and of W + S over the last `window` arrivals | s |
    | o | work of later arrivals that started before the request | tokens |
    | c | work of the waiting requests that arrived before it | tokens |
    | t | engine time per token of work while requests wait, measured | s |
    | r, g, h | 1.05, 0.9, 0.8; under overload (load less its standard error >= 1.05) `ratio`, 1, 1 | - |
    | ratio | promised maximum of wait and latency relative to first come, first served, 1.25 | - |
    | prompt_weight | work of a prompt token that is not in the prefix cache; an output token is 1 | tokens |

    Guarantee, up to errors of the estimates: every request starts within `ratio` times its wait under first come, first
    served, or the P99 of those waits if that is longer. It also ends within `ratio` times its latency under
    first come, first served, or their P99. There are no exemptions. The policy does not preempt; a request that a batch
    former has preempted counts as one that has reached its maximum wait until it ends, so that only earlier arrivals go before it.

    Work is E[min(X, M)], corrected by the true lengths of similar predictions (`PredictionBias`). W is the waiting work
    at the arrival, plus the deviation of the remaining work of running requests from its average; it is the same for
    both orders. Reordering does not change t, so W can be measured on the same engine. Load is the arriving work divided
    by the work that the engine can do meanwhile; its standard error distinguishes bursts from overload. Requests are in
    arrival order without predictions, and while these do not rank the finished requests better than chance.

    With `work_left` the key is the engine time of the prompt that is not cached and of the median, and all work is in such
    seconds, with what is cached at the time. Reordering then changes what is cached: the guarantee is relative to first come,
    first served with the work that is measured.
    """

    needs_queue = True
    inputs = frozenset({"length"})

    ratio: float = 1.25
    prompt_weight: float = 0.1
    window: float = 2000
    _waiting: ArrivalOrder = field(default_factory=ArrivalOrder, init=False, repr=False)
    _due: dict[int, RequestState] = field(default_factory=dict, init=False, repr=False)
    _due_orders: FloatArray = field(default_factory=lambda: np.empty(0), init=False, repr=False)
    _next_due_s: float = field(default=0.0, init=False, repr=False)
    _preempted: set[str] = field(default_factory=set, init=False, repr=False)
    _running: RunningWork = field(default_factory=RunningWork, init=False, repr=False)
    _rate: ServiceRate = field(init=False, repr=False)
    _bias: PredictionBias = field(default_factory=PredictionBias, init=False, repr=False)
    _ranked: deque[tuple[float, float]] = field(
        default_factory=lambda: deque(maxlen=_NUM_RANKED), init=False, repr=False
    )
    _ranks: bool = field(default=True, init=False, repr=False)
    _num_unranked: int = field(default=0, init=False, repr=False)
    _fcfs_waits: RecentValues = field(init=False, repr=False)
    _fcfs_latencies: RecentValues = field(init=False, repr=False)
    _num_new: int = field(default=0, init=False, repr=False)
    _load: Load = field(default_factory=Load, init=False, repr=False)
    _sum_work: float = field(init=False, repr=False)
    _num_work: float = field(default=1.0, init=False, repr=False)
    _num_ended: int = field(default=0, init=False, repr=False)
    _mean_output: float = field(default=256.0, init=False, repr=False)
    _remaining_s: float = field(default=0.0, init=False, repr=False)
    _running_s: float = field(default=0.0, init=False, repr=False)
    _max_num_seqs: int = field(default=0, init=False, repr=False)
    #: Arrivals since the latest step.
    _num_unseen: int = field(default=0, init=False, repr=False)
    _all_changed: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        check_ranges(self, ratio=(1.0, FINITE), prompt_weight=(POSITIVE, FINITE), window=(100, 1_000_000))
        self._rate = ServiceRate(in_seconds=self.work_left)
        self._sum_work = 0.1 if self.work_left else 256.0
        self._fcfs_waits = RecentValues(int(self.window))
        self._fcfs_latencies = RecentValues(int(self.window))

    def on_arrival(self, state: RequestState, now: float) -> None:
        self._is_due = True
        work = self._work(state)
        if self.work_left:
            self._sum_work, self._num_work = (
                _WORK_FADE * self._sum_work + work,
                _WORK_FADE * self._num_work + 1.0,
            )
        wait_s = self._fcfs_wait_s(now)
        self._waiting.add(state, wait_s, work)
        self._rate.advance(now, has_queue=True)
        self._fcfs_waits.append(wait_s)
        self._load.arrived(now, work, self._mean_service_s())
        self._num_new += 1
        if self._num_new >= _REFRESH_EVERY or len(self._fcfs_waits) <= 5 * _REFRESH_EVERY:
            self._num_new = 0
            self._refresh_bound()

    def on_prediction(self, state: RequestState) -> None:
        self._is_due = True
        if state.prediction is None:
            return
        work = self._work(state)
        if not self.work_left:
            self._sum_work, self._num_work = (
                _WORK_FADE * self._sum_work + work,
                _WORK_FADE * self._num_work + 1.0,
            )
        waiting = self._waiting.get(state)
        if waiting is not None:
            self._load.grow(self._waiting.revise(state, work))
            self._fcfs_latencies.append(waiting[1] + work * self._rate.step_s)
        else:  # it was admitted before
            growth = self._running.revise(state.request_id, work)
            self._load.grow(growth)
            self._waiting.overtake(state, growth)

    def on_pressure(self, num_waiting: int, max_num_seqs: int) -> bool:
        self._max_num_seqs, self._num_unseen = max_num_seqs, 0
        changed, self._all_changed = self._all_changed, False
        is_due = WorkLeft.on_pressure(self, num_waiting, max_num_seqs)
        return changed or is_due

    def on_admit(self, state: RequestState, now: float) -> None:
        self._is_due = True
        waiting = self._waiting.get(state)
        if waiting is None:
            work = self._work(state)
        else:
            work, fcfs_wait_s = waiting
            self._waiting.remove(state)
            self._waiting.overtake(state, work)
            if state.prediction is None:
                self._fcfs_latencies.append(fcfs_wait_s + work * self._rate.step_s)
        self._rate.advance(now, len(self._waiting) > 0)
        self._due.pop(state.order, None)
        self._running.add(state.request_id, now, work)

    def on_preempt(self, state: RequestState, now: float) -> None:
        self._is_due = True
        self._running.remove(state.request_id)
        self._preempted.add(state.request_id)

    def on_finish(self, state: RequestState) -> None:
        self._is_due = True
        self._waiting.remove(state)
        self._due.pop(state.order, None)
        self._preempted.discard(state.request_id)
        expected = self._running.remove(state.request_id)
        if expected is not None and state.last_token_s is not None:
            self._learn(state, expected, state.last_token_s)

    def _learn(self, state: RequestState, expected: float, end_s: float) -> None:
        """Updates the estimates with a request that has ended, of which `expected` was the work."""
        self._rate.advance(end_s, len(self._waiting) > 0)
        work = self._total(state, state.num_output_tokens)
        self._rate.finished(state, work)
        self._mean_output += _OUTPUT_WEIGHT * (state.num_output_tokens - self._mean_output)
        self._num_ended += 1
        if self.work_left and self._num_ended == _NUM_LEARNT:
            self._fcfs_waits.clear()
            self._fcfs_latencies.clear()
        self._waiting.overtake(state, work - expected)
        if state.prediction is not None:
            self._bias.learn(risk_tokens(state)[0], state.num_output_tokens)
            self._rank(state)

    def take_changed(self, now: float) -> Collection[RequestState]:
        num_waiting = len(self._waiting)
        if self.work_left and self._is_due:  # the prefix cache may have changed
            for waiting in self._waiting:
                self._waiting.revise(waiting, self._work(waiting))
        if not num_waiting or (num_waiting > _LONG_QUEUE and now < self._next_due_s):
            return ()
        token_s = self._times.decode_s if self.work_left else self._rate.step_s
        self._next_due_s = now + _DUE_EVERY_TOKENS * token_s
        due = self._waiting.due(now, self._rate.token_s)
        orders = self._waiting.orders(due)
        if np.array_equal(orders, self._due_orders):
            return ()
        before, self._due_orders = self._due_orders, orders
        changed = self._waiting.states(due[~_are_in(orders, before)])
        self._due.update((state.order, state) for state in changed)
        for order in before[~_are_in(before, orders)].tolist():
            state = self._due.pop(int(order), None)  # unless it has left
            if state is not None:
                changed.append(state)
        return changed

    def key(self, state: RequestState, now: float) -> float:
        if state.order in self._due or state.request_id in self._preempted:
            return _FRONT + state.order
        if not self._ranks:
            return float(state.order)
        return self.work(state, median_tokens(state))

    def _total(self, state: RequestState, output_tokens: float) -> float:
        """Work of prompt and output in tokens of output, with `work_left` in seconds."""
        if self.work_left:
            uncached_tokens, times = state.request.prompt_tokens - state.cached_tokens, self._times
            prompt_s = times.prefill_s * uncached_tokens + times.reload_s * state.host_cached_tokens
            return prompt_s + times.decode_s * output_tokens
        return self.prompt_weight * (state.request.prompt_tokens - state.cached_tokens) + output_tokens

    def _work(self, state: RequestState) -> float:
        """Expected work of the whole request; without a usable prediction that of a mean request or output."""
        if not self._ranks:
            return self._rate.mean_work
        if state.prediction is None:
            if self.work_left:
                return self._total(state, min(self._mean_output, state.request.max_tokens))
            return min(self._sum_work / self._num_work, self._total(state, state.request.max_tokens))
        expected = risk_tokens(state)[0]
        expected *= self._bias.ratio(expected)
        return self._total(state, min(expected, state.request.max_tokens))

    def _mean_service_s(self) -> float:
        """Mean engine time per request, in seconds."""
        return self._sum_work / self._num_work * self._rate.token_s

    def _fcfs_wait_s(self, now: float) -> float:
        """W of a request that arrives now; also updates the average remaining work of running requests."""
        remaining, num_running = self._running.remaining(now, self._rate.step_s), len(self._running)
        if self._load.last_arrival_s is not None:
            self._remaining_s += remaining * (now - self._load.last_arrival_s)
            self._running_s += num_running * (now - self._load.last_arrival_s)
        num_free = max(self._max_num_seqs - num_running, 0)
        if self.work_left and len(self._waiting) > self._num_unseen:
            num_free = 0  # some were not admitted in the latest step: it is memory that limits them
        self._num_unseen += 1
        work = self._waiting.work_behind(num_free)
        if work <= 0.0:
            return 0.0
        if self._running_s > 0.0:
            work += remaining - num_running * self._remaining_s / self._running_s
        return max(work, 0.0) * self._rate.token_s

    def _refresh_bound(self) -> None:
        """Updates r, g Q and h R."""
        quantile_s = self._fcfs_waits.quantile(0.99)
        # In a growing queue waits are uniform between 0 and their maximum, so their mean is half of it.
        is_common = min(1.0, 2.0 * self._fcfs_waits.mean / quantile_s) if quantile_s > 0 else 0.0
        load = self._load.lower_bound(self._rate.token_s, self._mean_service_s())
        overload = min(max((load - 1.0) / _OVERLOAD, 0.0), is_common)

        def blend(normal: float, overloaded: float) -> float:
            return normal + (overloaded - normal) * overload

        self._waiting.set_bound(
            ratio=blend(min(_WAIT_RATIO, self.ratio), self.ratio),
            least_wait_s=blend(_WAIT_FRACTION, 1.0) * quantile_s,
            least_end_s=blend(_LATENCY_FRACTION, 1.0) * self._fcfs_latencies.quantile(0.99),
            step_s=self._rate.step_s,
        )

    def _rank(self, state: RequestState) -> None:
        """Adds a finished request and updates whether predictions rank requests better than chance."""
        ranked = (median_tokens(state), float(state.num_output_tokens))
        self._ranked.append(
            (self._total(state, ranked[0]), self._total(state, ranked[1])) if self.work_left else ranked
        )
        self._num_unranked += 1
        if self._num_unranked < _RANK_EVERY:
            return
        self._num_unranked = 0
        predicted, true = np.array(self._ranked).T
        ranks = (kendall_tau(predicted, true) or 0.0) > _MIN_TAU
        if ranks == self._ranks:
            return
        self._ranks, self._all_changed = ranks, True
        if not ranks:  # the waiting requests have long predictions, so waits were overestimated
            factor = self._waiting.revise_all(self._rate.mean_work)
            self._fcfs_waits.scale(factor)
            self._fcfs_latencies.clear()
            self._refresh_bound()
