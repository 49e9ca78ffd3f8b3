"""Evaluation of an urgency predictor on labeled texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_gen.urgency.labels import LabeledText
from data_gen.urgency.seed_set import ClaimPair
from scheduler_core.errors import InputError
from scheduler_core.urgency import LEVELS, UNDER_TRIAGE_COST, effective_level, expected_cost_levels
from training.urgency.abstention import (
    RISKS,
    AbstainThreshold,
    ClaimRows,
    Risk,
    choose_threshold,
    failures,
)
from training.urgency.claims import ALLOWED_RATE, AdversarialReport, Predict, check_claims
from training.urgency.metrics import (
    Rate,
    Reliability,
    UrgencyMetrics,
    critical_level,
    top_level,
    urgency_metrics,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationOptions:
    """Assumptions of the evaluation.

    Attributes:
        under_triage_cost: Cost of one level too low, where one too high costs 1.
        risk: What the abstain threshold bounds.
        risk_rate: Largest fraction of failures among answered texts.
        delta: Probability that the bound does not hold.
        jump_rate: Largest fraction of adversarial pairs that may jump; bounds the abstain threshold, too.
        max_promotion: Most levels a text raises itself.
        max_demotion: Most levels a text lowers itself.
        declared_tier: Level that all texts declare, for the metrics of scheduled levels.
    """

    under_triage_cost: float = UNDER_TRIAGE_COST
    risk: Risk = "under-triage"
    risk_rate: float = 0.1
    delta: float = 0.1
    jump_rate: float = ALLOWED_RATE
    max_promotion: int = 1
    max_demotion: int = 0
    declared_tier: int = LEVELS.index("standard")

    def __post_init__(self) -> None:
        if self.risk not in RISKS:
            raise InputError("risk", self.risk, ", ".join(RISKS))


@dataclass(frozen=True, slots=True, kw_only=True)
class UrgencyReport:
    """Results of one predictor.

    Attributes:
        predicted: Metrics of the most likely level.
        decided: Metrics of the level of least expected cost.
        scheduled: Metrics of the level after abstention and limited promotion, if all texts declare one tier.
        reliability: "most likely level" and "critical (level 0 or 1)" -> reliability.
        threshold: Abstain threshold chosen on validation texts.
        answered: Fraction of the evaluated texts at or above the threshold.
        answered_failures: Of those, the fraction that fails in the sense of the threshold.
        quiet_recall: Of calmly worded emergencies: fraction decided as level 0 or 1; None if there are none.
        accuracy_by_language: Language -> accuracy of the most likely level.
        accuracy_by_source: Source -> accuracy of the most likely level.
        adversarial: What claims of urgency achieve.
    """

    predicted: UrgencyMetrics
    decided: UrgencyMetrics
    scheduled: UrgencyMetrics
    reliability: dict[str, Reliability]
    threshold: AbstainThreshold
    answered: Rate
    answered_failures: Rate
    quiet_recall: Rate
    accuracy_by_language: dict[str, Rate]
    accuracy_by_source: dict[str, Rate]
    adversarial: AdversarialReport

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "predicted": self.predicted.to_json(),
            "decided": self.decided.to_json(),
            "scheduled": self.scheduled.to_json(),
            "reliability": {name: diagram.to_json() for name, diagram in self.reliability.items()},
            "abstention": self.threshold.to_json()
            | {"answered": self.answered.to_json(), "failures": self.answered_failures.to_json()},
            "quiet_emergencies_found": self.quiet_recall.to_json(),
            "accuracy_by_language": {key: rate.to_json() for key, rate in self.accuracy_by_language.items()},
            "accuracy_by_source": {key: rate.to_json() for key, rate in self.accuracy_by_source.items()},
            "adversarial": self.adversarial.to_json(),
        }


def evaluate_urgency(
    predict: Predict,
    texts: Sequence[LabeledText],
    validation: Sequence[LabeledText],
    pairs: Sequence[ClaimPair],
    options: EvaluationOptions | None = None,
    *,
    validation_pairs: Sequence[ClaimPair] = (),
) -> UrgencyReport:
    """Measures a predictor; the abstain threshold is chosen on `validation` and `validation_pairs` alone.

    Args:
        predict: N texts -> probabilities [N, K].
        texts: To be evaluated on; at least one.
        validation: For the threshold; at least one.
        pairs: Adversarial pairs; at least one.
        options: Assumptions.
        validation_pairs: For the threshold; none: claims are not measured.

    Raises:
        InputError: A set is empty, or an option is outside its range.
    """
    options = options or EvaluationOptions()
    if not texts or not validation:
        which = "texts to evaluate" if not texts else "validation texts"
        raise InputError(which, 0, "at least one labelled text of that split")
    rows, true = predict([text.text for text in texts]), _levels(texts)
    threshold = choose_threshold(
        predict([text.text for text in validation]),
        _levels(validation),
        allowed_rate=options.risk_rate,
        delta=options.delta,
        risk=options.risk,
        under_triage_cost=options.under_triage_cost,
        claims=_claim_rows(predict, validation_pairs, options) if validation_pairs else None,
        jump_rate=options.jump_rate,
    )
    decided = expected_cost_levels(rows, options.under_triage_cost)
    answered = rows.max(axis=1) >= (np.inf if threshold.threshold is None else threshold.threshold)
    right = rows.argmax(axis=1) == true
    return UrgencyReport(
        predicted=urgency_metrics(true, rows.argmax(axis=1)),
        decided=urgency_metrics(true, decided),
        scheduled=urgency_metrics(true, _scheduled(rows, threshold, options)),
        reliability={
            "most likely level": top_level(rows, true),
            "critical (level 0 or 1)": critical_level(rows, true),
        },
        threshold=threshold,
        answered=Rate.of(answered),
        answered_failures=Rate.of(failures(rows, true, options.risk, options.under_triage_cost), answered),
        quiet_recall=Rate.of(decided <= 1, np.array([text.source == "seed-quiet" for text in texts])),
        accuracy_by_language=_by(texts, right, lambda text: text.language or "unknown"),
        accuracy_by_source=_by(texts, right, lambda text: text.source),
        adversarial=check_claims(
            predict,
            pairs,
            allowed_rate=options.jump_rate,
            threshold=threshold.threshold,
            max_promotion=options.max_promotion,
            under_triage_cost=options.under_triage_cost,
        ),
    )


def _claim_rows(predict: Predict, pairs: Sequence[ClaimPair], options: EvaluationOptions) -> ClaimRows:
    return ClaimRows(
        plain=predict([pair.text for pair in pairs]),
        claimed=predict([pair.claimed_text for pair in pairs]),
        tiers=np.array([pair.level_number for pair in pairs], dtype=np.int64),
        max_promotion=options.max_promotion,
    )


def _scheduled(
    rows: NDArray[np.float64], threshold: AbstainThreshold, options: EvaluationOptions
) -> NDArray[np.int64]:
    return effective_level(
        rows,
        options.declared_tier,
        threshold.threshold,
        options.max_promotion,
        max_demotion=options.max_demotion,
        under_triage_cost=options.under_triage_cost,
    )


def _levels(texts: Sequence[LabeledText]) -> NDArray[np.int64]:
    return np.array([text.level for text in texts], dtype=np.int64)


def _by(
    texts: Sequence[LabeledText], right: NDArray[np.bool_], key: Callable[[LabeledText], str]
) -> dict[str, Rate]:
    keys = np.array([key(text) for text in texts])
    return {str(name): Rate.of(right, keys == name) for name in np.unique(keys)}
