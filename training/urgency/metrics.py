"""Metrics of ordered urgency levels, as triage is judged: not by accuracy alone, but by who is served too late.

Source: shared semantic-scheduling notes, "Safety metric"; quadratic weighted kappa: Cohen 1968.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scheduler_core.errors import InputError
from scheduler_core.urgency import LEVELS
from training.urgency.rates import Rate

# Levels 0 and 1 are critical: a person is in danger, or waits at this moment.
LAST_CRITICAL = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class UrgencyMetrics:
    """How predicted levels compare with the true ones; level 0 is the most urgent.

    Attributes:
        accuracy: Predicted = true.
        within_one: At most one level apart.
        kappa: Quadratic weighted kappa: 1 = perfect, 0 = as by chance; None where either side is constant.
        macro_f1: Mean F1 of the levels that occur among the true ones.
        recalls: Of each level: share of its texts predicted as that level.
        critical_recall: Of texts of levels 0-1: share predicted as 0 or 1.
        under_triage: Share predicted less urgent than true.
        over_triage: Share predicted more urgent than true.
        critical_under_triage: Of texts of levels 0-1: share predicted less urgent than true.
        critical_over_triage: Of texts of levels 2-4: share predicted as 0 or 1, false alarms.
        emergency_under_triage: Of texts of level 0: share predicted as anything else.
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

        Checkpoints are selected by it, not by accuracy. A predictor that calls everything an emergency has no
        under-triage: choose among those whose `critical_over_triage` is acceptable.
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
    num_levels = len(LEVELS)
    confusion = np.zeros((num_levels, num_levels), dtype=np.int64)
    np.add.at(confusion, (t, p), 1)
    critical = t <= LAST_CRITICAL
    return UrgencyMetrics(
        accuracy=Rate.of(p == t),
        within_one=Rate.of(np.abs(p - t) <= 1),
        kappa=quadratic_kappa(confusion),
        macro_f1=_macro_f1(confusion),
        recalls=tuple(Rate.of(p == level, t == level) for level in range(num_levels)),
        critical_recall=Rate.of(p <= LAST_CRITICAL, critical),
        under_triage=Rate.of(p > t),
        over_triage=Rate.of(p < t),
        critical_under_triage=Rate.of(p > t, critical),
        critical_over_triage=Rate.of(p <= LAST_CRITICAL, ~critical),
        emergency_under_triage=Rate.of(p > t, t == 0),
        confusion=tuple(tuple(row) for row in confusion.tolist()),
    )


def quadratic_kappa(confusion: NDArray[np.int64]) -> float | None:
    """1 - (observed / expected by chance) squared disagreement of a confusion matrix [K, K]; None where 0 / 0."""
    counts = confusion.astype(np.float64)
    levels = np.arange(len(counts))
    disagreement = (levels[:, None] - levels[None, :]) ** 2
    by_chance = np.outer(counts.sum(axis=1), counts.sum(axis=0)) / counts.sum()
    expected = float(np.sum(disagreement * by_chance))
    return None if expected == 0 else 1 - float(np.sum(disagreement * counts)) / expected


def _macro_f1(confusion: NDArray[np.int64]) -> float:
    hits = np.diag(confusion).astype(np.float64)
    true, predicted = confusion.sum(axis=1), confusion.sum(axis=0)
    there = true > 0
    return float(np.mean(2 * hits[there] / (true + predicted)[there]))


def _levels(values: ArrayLike, name: str) -> NDArray[np.int64]:
    levels = np.asarray(values)
    if levels.ndim != 1 or len(levels) == 0:
        raise InputError(name, levels.shape, "one dimension, at least one level")
    if not np.issubdtype(levels.dtype, np.integer) or levels.min() < 0 or levels.max() >= len(LEVELS):
        raise InputError(
            name, sorted({str(level) for level in levels}), f"whole numbers, 0 to {len(LEVELS) - 1}"
        )
    return levels.astype(np.int64)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
