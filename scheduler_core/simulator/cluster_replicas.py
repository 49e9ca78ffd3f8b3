"""The replicas of a simulated cluster that are there: their schedulers, steps and prefix caches."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from scheduler_core.errors import InputError
from scheduler_core.routing import ReplicaRole, ReplicaSnapshot, ReplicaStatus
from scheduler_core.routing.scheduler_port import SchedulerPort
from scheduler_core.scheduler import Scheduler
from scheduler_core.simulator.prefix_cache import PrefixCache
from scheduler_core.simulator.replica import SimulatedReplica
from scheduler_core.simulator.step_time import StepTime


class ClusterReplicas:
    """By id: the replicas, and the port and the prefix cache of each.

    Args:
        schedulers: A fresh scheduler for each replica.
        step_times: Durations of the steps of each.
        prefix_cache_tokens: Tokens of earlier turns of conversations that each keeps.
        rebuild: Makes a fresh scheduler for a replica that joins again after it has failed; None: none does.

    Raises:
        InputError: There is no replica.
    """

    def __init__(
        self,
        schedulers: Mapping[str, Scheduler],
        step_times: Mapping[str, StepTime],
        prefix_cache_tokens: int,
        rebuild: Callable[[str], Scheduler] | None,
    ) -> None:
        if not schedulers:
            raise InputError("schedulers", schedulers, "at least one replica")
        self._step_times = step_times
        self._prefix_cache_tokens = prefix_cache_tokens
        self._rebuild = rebuild
        self.by_id: dict[str, SimulatedReplica] = {}
        self.ports: dict[str, SchedulerPort] = {}
        self.prefixes: dict[str, PrefixCache] = {}
        for name, core in schedulers.items():
            self._put(name, core)

    def _put(self, name: str, core: Scheduler) -> None:
        self.ports[name] = port = SchedulerPort(core)
        self.by_id[name] = SimulatedReplica(name, port, self._step_times[name])
        self.forget_prefixes(name)

    def restore(self, name: str) -> None:
        """A replica that had failed is there again, with nothing in it; nothing happens if it is there.

        Raises:
            InputError: Nobody can rebuild it.
        """
        if name in self.by_id:
            return
        if self._rebuild is None:
            raise InputError("changes", f"replica {name} joins after it has failed", "that, with `rebuild`")
        self._put(name, self._rebuild(name))

    def remove(self, name: str) -> None:
        """A replica is gone with all it held."""
        del self.by_id[name], self.ports[name], self.prefixes[name]

    def forget_prefixes(self, name: str) -> None:
        """Its prefix cache is empty from now on."""
        self.prefixes[name] = PrefixCache(self._prefix_cache_tokens)

    def snapshots(
        self, status: Mapping[str, ReplicaStatus], roles: Mapping[str, ReplicaRole], *, keep_requests: bool
    ) -> tuple[ReplicaSnapshot, ...]:
        """Pictures of the replicas that have a status; see `SchedulerPort.snapshot`."""
        return tuple(
            self.ports[name].snapshot(name, status=one, role=roles[name], keep_requests=keep_requests)
            for name, one in status.items()
        )

    @property
    def num_waiting(self) -> int:
        """Requests that wait on a replica."""
        return sum([port.scheduler.num_waiting for port in self.ports.values()])
