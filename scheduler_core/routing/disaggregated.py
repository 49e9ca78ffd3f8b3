"""Disaggregated serving: prompts on one pool of replicas, generation on another (Zhong et al. 2024, "DistServe", OSDI)."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import ClassVar

from scheduler_core.routing.base import Router, RoutingRequest
from scheduler_core.routing.migration import Move
from scheduler_core.routing.snapshot import Capacity, ReplicaRole, ReplicaSnapshot, ReplicaStatus


@dataclass(kw_only=True, slots=True)
class Disaggregated(Router):
    """New requests go to the prefill replica with the least prompt work; after prefill they move to a decode replica.

    prefill: argmin of the remaining prefill tokens of waiting and running requests
    decode: argmin of committed KV memory among replicas with capacity; without capacity the cache stays on its replica,
    and the decode replica pulls it later (section 4.3)

    Replicas of role BOTH are used for both phases. `Migrations` executes the moves with `stage_blocks=None`:
    it copies the whole cache at once while the request is stopped.

    Differs from the paper: the router does not include the placement search (section 4.2); a prefill replica generates
    tokens itself while no decode replica has capacity.
    """

    sees_tokens: ClassVar[bool] = True
    needs_requests: ClassVar[bool] = True
    role: ClassVar[ReplicaRole] = ReplicaRole.PREFILL

    def choose(self, item: RoutingRequest, replicas: Sequence[ReplicaSnapshot], now: float) -> str:
        def load(replica: ReplicaSnapshot) -> tuple[int, int]:
            return sum(row.prefill_left_tokens for row in replica.requests), replica.num_requests

        return min(replicas, key=load).replica_id

    def plan(
        self, replicas: Sequence[ReplicaSnapshot], in_flight: AbstractSet[str], now: float
    ) -> tuple[Move, ...]:
        """The transfers to start now, for all decoding requests on prefill replicas, in order of arrival."""
        targets = [
            replica
            for replica in replicas
            if replica.role is not ReplicaRole.PREFILL and replica.status is ReplicaStatus.ACTIVE
        ]
        capacities = {replica.replica_id: Capacity(replica) for replica in targets}
        ready = [
            (row, replica.replica_id)
            for replica in replicas
            if replica.role is ReplicaRole.PREFILL
            for row in replica.requests
            if row.decoding and row.request_id not in in_flight
        ]
        moves = []
        for row, source in sorted(ready, key=lambda pair: (pair[0].arrival_s, pair[0].request_id)):
            fitting = [target for target in targets if capacities[target.replica_id].fits(row)]
            if not fitting:
                break  # later requests also wait, so that none is overtaken because of its size
            target = min(fitting, key=lambda replica: capacities[replica.replica_id].kv_load)
            capacities[target.replica_id].take(row)
            moves.append(Move(row.request_id, source, target.replica_id))
        return tuple(moves)
