"""Round robin: replicas in turn (Nagle 1987, "On packet switches with infinite storage", IEEE Trans. Commun. 35)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from scheduler_core.routing.base import Router, RoutingRequest
from scheduler_core.routing.snapshot import ReplicaSnapshot


@dataclass(kw_only=True, slots=True)
class RoundRobin(Router):
    """Each replica in turn, whatever it holds.

    The next one is the first after the last choice in the order of ids, so that a replica that joins or leaves moves
    nobody else's turn.
    """

    name: ClassVar[str] = "round_robin"

    _last: str | None = field(default=None, init=False, repr=False)

    def choose(self, item: RoutingRequest, replicas: Sequence[ReplicaSnapshot], now: float) -> str:
        names = sorted(replica.replica_id for replica in replicas)
        last = self._last
        chosen = names[0] if last is None else next((name for name in names if name > last), names[0])
        self._last = chosen
        return chosen
