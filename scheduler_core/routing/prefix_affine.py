"""Prefix affinity: the replica with the longest cached prefix, unless it is too busy (the cache-aware load
balancer of Zheng et al. 2024, "SGLang", arXiv:2312.07104; Preble, Srivatsa et al. 2024, arXiv:2407.00023)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler_core.ranges import INTEGERS, POSITIVE, check_ranges
from scheduler_core.routing.base import Router, RoutingRequest
from scheduler_core.routing.prefix_index import PrefixIndex
from scheduler_core.routing.snapshot import ReplicaSnapshot


@dataclass(kw_only=True, slots=True)
class PrefixAffine(Router):
    """The replica with the longest shared prefix, unless it is much busier than the least busy one.

    hit(r) = longest k such that the k-th prefix block of the prompt was sent to r before
    affine if  num_requests(r) <= min num_requests + imbalance  and  hit(r) >= min_fraction * blocks; else shortest queue

    | symbol | meaning | unit |
    | --- | --- | --- |
    | hit | blocks of the prompt that the replica probably holds | blocks |
    | imbalance | maximum number of requests above that of the least busy replica | requests |
    | min_fraction | minimum fraction of the prompt for affinity | - |
    | max_blocks | blocks stored per replica (LRU) | blocks |

    Differs from the papers: the router stores the prefixes that it sent, without evictions of the engine, so hits are
    estimates (as in SGLang's router, see `CacheAware`).
    """

    imbalance: int = 8
    min_fraction: float = 0.25
    max_blocks: int = 65_536
    #: What was sent where.
    sent: PrefixIndex = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_ranges(self, imbalance=(0, INTEGERS), min_fraction=(POSITIVE, 1.0), max_blocks=(1, INTEGERS))
        self.sent = PrefixIndex(self.max_blocks)

    def choose(self, item: RoutingRequest, replicas: Sequence[ReplicaSnapshot], now: float) -> str:
        least = min(replica.num_requests for replica in replicas)
        min_hit = max(1, math.ceil(self.min_fraction * len(item.prefix_blocks)))
        near = [
            (hit, replica)
            for replica in replicas
            if replica.num_requests <= least + self.imbalance
            and (hit := self.sent.hit_blocks(item, replica.replica_id)) >= min_hit
        ]
        if near:
            return max(near, key=lambda pair: (pair[0], -pair[1].num_requests))[1].replica_id
        return min(replicas, key=lambda replica: replica.num_requests).replica_id

    def on_dispatched(self, item: RoutingRequest, replica_id: str, now: float) -> None:
        self.sent.add(item, replica_id)

    def on_gone(self, replica_id: str, now: float) -> None:
        self.sent.forget(replica_id)
