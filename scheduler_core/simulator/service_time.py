"""How long requests take by themselves, and how many of them an engine could serve."""

from __future__ import annotations

import numpy as np

from scheduler_core.plan import PrefillChunk
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.step_time import StepTime, StepWork
from scheduler_core.simulator.trace import Trace, TraceRequest


def alone_s(row: TraceRequest, config: SchedulerConfig, step_time: StepTime) -> float:
    """Seconds from arrival to last token on an idle engine: the prompt in the largest chunks, then token by token."""
    total, start, budget = 0.0, 0, config.max_num_batched_tokens
    while start < row.prompt_tokens:
        size = min(budget, row.prompt_tokens - start)
        chunk = PrefillChunk(row.request_id, start, size, start + size == row.prompt_tokens)
        total += step_time.step_s(StepWork((chunk,)))
        start += size
    if row.output_tokens > 1:
        total += step_time.run([row.prompt_tokens], 0.0).end_s(row.output_tokens - 1)
    return total


def saturation_rate_rps(trace: Trace, config: SchedulerConfig, step_time: StepTime) -> float:
    """Estimated request rate at which one replica is always busy with full batches.

    With B requests in every batch, a request of p prompt and o output tokens takes of the engine's time

        p (T(c, D) - T(0, D)) / c + (o - 1) T(0, D) / B + T(0, D) / B,

    T(c, D) a step with a prompt chunk of c tokens beside B decodes of average context, c as large as the budget allows
    but no larger than the average prompt. B is max_num_seqs, or less if the KV cache holds fewer requests of average
    size (p + o/2, weighted with their stay, which is proportional to o).
    """
    prompt = np.array([row.prompt_tokens for row in trace.requests], float)
    output = np.array([row.output_tokens for row in trace.requests], float)
    held = float(np.average(prompt + output / 2, weights=output))
    room = config.num_kv_blocks * config.kv_block_tokens * (1 - config.kv_watermark) / held
    batch = int(max(1.0, min(float(config.max_num_seqs), room)))
    size = max(1, min(round(float(prompt.mean())), config.max_num_batched_tokens - batch))
    contexts = (round(held),) * batch
    decode_s = step_time.step_s(StepWork((), contexts))
    both_s = step_time.step_s(StepWork((PrefillChunk("", 0, size, True),), contexts))
    busy = float(prompt.mean()) * (both_s - decode_s) / size + float(output.mean()) * decode_s / batch
    return 1.0 / busy
