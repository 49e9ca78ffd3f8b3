"""Request-level batching: a batch is served to its end before the next one starts.

Source: FasterTransformer, as Algorithm 3 of Bari, Hegde and de Veciana 2025, "Optimal Scheduling Algorithms for LLM
Inference: Theory and Practice", appendix E.1, puts it.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_core.batching.base import BatchFormer, whole_prompts_refusal
from scheduler_core.batching.batch import Batch
from scheduler_core.errors import InputError
from scheduler_core.limits import Limits
from scheduler_core.pool import Pool
from scheduler_core.request import Request


@dataclass(kw_only=True, slots=True)
class RequestLevel(BatchFormer):
    """Admit up to b requests when nobody runs, process all their prompts, then decode until all of them are done.

    | symbol | meaning | here |
    | --- | --- | --- |
    | b | requests in a batch | max_num_seqs, or as many as fit |

    Differs from the paper: the order is the policy's, FCFS there; a batch takes only requests for which memory for
    prompt and max_tokens can be reserved (the paper has no limit), so nobody is ever preempted; short prompts share a
    step as far as max_num_batched_tokens allows. A request that is done is answered at once.
    """

    takes_preemptive = False
    decodes_all = True

    def refusal(self, request: Request, limits: Limits) -> InputError | None:
        return whole_prompts_refusal(request, request.prompt_tokens, limits)

    def form(self, pool: Pool, max_num_batched_tokens: int, now: float) -> Batch:
        batch = Batch(max_num_batched_tokens)
        if not pool.num_running:
            self._start_batch(pool, batch, now)
        prefilling, decodes = pool.by_phase()
        if not prefilling:
            batch.add_decodes(decodes)
        for state in prefilling:
            if state.prefill_target_tokens - state.num_computed_tokens > batch.budget:
                break
            batch.add_chunk(state)
        return batch

    @staticmethod
    def _start_batch(pool: Pool, batch: Batch, now: float) -> None:
        while True:
            head = pool.waiting.peek()
            if head is None:
                return
            longest = head.request.prompt_tokens + head.request.max_tokens
            if not batch.admit(pool, head, now, reserve_tokens=longest):
                return

    def steady_steps(self, pool: Pool, batch: Batch, limit: int) -> int:
        return limit  # nobody joins before all are done, and their memory is reserved
