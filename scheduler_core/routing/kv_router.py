"""Dynamo's KV router: prompt blocks to compute plus blocks in use (NVIDIA Dynamo, docs "Router Design" and
lib/llm/src/kv_router/scheduler.rs)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from scheduler_core.ranges import FINITE, check_ranges
from scheduler_core.routing.base import Router, RoutingRequest
from scheduler_core.routing.snapshot import ReplicaSnapshot


@dataclass(kw_only=True, slots=True)
class KVRouter(Router):
    """The replica of least cost; one of them at random if several have it.

    cost(r) = overlap_score_weight * prefill(r) + decode(r)
    prefill(r) = (prompt tokens that r still has to compute + those of this request that r does not have) / block size
    decode(r) = blocks of the requests on r, running and waiting, and of this one

    | symbol | meaning | unit |
    | --- | --- | --- |
    | overlap_score_weight | weight of the prompts; 0 ignores caches | - |

    What r has of the prompt is exact, as the engines report every block that they store or drop. The router counts the
    blocks of its requests itself, so nothing is scraped. Temperature 0, the default: no softmax.
    Differs from the source: prompt tokens leave the sum chunk by chunk instead of with the first output token; blocks that the
    request shares with running ones count in decode(r) once more.
    """

    needs_generator: ClassVar[bool] = True
    sees_tokens: ClassVar[bool] = True

    rng: np.random.Generator
    overlap_score_weight: float = 1.0

    def __post_init__(self) -> None:
        check_ranges(self, overlap_score_weight=(0.0, FINITE))

    def choose(self, item: RoutingRequest, replicas: Sequence[ReplicaSnapshot], now: float) -> str:
        request = item.request
        costs = []
        for replica in replicas:
            size = replica.kv_block_tokens
            new_tokens = request.prompt_tokens - replica.cached_tokens(request)
            prefill = (replica.waiting_prefill_tokens + replica.running_prefill_tokens() + new_tokens) / size
            decode = replica.used_blocks + replica.blocks_for(replica.waiting_prefill_tokens)
            costs.append(self.overlap_score_weight * prefill + decode)
        least = min(costs)
        equal = [replica.replica_id for replica, cost in zip(replicas, costs, strict=True) if cost == least]
        return equal[int(self.rng.integers(len(equal)))] if len(equal) > 1 else equal[0]
