"""Batch formers that reserve memory at admission: for max_tokens (Orca, request level), or for a predicted quantile."""

import math
from dataclasses import dataclass

from scheduler_core.batching.base import BatchFormer, steady_decodes, whole_prompts_refusal
from scheduler_core.batching.batch import Batch, prefill_tokens_ahead, still_running
from scheduler_core.engine.kv_cache import Limits
from scheduler_core.engine.pool import Pool
from scheduler_core.errors import InputError
from scheduler_core.lengths import LogQuantiles
from scheduler_core.lengths.student_t import student_t_quantile
from scheduler_core.ranges import check_ranges
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
        prefilling, decodes = pool.by_phase()
        batch.add_decodes(decodes)
        batch.add_rest(prefilling)
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


@dataclass(kw_only=True, slots=True)
class QuantileReserve(BatchFormer):
    """Chunked prefill that admits a request when the memory that it will probably need is free. Ours: S3 reserves by predicted
    bucket, Orca for max_tokens, vLLM only for the prompt.

    reserved tokens = n + min(Q_q(X | X > g), M)

    | symbol | meaning | unit |
    | --- | --- | --- |
    | X, M | predicted output length; max_tokens | tokens |
    | n, g | prompt tokens; tokens generated before a preemption | tokens |
    | q | quantile; without a prediction only the tokens to process are reserved | - |

    With right predictions a request outgrows its memory with probability 1 - q. It then takes blocks one by one, which may
    preempt the request admitted last. A larger q means fewer preemptions, but smaller batches.
    """

    allows_preemptive = False
    lockstep = True

    quantile: float = 0.9

    def __post_init__(self) -> None:
        check_ranges(self, quantile=(0.01, 0.999))

    def form(self, pool: Pool, max_num_batched_tokens: int, now: float) -> Batch:
        batch = Batch(max_num_batched_tokens)
        prefilling, decodes = pool.by_phase()
        if decodes:
            batch.add_decodes(batch.allocate(pool, decodes, now))
        for state in still_running(prefilling):
            if batch.budget == 0:
                return batch
            batch.add_chunk(state)
        while batch.budget > 0 and not batch.preempted:
            head = pool.waiting.peek()
            if head is None:
                return batch
            tokens = max(pool.reserve_tokens(head), self.reserve_tokens(head))
            if not batch.admit(pool, head, now, reserve_tokens=tokens):
                return batch
            batch.add(head)
        return batch

    def steady_steps(self, pool: Pool, batch: Batch, limit: int) -> int:
        return steady_decodes(pool, batch, limit)

    def reserve_tokens(self, state: RequestState) -> int:
        """Tokens to reserve for a waiting request; 0 without a predicted length."""
        length, generated = state.prediction, state.num_output_tokens
        if length is None:
            return 0
        ended = length.cdf(generated) if generated else 0.0
        level = ended + self.quantile * (1.0 - ended)
        log_tokens = math.log(state.request.max_tokens)
        if level < 1.0:
            if length.quantiles:
                log_quantile = float(LogQuantiles(length.quantiles).logppf(level))
            else:
                log_quantile = length.mu + length.sigma * student_t_quantile(level, length.nu)
            log_tokens = min(log_quantile, log_tokens)
        return state.request.prompt_tokens + round(math.exp(log_tokens))
