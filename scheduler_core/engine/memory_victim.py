"""Which running requests to preempt: declared levels, before the order of every policy, and victims of those without one."""

import math
from collections.abc import Iterable, Sequence
from typing import Literal

from scheduler_core.policies.base import Policy
from scheduler_core.request import RequestState

MemoryVictims = Literal["last_admitted", "cheapest"]

#: Preemptions of a request after which running requests with fewer are preempted before it.
PREEMPTIONS_PER_ROUND = 4


def least_urgent(running: Sequence[RequestState]) -> list[RequestState]:
    """Those of the largest declared level, in the given order: one of them is preempted. The rule of the policy, or of a
    paper, decides which."""
    largest = max([state.declared_level for state in running])
    return [state for state in running if state.declared_level == largest]


def eviction_rank(state: RequestState, eviction_key: float) -> tuple[bool, int, float, float, int]:
    """Sort key of running requests under policies that evict by key; the largest is evicted first. Those at -infinity are
    evicted after all others."""
    request = state.request
    return eviction_key > -math.inf, state.declared_level, eviction_key, request.arrival_s, state.order


def may_displace(policy: Policy, running: RequestState, waiting: RequestState, now: float) -> bool:
    """Whether a waiting request may displace a running one, under a preemptive policy: always from a less urgent level, and
    within one as the policy says."""
    if running.declared_level != waiting.declared_level:
        return policy.preemptive and waiting.declared_level < running.declared_level
    return policy.may_preempt(running, waiting, now)


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
