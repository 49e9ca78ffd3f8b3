"""Who says which requests of a simulated cluster shall move."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Protocol

from scheduler_core.routing import ReplicaSnapshot
from scheduler_core.routing.moves import Move


class Planner(Protocol):
    """Says which requests shall move; `MigrationPlanner` and `Disaggregated` do."""

    def plan(
        self, replicas: tuple[ReplicaSnapshot, ...], in_flight: AbstractSet[str], now: float
    ) -> tuple[Move, ...]:
        """The moves to begin now."""
        ...
