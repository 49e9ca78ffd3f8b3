"""Models of step times by name, and derived quantities: isolated latencies and the saturation rate."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from scheduler_core.engine.plan import PrefillChunk
from scheduler_core.errors import InputError
from scheduler_core.ranges import check_choice
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.shell.json_text import read_json_object
from scheduler_core.simulator.step_time.base import LinearStepTime, StepTime, StepWork, delays_of
from scheduler_core.simulator.step_time.operator_table import read_operator_table
from scheduler_core.simulator.step_time.quadratic import quadratic_step_time
from scheduler_core.simulator.step_time.roofline import RooflineStepTime
from scheduler_core.simulator.step_time.staircase import StaircaseStepTime
from scheduler_core.simulator.trace import Trace, TraceRequest

#: Factories of models by name; their keyword arguments are the parameters.
STEP_TIMES: dict[str, Callable[..., StepTime]] = {
    "linear": LinearStepTime,
    "quadratic": quadratic_step_time,
    "staircase": StaircaseStepTime,
    "roofline": RooflineStepTime,
    "table": read_operator_table,
}


def make_step_time(name: str, parameters: Mapping[str, Any] | None = None) -> StepTime:
    """A model of step times; `InputError` if the name or a parameter is unknown or missing, or a value is outside its range.

    `name` is linear; quadratic ({preset: a100-4b} for a setting of the paper, or constants); staircase;
    roofline ({model: ..., gpu: ...}); table ({directory: ..., num_layers: ...}, see `read_operator_table`).
    """
    check_choice("step time", name, STEP_TIMES)
    try:
        return STEP_TIMES[name](**(parameters or {}))
    except TypeError as error:  # an unknown or missing argument
        raise InputError(f"parameters of step time {name}: {str(error).rpartition('() ')[2]}") from error


def calibrated_step_time(path: str, name: str | None = None) -> StepTime:
    """The model in a result of `simulate calibrate`. `InputError`, naming step_time_parameters, if the file is not one, or
    its model is not the expected `name` (None: any)."""
    field = "step_time_parameters"
    fitted = read_json_object(Path(path), field).get("step_time")
    parameters = fitted.get("parameters") if isinstance(fitted, Mapping) else None
    if not isinstance(fitted, Mapping) or not isinstance(parameters, Mapping):
        raise InputError(
            field, path, "parameters as a mapping, or the path of a result of simulate calibrate"
        )
    model = str(fitted.get("name"))
    if name not in (None, model):
        raise InputError("step_time_model", name, f"unset, or {model} as in {path}")
    return make_step_time(model, parameters)


def prefill_s(prompt_tokens: int, chunk_tokens: int, step_time: StepTime) -> float:
    """Seconds for a prompt alone, in chunks of `chunk_tokens` and a last one with the rest."""
    total = 0.0
    for start in range(0, prompt_tokens, chunk_tokens):
        size = min(chunk_tokens, prompt_tokens - start)
        total += step_time.step_s(StepWork((PrefillChunk("", start, size, start + size == prompt_tokens),)))
    return total


def isolated_latency_s(row: TraceRequest, config: SchedulerConfig, step_time: StepTime) -> float:
    """Latency to the last token on an idle engine in seconds: prompt in maximum chunks, then decodes."""
    total = delays_of(step_time).frontend_s
    total += prefill_s(row.prompt_tokens, config.max_num_batched_tokens, step_time)
    if row.output_tokens > 1:
        total += step_time.run([row.prompt_tokens], 0.0).end_s(row.output_tokens - 1)
    return total


def saturation_rate_rps(trace: Trace, config: SchedulerConfig, step_time: StepTime) -> float:
    """Estimated request rate at which one replica is always busy with full batches.

    With B requests in every batch, the engine time of a request with p prompt and o output tokens is

        p (T(c, B) - T(0, B)) / c + (o - 1) T(0, B) / B + T(0, B) / B,

    where T(c, B) is the time of a step with a prompt chunk of c tokens and B decodes of average context; c is the average
    prompt, limited by the budget. B is max_num_seqs, or less if fewer requests of average size fit into the KV cache.
    """
    prompt = np.array([row.prompt_tokens for row in trace.requests], float)
    output = np.array([row.output_tokens for row in trace.requests], float)
    context = float(np.average(prompt + output / 2, weights=output))
    capacity = config.capacity_blocks * config.kv_block_tokens * (1 - config.kv_watermark) / context
    batch = int(max(1.0, min(float(config.max_num_seqs), capacity)))
    size = max(1, min(round(float(prompt.mean())), config.max_num_batched_tokens - batch))
    contexts = (round(context),) * batch
    decode_s = step_time.step_s(StepWork((), contexts))
    both_s = step_time.step_s(StepWork((PrefillChunk("", 0, size, True),), contexts))
    busy = float(prompt.mean()) * (both_s - decode_s) / size + float(output.mean()) * decode_s / batch
    return 1.0 / busy
