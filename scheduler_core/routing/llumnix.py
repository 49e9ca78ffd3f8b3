"""Multi-tier Llumnix: headroom, freeness, dispatch, migration planning, and auto-scaling signals (Vestrum et
al., "Beyond Binary Priorities: Multi-Tier SLA Scheduling", section 3; Sun et al. 2024, "Llumnix", OSDI)."""

import math
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from heapq import heapify, heappop
from typing import ClassVar, Literal

from scheduler_core.errors import InputError
from scheduler_core.prediction.urgency import LEVELS
from scheduler_core.ranges import FINITE, POSITIVE, check_ranges
from scheduler_core.request import Request
from scheduler_core.routing.base import Router, RoutingRequest, ScaleIn, ScaleOut, Scaler
from scheduler_core.routing.migration import Move
from scheduler_core.routing.snapshot import Capacity, ReplicaSnapshot, ReplicaStatus, RequestView

#: `AdaptiveHeadroom`: bounds of a_p, and the fraction of requests that may miss their target.
_MIN_SCALE, _MAX_SCALE, _MISSED_FRACTION = 1 / 16, 2.0, 0.01


@dataclass(slots=True)
class Headroom:
    """KV memory counted as used for each tier that is present on a replica (multi-tier, section 3.3). `fractions`
    are H_p / M by tier, most urgent first. `InputError` without a tier, or for a fraction outside [0, 1]."""

    fractions: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.fractions:
            raise InputError("headroom fractions", self.fractions, "at least one tier")
        for fraction in self.fractions:
            if not 0 <= fraction <= 1:
                raise InputError("headroom fraction", fraction, "numbers in [0, 1]")

    def blocks(self, tiers: Iterable[int], num_kv_blocks: int) -> float:
        """V_headroom: sum of H_p over the distinct tiers (Eq. 4), in blocks of M = num_kv_blocks.
        `InputError` for an unknown tier."""
        present = set(tiers)
        for tier in present:
            if not 0 <= tier < len(self.fractions):
                raise InputError("tier", tier, f"0 to {len(self.fractions) - 1}")
        return num_kv_blocks * math.fsum(self.fractions[tier] for tier in present)


@dataclass(kw_only=True, slots=True)
class AdaptiveHeadroom(Headroom):
    """Headroom that follows the recent need of each tier, as the multi-tier paper proposes in section 6.5: "adjusting H_p
    upward when SLO violations are detected and downward when headroom is consistently unused".

    H_p = M h_p a_p;   at the end of a window:  a_p <- min(2 a_p, 2) if more than 1 % of the tier missed its target,
                                                a_p <- max(0.9 a_p, 1/16) if not

    | symbol | meaning | unit |
    | --- | --- | --- |
    | h_p | initial `fractions`, with a_p = 1 | - |
    | target | `ttft_slo_s` of the requests that ended in the window | s |
    | window_s | least time between two changes | s |

    A tier without such a request in a window keeps its headroom. All headroom together is at most twice the initial one.
    """

    window_s: float
    #: a_p, and of the current window the numbers of requests with a target and of those that missed it, by tier.
    _scales: list[float] = field(init=False, repr=False)
    _numbers: list[int] = field(init=False, repr=False)
    _missed: list[int] = field(init=False, repr=False)
    _initial: tuple[float, ...] = field(init=False, repr=False)
    _start_s: float = field(default=-math.inf, init=False, repr=False)

    def __post_init__(self) -> None:
        Headroom.__post_init__(self)
        check_ranges(self, window_s=(POSITIVE, FINITE))
        if max(self.fractions) > 1 / _MAX_SCALE:
            raise InputError(
                "headroom fraction", max(self.fractions), f"at most {1 / _MAX_SCALE}, to double it"
            )
        self._initial, num = self.fractions, len(self.fractions)
        self._scales, self._numbers, self._missed = [1.0] * num, [0] * num, [0] * num

    def observe(self, tier: int, met: bool, now: float) -> None:
        """Counts a request that ended, and whether it met its target; adapts when the window is over."""
        if self._start_s == -math.inf:
            self._start_s = now
        if now - self._start_s >= self.window_s:
            self._adapt()
            self._start_s = now
        self._numbers[tier] += 1
        self._missed[tier] += not met

    def _adapt(self) -> None:
        for tier, number in enumerate(self._numbers):
            if self._missed[tier] > _MISSED_FRACTION * number:
                self._scales[tier] = min(2 * self._scales[tier], _MAX_SCALE)
            elif number:
                self._scales[tier] = max(0.9 * self._scales[tier], _MIN_SCALE)
            self._numbers[tier] = self._missed[tier] = 0
        self.fractions = tuple(h * a for h, a in zip(self._initial, self._scales, strict=True))


def exponential_headroom(
    num_tiers: int = len(LEVELS), max_fraction: float = 0.20, decay: float = 1.0
) -> Headroom:
    """H_p = M h_max exp(-lambda p) (Eq. 3) for K tiers. `decay` is lambda: 1 in figure 3, 2.5/(K - 1) in the paper's
    released code, which also rounds the blocks down. `InputError` for an argument outside its range."""
    if not 0 <= max_fraction <= 1:
        raise InputError("max_fraction", max_fraction, "numbers in [0, 1]")
    if not 0 <= decay < math.inf:
        raise InputError("decay", decay, "numbers >= 0")
    return Headroom(tuple(max_fraction * math.exp(-decay * tier) for tier in range(num_tiers)))


def virtual_usage_blocks(replica: ReplicaSnapshot) -> float:
    """Sum of V(r) without headroom (Eq. 2), in blocks; infinite for a draining replica.

    V is the number of held blocks for running requests, and the blocks needed for admission for the head of the queue.
    """
    if replica.status is ReplicaStatus.DRAINING:
        return math.inf
    return float(replica.used_blocks + replica.head_demand_blocks)


def normal_freeness(replica: ReplicaSnapshot) -> float:
    """F_normal = (M - sum V) / B in blocks per running request. It is used for auto-scaling and therefore excludes
    headroom, which is not load.

    B = 0, which the paper does not define, is treated as B = 1: F = M - sum V is larger than with any batch.
    """
    return (replica.num_kv_blocks - virtual_usage_blocks(replica)) / (replica.num_running or 1)


def full_freeness(replica: ReplicaSnapshot, headroom: Headroom) -> float:
    """F_full, with headroom, for dispatch and migration (Eqs. 1, 2, 4); minus infinity for a draining replica.

    Differs from the paper's Eq. 2, which adds H for each running request: according to its text and Eq. 4,
    H_p is charged once for each tier with a running or waiting request on the replica.
    """
    reserved = headroom.blocks(replica.tiers, replica.num_kv_blocks)
    used = virtual_usage_blocks(replica) + reserved
    return (replica.num_kv_blocks - used) / (replica.num_running or 1)


def queue_freeness(replica: ReplicaSnapshot, headroom: Headroom) -> float:
    """Freeness that counts the whole queue (not in the paper): F_full with the demand of every waiting request.

    F = R / B if R >= 0 else R,  R = M - blocks held - blocks that all waiting requests need - headroom

    R < 0 is not divided by B, because otherwise a larger batch would increase the freeness: under F_full, the overloaded
    replica with the largest batch looks freest. F_full also counts only the head of the queue; Llumnix's public code
    dispatches by the demand of all waiting requests.
    """
    if replica.status is ReplicaStatus.DRAINING:
        return -math.inf
    waiting = replica.blocks_for(replica.waiting_prefill_tokens)
    reserved = headroom.blocks(replica.tiers, replica.num_kv_blocks)
    remaining = replica.num_kv_blocks - replica.used_blocks - waiting - reserved
    return remaining / (replica.num_running or 1) if remaining >= 0 else float(remaining)


@dataclass(kw_only=True, slots=True)
class Llumnix(Router):
    """Dispatches strictly by tier, first come first served within a tier, to the replica with the largest freeness.

    r* = argmax F_full(r),   F_full = (M - sum V - sum_p H_p [tier p is present]) / B

    | symbol | meaning | unit |
    | --- | --- | --- |
    | M, B | KV blocks; running requests of the replica | blocks, - |
    | V | virtual usage, see `virtual_usage_blocks` | blocks |
    | H_p | headroom of tier p, see `Headroom` | blocks |

    If all replicas are draining: the one with the fewest requests (section 3.4). A request is only sent into the headroom of
    a replica (F_full < 0) if no replica has memory outside of it.

    The replicas' queues must have the same order: policy `llumlet`.

    Differs from the paper: ties of freeness go to the replica with fewer requests, which distributes a burst over equal
    replicas. `whole_queue` dispatches by `queue_freeness`, which is better under load.
    """

    scrapes: ClassVar[bool] = True
    sees_tokens: ClassVar[bool] = True
    when_all_draining: ClassVar[Literal["wait", "least_loaded"]] = "least_loaded"

    headroom: Headroom = field(default_factory=exponential_headroom)
    whole_queue: bool = False

    def choose(self, item: RoutingRequest, replicas: Sequence[ReplicaSnapshot], now: float) -> str:
        self.headroom.blocks((item.request.tier,), 1)  # raises for an unknown tier
        freeness = queue_freeness if self.whole_queue else full_freeness
        return max(
            replicas, key=lambda replica: (freeness(replica, self.headroom), -replica.num_requests)
        ).replica_id

    def dispatch_key(self, item: RoutingRequest, now: float) -> tuple[float, ...]:
        return (float(item.request.tier), item.request.arrival_s)

    def on_first_token(self, request: Request, ttft_s: float, now: float) -> None:
        if isinstance(self.headroom, AdaptiveHeadroom) and request.ttft_slo_s is not None:
            self.headroom.observe(request.tier, ttft_s <= request.ttft_slo_s, now)


@dataclass(kw_only=True, slots=True)
class MigrationPlanner:
    """Moves one request per pair of full and free replicas every interval_s, if max F - min F >= threshold (section 3.5).

    sources: F <= min F + band;  destinations: F >= max F - band, active;  paired by rank, fullest with freest.
    candidates: waiting requests first (no cache to copy), in the order of their queue; then decoding ones, the least urgent
    tier first, then the smallest cache, then the latest arrival.

    | symbol | meaning | unit |
    | --- | --- | --- |
    | F | F_full, see `full_freeness` | blocks per running request |
    | threshold | theta, 0.3 | blocks per running request |
    | band | maximum distance from min F or max F, 0.1 (released code) | blocks per running request |
    | interval_s | 50 ms | s |

    A draining replica has F = -infinity: it is always a source, and all its requests leave, one per interval.

    Differs from the paper: a request only moves if a slot and its blocks are free at its destination, beside the demand of
    the head of the queue and the headroom of all tiers then present: F_full >= 0 after the move. Otherwise the
    demand of a waiting request would move with it, and it would move back at the next tick. From a draining replica
    waiting requests always move, and running ones into headroom. While a replica drains the others are balanced as well.
    Of the waiting requests the paper's code, in which none waits for memory, moves the least urgent one first; on a freer
    replica that would be served before more urgent ones of its source.
    """

    headroom: Headroom = field(default_factory=exponential_headroom)
    threshold: float = 0.3
    band: float = 0.1
    interval_s: float = 0.05
    _last_s: float = field(default=-math.inf, init=False, repr=False)

    def __post_init__(self) -> None:
        check_ranges(self, threshold=(0, FINITE), band=(0, FINITE), interval_s=(POSITIVE, FINITE))

    def plan(
        self, replicas: Sequence[ReplicaSnapshot], in_flight: AbstractSet[str], now: float
    ) -> tuple[Move, ...]:
        """The migrations to start now; empty within an interval. Snapshots must include requests."""
        # Tolerates rounding of sums of intervals.
        if now - self._last_s < self.interval_s * (1 - 1e-9):
            return ()
        self._last_s = now
        active = [replica for replica in replicas if replica.status is ReplicaStatus.ACTIVE]
        draining = [replica for replica in replicas if replica.status is ReplicaStatus.DRAINING]
        moves: list[Move] = []
        capacities = {replica.replica_id: Capacity(replica) for replica in active}
        if draining and active:
            freest = sorted(active, key=lambda replica: -full_freeness(replica, self.headroom))
            for number, source in enumerate(draining):
                first = number % len(freest)
                moves += self._move(source, freest[first:] + freest[:first], capacities, in_flight)
        for source, destination in self._pairs(active):
            moves += self._move(source, [destination], capacities, in_flight)
        return tuple(moves)

    def _pairs(self, active: list[ReplicaSnapshot]) -> Iterable[tuple[ReplicaSnapshot, ReplicaSnapshot]]:
        if len(active) < 2:
            return []
        by_freeness = [(full_freeness(replica, self.headroom), replica) for replica in active]
        by_freeness.sort(key=lambda pair: pair[0])
        lowest, highest = by_freeness[0][0], by_freeness[-1][0]
        if highest - lowest < self.threshold or highest == lowest:
            return []
        middle = (lowest + highest) / 2  # with a wide band no replica is source and destination
        sources = [replica for f, replica in by_freeness if f <= lowest + self.band and f < middle]
        targets = [replica for f, replica in reversed(by_freeness) if f >= highest - self.band and f > middle]
        return zip(sources, targets, strict=False)

    def _move(
        self,
        source: ReplicaSnapshot,
        targets: Sequence[ReplicaSnapshot],
        capacities: dict[str, Capacity],
        in_flight: AbstractSet[str],
    ) -> list[Move]:
        leaving = source.status is ReplicaStatus.DRAINING
        spare_blocks = {target.replica_id: self._spare_blocks(target, capacities) for target in targets}
        if not leaving and max(spare_blocks.values()) < 1:
            return []
        for row in self.candidates(source, in_flight):
            for target in targets:
                tokens = target.num_kv_blocks * target.kv_block_tokens
                capacity = capacities[target.replica_id]
                if leaving:
                    fits = not row.running or row.demand_blocks <= capacity.free_blocks
                else:
                    added = () if row.tier in target.tiers else (row.tier,)
                    headroom = self.headroom.blocks(added, target.num_kv_blocks)
                    fits = row.demand_blocks + headroom <= spare_blocks[target.replica_id]
                if fits and row.prompt_tokens + row.max_tokens <= tokens:
                    capacity.take(row)
                    return [Move(row.request_id, source.replica_id, target.replica_id)]
        return []

    def _spare_blocks(self, target: ReplicaSnapshot, capacities: dict[str, Capacity]) -> float:
        """Free blocks beside the demand of the head of the queue and the headroom of the tiers that are present."""
        reserved = self.headroom.blocks(target.tiers, target.num_kv_blocks)
        return capacities[target.replica_id].free_blocks - target.head_demand_blocks - reserved

    def candidates(self, source: ReplicaSnapshot, in_flight: AbstractSet[str]) -> Iterator[RequestView]:
        """The requests that may leave the replica, in order of preference."""
        movable = []
        for index, row in enumerate(source.requests):
            if row.request_id not in in_flight and (row.decoding or not row.running):
                sign = -1 if row.running else 1
                movable.append(
                    ((row.running, sign * row.tier, row.kv_blocks, sign * row.arrival_s), index, row)
                )
        heapify(movable)  # usually the first one fits
        while movable:
            yield heappop(movable)[-1]


@dataclass(kw_only=True, slots=True)
class AutoScaler(Scaler):
    """Signals when to add a replica and which one to drain (section 3.6).

    mean F_normal < out_below: scale out;  mean F_normal > in_above: scale in, the one with the fewest running requests.
    Mean over active replicas.

    | symbol | meaning | unit |
    | --- | --- | --- |
    | F_normal | freeness without headroom | blocks per running request |
    | out_below, in_above | -0.5 and 1.5 in the paper | blocks per running request |
    | min_replicas, max_replicas | bounds of the number of active replicas | - |
    | interval_s | minimum time between two signals | s |

    F_normal is about M/B, and M for an idle replica, so choose `in_above` according to the size of the cache.

    Differs from the paper: the mean excludes draining replicas (their infinite usage would always scale out); the number
    of replicas and the rate of signals are bounded.
    """

    out_below: float = -0.5
    in_above: float = 1.5
    _last_s: float = field(default=-math.inf, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.out_below < self.in_above:
            raise InputError("out_below, in_above", (self.out_below, self.in_above), "out_below < in_above")
        check_ranges(self, min_replicas=(1, self.max_replicas), interval_s=(0, FINITE))

    def decide(
        self, replicas: Sequence[ReplicaSnapshot], num_starting: int, now: float
    ) -> Sequence[ScaleOut | ScaleIn]:
        signal = self.signal(replicas, now)
        return () if signal is None else (signal,)

    def signal(self, replicas: Sequence[ReplicaSnapshot], now: float) -> ScaleOut | ScaleIn | None:
        """The scaling signal for the cluster with these replicas, None for no change; `now` in seconds."""
        active = [replica for replica in replicas if replica.status is ReplicaStatus.ACTIVE]
        if not active or now - self._last_s < self.interval_s:
            return None
        mean = math.fsum(normal_freeness(replica) for replica in active) / len(active)
        signal: ScaleOut | ScaleIn | None = None
        if mean < self.out_below and len(active) < self.max_replicas:
            signal = ScaleOut()
        elif mean > self.in_above and len(active) > self.min_replicas:
            victim = min(active, key=lambda replica: (replica.num_running, replica.num_waiting))
            signal = ScaleIn(victim.replica_id)
        if signal is not None:
            self._last_s = now
        return signal
