"""Interface of a router: it chooses the replica of every request."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from scheduler_core.predictions import Prediction
from scheduler_core.request import Request
from scheduler_core.routing.snapshot import ReplicaRole, ReplicaSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRequest:
    """A request that has arrived, as routers see it.

    Attributes:
        request: The request.
        tier: Urgency level it is scheduled at, at least 0, the most urgent.
        prediction: Its predictions; None if there is none yet.
        prefix_blocks: One hash for each full block of its prompt, each over all tokens up to the block's end; empty
            without prefix caching.
    """

    request: Request
    tier: int
    prediction: Prediction | None = None
    prefix_blocks: tuple[int, ...] = ()


@dataclass(kw_only=True, slots=True)
class Router(ABC):
    """Chooses among replicas. Keeps no requests: the `Dispatcher` does, and calls the hooks.

    A router is a dataclass whose fields are its parameters; values outside their range raise InputError.

    Class variables:
        needs_requests: Its snapshots must have the requests one by one.
        sees_tokens: Its choice depends on tokens or blocks, which change with every step, not on numbers of requests only.
        needs_generator: It draws from its field `rng`.
        role: Replicas a new request may go to, beside those that run both phases.
        when_all_draining: Without an active replica new requests "wait", or go to the "least_loaded" draining one.
    """

    needs_requests: ClassVar[bool] = False
    sees_tokens: ClassVar[bool] = False
    needs_generator: ClassVar[bool] = False
    role: ClassVar[ReplicaRole] = ReplicaRole.BOTH
    when_all_draining: ClassVar[Literal["wait", "least_loaded"]] = "wait"

    @abstractmethod
    def choose(self, item: RoutingRequest, replicas: Sequence[ReplicaSnapshot], now: float) -> str:
        """The id of the replica that the request goes to, of at least one in a fixed order: ties go to the earlier."""

    def dispatch_key(self, item: RoutingRequest, now: float) -> tuple[float, ...]:
        """Order of the requests that wait for a replica, smallest first; by default that of arrival."""
        return (item.request.arrival_s,)

    def on_dispatched(self, item: RoutingRequest, replica_id: str, now: float) -> None:  # noqa: B027
        """The request was assigned to the replica."""

    def on_finished(self, request_id: str, replica_id: str, now: float) -> None:  # noqa: B027
        """The request is done."""

    def on_aborted(self, request_id: str, replica_id: str, now: float) -> None:  # noqa: B027
        """The request was aborted, or its replica has failed."""

    def on_migrated(self, request_id: str, source: str, destination: str, now: float) -> None:  # noqa: B027
        """The request has changed its replica."""

    def on_gone(self, replica_id: str, now: float) -> None:  # noqa: B027
        """A replica failed with all its requests, or was drained and switched off."""
