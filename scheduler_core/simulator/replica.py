"""One simulated replica: its scheduler, and the step that it is in."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from scheduler_core.plan import Finished, StepPlan, StepResult
from scheduler_core.routing.scheduler_port import SchedulerPort
from scheduler_core.simulator.decode_run import DecodeRun
from scheduler_core.simulator.step_time import StepTime, StepWork
from scheduler_core.simulator.trace import TraceRequest

Rows = Mapping[str, TraceRequest]


@dataclass(slots=True)
class Step:
    """A plan under way.

    Attributes:
        plan: What is being done.
        num_steps: How often.
        start_s: When it began.
        end_s: When it will be done.
    """

    plan: StepPlan
    num_steps: int
    start_s: float
    end_s: float


@dataclass(slots=True)
class SimulatedReplica:
    """Carries out the plans of a scheduler in simulated time; what happens between two steps is left to others.

    Attributes:
        name: Its id.
        port: Its scheduler.
        step_time: Durations of its steps.
        step: What it is doing; None: nothing.
        link_free_s: When its link is free for the next copy.
    """

    name: str
    port: SchedulerPort
    step_time: StepTime
    step: Step | None = None
    link_free_s: float = -math.inf
    _run: DecodeRun | None = field(default=None, init=False)
    _decodes: tuple[str, ...] = field(default=(), init=False)
    _left: list[int] = field(default_factory=list, init=False)
    _later: list[Callable[[float], None]] = field(default_factory=list, init=False)

    @property
    def num_requests(self) -> int:
        """Requests waiting and running here."""
        return self.port.scheduler.num_waiting + self.port.scheduler.num_running

    def between_steps(self, action: Callable[[float], None], now: float) -> None:
        """Does it now, or at the end of the step that the replica is in."""
        if self.step is None:
            action(now)
        else:
            self._later.append(action)

    def begin(
        self, rows: Rows, now: float, *, until_s: float, exact: bool, fresh: bool = False
    ) -> Step | None:
        """Begins the next step, if there is work.

        Args:
            rows: What the trace says about the requests here.
            now: Time in seconds.
            until_s: When something may reach the replica from outside: several decode steps are taken at once until
                then.
            exact: One step at a time.
            fresh: The step that is under way at `until_s` is taken by itself, so that whoever looks at the replica then
                sees it as of the end of its last step, as with single steps.
        """
        scheduler = self.port.scheduler
        plan = scheduler.schedule(now)
        if plan is None:
            self._run = None
            return None
        decoding = scheduler.decoding
        self._left = left = [
            rows[state.request_id].output_tokens - state.num_output_tokens for state in decoding
        ]
        steps = 1
        if plan.prefills or plan.swapped_out or plan.swapped_in or not left:
            self._run = None
            contexts = [state.num_computed_tokens for state in decoding]
            swapped = plan.num_swapped_tokens if plan.swapped_out or plan.swapped_in else 0
            end_s = now + self.step_time.step_s(StepWork(plan.prefills, contexts, swapped))
        else:
            run = self._run
            if run is None or self._decodes != plan.decodes:
                contexts = [state.num_computed_tokens for state in decoding]
                run = self._run = self.step_time.run(contexts, now)
                self._decodes = plan.decodes
            end_s = run.end_s(1)
            if not exact and end_s < until_s:
                steps = self._steady_steps(run, min(left), until_s, fresh)
                end_s = run.end_s(steps)
            run.num_done += steps
        self.step = Step(plan, steps, now, end_s)
        return self.step

    def _steady_steps(self, run: DecodeRun, least_left: int, until_s: float, fresh: bool) -> int:
        steps = self.port.scheduler.steady_steps(least_left)
        if until_s == math.inf or steps == 1:
            return steps
        steps = run.steps_to_reach(until_s, steps)
        return steps - 1 if fresh and steps > 1 and run.end_s(steps) >= until_s else steps

    def complete(self, rows: Rows) -> tuple[Finished, ...]:
        """Ends the step; the requests that have their true length stop. Those at max_tokens the scheduler ends itself."""
        step = self.step
        assert step is not None
        plan, num_steps, scheduler = step.plan, step.num_steps, self.port.scheduler
        stopped = []
        for chunk in plan.prefills:
            if chunk.is_last:
                row = rows[chunk.request_id]
                last = row.output_tokens - scheduler.state(chunk.request_id).num_output_tokens == 1
                if last and row.output_tokens < row.max_tokens:
                    stopped.append(chunk.request_id)
        if num_steps in self._left:
            for name, left in zip(plan.decodes, self._left, strict=True):
                if left == num_steps and rows[name].output_tokens < rows[name].max_tokens:
                    stopped.append(name)
        self.step = None
        return scheduler.complete(StepResult(plan.step, tuple(stopped), num_steps), step.end_s)

    def catch_up(self, now: float) -> None:
        """Does what has waited for the end of the step."""
        waiting, self._later = self._later, []
        for action in waiting:
            action(now)
