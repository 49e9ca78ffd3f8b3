"""Interfaces of routers, which choose a replica for every request, and of scalers, which start and drain replicas."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from scheduler_core.request import Request
from scheduler_core.routing.snapshot import ReplicaRole, ReplicaSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRequest:
    """The input of a router for a request that has arrived.

    `prefix_blocks` has for each full block of its prompt a hash of all tokens up to the end of the block; empty without
    prefix caching.
    """

    request: Request
    prefix_blocks: tuple[int, ...] = ()


@dataclass(kw_only=True, slots=True)
class Router(ABC):
    """Chooses among replicas. The `Dispatcher` stores the requests and calls the hooks.

    A router is a dataclass whose fields are its parameters; values outside their range raise InputError.

    Class variables:
        needs_requests: Snapshots must include the individual requests.
        sees_tokens: The choice depends on tokens or blocks, which change with every step, not only on request counts. Without
            it, only the counts of a snapshot are of the current state.
        scrapes: Its snapshots are metrics that it scrapes from the engines; they may be old (`cluster.snapshot_interval_s`).
        needs_generator: It uses random numbers from its field `rng`.
        role: Role of the replicas for new requests, in addition to those that run both phases.
        when_all_draining: Without an active replica new requests "wait", or go to the "least_loaded" draining one.
    """

    needs_requests: ClassVar[bool] = False
    sees_tokens: ClassVar[bool] = False
    scrapes: ClassVar[bool] = False
    needs_generator: ClassVar[bool] = False
    role: ClassVar[ReplicaRole] = ReplicaRole.BOTH
    when_all_draining: ClassVar[Literal["wait", "least_loaded"]] = "wait"

    @abstractmethod
    def choose(self, item: RoutingRequest, replicas: Sequence[ReplicaSnapshot], now: float) -> str:
        """The id of the replica for the request, one of `replicas` (at least one); ties go to the earlier."""

    def dispatch_key(self, item: RoutingRequest, now: float) -> tuple[float, ...]:
        """Sort key of requests that wait for a replica, smallest first; by default the arrival time."""
        return (item.request.arrival_s,)

    def on_dispatched(self, item: RoutingRequest, replica_id: str, now: float) -> None:  # noqa: B027
        """Called after the request was assigned to the replica."""

    def on_finished(self, request_id: str, replica_id: str, now: float) -> None:  # noqa: B027
        """Called after the request has finished."""

    def on_first_token(self, request: Request, ttft_s: float, now: float) -> None:  # noqa: B027
        """Called when a request has finished, with its time from arrival to first token, before `on_finished`."""

    def on_aborted(self, request_id: str, replica_id: str, now: float) -> None:  # noqa: B027
        """Called after the request was aborted, or its replica has failed."""

    def on_migrated(self, request_id: str, source: str, destination: str, now: float) -> None:  # noqa: B027
        """Called after the request was migrated."""

    def on_gone(self, replica_id: str, now: float) -> None:  # noqa: B027
        """Called after a replica failed with all its requests, or was drained and stopped."""


@dataclass(frozen=True, slots=True)
class ScaleOut:
    """Start one more replica."""


@dataclass(frozen=True, slots=True)
class ScaleIn:
    """Drain an active replica, and stop it when it is empty."""

    victim: str


@dataclass(kw_only=True, slots=True)
class Scaler(ABC):
    """Decides how many replicas run, from `min_replicas` to `max_replicas`, at most every `interval_s` seconds."""

    min_replicas: int = 1
    max_replicas: int = 64
    interval_s: float = 1.0

    @abstractmethod
    def decide(
        self, replicas: Sequence[ReplicaSnapshot], num_starting: int, now: float
    ) -> Sequence[ScaleOut | ScaleIn]:
        """What to do now, given the active and draining replicas, in the order in which they joined, and the number of
        starting ones."""
