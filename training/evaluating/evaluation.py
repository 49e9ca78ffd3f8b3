"""Metrics of several predictors on the same rows: overall, and by served model, data set and category."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from predictors.heads import Predicted
from scheduler_core.statistics import kendall_tau
from training.evaluating.rows import EvaluationRows
from training.evaluating.scores import (
    NO_SUMMARY,
    OutputScores,
    ranking,
    regression,
    score_outputs,
)
from training.fitting.baselines import Baselines
from training.fitting.estimate import MIN_SAMPLES
from training.fitting.fits import NOT_FITTED, FitOptions, FittedGroups, fit_groups
from training.fitting.samples import GroupedLengths

FloatArray = NDArray[np.float64]
SCHEMA = "evaluation/4"
#: Columns of the breakdowns, and the maximum number of distinct values of such a column.
BREAKDOWNS = ("model", "dataset", "category")
MAX_BREAKDOWN = 40
#: Minimum number of rows for R2 and rankings.
MIN_COMPARED = 20


@dataclass(frozen=True, slots=True)
class ScoredPredictor:
    """Predictions of the rows and the scores of all outputs; scores are None if no distribution is predicted."""

    rows: EvaluationRows
    prediction: Predicted
    bucket_edges: Sequence[float]
    scores: OutputScores | None

    @classmethod
    def of(
        cls, rows: EvaluationRows, prediction: Predicted, bucket_edges: Sequence[float] = ()
    ) -> ScoredPredictor:
        """Scores all outputs once; breakdowns average over subsets of the scores."""
        scores = None
        if prediction.mu is not None and prediction.sigma is not None and prediction.nu is not None:
            parameters = (prediction.mu, prediction.sigma, prediction.nu)
            scores = score_outputs(*parameters, rows.outputs, prediction.quantiles)
        return cls(rows, prediction, bucket_edges, scores)

    def metrics(self, chosen: NDArray[np.intp] | None = None) -> dict[str, Any]:
        """Metrics over selected rows [C], by default all; see `docs/evaluation-format.md`.

        Rows whose outputs were all truncated have no fit to compare parameters with, but their outputs are included in
        the metrics of the distribution.
        """
        rows, prediction = self.rows, self.prediction
        at = np.arange(len(rows)) if chosen is None else chosen
        is_selected = np.zeros(len(rows), dtype=bool)
        is_selected[at] = True
        compared = rows.compared[is_selected[rows.compared]]
        of_output = is_selected[rows.outputs.owner]
        ordered_by, score = prediction.ordering()
        summary = dict(NO_SUMMARY) if self.scores is None else self.scores.summary(of_output)
        return {
            "num_prompts": len(at),
            "num_samples": int(of_output.sum()),
            "num_censored": int((~rows.outputs.finished[of_output]).sum()),
            "num_fits_compared": len(compared),
            "ordered_by": ordered_by,
            **self._parameters(_enough(compared)),
            **_rankings(rows, score, _enough(at), _enough(compared)),
            "point": self._point_errors(at, of_output),
        } | summary

    def _parameters(self, compared: NDArray[np.intp]) -> dict[str, Any]:
        fits, prediction = self.rows.fits, self.prediction
        mu, sigma = prediction.mu, prediction.sigma
        # A fitted sigma is the scale of the outputs of one prompt, and so is sigma_within.
        if prediction.sigma_within is not None:
            sigma = prediction.sigma_within
        if mu is None and prediction.regression_tokens is not None:
            # A point prediction in tokens is taken as the median.
            mu = np.log(np.maximum(prediction.regression_tokens, 1.0))
        pairs = {"mu": (fits.mu, mu), "sigma": (fits.sigma, sigma)}
        pairs["sigma_log1p"] = np.log1p(fits.sigma), None if sigma is None else np.log1p(sigma)
        return {
            name: regression(true[compared], None if predicted is None else predicted[compared])
            for name, (true, predicted) in pairs.items()
        }

    def _point_errors(self, at: NDArray[np.intp], of_output: NDArray[np.bool_]) -> dict[str, float | None]:
        """Error of the point prediction in tokens, and accuracy of the predicted bucket; None without such a head."""
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
            bucket = np.searchsorted(self.bucket_edges, self.rows.outputs.lengths[of_output], side="right")
            guess = prediction.bucket.argmax(axis=1)[self.rows.outputs.owner[of_output]]
            errors["bucket_accuracy"] = float((guess == bucket).mean())
        return errors

    def by(self, column: str) -> dict[str, dict[str, Any]] | None:
        """Metrics for each value of a column; None unless it has 2 to MAX_BREAKDOWN distinct values."""
        values = np.array(self.rows.fits.groups.column(column) or [], dtype=str)
        names = np.unique(values)
        if not 1 < len(names) <= MAX_BREAKDOWN:
            return None
        return {str(name): self.metrics(np.flatnonzero(values == name)) for name in names}


def _enough(rows: NDArray[np.intp]) -> NDArray[np.intp]:
    """The rows, or an empty array if there are fewer than MIN_COMPARED."""
    return rows if len(rows) >= MIN_COMPARED else rows[:0]


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
        "pair_accuracy": {"fitted_mu": by_fit["pair_accuracy"], "one_output": by_output["pair_accuracy"]},
    }


#: Rows to score on, different from those of the data, and predictions for them.
Bound = tuple[EvaluationRows, Predicted]


def halves(rows: EvaluationRows, rng: np.random.Generator) -> tuple[FittedGroups, FittedGroups]:
    """Fits to two random halves of each prompt's outputs; prompts without a fit to both halves are dropped."""
    groups = rows.fits.groups.take(np.flatnonzero(rows.fits.groups.counts >= 2 * MIN_SAMPLES))
    owner = np.repeat(np.arange(len(groups)), groups.counts)
    order = np.lexsort((rng.random(len(owner)), owner))
    rank = np.arange(len(owner)) - groups.offsets[:-1][owner]
    in_first = rank < (groups.counts // 2)[owner]
    options = FitOptions(nu=rows.fits.nu)
    first, second = (
        fit_groups(_chosen(groups, order[part], owner[part]), options) for part in (in_first, ~in_first)
    )
    usable = np.flatnonzero(~(first.has_flag(*NOT_FITTED) | second.has_flag(*NOT_FITTED)))
    return first.take(usable), second.take(usable)


def true_parameters(rows: EvaluationRows, rng: np.random.Generator) -> Bound:
    """Fits to outputs drawn from known parameters, with these parameters as prediction; rows without a fit are dropped."""
    fits = rows.fits.take(rows.compared)
    limits = rows.outputs.max_tokens[rows.compared]
    groups = fits.groups
    owner = np.repeat(np.arange(len(fits)), groups.counts)
    with np.errstate(over="ignore"):
        drawn = np.exp(fits.mu[owner] + fits.sigma[owner] * rng.standard_t(fits.nu, len(owner)))
    # At least one token, and within the range of the integer type.
    lengths = np.clip(np.rint(np.minimum(drawn, 1e9)), 1, None)
    truncated = lengths >= limits[owner]
    lengths = np.where(truncated, np.minimum(limits[owner], 1e9), lengths)
    simulated = replace(groups, flat_lengths=lengths.astype(np.int64), flat_finished=~truncated)
    new = EvaluationRows.of(fit_groups(simulated, FitOptions(nu=fits.nu)))
    return new, Predicted(mu=fits.mu, sigma=fits.sigma, nu=fits.nu)


def ceilings(rows: EvaluationRows, seed: int) -> tuple[dict[str, Bound], dict[str, Any]]:
    """Noise ceiling: the best scores achievable with a finite number of outputs, as two named bounds, and reliabilities.

    - `half_of_outputs`: each prompt's outputs are split at random into two halves. A fit to the first half is the
      prediction, and the second half is the test. This is not an upper bound: parameters fitted to a few outputs are
      noisy, so a good predictor can score better, especially in sigma.
    - `true_parameters`: the same number of outputs is drawn from each prompt's fit and truncated at the same max_tokens.
      The parameters of that fit are the prediction, and fits to the drawn outputs are the test. These are the scores of
      a perfect predictor; R2 is below 1 because the new fits are noisy. The original fits are noisy too and vary more
      than the true parameters, so this bound is slightly too high, in R2 of sigma more than in R2 of mu.

    `reliability` is the correlation of the fits to both halves, corrected to the full number of outputs by the
    Spearman-Brown formula 2 r / (1 + r). It estimates the R2 of the true parameters against the fits. A bound is omitted
    if the data have too few outputs for it."""
    bounds: dict[str, Bound] = {}
    info: dict[str, Any] = {"seed": seed, "reliability": None}
    if (rows.fits.groups.counts >= 2 * MIN_SAMPLES).any():
        first, second = halves(rows, np.random.default_rng([seed, 1]))
        if len(first) > 1:
            pairs = {"mu": (first.mu, second.mu), "sigma": (first.sigma, second.sigma)}
            pairs["sigma_log1p"] = np.log1p(first.sigma), np.log1p(second.sigma)
            info["reliability"] = {name: _stepped_up(*pair) for name, pair in pairs.items()}
            bounds["half_of_outputs"] = (
                EvaluationRows.of(second),
                Predicted(mu=first.mu, sigma=first.sigma, nu=first.nu),
            )
    if len(rows.compared):
        bounds["true_parameters"] = true_parameters(rows, np.random.default_rng([seed, 2]))
    return bounds, info


def _stepped_up(one: NDArray[np.float64], other: NDArray[np.float64]) -> float | None:
    if len(one) < 3 or one.std() == 0 or other.std() == 0:
        return None
    correlation = float(np.corrcoef(one, other)[0, 1])
    return 2 * correlation / (1 + correlation) if correlation > -1 else None


def _chosen(groups: GroupedLengths, outputs: NDArray[np.intp], owner: NDArray[np.intp]) -> GroupedLengths:
    """The groups with only the selected outputs [S'], which are in the order of their owners [S']."""
    offsets = np.searchsorted(owner, np.arange(len(groups) + 1)).astype(np.int64)
    return replace(
        groups,
        flat_lengths=groups.flat_lengths[outputs],
        flat_finished=groups.flat_finished[outputs],
        offsets=offsets,
    )


@dataclass(frozen=True, slots=True)
class Candidate:
    """A predictor of a comparison: name in tables, description for the report, predictions, and bucket edges in tokens."""

    name: str
    description: Mapping[str, Any]
    prediction: Predicted
    bucket_edges: tuple[float, ...] = ()


def compare(
    rows: EvaluationRows,
    main: Candidate,
    baselines: Baselines | None = None,
    others: Sequence[Candidate] = (),
    *,
    ceiling_seed: int | None = None,
) -> tuple[dict[str, Any], ScoredPredictor]:
    """Scores all predictors on the same rows, and `main` also by served model, data set and category.

    The noise ceiling is computed only with `ceiling_seed`. Returns the content of the JSON file, and the main predictor
    with its scores.
    """
    scored = ScoredPredictor.of(rows, main.prediction, main.bucket_edges)
    predictions: dict[str, Predicted] = {}
    if baselines is not None:
        parameters = baselines.predict(rows.prompts, rows.served_models)
        predictions = {
            name: Predicted(mu=mu, sigma=sigma, nu=baselines.nu) for name, (mu, sigma) in parameters.items()
        }
    ceiling: dict[str, Any] = {}
    if ceiling_seed is not None:
        bounds, info = ceilings(rows, ceiling_seed)
        ceiling = info | {name: ScoredPredictor.of(*bound).metrics() for name, bound in bounds.items()}
    return {
        "schema": SCHEMA,
        "model": scored.metrics(),
        "baselines": {
            name: ScoredPredictor.of(rows, prediction).metrics() for name, prediction in predictions.items()
        },
        "compared": {
            other.name: {
                "predictor": dict(other.description),
                **ScoredPredictor.of(rows, other.prediction, other.bucket_edges).metrics(),
            }
            for other in others
        },
        "ceiling": ceiling,
        **{f"by_{column}": part for column in BREAKDOWNS if (part := scored.by(column)) is not None},
    }, scored
