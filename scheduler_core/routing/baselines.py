"""Routers without predictions: round robin, random, shortest queue, power of two choices, least KV."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from scheduler_core.routing.base import Router, RoutingRequest
from scheduler_core.routing.snapshot import ReplicaSnapshot


@dataclass(kw_only=True, slots=True)
class RoundRobin(Router):
    """Each replica in turn (Nagle 1987, "On packet switches with infinite storage", IEEE Trans. Commun. 35).

    The next replica follows the last choice in the order of ids, so replicas may join and leave without a reset.
    """

    _last: str | None = field(default=None, init=False, repr=False)

    def choose(self, item: RoutingRequest, replicas: Sequence[ReplicaSnapshot], now: float) -> str:
        names = sorted(replica.replica_id for replica in replicas)
        last = self._last
        self._last = names[0] if last is None else next((name for name in names if name > last), names[0])
        return self._last


@dataclass(kw_only=True, slots=True)
class RandomChoice(Router):
    """A random replica, all with the same probability; draws once per request from `rng`."""

    needs_generator: ClassVar[bool] = True

    rng: np.random.Generator

    def choose(self, item: RoutingRequest, replicas: Sequence[ReplicaSnapshot], now: float) -> str:
        return replicas[int(self.rng.integers(len(replicas)))].replica_id


@dataclass(kw_only=True, slots=True)
class Jsq(Router):
    """Join the shortest queue: the fewest requests, running and waiting (Winston 1977, "Optimality of the shortest line
    discipline", J. Appl. Probab. 14): LiteLLM's least-busy, Envoy's least request with a full scan.

    Optimal for exponential service times and equal servers; ignores differences in length. `waiting_only`:
    only count waiting requests, as Vidur's "least outstanding requests" does.
    """

    waiting_only: bool = False

    def choose(self, item: RoutingRequest, replicas: Sequence[ReplicaSnapshot], now: float) -> str:
        def load(replica: ReplicaSnapshot) -> int:
            return replica.num_waiting if self.waiting_only else replica.num_requests

        return min(replicas, key=load).replica_id


@dataclass(kw_only=True, slots=True)
class PowerOfTwo(Router):
    """The shorter queue of two replicas drawn at random (Mitzenmacher 2001, IEEE Trans. Parallel Distrib.
    Syst. 12; Vvedenskaya et al. 1996).

    Envoy's least request, Ray Serve. Nearly as good as comparing all replicas, but without herding: routers with the same stale snapshot choose differently.
    """

    needs_generator: ClassVar[bool] = True

    rng: np.random.Generator

    def choose(self, item: RoutingRequest, replicas: Sequence[ReplicaSnapshot], now: float) -> str:
        if len(replicas) > 2:
            drawn = self.rng.choice(len(replicas), size=2, replace=False)
            replicas = [replicas[index] for index in drawn.tolist()]
        return min(replicas, key=lambda replica: replica.num_requests).replica_id


@dataclass(kw_only=True, slots=True)
class LeastKv(Router):
    """The replica whose KV cache is least committed: argmin of (M - free + blocks(waiting tokens)) / M.

    M is the number of blocks; free blocks are neither held nor reserved. Without the waiting tokens all
    requests of a burst would go to the same replica. Ties: fewer requests.
    """

    scrapes: ClassVar[bool] = True
    sees_tokens: ClassVar[bool] = True

    def choose(self, item: RoutingRequest, replicas: Sequence[ReplicaSnapshot], now: float) -> str:
        return min(replicas, key=lambda replica: (replica.kv_load, replica.num_requests)).replica_id
