"""SGLang's cache-aware router: the best prefix match while loads are balanced, else the shortest queue (SGLang model gateway,
sgl-model-gateway/src/policies/cache_aware.rs; also the default of vLLM's router and of SMG)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler_core.ranges import FINITE, INTEGERS, check_ranges
from scheduler_core.routing.base import Router, RoutingRequest
from scheduler_core.routing.prefix_index import PrefixIndex
from scheduler_core.routing.snapshot import ReplicaSnapshot


@dataclass(kw_only=True, slots=True)
class CacheAware(Router):
    """Cache affinity, unless the loads of the replicas are too different.

    imbalanced:  max n - min n > balance_abs_threshold  and  max n > balance_rel_threshold * min n
    r = argmin n          if imbalanced, or hit / prompt <= cache_threshold;   else argmax hit

    | symbol | meaning | unit |
    | --- | --- | --- |
    | n | requests sent to a replica and not ended | requests |
    | hit | leading tokens of the prompt sent to the replica before | tokens |
    | max_blocks | stored per replica; `max_tree_size` characters in SGLang | blocks |

    Differs from the source: the tree stores blocks of the KV cache's size instead of characters, and drops the least recently
    used ones at once instead of every two minutes. Without a match it joins the shortest queue, as the code does; its comment
    names the smallest tree.
    """

    cache_threshold: float = 0.3
    balance_abs_threshold: int = 64
    balance_rel_threshold: float = 1.5
    max_blocks: int = 1_048_576
    _sent: PrefixIndex = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_ranges(self, cache_threshold=(0.0, 1.0), balance_abs_threshold=(0, INTEGERS))
        check_ranges(self, balance_rel_threshold=(0.0, FINITE), max_blocks=(1, INTEGERS))
        self._sent = PrefixIndex(self.max_blocks)

    def choose(self, item: RoutingRequest, replicas: Sequence[ReplicaSnapshot], now: float) -> str:
        loads = [replica.num_requests for replica in replicas]
        least, most = min(loads), max(loads)
        if most - least <= self.balance_abs_threshold or most <= self.balance_rel_threshold * least:
            hits = [self._sent.hit_blocks(item, replica.replica_id) for replica in replicas]
            best = max(range(len(replicas)), key=hits.__getitem__)
            matched = hits[best] * replicas[best].kv_block_tokens / item.request.prompt_tokens
            if matched > self.cache_threshold:
                return replicas[best].replica_id
        return replicas[loads.index(least)].replica_id

    def on_dispatched(self, item: RoutingRequest, replica_id: str, now: float) -> None:
        self._sent.add(item, replica_id)

    def on_gone(self, replica_id: str, now: float) -> None:
        self._sent.forget(replica_id)
