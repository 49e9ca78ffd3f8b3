"""Which requests change their replica, and when (multi-tier, section 3.5)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from scheduler_core.errors import InputError
from scheduler_core.routing.freeness import full_freeness
from scheduler_core.routing.headroom import Headroom, exponential_headroom
from scheduler_core.routing.moves import Move
from scheduler_core.routing.promotion import TierPromotion
from scheduler_core.routing.snapshot import ReplicaSnapshot, ReplicaStatus, RequestView


@dataclass(kw_only=True, slots=True)
class MigrationPlanner:
    """Every interval_s, if max F - min F >= threshold: one request from each fullest to each freest replica.

    sources: F <= min F + band;  destinations: F >= max F - band, active;  paired fullest with freest.
    candidate: waiting requests first (no cache to copy), then generating ones; the least urgent tier first, then the
    smallest cache, then the latest arrival.

    | symbol | meaning | unit |
    | --- | --- | --- |
    | F | F_full, see `freeness` | blocks per running request |
    | threshold | theta, 0.3 | blocks per running request |
    | band | how near to the extreme a replica must be to take part, 0.1 (released code) | blocks per running request |
    | interval_s | 50 ms | s |

    A draining replica has F = -infinity: it is always a source, and everything leaves it, one request per interval.

    Differs from the paper: a request moves only where it fits now (blocks and seat), or a waiting one would move back at
    the next tick because its demand goes with it; from a draining replica waiting requests move in any case. While a
    replica drains the others are balanced too, not only against it. `promotion` makes those that have waited long more
    urgent, so that they are not moved about.

    Raises:
        InputError: A parameter is outside its range.
    """

    headroom: Headroom = field(default_factory=exponential_headroom)
    threshold: float = 0.3
    band: float = 0.1
    interval_s: float = 0.05
    promotion: TierPromotion | None = None
    _last_s: float = field(default=-math.inf, init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("threshold", "band"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(name, getattr(self, name), "numbers >= 0")
        if not 0 < self.interval_s < math.inf:
            raise InputError("interval_s", self.interval_s, "seconds > 0")

    def plan(
        self, replicas: Sequence[ReplicaSnapshot], in_flight: AbstractSet[str], now: float
    ) -> tuple[Move, ...]:
        """The migrations to begin now; none before the interval is over.

        Args:
            replicas: All replicas, with their requests.
            in_flight: Requests that are being migrated already.
            now: Time in seconds.
        """
        # A sum of intervals that misses the next tick by rounding alone has reached it.
        if now - self._last_s < self.interval_s * (1 - 1e-9):
            return ()
        self._last_s = now
        alive = [replica for replica in replicas if replica.status is not ReplicaStatus.FAILED]
        active = [replica for replica in alive if replica.status is ReplicaStatus.ACTIVE]
        draining = [replica for replica in alive if replica.status is ReplicaStatus.DRAINING]
        moves: list[Move] = []
        room = {replica.replica_id: _Room(replica) for replica in active}
        if draining and active:
            freest = sorted(active, key=lambda replica: -full_freeness(replica, self.headroom))
            for place, source in enumerate(draining):
                targets = freest[place % len(freest) :] + freest[: place % len(freest)]
                moves += self._move(source, targets, room, in_flight, now)
        for source, destination in self._pairs(active):
            moves += self._move(source, [destination], room, in_flight, now)
        return tuple(moves)

    def _pairs(self, active: list[ReplicaSnapshot]) -> Iterable[tuple[ReplicaSnapshot, ReplicaSnapshot]]:
        if len(active) < 2:
            return []
        found = [(full_freeness(replica, self.headroom), replica) for replica in active]
        lowest, highest = min(f for f, _ in found), max(f for f, _ in found)
        if highest - lowest < self.threshold or highest == lowest:
            return []
        by_freeness = sorted(found, key=lambda pair: pair[0])
        middle = (lowest + highest) / 2  # with a wide band nobody is both
        sources = [replica for f, replica in by_freeness if f <= lowest + self.band and f < middle]
        targets = [replica for f, replica in reversed(by_freeness) if f >= highest - self.band and f > middle]
        return zip(sources, targets, strict=False)

    def _move(
        self,
        source: ReplicaSnapshot,
        targets: Sequence[ReplicaSnapshot],
        room: dict[str, _Room],
        in_flight: AbstractSet[str],
        now: float,
    ) -> list[Move]:
        leaving = source.status is ReplicaStatus.DRAINING
        for row in self.candidates(source, in_flight, now):
            for target in targets:
                if room[target.replica_id].take(row, anyway=leaving and not row.running):
                    return [Move(row.request_id, source.replica_id, target.replica_id)]
        return []

    def candidates(
        self, source: ReplicaSnapshot, in_flight: AbstractSet[str], now: float
    ) -> list[RequestView]:
        """The requests that may leave the replica, in the order in which they would."""
        movable = [
            row
            for row in source.requests
            if row.request_id not in in_flight and (row.decoding or not row.running)
        ]
        return sorted(
            movable,
            key=lambda row: (row.running, -self._tier(row, now), row.kv_blocks, -row.arrival_s),
        )

    def _tier(self, row: RequestView, now: float) -> int:
        if self.promotion is None or row.running:
            return row.tier
        return self.promotion.tier(row.tier, now - row.arrival_s)


class _Room:
    """What a destination still has for the moves of one plan."""

    __slots__ = ("_blocks", "_capacity_tokens", "_seats")

    def __init__(self, replica: ReplicaSnapshot) -> None:
        self._blocks = replica.num_free_blocks
        self._seats = replica.max_num_seqs - replica.num_running
        self._capacity_tokens = replica.num_kv_blocks * replica.kv_block_tokens

    def take(self, row: RequestView, *, anyway: bool) -> bool:
        """Whether the request may come; then its place is taken."""
        if row.prompt_tokens + row.max_tokens > self._capacity_tokens:
            return False
        if not anyway and (row.demand_blocks > self._blocks or self._seats < 1):
            return False
        self._blocks -= row.demand_blocks
        self._seats -= 1
        return True
