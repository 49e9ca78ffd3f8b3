"""S3: order and memory by predicted length bucket (Jin et al. 2023, "S3: Increasing GPU Utilization during Generative
Inference for Higher Throughput", NeurIPS 36)."""

import math
from bisect import bisect_left
from dataclasses import dataclass

from scheduler_core.policies.base import Policy
from scheduler_core.request import RequestState

#: Upper bounds of all buckets but the last in tokens, without predicted buckets: SSJF's classes.
EDGES = (42.0, 141.0, 294.0, 503.0)


@dataclass(kw_only=True, slots=True)
class S3(Policy):
    """Shortest predicted bucket first; reserves memory up to the bucket's upper bound.

    key = i;   reserved tokens = n + min(e_i, M)

    | symbol | meaning | unit |
    | --- | --- | --- |
    | i | most probable bucket; else the bucket of the predicted median or length; else the last one | - |
    | e_i | upper bound of bucket i, infinite for the last | tokens |
    | n, M | prompt tokens, max_tokens | tokens |

    Differs from the paper: instead of bin-packing batches by memory, requests are admitted one by one in bucket order;
    a request that exceeds its bucket takes more blocks one by one, instead of being restarted with twice the
    memory. With `reserve` = 0 the buckets only define the order, as in semantic scheduling.
    """

    key_changes = "never"
    running_keys = "on_event"
    progress = "unused"
    inputs = frozenset({"bucket", "length", "point"})

    reserve: bool = True

    @property
    def reserves_memory(self) -> bool:
        return bool(self.reserve)

    def key(self, state: RequestState, now: float) -> float:
        return float(self._bucket(state)[0])

    def admission_tokens(self, state: RequestState) -> int:
        if not self.reserve:
            return state.known_tokens
        bucket, edges = self._bucket(state)
        upper = edges[bucket] if bucket < len(edges) else state.request.max_tokens
        output = min(int(upper), state.request.max_tokens)
        return state.request.prompt_tokens + max(output, state.num_output_tokens)

    def _bucket(self, state: RequestState) -> tuple[int, tuple[float, ...]]:
        if state.bucket is not None:
            return state.bucket.bucket, state.bucket.edges
        if state.prediction is not None:
            return bisect_left(EDGES, math.exp(state.prediction.mu)), EDGES
        return (len(EDGES) if state.point is None else bisect_left(EDGES, state.point.tokens)), EDGES
