"""Two predictors on the same answers: CRPS, coverage and the difference with its confidence interval."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from data_gen.feedback_record import FeedbackRecord
from scheduler_core.errors import InputError
from training.evaluating.scoring import Answers, AnswerScores, score_answers
from training.feedback.pairs import pair

#: 97.5 % quantile of the normal: a difference of means over live traffic has many terms.
Z = 1.959964


def compare(records: Iterable[tuple[int, FeedbackRecord]]) -> dict[str, Any]:
    """Scores of both predictors on the records that have both predictions.

    Records of one served model are taken for independent: repeated prompts make the interval narrower than it should be.

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
        for side, found, source in (("main", main, record.main), ("shadow", shadow, record.shadow)):
            assert source is not None
            rows[side].append(found)
            names[side].add(f"{source.artifact_id} {source.artifact_version}")
    if not rows["main"]:
        raise InputError(
            "feedback log", f"{count} records", "at least one with both predictions and a length"
        )
    scores = {side: _scores(found) for side, found in rows.items()}
    report: dict[str, Any] = {"num_records": count, "num_compared": len(rows["main"])}
    for side, score in scores.items():
        summary = score.summary()
        report[side] = {
            "artifacts": sorted(names[side]),
            **{name: summary[name] for name in ("crps_tokens", "coverage", "nll")},
        }
    report["crps_difference_tokens"] = _difference(scores["main"].crps_tokens - scores["shadow"].crps_tokens)
    return report


def _scores(rows: list[dict[str, Any]]) -> AnswerScores:
    def column(name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.array([row[name] for row in rows], dtype=np.float64)

    caps = np.array([math.inf if row["max_tokens"] is None else row["max_tokens"] for row in rows])
    finished = np.array([row["finished"] for row in rows], dtype=bool)
    lengths = column("output_tokens")
    # Cut by its client and not by a cap: to be judged up to there, as if the cap had been there.
    caps = np.where(finished, caps, np.minimum(caps, lengths))
    answers = Answers(np.arange(len(rows)), lengths, finished, caps)
    return score_answers(column("mu"), column("sigma"), column("nu"), answers)


def _difference(values: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, float | None]:
    mean = float(values.mean())
    if len(values) < 2:
        return {"mean": mean, "standard_error": None, "low": None, "high": None}
    error = float(values.std(ddof=1) / math.sqrt(len(values)))
    return {"mean": mean, "standard_error": error, "low": mean - Z * error, "high": mean + Z * error}
