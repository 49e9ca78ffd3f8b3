"""UniBoost's dispatch: one order over prompts and decodes, taken anew in every step.

Source: Li et al., "Beyond Prediction: Tail-Aware Scheduling for LLM Inference", sections 3.2 and 3.3, Algorithm 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from scheduler_core.batching.base import BatchFormer, steps_that_fit
from scheduler_core.batching.batch import Batch, prefill_tokens_ahead
from scheduler_core.kv_cache import Limits
from scheduler_core.pool import Pool
from scheduler_core.ranges import FINITE, check_ranges
from scheduler_core.request import RequestState, Status


@dataclass(kw_only=True, slots=True)
class OneOrder(BatchFormer):
    """The M requests of the smallest Phi make up the step, whether they wait, prefill or decode.

    1. Until the batch has M requests or C tokens: r = argmin Phi over what is prefill-ready and decode-ready.
    2. If the keys and values of r's next chunk or token fit, r joins; else the victim is swapped out, and again.
    3. What is in memory and not among the M is paused: it keeps its memory and does nothing in this step.

    victim = argmax of Phi(v) - swap_token_s n_v over running v with Phi(r) < Phi(v) - delta that the policy lets go

    | symbol | meaning | here |
    | --- | --- | --- |
    | Phi | arrival less boost | the policy's key; the paper's is policy "uniboost" |
    | M, C | requests and tokens in a step; C is also the chunk of a prompt | max_num_seqs, max_num_batched_tokens |
    | delta | what another request has to be ahead of one of the last step to take its place | hysteresis_s |
    | n_v, swap_token_s | tokens of v in the cache, time to copy one out and back | tokens, s |

    A policy protects a request by an eviction key of -infinity (MemGuard between two thresholds): it can be paused, but not
    swapped out, unless nothing else would run. What happens to the victim's cache is `preemption`: swap in the paper.

    Differs from the paper: it names priority and swap cost for SELECTVICTIM without a formula; both are seconds here. A
    request that does not fit without a victim ends the admissions of the step, so that none is overtaken because of its
    size. The policy's own hysteresis is not used.
    """

    evicts_by_key = True

    hysteresis_s: float = 0.1
    swap_token_s: float = 1e-5
    _last: frozenset[str] = field(default=frozenset(), init=False, repr=False)

    def __post_init__(self) -> None:
        check_ranges(self, hysteresis_s=(0, FINITE), swap_token_s=(0, FINITE))

    def max_running(self, limits: Limits) -> int:
        return limits.num_kv_blocks  # memory is the limit

    def form(self, pool: Pool, max_num_batched_tokens: int, now: float) -> Batch:
        batch = Batch(max_num_batched_tokens)
        running = sorted(pool.running.values(), key=lambda state: self._rank(pool, state, now), reverse=True)
        chosen: list[str] = []
        may_admit = True
        while batch.budget > 0 and len(chosen) < pool.max_num_seqs:
            head = pool.waiting.peek() if may_admit else None
            if head is not None and head.request_id in batch.preempted:
                head = None
            if running and (head is None or self._rank(pool, running[-1], now) < self._rank(pool, head, now)):
                state = running.pop()
                if state.status is not Status.RUNNING or not self._grow(pool, batch, state, running, now):
                    continue
            elif head is not None:
                may_admit = self._admit(pool, batch, head, running, now)
                if not may_admit:
                    continue
                state = head
            else:
                break
            batch.add(state)
            chosen.append(state.request_id)
        self._last = frozenset(chosen)
        return batch

    def steady_steps(self, pool: Pool, batch: Batch, limit: int) -> int:
        policy = pool.policy
        static = policy.key_changes != "with_time" and policy.running_keys == "on_event"
        if not static or len(pool.waiting) or len(batch.decodes) < pool.num_running:
            return 1  # the order may be another one next time
        return steps_that_fit(pool, batch, limit)

    def _rank(self, pool: Pool, state: RequestState, now: float) -> tuple[float, float, int]:
        """Phi, with an advantage for what was in the last step; of equal ones the earlier."""
        ahead_s = self.hysteresis_s if state.request_id in self._last else 0.0
        return pool.policy.key(state, now) - ahead_s, state.request.arrival_s, state.order

    def _grow(
        self, pool: Pool, batch: Batch, state: RequestState, behind: list[RequestState], now: float
    ) -> bool:
        """Memory for the next chunk or token of a running request; False: it is paused."""
        rest = state.prefill_target_tokens - state.num_computed_tokens
        tokens = state.num_computed_tokens + (min(rest, batch.budget) if rest > 0 else 1)
        while not pool.grow(state, tokens):
            victim = self._victim(pool, state, behind, now)
            if victim is None and not batch.prefills and not batch.decodes:
                victim = next((other for other in behind if other.status is Status.RUNNING), None)
            if victim is None:
                return False
            batch.evict(pool, victim, now)
        return True

    def _admit(
        self, pool: Pool, batch: Batch, state: RequestState, behind: list[RequestState], now: float
    ) -> bool:
        rest = prefill_tokens_ahead(state)
        tokens = state.known_tokens - rest + min(rest, batch.budget)
        while not batch.admit(pool, state, now, tokens):
            victim = self._victim(pool, state, behind, now) if pool.policy.preemptive else None
            if victim is None:
                return False
            batch.evict(pool, victim, now)
        return True

    def _victim(
        self, pool: Pool, state: RequestState, behind: list[RequestState], now: float
    ) -> RequestState | None:
        """SELECTVICTIM among the running requests that come later in the order; None if all are protected."""
        policy, limit = pool.policy, pool.policy.key(state, now) + self.hysteresis_s
        costs = [
            (policy.key(other, now) - self.swap_token_s * other.num_computed_tokens, other)
            for other in behind
            if other.status is Status.RUNNING
            and policy.key(other, now) > limit
            and policy.eviction_key(other, now) > -math.inf
        ]
        return max(costs, key=lambda pair: pair[0])[1] if costs else None
