"""Iteration-level scheduling with memory reserved for the longest answer.

Source: Yu et al. 2022, "Orca: A Distributed Serving System for Transformer-Based Generative Models", section 4.1 and
Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_core.batching.base import BatchFormer, whole_prompts_refusal
from scheduler_core.batching.batch import Batch, prefill_tokens_ahead
from scheduler_core.batching.steady import steady_decodes
from scheduler_core.errors import InputError
from scheduler_core.limits import Limits
from scheduler_core.pool import Pool
from scheduler_core.request import Request


@dataclass(kw_only=True, slots=True)
class Orca(BatchFormer):
    """One step: a token of every running request, and the whole prompts of those that join.

    A request joins only if memory for its prompt and all of its max_tokens can be reserved, which it keeps until it
    is done: nobody is ever preempted for memory.

    | symbol | meaning | here |
    | --- | --- | --- |
    | max_bs | most requests in an iteration | max_num_seqs |
    | n_slots, n_rsrv | tokens of memory, and those reserved | the KV cache, in blocks; the watermark stays free |

    Differs from the paper: the order is the policy's, FCFS there; an iteration is limited to max_num_batched_tokens,
    so a prompt that does not fit beside the decodes waits; no pipeline of several workers.
    """

    takes_preemptive = False
    decodes_all = True

    def refusal(self, request: Request, limits: Limits) -> InputError | None:
        return whole_prompts_refusal(request, request.prompt_tokens, limits)

    def form(self, pool: Pool, max_num_batched_tokens: int, now: float) -> Batch:
        batch = Batch(max_num_batched_tokens)
        batch.add_decodes(pool.by_phase()[1])
        while True:
            head = pool.waiting.peek()
            if head is None or prefill_tokens_ahead(head) > batch.budget:
                return batch
            longest = head.request.prompt_tokens + head.request.max_tokens
            if not batch.admit(pool, head, now, reserve_tokens=longest):
                return batch
            batch.add_chunk(head)

    def steady_steps(self, pool: Pool, batch: Batch, limit: int) -> int:
        return steady_decodes(pool, batch, limit)
