"""Multi-tier Llumnix: order of the local queues, promotion, headroom, and the pause of a live migration."""

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from scheduler_core.policies import make_policy
from scheduler_core.request import Request
from scheduler_core.routing.base import RoutingRequest
from scheduler_core.routing.llumnix import (
    AdaptiveHeadroom,
    Llumnix,
    MigrationPlanner,
    exponential_headroom,
    full_freeness,
)
from scheduler_core.routing.migration import LAST_STAGE_BLOCKS, KVLink, Move
from scheduler_core.routing.snapshot import ReplicaSnapshot
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from scheduler_core.simulator.loop import Simulation, SimulationOutcome
from scheduler_core.simulator.step_time.base import LinearStepTime
from scheduler_core.simulator.trace import Trace
from scheduler_core.simulator.trace_predictions import Predictions
from tests.scheduler_core.helpers import simulate, trace_row
from tests.scheduler_core.invariants.helpers import steps_of

pytestmark = pytest.mark.mend

TIERS = 5
SIZES = [(150, 0), *(pytest.param(1000, seed, marks=pytest.mark.slow) for seed in range(1, 4))]
LIMITS = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256, num_kv_blocks=60, kv_watermark=0.0)
ROUNDING = 1e-9


def trace_of(num: int, seed: int, rate_rps: float = 12.0, most: int = 120, **more: Any) -> Trace:
    """Requests of all tiers; by default at a rate at which memory runs out again and again."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate_rps, num)).tolist()
    rows = [
        trace_row(
            f"r{index}", times[index], int(rng.integers(5, most)), int(rng.integers(10, 120)), 120,
            tier=int(rng.integers(TIERS)), **more,
        )
        for index in range(num)
    ]  # fmt: skip
    return Trace(tuple(rows))


@pytest.mark.parametrize("quota_s", [math.inf, 2.0])
@pytest.mark.parametrize("former", ["vllm", "chunked_prefill"])
@pytest.mark.parametrize(("num", "seed"), SIZES)
def test_requests_are_admitted_by_tier_less_the_quotas_they_waited(
    former: str, quota_s: float, num: int, seed: int
) -> None:
    trace = trace_of(num, seed, rate_rps=40.0)
    rows = {row.request_id: row for row in trace.requests}

    def rank(name: str, now: float) -> tuple[int, float]:
        row, quotas = rows[name], 0
        while row.tier > quotas and row.arrival_s + (quotas + 1) * quota_s <= now:
            quotas += 1
        return row.tier - quotas, row.arrival_s

    steps = steps_of(
        trace, "llumlet", policy_parameters={"quota_s": quota_s},
        scheduler=replace(LIMITS, batching=former), step_time=LinearStepTime(),
    )  # fmt: skip
    overtaken = num_evicted = 0
    for step in steps:
        now = step.start_s
        waiting = step.waiting - {*step.preempted}
        num_evicted += len(step.preempted)
        for name in step.admitted:
            assert all(rank(name, now) < rank(other, now) for other in waiting)
            overtaken += sum(rows[name].arrival_s > rows[other].arrival_s for other in waiting)
    assert overtaken > num / 2
    assert num_evicted > 5


@pytest.mark.parametrize(("num", "seed"), SIZES)
def test_a_request_that_has_waited_its_quotas_is_overtaken_by_no_later_one(num: int, seed: int) -> None:
    """Also not by those that were evicted: a request of the last tier is served although urgent ones alone fill the engine."""
    quota_s, trace = 1.5, trace_of(num, seed, rate_rps=40.0)
    rows = {row.request_id: row for row in trace.requests}
    steps = steps_of(
        trace, "llumlet", policy_parameters={"quota_s": quota_s}, scheduler=LIMITS, step_time=LinearStepTime()
    )
    num_due = overtaken = 0
    for step in steps:
        due = [
            n
            for n in step.waiting - {*step.preempted}
            if rows[n].arrival_s + rows[n].tier * quota_s <= step.start_s
        ]
        num_due += len(due)
        for name in step.admitted:
            assert all(rows[name].arrival_s < rows[other].arrival_s for other in due)
            overtaken += sum(rows[name].arrival_s > rows[other].arrival_s for other in step.waiting)
    assert num_due > num
    assert overtaken > num / 4


def test_promotions_come_at_the_same_time_when_steps_are_combined() -> None:
    trace, options = (
        trace_of(100, 3, rate_rps=20.0),
        {"policy_parameters": {"quota_s": 0.7}, "scheduler": LIMITS},
    )
    single, combined = (simulate(trace, "llumlet", exact_steps=exact, **options) for exact in (True, False))
    assert single.records == combined.records


@dataclass(kw_only=True, slots=True)
class CheckedRouter(Llumnix):
    """Checks every choice; counts those into headroom, and changes of adaptive headroom."""

    num_choices: int = 0
    num_full: int = 0
    fractions: list[tuple[float, tuple[float, ...]]] = field(default_factory=list)

    def choose(self, item: RoutingRequest, replicas: Sequence[ReplicaSnapshot], now: float) -> str:
        chosen = Llumnix.choose(self, item, replicas, now)
        freeness = {replica.replica_id: full_freeness(replica, self.headroom) for replica in replicas}
        assert freeness[chosen] == max(freeness.values())
        self.num_choices += 1
        if freeness[chosen] < 0:
            self.num_full += 1
            assert max(freeness.values()) < 0, (
                "into the headroom although another replica has memory outside of it"
            )
        return chosen

    def on_first_token(self, request: Request, ttft_s: float, now: float) -> None:
        Llumnix.on_first_token(self, request, ttft_s, now)
        if not self.fractions or self.fractions[-1][1] != self.headroom.fractions:
            self.fractions.append((now, self.headroom.fractions))


@dataclass(kw_only=True, slots=True)
class CheckedPlanner(MigrationPlanner):
    """Checks Eqs. 1, 2 and 4 from the single requests, and that every move leaves its destination outside of headroom."""

    num_moves: int = 0

    def plan(
        self, replicas: Sequence[ReplicaSnapshot], in_flight: AbstractSet[str], now: float
    ) -> tuple[Move, ...]:
        moves = MigrationPlanner.plan(self, replicas, in_flight, now)
        by_name = {replica.replica_id: replica for replica in replicas}
        free = {name: self.free_blocks(replica) for name, replica in by_name.items()}
        for name, replica in by_name.items():
            freeness = free[name] / max(replica.num_running, 1)
            assert full_freeness(replica, self.headroom) == pytest.approx(freeness, abs=ROUNDING)
        for move in moves:
            source, target = by_name[move.source], by_name[move.destination]
            (view,) = [one for one in source.requests if one.request_id == move.request_id]
            own = (
                0.0
                if view.tier in target.tiers
                else self.headroom.fractions[view.tier] * target.num_kv_blocks
            )
            assert free[move.destination] - own - view.demand_blocks >= -ROUNDING
            assert (
                full_freeness(target, self.headroom) - full_freeness(source, self.headroom) >= self.threshold
            )
        self.num_moves += len(moves)
        return moves

    def free_blocks(self, replica: ReplicaSnapshot) -> float:
        """M less the blocks of running requests, the demand of the head of the queue, and headroom once for each tier."""
        views = list(replica.requests)
        waiting = [view for view in views if not view.running]
        head = min(waiting, key=lambda view: (view.tier, view.arrival_s), default=None)
        used = sum(view.kv_blocks for view in views) + (0 if head is None else head.demand_blocks)
        reserved = math.fsum(self.headroom.fractions[tier] for tier in {view.tier for view in views})
        return replica.num_kv_blocks * (1 - reserved) - used


def run(
    trace: Trace, router: Llumnix, planner: MigrationPlanner | None = None, **more: Any
) -> SimulationOutcome:
    limits = more.pop("limits", LIMITS)
    schedulers = {f"n{number}": Scheduler(limits, make_policy("llumlet")) for number in range(3)}
    step_time = LinearStepTime()
    outcome = Simulation(trace, schedulers, step_time, Predictions(), router, planner=planner, **more).run()
    assert len(outcome.records) == len(trace)
    return outcome


@pytest.mark.parametrize(("num", "seed"), SIZES)
@pytest.mark.parametrize("rate_rps", [8.0, 60.0])
def test_headroom_is_kept_in_dispatch_and_migration(rate_rps: float, num: int, seed: int) -> None:
    headroom = exponential_headroom(TIERS)
    router, planner = CheckedRouter(headroom=headroom), CheckedPlanner(headroom=headroom)
    outcome = run(trace_of(num, seed, rate_rps), router, planner)
    assert router.num_choices == num
    assert planner.num_moves > 5
    assert outcome.num_migrations > 5
    assert router.num_full > 0 or rate_rps == 8


@pytest.mark.parametrize(("num", "seed"), SIZES)
def test_adaptive_headroom_follows_missed_targets_within_its_bounds(num: int, seed: int) -> None:
    """Even tiers cannot meet their target, odd ones always do."""
    rows = [
        replace(row, ttft_slo_s=1e-6 if row.tier % 2 == 0 else 1e6) for row in trace_of(num, seed).requests
    ]
    initial, window_s = exponential_headroom(TIERS).fractions, 0.3
    router = CheckedRouter(headroom=AdaptiveHeadroom(initial, window_s=window_s))
    run(Trace(tuple(rows)), router, CheckedPlanner(headroom=router.headroom))
    times = [now for now, _ in router.fractions[1:]]
    assert len(times) > 10
    assert min(np.diff(times)) >= window_s - ROUNDING
    for _, fractions in router.fractions:
        scales = np.array(fractions) / initial
        assert scales.min() >= 1 / 16 - ROUNDING
        assert scales.max() <= 2 + ROUNDING
        assert all(scales[::2] >= 1 - ROUNDING)
        assert all(scales[1::2] <= 1 + ROUNDING)
    assert math.fsum(router.headroom.fractions) <= 2 * math.fsum(initial)
    last = np.array(router.headroom.fractions) / initial
    assert last[::2] == pytest.approx(2.0)
    assert last[1::2].max() < 0.5


@pytest.mark.parametrize(("most", "num"), [(60, 40), (1500, 40)])
def test_the_pause_of_a_migration_does_not_depend_on_the_context(most: int, num: int) -> None:
    """One move at a time, so that the link is free: the pause is the copy of the last stage alone."""
    trace, link = trace_of(num, 1, 4.0 if most < 100 else 1.0, most), KVLink(bytes_per_s=1e9)
    headroom = exponential_headroom(TIERS, 0.0)
    planner = MigrationPlanner(headroom=headroom, interval_s=0.6)
    limits = replace(LIMITS, num_kv_blocks=400, max_num_batched_tokens=2048)
    outcome = run(trace, Llumnix(headroom=headroom), planner, interval_s=0.6, link=link, limits=limits)
    assert len(outcome.migration_pauses_s) > 5
    longest_s = link.copy_s(LAST_STAGE_BLOCKS * limits.kv_block_tokens)
    assert max(outcome.migration_pauses_s) <= longest_s + ROUNDING
    assert min(outcome.migration_pauses_s) >= link.latency_s - ROUNDING
