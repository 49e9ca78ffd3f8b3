"""Metrics of ordered urgency levels, rates with exact intervals, reliability diagrams.

Triage is measured by under-triage, urgent requests that are served too late, more than by accuracy. Quadratic weighted
kappa: Cohen 1968. Exact intervals: Clopper and Pearson 1934. Expected calibration error with equal bins: Guo et al. 2017.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import beta
from sklearn.metrics import cohen_kappa_score, confusion_matrix, f1_score

from scheduler_core.errors import InputError
from scheduler_core.report.plotting import COLORS, GRAY, new_figure, write_png
from scheduler_core.urgency import LEVELS

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Rate:
    """`num_hits` out of `num_cases`; the rate of no cases is None.

    Attributes:
        num_hits: How often it happened.
        num_cases: How often it could have.
    """

    num_hits: int
    num_cases: int

    @classmethod
    def of(cls, hits: NDArray[np.bool_], cases: NDArray[np.bool_] | None = None) -> Rate:
        """From flags [N]: how many of `cases` (default: all) are `hits`."""
        counted = np.ones(len(hits), dtype=bool) if cases is None else cases
        return cls(int(np.sum(hits & counted)), int(np.sum(counted)))

    @property
    def value(self) -> float | None:
        """The rate, or None without cases."""
        return self.num_hits / self.num_cases if self.num_cases else None

    def to_json(self) -> dict[str, Any]:
        """Rate, exact two-sided 95 % interval, and counts."""
        tail = (1 - CONFIDENCE) / 2
        low = 1 - upper_bound(self.num_cases - self.num_hits, self.num_cases, tail)
        high = upper_bound(self.num_hits, self.num_cases, tail)
        return {"value": self.value, "low": low, "high": high, "hits": self.num_hits, "cases": self.num_cases}


def upper_bound(num_hits: int, num_cases: int, delta: float) -> float:
    """Clopper-Pearson: the true rate is above it with probability at most `delta`; 1 without cases.

    Raises:
        InputError: The counts contradict each other, or `delta` is not between 0 and 1.
    """
    _check(num_hits, num_cases, delta)
    if num_hits == num_cases:
        return 1.0
    return float(beta.ppf(1 - delta, num_hits + 1, num_cases - num_hits))


def _check(num_hits: int, num_cases: int, delta: float) -> None:
    if not 0 <= num_hits <= num_cases:
        raise InputError("hits", num_hits, f"0 to the number of cases, {num_cases}")
    if not 0 < delta < 1:
        raise InputError("delta", delta, "a number between 0 and 1")


# Levels 0 and 1 are critical: a person is in danger, or waits at this moment.
LAST_CRITICAL = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class UrgencyMetrics:
    """Predicted levels compared with true ones; level 0 is the most urgent.

    Attributes:
        accuracy: Predicted = true.
        within_one: At most one level apart.
        kappa: Quadratic weighted kappa: 1 = perfect, 0 = as by chance; None where either side is constant.
        macro_f1: Mean F1 of the levels that occur among the true ones.
        recalls: Of each level: fraction of its texts predicted as that level.
        critical_recall: Of texts of levels 0-1: fraction predicted as 0 or 1.
        under_triage: Fraction predicted less urgent than true.
        over_triage: Fraction predicted more urgent than true.
        critical_under_triage: Of texts of levels 0-1: fraction predicted less urgent than true.
        critical_over_triage: Of texts of levels 2-4: fraction predicted as 0 or 1, false alarms.
        emergency_under_triage: Of texts of level 0: fraction predicted as anything else.
        confusion: Counts, true level in rows, predicted in columns [K][K].
    """

    accuracy: Rate
    within_one: Rate
    kappa: float | None
    macro_f1: float
    recalls: tuple[Rate, ...]
    critical_recall: Rate
    under_triage: Rate
    over_triage: Rate
    critical_under_triage: Rate
    critical_over_triage: Rate
    emergency_under_triage: Rate
    confusion: tuple[tuple[int, ...], ...]

    @property
    def selection_key(self) -> tuple[float, float, float]:
        """Smallest is best: under-triage of critical levels first, then of emergencies, then -kappa.

        For comparing predictors; `train` selects epochs by validation loss plus under-triage. A predictor that calls
        everything an emergency has no under-triage: choose among those whose `critical_over_triage` is acceptable.
        """
        return (
            _or(self.critical_under_triage.value, 1.0),
            _or(self.emergency_under_triage.value, 1.0),
            -_or(self.kappa, -1.0),
        )

    def to_json(self) -> dict[str, Any]:
        """Rates with their 95 % intervals and counts."""
        rates = (
            "accuracy",
            "within_one",
            "critical_recall",
            "under_triage",
            "over_triage",
            "critical_under_triage",
            "critical_over_triage",
            "emergency_under_triage",
        )
        return {
            **{name: getattr(self, name).to_json() for name in rates},
            "kappa": self.kappa,
            "macro_f1": self.macro_f1,
            "recalls": {LEVELS[level]: rate.to_json() for level, rate in enumerate(self.recalls)},
            "confusion": [list(row) for row in self.confusion],
        }


def urgency_metrics(true: ArrayLike, predicted: ArrayLike) -> UrgencyMetrics:
    """Compares N predicted levels with N true ones.

    Args:
        true: True levels [N], N >= 1.
        predicted: Predicted levels [N].

    Raises:
        InputError: Other shapes, or numbers that are no levels.
    """
    t, p = _levels(true, "true levels"), _levels(predicted, "predicted levels")
    if t.shape != p.shape:
        raise InputError("predicted levels", len(p), f"{len(t)}, one for each true level")
    levels = range(len(LEVELS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 0 / 0 where either side is constant: None below
        kappa = float(cohen_kappa_score(t, p, labels=levels, weights="quadratic"))
    critical = t <= LAST_CRITICAL
    return UrgencyMetrics(
        accuracy=Rate.of(p == t),
        within_one=Rate.of(np.abs(p - t) <= 1),
        kappa=None if math.isnan(kappa) else kappa,
        macro_f1=float(f1_score(t, p, labels=np.unique(t), average="macro", zero_division=0)),
        recalls=tuple(Rate.of(p == level, t == level) for level in levels),
        critical_recall=Rate.of(p <= LAST_CRITICAL, critical),
        under_triage=Rate.of(p > t),
        over_triage=Rate.of(p < t),
        critical_under_triage=Rate.of(p > t, critical),
        critical_over_triage=Rate.of(p <= LAST_CRITICAL, ~critical),
        emergency_under_triage=Rate.of(p > t, t == 0),
        confusion=tuple(tuple(row) for row in confusion_matrix(t, p, labels=levels).tolist()),
    )


def _levels(values: ArrayLike, name: str) -> NDArray[np.int64]:
    levels = np.asarray(values)
    if levels.ndim != 1 or len(levels) == 0:
        raise InputError(name, levels.shape, "one dimension, at least one level")
    if not np.issubdtype(levels.dtype, np.integer) or levels.min() < 0 or levels.max() >= len(LEVELS):
        raise InputError(
            name, sorted({str(level) for level in levels}), f"integers from 0 to {len(LEVELS) - 1}"
        )
    return levels.astype(np.int64)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


@dataclass(frozen=True, slots=True)
class Bin:
    """Predictions whose probability is between `low` and `high` (included at 1).

    Attributes:
        low: Lower edge.
        high: Upper edge.
        count: Predictions in the bin.
        mean_probability: Mean predicted probability; None without predictions.
        frequency: Observed frequency; None without predictions.
    """

    low: float
    high: float
    count: int
    mean_probability: float | None
    frequency: float | None


@dataclass(frozen=True, slots=True)
class Reliability:
    """Bins and the expected calibration error: mean |frequency - probability|, weighted by count."""

    bins: tuple[Bin, ...]
    ece: float

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def reliability(
    probabilities: NDArray[np.float64], happened: NDArray[np.bool_], num_bins: int = 10
) -> Reliability:
    """Bins N predicted probabilities of events [N] that happened or not [N] into equal widths.

    Raises:
        InputError: No predictions, or a probability outside [0, 1].
    """
    if len(probabilities) == 0 or len(probabilities) != len(happened):
        raise InputError("predictions", len(probabilities), "one or more, as many as outcomes")
    if not np.all((probabilities >= 0) & (probabilities <= 1 + 1e-6)):
        raise InputError("probabilities", float(np.max(probabilities)), "numbers from 0 to 1")
    edges = np.linspace(0.0, 1.0, num_bins + 1)
    numbers = np.minimum((probabilities * num_bins).astype(np.int64), num_bins - 1)
    bins, error = [], 0.0
    for number in range(num_bins):
        inside = numbers == number
        count = int(inside.sum())
        probability = float(probabilities[inside].mean()) if count else None
        frequency = float(happened[inside].mean()) if count else None
        if probability is not None and frequency is not None:
            error += count * abs(frequency - probability) / len(probabilities)
        bins.append(Bin(float(edges[number]), float(edges[number + 1]), count, probability, frequency))
    return Reliability(tuple(bins), error)


def top_level(probabilities: NDArray[np.float64], true: NDArray[np.int64]) -> Reliability:
    """Of the highest probability [N, K]: how often that level is the true one [N]."""
    return reliability(probabilities.max(axis=1), probabilities.argmax(axis=1) == true)


def critical_level(probabilities: NDArray[np.float64], true: NDArray[np.int64]) -> Reliability:
    """Of P(level <= 1) out of [N, K]: how often the true level [N] is 0 or 1."""
    return reliability(probabilities[:, : LAST_CRITICAL + 1].sum(axis=1), true <= LAST_CRITICAL)


def write_reliability_figure(path: str | Path, diagrams: dict[str, Reliability]) -> None:
    """Writes a PNG with one panel for each diagram: frequency against probability, counts as bars."""
    figure, axes = new_figure(4.6 * len(diagrams), 4.4, columns=len(diagrams))
    for axis, (title, diagram) in zip(axes, diagrams.items(), strict=True):
        bins = [entry for entry in diagram.bins if entry.count]
        largest = max(entry.count for entry in bins)
        centers = [(entry.low + entry.high) / 2 for entry in bins]
        fractions = [0.3 * entry.count / largest for entry in bins]
        axis.bar(centers, fractions, width=0.9 / len(diagram.bins), color="0.88", label="texts (scaled)")
        axis.plot([0, 1], [0, 1], color=GRAY, linewidth=1, linestyle="--", label="ideal")
        probabilities = [entry.mean_probability for entry in bins]
        axis.plot(
            probabilities, [entry.frequency for entry in bins], color=COLORS[0], marker="o", label="predictor"
        )
        axis.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="predicted probability", ylabel="observed frequency")
        axis.set_title(f"{title}, ECE {diagram.ece:.3f}", fontsize=10)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    write_png(figure, path)
