"""Every model of step times by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from scheduler_core.errors import InputError
from scheduler_core.simulator.operator_profile import read_operator_table
from scheduler_core.simulator.quadratic_time import PRESETS, QuadraticStepTime
from scheduler_core.simulator.roofline_time import RooflineStepTime
from scheduler_core.simulator.staircase_time import StaircaseStepTime
from scheduler_core.simulator.step_time import LinearStepTime, StepTime


def _quadratic(preset: str | None = None, **values: Any) -> QuadraticStepTime:
    if preset is None:
        return QuadraticStepTime(**values)
    if preset not in PRESETS or values:
        raise InputError("preset", preset, ", ".join(PRESETS) + ", with no other parameter")
    return PRESETS[preset]


#: What makes a model from its parameters.
STEP_TIMES: dict[str, Callable[..., StepTime]] = {
    "linear": LinearStepTime,
    "quadratic": _quadratic,
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
    made = QuadraticStepTime if name == "quadratic" else STEP_TIMES[name]
    known = inspect.signature(made).parameters
    names = [*known, "preset"] if name == "quadratic" else list(known)
    for parameter in parameters or {}:
        if parameter not in names:
            raise InputError(f"parameter of step time {name}", parameter, ", ".join(names))
    for parameter, what in known.items():
        if what.default is inspect.Parameter.empty and parameter not in (parameters or {}):
            raise InputError(f"parameter of step time {name}", None, f"a value of {parameter}")
    return STEP_TIMES[name](**(parameters or {}))
