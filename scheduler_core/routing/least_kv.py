"""Least KV: the replica with the largest free share of KV cache, waiting requests counted in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from scheduler_core.routing.base import Router, RoutingRequest
from scheduler_core.routing.snapshot import ReplicaSnapshot


@dataclass(kw_only=True, slots=True)
class LeastKv(Router):
    """The replica whose KV cache is least committed.

    load = (M - free + blocks(waiting tokens)) / M

    | symbol | meaning | unit |
    | --- | --- | --- |
    | M | blocks in the KV cache | blocks |
    | free | blocks neither held nor reserved | blocks |
    | waiting tokens | tokens that the waiting requests bring along | tokens |

    Without the waiting tokens every request of a burst would go to the same replica. Ties: fewer requests.
    """

    name: ClassVar[str] = "least_kv"
    sees_tokens: ClassVar[bool] = True

    def choose(self, item: RoutingRequest, replicas: Sequence[ReplicaSnapshot], now: float) -> str:
        return min(replicas, key=lambda replica: (replica.kv_load, replica.num_requests)).replica_id
