"""Dispatcher of a cluster: its replicas, the assignment of requests to replicas, and the pending requests."""

from collections.abc import Mapping
from dataclasses import dataclass

from scheduler_core.errors import InputError
from scheduler_core.routing.base import Router, RoutingRequest
from scheduler_core.routing.snapshot import ReplicaRole, ReplicaSnapshot, ReplicaStatus, waiting_view


@dataclass(slots=True)
class _Entry:
    """A request and its replica (None while pending); `order` is its arrival number."""

    item: RoutingRequest
    order: int
    replica_id: str | None = None


class Dispatcher:
    """Assigns every request to exactly one replica.

    A request is pending while no suitable replica exists, for example because all are draining.
    """

    def __init__(self, router: Router) -> None:
        self.router = router
        self._status: dict[str, ReplicaStatus] = {}
        self._role: dict[str, ReplicaRole] = {}
        self._requests: dict[str, _Entry] = {}
        self._num_arrived = 0
        self._pending: dict[str, _Entry] = {}

    @property
    def num_pending(self) -> int:
        """Number of requests that wait for a replica."""
        return len(self._pending)

    @property
    def replicas(self) -> Mapping[str, ReplicaStatus]:
        """Status of every current replica, in the order in which they joined."""
        return dict(self._status)

    def replica_of(self, request_id: str) -> str | None:
        """The replica of a request; None if it is pending or unknown."""
        assignment = self._requests.get(request_id)
        return None if assignment is None else assignment.replica_id

    def joined(self, replica_id: str, role: ReplicaRole = ReplicaRole.BOTH) -> None:
        """Adds a replica; InputError if its id is already in use."""
        if replica_id in self._status:
            raise InputError("replica_id", replica_id, "an id that no other replica has")
        self._status[replica_id] = ReplicaStatus.ACTIVE
        self._role[replica_id] = role

    def draining(self, replica_id: str) -> None:
        """Marks a replica as draining: it gets no new requests."""
        self._status[replica_id] = ReplicaStatus.DRAINING

    def left(self, replica_id: str, now: float) -> None:
        """Removes an empty replica."""
        del self._status[replica_id]
        del self._role[replica_id]
        self.router.on_gone(replica_id, now)

    def failed(self, replica_id: str, now: float) -> list[RoutingRequest]:
        """Removes a replica with all its requests, which are returned in the order of their arrival."""
        lost = [entry for entry in self._requests.values() if entry.replica_id == replica_id]
        for entry in lost:
            name = entry.item.request.request_id
            self.router.on_aborted(name, replica_id, now)
            del self._requests[name]
        self.left(replica_id, now)
        return [entry.item for entry in sorted(lost, key=lambda entry: entry.order)]

    def arrived(self, item: RoutingRequest) -> None:
        """Adds a pending request with a new id, or one that its replica has lost."""
        name = item.request.request_id
        self._requests[name] = self._pending[name] = _Entry(item, self._num_arrived)
        self._num_arrived += 1

    def dispatch(
        self, snapshots: Mapping[str, ReplicaSnapshot], now: float
    ) -> list[tuple[RoutingRequest, str]]:
        """Assigns pending requests to replicas in the router's order; those without a suitable replica stay pending.

        `snapshots` has all replicas; each choice takes the earlier ones of this call into account.
        """
        current = {replica_id: snapshots[replica_id] for replica_id in self._status}
        assignments = []
        dispatch_key = self.router.dispatch_key
        for entry in sorted(self._pending.values(), key=lambda e: (dispatch_key(e.item, now), e.order)):
            item = entry.item
            candidates = self._candidates(item, current)
            if not candidates:
                continue
            entry.replica_id = chosen = self._choose(item, candidates, now)
            del self._pending[item.request.request_id]
            snapshot = current[chosen]
            view = waiting_view(item.request, item.request.tier, None, snapshot.kv_block_tokens)
            current[chosen] = snapshot.with_waiting(view)
            self.router.on_dispatched(item, chosen, now)
            assignments.append((item, chosen))
        return assignments

    def finished(self, request_id: str, now: float, first_token_s: float | None = None) -> None:
        """Removes a finished request; `first_token_s` is the time of its first token."""
        if first_token_s is not None:
            request = self._requests[request_id].item.request
            self.router.on_first_token(request, first_token_s - request.arrival_s, now)
        self.router.on_finished(request_id, self._assigned_replica(request_id), now)
        del self._requests[request_id]

    def aborted(self, request_id: str, now: float) -> None:
        """Removes a request, also a pending one, that its client has given up."""
        replica_id = self._requests.pop(request_id).replica_id
        if replica_id is None:
            del self._pending[request_id]
        else:
            self.router.on_aborted(request_id, replica_id, now)

    def migrated(self, request_id: str, destination: str, now: float) -> None:
        """Updates the replica of a migrated request."""
        source = self._assigned_replica(request_id)
        self._requests[request_id].replica_id = destination
        self.router.on_migrated(request_id, source, destination, now)

    def _candidates(
        self, item: RoutingRequest, current: Mapping[str, ReplicaSnapshot]
    ) -> list[ReplicaSnapshot]:
        """The suitable replicas for a request, in the order in which they joined."""
        roles = (ReplicaRole.BOTH, self.router.role)
        need = item.request.prompt_tokens + item.request.max_tokens
        fitting = [
            snapshot
            for replica_id, snapshot in current.items()
            if (self.router.role is ReplicaRole.BOTH or self._role[replica_id] in roles)
            and need <= snapshot.num_kv_blocks * snapshot.kv_block_tokens
        ]
        active = [s for s in fitting if self._status[s.replica_id] is ReplicaStatus.ACTIVE]
        if active or self.router.when_all_draining == "wait" or not fitting:
            return active
        if ReplicaStatus.ACTIVE in self._status.values():
            return []
        return [min(fitting, key=lambda snapshot: snapshot.num_requests)]

    def _choose(self, item: RoutingRequest, candidates: list[ReplicaSnapshot], now: float) -> str:
        if all(self._status[s.replica_id] is ReplicaStatus.DRAINING for s in candidates):
            return candidates[0].replica_id
        return self.router.choose(item, candidates, now)

    def _assigned_replica(self, request_id: str) -> str:
        replica_id = self.replica_of(request_id)
        assert replica_id is not None, f"request {request_id} is not assigned to a replica"
        return replica_id
