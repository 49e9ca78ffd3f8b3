"""Continuous batching with chunked prefill: decodes first, the rest of the token budget for prompts.

Source: Agrawal et al. 2024, "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve", section 4; the
admission and preemption rules are vLLM's (watermark, the youngest is preempted).
"""

from dataclasses import dataclass

from scheduler_core.batching.base import BatchFormer, steady_decodes
from scheduler_core.batching.batch import Batch, still_running
from scheduler_core.pool import Pool
from scheduler_core.ranges import INTEGERS, check_ranges
from scheduler_core.request import RequestState


@dataclass(kw_only=True, slots=True)
class ChunkedPrefill(BatchFormer):
    """One step: every running decode, then running prefills, then waiting requests in the policy's order.

    - A decode that finds no free block preempts the request admitted last (perhaps itself); under a preemptive
      policy the one with the largest eviction key.
    - Admission takes the blocks of all tokens a request has to process, keeps the watermark free, and stops at
      the first waiting request that does not fit: no request is overtaken because of its size.
    - No request is admitted in a step in which memory ran out.
    - Under a preemptive policy a waiting request may displace running ones, and prompts are processed in the
      policy's order whether they run already or not. Otherwise waiting requests never displace running ones.

    Attributes:
        chunk_tokens: Budget that decodes and prompts share, but which limits the prompts alone: decodes go on when it is
            used up, to at most max_num_batched_tokens. None: max_num_batched_tokens is that budget (Vidur and
            Sarathi-Serve have no other).
        spare_block: A decode needs a free block also when it fills none, as in Vidur (microsoft/vidur @ 7d47513); see
            `Batch.allocate`.
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
        # The chunk takes all that the decodes leave, so no other chunk comes before its prompt is done.
        return min(limit, max(1, (state.prefill_target_tokens - chunk.start_token - 1) // chunk.num_tokens))

    @staticmethod
    def _prefill_by_key(pool: Pool, batch: Batch, prefilling: list[RequestState], now: float) -> None:
        """Running and waiting prompts together, the smallest key first."""
        keys = {state: pool.policy.key(state, now) for state in prefilling}
        prefilling.sort(key=lambda state: (keys[state], state.request.arrival_s, state.order), reverse=True)
        may_admit = not batch.preempted
        while batch.budget > 0:
            head = pool.waiting.peek() if may_admit else None
            if head is not None and (not prefilling or pool.policy.key(head, now) < keys[prefilling[-1]]):
                may_admit = batch.displace(pool, head, now)
                if may_admit:
                    batch.add(head)
                    prefilling = list(still_running(prefilling))
            elif prefilling:
                batch.add_chunk(prefilling.pop())
            else:
                return
