"""Routers of vLLM's production-stack (vllm-project/production-stack, src/vllm_router/routers/routing_logic.py)."""

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import ClassVar

import numpy as np

from scheduler_core.ranges import FINITE, INTEGERS, POSITIVE, check_ranges
from scheduler_core.routing.base import Router, RoutingRequest
from scheduler_core.routing.prefix_index import PrefixIndex
from scheduler_core.routing.snapshot import ReplicaSnapshot


@dataclass(kw_only=True, slots=True)
class SessionHash(Router):
    """`session`: consistent hashing of the session; a request without one goes to the replica that was sent the fewest in the
    last `window_s` seconds.

    A replica has `num_points` points on the ring, so 1/n of the sessions move when one of n leaves. Loads are not compared.
    """

    num_points: int = 160
    window_s: float = 60.0
    _ring: list[tuple[int, str]] = field(default_factory=list, init=False, repr=False)
    _names: frozenset[str] = field(default=frozenset(), init=False, repr=False)
    #: Requests sent in the window, (time, replica), and their number by replica.
    _sent: deque[tuple[float, str]] = field(default_factory=deque, init=False, repr=False)
    _num_sent: Counter[str] = field(default_factory=Counter, init=False, repr=False)

    def __post_init__(self) -> None:
        check_ranges(self, num_points=(1, INTEGERS), window_s=(POSITIVE, FINITE))

    def choose(self, item: RoutingRequest, replicas: Sequence[ReplicaSnapshot], now: float) -> str:
        session = item.request.session
        if not session:
            self._drop_before(now - self.window_s)
            return min(replicas, key=lambda replica: self._num_sent[replica.replica_id]).replica_id
        names = frozenset(replica.replica_id for replica in replicas)
        if names != self._names:
            self._names = names
            self._ring = sorted(
                (_position(f"{name} {number}"), name) for name in names for number in range(self.num_points)
            )
        after = bisect_right(self._ring, (_position(session), ""))
        return self._ring[after % len(self._ring)][1]

    def on_dispatched(self, item: RoutingRequest, replica_id: str, now: float) -> None:
        self._drop_before(now - self.window_s)
        self._sent.append((now, replica_id))
        self._num_sent[replica_id] += 1

    def _drop_before(self, start_s: float) -> None:
        while self._sent and self._sent[0][0] < start_s:
            self._num_sent[self._sent.popleft()[1]] -= 1


def _position(text: str) -> int:
    return int.from_bytes(sha256(text.encode()).digest()[:8])


@dataclass(kw_only=True, slots=True)
class PrefixAware(Router):
    """`prefixaware`: a random one of the replicas that were sent the longest prefix of the prompt; of all if none was.

    Nothing is evicted and loads are not compared, so all requests with one system prompt follow the first of them.
    Differs from the source: blocks have the KV cache's size, not 128 characters; a replica that is gone is forgotten.
    """

    needs_generator: ClassVar[bool] = True

    rng: np.random.Generator
    _sent: PrefixIndex = field(default_factory=lambda: PrefixIndex(INTEGERS), init=False, repr=False)

    def choose(self, item: RoutingRequest, replicas: Sequence[ReplicaSnapshot], now: float) -> str:
        hits = [self._sent.hit_blocks(item, replica.replica_id) for replica in replicas]
        best = max(hits)
        longest = [replica.replica_id for replica, hit in zip(replicas, hits, strict=True) if hit == best]
        return longest[int(self.rng.integers(len(longest)))]

    def on_dispatched(self, item: RoutingRequest, replica_id: str, now: float) -> None:
        self._sent.add(item, replica_id)

    def on_gone(self, replica_id: str, now: float) -> None:
        self._sent.forget(replica_id)
