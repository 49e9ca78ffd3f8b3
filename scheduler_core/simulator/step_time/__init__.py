"""Models of step times by name, and what follows from one: isolated latencies and the saturation rate."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from scheduler_core.errors import InputError
from scheduler_core.plan import PrefillChunk
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.step_time.base import LinearStepTime, StepTime, StepWork
from scheduler_core.simulator.step_time.operator_table import read_operator_table
from scheduler_core.simulator.step_time.quadratic import QuadraticStepTime, quadratic_step_time
from scheduler_core.simulator.step_time.roofline import RooflineStepTime
from scheduler_core.simulator.step_time.staircase import StaircaseStepTime
from scheduler_core.simulator.trace import Trace, TraceRequest

__all__ = [
    "STEP_TIMES",
    "LinearStepTime",
    "RooflineStepTime",
    "StaircaseStepTime",
    "StepTime",
    "StepWork",
    "isolated_latency_s",
    "make_step_time",
    "saturation_rate_rps",
]

#: Makes a model from its parameters, which are keyword arguments.
STEP_TIMES: dict[str, Callable[..., StepTime]] = {
    "linear": LinearStepTime,
    "quadratic": quadratic_step_time,
    "staircase": StaircaseStepTime,
    "roofline": RooflineStepTime,
    "table": read_operator_table,
}


def make_step_time(name: str, parameters: Mapping[str, Any] | None = None) -> StepTime:
    """A model of step times.

    Args:
        name: linear; quadratic (a setting of the paper with {preset: a100-4b}, or its constants); staircase; roofline
            ({model: ..., gpu: ...}); table ({directory: ..., num_layers: ...}, see `read_operator_table`).
        parameters: Values of its parameters; the others keep their defaults.

    Raises:
        InputError: The name or a parameter is unknown or missing, or a value is outside its range.
    """
    if name not in STEP_TIMES:
        raise InputError("step time", name, ", ".join(STEP_TIMES))
    values, signature = parameters or {}, dict(inspect.signature(STEP_TIMES[name]).parameters)
    if signature.pop("constants", None) is not None:
        signature |= inspect.signature(QuadraticStepTime).parameters
    for parameter in values:
        if parameter not in signature:
            raise InputError(f"parameter of step time {name}", parameter, ", ".join(signature))
    for parameter, declaration in signature.items():
        if declaration.default is inspect.Parameter.empty and parameter not in values:
            raise InputError(f"parameter of step time {name}", None, f"a value of {parameter}")
    return STEP_TIMES[name](**values)


def isolated_latency_s(row: TraceRequest, config: SchedulerConfig, step_time: StepTime) -> float:
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

        p (T(c, B) - T(0, B)) / c + (o - 1) T(0, B) / B + T(0, B) / B,

    T(c, B) a step with a prompt chunk of c tokens and B decodes of average context, c as large as the budget allows
    but no larger than the average prompt. B is max_num_seqs, or less if the KV cache holds fewer requests of average
    size (p + o/2, weighted with the time they stay, which is proportional to o).
    """
    prompt = np.array([row.prompt_tokens for row in trace.requests], float)
    output = np.array([row.output_tokens for row in trace.requests], float)
    context = float(np.average(prompt + output / 2, weights=output))
    capacity = config.num_kv_blocks * config.kv_block_tokens * (1 - config.kv_watermark) / context
    batch = int(max(1.0, min(float(config.max_num_seqs), capacity)))
    size = max(1, min(round(float(prompt.mean())), config.max_num_batched_tokens - batch))
    contexts = (round(context),) * batch
    decode_s = step_time.step_s(StepWork((), contexts))
    both_s = step_time.step_s(StepWork((PrefillChunk("", 0, size, True),), contexts))
    busy = float(prompt.mean()) * (both_s - decode_s) / size + float(output.mean()) * decode_s / batch
    return 1.0 / busy
