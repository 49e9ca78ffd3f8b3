"""Confidence intervals over seeds, by Student's t; for whole trees of metrics at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from scheduler_core.errors import InputError
from scheduler_core.lengths import LogT


@dataclass(frozen=True, slots=True)
class Interval:
    """Mean of independent runs, with a confidence interval.

    Attributes:
        mean: Of the values.
        low: Lower end.
        high: Upper end.
        num: Number of values.
    """

    mean: float
    low: float
    high: float
    num: int


@lru_cache(maxsize=256)
def t_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t: the logarithm of that of a log-t with location 0 and scale 1."""
    return math.log(LogT(0.0, 1.0, float(degrees)).ppf(probability))


def interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """mean +- t s / sqrt(n); infinitely wide with one value.

    Raises:
        InputError: There is no value, or the confidence is not between 0 and 1.
    """
    if not values:
        raise InputError("values", values, "at least one number")
    if not 0 < confidence < 1:
        raise InputError("confidence", confidence, "numbers between 0 and 1")
    array = np.asarray(values, float)
    mean = float(array.mean())
    if len(array) == 1:
        return Interval(mean, -math.inf, math.inf, 1)
    half = t_quantile((1 + confidence) / 2, len(array) - 1) * float(array.std(ddof=1)) / math.sqrt(len(array))
    return Interval(mean, mean - half, mean + half, len(array))


def over_seeds(runs: Sequence[Mapping[str, Any]], confidence: float = 0.95) -> dict[str, Any]:
    """Trees of metrics of several runs as one tree: each number becomes {mean, low, high, num}.

    A number that some runs do not have (None, or a group nobody fell into) is that of the others. With one run low and
    high are None: one run says nothing of its own spread.
    """
    names: dict[str, None] = {}
    for run in runs:
        names.update(dict.fromkeys(run))
    merged: dict[str, Any] = {}
    for name in names:
        found = [run[name] for run in runs if run.get(name) is not None]
        if not found:
            merged[name] = None
        elif isinstance(found[0], Mapping):
            merged[name] = over_seeds(found, confidence)
        else:
            one = asdict(interval([float(value) for value in found], confidence))
            merged[name] = {key: None if math.isinf(value) else value for key, value in one.items()}
    return merged
