"""External events of a simulated engine: arrivals, next turns of conversations, predictions."""

import heapq
import math
from dataclasses import replace
from typing import NamedTuple

from scheduler_core.simulator.trace import Trace, TraceRequest, waits_for
from scheduler_core.simulator.trace_predictions import Predictions


class TraceEvent(NamedTuple):
    """The arrival of a request or of its prediction; `request` has its actual arrival time."""

    time_s: float
    request: TraceRequest
    is_arrival: bool


class EventSource:
    """All arrivals and predictions in order of time; some arrivals depend on the end of other requests.

    At equal times, arrivals precede predictions; both are in the order of the trace.

    - A request that waits for the ends of others (see `waits_for`) arrives its think time after the last of them, but not
      before its `arrival_s`. A refused request ends at its arrival.
    - A prediction arrives `latency_s` after its request.
    - An engine gets a request `delay_s` after its arrival.
    """

    def __init__(self, trace: Trace, predictions: Predictions, delay_s: float = 0.0) -> None:
        self._delay_s = delay_s
        self._predicted, self._delays_s = predictions.by_id, predictions.latency_s
        rows = sorted(trace.requests, key=lambda row: row.arrival_s)
        waits = waits_for(rows)
        #: Number of ends that a request still waits for, and the requests that wait for each end.
        self._num_ends = {name: len(others) for name, others in waits.items()}
        self._waiting: dict[str, list[TraceRequest]] = {}
        if waits:
            for row in rows:
                for other in waits.get(row.request_id, ()):
                    self._waiting.setdefault(other, []).append(row)
            rows = [row for row in rows if row.request_id not in waits]
        self.start_s = rows[0].arrival_s
        rows.reverse()
        #: Future arrivals, the next one last.
        self._rows = rows
        #: (time, whether it is a prediction, running number, request).
        self._heap: list[tuple[float, bool, int, TraceRequest]] = []
        self._num_pushed = 0
        #: Time of the next event in seconds; infinite if there is none for now.
        self.next_s = self.start_s + delay_s

    def _due_s(self) -> float:
        due = self._heap[0][0] if self._heap else math.inf
        if self._rows:
            return min(due, self._rows[-1].arrival_s + self._delay_s)
        return due

    def pop(self) -> TraceEvent:
        """Removes and returns the next event, which must exist."""
        rows, heap = self._rows, self._heap
        if rows and (not heap or (rows[-1].arrival_s + self._delay_s, False) <= heap[0][:2]):
            row = rows.pop()
            time_s, is_arrival = row.arrival_s + self._delay_s, True
        else:
            time_s, is_prediction, _, row = heapq.heappop(heap)
            is_arrival = not is_prediction
        if is_arrival and row.request_id in self._predicted:
            self._push(time_s + self._delays_s.get(row.request_id, 0.0), True, row)
        self.next_s = self._due_s()
        return TraceEvent(time_s, row, is_arrival)

    def end_request(self, row: TraceRequest, now: float) -> None:
        """Called when a request finished or was refused; schedules those that waited only for it."""
        for waiting in self._waiting.pop(row.request_id, ()):
            self._num_ends[waiting.request_id] -= 1
            if not self._num_ends[waiting.request_id]:
                time_s = max(waiting.arrival_s, now + (waiting.think_time_s or 0.0))
                moved = waiting if time_s == waiting.arrival_s else replace(waiting, arrival_s=time_s)
                self._push(time_s + self._delay_s, False, moved)

    def send(self, row: TraceRequest) -> None:
        """Schedules the arrival of a request that is sent again, at its `arrival_s`."""
        self._push(row.arrival_s + self._delay_s, False, row)

    def _push(self, time_s: float, is_prediction: bool, row: TraceRequest) -> None:
        self._num_pushed += 1
        heapq.heappush(self._heap, (time_s, is_prediction, self._num_pushed, row))
        if time_s < self.next_s:
            self.next_s = time_s
