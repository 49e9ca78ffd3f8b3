"""Statistics of a set of answer lengths: over all answers, and how they spread within each prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_gen.card.lengths import Lengths

QUANTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)
#: Fewest answers of a prompt whose spread is worth a number.
MIN_SAMPLES = 3
SPREAD = ("cv", "p90_p50", "p99_p50", "top10_share", "skewness")

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Spread:
    """Spread of each prompt's answers, for groups of at least `MIN_SAMPLES`; [groups] each, NaN where undefined.

    Cut answers count as long as they were cut at, so that the spread of prompts with many is too small.

    Attributes:
        counts: Answers of each group.
        medians: Median length.
        cut_share: Share of cut answers.
        measures: cv: standard deviation (n - 1) over mean. p90_p50, p99_p50: ratios of quantiles, interpolated.
            top10_share: share of all tokens that the longest tenth of the answers (rounded up) hold. skewness: third
            central moment over the 3/2 power of the second, without small-sample correction.
        num_left_out: Groups with fewer answers.
    """

    counts: NDArray[np.int64]
    medians: FloatArray
    cut_share: FloatArray
    measures: dict[str, FloatArray]
    num_left_out: int


def spread_of(lengths: Lengths) -> Spread:
    """The spread within each group."""
    order = np.lexsort((lengths.length, lengths.group))
    values = lengths.length[order].astype(np.float64)
    counts = np.bincount(lengths.group, minlength=lengths.num_groups)
    kept = counts >= MIN_SAMPLES
    member = np.repeat(kept, counts)
    values, cut, counts = values[member], lengths.cut[order][member], counts[kept]
    if not len(counts):
        nothing = np.empty(0)
        return Spread(counts, nothing, nothing, dict.fromkeys(SPREAD, nothing), int((~kept).sum()))
    starts = np.cumsum(counts) - counts
    sums = np.add.reduceat(values, starts)
    mean = sums / counts
    deviation = values - np.repeat(mean, counts)
    second = np.add.reduceat(deviation**2, starts) / counts
    third = np.add.reduceat(deviation**3, starts) / counts
    totals = np.concatenate([[0.0], np.cumsum(values)])
    longest = np.ceil(counts / 10).astype(np.int64)
    ends = starts + counts
    median = _quantile(values, starts, counts, 0.5)
    with np.errstate(invalid="ignore", divide="ignore"):
        measures = {
            "cv": np.sqrt(second * counts / (counts - 1)) / mean,
            "p90_p50": _quantile(values, starts, counts, 0.9) / median,
            "p99_p50": _quantile(values, starts, counts, 0.99) / median,
            "top10_share": (totals[ends] - totals[ends - longest]) / sums,
            # Lengths that are all equal have no skewness; rounding may leave their variance just above 0.
            "skewness": np.where(second > 1e-9 * mean**2, third / second**1.5, np.nan),
        }
    return Spread(
        counts, median, np.add.reduceat(cut.astype(np.float64), starts) / counts, measures, int((~kept).sum())
    )


def _quantile(
    values: FloatArray, starts: NDArray[np.int64], counts: NDArray[np.int64], share: float
) -> FloatArray:
    """Quantile of each sorted run of `values`, linear between neighbours."""
    position = (counts - 1) * share
    below = np.floor(position).astype(np.int64)
    above = np.minimum(below + 1, counts - 1)
    weight = position - below
    return np.asarray(values[starts + below] * (1 - weight) + values[starts + above] * weight)


def summary_of(values: NDArray[np.generic]) -> dict[str, float]:
    """Mean and quantiles of finite values; empty without any."""
    numbers = np.asarray(values, dtype=np.float64)
    numbers = numbers[np.isfinite(numbers)]
    if not len(numbers):
        return {}
    found = np.percentile(numbers, QUANTILES)
    quantiles = {f"p{share}": float(value) for share, value in zip(QUANTILES, found, strict=True)}
    return {
        "mean": float(numbers.mean()),
        "min": float(numbers.min()),
        **quantiles,
        "max": float(numbers.max()),
    }


def survival(lengths: NDArray[np.int32], cut: NDArray[np.bool_]) -> tuple[NDArray[np.int64], FloatArray]:
    """Kaplan and Meier's estimate of P(length > x), which takes cut answers for at least that long.

    Returns:
        Different lengths at which answers ended, increasing, and the probability to be longer.
    """
    at, position = np.unique(lengths, return_inverse=True)
    ended = np.bincount(position, weights=~cut, minlength=len(at))
    leaving = np.bincount(position, minlength=len(at))
    at_risk = leaving[::-1].cumsum()[::-1]
    alive = np.cumprod(1 - ended / at_risk)
    there = ended > 0
    return at[there].astype(np.int64), alive[there]


def by_label(lengths: Lengths, codes: NDArray[np.int32], names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Answers, share of cut ones and lengths of each label, the most frequent first."""
    order = np.argsort(codes, kind="stable")
    ends = np.cumsum(np.bincount(codes, minlength=len(names)))
    table = []
    for number, name in enumerate(names):
        rows = order[(ends[number - 1] if number else 0) : ends[number]]
        if len(rows):
            found = {"name": name, "num_answers": len(rows), "cut_share": float(lengths.cut[rows].mean())}
            table.append(found | {"length": summary_of(lengths.length[rows])})
    return sorted(table, key=lambda row: -row["num_answers"])


def by_prompt_length(lengths: Lengths) -> dict[str, Any]:
    """How answers go with the prompts' length: rank correlation, and lengths by prompt length in powers of two."""
    known = lengths.prompt_tokens > 0
    if not known.any():
        return {}
    prompts, answers = lengths.prompt_tokens[known], lengths.length[known]
    power = np.floor(np.log2(prompts)).astype(np.int64)
    bins = [
        {
            "from": int(2**number),
            "to": int(2 ** (number + 1) - 1),
            "num_answers": int((power == number).sum()),
            "length": summary_of(answers[power == number]),
        }
        for number in np.unique(power)
    ]
    return {
        "num_answers": int(known.sum()),
        "prompt_tokens": summary_of(prompts),
        "spearman": _correlation(_ranks(prompts), _ranks(answers)),
        "bins": bins,
    }


def _ranks(values: NDArray[np.generic]) -> FloatArray:
    """Ranks, equal values sharing their mean."""
    _, position, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray((ends - (counts - 1) / 2)[position], dtype=np.float64)


def _correlation(first: FloatArray, second: FloatArray) -> float | None:
    first, second = first - first.mean(), second - second.mean()
    size = float(np.sqrt((first**2).sum() * (second**2).sum()))
    return float((first * second).sum()) / size if size > 0 else None
