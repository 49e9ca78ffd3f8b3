"""One predictor judged on rows: metrics over all of them, and by served model, data set and category."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from training.evaluating.metrics import kendall_tau, nothing, ranking, regression
from training.evaluating.predictors import Prediction
from training.evaluating.rows import EvaluationRows
from training.evaluating.scoring import (
    COVERAGE_LEVELS,
    NO_SUMMARY,
    AnswerScores,
    percent,
    score_answers,
)

FloatArray = NDArray[np.float64]
#: Columns by which a report is broken down, and how many values of one are shown at most.
BREAKDOWNS = ("model", "dataset", "category")
MAX_BREAKDOWN = 40
_NO_REGRESSION = nothing(("r2", "mae", "rmse", "mape"))


@dataclass(frozen=True, slots=True)
class Judged:
    """A prediction with the scores of all answers under it.

    Attributes:
        rows: What it is judged on.
        prediction: Of each row.
        bucket_edges: Of the bucket head, in tokens.
        scores: Of each answer; None without a distribution.
    """

    rows: EvaluationRows
    prediction: Prediction
    bucket_edges: Sequence[float]
    scores: AnswerScores | None

    @classmethod
    def of(cls, rows: EvaluationRows, prediction: Prediction, bucket_edges: Sequence[float] = ()) -> Judged:
        """Scores all answers once; every breakdown is a mean over some of them."""
        scores = None
        if prediction.mu is not None and prediction.sigma is not None:
            scores = score_answers(prediction.mu, prediction.sigma, prediction.nu, rows.answers)
        return cls(rows, prediction, bucket_edges, scores)

    def metrics(self, chosen: NDArray[np.intp] | None = None) -> dict[str, Any]:
        """Metrics over some rows [C], or all of them; see `docs/evaluation-format.md`.

        Rows whose answers were all cut have no fit to compare parameters with; their answers still count for the
        distribution's metrics.
        """
        rows, prediction = self.rows, self.prediction
        at = np.arange(len(rows)) if chosen is None else chosen
        inside = np.zeros(len(rows), dtype=bool)
        inside[at] = True
        compared = rows.compared[inside[rows.compared]]
        of_answer = inside[rows.answers.owner]
        ordered_by, score = prediction.ordering()
        summary = dict(NO_SUMMARY) if self.scores is None else self.scores.summary(of_answer)
        return {
            "num_prompts": len(at),
            "num_samples": int(of_answer.sum()),
            "num_censored": int((~rows.answers.finished[of_answer]).sum()),
            "num_fits_compared": len(compared),
            "ordered_by": ordered_by,
            **self._parameters(compared),
            **_rankings(rows, score, at, compared),
            "point": self._point_errors(at),
        } | summary

    def _parameters(self, compared: NDArray[np.intp]) -> dict[str, Any]:
        fits, prediction = self.rows.fits, self.prediction
        mu, sigma = prediction.mu, prediction.sigma
        # A fitted sigma is the spread of answers to one prompt: so is sigma_within, where it is predicted.
        if prediction.sigma_within is not None:
            sigma = prediction.sigma_within
        if mu is None and prediction.regression_tokens is not None:
            # A single number of tokens is compared as what it stands for: the typical length.
            mu = np.log(np.maximum(prediction.regression_tokens, 1.0))
        known_mu = None if mu is None else regression(fits.mu[compared], mu[compared])
        if sigma is None:
            return {"mu": known_mu or _NO_REGRESSION, "sigma": _NO_REGRESSION, "sigma_log1p": _NO_REGRESSION}
        return {
            "mu": known_mu or _NO_REGRESSION,
            "sigma": regression(fits.sigma[compared], sigma[compared]),
            "sigma_log1p": regression(np.log1p(fits.sigma[compared]), np.log1p(sigma[compared])),
        }

    def _point_errors(self, at: NDArray[np.intp]) -> dict[str, float | None]:
        """Errors of one number of tokens, and hits of the right bucket; None where there is none."""
        prediction = self.prediction
        tokens = prediction.regression_tokens
        if prediction.mu is not None:
            with np.errstate(over="ignore"):
                tokens = np.exp(prediction.mu)
        found: dict[str, float | None] = {"mae_tokens": None, "bucket_accuracy": None}
        if tokens is not None:
            caps = self.rows.answers.caps[at]
            error = np.minimum(tokens[at], caps) - self.rows.mean_lengths()[at]
            found["mae_tokens"] = float(np.abs(error).mean())
        if prediction.bucket is not None and len(self.bucket_edges):
            inside = np.zeros(len(self.rows), dtype=bool)
            inside[at] = True
            of_answer = inside[self.rows.answers.owner]
            bucket = np.searchsorted(self.bucket_edges, self.rows.answers.lengths[of_answer], side="right")
            guess = prediction.bucket.argmax(axis=1)[self.rows.answers.owner[of_answer]]
            found["bucket_accuracy"] = float((guess == bucket).mean())
        return found

    def by(self, column: str) -> dict[str, dict[str, Any]] | None:
        """Metrics for each value of a column; None where the data do not have 2 to 40 of them."""
        parts = parts_of(self.rows, column)
        return None if parts is None else {name: self.metrics(at) for name, at in parts.items()}

    def coverage_by_model_and_dataset(self) -> dict[str, dict[str, Any]]:
        """Served model -> data set -> coverage at P50, P90 and P99 and number of answers."""
        models, datasets = self.rows.kinds("model"), self.rows.kinds("dataset")
        if self.scores is None or models is None or datasets is None:
            return {}
        found: dict[str, dict[str, Any]] = {}
        pairs = np.array(models, dtype=object), np.array(datasets, dtype=object)
        for model, dataset in sorted(set(zip(models, datasets, strict=True))):
            of_answer = ((pairs[0] == model) & (pairs[1] == dataset))[self.rows.answers.owner]
            found.setdefault(model, {})[dataset] = {
                "num_samples": int(of_answer.sum()),
                **{percent(level): self.scores.coverage(level, of_answer) for level in COVERAGE_LEVELS},
            }
        return found


def parts_of(rows: EvaluationRows, column: str) -> dict[str, NDArray[np.intp]] | None:
    """Rows of each value of a column; None where the data do not have 2 to 40 of them."""
    values = rows.kinds(column)
    names = sorted(set(values or []))
    if values is None or not 1 < len(names) <= MAX_BREAKDOWN:
        return None
    of_row = np.array(values, dtype=object)
    return {name: np.flatnonzero(of_row == name) for name in names}


def largest_shifts(parts: dict[str, dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """For each level the part whose coverage is furthest from nominal.

    Args:
        parts: Column -> value -> metrics.

    Returns:
        Column -> level -> {"of", "shift" = estimate - nominal, "num_samples"}; None where nothing is known.
    """
    found: dict[str, Any] = {}
    for column, values in parts.items():
        found[column] = {}
        for level in COVERAGE_LEVELS:
            known = [
                (metrics["coverage"][percent(level)]["estimate"] - level, name, metrics["num_samples"])
                for name, metrics in values.items()
                if metrics["coverage"].get(percent(level), {}).get("estimate") is not None
            ]
            worst = max(known, key=lambda entry: abs(entry[0]), default=None)
            found[column][percent(level)] = (
                None if worst is None else {"of": worst[1], "shift": worst[0], "num_samples": worst[2]}
            )
    return found


def _rankings(
    rows: EvaluationRows, score: FloatArray, at: NDArray[np.intp], compared: NDArray[np.intp]
) -> dict[str, Any]:
    by_fit = ranking(score[compared], rows.fits.mu[compared])
    by_answer = ranking(score[at], rows.first_lengths()[at])
    return {
        "kendall_tau": {
            "median_vs_fitted_mu": by_fit["tau"],
            "median_vs_mean_served_length": kendall_tau(score[at], rows.mean_lengths()[at]),
            "median_vs_one_answer": by_answer["tau"],
        },
        "pair_accuracy": {
            "fitted_mu": by_fit["pair_accuracy"],
            "one_answer": by_answer["pair_accuracy"],
        },
    }
