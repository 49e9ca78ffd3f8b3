"""One simulated replica: its scheduler, and the step that it is in."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Protocol, runtime_checkable

from scheduler_core.plan import Finished, PrefillChunk, StepPlan, StepResult
from scheduler_core.request import Phase, Status
from scheduler_core.routing.scheduler_port import SchedulerPort
from scheduler_core.simulator.decode_run import DecodeRun, StepGroup, Steps
from scheduler_core.simulator.endings import Endings
from scheduler_core.simulator.step_time import DecodeContexts, StepTime, StepWork
from scheduler_core.simulator.trace import TraceRequest

Rows = Mapping[str, TraceRequest]

_MANY = 1 << 30


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


@runtime_checkable
class HearsTimes(Protocol):
    """A scheduler that wants to know the times of steps that are taken at once; `WatchedScheduler` does."""

    def timed(self, first_end_s: float, rest: Steps) -> None:
        """Called before `complete`: the end of the first step, in seconds, and the durations of the others."""
        ...


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
    #: Decode steps that all had taken together before this one; None: they do not count so.
    _common: int | None = field(default=None, init=False)
    _endings: Endings = field(default_factory=Endings, init=False)
    #: Of several steps with a chunk each: their ends.
    _ends: list[float] = field(default_factory=list, init=False)
    #: Where steps are not common: tokens that each of the plan's decodes has still to generate.
    _left: list[int] = field(default_factory=list, init=False)
    _later: list[Callable[[float], None]] = field(default_factory=list, init=False)
    _listener: HearsTimes | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if isinstance(self.port.scheduler, HearsTimes):
            self._listener = self.port.scheduler

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
        self._common = common = scheduler.num_common_steps
        if common is None:
            self._left = [
                rows[state.request_id].output_tokens - state.num_output_tokens for state in scheduler.decoding
            ]
        elif plan.preempted or plan.swapped_in:
            self._moved(plan, rows, common)
        steps = 1
        if plan.prefills or plan.swapped_out or plan.swapped_in or not plan.decodes:
            self._run = None
            contexts = self._contexts(plan, common)
            swapped = plan.num_swapped_tokens if plan.swapped_out or plan.swapped_in else 0
            end_s = now + self.step_time.step_s(StepWork(plan.prefills, contexts, swapped))
            if end_s < until_s and not (exact or swapped) and plan.prefills and not plan.prefills[0].is_last:
                ends = self._ends = self._repeat_chunk(plan, end_s, until_s, fresh)
                steps, end_s = len(ends), ends[-1]
        else:
            run = self._run
            if run is None or self._decodes != plan.decodes:
                run = self._run = self.step_time.run(self._contexts(plan, common), now)
                self._decodes = plan.decodes
            end_s = run.end_s(1)
            if not exact and end_s < until_s:
                left = min(self._left) if common is None else self._least_left(common)
                steps = self._steady_steps(run, left, until_s, fresh)
                end_s = run.end_s(steps)
            run.num_done += steps
        self.step = Step(plan, steps, now, end_s)
        return self.step

    def _repeat_chunk(self, plan: StepPlan, end_s: float, until_s: float, fresh: bool) -> list[float]:
        """Ends of this step, which ends at `end_s`, and of those that process one more chunk of the same prompt each."""
        ends, common = [end_s], self._common
        if common is None or len(plan.prefills) != 1:
            return ends
        limit = self.port.scheduler.steady_steps(self._least_left(common) if plan.decodes else _MANY)
        chunk, num = plan.prefills[0], len(plan.decodes)
        tokens, total = chunk.num_tokens, plan.num_context_tokens - chunk.start_token
        for more in range(1, limit):
            if end_s >= until_s:
                break
            following = PrefillChunk(chunk.request_id, chunk.start_token + more * tokens, tokens, False)
            contexts = DecodeContexts(num, total + more * num, partial(self._read_contexts, more))
            end_s += self.step_time.step_s(StepWork((following,), contexts))
            if fresh and end_s >= until_s:
                break
            ends.append(end_s)
        return ends

    def _contexts(self, plan: StepPlan, common: int | None) -> Sequence[int]:
        """Tokens in the cache of those who decode."""
        if not plan.decodes:
            return ()
        if common is None:
            return self._read_contexts()
        total = plan.num_context_tokens
        for chunk in plan.prefills:
            total -= chunk.start_token
        return DecodeContexts(len(plan.decodes), total, self._read_contexts)

    def _read_contexts(self, more: int = 0) -> list[int]:
        """Every one by itself, `more` steps after the start of this plan."""
        return [state.num_computed_tokens + more for state in self.port.scheduler.decoding]

    def _moved(self, plan: StepPlan, rows: Rows, common: int) -> None:
        """Requests have lost their place, or come back to it without a prefill."""
        for name in plan.preempted:
            self._endings.drop(name)
        for transfer in plan.swapped_in:
            state = self.port.scheduler.state(transfer.request_id)
            # It may have been evicted again for the same step.
            if state.status is Status.RUNNING and state.phase is Phase.DECODE:
                left = rows[state.request_id].output_tokens - state.num_output_tokens
                self._endings.add(state.request_id, common + left)

    def _least_left(self, common: int) -> int:
        """Steps until somebody has their true length."""
        step = self._endings.next_step()
        assert step is not None, "somebody decodes"
        return step - common

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
        plan, num_steps, scheduler, common = step.plan, step.num_steps, self.port.scheduler, self._common
        if common is not None and plan.decodes:
            common += num_steps
        done: list[str] = []
        stopped: tuple[str, ...] = ()
        for chunk in plan.prefills:
            if chunk.is_last:
                name = chunk.request_id
                left = rows[name].output_tokens - scheduler.state(name).num_output_tokens - 1
                if left == 0:
                    done.append(name)
                elif common is not None:
                    self._endings.add(name, common + left)
        if plan.decodes:
            done += self._done_decodes(plan, num_steps, common)
        if done:
            stopped = tuple([name for name in done if rows[name].output_tokens < rows[name].max_tokens])
        self.step = None
        if num_steps > 1 and self._listener is not None:
            self._tell_times(self._listener, num_steps)
        return scheduler.complete(StepResult(plan.step, stopped, num_steps), step.end_s)

    def _tell_times(self, listener: HearsTimes, num_steps: int) -> None:
        if self._run is None:
            lengths = [after - before for before, after in pairwise(self._ends)]
            listener.timed(self._ends[0], [StepGroup(step_s, 0.0, 1) for step_s in lengths])
            return
        second = self._run.num_done - num_steps + 1
        listener.timed(self._run.at(second), self._run.steps(second, num_steps - 1))

    def _done_decodes(self, plan: StepPlan, num_steps: int, common: int | None) -> list[str]:
        """Those of the plan's decodes that have their true length after so many steps, in the plan's order."""
        if common is not None:
            done = self._endings.pop_until(common)
            return sorted(done, key=plan.decodes.index) if len(done) > 1 else done
        if num_steps not in self._left:
            return []
        return [name for name, left in zip(plan.decodes, self._left, strict=True) if left == num_steps]

    def catch_up(self, now: float) -> None:
        """Does what has waited for the end of the step."""
        waiting, self._later = self._later, []
        for action in waiting:
            action(now)
