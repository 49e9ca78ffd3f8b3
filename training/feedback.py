"""The proxy's log of finished requests: pairs of prediction and output, and two predictors compared on them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np

from data_gen.feedback_record import FeedbackRecord
from scheduler_core.errors import InputError
from training.evaluating.scores import OutputLengths, OutputScores, finite, score_outputs

Side = Literal["main", "shadow"]
#: 97.5 % quantile of the normal: a difference of means over live traffic has many terms.
Z = 1.959964


def pair(record: FeedbackRecord, side: Side) -> dict[str, Any] | None:
    """A line of `evaluate-stream`; None for a record without that prediction, or without a true length.

    Counted events are no true length; an output whose client disconnected is a truncated one.

    Args:
        record: Of the feedback log.
        side: main for the predictor, shadow for the shadow predictor.
    """
    prediction = record.main if side == "main" else record.shadow
    if prediction is None or record.counted_by == "deltas":
        return None
    tokens, max_tokens = record.output_tokens, record.max_tokens
    if tokens < 1 or record.finish_reason in ("error", "content_filter"):
        return None
    finished = record.finished
    return {
        "mu": prediction.mu,
        "sigma": prediction.sigma,
        "nu": prediction.nu,
        "output_tokens": tokens,
        "finished": max_tokens is None or tokens < max_tokens if finished is None else finished,
        "served_model": record.served_model or None,
        "max_tokens": record.max_output_tokens,
        "time": record.time,
    }


def compare(records: Iterable[tuple[int, FeedbackRecord]]) -> dict[str, Any]:
    """Scores of both predictors on the records that have both predictions.

    Assumes independent records: repeated prompts make the interval too narrow.

    Returns:
        num_records, num_compared; main and shadow with artifacts, crps_tokens, coverage, nll; and
        crps_difference_tokens: mean of main minus shadow, standard_error, low and high of its 95 % interval.

    Raises:
        InputError: No record has both predictions.
    """
    rows: list[dict[Side, Any]] = []
    names: dict[Side, set[str]] = {"main": set(), "shadow": set()}
    count = 0
    for _, record in records:
        count += 1
        sides = {side: pair(record, side) for side in names}
        if None not in sides.values():
            rows.append(sides)
            for side, side_names in names.items():
                source = record.main if side == "main" else record.shadow
                side_names.add(f"{source.artifact_id} {source.artifact_version}")  # type: ignore[union-attr]
    if not rows:
        raise InputError(
            "feedback log", f"{count} records", "at least one with both predictions and a length"
        )
    scores = {side: _scores([row[side] for row in rows]) for side in names}
    report: dict[str, Any] = {"num_records": count, "num_compared": len(rows)}
    for side, score in scores.items():
        summary = score.summary()
        numbers = {name: summary[name] for name in ("crps_tokens", "coverage", "nll")}
        report[side] = {"artifacts": sorted(names[side]), **numbers}
    difference = scores["main"].crps_tokens - scores["shadow"].crps_tokens
    mean = float(difference.mean())
    error = float(difference.std(ddof=1) / math.sqrt(len(rows))) if len(rows) > 1 else math.nan
    interval = {"mean": mean, "standard_error": error, "low": mean - Z * error, "high": mean + Z * error}
    report["crps_difference_tokens"] = {name: finite(value) for name, value in interval.items()}
    return report


def _scores(rows: list[dict[str, Any]]) -> OutputScores:
    names = ("mu", "sigma", "nu", "output_tokens", "finished", "max_tokens")
    mu, sigma, nu, lengths, finished, limits = (
        np.array([row[name] for row in rows], dtype=np.float64) for name in names
    )
    is_finished = finished > 0
    limits = np.where(np.isnan(limits), np.inf, limits)
    # An output that its client ended is scored as if max_tokens had been there.
    limits = np.where(is_finished, limits, np.minimum(limits, lengths))
    return score_outputs(mu, sigma, nu, OutputLengths(np.arange(len(rows)), lengths, is_finished, limits))
