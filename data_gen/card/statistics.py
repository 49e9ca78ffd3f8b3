"""Statistics of the outputs of a samples file: over all of them, and within each prompt."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_gen.card.rows import GROUP_COLUMNS, SETTING_COLUMNS, CardRows, CodedColumn
from scheduler_core.statistics import coefficients_of_variation, top_decile_fractions

QUANTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)
#: Fewest outputs of a prompt whose dispersion is worth a number.
MIN_SAMPLES = 3

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Dispersion:
    """Dispersion of each prompt's outputs, for groups of at least `MIN_SAMPLES`; [groups] each, NaN where undefined.

    Truncated outputs count with the length that is known, so that the dispersion of prompts with many is too small.

    Attributes:
        counts: Outputs of each group.
        medians: Median length.
        has_truncated: Whether an output of the group is truncated.
        measures: cv: standard deviation (n - 1) over mean. p90_p50, p99_p50: ratios of quantiles, interpolated.
            top_decile_fraction: fraction of all tokens in the longest tenth of the outputs. skewness: third central
            moment over the 3/2 power of the second, without small-sample correction.
        num_skipped: Groups with fewer outputs.
    """

    counts: NDArray[np.int64]
    medians: FloatArray
    has_truncated: NDArray[np.bool_]
    measures: dict[str, FloatArray]
    num_skipped: int


def dispersion_of(outputs: CardRows) -> Dispersion:
    """The dispersion within each (prompt, model, run, temperature, top_p)."""
    group = outputs.combined(GROUP_COLUMNS)
    order = np.lexsort((outputs.length, group))
    counts = np.bincount(group)
    is_large = counts >= MIN_SAMPLES
    member = order[np.repeat(is_large, counts)]
    values, counts = outputs.length[member].astype(np.float64), counts[is_large]
    if not len(counts):
        names = ("cv", "p90_p50", "p99_p50", "top_decile_fraction", "skewness")
        measures = dict.fromkeys(names, np.empty(0))
        return Dispersion(counts, np.empty(0), np.empty(0, bool), measures, int((~is_large).sum()))
    offsets = np.concatenate([[0], np.cumsum(counts)])
    starts = offsets[:-1]
    mean = np.add.reduceat(values, starts) / counts
    deviation = values - np.repeat(mean, counts)
    second = np.add.reduceat(deviation**2, starts) / counts
    third = np.add.reduceat(deviation**3, starts) / counts
    median = _quantile(values, starts, counts, 0.5)
    with np.errstate(invalid="ignore", divide="ignore"):
        measures = {
            "cv": coefficients_of_variation(values, offsets),
            "p90_p50": _quantile(values, starts, counts, 0.9) / median,
            "p99_p50": _quantile(values, starts, counts, 0.99) / median,
            "top_decile_fraction": top_decile_fractions(values, offsets),
            # Equal lengths have no skewness; rounding may leave their variance just above 0.
            "skewness": np.where(second > 1e-9 * mean**2, third / second**1.5, np.nan),
        }
    truncated = np.add.reduceat(outputs.has_reason("length")[member].astype(np.int64), starts) > 0
    return Dispersion(counts, median, truncated, measures, int((~is_large).sum()))


def _quantile(
    values: FloatArray, starts: NDArray[np.int64], counts: NDArray[np.int64], probability: float
) -> FloatArray:
    """Quantile of each sorted run of `values`, linear between neighbors."""
    position = (counts - 1) * probability
    below = np.floor(position).astype(np.int64)
    above = np.minimum(below + 1, counts - 1)
    weight = position - below
    return np.asarray(values[starts + below] * (1 - weight) + values[starts + above] * weight)


def survival(
    lengths: NDArray[np.int64], truncated: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], FloatArray]:
    """Kaplan and Meier's estimate of P(length > x), which takes truncated outputs for at least that long.

    Returns:
        Different lengths at which outputs ended, increasing, and the probability to be longer.
    """
    points, position = np.unique(lengths, return_inverse=True)
    ended = np.bincount(position, weights=~truncated, minlength=len(points))
    at_risk = np.bincount(position, minlength=len(points))[::-1].cumsum()[::-1]
    alive = np.cumprod(1 - ended / at_risk)
    return points[ended > 0], alive[ended > 0]


def card_content(rows: CardRows, outputs: CardRows, dispersion: Dispersion) -> dict[str, Any]:
    """All numbers of a data card, as JSON."""
    reasons = rows.columns["finish_reason"]
    counts = np.bincount(reasons.codes, minlength=len(reasons.names)).tolist()
    truncated = outputs.has_reason("length")
    return {
        "counts": {
            "num_outputs": len(outputs.length),
            "num_tokens": int(outputs.length.sum()),
            "num_failed": int(rows.has_reason("error").sum()),
            "num_prompts": len(np.unique(rows.columns["prompt_id"].codes)),
            "num_groups": len(np.unique(outputs.combined(GROUP_COLUMNS))),
            "finish_reasons": {
                name: count for name, count in zip(reasons.names, counts, strict=True) if count
            },
            "truncated_fraction": float(truncated.mean()),
        },
        "settings": _counted(rows, SETTING_COLUMNS),
        "max_tokens": _counted(rows, ("max_tokens",)),
        "length": summary_of(outputs.length),
        "dispersion": _dispersion_content(dispersion),
        "categories": _by_label(outputs.columns["category"], outputs.length, truncated),
        "datasets": _by_label(outputs.columns["dataset"], outputs.length, truncated),
        "prompt_length": by_prompt_length(outputs),
        "failures": _failures(rows),
        "timings": {
            name: {"mean": total / count, "num_rows": count} for name, (total, count) in rows.timings.items()
        },
    }


def summary_of(values: NDArray[np.generic]) -> dict[str, float]:
    """Mean and quantiles of finite values; empty without any."""
    numbers = np.asarray(values, dtype=np.float64)
    numbers = numbers[np.isfinite(numbers)]
    if not len(numbers):
        return {}
    quantiles = dict(
        zip((f"p{percent}" for percent in QUANTILES), np.percentile(numbers, QUANTILES), strict=True)
    )
    summary = {"mean": numbers.mean(), "min": numbers.min(), **quantiles, "max": numbers.max()}
    return {name: float(value) for name, value in summary.items()}


def _counted(rows: CardRows, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Rows, and truncated ones, by the values of some columns; the most frequent first."""
    codes, first, counts = np.unique(rows.combined(names), return_index=True, return_counts=True)
    truncated = np.bincount(rows.combined(names), weights=rows.has_reason("length"), minlength=len(codes))
    entries = [
        {name: rows.columns[name].names[rows.columns[name].codes[row]] for name in names}
        | {"num_rows": int(count), "num_truncated": int(num_truncated)}
        for row, count, num_truncated in zip(first, counts, truncated, strict=True)
    ]
    return sorted(entries, key=lambda entry: -entry["num_rows"])


def _failures(rows: CardRows) -> dict[str, dict[str, Any]]:
    column = rows.columns["error"].filter(rows.has_reason("error"))
    failures: dict[str, dict[str, Any]] = {}
    for code, count in enumerate(np.bincount(column.codes, minlength=len(column.names)).tolist()):
        if count:
            text = column.names[code]
            kind = text.partition(":")[0].strip() or "unknown"
            failures.setdefault(kind, {"num_rows": 0, "example": text})["num_rows"] += count
    return failures


def _by_label(
    column: CodedColumn, lengths: NDArray[np.int64], truncated: NDArray[np.bool_]
) -> list[dict[str, Any]]:
    """Outputs, fraction of truncated ones and lengths of each label, the most frequent first."""
    table = []
    for code in np.unique(column.codes).tolist():
        mask = column.codes == code
        entry = {"name": column.names[code], "num_outputs": int(mask.sum())}
        table.append(
            entry | {"truncated_fraction": float(truncated[mask].mean()), "length": summary_of(lengths[mask])}
        )
    return sorted(table, key=lambda row: -row["num_outputs"])


def by_prompt_length(outputs: CardRows) -> dict[str, Any]:
    """Rank correlation of prompt and output length, and output lengths by prompt length in powers of two."""
    mask = outputs.prompt_tokens > 0
    if not mask.any():
        return {}
    prompts, lengths = outputs.prompt_tokens[mask], outputs.length[mask]
    power = np.floor(np.log2(prompts)).astype(np.int64)
    bins = [
        {
            "from": int(2**number),
            "to": int(2 ** (number + 1) - 1),
            "num_outputs": int((power == number).sum()),
            "length": summary_of(lengths[power == number]),
        }
        for number in np.unique(power)
    ]
    first, second = _ranks(prompts), _ranks(lengths)
    varies = np.ptp(first) > 0 and np.ptp(second) > 0
    return {
        "num_outputs": int(mask.sum()),
        "prompt_tokens": summary_of(prompts),
        "spearman": float(np.corrcoef(first, second)[0, 1]) if varies else None,
        "bins": bins,
    }


def _ranks(values: NDArray[np.int64]) -> FloatArray:
    """Ranks, equal values sharing their mean."""
    _, position, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[position])


def _dispersion_content(dispersion: Dispersion) -> dict[str, Any]:
    if not len(dispersion.counts):
        return {"num_groups": 0, "num_skipped": dispersion.num_skipped, "measures": {}, "notes": []}
    cv = dispersion.measures["cv"]
    return {
        "num_groups": len(dispersion.counts),
        "num_skipped": dispersion.num_skipped,
        "min_samples": int(dispersion.counts.min()),
        "max_samples": int(dispersion.counts.max()),
        "cv_above_1": float((cv > 1).mean()),
        "measures": {name: summary_of(values) for name, values in dispersion.measures.items()},
        "num_constant": int((cv == 0).sum()),
        "notes": bias_notes(dispersion),
    }


def bias_notes(dispersion: Dispersion) -> list[str]:
    """Effects of the number of outputs for each prompt on the measures.

    The skewness of n numbers is at most (n - 2) / sqrt(n - 1), reached when all but one are equal.
    """
    usual = int(np.median(dispersion.counts))
    bound = (usual - 2) / math.sqrt(usual - 1)
    notes = []
    if usual < 100:
        notes.append(
            f"With {usual} outputs a skewness cannot exceed {bound:.2f}; it, the coefficient of variation, P99 / P50 and"
            " the top decile are too small on average for heavy tails, whose largest values are mostly not among so few."
        )
    if usual < 50:
        notes.append(f"P99 of {usual} outputs lies next to the longest one: read it as such.")
    truncated = float(dispersion.has_truncated.mean())
    if truncated:
        notes.append(
            f"{truncated:.1%} of the groups hold truncated outputs, whose true dispersion is larger."
        )
    constant = int((dispersion.measures["cv"] == 0).sum())
    if constant:
        notes.append(f"{constant} groups are constant: no skewness, the other measures count.")
    return notes
