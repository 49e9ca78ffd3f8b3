"""Continuous batching with chunked prefill: decodes first, the rest of the token budget for prompts.

Source: Agrawal et al. 2024, "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve", section 4; the
admission and preemption rules are vLLM's (recompute, watermark).
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_core.batching.base import Batch, BatchFormer
from scheduler_core.plan import PrefillChunk
from scheduler_core.pool import Pool
from scheduler_core.request import Phase, RequestState


@dataclass(frozen=True, slots=True)
class ChunkedPrefill(BatchFormer):
    """One step: every running decode, then running prefills, then waiting requests in the policy's order.

    - A decode that finds no free block preempts the request admitted last (perhaps itself).
    - Admission takes the blocks of all tokens a request has to process, keeps the watermark free, and stops at
      the first waiting request that does not fit: nobody is overtaken because of its size.
    - Nobody is admitted in a step that had to preempt.
    - Waiting requests never displace running ones.
    """

    def form(self, pool: Pool, max_num_batched_tokens: int, now: float) -> Batch:
        batch = Batch([], [], 0, [], [])
        prefilling: list[RequestState] = []
        for state in list(pool.running.values()):
            if state.request_id not in pool.running:
                continue
            if state.phase is Phase.PREFILL:
                prefilling.append(state)
            elif self._make_room(pool, state, batch, now):
                batch.decodes.append(state)
                batch.num_context_tokens += state.num_computed_tokens
        budget = max_num_batched_tokens - len(batch.decodes)
        for state in prefilling:
            if budget > 0:
                budget -= self._add_chunk(batch, state, budget)
        if not batch.preempted:
            self._admit(pool, batch, budget, now)
        return batch

    def steady_steps(self, pool: Pool, batch: Batch, limit: int) -> int:
        if batch.prefills or batch.preempted or not batch.decodes or limit <= 1:
            return 1
        seats_left = len(pool.running) < pool.max_num_seqs
        if len(pool.waiting) and seats_left and pool.waiting.policy.key_changes == "with_time":
            return 1  # another head might fit
        # A head that did not fit now fits even less when the running requests grow, so only memory can end the run.
        if self._fits(pool, batch, limit):
            return limit
        low, high = 1, limit
        while high - low > 1:
            middle = (low + high) // 2
            if self._fits(pool, batch, middle):
                low = middle
            else:
                high = middle
        return low

    @staticmethod
    def _fits(pool: Pool, batch: Batch, num_steps: int) -> bool:
        kv = pool.kv
        need = sum(
            max(0, kv.blocks_for(state.num_computed_tokens + num_steps) - kv.held_by(state.request_id))
            for state in batch.decodes
        )
        return need <= kv.num_free_blocks

    @staticmethod
    def _make_room(pool: Pool, state: RequestState, batch: Batch, now: float) -> bool:
        """Gets the block for the request's next token, preempting the youngest if need be; False if it is itself."""
        while not pool.kv.grow(state.request_id, state.num_computed_tokens + 1):
            victim = next(reversed(pool.running.values()))
            pool.preempt(victim, now)
            batch.preempted.append(victim.request_id)
            if victim is state:
                return False
        return True

    @staticmethod
    def _add_chunk(batch: Batch, state: RequestState, budget: int) -> int:
        left = state.prefill_target_tokens - state.num_computed_tokens
        tokens = min(left, budget)
        chunk = PrefillChunk(state.request_id, state.num_computed_tokens, tokens, tokens == left)
        batch.prefills.append((state, chunk))
        batch.num_context_tokens += state.num_computed_tokens
        return tokens

    def _admit(self, pool: Pool, batch: Batch, budget: int, now: float) -> None:
        while budget > 0 and len(pool.running) < pool.max_num_seqs:
            head = pool.waiting.peek()
            if head is None or not pool.admit(head, now):
                return
            batch.admitted.append(head.request_id)
            budget -= self._add_chunk(batch, head, budget)
