"""Dispatcher of a cluster: its replicas, the replica of each request, and the requests that wait for one."""

from collections.abc import Mapping
from dataclasses import dataclass

from scheduler_core.errors import InputError
from scheduler_core.routing.base import Router, RoutingRequest
from scheduler_core.routing.snapshot import ReplicaRole, ReplicaSnapshot, ReplicaStatus, waiting_view


@dataclass(slots=True)
class _Entry:
    """A request and its replica; None while it waits for one. `order` is its number of arrival."""

    item: RoutingRequest
    order: int
    replica_id: str | None = None


class Dispatcher:
    """Assigns every request to exactly one replica.

    A request waits here until a replica may take it: at once, unless all drain or there is none. Requests on a replica
    that fails wait here again; what they had generated is lost with it.
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
        """Requests that wait for a replica."""
        return len(self._pending)

    @property
    def replicas(self) -> Mapping[str, ReplicaStatus]:
        """Status of every replica there is, in the order in which they joined; failed ones are gone."""
        return dict(self._status)

    def replica_of(self, request_id: str) -> str | None:
        """The replica of the request; None if it waits for one, or is not here."""
        assignment = self._requests.get(request_id)
        return None if assignment is None else assignment.replica_id

    def joined(self, replica_id: str, role: ReplicaRole = ReplicaRole.BOTH) -> None:
        """A replica may be chosen from now on; InputError if there is one of that name."""
        if replica_id in self._status:
            raise InputError("replica_id", replica_id, "a name that no replica has")
        self._status[replica_id] = ReplicaStatus.ACTIVE
        self._role[replica_id] = role

    def draining(self, replica_id: str) -> None:
        """A replica gets nothing new from now on."""
        self._check_replica(replica_id)
        self._status[replica_id] = ReplicaStatus.DRAINING

    def left(self, replica_id: str, now: float) -> None:
        """An empty replica is switched off."""
        del self._status[replica_id]
        del self._role[replica_id]
        self.router.on_gone(replica_id, now)

    def failed(self, replica_id: str, now: float) -> tuple[RoutingRequest, ...]:
        """A replica has failed; its requests, returned in order of arrival, wait for another one."""
        self._check_replica(replica_id)
        here = [one for one in self._requests.values() if one.replica_id == replica_id]
        lost = sorted(here, key=lambda one: one.order)
        for one in lost:
            one.replica_id = None
            self._pending[one.item.request.request_id] = one
            self.router.on_aborted(one.item.request.request_id, replica_id, now)
        self.left(replica_id, now)
        return tuple(one.item for one in lost)

    def arrived(self, item: RoutingRequest) -> None:
        """A request, of another id than all that are here, waits for a replica."""
        name = item.request.request_id
        self._requests[name] = self._pending[name] = _Entry(item, self._num_arrived)
        self._num_arrived += 1

    def dispatch(
        self, snapshots: Mapping[str, ReplicaSnapshot], now: float
    ) -> list[tuple[RoutingRequest, str]]:
        """Assigns pending requests to replicas, in the router's order, as far as there are replicas for them.

        `snapshots` has every replica; each choice sees the earlier ones of this call.
        """
        current = {replica_id: snapshots[replica_id] for replica_id in self._status}
        assignments = []
        for one in sorted(
            self._pending.values(), key=lambda one: (self.router.dispatch_key(one.item, now), one.order)
        ):
            offered = self._offered(one.item, current)
            if not offered:
                continue
            one.replica_id = chosen = self._choose(one.item, offered, now)
            del self._pending[one.item.request.request_id]
            item, snapshot = one.item, current[chosen]
            length = None if item.prediction is None else item.prediction.length
            view = waiting_view(item.request, item.tier, length, snapshot.kv_block_tokens)
            current[chosen] = snapshot.with_waiting(view)
            self.router.on_dispatched(one.item, chosen, now)
            assignments.append((one.item, chosen))
        return assignments

    def finished(self, request_id: str, now: float) -> None:
        """The request is done."""
        self.router.on_finished(request_id, self._placed(request_id), now)
        del self._requests[request_id]

    def aborted(self, request_id: str, now: float) -> str | None:
        """The request was aborted; returns the replica that must forget it, None if it was on none."""
        if self._pending.pop(request_id, None) is None:
            self.router.on_aborted(request_id, self._placed(request_id), now)
        return self._requests.pop(request_id).replica_id

    def migrated(self, request_id: str, destination: str, now: float) -> None:
        """The request has changed its replica."""
        source = self._placed(request_id)
        self._requests[request_id].replica_id = destination
        self.router.on_migrated(request_id, source, destination, now)

    def _offered(self, item: RoutingRequest, current: Mapping[str, ReplicaSnapshot]) -> list[ReplicaSnapshot]:
        """The replicas that the request may go to, in the order in which they joined."""
        takes_all = self.router.role is ReplicaRole.BOTH
        need = item.request.prompt_tokens + item.request.max_tokens
        fitting = [
            snapshot
            for replica_id, snapshot in current.items()
            if (takes_all or self._role[replica_id] in (ReplicaRole.BOTH, self.router.role))
            and need <= snapshot.num_kv_blocks * snapshot.kv_block_tokens
        ]
        active = [one for one in fitting if self._status[one.replica_id] is ReplicaStatus.ACTIVE]
        if active or self.router.when_all_draining == "wait" or not fitting:
            return active
        if ReplicaStatus.ACTIVE in self._status.values():
            return []
        return [min(fitting, key=lambda one: one.num_requests)]

    def _choose(self, item: RoutingRequest, offered: list[ReplicaSnapshot], now: float) -> str:
        if all(self._status[one.replica_id] is ReplicaStatus.DRAINING for one in offered):
            return offered[0].replica_id
        return self.router.choose(item, offered, now)

    def _placed(self, request_id: str) -> str:
        replica_id = self.replica_of(request_id)
        assert replica_id is not None, f"request {request_id} is on no replica"
        return replica_id

    def _check_replica(self, replica_id: str) -> None:
        if replica_id not in self._status:
            raise InputError("replica_id", replica_id, ", ".join(self._status) or "none: there is no replica")
