"""UniBoost's dispatch: one order over prompts and decodes, recomputed in every step.

Source: Li et al., "Beyond Prediction: Tail-Aware Scheduling for LLM Inference", sections 3.2 and 3.3, Algorithm 1.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop
from operator import attrgetter

from scheduler_core.batching.base import BatchFormer, steps_that_fit
from scheduler_core.batching.batch import Batch, prefill_tokens_ahead
from scheduler_core.engine.kv_cache import Limits
from scheduler_core.engine.pool import Pool
from scheduler_core.engine.queues import Ranked
from scheduler_core.policies.base import LAST_RESORT, Policy
from scheduler_core.ranges import FINITE, check_ranges
from scheduler_core.request import RequestState, Status

Victim = tuple[int, bool, float, int, float, RequestState]


@dataclass(kw_only=True, slots=True)
class OneOrder(BatchFormer):
    """The M requests of smallest Phi, whether they wait, prefill or decode.

    1. Until the batch has M requests or C tokens: r = argmin Phi over the prefill-ready and decode-ready requests of the most
       urgent declared level.
    2. If the keys and values of r's next chunk or token fit, r joins; else swap out the victim and repeat. Without a
       victim r is passed over.
    3. Requests in memory that are not among the M are paused: they keep their memory and skip this step.
    4. If no request has joined, swap out the one of the largest Phi(v) - swap_token_s n_v and repeat.

    victim = argmax of Phi(v) - swap_token_s n_v over the unprotected running v after r in the order; if r waits, only those
    with Phi(r) < Phi(v) - delta (Eq. 7); if there is none and r runs, over those at `LAST_RESORT`. Of running requests of less
    urgent levels than r, the least urgent one is the victim, also for a waiting r.

    | symbol | meaning | here |
    | --- | --- | --- |
    | Phi | arrival minus boost | the policy's key; the paper's is policy "uniboost" |
    | M, C | requests and tokens in a step; C is also the chunk of a prompt | max_num_seqs, max_num_batched_tokens |
    | delta | lead in Phi that another request needs to replace one of the last step | hysteresis_s |
    | n_v, swap_token_s | tokens of v in the cache, time to copy one out and back | tokens, s |

    A policy protects a request with an eviction key of -infinity, or of `LAST_RESORT` from waiting ones only (MemGuard between
    two thresholds). At -infinity it is only swapped out by rule 4, if all are. `preemption` applies to the victim's cache
    (paper: swap).

    Differs from the paper: SELECTVICTIM uses priority and swap cost without a formula there; here both are in seconds. The
    paper has no rule 4, without which a step could stay empty for ever. As in the paper, a running request needs no lead in Phi
    to take memory: with one, requests that arrived together fill the memory, and nearly all of them pause.
    Admissions of a step end at the first request that does not fit and has no victim, so that none is
    overtaken because of its size. The policy's own hysteresis is not used.
    """

    evicts_by_key = True

    hysteresis_s: float = 0.1
    swap_token_s: float = 1e-5
    _last: frozenset[str] = field(default=frozenset(), init=False, repr=False)

    def __post_init__(self) -> None:
        check_ranges(self, hysteresis_s=(0, FINITE), swap_token_s=(0, FINITE))

    def max_running(self, limits: Limits) -> int:
        return limits.capacity_blocks  # memory is the limit

    def form(self, pool: Pool, max_num_batched_tokens: int, now: float) -> Batch:
        batch = Batch(max_num_batched_tokens)
        if self._decode_only(pool, batch, now):
            return batch
        self._fill(pool, batch, now)
        while not batch.prefills and not batch.decodes and pool.num_running:
            batch.evict(pool, self._last_resort(pool, now), now)
            self._fill(pool, batch, now)
        chosen = [*batch.decodes, *(state for state, _ in batch.prefills)]
        self._last = frozenset([state.request_id for state in chosen])
        return batch

    def _fill(self, pool: Pool, batch: Batch, now: float) -> None:
        """Rules 1 to 3. Beside the sort, a request costs a constant time, unless others are evicted for it."""
        assert pool.evictions is not None, "this former evicts by key"
        ranked = pool.evictions.ranked(self._last, self.hysteresis_s, now)
        later = _Later(pool.policy, ranked, self.swap_token_s, now)
        decodes, may_admit, kv = batch.own_decodes(), True, pool.kv
        head = self._head(pool, batch, now)
        #: Number of running requests before the waiting one.
        num_first = _num_before(ranked, head)
        index, num_slots = 0, pool.max_num_seqs - len(batch.prefills) - len(decodes)
        while batch.budget > 0 and num_slots > 0:
            if index < num_first:
                state = ranked[index][-1]
                index += 1
                if state.status is not Status.RUNNING:
                    continue
                if state.num_computed_tokens >= state.prefill_target_tokens:  # inlined for speed
                    if state.num_computed_tokens < state.kv_tokens:
                        decodes.append(state)
                        batch.budget -= 1
                        num_slots -= 1
                        continue
                    if not kv.num_free_blocks and later.is_exhausted:
                        continue  # it is paused
                num_evicted, later.first = len(batch.preempted), index
                has_memory = self._grow(pool, batch, state, later, now)
                if may_admit and len(batch.preempted) > num_evicted:
                    head = self._head(pool, batch, now)
                    num_first = _num_before(ranked, head)
                if has_memory:
                    batch.add(state)
                    num_slots -= 1
            elif head is not None:
                *_, key, state = head
                later.first = index
                may_admit = self._admit(pool, batch, state, key, later, now)
                if may_admit:
                    batch.add(state)
                    num_slots -= 1
                head = self._head(pool, batch, now) if may_admit else None
                num_first = _num_before(ranked, head)
            else:
                return

    def _head(self, pool: Pool, batch: Batch, now: float) -> Ranked | None:
        """The waiting request to admit next; None if it was evicted in this step."""
        state = pool.waiting.peek()
        if state is None or state.request_id in batch.preempted:
            return None
        return self._rank(pool, state, now)

    def steady_steps(self, pool: Pool, batch: Batch, limit: int) -> int:
        policy = pool.policy
        static = policy.key_changes != "with_time" and policy.running_keys == "on_event"
        if not static or len(pool.waiting) or len(batch.decodes) < pool.num_running:
            return 1  # the order may change in the next step
        return steps_that_fit(pool, batch, limit)

    def _decode_only(self, pool: Pool, batch: Batch, now: float) -> bool:
        """Fast path for a step in which all running requests decode and none is admitted or swapped out. All requests
        with memory for a token get one, in order of arrival; Phi only decides which ones take the last free blocks."""
        num = pool.num_running
        if not 0 < num <= min(pool.max_num_seqs, batch.budget):
            return False
        prefilling, running = pool.by_phase()
        if prefilling:
            return False
        growing = [state for state in running if state.num_computed_tokens >= state.kv_tokens]
        free = pool.kv.num_free_blocks
        is_short = len(growing) > free
        assert pool.evictions is not None, "this former evicts by key"
        if is_short or len(pool.waiting):
            victim = pool.evictions.first_displaceable(now)
            if victim is not None and (is_short or self._may_lose(pool, victim, now)):
                return False
            if self._may_admit(pool, batch.budget - num, now):
                return False
        if is_short:
            growing.sort(key=lambda state: self._rank(pool, state, now)[:4])
            paused = set(growing[free:])
            running = [state for state in running if state not in paused]
            if not running:
                return False  # one has to be swapped out
            del growing[free:]
        for state in growing:
            pool.grow(state, state.num_computed_tokens + 1)
        running = sorted(running, key=attrgetter("order"))
        batch.add_decodes(running)
        self._last = frozenset([state.request_id for state in running])
        return True

    @staticmethod
    def _may_lose(pool: Pool, victim: RequestState, now: float) -> bool:
        """Whether the first waiting request may take the memory of the first request to evict."""
        head = pool.waiting.peek()
        is_less_urgent = head is not None and head.declared_level < victim.declared_level
        return is_less_urgent or pool.policy.eviction_key(victim, now) > LAST_RESORT

    @staticmethod
    def _may_admit(pool: Pool, least_budget: int, now: float) -> bool:
        """Whether the first waiting request may be admitted with at least `least_budget` tokens and all free memory."""
        head = pool.waiting.peek()
        if head is None or pool.num_running >= pool.max_running or not pool.policy.may_admit(head, now):
            return False
        return pool.kv.fits(_first_tokens(pool, head, least_budget), waive_watermark=False)

    def _rank(self, pool: Pool, state: RequestState, now: float) -> Ranked:
        key = pool.policy.key(state, now)
        ahead_s = self.hysteresis_s if state.request_id in self._last else 0.0
        return state.declared_level, key - ahead_s, state.request.arrival_s, state.order, key, state

    @staticmethod
    def _grow(pool: Pool, batch: Batch, state: RequestState, later: _Later, now: float) -> bool:
        """Takes memory for the next chunk or token of a running request; False if it is paused."""
        remaining = state.prefill_target_tokens - state.num_computed_tokens
        tokens = state.num_computed_tokens + (min(remaining, batch.budget) if remaining > 0 else 1)
        while not pool.grow(state, tokens):
            victim = later.victim()
            if victim is None:
                return False
            batch.evict(pool, victim, now)
        return True

    def _admit(
        self, pool: Pool, batch: Batch, state: RequestState, key: float, later: _Later, now: float
    ) -> bool:
        may_displace = pool.policy.preemptive and pool.policy.may_admit(state, now)
        while not batch.admit(pool, state, now, _first_tokens(pool, state, batch.budget)):
            victim = later.victim_for(state, key + self.hysteresis_s) if may_displace else None
            if victim is None:
                return False
            batch.evict(pool, victim, now)
        return True

    def _last_resort(self, pool: Pool, now: float) -> RequestState:
        """The victim of rule 4; those that the policy protects least first."""
        policy = pool.policy

        def order(state: RequestState) -> tuple[bool, int, bool, float, float, int]:
            limit, level = policy.eviction_key(state, now), state.declared_level
            cost = policy.key(state, now) - self.swap_token_s * state.num_computed_tokens
            return limit > -math.inf, level, limit > LAST_RESORT, cost, state.request.arrival_s, state.order

        return max(pool.running.values(), key=order)


def _num_before(ranked: list[Ranked], head: Ranked | None) -> int:
    return len(ranked) if head is None else bisect_left(ranked, head)


def _first_tokens(pool: Pool, state: RequestState, budget: int) -> int:
    """Tokens of a waiting request after its first chunk."""
    remaining = prefill_tokens_ahead(pool, state)
    return state.known_tokens - remaining + min(remaining, budget)


class _Later:
    """SELECTVICTIM among the running requests that a step has not processed yet.

    Attributes:
        first: Index of the first of these requests in `ranked`.
        is_exhausted: There is no victim for the rest of the step.
    """

    def __init__(self, policy: Policy, ranked: list[Ranked], swap_token_s: float, now: float) -> None:
        self.first, self.is_exhausted = 0, False
        self._ranked = ranked
        self._policy = policy
        self._swap_token_s = swap_token_s
        self._now = now
        #: (-level, at `LAST_RESORT`, swap_token_s n - Phi, -index in `ranked`, Phi, request) of those that may be swapped out, a
        #: heap in the order in which they are; None: not computed yet.
        self._victims: list[Victim] | None = None

    def victim(self) -> RequestState | None:
        """The victim for a running request; None if there is none."""
        victims = self._remaining()
        self.is_exhausted = not victims
        return victims[0][-1] if victims else None

    def victim_for(self, waiting: RequestState, limit: float) -> RequestState | None:
        """The victim for a waiting request: of a less urgent level, or unprotected and with a Phi above `limit`."""
        victims, own = self._remaining(), -waiting.declared_level
        if not victims or victims[0][:2] > (own, False):
            return None
        first = min((item for item in victims if self._may_lose(item, own, limit)), default=None)
        return None if first is None else first[-1]

    def _may_lose(self, item: Victim, own: int, limit: float) -> bool:
        negative, last_resort, _, index, key, state = item
        is_victim = negative < own or (negative == own and not last_resort and key > limit)
        return is_victim and -index >= self.first and state.status is Status.RUNNING

    def _remaining(self) -> list[Victim]:
        """Possible victims; the first of them has not been processed yet."""
        if self._victims is None:
            self._victims = list(self._evictable())
            heapify(self._victims)
        victims = self._victims
        while victims and not (-victims[0][3] >= self.first and victims[0][-1].status is Status.RUNNING):
            heappop(victims)
        return victims

    def _evictable(self) -> Iterator[Victim]:
        eviction_key, now, swap_token_s = self._policy.eviction_key, self._now, self._swap_token_s
        for index in range(self.first, len(self._ranked)):
            level, *_, key, state = self._ranked[index]
            if state.status is Status.RUNNING:
                limit = eviction_key(state, now)
                if limit > -math.inf:
                    cost = swap_token_s * state.num_computed_tokens - key
                    yield -level, limit <= LAST_RESORT, cost, -index, key, state
