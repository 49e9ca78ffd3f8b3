"""Batch formers that reserve memory for max_tokens: Orca's iterations, and request-level batches."""

from dataclasses import dataclass

from scheduler_core.batching.base import BatchFormer, steady_decodes, whole_prompts_refusal
from scheduler_core.batching.batch import Batch, prefill_tokens_ahead
from scheduler_core.engine.kv_cache import Limits
from scheduler_core.engine.pool import Pool
from scheduler_core.errors import InputError
from scheduler_core.request import Request, RequestState


@dataclass(kw_only=True, slots=True)
class Orca(BatchFormer):
    """One step: a token of every running request, and the whole prompts of new ones (Yu et al. 2022, "Orca: A
    Distributed Serving System for Transformer-Based Generative Models", section 4.1 and Algorithm 1).

    A request is only admitted if memory for its prompt and max_tokens can be reserved until its end, so
    requests are never preempted for memory.

    | symbol | meaning | here |
    | --- | --- | --- |
    | max_bs | maximum number of requests in an iteration | max_num_seqs |
    | n_slots, n_rsrv | memory in tokens, and its reserved part | the KV cache, in blocks; the watermark stays free |

    Differs from the paper: the order is that of the policy (paper: FCFS); an iteration is limited to
    max_num_batched_tokens, so a prompt that does not fit next to the decodes waits; no pipeline of several workers.
    """

    allows_preemptive = False
    lockstep = True

    def refusal(self, request: Request, limits: Limits) -> InputError | None:
        return whole_prompts_refusal(request, request.prompt_tokens, limits)

    def form(self, pool: Pool, max_num_batched_tokens: int, now: float) -> Batch:
        batch = Batch(max_num_batched_tokens)
        batch.add_decodes(pool.by_phase()[1])
        while True:
            head = pool.waiting.peek()
            if head is None or prefill_tokens_ahead(pool, head) > batch.budget:
                return batch
            if not _admit_with_longest_output(pool, batch, head, now):
                return batch
            batch.add_chunk(head)

    def steady_steps(self, pool: Pool, batch: Batch, limit: int) -> int:
        return steady_decodes(pool, batch, limit)


@dataclass(kw_only=True, slots=True)
class RequestLevel(Orca):
    """Admits up to b requests when none runs, processes all their prompts, then decodes until all are
    finished (FasterTransformer, as Algorithm 3 of Bari, Hegde and de Veciana 2025, "Optimal Scheduling
    Algorithms for LLM Inference: Theory and Practice", appendix E.1).

    | symbol | meaning | here |
    | --- | --- | --- |
    | b | requests in a batch | max_num_seqs, or as many as fit |

    Differs from the paper: the order is that of the policy (paper: FCFS); a request joins only if memory for its prompt
    and max_tokens can be reserved (paper: no memory limit), so none is preempted; short prompts share a step
    up to max_num_batched_tokens. A finished request leaves at once.
    """

    def form(self, pool: Pool, max_num_batched_tokens: int, now: float) -> Batch:
        batch = Batch(max_num_batched_tokens)
        if not pool.num_running:
            while (head := pool.waiting.peek()) and _admit_with_longest_output(pool, batch, head, now):
                pass
        prefilling, decodes = pool.by_phase()
        if not prefilling:
            batch.add_decodes(decodes)
        for state in prefilling:
            if state.prefill_target_tokens - state.num_computed_tokens > batch.budget:
                break
            batch.add_chunk(state)
        return batch

    def steady_steps(self, pool: Pool, batch: Batch, limit: int) -> int:
        return limit  # no request joins before all have finished, and their memory is reserved


def _admit_with_longest_output(pool: Pool, batch: Batch, state: RequestState, now: float) -> bool:
    longest = state.request.prompt_tokens + state.request.max_tokens
    return batch.admit(pool, state, now, reserve_tokens=longest)
