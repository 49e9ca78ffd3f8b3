"""What the latency would be now under first come, first served: a fluid FCFS queue fed with the same work.

A policy that reorders requests does as much work as FCFS would. So FCFS needs no second engine: its queue serves, in order of
arrival, as much work as the real engine has done, and both have the same work left at any time. As the virtual service of Friedman &
Henderson 2003 ("Fairness and efficiency in web server protocols", SIGMETRICS), with FCFS in place of processor sharing.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from scheduler_core.request import RequestState


class VirtualFcfs:
    """Latencies of the virtual queue. Work is in weighted tokens: what is told to `served` adds up to what is told to
    `finished`.

    A request's work is its predicted one until it finishes, then its true one; a virtual departure before that is
    corrected by the difference. Memory: the requests virtually waiting, and a window of latencies.

    Args:
        window: Virtual departures looked at for `quantile_s`.
        refresh_every: Departures between two computations of the quantile.
        quantile: Of the window's latencies, in (0, 1).
    """

    __slots__ = (
        "_credit",
        "_departed",
        "_ended",
        "_latencies",
        "_new",
        "_quantile",
        "_queue",
        "_refresh_every",
        "_total",
        "_work",
        "quantile_s",
    )

    def __init__(self, *, window: int = 500, refresh_every: int = 25, quantile: float = 0.99) -> None:
        self._queue: deque[tuple[str, float]] = deque()
        self._work: dict[str, float] = {}
        self._departed: dict[str, float] = {}
        self._ended: set[str] = set()
        self._credit = 0.0
        self._total = 0.0
        self._latencies: deque[float] = deque(maxlen=window)
        self._refresh_every = refresh_every
        self._new = 0
        self._quantile = quantile
        self.quantile_s: float | None = None

    def arrived(self, state: RequestState, work: float) -> None:
        """A request joins the virtual queue with this much work, > 0."""
        self._queue.append((state.request_id, state.request.arrival_s))
        self._work[state.request_id] = work
        self._total += work

    def predicted(self, state: RequestState, work: float) -> None:
        """A better idea of the request's work."""
        if state.request_id in self._work:
            self._change(state.request_id, work)

    def finished(self, state: RequestState, work: float) -> None:
        """The real request has ended, or was aborted; it took this much work."""
        if state.request_id in self._work:
            self._change(state.request_id, work)
            self._ended.add(state.request_id)
        else:
            self._credit -= work - self._departed.pop(state.request_id, work)

    def served(self, work: float) -> None:
        """The real engine has done work."""
        self._credit += work

    def advance(self, now: float) -> None:
        """Lets depart whom the work done so far serves."""
        queue, work = self._queue, self._work
        while queue and self._credit >= work[queue[0][0]]:
            request_id, arrival_s = queue.popleft()
            needed = work.pop(request_id)
            self._credit -= needed
            self._total -= needed
            if request_id not in self._ended:
                self._departed[request_id] = needed
            self._ended.discard(request_id)
            self._latencies.append(now - arrival_s)
            self._new += 1
        if not queue:
            self._credit, self._total = min(self._credit, 0.0), 0.0
        if self._new >= self._refresh_every:
            self._new = 0
            self.quantile_s = float(np.quantile(np.fromiter(self._latencies, float), self._quantile))

    @property
    def backlog(self) -> float:
        """Work left, in both queues; at the engine's speed the latency of a virtual request that arrives now."""
        return max(self._total - self._credit, 0.0)

    def _change(self, request_id: str, work: float) -> None:
        self._total += work - self._work[request_id]
        self._work[request_id] = work
