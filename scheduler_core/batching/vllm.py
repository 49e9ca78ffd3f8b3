"""Prefill-first batching: steps of new prompts interrupt the decodes.

Source: Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention", sections
4.3 and 4.5, and the scheduler of vLLM 0.x without chunked prefill.
"""

from dataclasses import dataclass

from scheduler_core.batching.base import BatchFormer, steady_decodes, whole_prompts_refusal
from scheduler_core.batching.batch import Batch, prefill_tokens_ahead
from scheduler_core.engine.kv_cache import Limits
from scheduler_core.engine.pool import Pool
from scheduler_core.errors import InputError
from scheduler_core.request import Request


@dataclass(kw_only=True, slots=True)
class Vllm(BatchFormer):
    """A step only of whole prompts if waiting requests fit; else a step of all running decodes.

    - Admission in the policy's order while slots, blocks (with the watermark) and the token budget last; it stops at
      the first request that does not fit.
    - A decode without a free block preempts the request admitted last, or the one with the largest eviction key under
      a policy that evicts by key; by recompute or by swap.
    - An admitted request with a swapped cache needs no prefill; it decodes in the next step of decodes.
    - Under a preemptive policy a waiting request may displace running ones.

    Differs from the paper: preempted requests wait in the policy's order with all others. Under FCFS they are the first,
    so no new request is admitted before them, as in section 4.5.

    The parameters reproduce differences of Vidur's vLLM scheduler (microsoft/vidur @ 7d47513). `padded`: the budget
    limits the number of prompts times the longest one, as with padding; `spare_block`: see `Batch.allocate`.
    """

    lockstep = True
    migratable = True

    padded: bool = False
    spare_block: bool = False

    def refusal(self, request: Request, limits: Limits) -> InputError | None:
        # After a preemption the prompt and all tokens generated so far are processed in one step.
        return whole_prompts_refusal(request, request.prompt_tokens + request.max_tokens - 1, limits)

    def form(self, pool: Pool, max_num_batched_tokens: int, now: float) -> Batch:
        batch = Batch(max_num_batched_tokens)
        batch.add_rest(pool.by_phase()[0])
        longest = 0
        while True:
            head = pool.waiting.peek()
            if head is None or (tokens := prefill_tokens_ahead(pool, head)) > batch.budget:
                break
            if self.padded:
                longest = max(longest, tokens)
                if (len(batch.prefills) + 1) * longest > max_num_batched_tokens:
                    break
            if not batch.displace(pool, head, now):
                break
            if head.num_computed_tokens < head.prefill_target_tokens:
                batch.add_chunk(head)
        if not batch.prefills:
            batch.add_decodes(batch.allocate(pool, pool.by_phase()[1], now, self.spare_block))
        return batch

    def steady_steps(self, pool: Pool, batch: Batch, limit: int) -> int:
        return steady_decodes(pool, batch, limit, spare_blocks=int(self.spare_block))
