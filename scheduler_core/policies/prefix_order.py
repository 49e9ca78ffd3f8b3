"""Policies of SGLang by what its prefix cache has: longest prefix first, and depth-first in the tree of prefixes."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from scheduler_core.policies.work_left import EventOrder
from scheduler_core.request import RequestState

#: Key of a request that has arrived since the last sort, after all others.
_LAST = 1e12


@dataclass(kw_only=True, slots=True)
class LongestPrefix(EventOrder):
    """Longest cached prefix first (`lpm` of SGLang: Zheng et al. 2024, "SGLang: Efficient Execution of Structured Language
    Model Programs", arXiv:2312.07104, section 3).

    key = -h

    | symbol | meaning | unit |
    | --- | --- | --- |
    | h | leading tokens in the prefix cache, on the device or the host | tokens |

    Starves requests without a cached prefix while others with one arrive.

    Differs from SGLang: sorted after events instead of before every step; always, not only up to 128 waiting requests; of
    waiting requests that share a prefix with each other only, none is put back until the first has computed it.
    """

    inputs = frozenset({"cached"})

    def key(self, state: RequestState, now: float) -> float:
        return -float(state.cached_tokens)


@dataclass(kw_only=True, slots=True)
class DepthFirst(EventOrder):
    """Depth-first order of the tree of cached prefixes, the subtree of most waiting requests first (`dfs-weight` of SGLang,
    `sort by dfs weight` in its schedule_policy.py).

    key = position in the depth-first order; children by weight w, then by arrival; then the requests of the node itself

    | symbol | meaning | unit |
    | --- | --- | --- |
    | w | waiting requests whose cached prefix ends in the subtree | requests |

    With all requests present this computes each shared prefix once (paper of SGLang, theorem 3.1). Starves
    requests without a cached prefix.

    Differs from SGLang: the nodes of the tree are the segments of the prompts (`Request.content`); requests whose cached
    prefixes end in the same one are served the longest prefix first. Sorted after events.
    """

    inputs = frozenset({"cached"})
    protects_running = True

    _waiting: dict[str, RequestState] = field(default_factory=dict, init=False, repr=False)
    _positions: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    _is_stale: bool = field(default=False, init=False, repr=False)

    def on_arrival(self, state: RequestState, now: float) -> None:
        self._waiting[state.request_id] = state
        EventOrder.on_arrival(self, state, now)

    def on_admit(self, state: RequestState, now: float) -> None:
        self._waiting.pop(state.request_id, None)
        EventOrder.on_admit(self, state, now)

    def on_preempt(self, state: RequestState, now: float) -> None:
        self._waiting[state.request_id] = state
        EventOrder.on_preempt(self, state, now)

    def on_finish(self, state: RequestState) -> None:
        self._waiting.pop(state.request_id, None)
        EventOrder.on_finish(self, state)

    def on_pressure(self, num_waiting: int, max_num_seqs: int) -> bool:
        # What is cached is looked up after this call, before the first key.
        self._is_stale = EventOrder.on_pressure(self, num_waiting, max_num_seqs)
        return self._is_stale

    def key(self, state: RequestState, now: float) -> float:
        if self._is_stale:
            self._sort()
            self._is_stale = False
        return self._positions.get(state.request_id, _LAST)

    def eviction_key(self, state: RequestState, now: float) -> float:
        # Below all positions: a running request has none, and is not evicted for one that waits.
        return state.request.arrival_s - _LAST

    def _sort(self) -> None:
        """Updates the positions of all waiting requests."""
        nodes: dict[tuple[int, str], int] = {}
        weights: Counter[int] = Counter()
        paths: list[tuple[list[int], RequestState]] = []
        for state in sorted(self._waiting.values(), key=lambda item: item.order):
            path = [0]
            for key in _cached_keys(state):
                path.append(nodes.setdefault((path[-1], key), len(nodes) + 1))
            weights.update(path)
            paths.append((path[1:], state))
        entries = []
        for path, state in paths:
            branches = [(-float(weights[node]), float(node)) for node in path]
            # A node's own requests come after those of the nodes below it.
            entries.append(
                ([*branches, (math.inf, -float(state.cached_tokens))], state.order, state.request_id)
            )
        self._positions = {name: float(position) for position, (*_, name) in enumerate(sorted(entries))}


def _cached_keys(state: RequestState) -> Iterator[str]:
    """Keys of the segments that the cached prefix reaches into."""
    position = 0
    for segment in state.request.content:
        if position >= state.cached_tokens:
            return
        yield segment.key
        position += segment.num_tokens
