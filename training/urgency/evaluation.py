"""The command `evaluate-urgency`: evaluation of an urgency predictor on labeled texts, as a JSON report."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_gen.urgency.labels import LabeledText, read_labels
from data_gen.urgency.seed_set import ClaimPair, neutral_texts, read_pairs
from predictors.manifest import MANIFEST
from scheduler_core.errors import InputError
from scheduler_core.prediction.service_access import NO_FILES, ServiceAccess
from scheduler_core.prediction.urgency import LEVELS, effective_level, expected_cost_levels
from scheduler_core.shell.files import existing_file, sha256_file, writable_target, write_json
from training.evaluating.batch_predictor import Accelerator, InferenceOptions, open_batch_predictor
from training.urgency.abstention import ClaimRows, Predict, choose_threshold, failures
from training.urgency.baselines import bag_of_words_baseline, constant_baseline, frozen_encoder_baseline
from training.urgency.config import BASELINES, EvaluateUrgencyConfig
from training.urgency.metrics import rate, reliability_of_levels, urgency_metrics

log = logging.getLogger(__name__)

IntArray = NDArray[np.int64]
#: Column of the summary -> path of its number in the report. Rates are printed in percent, `SCORES` with three decimals.
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
FROZEN = "frozen:"
#: Declared tier of every text in the metrics of scheduled levels.
DECLARED_TIER = LEVELS.index("standard")


def evaluate_urgency_command(config: EvaluateUrgencyConfig) -> int:
    """Runs the command and writes the JSON file; returns 3 if claims of urgency raise levels too often, else 0."""
    target = writable_target(config.json, "json")
    texts = read_labels(config.data)
    evaluated = _split(texts, config.split, config.data)
    if config.validation is None:
        validation = _split(texts, "validation", config.data)
    else:
        validation = read_labels(config.validation, "validation")
    pairs, validation_pairs = read_pairs(config.split), read_pairs("validation")
    train = [text for text in texts if text.split == "train"]

    def evaluate(predictor: str) -> dict[str, Any]:
        predict = _open(predictor, config, train)
        return evaluate_urgency(
            predict, evaluated, validation, pairs, config, validation_pairs=validation_pairs
        )

    report = evaluate(config.predictor)
    compared = [(name, evaluate(predictor)) for name, predictor in config.others]
    if config.baselines and not train:
        raise InputError("data, texts of split train", 0, "at least one, or --baselines false")
    baselines = {name: evaluate(name) for name in BASELINES if config.baselines}
    for name, entry in [(config.name, report), *compared, *baselines.items()]:
        numbers = (f"{column} {cell_of(column, entry)}" for column in COLUMNS)
        log.info("%s: %s", name, ", ".join(numbers))
    passed = report["adversarial"]["passed"]
    write_json(
        target,
        {
            "schema": "urgency-evaluation/3",
            "data": {"name": Path(config.data).name, "sha256": sha256_file(config.data)},
            "split": config.split,
            "threshold_chosen_on_measured_texts": config.validation is None and config.split == "validation",
            "num_texts": len(evaluated),
            "num_validation": len(validation),
            "config": asdict(config),
            "passed": passed,
            **report,
            "compared": [{"name": name} | other for name, other in compared],
            "baselines": baselines,
        },
    )
    if config.save_threshold:
        save_threshold(config.predictor, report["abstention"])
    if not passed:
        log.error(
            "claims of urgency raise the scheduled level of %s of the pairs; allowed: at most %.1f %%",
            cell_of("jumps, scheduled", report),
            100 * config.jump_rate,
        )
    return 0 if passed else 3


def save_threshold(path: str | Path, abstention: dict[str, Any]) -> None:
    """Writes the abstain threshold to a checkpoint's training.json, as `urgency.abstain_threshold`; InputError for an
    artifact, whose files must not change.
    """
    from predictors.modules.checkpoint import TRAINING

    if (Path(path) / MANIFEST).is_file():
        raise InputError("save_threshold", str(path), "a checkpoint; export it again afterwards")
    file = existing_file(Path(path) / TRAINING, "predictor")
    content = json.loads(file.read_text(encoding="utf-8"))
    entry = {"abstain_threshold": abstention["threshold"], "abstention": abstention}
    write_json(file, content | {"urgency": (content.get("urgency") or {}) | entry})


def _split(texts: list[LabeledText], split: str, path: str) -> list[LabeledText]:
    selected = [text for text in texts if text.split == split and not text.claimed]
    if not selected:
        raise InputError(f"{Path(path).name}, texts of split {split}", 0, "at least one")
    return selected


def _open(predictor: str, config: EvaluateUrgencyConfig, train: list[LabeledText]) -> Predict:
    if predictor == "constant":
        return constant_baseline(train)
    if predictor in ("bag-of-words", "bag_of_words"):
        return bag_of_words_baseline(train)
    if predictor.startswith(FROZEN):
        encoder = predictor.removeprefix(FROZEN)
        return frozen_encoder_baseline(train, encoder, config.batch_size)
    return open_urgency(
        predictor, accelerator=config.accelerator, batch_size=config.batch_size, access=config
    )


def open_urgency(
    path: str | Path,
    *,
    accelerator: Accelerator = "auto",
    batch_size: int = 32,
    access: ServiceAccess = NO_FILES,
) -> Predict:
    """Opens a checkpoint, artifact or service (with `access`) with an urgency head; InputError if it has none, or one with other levels than
    LEVELS."""
    options = InferenceOptions(batch_size, accelerator=accelerator, progress=False, access=access)
    predictor = open_batch_predictor(path, options)
    if not predictor.urgency_levels:
        raise InputError("predictor", "no urgency head", "a predictor that was trained with one")
    if predictor.urgency_levels != LEVELS:
        raise InputError("predictor, urgency levels", list(predictor.urgency_levels), ", ".join(LEVELS))
    # The urgency head ignores the served model, but a predictor may not accept an unknown one.
    served = predictor.served_models[0] if predictor.served_models else None

    def predict(texts: Sequence[str]) -> NDArray[np.float64]:
        if not texts:
            return np.zeros((0, len(LEVELS)))
        urgency = predictor.predict(texts, [served] * len(texts), [None] * len(texts)).urgency
        # Normalized, because outputs of float16 and float32 graphs sum to 1 only up to rounding.
        probabilities = np.maximum(np.asarray(urgency), 0.0)
        return np.asarray(probabilities / probabilities.sum(axis=1, keepdims=True))

    return predict


def evaluate_urgency(
    predict: Predict,
    texts: Sequence[LabeledText],
    validation: Sequence[LabeledText],
    pairs: Sequence[ClaimPair],
    config: EvaluateUrgencyConfig,
    *,
    validation_pairs: Sequence[ClaimPair] = (),
) -> dict[str, Any]:
    """Evaluates a predictor; the abstain threshold is chosen on `validation` and `validation_pairs` only.

    Without `validation_pairs`, claims do not affect the threshold. The other sequences must not be empty.

    Returns:
        predicted, decided, scheduled: metrics of the most likely level, of the level of least expected cost, and of the
        level after abstention and limited promotion; reliability: see `reliability_of_levels`; abstention: the threshold,
        its guarantee, the rates of answered texts (in total and by true level), of failures and of wrong levels among them,
        and of right levels by decided level; quiet_emergencies_found: fraction of calmly worded emergencies decided as
        level 0 or 1; adversarial: see `check_claims`."""
    cost = config.under_triage_cost
    limits: dict[str, Any] = {"max_promotion": config.max_promotion, "under_triage_cost": cost}
    chosen = choose_threshold(
        predict([text.text for text in validation]),
        _levels(validation),
        allowed_rate=config.risk_rate,
        delta=config.delta,
        under_triage_cost=cost,
        claims=ClaimRows.of(predict, validation_pairs, **limits) if validation_pairs else None,
        jump_rate=config.jump_rate,
    )
    rows, true = predict([text.text for text in texts]), _levels(texts)
    predicted, decided = rows.argmax(axis=1), expected_cost_levels(rows, cost)
    scheduled = effective_level(rows, DECLARED_TIER, chosen.threshold, **limits)
    answered = chosen.answered(rows)
    failed = failures(rows, true, "under-triage", cost)
    is_quiet = np.array([text.source == "seed-quiet" for text in texts])
    return {
        "predicted": urgency_metrics(true, predicted),
        "decided": urgency_metrics(true, decided),
        "scheduled": urgency_metrics(true, scheduled),
        "reliability": reliability_of_levels(rows, true),
        "abstention": asdict(chosen)
        | {
            "answered": rate(answered),
            "failures": rate(failed, answered),
            "wrong": rate(decided != true, answered),
            "answered_by_level": _by([LEVELS[level] for level in true], answered),
            "right_by_decided_level": _by([LEVELS[level] for level in decided], decided == true, answered),
        },
        "quiet_emergencies_found": rate(decided <= 1, is_quiet),
        "adversarial": check_claims(
            predict, pairs, threshold=chosen.threshold, allowed_rate=config.jump_rate, **limits
        ),
    }


def check_claims(
    predict: Predict,
    pairs: Sequence[ClaimPair],
    *,
    threshold: float = 1.0,
    allowed_rate: float = 0.05,
    **limits: Any,
) -> dict[str, Any]:
    """Measures how often adding a claim of urgency makes the level of a text more urgent (a jump).

    Args:
        predict, pairs: The predictor, and at least one pair of a text with and without a claim.
        threshold: Abstain threshold, for the scheduled level.
        allowed_rate: Maximum fraction of pairs that jump.
        limits: max_promotion and under_triage_cost of `ClaimRows`.

    Returns:
        passed: whether the jump rate of scheduled levels is at most `allowed_rate`; false if every plain text has the top
        level. predicted, decided, scheduled: `_jumps` of these levels; neutral: `_jumps` of the decided level with a
        neutral phrase instead of the claim, as control. scheduled_max_levels: maximum number of levels between a claimed
        text's true and scheduled level. examples: ids of at most 20 pairs, the largest jump of the decided level first.
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

    jumped = jumps["scheduled"]["jumped"]["value"]
    order = np.argsort(after - before, kind="stable")
    return {
        "passed": jumped is not None and jumped <= allowed_rate,
        "allowed_rate": allowed_rate,
        "num_pairs": len(pairs),
        **jumps,
        "scheduled_max_levels": int(np.max(rows.tiers - scheduled[1])),
        "examples": [pairs[at].id for at in order[:20].tolist() if after[at] < before[at]],
    }


def _jumps(plain: IntArray, claimed: IntArray) -> dict[str, Any]:
    """Statistics of the change of level over pairs [P]: rate of jumps (among plain levels below the top) and of falls, and
    number of pairs by levels gained."""
    gained = plain - claimed
    up = gained[gained > 0]
    return {
        "jumped": rate(gained > 0, plain > 0),
        "fell": rate(gained < 0),
        "levels": {
            str(step): int(count) for step, count in zip(*np.unique(up, return_counts=True), strict=True)
        },
    }


def _by(
    keys: Sequence[str], hits: NDArray[np.bool_], cases: NDArray[np.bool_] | None = None
) -> dict[str, dict[str, Any]]:
    """Rate of hits among the cases (default: all) for each key."""
    counted = np.ones(len(hits), dtype=bool) if cases is None else cases
    return {str(name): rate(hits, counted & (np.array(keys) == name)) for name in np.unique(keys)}


def _levels(texts: Sequence[LabeledText]) -> IntArray:
    return np.array([text.level for text in texts], dtype=np.int64)


def cell_of(column: str, report: Mapping[str, Any]) -> str:
    """Formats a number of the summary; "-" for None."""
    number: Any = reduce(getitem, COLUMNS[column], report)
    if number is None:
        return "-"
    return f"{number:.3f}" if column in SCORES else f"{100 * number:.1f} %"
