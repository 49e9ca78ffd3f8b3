"""Summary of a log of outcomes: lengths, and scores of their predictions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np

from scheduler_core.prediction.outcome import Outcome
from scheduler_core.prediction.predictions import LengthPrediction
from training.evaluating.scores import finite, score_outcomes

Side = Literal["main", "shadow"]
#: 97.5 % quantile of the normal distribution, which approximates the mean of many differences.
Z = 1.959964


def summarize(outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """Counts of a log, scores of its predictions, and a comparison of both predictors if the log has two.

    The interval of the difference assumes independent records; repeated prompts make it too narrow.

    Returns:
        num_records; counted_by and finish_reasons: value -> records; served_models: name -> num_records, and median and P90
        of the output tokens; main and shadow: null, or num_records, artifacts, crps_tokens, coverage and nll over all
        records with that prediction and a length; num_compared: number of records with both predictions, and
        crps_difference_tokens over them (null without any): mean of main minus shadow, standard_error, and its 95 %
        interval, low and high.
    """
    counted_by, finish_reasons = Counter[str](), Counter[str]()
    lengths: dict[str, list[int]] = {}
    sides: dict[Side, list[tuple[Outcome, LengthPrediction]]] = {"main": [], "shadow": []}
    both: list[tuple[int, int]] = []
    for outcome in outcomes:
        counted_by[outcome.counted_by or "unknown"] += 1
        finish_reasons[outcome.finish_reason] += 1
        lengths.setdefault(outcome.served_model or "", []).append(outcome.output_tokens)
        if not outcome.has_length:
            continue
        predictions: dict[Side, LengthPrediction | None] = {
            "main": outcome.prediction,
            "shadow": outcome.shadow,
        }
        for side, prediction in predictions.items():
            if prediction is not None:
                sides[side].append((outcome, prediction))
        if all(predictions.values()):
            both.append((len(sides["main"]) - 1, len(sides["shadow"]) - 1))
    scores = {side: score_outcomes(rows) for side, rows in sides.items() if rows}
    report: dict[str, Any] = {
        "num_records": counted_by.total(),
        "counted_by": dict(counted_by),
        "finish_reasons": dict(finish_reasons),
        "served_models": {
            name: {
                "num_records": len(part),
                "median_tokens": float(np.median(part)),
                "p90_tokens": float(np.quantile(part, 0.9)),
            }
            for name, part in sorted(lengths.items())
        },
        "num_compared": len(both),
        "crps_difference_tokens": None,
    }
    for side, rows in sides.items():
        summary = scores[side].summary() if rows else {}
        artifacts = sorted({f"{each.artifact_id} {each.artifact_version}" for _, each in rows})
        numbers = {name: summary[name] for name in ("crps_tokens", "coverage", "nll") if summary}
        report[side] = {"num_records": len(rows), "artifacts": artifacts, **numbers} if numbers else None
    if both:
        main, shadow = np.array(both).T
        difference = scores["main"].crps_tokens[main] - scores["shadow"].crps_tokens[shadow]
        mean = float(difference.mean())
        error = float(difference.std(ddof=1) / math.sqrt(len(both))) if len(both) > 1 else math.nan
        interval = {"mean": mean, "standard_error": error, "low": mean - Z * error, "high": mean + Z * error}
        report["crps_difference_tokens"] = {name: finite(value) for name, value in interval.items()}
    return report
