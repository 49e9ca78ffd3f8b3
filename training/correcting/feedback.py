"""The proxy's log of finished requests: pairs of prediction and output, and a summary."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np

from data_gen.feedback_record import FeedbackRecord
from scheduler_core.lengths import LogT
from scheduler_core.lengths.quantiles import LEVELS
from training.evaluating.scores import OutputLengths, OutputScores, finite, score_outputs

Side = Literal["main", "shadow"]
#: 97.5 % quantile of the normal distribution, which approximates the mean of many differences.
Z = 1.959964


def pair(record: FeedbackRecord, side: Side) -> dict[str, Any] | None:
    """Input line of `evaluate-stream`; None for a record without that prediction, without a length, or with one
    that the client determined (ignore_eos, min_tokens).

    An output whose client disconnected counts as truncated.
    """
    prediction = record.main if side == "main" else record.shadow
    if prediction is None or record.forced_length:
        return None
    tokens, max_tokens = record.output_tokens, record.max_tokens
    if tokens < 1 or record.finish_reason in ("error", "content_filter"):
        return None
    finished = record.finished
    return {
        "mu": prediction.mu,
        "sigma": prediction.sigma,
        "nu": prediction.nu,
        "quantiles": list(prediction.quantiles),
        "output_tokens": tokens,
        "finished": max_tokens is None or tokens < max_tokens if finished is None else finished,
        "served_model": record.served_model or None,
        "max_tokens": record.max_output_tokens,
        "prompt_tokens": record.prompt_tokens,
        "time": record.time,
    }


def summarize(records: Iterable[tuple[int, FeedbackRecord]]) -> dict[str, Any]:
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
    rows: dict[Side, list[dict[str, Any]]] = {"main": [], "shadow": []}
    names: dict[Side, set[str]] = {"main": set(), "shadow": set()}
    both: list[tuple[int, int]] = []
    for _, record in records:
        counted_by[record.counted_by] += 1
        finish_reasons[record.finish_reason] += 1
        lengths.setdefault(record.served_model or "", []).append(record.output_tokens)
        is_scored = 0
        for side in rows:
            prediction = record.main if side == "main" else record.shadow
            if prediction is not None and (row := pair(record, side)) is not None:
                rows[side].append(row)
                names[side].add(f"{prediction.artifact_id} {prediction.artifact_version}")
                is_scored += 1
        if is_scored == len(rows):
            both.append((len(rows["main"]) - 1, len(rows["shadow"]) - 1))
    scores = {side: _scores(part) for side, part in rows.items() if part}
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
    for side in rows:
        summary = scores[side].summary() if side in scores else {}
        numbers = {name: summary[name] for name in ("crps_tokens", "coverage", "nll") if summary}
        report[side] = (
            {"num_records": len(rows[side]), "artifacts": sorted(names[side]), **numbers} if numbers else None
        )
    if both:
        main, shadow = np.array(both).T
        difference = scores["main"].crps_tokens[main] - scores["shadow"].crps_tokens[shadow]
        mean = float(difference.mean())
        error = float(difference.std(ddof=1) / math.sqrt(len(both))) if len(both) > 1 else math.nan
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
    # If the client disconnected, the length received so far is used as max_tokens.
    limits = np.where(is_finished, limits, np.minimum(limits, lengths))
    outputs = OutputLengths(np.arange(len(rows)), lengths, is_finished, limits)
    quantiles = None
    if any(row["quantiles"] for row in rows):
        parameters = zip(rows, mu, sigma, nu, strict=True)
        quantiles = np.array([row["quantiles"] or LogT(*each).logppf(LEVELS) for row, *each in parameters])
    return score_outputs(mu, sigma, nu, outputs, quantiles)
