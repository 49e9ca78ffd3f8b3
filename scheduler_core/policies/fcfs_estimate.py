"""Estimates for first come, first served on the same engine: waits of requests, engine speed, and load."""

import math
from collections.abc import Iterator
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from scheduler_core.request import RequestState
from scheduler_core.statistics import FloatArray

#: Requests at load 1 in the prior of the load, and length of a gap (in mean requests) that resets it.
_PRIOR_ARRIVALS, _IDLE_REQUESTS = 100, 100

#: Blocks for the standard error of the load: maximum number; initial and final length in mean requests.
_NUM_BLOCKS, _FIRST_BLOCK_REQUESTS, _BLOCK_REQUESTS = 32, 20, 100

#: Decay factors of the weights in the load (per arrival) and in the speed (per finished request).
_LOAD_FADE, _RATE_FADE = 0.9998, 0.9995

#: Minimum remaining fraction of the expected work of a running request.
_MIN_REMAINING = 0.25


class RecentValues:
    """The latest `window` values of a quantity."""

    def __init__(self, window: int) -> None:
        self._values = np.zeros(window)
        self._num = 0

    def __len__(self) -> int:
        return min(self._num, len(self._values))

    def append(self, value: float) -> None:
        self._values[self._num % len(self._values)] = value
        self._num += 1

    def clear(self) -> None:
        self._num = 0

    def scale(self, factor: float) -> None:
        self._values *= factor

    @property
    def mean(self) -> float:
        """Mean of the values; 0 without values."""
        return float(self._values[: len(self)].mean()) if self._num else 0.0

    def quantile(self, level: float) -> float:
        """Quantile with linear interpolation, like `numpy.quantile`; 0 without values."""
        if not self._num:
            return 0.0
        position = level * (len(self) - 1)
        low = int(position)
        high = min(low + 1, len(self) - 1)
        ordered = np.partition(self._values[: len(self)], (low, high))
        below, above = float(ordered[low]), float(ordered[high])
        return below + (above - below) * (position - low)


class ArrivalOrder:
    """The waiting requests in order of arrival, as an array; requests that have left keep an entry that is never due.

    Rows of the array: work in tokens; work of later arrivals that have overtaken the requests up to this one; arrival
    number; arrival and wait under first come, first served, in seconds; due time if no request waits before
    it; seconds of work by which it may be overtaken.
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

    def __iter__(self) -> Iterator[RequestState]:
        return (state for state in self._states if state is not None)

    def add(self, state: RequestState, fcfs_wait_s: float, work: float) -> None:
        if len(self._states) == self._table.shape[1]:
            self._compact()
        row = self._rows[state.request_id] = len(self._states)
        self._states.append(state)
        self._table[:, row] = work, 0.0, state.order, state.request.arrival_s, fcfs_wait_s, 0.0, 0.0
        self._total_work += work
        self._bound_row(row)

    def revise(self, state: RequestState, work: float) -> float:
        """Updates the expected work of a request, if it waits; returns the increase."""
        row = self._rows.get(state.request_id)
        if row is None:
            return 0.0
        growth = work - float(self._table[self._WORK, row])
        self._table[self._WORK, row] = work
        self._total_work += growth
        self._bound_row(row)
        return growth

    def revise_all(self, work: float) -> float:
        """Sets the expected work of all requests. Scales all waits by the returned change of the total, at most 1."""
        column = self._table[self._WORK, : len(self._states)]
        before = float(column.sum())
        column[column > 0] = work
        self._total_work = float(column.sum())
        factor = min(1.0, self._total_work / before) if before > 0 else 1.0
        self._table[self._FCFS_WAIT, : len(self._states)] *= factor
        return factor

    def get(self, state: RequestState) -> tuple[float, float] | None:
        """(work, wait under first come, first served in seconds) of a request; None if it does not wait."""
        row = self._rows.get(state.request_id)
        if row is None:
            return None
        return float(self._table[self._WORK, row]), float(self._table[self._FCFS_WAIT, row])

    def remove(self, state: RequestState) -> None:
        """Removes a request, if it waits."""
        row = self._rows.pop(state.request_id, None)
        if row is None:
            return
        self._states[row], table = None, self._table
        self._total_work -= float(table[self._WORK, row])
        table[self._WORK, row], table[self._FCFS_WAIT, row] = 0.0, -np.inf
        table[self._ARRIVAL, row] = table[self._LATEST, row] = table[self._SLACK, row] = np.inf

    def overtake(self, state: RequestState, work: float) -> None:
        """Adds work of this request by which it has overtaken all requests that arrived before it."""
        row = self._table[self._ORDER, : len(self._states)].searchsorted(state.order)
        if row > 0:
            self._table[self._OVERTAKEN, row - 1] += work

    def work_behind(self, num_free: int) -> float:
        """Total work of the requests except the first `num_free`."""
        if num_free >= len(self._rows):
            return 0.0
        first = list(islice(self._rows.values(), num_free))
        return self._total_work - float(self._table[self._WORK, first].sum()) if first else self._total_work

    def set_bound(self, ratio: float, least_wait_s: float, least_end_s: float, step_s: float) -> None:
        """Sets the bounds of wait and latency, relative to first come, first served.

        Args:
            ratio: Maximum ratio of both.
            least_wait_s: Lower limit of the reference wait, in seconds.
            least_end_s: Lower limit of the reference latency, in seconds.
            step_s: Seconds of a running request per token of work.
        """
        self._bound = ratio, least_wait_s, least_end_s, step_s
        work, _, _, arrival_s, fcfs_wait_s, latest_s, slack_s = self._table[:, : len(self._states)]
        service_s = work * step_s
        longest_s = ratio * np.maximum(fcfs_wait_s + service_s, least_end_s) - service_s
        np.minimum(longest_s, ratio * np.maximum(fcfs_wait_s, least_wait_s), out=longest_s)
        latest_s[:], slack_s[:] = arrival_s + longest_s, longest_s - fcfs_wait_s

    def _bound_row(self, row: int) -> None:
        """Applies the bounds to one request."""
        ratio, least_wait_s, least_end_s, step_s = self._bound
        work, _, _, arrival_s, fcfs_wait_s, *_ = self._table[:, row].tolist()
        service_s = work * step_s
        longest_s = min(
            ratio * max(fcfs_wait_s + service_s, least_end_s) - service_s,
            ratio * max(fcfs_wait_s, least_wait_s),
        )
        self._table[self._LATEST :, row] = arrival_s + longest_s, longest_s - fcfs_wait_s

    def due(self, now: float, token_s: float) -> NDArray[np.intp]:
        """Indices of the requests that have reached their maximum wait or maximum overtaking work."""
        used = len(self._states)
        # Prefix sums: work of the requests before each one, and work that has not overtaken it.
        np.cumsum(self._table[: self._ORDER, :used], axis=1, out=self._sums[:, 1 : used + 1])
        ahead_s, not_overtaken_s = self._sums[:, :used] * token_s
        overtaken_s = float(self._sums[1, used]) * token_s - not_overtaken_s
        is_due = overtaken_s >= self._table[self._SLACK, :used]
        is_due |= self._table[self._LATEST, :used] - ahead_s <= now
        return np.flatnonzero(is_due)

    def orders(self, rows: NDArray[np.intp]) -> FloatArray:
        """Arrival numbers of these entries."""
        orders: FloatArray = self._table[self._ORDER, rows]
        return orders

    def states(self, rows: NDArray[np.intp]) -> list[RequestState]:
        """The waiting requests of these entries."""
        return [state for row in rows.tolist() if (state := self._states[row]) is not None]

    def _compact(self) -> None:
        """Drops the entries of requests that have left; allocates an array with space for some more."""
        rows = np.array([row for row, state in enumerate(self._states) if state is not None], int)
        size = max(64, len(rows) + len(rows) // 4)
        table, overtaken = np.zeros((7, size)), self._table[self._OVERTAKEN, : len(self._states)]
        table[:, : len(rows)] = self._table[:, rows]
        # Keeps the suffix sums of the remaining entries.
        from_row = np.cumsum(overtaken[::-1])[::-1][rows]
        table[self._OVERTAKEN, : len(rows)] = from_row - np.append(from_row[1:], 0.0)
        states = self.states(rows)
        self._table, self._sums, self._states = table, np.zeros((2, size + 1)), [*states]
        self._total_work = float(table[self._WORK].sum())
        self._rows = {state.request_id: row for row, state in enumerate(states)}


class Load:
    """Load: arriving work divided by the work that the engine can do meanwhile.

    The standard error is computed from blocks of equal time, because arrivals are bursty. Whenever there are `_NUM_BLOCKS`
    blocks, their length is doubled, until `_BLOCK_REQUESTS` can be served in one; then the oldest block is dropped.
    """

    def __init__(self) -> None:
        self.last_arrival_s: float | None = None
        self._seconds = self._work = 0.0
        self._blocks: list[float] = []
        self._block_s = self._block_begin_s = 0.0

    def arrived(self, now: float, work: float, service_s: float) -> None:
        """Adds an arrival with its work in tokens; `service_s` is the mean engine time per request."""
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
        """Adds work in tokens to that of a previous arrival, after a new estimate."""
        self._work += work
        self._blocks[-1] += work

    def lower_bound(self, token_s: float, service_s: float) -> float:
        """The load less its standard error; 0 if there are too few blocks.

        `token_s` and `service_s` are the engine time per token of work and per mean request, in seconds.
        """
        ended = self._blocks[:-1]
        if len(ended) < 4:
            return 0.0
        prior_s = _PRIOR_ARRIVALS * service_s
        error = float(np.std(ended, ddof=1)) / math.sqrt(len(ended)) / self._block_s
        error_s = error * self._seconds * token_s
        return (self._work * token_s + prior_s - error_s) / (self._seconds + prior_s)


class RunningWork:
    """The running requests as an array: rows are the admission time in seconds, and the expected work."""

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
        """Updates the expected work of a request, if it runs; returns the increase."""
        row = self._rows.get(request_id)
        if row is None:
            return 0.0
        growth = work - float(self._table[1, row])
        self._table[1, row] = work
        return growth

    def remove(self, request_id: str) -> float | None:
        """Removes a request and returns its expected work; None if it does not run."""
        row = self._rows.pop(request_id, None)
        if row is None:
            return None
        self._free.append(row)
        work, self._table[1, row] = float(self._table[1, row]), 0.0
        return work

    def remaining(self, now: float, step_s: float) -> float:
        """Expected remaining work of all running requests."""
        admitted_s, work = self._table
        return float(np.maximum(work - (now - admitted_s) / step_s, _MIN_REMAINING * work).sum())


class ServiceRate:
    """Engine time per unit of work while requests wait, and running time of a request per unit.

    The unit is an output token, and the running time that of its decode; with `in_seconds` an expected second of the engine,
    and the running time that of the whole request.
    """

    def __init__(self, *, in_seconds: bool = False) -> None:
        self._in_seconds = in_seconds
        # Prior of one short request, so that the estimate for a much slower engine adapts quickly; seconds are known.
        self._busy_s, self._busy_work = (30.0, 30.0) if in_seconds else (0.04, 100.0)
        self._decode_s, self._decode_tokens = (10.0, 1.0) if in_seconds else (1.0, 50.0)
        self.mean_work = 0.0
        self._last_s, self._has_queue = 0.0, False

    @property
    def token_s(self) -> float:
        return self._busy_s / self._busy_work

    @property
    def step_s(self) -> float:
        return self._decode_s / self._decode_tokens

    def advance(self, now: float, has_queue: bool) -> None:
        """Called at every event; `has_queue` is whether requests wait from now on."""
        # The last token of an aborted request may be older than the latest event.
        now = max(now, self._last_s)
        if self._has_queue:
            self._busy_s += now - self._last_s
        self._last_s, self._has_queue = now, has_queue

    def finished(self, state: RequestState, work: float) -> None:
        """Adds a finished request; the half-life of the busy time is about 1,400 requests."""
        self._busy_s, self._busy_work = self._busy_s * _RATE_FADE, self._busy_work * _RATE_FADE
        if self._has_queue:
            self._busy_work += work
        self.mean_work = work if self.mean_work == 0.0 else 0.99 * self.mean_work + 0.01 * work
        if state.last_token_s is None:
            return
        if self._in_seconds and state.first_scheduled_s is not None:
            self._decode_s = 0.99 * self._decode_s + state.last_token_s - state.first_scheduled_s
            self._decode_tokens = 0.99 * self._decode_tokens + work
        elif not self._in_seconds and state.num_output_tokens > 1 and state.first_token_s is not None:
            self._decode_s = 0.99 * self._decode_s + state.last_token_s - state.first_token_s
            self._decode_tokens = 0.99 * self._decode_tokens + state.num_output_tokens - 1
