"""What happens to the replicas of a simulated cluster, and what a simulation yields."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Literal

from scheduler_core.errors import InputError
from scheduler_core.routing import ScaleIn, ScaleOut
from scheduler_core.routing.moves import AbortReason
from scheduler_core.simulator.loop import Outcome as ReplicaOutcome


@dataclass(frozen=True, slots=True)
class ReplicaChange:
    """Something happens to a replica at a given time.

    Attributes:
        time_s: When, in seconds on the clock of the trace.
        replica_id: To which.
        kind: "join": it may be chosen from now on, and not from the start if that is its first change; "drain": it gets nothing new; "fail": it is gone
            with all it held; it may join again if the simulation can rebuild it.

    Raises:
        InputError: The time is not finite.
    """

    time_s: float
    replica_id: str
    kind: Literal["join", "drain", "fail"]

    def __post_init__(self) -> None:
        if not math.isfinite(self.time_s):
            raise InputError("time_s", self.time_s, "a finite number of seconds")


@dataclass(slots=True)
class ClusterOutcome:
    """What a simulation yields.

    Attributes:
        total: The whole cluster as one: records, refusals, integrals; `busy_s` and `num_steps` are sums over replicas.
        replica_of: By id of a finished request: the replica where it finished.
        num_migrations: Requests that changed their replica.
        num_migrated_blocks: Blocks copied for them.
        ended: How often migrations ended early, by reason.
        num_restarts: Requests that began anew because their replica had failed.
        scaling: What the auto-scaler said, and when, in seconds.
    """

    total: ReplicaOutcome = field(default_factory=ReplicaOutcome)
    replica_of: dict[str, str] = field(default_factory=dict)
    num_migrations: int = 0
    num_migrated_blocks: int = 0
    ended: dict[AbortReason, int] = field(default_factory=lambda: defaultdict(int))
    num_restarts: int = 0
    scaling: list[tuple[float, ScaleIn | ScaleOut]] = field(default_factory=list)
