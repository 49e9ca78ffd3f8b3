"""The command `evaluate-urgency`: quality and safety of an urgency predictor."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scheduler_core.command import command
from scheduler_core.errors import InputError
from training.urgency.config import BASELINES, EvaluateUrgencyConfig

if TYPE_CHECKING:
    from data_gen.urgency.labels import LabeledText
    from training.urgency.abstention import Predict

log = logging.getLogger(__name__)

FROZEN = "frozen:"


def evaluate_urgency_command(config: EvaluateUrgencyConfig) -> int:
    """Runs the command.

    Returns:
        0 if claims of urgency jump at most as often as allowed, else 3; the JSON is written in both cases.
    """
    from data_gen.urgency.labels import level_number, read_labels
    from data_gen.urgency.seed_set import read_pairs
    from scheduler_core.files import sha256_file, writable_target, write_json
    from training.urgency.evaluation import COLUMNS, cell_of, evaluate_urgency
    from training.urgency.predictors import save_threshold

    level_number(config.declared_tier, "declared_tier")
    target = writable_target(config.json, "json")
    texts = read_labels(config.data)
    measured = _split(texts, config.split, config.data)
    if config.validation is None:
        validation = _split(texts, "validation", config.data)
    else:
        validation = read_labels(config.validation, "validation")
    pairs, validation_pairs = read_pairs(config.split), read_pairs("validation")
    train = [text for text in texts if text.split == "train"]

    def evaluate(predictor: str) -> dict[str, Any]:
        predict = _open(predictor, config, train)
        return evaluate_urgency(
            predict, measured, validation, pairs, config, validation_pairs=validation_pairs
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
            "schema": "urgency-evaluation/2",
            "data": {"name": Path(config.data).name, "sha256": sha256_file(config.data)},
            "split": config.split,
            "threshold_chosen_on_measured_texts": config.validation is None and config.split == "validation",
            "num_texts": len(measured),
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
            "claims of urgency jump the queue: %s of the pairs, at most %.1f %% are allowed",
            cell_of("jumps, scheduled", report),
            100 * config.jump_rate,
        )
    return 0 if passed else 3


def _split(texts: list[LabeledText], split: str, path: str) -> list[LabeledText]:
    selected = [text for text in texts if text.split == split and not text.claimed]
    if not selected:
        raise InputError(f"{Path(path).name}, texts of split {split}", 0, "at least one")
    return selected


def _open(predictor: str, config: EvaluateUrgencyConfig, train: list[LabeledText]) -> Predict:
    from training.urgency import predictors

    if predictor == "constant":
        return predictors.constant_baseline(train)
    if predictor in ("bag-of-words", "bag_of_words"):
        return predictors.bag_of_words_baseline(train)
    if predictor.startswith(FROZEN):
        encoder = predictor.removeprefix(FROZEN)
        return predictors.frozen_encoder_baseline(train, encoder, config.batch_size)
    return predictors.open_urgency(predictor, accelerator=config.accelerator, batch_size=config.batch_size)


main = command(
    "evaluate-urgency",
    EvaluateUrgencyConfig,
    evaluate_urgency_command,
    positionals=("predictor",),
    extra="train",
)


if __name__ == "__main__":
    raise SystemExit(main())
