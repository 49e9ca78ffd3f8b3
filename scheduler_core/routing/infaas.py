"""INFaaS: cost of queue, service time and state (Romero et al. 2021, USENIX ATC), as the multi-tier paper's baseline
(section 3.7, Eq. 5)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

from scheduler_core.errors import InputError
from scheduler_core.routing.base import Router, RoutingRequest
from scheduler_core.routing.snapshot import ReplicaSnapshot


class Health(Enum):
    """State of a replica in INFaaS."""

    ACTIVE = "active"
    OVERLOADED = "overloaded"
    INTERFERED = "interfered"
    INACTIVE = "inactive"


@dataclass(slots=True)
class _Seen:
    """What the router knows of one replica.

    Attributes:
        service_s: Moving average of dispatch to finish; None before the first request is done.
        health: Its state.
        hold: Choices for which it keeps a bad state at least.
        sent_s: By request id: when it was dispatched there.
    """

    service_s: float | None = None
    health: Health = Health.INACTIVE
    hold: int = 0
    sent_s: dict[str, float] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class Infaas(Router):
    """The replica of least cost; no migration, no view of memory.

    cost(r) = alpha * q + beta * s / target_s + gamma * penalty(state)
    s <- ewma * observed + (1 - ewma) * s after each finished request

    | symbol | meaning | unit |
    | --- | --- | --- |
    | q | waiting requests of r | requests |
    | s | service time, dispatch to finish; 0 before the first | s |
    | target_s | wanted service time | s |
    | penalty | 0 ACTIVE, 1 OVERLOADED, 0.5 INTERFERED, 2 INACTIVE | - |

    | state | holds while |
    | --- | --- |
    | INACTIVE | the replica has no requests and has finished none |
    | OVERLOADED | s > overload_factor * target_s and q >= overload_depth; then for `overload_hold` choices more |
    | INTERFERED | s > interference_factor * target_s and q < interference_depth: slow although hardly anything waits; then `interference_hold` more |
    | ACTIVE | else |

    Differs from the paper, which gives the cost alone: states, factors (1.3, 1.15), depths (2, 1), holds (3, 2) and
    penalties are those of its released code; s enters as a share of the target, so that the three terms have the same
    unit; a waiting request counts once (released: a preempted one twice); the released factor for the request's
    priority scales all replicas alike and is left out.

    Raises:
        InputError: A parameter is outside its range.
    """

    name: ClassVar[str] = "infaas"

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
    _seen: dict[str, _Seen] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for name in (
            "alpha",
            "beta",
            "gamma",
            "overload_factor",
            "interference_factor",
            "overload_penalty",
            "interference_penalty",
            "inactive_penalty",
        ):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(name, getattr(self, name), "numbers >= 0")
        for name in ("overload_depth", "overload_hold", "interference_depth", "interference_hold"):
            if getattr(self, name) < 0:
                raise InputError(name, getattr(self, name), "integers >= 0")
        if not 0 < self.target_s < math.inf:
            raise InputError("target_s", self.target_s, "seconds > 0")
        if not 0 < self.ewma <= 1:
            raise InputError("ewma", self.ewma, "numbers in (0, 1]")

    def choose(self, item: RoutingRequest, replicas: Sequence[ReplicaSnapshot], now: float) -> str:
        for replica in replicas:
            self._observe(replica)
        return min(replicas, key=self.cost).replica_id

    def cost(self, replica: ReplicaSnapshot) -> float:
        """Cost of giving the next request to the replica (Eq. 5), in its state after the last choice."""
        seen = self._of(replica.replica_id)
        relative_s = (seen.service_s or 0.0) / self.target_s
        return (
            self.alpha * replica.num_waiting
            + self.beta * relative_s
            + self.gamma * self._penalties()[seen.health]
        )

    def health(self, replica_id: str) -> Health:
        """The replica's state after the last choice."""
        return self._of(replica_id).health

    def _penalties(self) -> dict[Health, float]:
        return {
            Health.ACTIVE: 0.0,
            Health.OVERLOADED: self.overload_penalty,
            Health.INTERFERED: self.interference_penalty,
            Health.INACTIVE: self.inactive_penalty,
        }

    def _observe(self, replica: ReplicaSnapshot) -> None:
        seen = self._of(replica.replica_id)
        found, hold = self._found(replica, seen)
        if found in (Health.OVERLOADED, Health.INTERFERED):
            seen.health, seen.hold = found, hold
        elif seen.hold > 0 and found is Health.ACTIVE:
            seen.hold -= 1
        else:
            seen.health, seen.hold = found, 0

    def _found(self, replica: ReplicaSnapshot, seen: _Seen) -> tuple[Health, int]:
        slow = 0.0 if seen.service_s is None else seen.service_s / self.target_s
        if seen.service_s is None and replica.num_requests == 0:
            return Health.INACTIVE, 0
        if slow > self.overload_factor and replica.num_waiting >= self.overload_depth:
            return Health.OVERLOADED, self.overload_hold
        if slow > self.interference_factor and replica.num_waiting < self.interference_depth:
            return Health.INTERFERED, self.interference_hold
        return Health.ACTIVE, 0

    def _of(self, replica_id: str) -> _Seen:
        return self._seen.setdefault(replica_id, _Seen())

    def on_dispatched(self, item: RoutingRequest, replica_id: str, now: float) -> None:
        self._of(replica_id).sent_s[item.request.request_id] = now

    def on_finished(self, request_id: str, replica_id: str, now: float) -> None:
        seen = self._of(replica_id)
        started = seen.sent_s.pop(request_id, None)
        if started is None:
            return
        before = seen.service_s
        seen.service_s = (
            now - started if before is None else self.ewma * (now - started) + (1 - self.ewma) * before
        )

    def on_aborted(self, request_id: str, replica_id: str, now: float) -> None:
        self._of(replica_id).sent_s.pop(request_id, None)

    def on_migrated(self, request_id: str, source: str, destination: str, now: float) -> None:
        started = self._of(source).sent_s.pop(request_id, None)
        if started is not None:
            self._of(destination).sent_s[request_id] = started

    def on_gone(self, replica_id: str, now: float) -> None:
        self._seen.pop(replica_id, None)
