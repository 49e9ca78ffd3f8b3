"""Metrics of ordered urgency levels, rates with exact intervals, and reliability diagrams, as JSON content.

Under-triage, urgent requests that are served too late, matters more than accuracy. Quadratic weighted kappa: Cohen 1968.
Exact intervals: Clopper and Pearson 1934. Expected calibration error with equal bins: Guo et al. 2017.
"""

from __future__ import annotations

import math
import warnings
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import beta
from sklearn.metrics import cohen_kappa_score, confusion_matrix, f1_score

from scheduler_core.prediction.urgency import LEVELS

CONFIDENCE = 0.95
# Levels 0 and 1 are critical: a person is in danger, or is waiting for the response.
LAST_CRITICAL = 1
NUM_BINS = 10


def upper_bound(num_hits: int, num_cases: int, delta: float) -> float:
    """Clopper-Pearson upper bound, exceeded by the true rate with probability at most `delta`; 1 without cases."""
    if num_hits == num_cases:
        return 1.0
    return float(beta.ppf(1 - delta, num_hits + 1, num_cases - num_hits))


def rate(hits: NDArray[np.bool_], cases: NDArray[np.bool_] | None = None) -> dict[str, Any]:
    """Rate of `hits` [N] among `cases` [N] (default: all).

    Returns:
        value (None without cases), low and high of its exact two-sided 95 % interval, hits, cases.
    """
    counted = np.ones(len(hits), dtype=bool) if cases is None else cases
    num_hits, num_cases, tail = int(np.sum(hits & counted)), int(np.sum(counted)), (1 - CONFIDENCE) / 2
    return {
        "value": num_hits / num_cases if num_cases else None,
        "low": 1 - upper_bound(num_cases - num_hits, num_cases, tail),
        "high": upper_bound(num_hits, num_cases, tail),
        "hits": num_hits,
        "cases": num_cases,
    }


def urgency_metrics(true: ArrayLike, predicted: ArrayLike) -> dict[str, Any]:
    """Compares N >= 1 predicted levels with the true ones; level 0 is the most urgent.

    Returns:
        Rates: accuracy; within_one: at most one level apart; critical_recall: levels 0-1 predicted as 0 or 1;
        under_triage, over_triage: predicted less or more urgent than true; critical_under_triage and
        emergency_under_triage: under-triage of levels 0-1 and of level 0; critical_over_triage: levels 2-4 predicted as 0
        or 1; recalls: by name of the level. kappa: quadratic weighted, None if both sides are constant. macro_f1: mean F1
        of the levels that occur. confusion: counts [K][K], true levels in rows.
    """
    t, p = np.asarray(true), np.asarray(predicted)
    levels = range(len(LEVELS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 0 / 0 where either side is constant: None below
        kappa = float(cohen_kappa_score(t, p, labels=levels, weights="quadratic"))
    critical = t <= LAST_CRITICAL
    return {
        "accuracy": rate(p == t),
        "within_one": rate(np.abs(p - t) <= 1),
        "critical_recall": rate(p <= LAST_CRITICAL, critical),
        "under_triage": rate(p > t),
        "over_triage": rate(p < t),
        "critical_under_triage": rate(p > t, critical),
        "critical_over_triage": rate(p <= LAST_CRITICAL, ~critical),
        "emergency_under_triage": rate(p > t, t == 0),
        "kappa": None if math.isnan(kappa) else kappa,
        "macro_f1": float(f1_score(t, p, labels=np.unique(t), average="macro", zero_division=0)),
        "recalls": {LEVELS[level]: rate(p == level, t == level) for level in levels},
        "confusion": confusion_matrix(t, p, labels=levels).tolist(),
    }


def reliability(probabilities: NDArray[np.float64], happened: NDArray[np.bool_]) -> dict[str, Any]:
    """Reliability of N predicted probabilities in bins of equal width; `happened` [N]: whether each event occurred.

    Returns:
        bins: low, high (included at 1), count, mean_probability and observed frequency (None without predictions);
        ece: expected calibration error, mean |frequency - probability| weighted by count.
    """
    edges = np.linspace(0.0, 1.0, NUM_BINS + 1).tolist()
    numbers = np.minimum((probabilities * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    bins, error = [], 0.0
    for number, (low, high) in enumerate(pairwise(edges)):
        in_bin = numbers == number
        means: dict[str, float | None] = {"mean_probability": None, "frequency": None}
        if count := int(in_bin.sum()):
            mean, frequency = float(probabilities[in_bin].mean()), float(happened[in_bin].mean())
            means = {"mean_probability": mean, "frequency": frequency}
            error += count * abs(frequency - mean) / len(probabilities)
        bins.append({"low": low, "high": high, "count": count, **means})
    return {"bins": bins, "ece": error}


def reliability_of_levels(
    probabilities: NDArray[np.float64], true: NDArray[np.int64]
) -> dict[str, dict[str, Any]]:
    """Reliability of the most likely level of probabilities [N, K], and of "critical", against true levels [N]."""
    critical = probabilities[:, : LAST_CRITICAL + 1].sum(axis=1)
    likeliest = probabilities.argmax(axis=1) == true
    return {
        "most likely level": reliability(probabilities.max(axis=1), likeliest),
        "critical (level 0 or 1)": reliability(critical, true <= LAST_CRITICAL),
    }
