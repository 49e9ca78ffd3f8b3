"""One simulated replica: its scheduler and its current step."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from heapq import heappop, heappush
from itertools import pairwise

from scheduler_core.engine.plan import Finished, PrefillChunk, StepPlan, StepResult
from scheduler_core.prediction.predictions import Prediction
from scheduler_core.request import Phase, Request, Status
from scheduler_core.scheduler import Scheduler
from scheduler_core.simulator.step_time.base import (
    DecodeContexts,
    DecodeRun,
    StepGroup,
    StepTime,
    StepWork,
    delays_of,
)
from scheduler_core.simulator.trace import TraceRequest
from scheduler_core.simulator.watch import ReplicaWatch, Step

_UNLIMITED_STEPS = 1 << 30
#: Distance of the hashes of two blocks of one segment: odd, so that all are different.
_BLOCK_STEP = 0x9E37_79B9_7F4A_7C15


def prefix_blocks(row: TraceRequest, kv_block_tokens: int) -> tuple[int, ...]:
    """Hashes of the full prompt blocks whose content is known, equal for equal content."""
    blocks: list[int] = []
    position = 0
    path = sha256()
    for key, num_tokens in row.content:
        start, position = position, position + num_tokens
        path.update(f"{start} {key} ".encode())
        first = int.from_bytes(path.digest()[:8])
        numbers = range(start // kv_block_tokens, position // kv_block_tokens)
        blocks += [(first + block * _BLOCK_STEP) % (1 << 64) for block in numbers]
    return tuple(blocks)


class FinishQueue:
    """Heap of requests in lockstep, by the number of the step at which they reach their true length.

    Steps are counted as in `Scheduler.num_common_steps`.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, str]] = []
        self._steps: dict[str, int] = {}

    def add(self, request_id: str, step: int) -> None:
        """Adds a request that finishes when `step` steps have been taken."""
        self._steps[request_id] = step
        heappush(self._heap, (step, request_id))

    def drop(self, request_id: str) -> None:
        """Removes a request that stopped decoding before its end; ignores unknown requests."""
        self._steps.pop(request_id, None)

    def next_step(self) -> int:
        """Number of the step at which the first request finishes; the queue must not be empty."""
        heap, steps = self._heap, self._steps
        while steps.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap[0][0]

    def pop_until(self, step: int) -> list[str]:
        """Removes and returns the requests that finish within `step` steps, in no particular order."""
        heap, steps = self._heap, self._steps
        finished: list[str] = []
        while heap and heap[0][0] <= step:
            due, name = heappop(heap)
            if steps.get(name) == due:
                del steps[name]
                finished.append(name)
        return finished


class SimulatedReplica:
    """Executes the plans of a scheduler in simulated time; the caller handles all events between two steps.

    `rows` are the trace rows of all requests in the system, by id. `exact`: simulate steps individually.
    `fresh`: simulate a step individually if an event may occur during it, so that snapshots at that time are
    the same as with individual steps.
    """

    def __init__(
        self,
        name: str,
        scheduler: Scheduler,
        step_time: StepTime,
        rows: Mapping[str, TraceRequest],
        *,
        exact: bool = False,
        fresh: bool = False,
        watch: ReplicaWatch | None = None,
    ) -> None:
        self.name = name
        self.scheduler = scheduler
        #: The current step; None: idle.
        self.step: Step | None = None
        #: Time at which the link is free for the next copy.
        self.link_free_s = -math.inf
        self._step_time = step_time
        self._rows = rows
        self._exact = exact
        self._fresh = fresh
        self._watch = watch
        self._run: DecodeRun | None = None
        #: Ids of the requests of `_run`.
        self._decodes: tuple[str, ...] = ()
        #: Number of steps in lockstep before the current one; None without lockstep.
        self._lockstep: int | None = None
        self._finishes = FinishQueue()
        #: End times of several steps with one chunk each.
        self._chunk_ends: list[float] = []
        #: Without lockstep: remaining tokens of each decode of the plan.
        self._remaining: list[int] = []
        self._deferred: list[Callable[[float], object]] = []
        self._plans_ahead = delays_of(step_time).plans_ahead
        #: Requests that arrived during the current step, when the next one was already planned, and their predictions.
        self.held: dict[str, Request] = {}
        self._held_predictions: dict[str, Prediction | None] = {}
        #: Requests that were aborted during the current step.
        self._aborted: set[str] = set()

    def add(self, request: Request, now: float) -> None:
        """Gives a request to the scheduler: at once, or when the step that is already planned starts."""
        if self._plans_ahead and self.step is not None:
            self.held[request.request_id] = request
        else:
            self.scheduler.add(request, now)

    def update(self, request_id: str, prediction: Prediction | None, now: float) -> None:
        """Gives the prediction of a request to the scheduler, not before the request."""
        if request_id in self.held:
            self._held_predictions[request_id] = prediction
        else:
            self.scheduler.update(request_id, prediction, now)

    def _add_held(self, now: float) -> None:
        held, predictions = self.held, self._held_predictions
        self.held, self._held_predictions = {}, {}
        for request in held.values():
            self.scheduler.add(request, now)
        for name, prediction in predictions.items():
            self.scheduler.update(name, prediction, now)

    def between_steps(self, action: Callable[[float], object], now: float) -> None:
        """Calls `action` with the time: at once if idle, else at the end of the current step."""
        if self.step is None:
            action(now)
        else:
            self._deferred.append(action)

    def run_deferred(self, now: float) -> None:
        """Calls the actions that were deferred to the end of the step."""
        if self._deferred:
            actions, self._deferred = self._deferred, []
            for action in actions:
                action(now)

    @property
    def is_idle(self) -> bool:
        """Whether it has no request."""
        return not (self.held or self.scheduler.num_waiting or self.scheduler.num_running)

    def abort(self, request_id: str, now: float) -> None:
        """Ends a request that its client has given up, also during a step, but not during several combined ones."""
        if self.held.pop(request_id, None) is not None:
            self._held_predictions.pop(request_id, None)
            return
        assert self.step is None or self.step.num_steps == 1, "the steps that have ended are not complete"
        self.scheduler.abort(request_id, now)
        self._finishes.drop(request_id)
        self._decodes = ()
        if self.step is not None:
            self._aborted.add(request_id)
        if self._watch is not None:
            self._watch.on_abort(request_id)

    def last_token_s(self, request_id: str, now: float) -> float | None:
        """Time of the last token of a request until `now`, also in combined steps; None before the first one."""
        state, step, run = self.scheduler.find(request_id), self.step, self._run
        if state is None or state.last_token_s is None:
            return None
        if step is None or step.num_steps == 1 or request_id not in step.plan.decodes:
            return state.last_token_s
        if run is None:
            num, ends_s = bisect_right(self._chunk_ends, now), self._chunk_ends
            return ends_s[num - 1] if num else state.last_token_s
        run.num_done -= step.num_steps
        num = run.steps_to_reach(now, step.num_steps)
        if run.end_s(num) > now:
            num -= 1
        last_s = run.end_s(num) if num else state.last_token_s
        run.num_done += step.num_steps
        return last_s

    def stop(self, now: float) -> float:
        """Ends the current step without its results, and all requests; returns the seconds that the step has taken."""
        scheduler, step = self.scheduler, self.step
        names = [*scheduler.pool.states]
        for name in names:
            scheduler.abort(name, now)
            self._finishes.drop(name)
        self.held.clear()
        self._held_predictions.clear()
        self._aborted.clear()
        busy_s = 0.0
        if step is not None:
            scheduler.complete(StepResult(step.plan.step), now)
            busy_s = now - step.start_s
        self.step = self._run = None
        self._decodes = ()
        if self._watch is not None:
            self._watch.on_stop(names, now)
        self.run_deferred(now)
        return busy_s

    def begin(self, now: float, until_s: float) -> Step | None:
        """Starts the next step; None without work. Several equal steps are combined until `until_s`, the time
        of the next external event."""
        scheduler = self.scheduler
        plan = scheduler.schedule(now)
        if self.held:
            self._add_held(now)
            if plan is None:  # an idle engine plans again
                plan = scheduler.schedule(now)
            until_s = now
        if plan is None:
            self._run = None
            return None
        self._lockstep = lockstep = scheduler.num_common_steps
        if lockstep is None:
            self._remaining = [
                self._rows[state.request_id].output_tokens - state.num_output_tokens
                for state in scheduler.decoding
            ]
        elif plan.preempted or plan.swapped_in:
            self._update_finishes(plan, lockstep)
        steps = 1
        if plan.prefills or plan.swapped_out or plan.swapped_in or not plan.decodes:
            self._run = None
            contexts = self._contexts(plan)
            swapped = plan.num_swapped_tokens if plan.swapped_out or plan.swapped_in else 0
            end_s = now + self._step_time.step_s(StepWork(plan.prefills, contexts, swapped))
            if (
                end_s < until_s
                and not (self._exact or swapped)
                and plan.prefills
                and not plan.prefills[0].is_last
            ):
                ends = self._chunk_ends = self._repeat_chunk(plan, end_s, until_s)
                steps, end_s = len(ends), ends[-1]
        else:
            run = self._run
            if run is None or self._decodes != plan.decodes:
                run = self._run = self._step_time.run(self._contexts(plan), now)
                self._decodes = plan.decodes
            end_s = run.end_s(1)
            if not self._exact and end_s < until_s:
                due = min(self._remaining) if lockstep is None else self._finishes.next_step() - lockstep
                steps = self._steady_steps(run, due, until_s)
                end_s = run.end_s(steps)
            run.num_done += steps
        self.step = Step(plan, steps, now, end_s, end_s)
        return self.step

    def shorten(self, now: float) -> None:
        """Called at an event: shortens several combined steps to those that have started before `now`."""
        step = self.step
        if step is None or step.num_steps == 1 or step.end_s <= now:
            return
        if self._run is None:
            steps = bisect_left(self._chunk_ends, now) + 1
            self._chunk_ends = self._chunk_ends[:steps]
            step.end_s = self._chunk_ends[-1]
        else:
            self._run.num_done -= step.num_steps
            steps = self._run.steps_to_reach(now, step.num_steps)
            step.end_s = self._run.end_s(steps)
            self._run.num_done += steps
        step.num_steps = steps
        step.first_end_s = step.end_s  # until `_set_durations`, which a single step does not need

    def split(self) -> bool:
        """Takes the last of several combined steps away, which is to be begun again at the end of the others; False if there is
        only one."""
        step = self.step
        if step is None or step.num_steps == 1:
            return False
        step.num_steps -= 1
        if self._run is None:
            self._chunk_ends.pop()
            step.end_s = self._chunk_ends[-1]
        else:
            self._run.num_done -= 1
            step.end_s = self._run.at(self._run.num_done)
        step.first_end_s = step.end_s
        return True

    def _repeat_chunk(self, plan: StepPlan, end_s: float, until_s: float) -> list[float]:
        """End times of this step (`end_s`) and of the next ones, with another chunk of the same prompt each."""
        ends, lockstep = [end_s], self._lockstep
        if lockstep is None or len(plan.prefills) != 1:
            return ends
        remaining = self._finishes.next_step() - lockstep if plan.decodes else _UNLIMITED_STEPS
        chunk, num = plan.prefills[0], len(plan.decodes)
        tokens, total = chunk.num_tokens, plan.num_context_tokens - chunk.start_token
        for more in range(1, self.scheduler.steady_steps(remaining)):
            if end_s >= until_s:
                break
            following = PrefillChunk(chunk.request_id, chunk.start_token + more * tokens, tokens, False)
            contexts = DecodeContexts(num, total + more * num, partial(self._read_contexts, more))
            end_s += self._step_time.step_s(StepWork((following,), contexts))
            if self._fresh and end_s >= until_s:
                break
            ends.append(end_s)
        return ends

    def _contexts(self, plan: StepPlan) -> Sequence[int]:
        """Numbers of cached tokens of the decoding requests."""
        if not plan.decodes:
            return ()
        if self._lockstep is None:
            return self._read_contexts()
        total = plan.num_context_tokens
        for chunk in plan.prefills:
            total -= chunk.start_token
        return DecodeContexts(len(plan.decodes), total, self._read_contexts)

    def _read_contexts(self, more: int = 0) -> list[int]:
        """The individual contexts, `more` steps after the start of this plan."""
        return [state.num_computed_tokens + more for state in self.scheduler.decoding]

    def _update_finishes(self, plan: StepPlan, lockstep: int) -> None:
        """Updates the queue for requests that were preempted, or that resume decoding without a prefill."""
        for name in plan.preempted:
            self._finishes.drop(name)
        for transfer in plan.swapped_in:
            state = self.scheduler.state(transfer.request_id)
            # It may have been evicted again in the same step.
            if state.status is Status.RUNNING and state.phase is Phase.DECODE:
                remaining = self._rows[state.request_id].output_tokens - state.num_output_tokens
                self._finishes.add(state.request_id, lockstep + remaining)

    def _steady_steps(self, run: DecodeRun, remaining: int, until_s: float) -> int:
        steps = self.scheduler.steady_steps(remaining)
        if until_s == math.inf or steps == 1:
            return steps
        steps = run.steps_to_reach(until_s, steps)
        return steps - 1 if self._fresh and steps > 1 and run.end_s(steps) >= until_s else steps

    def complete(self, step: Step) -> tuple[Finished, ...]:
        """Ends the current step and stops requests at their true length, if that is below max_tokens."""
        rows, scheduler, lockstep = self._rows, self.scheduler, self._lockstep
        plan, num_steps = step.plan, step.num_steps
        if lockstep is not None and plan.decodes:
            lockstep += num_steps
        done: list[str] = []
        for chunk in plan.prefills:
            if chunk.is_last and chunk.request_id not in self._aborted:
                name = chunk.request_id
                remaining = rows[name].output_tokens - scheduler.state(name).num_output_tokens - 1
                if remaining == 0:
                    done.append(name)
                elif lockstep is not None:
                    self._finishes.add(name, lockstep + remaining)
        if plan.decodes:
            done += self._finished_decodes(plan, num_steps, lockstep)
        stopped: tuple[str, ...] = ()
        if done:
            stopped = tuple([name for name in done if rows[name].output_tokens < rows[name].max_tokens])
        self.step = None
        aborted, self._aborted = self._aborted, set()
        ends_s: tuple[float, ...] = ()
        if num_steps > 1 and scheduler.wants_step_ends:
            if self._run is None:
                ends_s = tuple(self._chunk_ends[:-1])
            else:
                before = self._run.num_done - num_steps
                ends_s = tuple([self._run.at(before + done) for done in range(1, num_steps)])
        ended_by = {name: rows[name].ended_by for name in done if rows[name].ended_by} if done else {}
        result = StepResult(plan.step, stopped, num_steps, ends_s, ended_by)
        if self._watch is None:
            return scheduler.complete(result, step.end_s)
        if num_steps > 1:
            self._set_durations(step)
        self._watch.before_complete(step, aborted)
        finished = scheduler.complete(result, step.end_s)
        self._watch.after_complete(step, finished)
        return finished

    def _set_durations(self, step: Step) -> None:
        """Sets the durations of several combined steps."""
        if self._run is None:
            step.first_end_s = self._chunk_ends[0]
            step.rest = [StepGroup(after - before, 0.0, 1) for before, after in pairwise(self._chunk_ends)]
        else:
            second = self._run.num_done - step.num_steps + 1
            step.first_end_s = self._run.at(second)
            step.rest = self._run.steps(second, step.num_steps - 1)

    def _finished_decodes(self, plan: StepPlan, num_steps: int, lockstep: int | None) -> list[str]:
        """The decodes that reach their true length after `num_steps` steps, in the order of the plan."""
        if lockstep is not None:
            done = self._finishes.pop_until(lockstep)
            return sorted(done, key=plan.decodes.index) if len(done) > 1 else done
        if num_steps not in self._remaining:
            return []
        pairs = zip(plan.decodes, self._remaining, strict=True)
        return [name for name, remaining in pairs if remaining == num_steps and name not in self._aborted]
