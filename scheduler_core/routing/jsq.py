"""JSQ: join the shortest queue (Winston 1977, "Optimality of the shortest line discipline", J. Appl. Probab. 14)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from scheduler_core.routing.base import Router, RoutingRequest
from scheduler_core.routing.snapshot import ReplicaSnapshot


@dataclass(kw_only=True, slots=True)
class Jsq(Router):
    """The replica with the fewest requests, running and waiting.

    Optimal for exponential service times and equal servers; it does not see that requests differ in length.

    Attributes:
        waiting_only: Count the waiting requests alone, as Vidur's "least outstanding requests" does.
    """

    waiting_only: bool = False

    name: ClassVar[str] = "jsq"

    def choose(self, item: RoutingRequest, replicas: Sequence[ReplicaSnapshot], now: float) -> str:
        if self.waiting_only:
            return min(replicas, key=lambda replica: replica.num_waiting).replica_id
        return min(replicas, key=lambda replica: replica.num_requests).replica_id
