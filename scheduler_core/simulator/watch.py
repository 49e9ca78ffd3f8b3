"""Observations of a run beyond its records: gaps between tokens (TBT), KV cache usage, every step.

Gaps are stored compactly: one histogram per class, and the longest gap of each request.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scheduler_core.engine.plan import Finished, StepPlan
from scheduler_core.request import Phase, RequestState, Status
from scheduler_core.scheduler import Scheduler
from scheduler_core.simulator.step_time.base import StepGroups
from scheduler_core.simulator.tables import Columns

#: ln of the ratio of the bounds of a bin; quantiles are accurate to 0.5 %.
_RATIO = math.log(1.005)
_LOWEST_S = 1e-6
_NUM_BINS = 5600  # to 1e6 s

#: Tier and tenant of a request, by which gaps are counted.
GapClass = tuple[int, str]
GAP_CLASS = ("tier", "tenant")
#: Levels of the quantiles that are reported.
QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)


def named_statistics(mean: float, quantiles: Iterable[float], largest: float) -> dict[str, float]:
    """mean, p50, p90, p95, p99, p999 (`QUANTILES`), max and tail_ratio = p99 / p50, without it if the median is 0."""
    p50, p90, p95, p99, p999 = map(float, quantiles)
    named = {"mean": mean, "p50": p50, "p90": p90, "p95": p95, "p99": p99, "p999": p999, "max": largest}
    return named | {"tail_ratio": p99 / p50} if p50 > 0 else named


def _bin(gap_s: float) -> int:
    return min(int(math.log(gap_s / _LOWEST_S) / _RATIO), _NUM_BINS - 1) if gap_s > _LOWEST_S else 0


@dataclass(slots=True, eq=False)
class GapHistogram:
    """Histogram of gaps with bounds that grow by 0.5 %, their sum and maximum, in seconds."""

    counts: np.ndarray = field(default_factory=lambda: np.zeros(_NUM_BINS, np.int64))
    total_s: float = 0.0
    longest_s: float = 0.0

    def add(self, gap_s: float, num: int = 1) -> None:
        """Counts `num` gaps of this length."""
        self.counts[_bin(gap_s)] += num
        self.total_s += gap_s * num
        self.longest_s = max(self.longest_s, gap_s)

    def add_steps(self, steps: StepGroups, num: int) -> None:
        """Counts the duration of every step as `num` gaps; O(affected bins)."""
        for group in steps:
            if group.growth_s == 0.0:
                self.add(group.first_s, num * group.num_steps)
                continue
            gap_s, remaining = group.first_s, group.num_steps
            while remaining:
                index, inside = _bin(gap_s), remaining
                if index < _NUM_BINS - 1:
                    bound_s = _LOWEST_S * math.exp((index + 1) * _RATIO)
                    inside = min(remaining, max(1, math.ceil((bound_s - gap_s) / group.growth_s)))
                self.counts[index] += num * inside
                gap_s += inside * group.growth_s
                remaining -= inside
            self.total_s += group.total_s * num
            self.longest_s = max(self.longest_s, group.longest_s)

    def quantile(self, level: float) -> float:
        """Quantile of the gaps, accurate to 0.5 %; NaN without gaps."""
        total = int(self.counts.sum())
        if total == 0:
            return math.nan
        index = int(np.searchsorted(np.cumsum(self.counts), level * total))
        return min(_LOWEST_S * math.exp((index + 0.5) * _RATIO), self.longest_s)

    def summary(self) -> dict[str, float] | None:
        """See `named_statistics`; in seconds, None without gaps."""
        total = int(self.counts.sum())
        if total == 0:
            return None
        return named_statistics(self.total_s / total, [*map(self.quantile, QUANTILES)], self.longest_s)

    def curve(self) -> tuple[np.ndarray, np.ndarray]:
        """Distribution function as (gaps in seconds, fraction of gaps up to each)."""
        used = np.flatnonzero(self.counts)
        total = max(1, int(self.counts.sum()))
        return _LOWEST_S * np.exp((used + 0.5) * _RATIO), np.cumsum(self.counts)[used] / total

    @classmethod
    def merged(cls, parts: Iterable[GapHistogram]) -> GapHistogram:
        merged = cls()
        for part in parts:
            merged.counts += part.counts
            merged.total_s += part.total_s
            merged.longest_s = max(merged.longest_s, part.longest_s)
        return merged


@dataclass(slots=True)
class TokenGaps:
    """Gaps between tokens of the same request: histograms by class, the longest gap in seconds by request id.
    Combined steps are counted with their individual durations at no extra cost."""

    by_class: defaultdict[GapClass, GapHistogram] = field(default_factory=lambda: defaultdict(GapHistogram))
    longest_s: dict[str, float] = field(default_factory=dict)

    def add_decodes(
        self, states: Sequence[RequestState], start_s: float, first_end_s: float, rest: StepGroups = ()
    ) -> None:
        """Counts the gaps of requests that got a token in each of some steps, with start and end of the first
        step and durations of the others. Called before `complete`."""
        step_s = first_end_s - start_s
        longest_rest_s = max([steps.longest_s for steps in rest], default=0.0)
        num_regular: dict[GapClass, int] = {}
        num_all: dict[GapClass, int] = {}
        longest_s = self.longest_s
        for state in states:  # no calls, as this runs for every token of policies that are not in lockstep
            name = state.request.tier, state.request.tenant
            gap_s = step_s if state.last_token_s is None else first_end_s - state.last_token_s
            if gap_s == step_s:
                num_regular[name] = num_regular.get(name, 0) + 1
            else:
                self.by_class[name].add(gap_s)
            num_all[name] = num_all.get(name, 0) + 1
            if gap_s < longest_rest_s:
                gap_s = longest_rest_s
            if gap_s > longest_s.get(state.request_id, 0.0):
                longest_s[state.request_id] = gap_s
        for name, num in num_regular.items():
            self.by_class[name].add(step_s, num)
        if rest:
            for name, num in num_all.items():
                self.by_class[name].add_steps(rest, num)

    def merged(self, field: str | None = None, value: object = None) -> GapHistogram:
        """The gaps of all requests, or of those with this value of a field of `GAP_CLASS`."""
        index = None if field is None else GAP_CLASS.index(field)
        parts = (part for key, part in self.by_class.items() if index is None or key[index] == value)
        return GapHistogram.merged(parts)


class LockstepGaps:
    """Gaps of requests that decode in lockstep; the cost of a step does not depend on their number.

    The longest gap of a request is that of its first step, or the longest of all common gaps since. Only common
    gaps that no later gap exceeds are stored; the first of them after the request has joined is its longest.
    """

    def __init__(self, gaps: TokenGaps) -> None:
        self._gaps = gaps
        #: End of the last common step.
        self._last_s = 0.0
        #: Requests without a step so far: class, time of the last token.
        self._new: dict[str, tuple[GapClass, float]] = {}
        #: Other requests: class, index of the first common gap after their first gap; length of the latter.
        self._since: dict[str, tuple[GapClass, int]] = {}
        self._first_s: dict[str, float] = {}
        self._num_of: dict[GapClass, int] = {}
        #: Indices and (decreasing) lengths of the common gaps that no later one exceeds.
        self._long_at: list[int] = []
        self._long_s: list[float] = []
        self._num_gaps = 0

    def __len__(self) -> int:
        return len(self._new) + len(self._since)

    def join(self, state: RequestState, last_s: float) -> None:
        """Adds a request that decodes from the next step on; its last token was at `last_s`."""
        self._new[state.request_id] = ((state.request.tier, state.request.tenant), last_s)

    def leave(self, request_id: str) -> None:
        """Removes a request that no longer decodes; ignores unknown requests."""
        if self._new.pop(request_id, None) is not None or request_id not in self._since:
            return
        name, since = self._since.pop(request_id)
        self._num_of[name] -= 1
        if not self._num_of[name]:
            del self._num_of[name]
        longest_s = self._first_s.pop(request_id)
        index = bisect_left(self._long_at, since)
        if index < len(self._long_at):
            longest_s = max(longest_s, self._long_s[index])
        if longest_s > self._gaps.longest_s.get(request_id, 0.0):
            self._gaps.longest_s[request_id] = longest_s

    def keep(self, request_ids: Iterable[str] = ()) -> None:
        """Removes all requests except these."""
        for name in {*self._new, *self._since}.difference(request_ids):
            self.leave(name)

    def add_decodes(self, first_end_s: float, end_s: float, rest: StepGroups) -> None:
        """Counts the gaps of common steps, with ends of the first and last, durations of all but the first."""
        gaps, num_of = self._gaps, self._num_of
        if num_of:
            gap_s = first_end_s - self._last_s
            for name, num in num_of.items():
                gaps.by_class[name].add(gap_s, num)
            self._add_common(gap_s)
        if self._new:
            for request_id, (name, last_s) in self._new.items():
                gap_s = first_end_s - last_s
                gaps.by_class[name].add(gap_s)
                self._since[request_id] = (name, self._num_gaps)
                self._first_s[request_id] = gap_s
                num_of[name] = num_of.get(name, 0) + 1
            self._new.clear()
        if rest:
            for name, num in num_of.items():
                gaps.by_class[name].add_steps(rest, num)
            self._add_common(max([steps.longest_s for steps in rest]))
        self._last_s = end_s

    def _add_common(self, gap_s: float) -> None:
        """Appends a common gap and drops earlier ones that are not longer."""
        at, lengths = self._long_at, self._long_s
        while lengths and lengths[-1] <= gap_s:
            at.pop()
            lengths.pop()
        at.append(self._num_gaps)
        lengths.append(gap_s)
        self._num_gaps += 1


STEPS_SCHEMA = "tailcast.simulated_steps/2"


@dataclass(slots=True)
class Step:
    """A plan that a replica executes `num_steps` times; `first_end_s` is the end of the first of them, and
    `rest` has the durations of the others."""

    plan: StepPlan
    num_steps: int
    start_s: float
    end_s: float
    first_end_s: float
    rest: StepGroups = ()


class StepTable:
    """Table with one row per step of a replica, or per run of combined equal steps.

    A row has the work of each of its `num_steps` steps between `start_s` and `end_s`: `num_decodes` requests got a token,
    `num_prefill_tokens` tokens of `num_prefills` requests were processed; `num_context_tokens` is the number of tokens
    read from the cache in the first step. `num_running`, `num_waiting` and `num_kv_blocks` (in use) are values at the end.
    """

    _NAMES = (
        "replica_id", "start_s", "end_s", "num_steps", "num_decodes", "num_prefills", "num_prefill_tokens", "num_context_tokens", "num_swapped_tokens",
        "num_admitted", "num_preempted", "num_running", "num_waiting", "num_kv_blocks", "capacity",
    )  # fmt: skip

    def __init__(self) -> None:
        self._rows: list[tuple[Any, ...]] = []

    def add(self, replica_id: str, step: Step, scheduler: Scheduler) -> None:
        """Appends a step that the scheduler has completed."""
        plan, capacity = step.plan, scheduler.config.capacity_blocks
        self._rows.append((
            replica_id, step.start_s, step.end_s, step.num_steps, len(plan.decodes), len(plan.prefills), plan.num_prefill_tokens, plan.num_context_tokens,
            plan.num_swapped_tokens, len(plan.admitted), len(plan.preempted), scheduler.num_running,
            scheduler.num_waiting, capacity - scheduler.pool.kv.num_free_blocks, capacity,
        ))  # fmt: skip

    def columns(self, seed: int) -> Columns:
        """Columns [n] in the order of the ends of the steps: seed, replica, times, counts, `step_s` (mean duration
        of a step), `batch_size` (requests per step), `num_tokens` (processed tokens per step) and `kv_usage`."""
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
    """Observations of all replicas of one run: gaps between tokens; the table of steps (None: not recorded); the
    fraction of KV blocks in use, as an integral over time and replicas, with the integrated time, and its maximum."""

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

    def before_complete(self, step: Step, aborted: Set[str] = frozenset()) -> None:
        """Called at the end of a step, before `Scheduler.complete`; adds the gaps that end in it. `aborted` are the requests
        that were aborted during it."""
        plan, scheduler, gaps, lockstep = step.plan, self._scheduler, self._watch.gaps, self._lockstep
        self._prefilled = [
            scheduler.state(chunk.request_id)
            for chunk in plan.prefills
            if chunk.is_last and chunk.request_id not in aborted
        ]
        # A request whose cache was recomputed samples its next token at the end of a prefill.
        recomputed = [state for state in self._prefilled if state.last_token_s is not None]
        if lockstep is not None and scheduler.num_common_steps is None:
            lockstep.keep()
            lockstep = self._lockstep = None
        if lockstep is None:
            decoding = scheduler.decoding
            if aborted:
                decoding = [state for state in decoding if state.status is not Status.GONE]
            gaps.add_decodes(decoding, step.start_s, step.first_end_s, step.rest)
        else:
            for name in plan.preempted:
                lockstep.leave(name)
            for transfer in plan.swapped_in:
                if transfer.request_id in aborted:
                    continue
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
        """Called after `Scheduler.complete`."""
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
        usage = 1 - scheduler.pool.kv.num_free_blocks / scheduler.config.capacity_blocks
        watch.max_kv_usage = max(watch.max_kv_usage, usage)
        self._usage = (step.end_s, usage)

    def on_abort(self, request_id: str) -> None:
        """Called after a request was aborted: its next tokens, if any, are those of a new attempt."""
        if self._lockstep is not None:
            self._lockstep.leave(request_id)
        self._watch.gaps.longest_s.pop(request_id, None)

    def on_stop(self, request_ids: Iterable[str], now: float) -> None:
        """Called when the replica has failed with these requests: their next tokens, if any, are those of a new attempt."""
        for name in request_ids:
            if self._lockstep is not None:
                self._lockstep.leave(name)
            self._watch.gaps.longest_s.pop(name, None)
        if self._usage is not None:
            since_s, usage = self._usage
            self._watch.kv_seconds += usage * (now - since_s)
            self._watch.observed_s += now - since_s
            self._usage = None
