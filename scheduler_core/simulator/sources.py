"""What reaches a simulated engine from outside, and when: open and closed loops, conversations, predictions."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from scheduler_core.errors import InputError
from scheduler_core.simulator.fetch import Predictions
from scheduler_core.simulator.trace import Trace, TraceRequest


class TraceEvent(NamedTuple):
    """Something that reaches the scheduler from outside.

    Attributes:
        time_s: When, in seconds.
        request: Which request, with the arrival that really is.
        arrives: True: the request; False: its prediction.
    """

    time_s: float
    request: TraceRequest
    arrives: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoop:
    """So many clients, each of which sends its next request when it has the answer to its last one and has thought.

    The requests come in the order of the trace, whose own arrival times play no part but for the first: then all clients
    begin.

    Attributes:
        num_clients: Clients, > 0.
        think_time_s: Mean seconds between an answer and the next request, >= 0.
        rng: Draws exponential think times; None: all are equal.

    Raises:
        InputError: A value is outside its range.
    """

    num_clients: int
    think_time_s: float = 0.0
    rng: np.random.Generator | None = None

    def __post_init__(self) -> None:
        if self.num_clients <= 0:
            raise InputError("num_clients", self.num_clients, "integers > 0")
        if not 0 <= self.think_time_s < math.inf:
            raise InputError("think_time_s", self.think_time_s, "seconds >= 0")

    def think_s(self) -> float:
        """How long a client thinks now, in seconds."""
        if self.rng is None or self.think_time_s == 0:
            return self.think_time_s
        return float(self.rng.exponential(self.think_time_s))


class Source:
    """All arrivals and predictions in order of time; some arrivals depend on when other requests end.

    At equal times requests arrive before predictions come, each in the order of the trace.

    - A turn of a conversation with a think time arrives that long after the end of the turn before, but not before its
      own `arrival_s`. A turn that was refused has ended when it arrived.
    - With `clients` every request waits for a client.
    - A prediction comes `delays_s` after the arrival.

    Args:
        trace: What arrives.
        predictions: What is predicted.
        delays_s: By request id: seconds from arrival to prediction; 0 where missing.
        clients: A closed loop; None: requests arrive at their times.

    Raises:
        InputError: A closed loop is wanted of a trace with think times.
    """

    def __init__(
        self,
        trace: Trace,
        predictions: Predictions,
        delays_s: Mapping[str, float] | None = None,
        clients: ClosedLoop | None = None,
    ) -> None:
        self._answers = predictions.answers
        self._delays_s = delays_s or {}
        self._clients = clients
        rows = sorted(trace.requests, key=lambda row: row.arrival_s)
        #: By the id of a turn: the turn that waits for its end.
        self._after: dict[str, TraceRequest] = _conversations(rows)
        if clients is not None and self._after:
            raise InputError("clients", clients.num_clients, "none, if the trace has think times of its own")
        waits = {row.request_id for row in self._after.values()}
        rows = [row for row in rows if row.request_id not in waits] if waits else rows
        self.start_s = rows[0].arrival_s
        rows.reverse()
        #: Arrivals to come, the next one last; with a closed loop the requests nobody has sent yet.
        self._rows = rows
        self._heap: list[tuple[float, bool, int, TraceRequest]] = []
        self._pushed = 0
        #: When the next event is due, in seconds; infinite if there is none for now.
        self.next_s = math.inf
        if clients is not None:
            for _ in range(min(clients.num_clients, len(rows))):
                self._send(rows.pop(), self.start_s)
        self.next_s = self._due_s()

    def _due_s(self) -> float:
        due = self._heap[0][0] if self._heap else math.inf
        if self._rows and self._clients is None:
            return min(due, self._rows[-1].arrival_s)
        return due

    def pop(self) -> TraceEvent:
        """The next event. There must be one."""
        rows, heap = self._rows, self._heap
        if rows and self._clients is None and (not heap or (rows[-1].arrival_s, False) <= heap[0][:2]):
            row, arrives, time_s = rows.pop(), True, 0.0
            time_s = row.arrival_s
        else:
            time_s, predicted, _, row = heapq.heappop(heap)
            arrives = not predicted
        if arrives and row.request_id in self._answers:
            self._push(time_s + self._delays_s.get(row.request_id, 0.0), True, row)
        self.next_s = self._due_s()
        return TraceEvent(time_s, row, arrives)

    def ended(self, row: TraceRequest, now: float) -> None:
        """A request has been answered or refused; whoever waited for it may now send the next one."""
        if self._after:
            turn = self._after.pop(row.request_id, None)
            if turn is not None:
                assert turn.think_time_s is not None
                self._send(turn, max(turn.arrival_s, now + turn.think_time_s))
        if self._clients is not None and self._rows:
            self._send(self._rows.pop(), now + self._clients.think_s())

    def _send(self, row: TraceRequest, time_s: float) -> None:
        self._push(time_s, False, replace(row, arrival_s=time_s) if time_s != row.arrival_s else row)

    def _push(self, time_s: float, predicted: bool, row: TraceRequest) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (time_s, predicted, self._pushed, row))
        if time_s < self.next_s:
            self.next_s = time_s


def _conversations(rows: list[TraceRequest]) -> dict[str, TraceRequest]:
    """By the id of a turn: the next turn of its conversation, if that has a think time."""
    turns: dict[str, list[TraceRequest]] = {}
    for row in rows:
        if row.session_id is not None:
            turns.setdefault(row.session_id, []).append(row)
    after = {}
    for session in turns.values():
        session.sort(key=lambda row: row.turn)
        for one, following in pairwise(session):
            if following.think_time_s is not None:
                after[one.request_id] = following
    return after
