"""Observations of a run that its records do not have: gaps between tokens, memory in use, every step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scheduler_core.plan import Finished, StepPlan
from scheduler_core.request import Phase, RequestState, Status
from scheduler_core.scheduler import Scheduler
from scheduler_core.simulator.step_time.base import StepGroups
from scheduler_core.simulator.tables import Columns
from scheduler_core.simulator.token_gaps import LockstepGaps, TokenGaps

STEPS_SCHEMA = "tailcast.simulated_steps/2"


@dataclass(slots=True)
class Step:
    """A plan that a replica is carrying out `num_steps` times; of several steps the end of the first, and the durations of
    the others."""

    plan: StepPlan
    num_steps: int
    start_s: float
    end_s: float
    first_end_s: float
    rest: StepGroups = ()


class StepTable:
    """One row per step of a replica, or per run of equal steps that was taken at once.

    Of steps taken at once a row has the work of each: `num_decodes` requests got a token in each of the `num_steps` steps
    between `start_s` and `end_s`; `num_prefill_tokens` of `num_prefills` requests were processed; `num_context_tokens` is
    what the first of them read from the cache. `num_running`, `num_waiting` and `num_kv_blocks` (in use) are as of the end.
    """

    _NAMES = (
        "replica_id", "start_s", "end_s", "num_steps", "num_decodes", "num_prefills", "num_prefill_tokens", "num_context_tokens", "num_swapped_tokens",
        "num_admitted", "num_preempted", "num_running", "num_waiting", "num_kv_blocks", "capacity",
    )  # fmt: skip

    def __init__(self) -> None:
        self._rows: list[tuple[Any, ...]] = []

    def add(self, replica_id: str, step: Step, scheduler: Scheduler) -> None:
        """Appends a step that the scheduler has completed."""
        plan, capacity = step.plan, scheduler.config.num_kv_blocks
        self._rows.append((
            replica_id, step.start_s, step.end_s, step.num_steps, len(plan.decodes), len(plan.prefills), plan.num_prefill_tokens, plan.num_context_tokens,
            plan.num_swapped_tokens, len(plan.admitted), len(plan.preempted), scheduler.num_running,
            scheduler.num_waiting, capacity - scheduler.pool.kv.num_free_blocks, capacity,
        ))  # fmt: skip

    def columns(self, seed: int) -> Columns:
        """Columns [n] in the order in which the steps ended: the seed, the replica, times and counts, and `step_s` (mean
        duration of one step), `batch_size` (requests in it), `num_tokens` (tokens it processed) and `kv_usage`."""
        values = [np.array(column) for column in zip(*self._rows, strict=True)]
        named = dict(zip(self._NAMES, values, strict=True))
        return {
            "seed": np.full(len(self._rows), seed, np.int64),
            **named,
            "replica_id": named["replica_id"].astype(object),
            "step_s": (named["end_s"] - named["start_s"]) / named["num_steps"],
            "batch_size": named["num_decodes"] + named["num_prefills"],
            "num_tokens": named["num_decodes"] + named["num_prefill_tokens"],
            "kv_usage": named["num_kv_blocks"] / named["capacity"],
        }


@dataclass(slots=True)
class RunWatch:
    """Observations of all replicas of one run.

    Attributes:
        gaps: Times between tokens.
        steps: Every step; None: not recorded.
        kv_seconds, observed_s: Integral over time of the fraction of KV blocks in use, summed over replicas, and that time.
        max_kv_usage: The fraction at its highest.
    """

    gaps: TokenGaps = field(default_factory=TokenGaps)
    steps: StepTable | None = None
    kv_seconds: float = 0.0
    observed_s: float = 0.0
    max_kv_usage: float = 0.0

    def kv_usage(self) -> dict[str, float] | None:
        """Mean over time and maximum of the fraction of KV blocks in use; None if no replica took two steps."""
        if not self.observed_s:
            return None
        return {"mean": self.kv_seconds / self.observed_s, "max": self.max_kv_usage}


class ReplicaWatch:
    """Observes the steps of one replica for a `RunWatch`."""

    def __init__(self, watch: RunWatch, replica_id: str, scheduler: Scheduler) -> None:
        self._watch = watch
        self._replica_id = replica_id
        self._scheduler = scheduler
        #: End of the last step and the fraction of KV blocks in use since then.
        self._usage: tuple[float, float] | None = None
        self._lockstep = None if scheduler.num_common_steps is None else LockstepGaps(watch.gaps)
        #: Requests whose last prefill chunk is in the current step.
        self._prefilled: list[RequestState] = []

    def before_complete(self, step: Step) -> None:
        """Called at the end of a step, before the scheduler has completed it; adds the gaps that end in it."""
        plan, scheduler, gaps, lockstep = step.plan, self._scheduler, self._watch.gaps, self._lockstep
        self._prefilled = [scheduler.state(one.request_id) for one in plan.prefills if one.is_last]
        # A request whose cache was recomputed samples its next token at the end of a prefill.
        recomputed = [state for state in self._prefilled if state.last_token_s is not None]
        if lockstep is not None and scheduler.num_common_steps is None:
            lockstep.keep()
            lockstep = self._lockstep = None
        if lockstep is None:
            gaps.add_decodes(scheduler.decoding, step.start_s, step.first_end_s, step.rest)
        else:
            for name in plan.preempted:
                lockstep.leave(name)
            for transfer in plan.swapped_in:
                state = scheduler.state(transfer.request_id)
                if state.status is Status.RUNNING and state.phase is Phase.DECODE:
                    assert state.last_token_s is not None
                    lockstep.join(state, state.last_token_s)
            if plan.decodes:
                if len(lockstep) != len(plan.decodes):
                    lockstep.keep(plan.decodes)
                lockstep.add_decodes(step.first_end_s, step.end_s, step.rest)
        if recomputed:
            gaps.add_decodes(recomputed, step.start_s, step.end_s)

    def after_complete(self, step: Step, finished: Iterable[Finished]) -> None:
        """Called when the scheduler has completed the step."""
        scheduler, watch = self._scheduler, self._watch
        if self._lockstep is not None:
            for state in self._prefilled:
                if state.status is Status.RUNNING:
                    self._lockstep.join(state, step.end_s)
            for item in finished:
                self._lockstep.leave(item.request_id)
        if watch.steps is not None:
            watch.steps.add(self._replica_id, step, scheduler)
        if self._usage is not None:
            since_s, usage = self._usage
            watch.kv_seconds += usage * (step.end_s - since_s)
            watch.observed_s += step.end_s - since_s
        usage = 1 - scheduler.pool.kv.num_free_blocks / scheduler.config.num_kv_blocks
        watch.max_kv_usage = max(watch.max_kv_usage, usage)
        self._usage = (step.end_s, usage)
