"""Which running requests to preempt when the KV cache has no free block, under policies that do not evict by key."""

from collections.abc import Iterable
from typing import Literal

from scheduler_core.request import RequestState

MemoryVictims = Literal["last_admitted", "cheapest"]

#: Preemptions of a request after which running requests with fewer are preempted before it.
PREEMPTIONS_PER_ROUND = 4


def cheapest_last(running: Iterable[RequestState]) -> list[RequestState]:
    """Running requests, given in order of admission, so that the one to preempt first is the last, as in vLLM's list; of
    equal ones it is the one admitted last. O(n log n), for steps in which memory runs out.

    Smallest (floor(k / 4), c) is preempted first.

    | symbol | meaning | unit |
    | --- | --- | --- |
    | c | tokens in the KV cache, to be computed again as far as others take their blocks | tokens |
    | k | number of its preemptions so far | - |

    k bounds how often one request is preempted: a fifth time only after all running ones were preempted four times. The
    remaining output is not used: dividing c by its root recomputes no fewer tokens, not even with the true one.

    Without a prefix cache, about half as many tokens are recomputed as with vLLM's rule, and latencies fall. With one, only
    what others overwrite is lost, and the pauses of preempted requests become longer (`benchmarks/results/memory_victims.md`).
    """
    return sorted(running, key=_cost, reverse=True)


def _cost(state: RequestState) -> tuple[int, float]:
    return state.num_preemptions // PREEMPTIONS_PER_ROUND, state.num_computed_tokens
