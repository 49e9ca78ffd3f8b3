"""When the replicas of a simulated cluster fail."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from scheduler_core.errors import InputError
from scheduler_core.simulator.cluster_outcome import ReplicaChange


def random_failures(
    replica_ids: Sequence[str],
    mean_time_s: float,
    horizon_s: float,
    rng: np.random.Generator,
    *,
    repair_s: float | None = None,
) -> tuple[ReplicaChange, ...]:
    """Failures at exponential times; a replica that was repaired may fail again.

    The last replica that is there never fails, as nobody could serve what it held.

    Args:
        replica_ids: Replicas that may fail.
        mean_time_s: Mean time to failure of one replica, in seconds > 0.
        horizon_s: No failure after this time, in seconds on the clock of the trace.
        rng: Source of randomness.
        repair_s: How long a repair takes, in seconds; None: a failed replica does not come back.

    Raises:
        InputError: A time is not above 0.
    """
    for name, value in (("mean_time_s", mean_time_s), ("horizon_s", horizon_s)):
        if not 0 < value < math.inf:
            raise InputError(name, value, "seconds > 0")
    if repair_s is not None and not 0 <= repair_s < math.inf:
        raise InputError("repair_s", repair_s, "seconds >= 0, or None")
    due = {name: float(rng.exponential(mean_time_s)) for name in replica_ids}
    away: dict[str, float] = {}
    changes: list[ReplicaChange] = []
    while due:
        name = min(due, key=lambda one: due[one])
        now = due.pop(name)
        if now > horizon_s:
            break
        for other in [one for one, back_s in away.items() if back_s <= now]:
            del away[other]
        if len(replica_ids) - len(away) == 1:
            if repair_s is not None:
                due[name] = now + float(rng.exponential(mean_time_s))
            continue
        changes.append(ReplicaChange(now, name, "fail"))
        away[name] = math.inf
        if repair_s is not None:
            away[name] = now + repair_s
            changes.append(ReplicaChange(now + repair_s, name, "join"))
            due[name] = now + repair_s + float(rng.exponential(mean_time_s))
    return tuple(sorted(changes, key=lambda change: change.time_s))
