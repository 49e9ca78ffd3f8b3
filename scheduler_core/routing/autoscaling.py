"""Auto-scaling signals from freeness without headroom (multi-tier, section 3.6)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler_core.errors import InputError
from scheduler_core.ranges import FINITE, check_ranges
from scheduler_core.routing.llumnix import normal_freeness
from scheduler_core.routing.snapshot import ReplicaSnapshot, ReplicaStatus


@dataclass(frozen=True, slots=True)
class ScaleOut:
    """Start one replica more."""


@dataclass(frozen=True, slots=True)
class ScaleIn:
    """Drain the active replica with the fewest running requests, and stop it when it is empty."""

    victim: str


@dataclass(kw_only=True, slots=True)
class AutoScaler:
    """Signals when to add a replica and which one to drain.

    mean F_normal < out_below: scale out;  mean F_normal > in_above: scale in.  Mean over active replicas.

    | symbol | meaning | unit |
    | --- | --- | --- |
    | F_normal | freeness without headroom | blocks per running request |
    | out_below, in_above | -0.5 and 1.5 in the paper | blocks per running request |
    | min_replicas, max_replicas | bounds of the number of active replicas | - |
    | interval_s | shortest time between two signals | s |

    F_normal is about M/B, and M for an idle replica, so `in_above` has to fit the size of the cache.

    Differs from the paper: draining replicas are left out of the mean (their infinite usage would always scale out);
    the number of replicas and the rate of signals are bounded.

    Raises:
        InputError: A parameter is outside its range.
    """

    out_below: float = -0.5
    in_above: float = 1.5
    min_replicas: int = 1
    max_replicas: int = 64
    interval_s: float = 1.0
    _last_s: float = field(default=-math.inf, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.out_below < self.in_above:
            raise InputError("out_below, in_above", (self.out_below, self.in_above), "out_below < in_above")
        check_ranges(self, min_replicas=(1, self.max_replicas), interval_s=(0, FINITE))

    def signal(self, replicas: Sequence[ReplicaSnapshot], now: float) -> ScaleOut | ScaleIn | None:
        """The signal for all replicas there are, if any; `now` in seconds."""
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
