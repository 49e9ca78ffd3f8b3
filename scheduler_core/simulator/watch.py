"""Observations of a run that its records do not have: gaps between tokens, load over time, every step, a timeline."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from scheduler_core.errors import InputError
from scheduler_core.files import atomic_file
from scheduler_core.plan import Finished, StepPlan
from scheduler_core.request import Phase, RequestState, Status
from scheduler_core.scheduler import Scheduler
from scheduler_core.simulator.records import RequestRecord
from scheduler_core.simulator.step_time.decode_run import StepGroups
from scheduler_core.simulator.tables import Columns, write_columns
from scheduler_core.simulator.token_gaps import LockstepGaps, TokenGaps

#: Points of a timeline beyond which every other one is dropped.
MAX_POINTS = 4096
STEPS_SCHEMA = "tailcast.simulated_steps/2"


@dataclass(slots=True)
class Step:
    """A plan that a replica is carrying out `num_steps` times.

    Attributes:
        first_end_s: End of the first of several steps.
        rest: Durations of all but the first.
    """

    plan: StepPlan
    num_steps: int
    start_s: float
    end_s: float
    first_end_s: float
    rest: StepGroups = ()


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """Load of one replica at the end of a step; `kv_usage` is the fraction of its KV blocks in use."""

    time_s: float
    kv_usage: float
    num_running: int
    num_waiting: int


@dataclass(slots=True)
class LoadTimeline:
    """Load of one replica in order of time; of long runs every 2nd, 4th, ... step is kept, so that it stays small."""

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
    """A period in which a request did one thing on one replica; `num_tokens` were processed or generated."""

    request_id: str
    replica_id: str
    kind: Literal["prefill", "decode"]
    start_s: float
    end_s: float
    num_tokens: int


class StepTable:
    """One row per step of a replica, or per run of equal steps that was taken at once, 112 bytes each.

    Of steps taken at once a row has the work of each: `num_decodes` requests got a token in each of the `num_steps` steps
    between `start_s` and `end_s`; `num_prefill_tokens` of `num_prefills` requests were processed; `num_context_tokens` is
    what the first of them read from the cache. `num_running`, `num_waiting` and `num_kv_blocks` (in use) are as of the end.
    """

    _COUNTS = (
        "num_steps", "num_decodes", "num_prefills", "num_prefill_tokens", "num_context_tokens", "num_swapped_tokens",
        "num_admitted", "num_preempted", "num_running", "num_waiting", "num_kv_blocks",
    )  # fmt: skip

    def __init__(self) -> None:
        self._replicas: list[str] = []
        self._times = array("d")
        self._counts = array("q")
        self._capacity = array("q")

    def __len__(self) -> int:
        return len(self._replicas)

    def add(self, replica_id: str, step: Step, scheduler: Scheduler) -> None:
        """Appends a step that the scheduler has completed."""
        plan, capacity = step.plan, scheduler.config.num_kv_blocks
        self._replicas.append(replica_id)
        self._capacity.append(capacity)
        self._times.extend((step.start_s, step.end_s))
        self._counts.extend((
            step.num_steps, len(plan.decodes), len(plan.prefills), plan.num_prefill_tokens, plan.num_context_tokens,
            plan.num_swapped_tokens, len(plan.admitted), len(plan.preempted), scheduler.num_running,
            scheduler.num_waiting, capacity - scheduler.num_free_kv_blocks,
        ))  # fmt: skip

    def columns(self, seed: int) -> Columns:
        """Columns [n] in the order in which the steps ended: the seed, the replica, times and counts, and `step_s` (mean
        duration of one step), `batch_size` (requests in it), `num_tokens` (tokens it processed) and `kv_usage`."""
        start_s, end_s = np.array(self._times, np.float64).reshape(-1, 2).T
        counts = np.array(self._counts, np.int64).reshape(-1, len(self._COUNTS)).T
        named = dict(zip(self._COUNTS, counts, strict=True))
        return {
            "seed": np.full(len(self), seed, np.int64),
            "replica_id": np.array(self._replicas, object),
            "start_s": start_s,
            "end_s": end_s,
            **named,
            "step_s": (end_s - start_s) / named["num_steps"],
            "batch_size": named["num_decodes"] + named["num_prefills"],
            "num_tokens": named["num_decodes"] + named["num_prefill_tokens"],
            "kv_usage": named["num_kv_blocks"] / np.array(self._capacity, np.float64),
        }


def write_steps(parts: Sequence[Columns], path: str | Path) -> None:
    """Writes the tables of one or several seeds as one, as Parquet, CSV or JSON lines by the name's ending."""
    write_columns(parts, path, STEPS_SCHEMA, "steps")


@dataclass(slots=True)
class RunWatch:
    """Observations of all replicas of one run.

    Attributes:
        gaps: Times between tokens; None: not measured.
        loads: By replica: its load over time.
        segments: Who ran when; None: not recorded.
        max_segments: Maximum number of segments.
        steps: Every step; None: not recorded.
    """

    gaps: TokenGaps | None = field(default_factory=TokenGaps)
    loads: dict[str, LoadTimeline] = field(default_factory=dict)
    segments: list[Segment] | None = None
    max_segments: int = 1_000_000
    steps: StepTable | None = None
    _last: dict[str, Segment] = field(default_factory=dict)

    def add_segment(
        self,
        request_id: str,
        replica_id: str,
        kind: Literal["prefill", "decode"],
        step: Step,
        num_tokens: int,
    ) -> None:
        """A request took part in a step; work that continues without a break is one segment.

        Raises:
            InputError: There are too many segments.
        """
        assert self.segments is not None
        last = self._last.get(request_id)
        if last and (last.kind, last.replica_id, last.end_s) == (kind, replica_id, step.start_s):
            last.end_s = step.end_s
            last.num_tokens += num_tokens
            return
        if len(self.segments) == self.max_segments:
            raise InputError("requests", f"{self.max_segments} segments", "a shorter run for a timeline")
        segment = Segment(request_id, replica_id, kind, step.start_s, step.end_s, num_tokens)
        self._last[request_id] = segment
        self.segments.append(segment)

    def kv_usage(self) -> dict[str, float] | None:
        """Mean over time and maximum of the fraction of KV blocks in use, over all replicas; None without two points."""
        area = span = highest = 0.0
        for line in self.loads.values():
            for before, after in pairwise(line.points):
                area += before.kv_usage * (after.time_s - before.time_s)
                span += after.time_s - before.time_s
                highest = max(highest, before.kv_usage, after.kv_usage)
        return {"mean": area / span, "max": highest} if span > 0 else None


class ReplicaWatch:
    """Observes the steps of one replica for a `RunWatch`.

    Args:
        watch: Where observations are collected.
        replica_id: Name of the replica.
        scheduler: Its scheduler.
    """

    def __init__(self, watch: RunWatch, replica_id: str, scheduler: Scheduler) -> None:
        self._watch = watch
        self._replica_id = replica_id
        self._scheduler = scheduler
        self._load = watch.loads.setdefault(replica_id, LoadTimeline())
        self._lockstep: LockstepGaps | None = None
        if watch.gaps is not None and scheduler.num_common_steps is not None:
            self._lockstep = LockstepGaps(watch.gaps)
        #: Requests whose last prefill chunk is in the current step.
        self._prefilled: list[RequestState] = []

    def before_complete(self, step: Step) -> None:
        """Called at the end of a step, before the scheduler has completed it."""
        plan, watch, scheduler = step.plan, self._watch, self._scheduler
        if watch.gaps is not None:
            self._prefilled = [scheduler.state(one.request_id) for one in plan.prefills if one.is_last]
            self._add_gaps(watch.gaps, step)
        if watch.segments is not None:
            for chunk in plan.prefills:
                tokens = chunk.num_tokens * step.num_steps
                watch.add_segment(chunk.request_id, self._replica_id, "prefill", step, tokens)
            for request_id in plan.decodes:
                watch.add_segment(request_id, self._replica_id, "decode", step, step.num_steps)

    def after_complete(self, step: Step, finished: Iterable[Finished]) -> None:
        """Called when the scheduler has completed the step."""
        scheduler = self._scheduler
        if self._lockstep is not None:
            for state in self._prefilled:
                if state.status is Status.RUNNING:
                    self._lockstep.join(state, step.end_s)
            for item in finished:
                self._lockstep.leave(item.request_id)
        if self._watch.steps is not None:
            self._watch.steps.add(self._replica_id, step, scheduler)
        usage = 1 - scheduler.num_free_kv_blocks / scheduler.config.num_kv_blocks
        self._load.add(LoadPoint(step.end_s, usage, scheduler.num_running, scheduler.num_waiting))

    def _add_gaps(self, gaps: TokenGaps, step: Step) -> None:
        """The gaps that end in this step."""
        plan, scheduler, lockstep = step.plan, self._scheduler, self._lockstep
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


def write_chrome_trace(watch: RunWatch, records: Sequence[RequestRecord], path: str | Path) -> None:
    """Writes a timeline for chrome://tracing, Perfetto and other readers of the Trace Event Format, as JSON.

    A process per replica, a row per request, counters of memory and requests.

    Args:
        watch: A watch with segments.
        records: The finished requests.
        path: Where to write.

    Raises:
        InputError: The watch has no segments.
    """
    if watch.segments is None:
        raise InputError("timeline", None, "a run that was watched with segments")
    processes = {name: index for index, name in enumerate(watch.loads)}
    rows = {
        one.request_id: row
        for row, one in enumerate(sorted(records, key=lambda one: (one.arrival_s, one.request_id)))
    }

    def event(kind: str, request_id: str, replica_id: str, start_s: float, end_s: float) -> dict[str, Any]:
        times = {"ts": start_s * 1e6, "dur": (end_s - start_s) * 1e6}
        location = {"pid": processes[replica_id], "tid": rows[request_id]}
        return {"ph": "X", "name": kind, "cat": kind, **location, **times, "args": {"request_id": request_id}}

    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": index, "args": {"name": f"replica {name}"}}
        for name, index in processes.items()
    ]
    for one in watch.segments:
        event_of = event(one.kind, one.request_id, one.replica_id, one.start_s, one.end_s)
        event_of["args"]["tokens"] = one.num_tokens
        events.append(event_of)
    first = next(iter(processes))
    events += [
        event("waiting", one.request_id, one.replica_id or first, one.arrival_s, one.first_scheduled_s)
        for one in records
        if one.queueing_delay_s > 0
    ]
    for name, line in watch.loads.items():
        for point in line.points:
            counters = {
                "KV usage": point.kv_usage,
                "running": point.num_running,
                "waiting": point.num_waiting,
            }
            events += _counter_events(processes[name], point.time_s, counters)
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def _counter_events(process: int, time_s: float, counters: Mapping[str, float]) -> list[dict[str, Any]]:
    return [
        {"ph": "C", "name": name, "pid": process, "ts": time_s * 1e6, "args": {name: value}}
        for name, value in counters.items()
    ]
