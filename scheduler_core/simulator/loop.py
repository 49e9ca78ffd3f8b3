"""The event loop: one engine replica, driven by the same `Scheduler` that an engine adapter drives.

A step starts when the last one ends and there is work. Whatever arrives while a step runs is handed to the scheduler
at its own time and considered at the next step. Stretches of decode steps in which nothing arrives, finishes or runs
out of memory are taken in one go; the result is the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler_core.plan import Finished, StepPlan, StepResult
from scheduler_core.predictions import LengthPrediction
from scheduler_core.request import Request
from scheduler_core.scheduler import Scheduler
from scheduler_core.simulator.fetch import Predictions
from scheduler_core.simulator.records import RequestRecord
from scheduler_core.simulator.step_time import DecodeRun, LinearStepTime
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


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """Something that reaches the scheduler from outside."""

    time_s: float
    request: TraceRequest
    arrives: bool


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
    """

    def __init__(
        self,
        trace: Trace,
        scheduler: Scheduler,
        step_time: LinearStepTime,
        predictions: Predictions,
        *,
        delays_s: dict[str, float] | None = None,
        exact_steps: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._step_time = step_time
        self._answers = predictions.answers
        self._exact_steps = exact_steps
        self._progress = progress
        self._rows: dict[str, TraceRequest] = {}
        self._run: DecodeRun | None = None
        self._outcome = Outcome()
        self._seen_until_s = 0.0
        self._events = trace_events(trace, predictions, delays_s or {})
        self._next = 0

    def run(self) -> Outcome:
        """Runs until every request has finished or was refused."""
        out = self._outcome
        out.start_s = self._seen_until_s = now = self._events[0].time_s
        while True:
            self._deliver(now, inclusive=True)
            plan = self._scheduler.schedule(now)
            if plan is not None:
                now = self._step(plan, now)
            elif self._next < len(self._events):
                now = self._events[self._next].time_s
            else:
                break
        assert self._scheduler.num_waiting == self._scheduler.num_running == 0
        out.end_s = self._seen_until_s
        return out

    def _step(self, plan: StepPlan, now: float) -> float:
        """Carries out the plan once, or as often as nothing changes; returns the end."""
        if plan.prefills or plan.num_swapped_tokens:
            self._run = None
            steps, end_s = 1, now + self._step_time.step_s(plan)
        else:
            steps, end_s = self._decode(plan, now)
        self._deliver(end_s, inclusive=False)
        result = StepResult(plan.step, self._stopped(plan, steps), steps)
        finished = self._scheduler.complete(result, end_s)
        self._observe(end_s, change=-len(finished))
        for item in finished:
            self._outcome.records.append(self._record(item, end_s))
        if finished and self._progress is not None:
            self._progress(len(finished))
        self._outcome.busy_s += end_s - now
        self._outcome.num_steps += steps
        return end_s

    def _decode(self, plan: StepPlan, now: float) -> tuple[int, float]:
        """Number of steps to take in a row, and when they end."""
        run = self._run
        if run is None or run.decodes != plan.decodes:
            run = self._run = DecodeRun(self._step_time, now, plan.decodes, plan.num_context_tokens)
        steps = 1
        if not self._exact_steps:
            left = min(self._tokens_left(request_id) for request_id in plan.decodes)
            steps = self._scheduler.steady_steps(left)
            if self._next < len(self._events):
                steps = run.steps_to_reach(self._events[self._next].time_s, steps)
        end_s = run.end_s(steps)
        run.num_done += steps
        return steps, end_s

    def _tokens_left(self, request_id: str) -> int:
        return self._rows[request_id].output_tokens - self._scheduler.state(request_id).num_output_tokens

    def _stopped(self, plan: StepPlan, steps: int) -> tuple[str, ...]:
        """Requests whose true length is reached by this plan; those at max_tokens the scheduler ends itself."""
        sampling = [chunk.request_id for chunk in plan.prefills if chunk.is_last]
        sampling.extend(plan.decodes)
        return tuple(
            request_id
            for request_id in sampling
            if self._tokens_left(request_id) == steps
            and self._rows[request_id].output_tokens < self._rows[request_id].max_tokens
        )

    def _deliver(self, until_s: float, *, inclusive: bool) -> None:
        """Hands over the events before `until_s`, each at its own time."""
        while self._next < len(self._events):
            event = self._events[self._next]
            if event.time_s > until_s or (event.time_s == until_s and not inclusive):
                return
            self._next += 1
            request_id = event.request.request_id
            if event.arrives:
                self._arrive(event.request)
            elif request_id not in self._outcome.refused:
                self._scheduler.update(request_id, self._answers[request_id], event.time_s)

    def _arrive(self, row: TraceRequest) -> None:
        request = request_of(row)
        refusal = self._scheduler.refusal(request)
        if refusal is not None:
            self._outcome.refused[row.request_id] = str(refusal)
            if self._progress is not None:
                self._progress(1)
            return
        self._observe(row.arrival_s, change=0)
        self._rows[row.request_id] = row
        self._scheduler.add(request, row.arrival_s)

    def _observe(self, now: float, change: int) -> None:
        """Adds the stretch since the last change of the number of requests to the integrals.

        Called after `complete` and before `add`, so the number during the stretch is the present one less `change`.
        """
        elapsed = now - self._seen_until_s
        present = self._scheduler.num_waiting + self._scheduler.num_running
        self._outcome.request_seconds += elapsed * (present - change)
        self._outcome.waiting_seconds += elapsed * self._scheduler.num_waiting
        self._seen_until_s = now

    def _record(self, item: Finished, now: float) -> RequestRecord:
        return finished_record(item, self._rows.pop(item.request_id), self._answers.get(item.request_id), now)


def request_of(row: TraceRequest) -> Request:
    """The request that the scheduler gets to see: without the true length."""
    return Request(
        request_id=row.request_id,
        arrival_s=row.arrival_s,
        prompt_tokens=row.prompt_tokens,
        max_tokens=row.max_tokens,
    )


def finished_record(
    item: Finished, row: TraceRequest, seen: LengthPrediction | None, finish_s: float
) -> RequestRecord:
    """What became of a request that has just finished.

    Args:
        item: What the scheduler says.
        row: What the trace says.
        seen: What was predicted.
        finish_s: When its last token was there.
    """
    return RequestRecord(
        request_id=item.request_id,
        arrival_s=row.arrival_s,
        first_scheduled_s=item.first_scheduled_s,
        first_token_s=item.first_token_s,
        finish_s=finish_s,
        prompt_tokens=row.prompt_tokens,
        output_tokens=item.output_tokens,
        max_tokens=row.max_tokens,
        finish_reason=item.reason,
        num_preemptions=item.num_preemptions,
        predicted_mu=None if seen is None else seen.mu,
        predicted_sigma=None if seen is None else seen.sigma,
        predicted_nu=None if seen is None else seen.nu,
    )


def trace_events(trace: Trace, predictions: Predictions, delays_s: dict[str, float]) -> list[TraceEvent]:
    """All arrivals and predictions in order of time; at equal times a request arrives before its prediction."""
    events = [TraceEvent(row.arrival_s, row, arrives=True) for row in trace.requests]
    events += [
        TraceEvent(row.arrival_s + delays_s.get(row.request_id, 0.0), row, arrives=False)
        for row in trace.requests
        if row.request_id in predictions.answers
    ]
    events.sort(key=lambda event: (event.time_s, not event.arrives))
    return events
