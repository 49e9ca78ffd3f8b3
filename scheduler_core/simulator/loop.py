"""The event loop: one engine replica, driven by the same `Scheduler` that an engine adapter drives.

A step starts when the last one ends and there is work. Whatever arrives while a step runs is handed to the scheduler
at its own time and considered at the next step. Stretches of decode steps in which nothing arrives, finishes or runs
out of memory are taken in one go; the result is the same to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler_core.routing.scheduler_port import SchedulerPort
from scheduler_core.scheduler import Scheduler
from scheduler_core.simulator.fetch import Predictions
from scheduler_core.simulator.prefix_cache import PrefixCache
from scheduler_core.simulator.records import RequestRecord, finished_record
from scheduler_core.simulator.replica import SimulatedReplica, Step
from scheduler_core.simulator.sources import ClosedLoop, Source
from scheduler_core.simulator.step_time import StepTime
from scheduler_core.simulator.trace import Trace, TraceRequest

Progress = Callable[[int], None]


@dataclass(slots=True)
class Outcome:
    """What a simulation yields.

    Attributes:
        records: Finished requests, in the order they finished.
        refused: By request id: why it could never run here.
        start_s: First arrival.
        end_s: End of the last step.
        busy_s: Time spent in steps.
        num_steps: Steps taken.
        request_seconds: Integral over time of the number of requests in the system (arrived, not finished).
        waiting_seconds: Integral over time of the number of waiting requests.
    """

    records: list[RequestRecord] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    start_s: float = 0.0
    end_s: float = 0.0
    busy_s: float = 0.0
    num_steps: int = 0
    request_seconds: float = 0.0
    waiting_seconds: float = 0.0


class Simulation:
    """Runs a trace to its end; nothing is lost, every request finishes or is refused.

    Args:
        trace: What arrives.
        scheduler: A fresh scheduler; afterwards its counters and memory peak can be read.
        step_time: Durations of steps.
        predictions: What reaches the scheduler as `update` events.
        delays_s: By request id: seconds from arrival to that event; 0 where missing.
        exact_steps: Take every step by itself, as an engine does; slower, same result.
        progress: Called with the number of requests finished since the last call.
        clients: A closed loop of clients; None: requests arrive at their times.
        prefix_cache: What is left of earlier turns of a conversation; None: nothing.
    """

    def __init__(
        self,
        trace: Trace,
        scheduler: Scheduler,
        step_time: StepTime,
        predictions: Predictions,
        *,
        delays_s: dict[str, float] | None = None,
        exact_steps: bool = False,
        progress: Progress | None = None,
        clients: ClosedLoop | None = None,
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._replica = SimulatedReplica("", SchedulerPort(scheduler), step_time)
        self._answers = predictions.answers
        self._exact_steps = exact_steps
        self._progress = progress
        self._prefix_cache = prefix_cache
        self._rows: dict[str, TraceRequest] = {}
        self._outcome = Outcome()
        self._seen_until_s = 0.0
        self._num_present = 0
        self._num_waiting = 0
        self._source = Source(trace, predictions, delays_s, clients)

    def run(self) -> Outcome:
        """Runs until every request has finished or was refused."""
        out, source, replica, exact = self._outcome, self._source, self._replica, self._exact_steps
        out.start_s = self._seen_until_s = now = source.start_s
        while True:
            if source.next_s <= now:
                self._deliver(now, inclusive=True)
            step = replica.begin(self._rows, now, until_s=source.next_s, exact=exact)
            if step is not None:
                if step.plan.admitted or step.plan.preempted:
                    self._observe(now)
                    self._num_waiting = self._scheduler.num_waiting
                self._finish(step)
                now = step.end_s
            elif source.next_s < math.inf:
                now = source.next_s
            else:
                break
        assert self._scheduler.num_waiting == self._scheduler.num_running == 0
        out.end_s = self._seen_until_s
        return out

    def _finish(self, step: Step) -> None:
        """The step ends: what came meanwhile is handed over first."""
        out, end_s = self._outcome, step.end_s
        if self._source.next_s < end_s:
            self._deliver(end_s, inclusive=False)
        finished = self._replica.complete(self._rows)
        if finished:
            self._observe(end_s)
            self._num_present -= len(finished)
        for item in finished:
            row = self._rows.pop(item.request_id)
            out.records.append(finished_record(item, row, self._answers.get(item.request_id), end_s))
            if self._prefix_cache is not None:
                self._prefix_cache.keep(row)
            self._source.ended(row, end_s)
        if finished and self._progress is not None:
            self._progress(len(finished))
        out.busy_s += end_s - step.start_s
        out.num_steps += step.num_steps

    def _deliver(self, until_s: float, *, inclusive: bool) -> None:
        """Hands over the events before `until_s`, each at its own time."""
        source = self._source
        while source.next_s < until_s or (inclusive and source.next_s == until_s):
            event = source.pop()
            request_id = event.request.request_id
            if event.arrives:
                self._arrive(event.request)
            elif request_id not in self._outcome.refused:
                self._scheduler.update(request_id, self._answers[request_id], event.time_s)

    def _arrive(self, row: TraceRequest) -> None:
        cached = 0 if self._prefix_cache is None else self._prefix_cache.hit(row)
        request = row.request(cached_prefix_tokens=cached)
        refusal = self._scheduler.refusal(request)
        if refusal is not None:
            self._outcome.refused[row.request_id] = str(refusal)
            self._source.ended(row, row.arrival_s)
            if self._progress is not None:
                self._progress(1)
            return
        self._observe(row.arrival_s)
        self._num_present += 1
        self._num_waiting += 1
        self._rows[row.request_id] = row
        self._scheduler.add(request, row.arrival_s)

    def _observe(self, now: float) -> None:
        """Adds the stretch since the last call to the integrals; called before the numbers change."""
        elapsed = now - self._seen_until_s
        self._outcome.request_seconds += elapsed * self._num_present
        self._outcome.waiting_seconds += elapsed * self._num_waiting
        self._seen_until_s = now
