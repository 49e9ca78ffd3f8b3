"""External events of a simulated engine: arrivals, next turns of conversations, predictions."""

import heapq
import math
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from scheduler_core.simulator.trace import Trace, TraceRequest
from scheduler_core.simulator.trace_predictions import Predictions


class TraceEvent(NamedTuple):
    """The arrival of a request or of its prediction; `request` has its actual arrival time."""

    time_s: float
    request: TraceRequest
    is_arrival: bool


class EventSource:
    """All arrivals and predictions in order of time; some arrivals depend on the end of other requests.

    At equal times, arrivals precede predictions; both are in the order of the trace.

    - A turn of a conversation with a think time arrives that long after the end of the previous turn, but not before its
      `arrival_s`. A refused turn ends at its arrival.
    - A prediction arrives `latency_s` after its request.
    """

    def __init__(self, trace: Trace, predictions: Predictions) -> None:
        self._predicted, self._delays_s = predictions.by_id, predictions.latency_s
        rows = sorted(trace.requests, key=lambda row: row.arrival_s)
        #: Next turn of a conversation, by the id of the turn whose end it waits for.
        self._next_turns = _next_turns(rows)
        later = {row.request_id for row in self._next_turns.values()}
        rows = [row for row in rows if row.request_id not in later] if later else rows
        self.start_s = rows[0].arrival_s
        rows.reverse()
        #: Future arrivals, the next one last.
        self._rows = rows
        #: (time, whether it is a prediction, running number, request).
        self._heap: list[tuple[float, bool, int, TraceRequest]] = []
        self._num_pushed = 0
        #: Time of the next event in seconds; infinite if there is none for now.
        self.next_s = self.start_s

    def _due_s(self) -> float:
        due = self._heap[0][0] if self._heap else math.inf
        if self._rows:
            return min(due, self._rows[-1].arrival_s)
        return due

    def pop(self) -> TraceEvent:
        """Removes and returns the next event, which must exist."""
        rows, heap = self._rows, self._heap
        if rows and (not heap or (rows[-1].arrival_s, False) <= heap[0][:2]):
            row = rows.pop()
            time_s, is_arrival = row.arrival_s, True
        else:
            time_s, is_prediction, _, row = heapq.heappop(heap)
            is_arrival = not is_prediction
        if is_arrival and row.request_id in self._predicted:
            self._push(time_s + self._delays_s.get(row.request_id, 0.0), True, row)
        self.next_s = self._due_s()
        return TraceEvent(time_s, row, is_arrival)

    def end_request(self, row: TraceRequest, now: float) -> None:
        """Called when a request finished or was refused; schedules the next turn of its conversation."""
        turn = self._next_turns.pop(row.request_id, None)
        if turn is not None:
            assert turn.think_time_s is not None
            time_s = max(turn.arrival_s, now + turn.think_time_s)
            self._push(time_s, False, replace(turn, arrival_s=time_s) if time_s != turn.arrival_s else turn)

    def _push(self, time_s: float, is_prediction: bool, row: TraceRequest) -> None:
        self._num_pushed += 1
        heapq.heappush(self._heap, (time_s, is_prediction, self._num_pushed, row))
        if time_s < self.next_s:
            self.next_s = time_s


def _next_turns(rows: list[TraceRequest]) -> dict[str, TraceRequest]:
    """The next turn of the conversation, if it has a think time, by the id of each turn."""
    turns: dict[str, list[TraceRequest]] = {}
    for row in rows:
        if row.session_id is not None:
            turns.setdefault(row.session_id, []).append(row)
    following = {}
    for session in turns.values():
        session.sort(key=lambda row: row.turn)
        for turn, next_turn in pairwise(session):
            if next_turn.think_time_s is not None:
                following[turn.request_id] = next_turn
    return following
