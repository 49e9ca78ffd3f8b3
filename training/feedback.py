"""The proxy's log of finished requests: pairs of prediction and output, and two predictors compared on them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from data_gen.feedback_record import FeedbackRecord
from scheduler_core.errors import InputError
from training.evaluating.scores import OutputLengths, OutputScores, score_outputs

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


def pairs(records: Iterable[tuple[int, FeedbackRecord]], side: Side) -> Iterator[dict[str, Any]]:
    """The pairs of all records with one."""
    for _, record in records:
        values = pair(record, side)
        if values is not None:
            yield values


def compare(records: Iterable[tuple[int, FeedbackRecord]]) -> dict[str, Any]:
    """Scores of both predictors on the records that have both predictions.

    Assumes independent records: repeated prompts make the interval too narrow.

    Returns:
        num_records, num_compared; main and shadow with artifact, crps_tokens, coverage, nll; and
        crps_difference_tokens: mean of main minus shadow, standard_error, low and high of its 95 % interval.

    Raises:
        InputError: No record has both predictions.
    """
    rows: dict[str, list[dict[str, Any]]] = {"main": [], "shadow": []}
    names: dict[str, set[str]] = {"main": set(), "shadow": set()}
    count = 0
    for _, record in records:
        count += 1
        main, shadow = pair(record, "main"), pair(record, "shadow")
        if main is None or shadow is None:
            continue
        for side, values, source in (("main", main, record.main), ("shadow", shadow, record.shadow)):
            assert source is not None
            rows[side].append(values)
            names[side].add(f"{source.artifact_id} {source.artifact_version}")
    if not rows["main"]:
        raise InputError(
            "feedback log", f"{count} records", "at least one with both predictions and a length"
        )
    scores = {side: _scores(values) for side, values in rows.items()}
    report: dict[str, Any] = {"num_records": count, "num_compared": len(rows["main"])}
    for side, score in scores.items():
        summary = score.summary()
        report[side] = {
            "artifacts": sorted(names[side]),
            **{name: summary[name] for name in ("crps_tokens", "coverage", "nll")},
        }
    report["crps_difference_tokens"] = _difference(scores["main"].crps_tokens - scores["shadow"].crps_tokens)
    return report


def _scores(rows: list[dict[str, Any]]) -> OutputScores:
    def column(name: str) -> NDArray[np.float64]:
        return np.array([row[name] for row in rows], dtype=np.float64)

    limits = np.array([math.inf if row["max_tokens"] is None else row["max_tokens"] for row in rows])
    finished = np.array([row["finished"] for row in rows], dtype=bool)
    lengths = column("output_tokens")
    # An output that its client ended is scored as if max_tokens had been there.
    limits = np.where(finished, limits, np.minimum(limits, lengths))
    outputs = OutputLengths(np.arange(len(rows)), lengths, finished, limits)
    return score_outputs(column("mu"), column("sigma"), column("nu"), outputs)


def _difference(values: NDArray[np.float64]) -> dict[str, float | None]:
    mean = float(values.mean())
    if len(values) < 2:
        return {"mean": mean, "standard_error": None, "low": None, "high": None}
    error = float(values.std(ddof=1) / math.sqrt(len(values)))
    return {"mean": mean, "standard_error": error, "low": mean - Z * error, "high": mean + Z * error}
