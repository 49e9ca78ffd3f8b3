"""Endpoint picker of llm-d and of the Gateway API Inference Extension: weighted scores of queue, KV cache and prefix
(kubernetes-sigs/gateway-api-inference-extension, chart inferencepool; llm-d-router, pkg/epp/framework/plugins/scheduling)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from scheduler_core.errors import InputError
from scheduler_core.ranges import FINITE, INTEGERS, check_ranges
from scheduler_core.routing.base import Router, RoutingRequest
from scheduler_core.routing.prefix_index import PrefixIndex
from scheduler_core.routing.snapshot import ReplicaSnapshot


@dataclass(kw_only=True, slots=True)
class EndpointPicker(Router):
    """The replica with the largest score; replicas with the same score take turns.

    score(r) = queue (max q - q) / (max q - min q) + kv_cache (1 - u) + prefix hit / blocks

    | symbol | meaning | unit |
    | --- | --- | --- |
    | queue, kv_cache, prefix | weights: 2, 2 and 3 in the chart | - |
    | q | waiting requests, as scraped; the first term is `queue` if all are equal | requests |
    | u | fraction of the KV blocks that running requests hold, as scraped | - |
    | hit | leading blocks of the prompt sent to r before | blocks |
    | blocks | full blocks of the prompt, at most `max_prefix_blocks` | blocks |
    | max_blocks | stored per replica, least recently used dropped | blocks |

    Metrics are scraped every 50 ms by default (`cluster.snapshot_interval_s`); the requests sent since are not in them.
    Differs from the source: blocks have the KV cache's size, not 64 characters.
    """

    scrapes: ClassVar[bool] = True
    sees_tokens: ClassVar[bool] = True

    queue: float = 2.0
    kv_cache: float = 2.0
    prefix: float = 3.0
    max_prefix_blocks: int = 256
    max_blocks: int = 31_250
    _sent: PrefixIndex = field(init=False, repr=False)
    _num_choices: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        check_ranges(self, queue=(0.0, FINITE), kv_cache=(0.0, FINITE), prefix=(0.0, FINITE))
        check_ranges(self, max_prefix_blocks=(1, INTEGERS), max_blocks=(1, INTEGERS))
        if self.queue + self.kv_cache + self.prefix == 0:
            raise InputError("queue, kv_cache, prefix", (0.0, 0.0, 0.0), "at least one weight > 0")
        self._sent = PrefixIndex(self.max_blocks)

    def choose(self, item: RoutingRequest, replicas: Sequence[ReplicaSnapshot], now: float) -> str:
        queues = [replica.num_waiting for replica in replicas]
        longest, shortest = max(queues), min(queues)
        blocks = min(item.request.prompt_tokens // replicas[0].kv_block_tokens, self.max_prefix_blocks)
        scores = []
        for replica, length in zip(replicas, queues, strict=True):
            free = replica.num_free_blocks / replica.num_kv_blocks
            short = (longest - length) / (longest - shortest) if longest > shortest else 1.0
            hit = self.prefix and min(self._sent.hit_blocks(item, replica.replica_id), blocks)
            scores.append(self.queue * short + self.kv_cache * free + self.prefix * hit / max(blocks, 1))
        best = max(scores)
        equal = [replica.replica_id for replica, score in zip(replicas, scores, strict=True) if score == best]
        self._num_choices += 1
        return equal[self._num_choices % len(equal)]

    def on_dispatched(self, item: RoutingRequest, replica_id: str, now: float) -> None:
        self._sent.add(item, replica_id)

    def on_gone(self, replica_id: str, now: float) -> None:
        self._sent.forget(replica_id)
