"""Fits of step-time models to measured steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from scheduler_core.errors import InputError
from scheduler_core.simulator.step_time import make_step_time
from scheduler_core.simulator.step_time.base import StepTime, StepWork
from scheduler_core.simulator.step_time.staircase import StaircaseStepTime

Kind = Literal["linear", "staircase"]

#: Steps further from the fit than so many median deviations are hiccups of the machine and left out.
OUTLIER = 5.0
#: Fitted parameters by model.
PARAMETERS: dict[str, tuple[str, ...]] = {
    "linear": ("base_s", "per_prefill_token_s", "per_decode_s", "per_context_token_s"),
    "staircase": ("base_s", "linear_tile_s", "per_token_s", "decode_tile_s", "prefill_tile_s"),
}


@dataclass(frozen=True, slots=True)
class StepSample:
    """A measured step: its duration and its work."""

    seconds: float
    work: StepWork


@dataclass(frozen=True, slots=True)
class StepTimeFit:
    """A model fitted to steps, some of them left out as hiccups; `parameters` are in seconds, `median_error` is the median
    over all steps of |predicted - measured| / measured."""

    step_time: StepTime
    parameters: dict[str, float]
    num_samples: int
    num_outliers: int
    median_error: float


def fit_step_time(samples: Sequence[StepSample], kind: Kind = "linear") -> StepTimeFit:
    """Least squares of relative errors with no negative time, twice: the second time without hiccups. `InputError` if there
    are too few steps, a duration is not above 0, or nothing could be fitted.

    Both prompts and decodes must be among the steps, of different sizes. The fit is then scaled so that all steps together
    take as long as measured, hiccups included: queues are as long as the mean of all steps makes them, and relative errors
    pull a fit to noisy steps towards the short ones (E[1/s] / E[1/s^2] instead of E[s], for one kind of step). `staircase`
    has its default tiles.
    """
    from scipy.optimize import nnls  # the simulator alone needs no scipy

    names = PARAMETERS[kind]
    seconds = np.array([sample.seconds for sample in samples])
    if len(samples) < 2 * len(names) or not bool((seconds > 0).all()):
        raise InputError("measured steps", len(samples), f"at least {2 * len(names)} with a time > 0")
    features = np.array([_features(sample.work, kind) for sample in samples], float)
    scale = np.maximum(features.max(axis=0), 1e-300)
    regular = np.ones(len(samples), bool)
    for _ in range(2):
        relative = features[regular] / scale / seconds[regular, None]
        weights = nnls(relative, np.ones(len(relative)))[0] / scale
        errors = np.abs(features @ weights - seconds) / seconds
        regular = errors <= OUTLIER * max(float(np.median(errors)), 1e-9)
    weights = weights * seconds.sum() / float((features @ weights).sum())
    errors = np.abs(features @ weights - seconds) / seconds
    parameters = {name: float(value) for name, value in zip(names, weights, strict=True)}
    model = make_step_time(kind, parameters)
    return StepTimeFit(model, parameters, len(samples), int((~regular).sum()), float(np.median(errors)))


def _features(work: StepWork, kind: Kind) -> list[float]:
    """The factor of each parameter."""
    if kind == "linear":
        return [1.0, work.num_prefill_tokens, len(work.contexts), work.num_context_tokens]
    tiles = StaircaseStepTime()
    return [
        1.0,
        -(-work.num_tokens // tiles.t_col),
        work.num_tokens,
        sum(tiles.decode_tiles(context) for context in work.contexts),
        sum(tiles.chunk_tiles(chunk.start_token, chunk.num_tokens) for chunk in work.prefills),
    ]
