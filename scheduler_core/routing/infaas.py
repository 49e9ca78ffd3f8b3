"""INFaaS: cost of queue, service time and state (Romero et al. 2021, USENIX ATC), as the multi-tier paper's baseline
(section 3.7, Eq. 5)."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import ClassVar, Literal

from scheduler_core.ranges import FINITE, POSITIVE, check_ranges
from scheduler_core.routing.base import Router, RoutingRequest
from scheduler_core.routing.snapshot import ReplicaSnapshot

Health = Literal["active", "overloaded", "interfered", "inactive"]


@dataclass(slots=True)
class _ReplicaStats:
    service_s: float | None = None  # moving average of dispatch to finish
    health: Health = "inactive"
    hold: int = 0  # choices for which a bad state is kept
    sent_s: dict[str, float] = field(default_factory=dict)  # time of dispatch by request id


@dataclass(kw_only=True, slots=True)
class Infaas(Router):
    """The replica of least cost; without migration and without regard to memory.

    cost(r) = alpha * q + beta * s / target_s + gamma * penalty(state)
    s <- ewma * observed + (1 - ewma) * s after each finished request

    | symbol | meaning | unit |
    | --- | --- | --- |
    | q | waiting requests of r | requests |
    | s | service time, dispatch to finish; 0 before the first | s |
    | target_s | target of the service time | s |
    | penalty | 0 ACTIVE, 1 OVERLOADED, 0.5 INTERFERED, 2 INACTIVE | - |

    | state | condition |
    | --- | --- |
    | INACTIVE | the replica has no requests and has finished none |
    | OVERLOADED | s > overload_factor * target_s and q >= overload_depth; kept for `overload_hold` more choices |
    | INTERFERED | s > interference_factor * target_s and q < interference_depth; kept for `interference_hold` more |
    | ACTIVE | otherwise |

    Differs from the paper, which only defines the cost: states, factors (1.3, 1.15), depths (2, 1), holds (3, 2) and
    penalties are those of its released code; s is divided by the target, so that all three terms are
    dimensionless; a waiting request counts once (released code: a preempted one twice); the released code's
    factor for the priority of the request is omitted, because it is the same for all replicas.
    """

    scrapes: ClassVar[bool] = True

    alpha: float = 1.0
    beta: float = 1.0
    gamma: float = 1.0
    target_s: float = 1.0
    ewma: float = 0.6
    overload_factor: float = 1.3
    overload_depth: int = 2
    overload_hold: int = 3
    interference_factor: float = 1.15
    interference_depth: int = 1
    interference_hold: int = 2
    overload_penalty: float = 1.0
    interference_penalty: float = 0.5
    inactive_penalty: float = 2.0
    _stats: dict[str, _ReplicaStats] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        check_ranges(self, **{item.name: (0, FINITE) for item in fields(self) if item.init})
        check_ranges(self, target_s=(POSITIVE, FINITE), ewma=(POSITIVE, 1.0))

    def choose(self, item: RoutingRequest, replicas: Sequence[ReplicaSnapshot], now: float) -> str:
        for replica in replicas:
            self._observe(replica)
        return min(replicas, key=self.cost).replica_id

    def cost(self, replica: ReplicaSnapshot) -> float:
        """Cost of assigning the next request to the replica (Eq. 5), with its state after the last choice."""
        stats = self._of(replica.replica_id)
        penalties = {
            "active": 0.0,
            "overloaded": self.overload_penalty,
            "interfered": self.interference_penalty,
            "inactive": self.inactive_penalty,
        }
        relative = (stats.service_s or 0.0) / self.target_s
        return self.alpha * replica.num_waiting + self.beta * relative + self.gamma * penalties[stats.health]

    def health(self, replica_id: str) -> Health:
        """The replica's state after the last choice."""
        return self._of(replica_id).health

    def _observe(self, replica: ReplicaSnapshot) -> None:
        stats = self._of(replica.replica_id)
        health, hold = self._observed_health(replica, stats)
        if stats.hold > 0 and health == "active":
            stats.hold -= 1
        else:
            stats.health, stats.hold = health, hold

    def _observed_health(self, replica: ReplicaSnapshot, stats: _ReplicaStats) -> tuple[Health, int]:
        """The state by the table, and the number of choices for which it is kept."""
        if stats.service_s is None and replica.num_requests == 0:
            return "inactive", 0
        relative = (stats.service_s or 0.0) / self.target_s
        if relative > self.overload_factor and replica.num_waiting >= self.overload_depth:
            return "overloaded", self.overload_hold
        if relative > self.interference_factor and replica.num_waiting < self.interference_depth:
            return "interfered", self.interference_hold
        return "active", 0

    def _of(self, replica_id: str) -> _ReplicaStats:
        return self._stats.setdefault(replica_id, _ReplicaStats())

    def on_dispatched(self, item: RoutingRequest, replica_id: str, now: float) -> None:
        self._of(replica_id).sent_s[item.request.request_id] = now

    def on_finished(self, request_id: str, replica_id: str, now: float) -> None:
        stats = self._of(replica_id)
        sent_s = stats.sent_s.pop(request_id, None)
        if sent_s is None:
            return
        average = now - sent_s
        if stats.service_s is not None:
            average = self.ewma * average + (1 - self.ewma) * stats.service_s
        stats.service_s = average

    def on_aborted(self, request_id: str, replica_id: str, now: float) -> None:
        self._of(replica_id).sent_s.pop(request_id, None)

    def on_migrated(self, request_id: str, source: str, destination: str, now: float) -> None:
        sent_s = self._of(source).sent_s.pop(request_id, None)
        if sent_s is not None:
            self._of(destination).sent_s[request_id] = sent_s

    def on_gone(self, replica_id: str, now: float) -> None:
        self._stats.pop(replica_id, None)
