"""Choice of the requests that migrate (multi-tier, section 3.5)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from heapq import heapify, heappop

from scheduler_core.ranges import FINITE, POSITIVE, check_ranges
from scheduler_core.routing.llumnix import Headroom, exponential_headroom, full_freeness
from scheduler_core.routing.migration import Move
from scheduler_core.routing.snapshot import Capacity, ReplicaSnapshot, ReplicaStatus, RequestView


@dataclass(kw_only=True, slots=True)
class MigrationPlanner:
    """Every interval_s, if max F - min F >= threshold: one request from each fullest to each freest replica.

    sources: F <= min F + band;  destinations: F >= max F - band, active;  paired fullest with freest.
    candidate: waiting requests first (no cache to copy), then generating ones; the least urgent tier first, then the
    smallest cache, then the latest arrival.

    | symbol | meaning | unit |
    | --- | --- | --- |
    | F | F_full, see `llumnix.full_freeness` | blocks per running request |
    | threshold | theta, 0.3 | blocks per running request |
    | band | distance from the extreme within which replicas take part, 0.1 (released code) | blocks per running request |
    | interval_s | 50 ms | s |

    A draining replica has F = -infinity: it is always a source, and everything leaves it, one request per interval.

    Differs from the paper: a request moves only where it fits now (blocks and slot), or a waiting one would move back at
    the next tick because its demand goes with it; from a draining replica waiting requests move in any case. While a
    replica drains the others are balanced too.

    Raises:
        InputError: A parameter is outside its range.
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
        """The migrations to begin now, of all replicas with their requests; none before the interval is over."""
        # A sum of intervals that misses the next tick by rounding alone has reached it.
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
        middle = (lowest + highest) / 2  # with a wide band no replica is both
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
        for row in self.candidates(source, in_flight):
            for target in targets:
                tokens = target.num_kv_blocks * target.kv_block_tokens
                capacity = capacities[target.replica_id]
                forced = leaving and not row.running
                if row.prompt_tokens + row.max_tokens <= tokens and (forced or capacity.fits(row)):
                    capacity.take(row)
                    return [Move(row.request_id, source.replica_id, target.replica_id)]
        return []

    def candidates(self, source: ReplicaSnapshot, in_flight: AbstractSet[str]) -> Iterator[RequestView]:
        """The requests that may leave the replica, in the order in which they would."""
        movable = [
            ((row.running, -row.tier, row.kv_blocks, -row.arrival_s), index, row)
            for index, row in enumerate(source.requests)
            if row.request_id not in in_flight and (row.decoding or not row.running)
        ]
        heapify(movable)  # mostly the first one fits
        while movable:
            yield heappop(movable)[-1]
