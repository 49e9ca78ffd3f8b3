"""S3: order and memory by predicted length bucket (Jin et al. 2023, "S3: Increasing GPU Utilization during Generative
Inference for Higher Throughput", NeurIPS 36)."""

import math
from bisect import bisect_left
from dataclasses import dataclass

from scheduler_core.policies.base import Policy
from scheduler_core.request import RequestState

#: Upper ends of the buckets but the last, in tokens, where no bucket is predicted: SSJF's classes.
EDGES = (42.0, 141.0, 294.0, 503.0)


@dataclass(kw_only=True, slots=True)
class S3(Policy):
    """The request of the shortest predicted bucket goes first, with memory for the bucket's upper end.

    key = i;   tokens reserved = n + min(e_i, M)

    | symbol | meaning | unit |
    | --- | --- | --- |
    | i | most probable bucket; without buckets that of the predicted median or length; the last without those | - |
    | e_i | upper end of bucket i, infinite for the last | tokens |
    | n, M | prompt, the request's own max_tokens | tokens |

    Differs from the paper: batches are not bin-packed by memory, admission in bucket order does that one request at a time;
    a request that outgrows its bucket takes block after block, instead of being stopped and restarted with twice the
    memory. With `reserve` = 0 the buckets are an order alone, as in semantic scheduling.
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
        most = edges[bucket] if bucket < len(edges) else state.request.max_tokens
        output = min(int(most), state.request.max_tokens)
        return state.request.prompt_tokens + max(output, state.num_output_tokens)

    def _bucket(self, state: RequestState) -> tuple[int, tuple[float, ...]]:
        if state.bucket is not None:
            return state.bucket.bucket, state.bucket.edges
        if state.prediction is not None:
            return bisect_left(EDGES, math.exp(state.prediction.mu)), EDGES
        return (len(EDGES) if state.point is None else bisect_left(EDGES, state.point.tokens)), EDGES
