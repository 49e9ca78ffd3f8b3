"""Statistics shared by all packages: rank correlation, confidence intervals over seeds."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scheduler_core.errors import InputError
from scheduler_core.lengths.student_t import student_t_quantile

FloatArray = NDArray[np.float64]


def kendall_tau(one: ArrayLike, other: ArrayLike) -> float | None:
    """Kendall's tau-b of two rankings [n], in O(n log^2 n); None if all values of one are equal."""
    first, second = (np.unique(np.asarray(values), return_inverse=True)[1] for values in (one, other))
    order = np.lexsort((second, first))
    first, second = first[order], second[order]
    num_pairs = len(order) * (len(order) - 1) // 2
    ties, other_ties, both = map(tied_pairs, (first, second, first * len(order) + second))
    scale = math.sqrt(num_pairs - ties) * math.sqrt(num_pairs - other_ties)
    if scale == 0.0:
        return None
    return (num_pairs - ties - other_ties + both - 2 * _num_inversions(second)) / scale


def tied_pairs(values: NDArray[Any]) -> int:
    """Pairs of equal values."""
    counts = np.unique(values, return_counts=True)[1]
    return int((counts * (counts - 1)).sum()) // 2


def _num_inversions(ranks: NDArray[np.int64]) -> int:
    """Number of pairs whose first value is larger, counted at the highest bit in which both differ."""
    num = 0
    for bit in reversed(range(int(ranks.max()).bit_length())):
        group, is_high = ranks >> bit + 1, (ranks >> bit & 1).astype(bool)
        sizes, highs = np.bincount(group), np.bincount(group, is_high).astype(np.int64)
        highs_before = np.cumsum(highs) - highs
        num += int(np.cumsum(is_high)[~is_high].sum() - highs_before @ (sizes - highs))
        ranks = ranks[np.argsort(ranks >> bit, kind="stable")]
    return num


@dataclass(frozen=True, slots=True)
class Interval:
    """Mean of `num` independent values, with a confidence interval."""

    mean: float
    low: float
    high: float
    num: int

    def to_json(self) -> dict[str, float | None]:
        """The fields by name; None for infinite bounds, those of a single value."""
        return {name: None if math.isinf(value) else value for name, value in asdict(self).items()}


#: Number of values below which the interval of their mean is too wide to be meaningful: with two, t / sqrt(n) is 9.
MIN_VALUES = 3
UNBOUNDED = (-math.inf, math.inf)


def interval(values: Sequence[float], bounds: tuple[float, float] = UNBOUNDED) -> Interval:
    """mean +- t s / sqrt(n) with 95 % confidence; infinitely wide with one value. `InputError` if there is no value.

    `bounds` are those of the quantity itself, such as (0, inf) for a latency. The interval is intersected with them, which
    does not change how often it contains the true mean.
    """
    if not values:
        raise InputError("values", values, "at least one number")
    array = np.asarray(values, float)
    mean, num = float(array.mean()), len(array)
    if num == 1:
        return Interval(mean, -math.inf, math.inf, 1)
    half = student_t_quantile(0.975, num - 1) * float(array.std(ddof=1)) / math.sqrt(num)
    return Interval(mean, max(mean - half, bounds[0]), min(mean + half, bounds[1]), num)
