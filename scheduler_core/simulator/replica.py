"""One replica of a simulated cluster: its scheduler, and the step that it is in."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from scheduler_core.plan import Finished, StepPlan, StepResult
from scheduler_core.routing.scheduler_port import SchedulerPort
from scheduler_core.simulator.step_time import DecodeRun, LinearStepTime
from scheduler_core.simulator.trace import TraceRequest

Rows = Mapping[str, TraceRequest]


@dataclass(frozen=True, slots=True)
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
    """Steps as `loop.Simulation` does, but leaves it to the cluster what happens between two steps.

    Attributes:
        name: Its id.
        port: Its scheduler.
        step_time: Durations of its steps.
        step: What it is doing; None: nothing.
        link_free_s: When its link is free for the next copy.
    """

    name: str
    port: SchedulerPort
    step_time: LinearStepTime
    step: Step | None = None
    link_free_s: float = -math.inf
    _run: DecodeRun | None = field(default=None, init=False)
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
    ) -> StepPlan | None:
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
        plan = self.port.scheduler.schedule(now)
        if plan is None:
            self._run = None
            return None
        if plan.prefills or plan.num_swapped_tokens:
            self._run = None
            steps, end_s = 1, now + self.step_time.step_s(plan)
        else:
            run = self._run
            if run is None or run.decodes != plan.decodes:
                run = self._run = DecodeRun(self.step_time, now, plan.decodes, plan.num_context_tokens)
            steps = 1 if exact else self._steady_steps(run, rows, until_s, fresh)
            end_s = run.end_s(steps)
            run.num_done += steps
        self.step = Step(plan, steps, now, end_s)
        return plan

    def _steady_steps(self, run: DecodeRun, rows: Rows, until_s: float, fresh: bool) -> int:
        left = min(self._tokens_left(rows, name) for name in run.decodes)
        steps = self.port.scheduler.steady_steps(left)
        if until_s == math.inf:
            return steps
        steps = run.steps_to_reach(until_s, steps)
        return steps - 1 if fresh and steps > 1 and run.end_s(steps) >= until_s else steps

    def complete(self, rows: Rows) -> tuple[Finished, ...]:
        """Ends the step; the requests that have their true length stop."""
        step = self.step
        assert step is not None
        sampling = [chunk.request_id for chunk in step.plan.prefills if chunk.is_last]
        sampling.extend(step.plan.decodes)
        stopped = tuple(
            name
            for name in sampling
            if self._tokens_left(rows, name) == step.num_steps
            and rows[name].output_tokens < rows[name].max_tokens
        )
        self.step = None
        result = StepResult(step.plan.step, stopped, step.num_steps)
        return self.port.scheduler.complete(result, step.end_s)

    def catch_up(self, now: float) -> None:
        """Does what has waited for the end of the step."""
        waiting, self._later = self._later, []
        for action in waiting:
            action(now)

    def _tokens_left(self, rows: Rows, name: str) -> int:
        return rows[name].output_tokens - self.port.scheduler.state(name).num_output_tokens
