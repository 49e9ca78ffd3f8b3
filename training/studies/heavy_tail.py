"""How heavy the tail of each group's answers is, by the measures of TIE, section 3.1."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from training.fitting.estimate import Estimates
from training.fitting.families import FloatArray
from training.studies.groups import StudyGroups

#: What each measure is, for the page.
MEASURES = {
    "skewness": "mean skewness (moments)",
    "cv": "mean coefficient of variation",
    "top_decile_share": "mean share of tokens in the longest 10 % of answers",
    "p90_over_p50": "mean P90 / P50",
    "p99_over_p50": "mean P99 / P50",
}


def measures(groups: StudyGroups) -> dict[str, FloatArray]:
    """Each measure of each group's answers, cut ones at their cap, [G] each; NaN where it is not defined.

    Skewness and coefficient of variation by the moments with divisor N (skewness NaN if all are equal). Quantiles
    interpolate linearly between order statistics. The longest 10 % of N answers are 0.1 N of them, the last one in
    part. Of N answers the skewness is at most (N - 2) / sqrt(N - 1), and their P99 hardly beyond the longest: with
    few answers these come out too low.
    """
    lengths = groups.lengths.astype(np.float64)
    starts, counts = groups.sample.offsets[:-1], groups.counts
    mean = np.add.reduceat(lengths, starts) / counts
    centred = lengths - np.repeat(mean, counts)
    variance = np.add.reduceat(centred**2, starts) / counts
    third = np.add.reduceat(centred**3, starts) / counts
    spread = np.sqrt(variance)
    skewness = np.full(len(groups), np.nan)
    np.divide(third, spread**3, out=skewness, where=spread > 0)
    median = _quantiles(lengths, starts, counts, 0.5)
    return {
        "skewness": skewness,
        "cv": spread / mean,
        "top_decile_share": _top_share(lengths, groups.sample.offsets, 0.1),
        "p90_over_p50": _quantiles(lengths, starts, counts, 0.9) / median,
        "p99_over_p50": _quantiles(lengths, starts, counts, 0.99) / median,
    }


def _quantiles(
    lengths: FloatArray, starts: NDArray[np.int64], counts: NDArray[np.int64], level: float
) -> FloatArray:
    rank = level * (counts - 1)
    below = np.floor(rank).astype(np.int64)
    above = np.minimum(below + 1, counts - 1)
    low, high = lengths[starts + below], lengths[starts + above]
    return np.asarray(low + (rank - below) * (high - low))


def _top_share(lengths: FloatArray, offsets: NDArray[np.int64], share: float) -> FloatArray:
    """Share of the tokens that the longest `share` of each group's answers (ascending) hold."""
    sums = np.concatenate([[0.0], np.cumsum(lengths)])
    counts = np.diff(offsets)
    wanted = share * counts
    whole = np.floor(wanted + 1e-9).astype(np.int64)
    last = offsets[1:] - whole
    held = sums[offsets[1:]] - sums[last]
    # If 0.1 N is no whole number, the next answer counts for the rest.
    held = held + (wanted - whole) * lengths[np.maximum(last - 1, offsets[:-1])]
    return np.asarray(held / (sums[offsets[1:]] - sums[offsets[:-1]]))


def heavy_tail(groups: StudyGroups, log_t: Estimates, rows: NDArray[np.bool_]) -> dict[str, dict[str, Any]]:
    """Measure -> mean, median and number over the groups `rows` [G]; of the quantile ratios also by the fit.

    Args:
        groups: The groups.
        log_t: Their fits by a log-t of fixed nu, whose P90 / P50 is exp(sigma t_0.9) however few the answers are.
        rows: Groups to take.
    """
    result: dict[str, dict[str, Any]] = {}
    for name, values in measures(groups).items():
        known = values[rows & ~np.isnan(values)]
        result[name] = {
            "mean": float(known.mean()) if len(known) else None,
            "median": float(np.median(known)) if len(known) else None,
            "num_groups": len(known),
        }
    sigma = np.exp(log_t.solution.s[rows])
    nu = log_t.solution.nu[rows]
    for name, level in (("p90_over_p50", 0.9), ("p99_over_p50", 0.99)):
        ratio = np.exp(sigma * stats.t.ppf(level, nu))
        # No mean: that of exp(sigma t) over groups follows the widest few of them.
        result[name]["fit_median"] = float(np.median(ratio)) if len(ratio) else None
    return result
