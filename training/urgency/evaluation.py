"""Evaluation of an urgency predictor on labeled texts, as JSON content and as tables in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import reduce
from operator import getitem
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_gen.urgency.labels import LabeledText, level_number
from data_gen.urgency.seed_set import ClaimPair, neutral_texts
from scheduler_core.urgency import LEVELS, effective_level, expected_cost_levels
from training.urgency.abstention import ClaimRows, Predict, choose_threshold, failures
from training.urgency.config import EvaluateUrgencyConfig
from training.urgency.metrics import rate, reliability_of_levels, urgency_metrics

IntArray = NDArray[np.int64]
#: Number of the summary -> path of a number in the report. Rates are in percent; of kappa and macro F1, three digits.
COLUMNS = {
    "accuracy": ("predicted", "accuracy", "value"),
    "kappa": ("predicted", "kappa"),
    "macro F1": ("predicted", "macro_f1"),
    "recall 0": ("predicted", "recalls", LEVELS[0], "value"),
    "recall 1": ("predicted", "recalls", LEVELS[1], "value"),
    "under-triage": ("predicted", "under_triage", "value"),
    "over-triage": ("predicted", "over_triage", "value"),
    "critical under-triage": ("predicted", "critical_under_triage", "value"),
    "critical over-triage": ("predicted", "critical_over_triage", "value"),
    "jumps": ("adversarial", "predicted", "jumped", "value"),
    "jumps, decided": ("adversarial", "decided", "jumped", "value"),
    "jumps, scheduled": ("adversarial", "scheduled", "jumped", "value"),
    "neutral words": ("adversarial", "neutral", "jumped", "value"),
    "ECE": ("reliability", "most likely level", "ece"),
    "answered": ("abstention", "answered", "value"),
}
SCORES = ("kappa", "macro F1")


def evaluate_urgency(
    predict: Predict,
    texts: Sequence[LabeledText],
    validation: Sequence[LabeledText],
    pairs: Sequence[ClaimPair],
    config: EvaluateUrgencyConfig,
    *,
    validation_pairs: Sequence[ClaimPair] = (),
) -> dict[str, Any]:
    """Measures a predictor; the abstain threshold is chosen on `validation` and `validation_pairs` alone.

    Args:
        predict: N texts -> probabilities [N, K].
        texts: To be evaluated on; at least one.
        validation: For the threshold; at least one.
        pairs: Adversarial pairs; at least one.
        config: Costs, rates and limits.
        validation_pairs: For the threshold; none: claims are not measured.

    Returns:
        predicted, decided, scheduled: metrics of the most likely level, of that of least expected cost, and of the level
        after abstention and limited promotion; reliability; abstention: the threshold, its guarantee, and how many of
        the evaluated texts it answers and fails; quiet_emergencies_found: of calmly worded emergencies, those decided as
        level 0 or 1; accuracy_by_language, accuracy_by_source; adversarial: see `check_claims`.

    Raises:
        InputError: An option is outside its range.
    """
    cost = config.under_triage_cost
    limits: dict[str, Any] = {"max_promotion": config.max_promotion, "under_triage_cost": cost}
    chosen = choose_threshold(
        predict([text.text for text in validation]),
        _levels(validation),
        allowed_rate=config.risk_rate,
        delta=config.delta,
        risk=config.risk,
        under_triage_cost=cost,
        claims=ClaimRows.of(predict, validation_pairs, **limits) if validation_pairs else None,
        jump_rate=config.jump_rate,
    )
    rows, true = predict([text.text for text in texts]), _levels(texts)
    predicted, decided = rows.argmax(axis=1), expected_cost_levels(rows, cost)
    tier = level_number(config.declared_tier, "declared_tier")
    scheduled = effective_level(rows, tier, chosen.threshold, max_demotion=config.max_demotion, **limits)
    answered = rows.max(axis=1) >= (np.inf if chosen.threshold is None else chosen.threshold)
    right = predicted == true
    failed = failures(rows, true, config.risk, cost)
    is_quiet = np.array([text.source == "seed-quiet" for text in texts])
    return {
        "predicted": urgency_metrics(true, predicted),
        "decided": urgency_metrics(true, decided),
        "scheduled": urgency_metrics(true, scheduled),
        "reliability": reliability_of_levels(rows, true),
        "abstention": asdict(chosen) | {"answered": rate(answered), "failures": rate(failed, answered)},
        "quiet_emergencies_found": rate(decided <= 1, is_quiet),
        "accuracy_by_language": _by([text.language or "unknown" for text in texts], right),
        "accuracy_by_source": _by([text.source for text in texts], right),
        "adversarial": check_claims(
            predict, pairs, threshold=chosen.threshold, allowed_rate=config.jump_rate, **limits
        ),
    }


def check_claims(
    predict: Predict,
    pairs: Sequence[ClaimPair],
    *,
    threshold: float | None = None,
    allowed_rate: float = 0.05,
    **limits: Any,
) -> dict[str, Any]:
    """How often adding a claim of urgency makes the level of a text more urgent.

    Args:
        predict: N texts -> probabilities [N, K].
        pairs: Texts with and without a claim; at least one.
        threshold: Abstain threshold, for the scheduled level.
        allowed_rate: Largest fraction of pairs that may jump.
        limits: max_promotion and under_triage_cost of `ClaimRows`.

    Returns:
        passed: scheduled levels jump at most as often as allowed, and can (not every plain text is at the top already);
        passed_unguarded: the most likely and the decided level do so too. predicted, decided, scheduled: see `_jumps`, of
        these levels; neutral: of the decided one with words that claim nothing instead, the effect of any added words.
        scheduled_max_levels: how far above its true level a claimed text is scheduled at most. by_language, by_position,
        by_level: jump rates of the decided level. examples: ids of pairs that jumped, the furthest first, at most 20.
    """
    rows = ClaimRows.of(predict, pairs, **limits)
    before, after, control = (
        expected_cost_levels(part, rows.under_triage_cost)
        for part in (rows.plain, rows.claimed, predict(neutral_texts(pairs)))
    )
    scheduled = rows.scheduled(threshold)
    jumps = {
        "predicted": _jumps(rows.plain.argmax(axis=1), rows.claimed.argmax(axis=1)),
        "decided": _jumps(before, after),
        "neutral": _jumps(before, control),
        "scheduled": _jumps(*scheduled),
    }

    def holds(*names: str) -> bool:
        values = [jumps[name]["jumped"]["value"] for name in names]
        return all(value is not None and value <= allowed_rate for value in values)

    order = np.argsort(after - before, kind="stable")
    jumped, could = after < before, before > 0
    return {
        "passed": holds("scheduled"),
        "passed_unguarded": holds("predicted", "decided"),
        "allowed_rate": allowed_rate,
        "num_pairs": len(pairs),
        **jumps,
        "scheduled_max_levels": int(np.max(rows.tiers - scheduled[1])),
        "by_language": _by([pair.language for pair in pairs], jumped, could),
        "by_position": _by([pair.position for pair in pairs], jumped, could),
        "by_level": _by([LEVELS[tier] for tier in rows.tiers], jumped, could),
        "examples": [pairs[at].id for at in order[:20].tolist() if jumped[at]],
    }


def _jumps(plain: IntArray, claimed: IntArray) -> dict[str, Any]:
    """Rates of pairs [P] whose level becomes more urgent (of those not at the top already) and less urgent, number of
    pairs by levels gained, and mean levels gained of those that jumped."""
    gained = plain - claimed
    up = gained[gained > 0]
    return {
        "jumped": rate(gained > 0, plain > 0),
        "fell": rate(gained < 0),
        "levels": {
            str(step): int(count) for step, count in zip(*np.unique(up, return_counts=True), strict=True)
        },
        "mean_levels": float(up.mean()) if len(up) else None,
    }


def _by(
    keys: Sequence[str], hits: NDArray[np.bool_], cases: NDArray[np.bool_] | None = None
) -> dict[str, dict[str, Any]]:
    """Rate of hits for each key."""
    counted = np.ones(len(hits), dtype=bool) if cases is None else cases
    return {str(name): rate(hits, counted & (np.array(keys) == name)) for name in np.unique(keys)}


def _levels(texts: Sequence[LabeledText]) -> IntArray:
    return np.array([text.level for text in texts], dtype=np.int64)


def cell_of(column: str, report: Mapping[str, Any]) -> str:
    """A number of the summary as text; - where it is unknown."""
    number: Any = reduce(getitem, COLUMNS[column], report)
    if number is None:
        return "-"
    return f"{number:.3f}" if column in SCORES else f"{100 * number:.1f} %"
