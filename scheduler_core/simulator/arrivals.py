"""Arrival times drawn for a trace: Poisson at a rate, or at a share of what the engine can do."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from scheduler_core.errors import InputError
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.step_time import LinearStepTime
from scheduler_core.simulator.trace import Trace


def poisson_arrivals(trace: Trace, rate_rps: float, rng: np.random.Generator) -> Trace:
    """The same requests in the same order, with independent exponential gaps between arrivals.

    Args:
        trace: Requests; their own arrival times are dropped.
        rate_rps: Mean arrivals per second, > 0.
        rng: Source of randomness.
    """
    if not 0 < rate_rps < math.inf:
        raise InputError("rate", rate_rps, "requests per second > 0")
    times = np.cumsum(rng.exponential(1.0 / rate_rps, size=len(trace)))
    rows = tuple(replace(row, arrival_s=float(time)) for row, time in zip(trace.requests, times, strict=True))
    return replace(trace, requests=rows)


def saturation_rate_rps(trace: Trace, config: SchedulerConfig, step_time: LinearStepTime) -> float:
    """Estimated request rate at which the engine is always busy with full batches.

    With B requests in every batch, a request of p prompt and o output tokens takes of the engine's time

        p t_prefill + o t_base / B + (o - 1) (t_decode + t_context (p + o/2)).

    B is max_num_seqs, or less if the KV cache holds fewer requests of average size (p + o/2, weighted with their
    stay, which is proportional to o). Each output token is one step's share, the first one the prefill's.
    """
    prompt = np.array([row.prompt_tokens for row in trace.requests], float)
    output = np.array([row.output_tokens for row in trace.requests], float)
    held = float(np.average(prompt + output / 2, weights=output))
    room = config.num_kv_blocks * config.kv_block_tokens * (1 - config.kv_watermark) / held
    batch = max(1.0, min(float(config.max_num_seqs), room))
    per_decode = step_time.per_decode_s + step_time.per_context_token_s * (prompt + output / 2)
    per_prompt = prompt * step_time.per_prefill_token_s
    busy = per_prompt + output * step_time.base_s / batch + (output - 1) * per_decode
    return 1.0 / float(np.mean(busy))
