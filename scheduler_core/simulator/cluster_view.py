"""What routers, planners and scalers see of the simulated replicas."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from scheduler_core.routing.dispatcher import Dispatcher
from scheduler_core.routing.snapshot import (
    ReplicaRole,
    ReplicaSnapshot,
    ReplicaStatus,
    take_snapshot,
    waiting_view,
)
from scheduler_core.simulator.replica import SimulatedReplica


class ClusterView:
    """Snapshots of the replicas of a dispatcher: as they are, or as a router has scraped them.

    `settle` is called with a replica and the time before a router reads its tokens; it completes the steps that have ended.
    Scraped metrics (`Router.scrapes`) are at most `snapshot_interval_s` old.
    """

    def __init__(
        self,
        replicas: Mapping[str, SimulatedReplica],
        roles: Mapping[str, ReplicaRole],
        settle: Callable[[SimulatedReplica, float], object],
        snapshot_interval_s: float = 0.0,
    ) -> None:
        self._replicas, self._roles, self._settle = replicas, roles, settle
        self._snapshot_interval_s = snapshot_interval_s
        #: What the router has scraped, and when.
        self._scraped: dict[str, ReplicaSnapshot] = {}
        self._scraped_s = -math.inf
        #: Snapshots for a router that only reads numbers of requests, with these.
        self._counted: dict[str, tuple[tuple[Any, ...], ReplicaSnapshot]] = {}

    def seen(self, dispatcher: Dispatcher, now: float) -> dict[str, ReplicaSnapshot]:
        """The replicas as the router sees them, by id."""
        router = dispatcher.router
        if not (router.scrapes or router.sees_tokens or router.needs_requests):
            return self._with_counts(dispatcher)
        if router.sees_tokens:
            for name in dispatcher.replicas:
                self._settle(self._replicas[name], now)
        if not (router.scrapes and self._snapshot_interval_s):
            snapshots = self.snapshots(dispatcher, keep_requests=router.needs_requests)
            return {snapshot.replica_id: snapshot for snapshot in snapshots}
        if now - self._scraped_s >= self._snapshot_interval_s:
            self._scraped, self._scraped_s = {}, now
        if any(name not in self._scraped for name in dispatcher.replicas):
            for snapshot in self.snapshots(dispatcher, keep_requests=False):
                self._scraped.setdefault(snapshot.replica_id, snapshot)
        return self._scraped

    def snapshots(self, dispatcher: Dispatcher, *, keep_requests: bool) -> tuple[ReplicaSnapshot, ...]:
        """The replicas as they are, in the order in which they joined."""
        return tuple(
            [
                self._snapshot(name, status, keep_requests=keep_requests)
                for name, status in dispatcher.replicas.items()
            ]
        )

    def forget(self, name: str) -> None:
        """Called when a replica has left, so that it is scraped again when it joins again."""
        self._scraped.pop(name, None)

    def _with_counts(self, dispatcher: Dispatcher) -> dict[str, ReplicaSnapshot]:
        """Snapshots with the current numbers of requests; new ones of replicas where these have changed."""
        snapshots = {}
        for name, status in dispatcher.replicas.items():
            replica = self._replicas[name]
            scheduler = replica.scheduler
            counts = (status, scheduler.num_running, scheduler.num_waiting, len(replica.held))
            latest = self._counted.get(name)
            if latest is None or latest[0] != counts:
                latest = self._counted[name] = counts, self._snapshot(name, status, keep_requests=False)
            snapshots[name] = latest[1]
        return snapshots

    def _snapshot(self, name: str, status: ReplicaStatus, *, keep_requests: bool) -> ReplicaSnapshot:
        replica, role = self._replicas[name], self._roles[name]
        scheduler = replica.scheduler
        snapshot = take_snapshot(scheduler, name, status=status, role=role, keep_requests=keep_requests)
        for request in replica.held.values():
            view = waiting_view(request, request.tier, None, scheduler.config.kv_block_tokens)
            snapshot = snapshot.with_waiting(view)
        return snapshot
