"""Models of step times by name, and derived quantities: isolated latencies, saturation rate, RAD's bounds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scheduler_core.batching.rad import Rad
from scheduler_core.engine.plan import PrefillChunk
from scheduler_core.errors import InputError
from scheduler_core.ranges import check_choice
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.shell.json_text import read_json_object
from scheduler_core.simulator.step_time.base import LinearStepTime, StepTime, StepWork
from scheduler_core.simulator.step_time.operator_table import read_operator_table
from scheduler_core.simulator.step_time.quadratic import quadratic_step_time
from scheduler_core.simulator.step_time.roofline import RooflineStepTime
from scheduler_core.simulator.step_time.staircase import StaircaseStepTime
from scheduler_core.simulator.trace import Trace, TraceRequest
from scheduler_core.statistics import FloatArray

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


def isolated_latency_s(row: TraceRequest, config: SchedulerConfig, step_time: StepTime) -> float:
    """Latency to the last token on an idle engine in seconds: prompt in maximum chunks, then decodes."""
    total, start, budget = 0.0, 0, config.max_num_batched_tokens
    while start < row.prompt_tokens:
        size = min(budget, row.prompt_tokens - start)
        chunk = PrefillChunk(row.request_id, start, size, start + size == row.prompt_tokens)
        total += step_time.step_s(StepWork((chunk,)))
        start += size
    if row.output_tokens > 1:
        total += step_time.run([row.prompt_tokens], 0.0).end_s(row.output_tokens - 1)
    return total


def _mean_sizes(trace: Trace) -> tuple[FloatArray, FloatArray, float]:
    """Prompt and output tokens [n], and the mean context of a decode: the mean of p + o/2 weighted by o."""
    prompt = np.array([row.prompt_tokens for row in trace.requests], float)
    output = np.array([row.output_tokens for row in trace.requests], float)
    return prompt, output, float(np.average(prompt + output / 2, weights=output))


def saturation_rate_rps(trace: Trace, config: SchedulerConfig, step_time: StepTime) -> float:
    """Estimated request rate at which one replica is always busy with full batches.

    With B requests in every batch, the engine time of a request with p prompt and o output tokens is

        p (T(c, B) - T(0, B)) / c + (o - 1) T(0, B) / B + T(0, B) / B,

    where T(c, B) is the time of a step with a prompt chunk of c tokens and B decodes of average context; c is the average
    prompt, limited by the budget. B is max_num_seqs, or less if fewer requests of average size fit into the KV cache.
    """
    prompt, output, context = _mean_sizes(trace)
    capacity = config.num_kv_blocks * config.kv_block_tokens * (1 - config.kv_watermark) / context
    batch = int(max(1.0, min(float(config.max_num_seqs), capacity)))
    size = max(1, min(round(float(prompt.mean())), config.max_num_batched_tokens - batch))
    contexts = (round(context),) * batch
    decode_s = step_time.step_s(StepWork((), contexts))
    both_s = step_time.step_s(StepWork((PrefillChunk("", 0, size, True),), contexts))
    busy = float(prompt.mean()) * (both_s - decode_s) / size + float(output.mean()) * decode_s / batch
    return 1.0 / busy


@dataclass(frozen=True, slots=True)
class RadBounds:
    """Quantities of RAD's theorems 1 and 2 (Bari et al.). `expected_s` is T_R, the mean engine time of a request at optimal
    tiling; every policy is unstable above a rate of 1 / T_R. `longest_s` is T_max, the maximum of this time.
    `num_per_cycle` is the smallest n of batch former "rad" that is stable at every load up to 1 - epsilon:
    n > (t_col - 1) T_max / (epsilon T_R)."""

    expected_s: float
    longest_s: float
    num_per_cycle: int


def rad_bounds(trace: Trace, config: SchedulerConfig, step_time: StepTime, epsilon: float = 0.1) -> RadBounds:
    """T_R, T_max and n for requests like those of a trace, with batch former "rad" up to a load of 1 - `epsilon`.

    The time of a request is that of its prompt in chunks of t_lcm tokens (the last one rounded up), plus its fraction
    of decode steps with t_col requests of average context; for T_max, plus the whole time of such decode steps.
    """
    if not 0 < epsilon < 1:
        raise InputError("epsilon", epsilon, "numbers between 0 and 1")
    rad = Rad(**{name: value for name, value in config.batching_parameters.items() if name != "n"})  # type: ignore[arg-type]
    t_col, t_lcm = rad.tile_columns(config.max_num_seqs), rad.chunk_tokens(config.max_num_seqs)
    prompt, output, context = _mean_sizes(trace)
    chunk_s = step_time.step_s(StepWork((PrefillChunk("", 0, t_lcm, True),)))
    decode_s = step_time.step_s(StepWork((), (round(context),) * t_col))
    prefill_s = np.ceil(prompt / t_lcm) * chunk_s
    expected_s = float(np.mean(prefill_s + (output - 1) * decode_s / t_col))
    longest_s = float(np.max(prefill_s + (output - 1) * decode_s))
    return RadBounds(expected_s, longest_s, int((t_col - 1) * longest_s / (epsilon * expected_s)) + 1)
