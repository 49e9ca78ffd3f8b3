"""Dispatcher of a cluster: its replicas, the assignment of each request, and the requests that wait for a replica."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from scheduler_core.errors import InputError, TailcastError
from scheduler_core.routing.base import Router, RoutingRequest
from scheduler_core.routing.snapshot import ReplicaRole, ReplicaSnapshot, ReplicaStatus


class DispatchError(TailcastError):
    """A call in the wrong state, or a router that chose a replica it was not offered."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """A request and its replica."""

    item: RoutingRequest
    replica_id: str


class Dispatcher:
    """Assigns every request to exactly one replica.

    A request waits here until a replica may take it: at once, unless all drain or there is none. Requests on a replica
    that fails wait here again; what they had generated is lost with it.
    """

    def __init__(self, router: Router) -> None:
        self.router = router
        self._status: dict[str, ReplicaStatus] = {}
        self._role: dict[str, ReplicaRole] = {}
        self._pending: dict[str, RoutingRequest] = {}
        self._assigned: dict[str, Assignment] = {}
        self._order: dict[str, int] = {}
        self._num_arrived = 0

    @property
    def num_pending(self) -> int:
        """Requests that wait for a replica."""
        return len(self._pending)

    @property
    def replicas(self) -> Mapping[str, ReplicaStatus]:
        """Status of every replica there is, in the order in which they joined; failed ones are gone."""
        return dict(self._status)

    def replica_of(self, request_id: str) -> str | None:
        """The replica of the request; None if it waits for one, or is not here."""
        assignment = self._assigned.get(request_id)
        return None if assignment is None else assignment.replica_id

    def joined(self, replica_id: str, now: float, role: ReplicaRole = ReplicaRole.BOTH) -> None:
        """A replica may be chosen from now on.

        Raises:
            InputError: There is one of that name.
        """
        if replica_id in self._status:
            raise InputError("replica_id", replica_id, "a name that no replica has")
        self._status[replica_id] = ReplicaStatus.ACTIVE
        self._role[replica_id] = role
        self.router.on_joined(replica_id, now)

    def draining(self, replica_id: str, now: float) -> None:
        """A replica gets nothing new from now on."""
        self._check_replica(replica_id)
        self._status[replica_id] = ReplicaStatus.DRAINING
        self.router.on_draining(replica_id, now)

    def left(self, replica_id: str, now: float) -> None:
        """An empty replica is switched off.

        Raises:
            DispatchError: It still has requests.
        """
        self._check_replica(replica_id)
        if any(assignment.replica_id == replica_id for assignment in self._assigned.values()):
            raise DispatchError(
                f"replica {replica_id} has requests: drain it first, or report that it failed"
            )
        self._forget(replica_id, now)

    def failed(self, replica_id: str, now: float) -> tuple[RoutingRequest, ...]:
        """A replica has failed; its requests, returned in order of arrival, wait for another one."""
        self._check_replica(replica_id)
        lost = [one.item for one in self._assigned.values() if one.replica_id == replica_id]
        lost.sort(key=lambda item: self._order[item.request.request_id])
        for item in lost:
            request_id = item.request.request_id
            del self._assigned[request_id]
            self._pending[request_id] = item
            self.router.on_aborted(request_id, replica_id, now)
        self._forget(replica_id, now)
        return tuple(lost)

    def arrived(self, item: RoutingRequest) -> None:
        """A request waits for a replica.

        Raises:
            InputError: Its id is here already.
        """
        request_id = item.request.request_id
        if request_id in self._pending or request_id in self._assigned:
            raise InputError("request_id", request_id, "an id that is not in the cluster already")
        self._pending[request_id] = item
        self._order[request_id] = self._num_arrived
        self._num_arrived += 1

    def dispatch(self, snapshots: Mapping[str, ReplicaSnapshot], now: float) -> tuple[Assignment, ...]:
        """Assigns the pending requests to replicas, in the router's order, as far as there are replicas for them.

        Args:
            snapshots: A snapshot of every replica, by id; each choice sees the earlier ones of this call.
            now: Time in seconds.

        Raises:
            InputError: A replica has no snapshot.
            DispatchError: The router chose a replica it was not offered.
        """
        for replica_id in self._status:
            if replica_id not in snapshots:
                raise InputError("snapshots", tuple(snapshots), f"one of replica {replica_id} as well")
        current = {replica_id: snapshots[replica_id] for replica_id in self._status}
        assignments = []
        for item in sorted(self._pending.values(), key=lambda item: self._priority(item, now)):
            offered = self._offered(item, current)
            if not offered:
                continue
            chosen = self._choose(item, offered, now)
            self._assigned[item.request.request_id] = assignment = Assignment(item, chosen)
            del self._pending[item.request.request_id]
            snapshot = current[chosen]
            current[chosen] = snapshot.with_waiting(item.waiting_view(snapshot.kv_block_tokens))
            self.router.on_dispatched(item, chosen, now)
            assignments.append(assignment)
        return tuple(assignments)

    def admitted(self, request_id: str, now: float) -> None:
        """The request's replica has admitted it."""
        self.router.on_admitted(request_id, self._replica_of(request_id), now)

    def finished(self, request_id: str, now: float) -> None:
        """The request is done."""
        replica_id = self._replica_of(request_id)
        self._drop(request_id)
        self.router.on_finished(request_id, replica_id, now)

    def aborted(self, request_id: str, now: float) -> str | None:
        """The request was aborted; returns the replica that must forget it, None if it was on none."""
        if request_id in self._pending:
            self._drop(request_id)
            return None
        replica_id = self._replica_of(request_id)
        self._drop(request_id)
        self.router.on_aborted(request_id, replica_id, now)
        return replica_id

    def migrated(self, request_id: str, destination: str, now: float) -> None:
        """The request has changed its replica."""
        source = self._replica_of(request_id)
        self._check_replica(destination)
        self._assigned[request_id] = Assignment(self._assigned[request_id].item, destination)
        self.router.on_migrated(request_id, source, destination, now)

    def validate(self) -> None:
        """Checks the invariants; AssertionError names the one that does not hold."""
        assert not set(self._pending) & set(self._assigned), "a request both waits and is on a replica"
        assert set(self._order) == set(self._pending) | set(self._assigned), "a request is lost"
        assert {one.replica_id for one in self._assigned.values()} <= set(self._status), "no such replica"

    def _offered(self, item: RoutingRequest, current: Mapping[str, ReplicaSnapshot]) -> list[ReplicaSnapshot]:
        """The replicas that the request may go to, in the order in which they joined."""
        roles = {ReplicaRole.BOTH, self.router.role}
        if self.router.role is ReplicaRole.BOTH:
            roles = set(ReplicaRole)
        need = item.request.prompt_tokens + item.request.max_tokens
        fitting = [
            snapshot
            for replica_id, snapshot in current.items()
            if self._role[replica_id] in roles and need <= snapshot.num_kv_blocks * snapshot.kv_block_tokens
        ]
        active = [one for one in fitting if self._status[one.replica_id] is ReplicaStatus.ACTIVE]
        if active or self.router.when_all_draining == "wait" or not fitting:
            return active
        if any(status is ReplicaStatus.ACTIVE for status in self._status.values()):
            return []
        return [min(fitting, key=lambda one: one.num_requests)]

    def _choose(self, item: RoutingRequest, offered: list[ReplicaSnapshot], now: float) -> str:
        if all(self._status[one.replica_id] is ReplicaStatus.DRAINING for one in offered):
            return offered[0].replica_id
        chosen = self.router.choose(item, offered, now)
        if all(chosen != one.replica_id for one in offered):
            raise DispatchError(f"router {self.router.name} chose {chosen!r}, which it was not offered")
        return chosen

    def _priority(self, item: RoutingRequest, now: float) -> tuple[tuple[float, ...], int]:
        return self.router.dispatch_key(item, now), self._order[item.request.request_id]

    def _replica_of(self, request_id: str) -> str:
        assignment = self._assigned.get(request_id)
        if assignment is None:
            raise DispatchError(f"request {request_id} is on no replica")
        return assignment.replica_id

    def _drop(self, request_id: str) -> None:
        self._pending.pop(request_id, None)
        self._assigned.pop(request_id, None)
        del self._order[request_id]

    def _forget(self, replica_id: str, now: float) -> None:
        del self._status[replica_id]
        del self._role[replica_id]
        self.router.on_gone(replica_id, now)

    def _check_replica(self, replica_id: str) -> None:
        if replica_id not in self._status:
            raise InputError("replica_id", replica_id, ", ".join(self._status) or "none: there is no replica")
