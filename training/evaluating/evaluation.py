"""Metrics of predictors on the same rows: over all of them, and by served model, data set and category."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from training.evaluating.baselines import Baselines
from training.evaluating.ceiling import ceilings
from training.evaluating.predictors import PredictedRows
from training.evaluating.rows import EvaluationRows
from training.evaluating.scores import (
    COVERAGE_LEVELS,
    NO_SUMMARY,
    OutputScores,
    kendall_tau,
    percent,
    ranking,
    regression,
    score_outputs,
)

FloatArray = NDArray[np.float64]
SCHEMA = "evaluation/3"
#: Columns of the breakdowns, and the largest number of values of one.
BREAKDOWNS = ("model", "dataset", "category")
MAX_BREAKDOWN = 40
_NO_REGRESSION: dict[str, float | None] = dict.fromkeys(("r2", "mae", "rmse", "mape"))


@dataclass(frozen=True, slots=True)
class ScoredPredictor:
    """Predictions with the scores of all outputs under them.

    Attributes:
        rows: Rows of the evaluation.
        prediction: Of each row.
        bucket_edges: Of the bucket head, in tokens.
        scores: Of each output; None without a distribution.
    """

    rows: EvaluationRows
    prediction: PredictedRows
    bucket_edges: Sequence[float]
    scores: OutputScores | None

    @classmethod
    def of(
        cls, rows: EvaluationRows, prediction: PredictedRows, bucket_edges: Sequence[float] = ()
    ) -> ScoredPredictor:
        """Scores all outputs once; every breakdown is a mean over some of them."""
        scores = None
        if prediction.mu is not None and prediction.sigma is not None:
            scores = score_outputs(prediction.mu, prediction.sigma, prediction.nu, rows.outputs)
        return cls(rows, prediction, bucket_edges, scores)

    def metrics(self, chosen: NDArray[np.intp] | None = None) -> dict[str, Any]:
        """Metrics over some rows [C], by default all; see `docs/evaluation-format.md`.

        Rows whose outputs were all truncated have no fit to compare parameters with; their outputs still count for
        the metrics of the distribution.
        """
        rows, prediction = self.rows, self.prediction
        at = np.arange(len(rows)) if chosen is None else chosen
        inside = np.zeros(len(rows), dtype=bool)
        inside[at] = True
        compared = rows.compared[inside[rows.compared]]
        of_output = inside[rows.outputs.owner]
        ordered_by, score = prediction.ordering()
        summary = dict(NO_SUMMARY) if self.scores is None else self.scores.summary(of_output)
        return {
            "num_prompts": len(at),
            "num_samples": int(of_output.sum()),
            "num_censored": int((~rows.outputs.finished[of_output]).sum()),
            "num_fits_compared": len(compared),
            "ordered_by": ordered_by,
            **self._parameters(compared),
            **_rankings(rows, score, at, compared),
            "point": self._point_errors(at),
        } | summary

    def _parameters(self, compared: NDArray[np.intp]) -> dict[str, Any]:
        fits, prediction = self.rows.fits, self.prediction
        mu, sigma = prediction.mu, prediction.sigma
        # A fitted sigma is the scale of the outputs of one prompt, and so is sigma_within.
        if prediction.sigma_within is not None:
            sigma = prediction.sigma_within
        if mu is None and prediction.regression_tokens is not None:
            # A single number of tokens stands for the median.
            mu = np.log(np.maximum(prediction.regression_tokens, 1.0))
        mu_errors = None if mu is None else regression(fits.mu[compared], mu[compared])
        if sigma is None:
            return {"mu": mu_errors or _NO_REGRESSION, "sigma": _NO_REGRESSION, "sigma_log1p": _NO_REGRESSION}
        return {
            "mu": mu_errors or _NO_REGRESSION,
            "sigma": regression(fits.sigma[compared], sigma[compared]),
            "sigma_log1p": regression(np.log1p(fits.sigma[compared]), np.log1p(sigma[compared])),
        }

    def _point_errors(self, at: NDArray[np.intp]) -> dict[str, float | None]:
        """Error of the point prediction in tokens, and accuracy of the bucket; None without such a head."""
        prediction = self.prediction
        tokens = prediction.regression_tokens
        if prediction.mu is not None:
            with np.errstate(over="ignore"):
                tokens = np.exp(prediction.mu)
        errors: dict[str, float | None] = {"mae_tokens": None, "bucket_accuracy": None}
        if tokens is not None:
            limits = self.rows.outputs.max_tokens[at]
            error = np.minimum(tokens[at], limits) - self.rows.mean_lengths()[at]
            errors["mae_tokens"] = float(np.abs(error).mean())
        if prediction.bucket is not None and len(self.bucket_edges):
            inside = np.zeros(len(self.rows), dtype=bool)
            inside[at] = True
            of_output = inside[self.rows.outputs.owner]
            bucket = np.searchsorted(self.bucket_edges, self.rows.outputs.lengths[of_output], side="right")
            guess = prediction.bucket.argmax(axis=1)[self.rows.outputs.owner[of_output]]
            errors["bucket_accuracy"] = float((guess == bucket).mean())
        return errors

    def by(self, column: str) -> dict[str, dict[str, Any]] | None:
        """Metrics for each value of a column; None where the data do not have 2 to 40 of them."""
        parts = parts_of(self.rows, column)
        return None if parts is None else {name: self.metrics(at) for name, at in parts.items()}

    def coverage_by_model_and_dataset(self) -> dict[str, dict[str, Any]]:
        """Served model -> data set -> coverage at P50, P90 and P99 and number of outputs."""
        models, datasets = self.rows.kinds("model"), self.rows.kinds("dataset")
        if self.scores is None or models is None or datasets is None:
            return {}
        table: dict[str, dict[str, Any]] = {}
        pairs = np.array(models, dtype=object), np.array(datasets, dtype=object)
        for model, dataset in sorted(set(zip(models, datasets, strict=True))):
            of_output = ((pairs[0] == model) & (pairs[1] == dataset))[self.rows.outputs.owner]
            table.setdefault(model, {})[dataset] = {
                "num_samples": int(of_output.sum()),
                **{percent(level): self.scores.coverage(level, of_output) for level in COVERAGE_LEVELS},
            }
        return table


def parts_of(rows: EvaluationRows, column: str) -> dict[str, NDArray[np.intp]] | None:
    """Rows of each value of a column; None where the data do not have 2 to 40 of them."""
    values = rows.kinds(column)
    names = sorted(set(values or []))
    if values is None or not 1 < len(names) <= MAX_BREAKDOWN:
        return None
    of_row = np.array(values, dtype=object)
    return {name: np.flatnonzero(of_row == name) for name in names}


def largest_shifts(parts: dict[str, dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """The part whose coverage is furthest from nominal, for each level.

    Args:
        parts: Column -> value -> metrics.

    Returns:
        Column -> level -> {"of", "shift" = estimate - nominal, "num_samples"}; None without an estimate.
    """
    shifts: dict[str, Any] = {}
    for column, values in parts.items():
        shifts[column] = {}
        for level in COVERAGE_LEVELS:
            estimates = [
                (metrics["coverage"][percent(level)]["estimate"] - level, name, metrics["num_samples"])
                for name, metrics in values.items()
                if metrics["coverage"].get(percent(level), {}).get("estimate") is not None
            ]
            worst = max(estimates, key=lambda entry: abs(entry[0]), default=None)
            shifts[column][percent(level)] = (
                None if worst is None else {"of": worst[1], "shift": worst[0], "num_samples": worst[2]}
            )
    return shifts


def _rankings(
    rows: EvaluationRows, score: FloatArray, at: NDArray[np.intp], compared: NDArray[np.intp]
) -> dict[str, Any]:
    by_fit = ranking(score[compared], rows.fits.mu[compared])
    by_output = ranking(score[at], rows.first_lengths()[at])
    return {
        "kendall_tau": {
            "median_vs_fitted_mu": by_fit["tau"],
            "median_vs_mean_served_length": kendall_tau(score[at], rows.mean_lengths()[at]),
            "median_vs_one_output": by_output["tau"],
        },
        "pair_accuracy": {
            "fitted_mu": by_fit["pair_accuracy"],
            "one_output": by_output["pair_accuracy"],
        },
    }


@dataclass(frozen=True, slots=True)
class Candidate:
    """A predictor of a comparison: its name in tables, its description for the report, its predictions."""

    name: str
    description: Mapping[str, Any]
    prediction: PredictedRows
    bucket_edges: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A finished comparison.

    Attributes:
        content: For JSON.
        scored: The main predictor.
    """

    content: dict[str, Any]
    scored: ScoredPredictor


def compare(
    rows: EvaluationRows,
    main: Candidate,
    baselines: Baselines | None = None,
    others: Sequence[Candidate] = (),
    *,
    ceiling_seed: int | None = None,
) -> Evaluation:
    """Scores all predictors on the same rows.

    Args:
        rows: Prompts, outputs and fits.
        main: The predictor to evaluate, broken down by served model, data set and category.
        baselines: Of its training data.
        others: Other predictors.
        ceiling_seed: Of the noise ceiling; None: no ceiling.
    """
    scored = ScoredPredictor.of(rows, main.prediction, main.bucket_edges)
    parts = {column: part for column in BREAKDOWNS if (part := scored.by(column)) is not None}
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "model": scored.metrics(),
        "baselines": {},
        "compared": {},
        "ceiling": {},
        **{f"by_{column}": part for column, part in parts.items()},
        "coverage_by_model_and_dataset": scored.coverage_by_model_and_dataset(),
        "largest_shift": largest_shifts(
            {column: part for column, part in parts.items() if column != "category"}
        ),
    }
    table: dict[str, ScoredPredictor] = {}
    for name, prediction in _baseline_predictions(rows, baselines).items():
        table[name] = ScoredPredictor.of(rows, prediction)
        content["baselines"][name] = table[name].metrics()
    for candidate in others:
        table[candidate.name] = ScoredPredictor.of(rows, candidate.prediction, candidate.bucket_edges)
        content["compared"][candidate.name] = {
            "predictor": dict(candidate.description),
            **table[candidate.name].metrics(),
        }
    if ceiling_seed is not None:
        bounds, info = ceilings(rows, ceiling_seed)
        content["ceiling"] = info | {
            name: ScoredPredictor.of(bound.rows, bound.prediction).metrics() for name, bound in bounds.items()
        }
    content["others_by_dataset"] = {
        name: part for name, other in table.items() if (part := other.by("dataset")) is not None
    }
    return Evaluation(content, scored)


def _baseline_predictions(rows: EvaluationRows, baselines: Baselines | None) -> dict[str, PredictedRows]:
    if baselines is None:
        return {}
    parameters = baselines.predict(rows.prompts, rows.served_models)
    return {name: PredictedRows(mu, sigma, baselines.nu) for name, (mu, sigma) in parameters.items()}
