"""Continuous batching with chunked prefill: decodes first, the remaining token budget for prompts.

Source: Agrawal et al. 2024, "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve", section 4; the
admission and preemption rules are vLLM's (watermark; the last admitted or, by priority, the least urgent is preempted).
"""

from dataclasses import dataclass

from scheduler_core.batching.base import BatchFormer, steady_decodes
from scheduler_core.batching.batch import Batch, still_running
from scheduler_core.engine.pool import Pool
from scheduler_core.ranges import INTEGERS, check_ranges
from scheduler_core.request import RequestState


@dataclass(kw_only=True, slots=True)
class ChunkedPrefill(BatchFormer):
    """One step: every running decode, then running prefills, then waiting requests in the policy's order.

    - A decode without a free block preempts the request admitted last (possibly itself); under a policy that evicts by
      key the one with the largest eviction key.
    - Admission takes the blocks of all tokens to process, keeps the watermark free, and stops at the first waiting
      request that does not fit, so that no request is overtaken because of its size.
    - No request is admitted in a step in which memory ran out.
    - Under a preemptive policy waiting requests may displace running ones, and prompts of running and waiting
      requests are processed in the policy's order. Otherwise waiting requests never displace running ones.

    Attributes:
        chunk_tokens: Budget of decodes and prompts together that only limits prompts: decodes may exceed it up to
            max_num_batched_tokens. None: max_num_batched_tokens is the only budget (as in Vidur and Sarathi-Serve).
        spare_block: A decode needs a free block even if it takes none, as in Vidur (microsoft/vidur @
            7d47513); see `Batch.allocate`.
    """

    lockstep = True
    migratable = True

    chunk_tokens: int | None = None
    spare_block: bool = False

    def __post_init__(self) -> None:
        check_ranges(self, chunk_tokens=(1, INTEGERS))

    def form(self, pool: Pool, max_num_batched_tokens: int, now: float) -> Batch:
        batch = Batch(max_num_batched_tokens)
        prefilling, decodes = pool.by_phase()
        if decodes:
            batch.add_decodes(batch.allocate(pool, decodes, now, self.spare_block))
        if self.chunk_tokens is not None:
            batch.budget = min(batch.budget, max(0, self.chunk_tokens - len(batch.decodes)))
        if batch.preempted:
            prefilling = list(still_running(prefilling))
        if not prefilling and not len(pool.waiting):
            return batch
        if pool.policy.preemptive:
            self._prefill_by_key(pool, batch, prefilling, now)
        else:
            batch.fill(pool, prefilling, now)
        return batch

    def steady_steps(self, pool: Pool, batch: Batch, limit: int) -> int:
        return steady_decodes(pool, batch, limit, spare_blocks=int(self.spare_block))

    def steady_chunks(self, batch: Batch, limit: int) -> int:
        if len(batch.prefills) != 1 or batch.budget:
            return 1
        state, chunk = batch.prefills[0]
        # The chunk uses the whole remaining budget, so no other chunk is added before its prompt is complete.
        return min(limit, max(1, (state.prefill_target_tokens - chunk.start_token - 1) // chunk.num_tokens))

    @staticmethod
    def _prefill_by_key(pool: Pool, batch: Batch, prefilling: list[RequestState], now: float) -> None:
        """Adds chunks of running and waiting prompts in one order, smallest key first."""
        key = pool.policy.key
        keys = {state: (state.declared_level, key(state, now)) for state in prefilling}
        prefilling.sort(key=lambda state: (keys[state], state.request.arrival_s, state.order), reverse=True)
        may_admit = not batch.preempted
        while batch.budget > 0:
            head = pool.waiting.peek() if may_admit else None
            if head is not None and (
                not prefilling or (head.declared_level, key(head, now)) < keys[prefilling[-1]]
            ):
                may_admit = batch.displace(pool, head, now)
                if may_admit:
                    batch.add(head)
                    prefilling = list(still_running(prefilling))
            elif prefilling:
                batch.add_chunk(prefilling.pop())
            else:
                return
