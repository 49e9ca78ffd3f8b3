"""Fits models of step times to measured steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from scheduler_core.errors import InputError
from scheduler_core.simulator.staircase_time import StaircaseStepTime
from scheduler_core.simulator.step_time import LinearStepTime, StepTime, StepWork

Kind = Literal["linear", "staircase"]

#: Steps further from the fit than so many median deviations are hiccups of the machine and left out.
OUTLIER = 5.0

LINEAR = ("base_s", "per_prefill_token_s", "per_decode_s", "per_context_token_s")
_MODELS: dict[str, Callable[..., StepTime]] = {"linear": LinearStepTime, "staircase": StaircaseStepTime}
STAIRCASE = ("base_s", "linear_tile_s", "per_token_s", "decode_tile_s", "prefill_tile_s")


@dataclass(frozen=True, slots=True)
class StepSample:
    """A step that was measured.

    Attributes:
        seconds: How long it took.
        work: What it did.
    """

    seconds: float
    work: StepWork


@dataclass(frozen=True, slots=True)
class Fit:
    """A model fitted to steps.

    Attributes:
        step_time: The model.
        parameters: Its fitted parameters, in seconds.
        num_samples: Steps that the fit is of.
        num_outliers: Steps left out as hiccups.
        median_error: Median over all steps of |predicted - measured| / measured.
    """

    step_time: StepTime
    parameters: dict[str, float]
    num_samples: int
    num_outliers: int
    median_error: float


def fit_step_time(samples: Sequence[StepSample], kind: Kind = "linear") -> Fit:
    """Least squares of relative errors with no negative time, twice: the second time without hiccups.

    Args:
        samples: Measured steps; both prompts and decodes must be among them, of different sizes.
        kind: linear (`LinearStepTime`) or staircase (`StaircaseStepTime` with its default tiles: RAD, Eq. 7).

    Raises:
        InputError: There are fewer steps than parameters, a duration is not above 0, or nothing could be fitted.
    """
    names = {"linear": LINEAR, "staircase": STAIRCASE}.get(kind)
    if names is None:
        raise InputError("model", kind, "linear, staircase")
    seconds = np.array([sample.seconds for sample in samples])
    if len(samples) < 2 * len(names) or not bool((seconds > 0).all()):
        raise InputError("measured steps", len(samples), f"at least {2 * len(names)} with a time > 0")
    features = np.array([_features(sample.work, kind) for sample in samples])
    kept = np.ones(len(samples), bool)
    for _ in range(2):
        weights = _non_negative(features[kept] / seconds[kept, None], np.ones(int(kept.sum())))
        errors = np.abs(features @ weights - seconds) / seconds
        kept = errors <= OUTLIER * max(float(np.median(errors)), 1e-9)
    parameters = {name: float(value) for name, value in zip(names, weights, strict=True)}
    model = _MODELS[kind](**parameters)
    return Fit(model, parameters, len(samples), int((~kept).sum()), float(np.median(errors)))


def _features(work: StepWork, kind: Kind) -> list[float]:
    """What each parameter is multiplied with."""
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


def _non_negative(features: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares with weights >= 0: the best of all subsets of features whose own solution has no negative weight.

    Exact, and cheap for the handful of features there are.
    """
    num = features.shape[1]
    scale = np.maximum(np.abs(features).max(axis=0), 1e-300)
    best, least = np.zeros(num), float(target @ target)
    for size in range(1, num + 1):
        for chosen in combinations(range(num), size):
            columns = list(chosen)
            solved, *_ = np.linalg.lstsq(features[:, columns] / scale[columns], target, rcond=None)
            if (solved < 0).any():
                continue
            left = features[:, columns] @ (solved / scale[columns]) - target
            if float(left @ left) < least * (1 - 1e-12):
                least = float(left @ left)
                best = np.zeros(num)
                best[columns] = solved / scale[columns]
    return best
