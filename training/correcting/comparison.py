"""Comparison of the predictions before and after a correction, on outcomes that it was not fitted to, and its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduler_core.prediction.linear_correction import Coefficients, features_of
from scheduler_core.prediction.outcome import Outcome
from scheduler_core.report.page import Page
from scheduler_core.statistics import kendall_tau
from training.evaluating.scores import COVERAGE_LEVELS, OutputScores, score_outcomes

FloatArray = NDArray[np.float64]
#: Metrics of a comparison; a correction is better if it improves the first one.
DECIDING = "CRPS, ln tokens"
METRICS = (DECIDING, "CRPS, tokens", "tau", "P50", "P90", "P99")
SIDES = ("old", "new", "new - old")
_RESAMPLES = 400
_NOTE = (
    "In brackets: 95 % interval of a bootstrap over prompts. CRPS: smaller is better; tau: Kendall's tau-b of predicted median "
    "and length; P50, P90, P99: fraction of outputs at most as long as that predicted quantile."
)
_FORMULA = (
    "mu' = mu + f.a and ln sigma' = ln sigma + f.b, with f = (1, mu - 6, ln sigma + 1, ln tokens of the prompt - 5), each "
    "clipped to +-4."
)


class IntervalEstimate(NamedTuple):
    """An estimate and its 95 % interval; NaN where undefined."""

    estimate: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.estimate:.3f} [{self.low:.3f}, {self.high:.3f}]"


class Comparison:
    """Metrics of old and new predictions for the same outcomes.

    `groups` [N] numbers the prompts of the outcomes, 0 to G - 1: resamples draw prompts.
    """

    def __init__(
        self, old: Sequence[Outcome], new: Sequence[Outcome], groups: NDArray[np.intp], seed: int
    ) -> None:
        self._sides = [_Side.of(outcomes) for outcomes in (old, new)]
        self._served_models = np.array([outcome.served_model or "" for outcome in old], dtype=object)
        order = np.argsort(groups, kind="stable")
        members = np.split(order, np.cumsum(np.bincount(groups))[:-1])
        rng = np.random.default_rng(seed)
        samples = [np.arange(len(old))] + [
            np.concatenate([members[number] for number in rng.integers(0, len(members), len(members))])
            for _ in range(_RESAMPLES)
        ]
        # [1 + resamples, old and new, metrics]
        values = np.array([[side.metrics(rows) for side in self._sides] for rows in samples])
        before, after = values[:, 0], values[:, 1]
        #: Name of a metric -> its estimates, in the order of `SIDES`.
        self.metrics = {
            name: [_interval(part[:, column]) for part in (before, after, after - before)]
            for column, name in enumerate(METRICS)
        }

    @property
    def is_better(self) -> bool:
        """Whether the new predictions have a smaller `DECIDING` metric."""
        return self.metrics[DECIDING][-1].estimate < 0

    def table(self) -> list[tuple[str, ...]]:
        """A row for each metric."""
        return [(name, *map(str, sides)) for name, sides in self.metrics.items()]

    def page(self, title: str, lead: str, corrections: Mapping[str, Coefficients]) -> Page:
        """The report: metrics of both sides, by served model, and the coefficients ("" is the unknown model)."""
        page = Page(title, lead)
        page.heading("Old and new predictions")
        page.table(("metric", *SIDES), self.table())
        page.note(_NOTE)
        page.heading("By served model")
        table = []
        for name in sorted(set(self._served_models)):
            rows = np.flatnonzero(self._served_models == name)
            pairs = zip(*(side.metrics(rows) for side in self._sides), strict=True)
            table.append((name or "unknown", len(rows), *(f"{old:.3f} -> {new:.3f}" for old, new in pairs)))
        page.table(("served model", "requests", *METRICS), table)
        page.heading("Corrections")
        header = ("served model", *(f"{name}{number}" for name in "ab" for number in range(4)))
        page.table(
            header,
            [(name or "unknown", *each.location, *each.log_scale) for name, each in corrections.items()],
        )
        page.note(_FORMULA)
        return page


class _Side(NamedTuple):
    """Scores, predicted mu and true length of each outcome."""

    scores: OutputScores
    mu: FloatArray
    lengths: FloatArray

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> _Side:
        rows = [(outcome, outcome.prediction) for outcome in outcomes if outcome.prediction is not None]
        mu, lengths = np.array([(prediction.mu, outcome.output_tokens) for outcome, prediction in rows]).T
        return cls(score_outcomes(rows), mu, lengths)

    def metrics(self, rows: NDArray[np.intp]) -> list[float]:
        """Values of METRICS on the selected rows."""
        scores = self.scores
        tau = kendall_tau(self.mu[rows], self.lengths[rows])
        coverage = [scores.coverage(level, rows)["estimate"] for level in COVERAGE_LEVELS]
        numbers = [scores.crps_log[rows].mean(), scores.crps_tokens[rows].mean(), tau, *coverage]
        return [np.nan if number is None else float(number) for number in numbers]


def _interval(values: FloatArray) -> IntervalEstimate:
    """Estimate (the first value) with the 95 % interval of its resamples (the remaining values)."""
    resamples = values[1:][~np.isnan(values[1:])]
    low, high = np.quantile(resamples, (0.025, 0.975)) if len(resamples) else (np.nan, np.nan)
    return IntervalEstimate(float(values[0]), float(low), float(high))


def corrected(outcomes: Sequence[Outcome], corrections: Mapping[str, Coefficients]) -> list[Outcome]:
    """The outcomes with corrected predictions of their served models; those of others as they are."""
    result = []
    for outcome in outcomes:
        coefficients, prediction = corrections.get(outcome.served_model or ""), outcome.prediction
        if coefficients is not None and prediction is not None:
            features = features_of(prediction, outcome.prompt_tokens)
            outcome = replace(outcome, prediction=coefficients.corrected(prediction, features))
        result.append(outcome)
    return result
