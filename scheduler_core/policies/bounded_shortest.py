"""Shortest first, no request starts much later than under first come, first served: the default order. Ours."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from scheduler_core.policies.base import Policy
from scheduler_core.policies.estimates import median_tokens, risk_tokens
from scheduler_core.policies.virtual_fcfs import PredictionBias
from scheduler_core.ranges import FINITE, POSITIVE, check_ranges
from scheduler_core.request import RequestState
from scheduler_core.statistics import kendall_tau

FloatArray = NDArray[np.float64]

#: In front of all lengths.
_FRONT = -1e12

#: Without overload r is 1.05, Q counts for 0.9 and R for 0.8: the rest of `ratio` is left to errors of the estimates.
_WAIT_RATIO, _WAIT_FRACTION, _LATENCY_FRACTION = 1.05, 0.9, 0.8

#: By how much the load, less its standard error, exceeds 1 where r is `ratio`.
_OVERLOAD = 0.05

#: The load starts as if so many requests had arrived at load 1, and anew after a gap in which so many could have been served.
_PRIOR_ARRIVALS, _IDLE_REQUESTS = 100, 100

#: The load's error is that of at most so many blocks of equal time, in which so many requests, at first and later, can be served.
_NUM_BLOCKS, _FIRST_BLOCK_REQUESTS, _BLOCK_REQUESTS = 32, 20, 100

#: Weights of old arrivals in the load, of old requests in the mean work, and of old busy time fall by this with each new one.
_LOAD_FADE, _WORK_FADE, _RATE_FADE = 0.9998, 0.999, 0.9995

#: Arrivals between two computations of the quantiles, or ends between two of the rank correlation.
_REFRESH_EVERY = 20

#: Predictions are used while tau-b with the latest ends is above 0.1; its standard error is 0.04 without any correlation. (With
#: fewer it may be negative although predictions are good: in a burst the short ones of one moment end one after another.)
_NUM_RANKED, _MIN_TAU = 256, 0.1

#: Of its expected work a running request has at least this fraction left.
_MIN_REMAINING = 0.25


class _ArrivalOrder:
    """The waiting requests in order of arrival, as columns of an array; a request that has left keeps its row, never due.

    Row by row: work, in tokens; work by which later arrivals have overtaken exactly the requests up to this one; arrival
    number; arrival and wait under first come, first served, in seconds; when the request is due if nothing waits before
    it, and by how many seconds of work it may be overtaken.
    """

    _WORK, _OVERTAKEN, _ORDER, _ARRIVAL, _FCFS_WAIT, _LATEST, _SLACK = range(7)

    def __init__(self) -> None:
        self._table = np.zeros((7, 64))
        self._sums = np.zeros((2, 65))
        self._states: list[RequestState | None] = []
        self._rows: dict[str, int] = {}
        self._total_work = 0.0
        self._bound = 1.0, 0.0, 0.0, 0.0

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, state: RequestState, fcfs_wait_s: float, work: float) -> None:
        if len(self._states) == self._table.shape[1]:
            self._compact()
        row = self._rows[state.request_id] = len(self._states)
        self._states.append(state)
        self._table[:, row] = work, 0.0, state.order, state.request.arrival_s, fcfs_wait_s, 0.0, 0.0
        self._total_work += work
        self._bound_rows(slice(row, row + 1))

    def revise(self, state: RequestState, work: float) -> float:
        """Another expectation of its work, if it waits; returns by how much it has grown."""
        row = self._rows.get(state.request_id)
        if row is None:
            return 0.0
        growth = work - float(self._table[self._WORK, row])
        self._table[self._WORK, row] = work
        self._total_work += growth
        self._bound_rows(slice(row, row + 1))
        return growth

    def revise_all(self, work: float) -> float:
        """All have the same expectation of work; returns by which factor, at most 1, the total and so all waits fall."""
        column = self._table[self._WORK, : len(self._states)]
        before = float(column.sum())
        column[column > 0] = work
        self._total_work = float(column.sum())
        factor = min(1.0, self._total_work / before) if before > 0 else 1.0
        self._table[self._FCFS_WAIT, : len(self._states)] *= factor
        return factor

    def fcfs_wait_s(self, state: RequestState) -> float | None:
        """Its wait under first come, first served, in seconds; None if it is not here."""
        row = self._rows.get(state.request_id)
        return None if row is None else float(self._table[self._FCFS_WAIT, row])

    def remove(self, state: RequestState) -> None:
        """The request does not wait any more, if it did."""
        row = self._rows.pop(state.request_id, None)
        if row is None:
            return
        self._states[row] = None
        self._total_work -= float(self._table[self._WORK, row])
        self._table[self._WORK, row] = 0.0
        self._table[self._ARRIVAL, row] = self._table[self._LATEST, row] = self._table[self._SLACK, row] = (
            np.inf
        )
        self._table[self._FCFS_WAIT, row] = -np.inf

    def overtake(self, state: RequestState, work: float) -> None:
        """The requests that arrived before this one wait for so much of its work."""
        row = self._table[self._ORDER, : len(self._states)].searchsorted(state.order)
        if row > 0:
            self._table[self._OVERTAKEN, row - 1] += work

    def work_behind(self, num_free: int) -> float:
        """Work of all but the first `num_free` requests."""
        if not num_free:
            return self._total_work
        work = self._table[self._WORK, : len(self._states)]
        return float(work[work > 0][num_free:].sum())

    def set_bound(self, ratio: float, least_wait_s: float, least_end_s: float, step_s: float) -> None:
        """A request may wait `ratio` times its wait under first come, first served, or `least_wait_s`, and end likewise.

        Args:
            ratio: Of both.
            least_wait_s: Bound of shorter waits, in seconds.
            least_end_s: Bound of shorter latencies, in seconds.
            step_s: Seconds of a running request per token of work.
        """
        self._bound = ratio, least_wait_s, least_end_s, step_s
        self._bound_rows(slice(0, len(self._states)))

    def _bound_rows(self, rows: slice) -> None:
        ratio, least_wait_s, least_end_s, step_s = self._bound
        work, _, _, arrival_s, fcfs_wait_s, latest_s, slack_s = self._table[:, rows]
        service_s = work * step_s
        longest_s = ratio * np.maximum(fcfs_wait_s + service_s, least_end_s) - service_s
        np.minimum(longest_s, ratio * np.maximum(fcfs_wait_s, least_wait_s), out=longest_s)
        latest_s[:], slack_s[:] = arrival_s + longest_s, longest_s - fcfs_wait_s

    def due(self, now: float, token_s: float) -> NDArray[np.intp]:
        """Rows of the requests that have waited or were overtaken as long as they may."""
        used = len(self._states)
        # To the left of a row: work of the requests before it, and work that has not overtaken it.
        np.cumsum(self._table[: self._ORDER, :used], axis=1, out=self._sums[:, 1 : used + 1])
        ahead_s, not_overtaken_s = self._sums[:, :used] * token_s
        overtaken_s = float(self._sums[1, used]) * token_s - not_overtaken_s
        is_due = overtaken_s >= self._table[self._SLACK, :used]
        is_due |= self._table[self._LATEST, :used] - ahead_s <= now
        return np.flatnonzero(is_due)

    def orders(self, rows: NDArray[np.intp]) -> FloatArray:
        """Arrival numbers of these rows."""
        orders: FloatArray = self._table[self._ORDER, rows]
        return orders

    def states(self, rows: NDArray[np.intp]) -> list[RequestState]:
        """The waiting requests of these rows."""
        return [state for row in rows.tolist() if (state := self._states[row]) is not None]

    def _compact(self) -> None:
        """Only the rows of waiting requests stay, in an array for twice as many."""
        rows = np.array([row for row, state in enumerate(self._states) if state is not None], int)
        size = max(64, 2 * len(rows))
        table, overtaken = np.zeros((7, size)), self._table[self._OVERTAKEN, : len(self._states)]
        table[:, : len(rows)] = self._table[:, rows]
        # The sum from a row on stays what it was.
        from_row = np.cumsum(overtaken[::-1])[::-1][rows]
        table[self._OVERTAKEN, : len(rows)] = from_row - np.append(from_row[1:], 0.0)
        states = self.states(rows)
        self._table, self._sums, self._states = table, np.zeros((2, size + 1)), [*states]
        self._total_work = float(table[self._WORK].sum())
        self._rows = {state.request_id: row for row, state in enumerate(states)}


class _Load:
    """Arriving work over what the engine can do meanwhile.

    Its standard error is that of the mean over blocks of equal time, since arrivals come in bursts. Blocks become twice
    as long whenever there are `_NUM_BLOCKS` of them, until `_BLOCK_REQUESTS` can be served in one; then the oldest goes.
    """

    def __init__(self) -> None:
        self.last_arrival_s: float | None = None
        self._seconds = self._work = 0.0
        self._blocks: list[float] = []
        self._block_s = self._block_begin_s = 0.0

    def arrived(self, now: float, work: float, service_s: float) -> None:
        """A request of so much work, in tokens; the engine is busy with the mean request for `service_s` seconds."""
        gap_s = 0.0 if self.last_arrival_s is None else now - self.last_arrival_s
        if not self._blocks or gap_s > _IDLE_REQUESTS * service_s:
            self._seconds = self._work = gap_s = 0.0
            self._blocks, self._block_begin_s = [0.0], now
            self._block_s = _FIRST_BLOCK_REQUESTS * service_s
        self.last_arrival_s = now
        self._seconds, self._work = _LOAD_FADE * self._seconds + gap_s, _LOAD_FADE * self._work + work
        while now >= self._block_begin_s + self._block_s:
            self._block_begin_s += self._block_s
            if len(self._blocks) == _NUM_BLOCKS and self._block_s < _BLOCK_REQUESTS * service_s:
                pairs = zip(self._blocks[::2], self._blocks[1::2], strict=True)
                self._blocks, self._block_s = [sum(pair) for pair in pairs], 2.0 * self._block_s
            self._blocks = [*self._blocks[1 - _NUM_BLOCKS :], 0.0]
        self._blocks[-1] += work

    def grow(self, work: float) -> None:
        """A request that arrived has so much more work than expected, in tokens."""
        self._work += work
        self._blocks[-1] += work

    def lower_bound(self, token_s: float, service_s: float) -> float:
        """The load less its standard error; 0 with too few blocks for that.

        Args:
            token_s: Seconds of the engine per token of work.
            service_s: Seconds of the engine for the mean request.
        """
        ended = self._blocks[:-1]
        if len(ended) < 4:
            return 0.0
        prior_s = _PRIOR_ARRIVALS * service_s
        error_s = (
            float(np.std(ended, ddof=1)) / math.sqrt(len(ended)) / self._block_s * self._seconds * token_s
        )
        return (self._work * token_s + prior_s - error_s) / (self._seconds + prior_s)


class _RunningWork:
    """The running requests, as columns of an array: when they were admitted, in seconds, and their expected work."""

    def __init__(self) -> None:
        self._table = np.zeros((2, 64))
        self._rows: dict[str, int] = {}
        self._free = list(range(64))

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, request_id: str, now: float, work: float) -> None:
        if not self._free:
            size = self._table.shape[1]
            self._table = np.concatenate([self._table, np.zeros((2, size))], axis=1)
            self._free = list(range(size, 2 * size))
        row = self._rows[request_id] = self._free.pop()
        self._table[:, row] = now, work

    def revise(self, request_id: str, work: float) -> float:
        """Another expectation of its work, if it runs; returns by how much it has grown."""
        row = self._rows.get(request_id)
        if row is None:
            return 0.0
        growth = work - float(self._table[1, row])
        self._table[1, row] = work
        return growth

    def remove(self, request_id: str) -> float | None:
        """Its expected work; None if it does not run."""
        row = self._rows.pop(request_id, None)
        if row is None:
            return None
        self._free.append(row)
        work, self._table[1, row] = float(self._table[1, row]), 0.0
        return work

    def remaining(self, now: float, step_s: float) -> float:
        """Expected work that is left of all."""
        admitted_s, work = self._table
        return float(np.maximum(work - (now - admitted_s) / step_s, _MIN_REMAINING * work).sum())


class _ServiceRate:
    """Seconds of the engine per token of work, while requests wait, and of a running request per output token."""

    def __init__(self) -> None:
        # Of one short request: an engine may be ten times slower, and its load must not seem that low for long.
        self._busy_s, self._busy_work = 0.04, 100.0
        self._decode_s, self._decode_tokens = 1.0, 50.0
        self.mean_work = 0.0
        self._last_s, self._has_queue = 0.0, False

    @property
    def token_s(self) -> float:
        return self._busy_s / self._busy_work

    @property
    def step_s(self) -> float:
        return self._decode_s / self._decode_tokens

    def advance(self, now: float, has_queue: bool) -> None:
        """Something has happened; whether requests wait from now on."""
        # An aborted request had its last token before the latest event.
        now = max(now, self._last_s)
        if self._has_queue:
            self._busy_s += now - self._last_s
        self._last_s, self._has_queue = now, has_queue

    def finished(self, state: RequestState, work: float) -> None:
        """A request has ended; half of the busy time is forgotten after some 1,400 of them."""
        self._busy_s, self._busy_work = self._busy_s * _RATE_FADE, self._busy_work * _RATE_FADE
        if self._has_queue:
            self._busy_work += work
        self.mean_work = work if self.mean_work == 0.0 else 0.99 * self.mean_work + 0.01 * work
        if state.num_output_tokens > 1 and state.first_token_s is not None and state.last_token_s is not None:
            self._decode_s = 0.99 * self._decode_s + state.last_token_s - state.first_token_s
            self._decode_tokens = 0.99 * self._decode_tokens + state.num_output_tokens - 1


def _are_in(values: FloatArray, others: FloatArray) -> NDArray[np.bool_]:
    """Which of the values [N], ascending, are among the others, ascending."""
    if not len(others):
        return np.zeros(len(values), dtype=bool)
    are_equal: NDArray[np.bool_] = others.take(others.searchsorted(values), mode="clip") == values
    return are_equal


@dataclass(kw_only=True, slots=True)
class BoundedShortest(Policy):
    """Shortest predicted length first; a request that has waited as long as it may goes in front, by arrival.

    key = min(exp(mu), M);   in front from the time on when   o t >= L - W   or   a + L - c t <= now
    L = min( r max(W, g Q),   r max(W + S, h R) - S )

    | symbol | meaning | unit |
    | --- | --- | --- |
    | exp(mu), M | median of the predicted length; max_tokens | tokens |
    | a, W | arrival; the wait that first come, first served would give the request, estimated when it arrives | s |
    | S | how long the request runs: its expected work at the measured time per output token | s |
    | Q, R | P99 of W and of W + S over the last `window` arrivals | s |
    | o | work of later arrivals that started before the request | tokens |
    | c | work of the waiting requests that arrived before it | tokens |
    | t | engine time per token of work while requests wait, measured | s |
    | r, g, h | 1.05, 0.9, 0.8; under overload, where the load less its standard error is 1.05 or more, `ratio`, 1, 1 | - |
    | ratio | 1.25: how much longer than L / r a request may wait | - |
    | prompt_weight | work of a prompt token; an output token is 1 | tokens |

    The promise: every request starts within `ratio` times the wait that it would have had under first come, first served, or
    the P99 of those waits if that is longer, and ends within `ratio` times the latency that it would have had, or the P99 of
    those, up to errors of the estimates. No request is exempt, and none that runs is paused.

    Work is E[min(X, M)], corrected by how long outputs of such a prediction have been. W is the work that waits when the
    request arrives, and by how much the running requests have more or less left than on average: both orders have the same
    total. Reordering does not change t, so W needs no second engine. Load is the arriving work over what the engine does in
    the same time; its standard error tells bursts from overload. Without predictions, or while they rank the finished
    requests no better than chance, the order is that of arrival.

    Raises:
        InputError: A parameter is outside its range.
    """

    key_changes = "on_event"
    running_keys = "on_event"
    progress = "unused"
    needs_queue = True
    inputs = frozenset({"length"})

    ratio: float = 1.25
    prompt_weight: float = 0.1
    window: float = 2000
    _waiting: _ArrivalOrder = field(default_factory=_ArrivalOrder, init=False, repr=False)
    _due: dict[int, RequestState] = field(default_factory=dict, init=False, repr=False)
    _due_orders: FloatArray = field(default_factory=lambda: np.empty(0), init=False, repr=False)
    _preempted: set[str] = field(default_factory=set, init=False, repr=False)
    _running: _RunningWork = field(default_factory=_RunningWork, init=False, repr=False)
    _rate: _ServiceRate = field(default_factory=_ServiceRate, init=False, repr=False)
    _bias: PredictionBias = field(default_factory=PredictionBias, init=False, repr=False)
    _ranked: deque[tuple[float, float]] = field(
        default_factory=lambda: deque(maxlen=_NUM_RANKED), init=False, repr=False
    )
    _ranks: bool = field(default=True, init=False, repr=False)
    _num_unranked: int = field(default=0, init=False, repr=False)
    _fcfs_waits: deque[float] = field(init=False, repr=False)
    _fcfs_latencies: deque[float] = field(init=False, repr=False)
    _num_new: int = field(default=0, init=False, repr=False)
    _load: _Load = field(default_factory=_Load, init=False, repr=False)
    _sum_work: float = field(default=256.0, init=False, repr=False)
    _num_work: float = field(default=1.0, init=False, repr=False)
    _remaining_s: float = field(default=0.0, init=False, repr=False)
    _running_s: float = field(default=0.0, init=False, repr=False)
    _max_num_seqs: int = field(default=0, init=False, repr=False)
    _all_changed: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        check_ranges(self, ratio=(1.0, FINITE), prompt_weight=(POSITIVE, FINITE), window=(100, 1_000_000))
        self._fcfs_waits = deque(maxlen=int(self.window))
        self._fcfs_latencies = deque(maxlen=int(self.window))

    def on_arrival(self, state: RequestState, now: float) -> None:
        work = self._work(state)
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
        if state.prediction is None:
            return
        work = self._work(state)
        self._sum_work, self._num_work = _WORK_FADE * self._sum_work + work, _WORK_FADE * self._num_work + 1.0
        fcfs_wait_s = self._waiting.fcfs_wait_s(state)
        if fcfs_wait_s is not None:
            self._load.grow(self._waiting.revise(state, work))
            self._fcfs_latencies.append(fcfs_wait_s + work * self._rate.step_s)
        else:  # it was admitted before
            growth = self._running.revise(state.request_id, work)
            self._load.grow(growth)
            self._waiting.overtake(state, growth)

    def on_pressure(self, num_waiting: int, max_num_seqs: int) -> bool:
        self._max_num_seqs = max_num_seqs
        changed, self._all_changed = self._all_changed, False
        return changed

    def on_admit(self, state: RequestState, now: float) -> None:
        work = self._work(state)
        fcfs_wait_s = self._waiting.fcfs_wait_s(state)
        if fcfs_wait_s is not None:
            self._waiting.remove(state)
            self._waiting.overtake(state, work)
            if state.prediction is None:
                self._fcfs_latencies.append(fcfs_wait_s + work * self._rate.step_s)
        self._rate.advance(now, len(self._waiting) > 0)
        self._due.pop(state.order, None)
        self._preempted.discard(state.request_id)
        self._running.add(state.request_id, now, work)

    def on_preempt(self, state: RequestState, now: float) -> None:
        self._running.remove(state.request_id)
        self._preempted.add(state.request_id)

    def on_finish(self, state: RequestState) -> None:
        self._waiting.remove(state)
        self._due.pop(state.order, None)
        self._preempted.discard(state.request_id)
        expected = self._running.remove(state.request_id)
        if expected is None or state.last_token_s is None:
            return
        self._rate.advance(state.last_token_s, len(self._waiting) > 0)
        work = self._prompt_work(state) + state.num_output_tokens
        self._rate.finished(state, work)
        self._waiting.overtake(state, work - expected)
        if state.prediction is not None:
            self._bias.learn(risk_tokens(state)[0], state.num_output_tokens)
            self._rank(state)

    def take_changed(self, now: float) -> Collection[RequestState]:
        if not len(self._waiting):
            return ()
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
        return median_tokens(state) if self._ranks else float(state.order)

    def _prompt_work(self, state: RequestState) -> float:
        return self.prompt_weight * (state.request.prompt_tokens - state.request.cached_prefix_tokens)

    def _work(self, state: RequestState) -> float:
        """Expected tokens of work of the whole request; without a usable prediction those of the mean request."""
        if not self._ranks:
            return self._rate.mean_work
        if state.prediction is None:
            return min(self._sum_work / self._num_work, self._prompt_work(state) + state.request.max_tokens)
        expected = risk_tokens(state)[0]
        expected *= self._bias.ratio(PredictionBias.group(expected))
        return self._prompt_work(state) + min(expected, state.request.max_tokens)

    def _mean_service_s(self) -> float:
        """How long the engine is busy with a request."""
        return self._sum_work / self._num_work * self._rate.token_s

    def _fcfs_wait_s(self, now: float) -> float:
        """W of a request that arrives now; what runs until then counts in the average of what running requests have left."""
        remaining, num_running = self._running.remaining(now, self._rate.step_s), len(self._running)
        if self._load.last_arrival_s is not None:
            self._remaining_s += remaining * (now - self._load.last_arrival_s)
            self._running_s += num_running * (now - self._load.last_arrival_s)
        work = self._waiting.work_behind(max(self._max_num_seqs - num_running, 0))
        if work <= 0.0:
            return 0.0
        if self._running_s > 0.0:
            work += remaining - num_running * self._remaining_s / self._running_s
        return max(work, 0.0) * self._rate.token_s

    def _refresh_bound(self) -> None:
        """r, g Q and h R."""
        waits = np.fromiter(self._fcfs_waits, float)
        quantile_s = float(np.quantile(waits, 0.99))
        # Where the queue only grows, waits are uniform between 0 and their largest, so their mean is half of that.
        is_common = min(1.0, 2.0 * float(waits.mean()) / quantile_s) if quantile_s > 0 else 0.0
        load = self._load.lower_bound(self._rate.token_s, self._mean_service_s())
        overload = min(max((load - 1.0) / _OVERLOAD, 0.0), is_common)
        latencies = np.fromiter(self._fcfs_latencies or [0.0], float)

        def blend(normal: float, overloaded: float) -> float:
            return normal + (overloaded - normal) * overload

        self._waiting.set_bound(
            ratio=blend(min(_WAIT_RATIO, self.ratio), self.ratio),
            least_wait_s=blend(_WAIT_FRACTION, 1.0) * quantile_s,
            least_end_s=blend(_LATENCY_FRACTION, 1.0) * float(np.quantile(latencies, 0.99)),
            step_s=self._rate.step_s,
        )

    def _rank(self, state: RequestState) -> None:
        """Whether predictions rank requests is looked at again with the latest ones that have ended."""
        self._ranked.append((median_tokens(state), float(state.num_output_tokens)))
        self._num_unranked += 1
        if self._num_unranked < _REFRESH_EVERY:
            return
        self._num_unranked = 0
        predicted, true = np.array(self._ranked).T
        ranks = (kendall_tau(predicted, true) or 0.0) > _MIN_TAU
        if ranks == self._ranks:
            return
        self._ranks, self._all_changed = ranks, True
        if not ranks:  # those that wait are those predicted long, so that the waits have been overestimated
            factor = self._waiting.revise_all(self._rate.mean_work)
            self._fcfs_waits = deque(
                (factor * wait_s for wait_s in self._fcfs_waits), self._fcfs_waits.maxlen
            )
            self._fcfs_latencies.clear()
            self._refresh_bound()
