"""What a run is watched for beside its records: gaps between tokens, memory over time, who ran when."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from scheduler_core.batching import Batch
from scheduler_core.decision_log import DecisionLog
from scheduler_core.errors import InputError
from scheduler_core.plan import Finished, StepPlan, StepResult
from scheduler_core.policies.base import Policy
from scheduler_core.request import Phase, Status
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from scheduler_core.simulator.common_gaps import CommonGaps
from scheduler_core.simulator.decode_run import StepGroup, Steps
from scheduler_core.simulator.step_table import StepTable
from scheduler_core.simulator.token_gaps import TokenGaps

#: Points of a timeline beyond which every other one is dropped.
MAX_POINTS = 4096


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """Load of one replica at the end of a step.

    Attributes:
        time_s: When.
        kv_share: Share of its KV blocks in use.
        num_running: Admitted requests.
        num_waiting: Waiting requests.
    """

    time_s: float
    kv_share: float
    num_running: int
    num_waiting: int


@dataclass(slots=True)
class LoadTimeline:
    """Load of one replica over time; of long runs every 2nd, 4th, ... step is kept, so that it stays small.

    Attributes:
        points: In order of time.
    """

    points: list[LoadPoint] = field(default_factory=list)
    _stride: int = 1
    _count: int = 0

    def add(self, point: LoadPoint) -> None:
        """Takes the next point, or passes over it."""
        if self._count % self._stride == 0:
            self.points.append(point)
            if len(self.points) > MAX_POINTS:
                self.points = self.points[::2]
                self._stride *= 2
        self._count += 1


@dataclass(slots=True)
class Segment:
    """A stretch of time in which a request did one thing.

    Attributes:
        request_id: Which.
        replica_id: Where.
        kind: "prefill" or "decode".
        start_s: From.
        end_s: To.
        num_tokens: Tokens processed or generated.
    """

    request_id: str
    replica_id: str
    kind: Literal["prefill", "decode"]
    start_s: float
    end_s: float
    num_tokens: int


@dataclass(slots=True)
class RunWatch:
    """Watches all replicas of one run.

    Attributes:
        gaps: Times between tokens; None: not measured.
        loads: By replica: its load over time.
        segments: Who ran when; None: not kept.
        max_segments: Most segments that are kept.
        steps: Every step; None: not kept.
    """

    gaps: TokenGaps | None = field(default_factory=TokenGaps)
    loads: dict[str, LoadTimeline] = field(default_factory=dict)
    segments: list[Segment] | None = None
    max_segments: int = 1_000_000
    steps: StepTable | None = None
    _last: dict[str, Segment] = field(default_factory=dict)

    def scheduler(
        self, config: SchedulerConfig, policy: Policy, log: DecisionLog | None = None, replica_id: str = "0"
    ) -> WatchedScheduler:
        """A scheduler that tells this watch of every step."""
        self.loads[replica_id] = LoadTimeline()
        return WatchedScheduler(config, policy, log, self, replica_id)

    def worked(
        self,
        request_id: str,
        replica_id: str,
        kind: Literal["prefill", "decode"],
        span: tuple[float, float],
        tokens: int,
    ) -> None:
        """A request did something from span[0] to span[1]; what goes on without a break is one segment.

        Raises:
            InputError: There are too many.
        """
        assert self.segments is not None
        last = self._last.get(request_id)
        if last and (last.kind, last.replica_id, last.end_s) == (kind, replica_id, span[0]):
            last.end_s = span[1]
            last.num_tokens += tokens
            return
        if len(self.segments) == self.max_segments:
            raise InputError(
                "requests", f"{self.max_segments} stretches of work", "a shorter run for a timeline"
            )
        self._last[request_id] = segment = Segment(request_id, replica_id, kind, *span, tokens)
        self.segments.append(segment)


class WatchedScheduler(Scheduler):
    """The scheduler itself, which tells a `RunWatch` of every step; it decides nothing differently.

    Args:
        config: See `Scheduler`, as for the arguments that follow.
        policy: Orders the waiting requests.
        log: Records every call and plan.
        watch: Who is told.
        replica_id: Whose scheduler this is.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        policy: Policy,
        log: DecisionLog | None,
        watch: RunWatch,
        replica_id: str,
    ) -> None:
        super().__init__(config, policy, log)
        self._watch = watch
        self._replica_id = replica_id
        self._common: CommonGaps | None = None
        if watch.gaps is not None and self.num_common_steps is not None:
            self._common = CommonGaps(watch.gaps)
        self._first_end_s: float | None = None
        self._rest: Steps = ()

    def timed(self, first_end_s: float, rest: Steps) -> None:
        """Before `complete`, if several steps were taken: the end of the first, and durations of the others.

        If nobody says so, all have taken equally long.
        """
        self._first_end_s, self._rest = first_end_s, rest

    def complete(self, result: StepResult, now: float) -> tuple[Finished, ...]:
        """See `Scheduler.complete`."""
        plan, batch = self._open_step()
        start_s, steps, watch = self._opened_s, result.num_steps, self._watch
        if steps == 1:
            self._first_end_s, self._rest = now, ()
        elif self._first_end_s is None:
            step_s = (now - start_s) / steps
            self._first_end_s, self._rest = start_s + step_s, (StepGroup(step_s, 0.0, steps - 1),)
        if watch.gaps is not None:
            self._count_gaps(watch.gaps, plan, batch, now)
        if watch.segments is not None:
            for chunk in plan.prefills:
                tokens = chunk.num_tokens * steps
                watch.worked(chunk.request_id, self._replica_id, "prefill", (start_s, now), tokens)
            for request_id in plan.decodes:
                watch.worked(request_id, self._replica_id, "decode", (start_s, now), steps)
        finished = super().complete(result, now)
        self._first_end_s = None
        if self._common is not None:
            for state, chunk in batch.prefills:
                if chunk.is_last and state.status is Status.RUNNING:
                    self._common.join(state, now)
            for item in finished:
                self._common.leave(item.request_id)
        if watch.steps is not None:
            watch.steps.add(self._replica_id, (start_s, now), steps, plan, self)
        used = 1 - self.num_free_kv_blocks / self.config.num_kv_blocks
        watch.loads[self._replica_id].add(LoadPoint(now, used, self.num_running, self.num_waiting))
        return finished

    def _count_gaps(self, gaps: TokenGaps, plan: StepPlan, batch: Batch, now: float) -> None:
        """The gaps that end in this step."""
        start_s, first_end_s = self._opened_s, self._first_end_s
        assert first_end_s is not None
        # A request whose cache was recomputed samples its next token at the end of a prefill.
        again = [s for s, chunk in batch.prefills if chunk.is_last and s.last_token_s is not None]
        common = self._common
        if common is not None and self.num_common_steps is None:
            common.leave_all()
            common = self._common = None
        if common is None:
            gaps.decoded(self.decoding, start_s, first_end_s, self._rest)
        else:
            for name in plan.preempted:
                common.leave(name)
            for transfer in plan.swapped_in:
                state = self._pool.find(transfer.request_id)
                if state is None or state.status is not Status.RUNNING or state.phase is Phase.PREFILL:
                    continue
                assert state.last_token_s is not None
                common.join(state, state.last_token_s)
            if plan.decodes:
                if len(common) != len(plan.decodes):
                    common.keep(plan.decodes)
                common.decoded(first_end_s, now, self._rest)
        if again:
            gaps.decoded(again, start_s, now)


def kv_quantiles(loads: Mapping[str, LoadTimeline]) -> dict[str, float] | None:
    """Mean over time and maximum of the share of KV blocks in use, over all replicas; None without two points."""
    area = span = 0.0
    most = -math.inf
    for line in loads.values():
        for before, after in zip(line.points, line.points[1:], strict=False):
            area += before.kv_share * (after.time_s - before.time_s)
            span += after.time_s - before.time_s
            most = max(most, before.kv_share, after.kv_share)
    return {"mean": area / span, "max": most} if span > 0 else None
