"""The command `evaluate-urgency`: quality and safety of an urgency predictor."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from scheduler_core.command import run_command
from scheduler_core.errors import InputError, MissingExtraError

if TYPE_CHECKING:
    from data_gen.urgency.labels import LabeledText
    from training.urgency.claims import Predict
    from training.urgency.evaluation import UrgencyReport

log = logging.getLogger(__name__)

FROZEN = "frozen:"
SECTION = "urgency results"
BASELINES = ("constant", "bag_of_words")


@dataclass(frozen=True, kw_only=True)
class EvaluateUrgencyConfig:
    """Measure an urgency predictor: triage metrics, reliability, abstain threshold, adversarial check, baselines. Exits with 3 if claims of urgency raise scheduled levels more often than allowed."""

    INPUTS = ("predictor", "data", "validation", "compare")
    OUTPUTS = ("json", "figure", "markdown")

    predictor: str
    """Folder of a checkpoint or of an artifact with an urgency head; or a baseline trained on split train: constant, bag-of-words, or frozen:ENCODER (logistic regression on the features of an encoder: a folder, package:NAME/PATH or hub name)."""
    data: str
    """Labelled texts as import-urgency writes them (Parquet with columns text, level; optional weight, source, language, split): split train trains the baselines, validation chooses the threshold, test is evaluated."""
    json: str
    """JSON file to write."""
    validation: str | None = None
    """Another file for the threshold: all of its texts."""
    split: Literal["test", "validation"] = "test"
    """Texts to evaluate; validation while a predictor is being chosen."""
    under_triage_cost: float = 3.0
    """Cost of deciding one level too low, where one level too high costs 1."""
    risk: Literal["under-triage", "wrong", "far"] = "under-triage"
    """What the abstain threshold bounds: levels decided too low, wrong ones, or ones more than one level away."""
    risk_rate: float = 0.1
    """Largest fraction of such failures among the texts that are answered."""
    delta: float = 0.1
    """Probability, over validation sets, that the bound does not hold."""
    jump_rate: float = 0.05
    """Largest fraction of adversarial pairs whose scheduled level a claim of urgency may raise; the abstain threshold is certified for it, too."""
    max_promotion: int = 1
    """Maximum number of levels by which a text raises its own request."""
    max_demotion: int = 0
    """Maximum number of levels by which a text lowers its own request."""
    declared_tier: str = "standard"
    """Level that all texts declare, for the metrics of scheduled levels."""
    figure: str | None = None
    """PNG file to write: reliability diagrams."""
    markdown: str | None = None
    """Page whose section "urgency results" is replaced by tables of all predictors; a page without one gets it at its end."""
    name: str = "predictor"
    """Name of the predictor in the tables."""
    compare: list[str] | None = None
    """Further predictors, each NAME=PREDICTOR with anything that PREDICTOR may be; entries of one name are seeds of one recipe, whose mean and standard deviation the tables show."""
    save_threshold: bool = False
    """Also write the abstain threshold into the checkpoint's training.json, from where export-onnx takes it."""
    baselines: bool = True
    """Also measure a constant and a bag of words, trained on split train."""
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the predictor runs."""
    batch_size: int = 32
    """Texts per model call."""


def evaluate_urgency_command(config: EvaluateUrgencyConfig) -> int:
    """Runs the command.

    Returns:
        0 if claims of urgency jump at most as often as allowed, else 3; the JSON is written in both cases.
    """
    try:
        import pyarrow  # noqa: F401
        import scipy  # noqa: F401
        import sklearn  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(error.name or "scikit-learn", "train") from error
    from data_gen.urgency.labels import level_number, read_labels
    from data_gen.urgency.seed_set import read_pairs
    from scheduler_core.files import sha256_file, writable_target, write_json
    from scheduler_core.report.markdown import put_section
    from training.urgency.evaluation import EvaluationOptions, evaluate_urgency
    from training.urgency.metrics import write_reliability_figure
    from training.urgency.predictors import save_threshold
    from training.urgency.tables import urgency_markdown

    options = EvaluationOptions(
        under_triage_cost=config.under_triage_cost,
        risk=config.risk,
        risk_rate=config.risk_rate,
        delta=config.delta,
        jump_rate=config.jump_rate,
        max_promotion=config.max_promotion,
        max_demotion=config.max_demotion,
        declared_tier=level_number(config.declared_tier, "declared_tier"),
    )
    target = writable_target(config.json, "json")
    figure = None if config.figure is None else writable_target(config.figure, "figure")
    texts = read_labels(config.data)
    measured = _split(texts, config.split, config.data)
    if config.validation is None:
        validation = _split(texts, "validation", config.data)
    else:
        validation = read_labels(config.validation, "validation")
    pairs, validation_pairs = read_pairs(config.split), read_pairs("validation")
    train = [text for text in texts if text.split == "train"]
    others = _others(config.compare)
    baselines = _baselines(train) if config.baselines else {}

    def evaluate(predict: Predict) -> UrgencyReport:
        return evaluate_urgency(
            predict, measured, validation, pairs, options, validation_pairs=validation_pairs
        )

    report = evaluate(_open(config.predictor, config, train))
    compared = [(name, evaluate(_open(predictor, config, train))) for name, predictor in others]
    baseline_reports = {name: evaluate(predict) for name, predict in baselines.items()}
    reports = [(config.name, report), *compared, *baseline_reports.items()]
    for entry in reports:
        _log(*entry)
    write_json(
        target,
        {
            "schema": "urgency-evaluation/1",
            "data": {"name": Path(config.data).name, "sha256": sha256_file(config.data)},
            "split": config.split,
            "threshold_chosen_on_measured_texts": config.validation is None and config.split == "validation",
            "num_texts": len(measured),
            "num_validation": len(validation),
            "options": asdict(options),
            "passed": report.adversarial.passed,
            **report.to_json(),
            "compared": [{"name": name} | other.to_json() for name, other in compared],
            "baselines": {name: other.to_json() for name, other in baseline_reports.items()},
        },
    )
    if figure is not None:
        write_reliability_figure(figure, report.reliability)
    if config.save_threshold:
        save_threshold(config.predictor, report.threshold)
    if config.markdown is not None:
        put_section(config.markdown, SECTION, urgency_markdown(_by_recipe(reports)))
    if not report.adversarial.passed:
        log.error(
            "claims of urgency jump the queue: %s of the pairs, at most %.1f %% are allowed",
            _percent(report.adversarial.scheduled.jumped.value),
            100 * config.jump_rate,
        )
    return 0 if report.adversarial.passed else 3


def _split(texts: list[LabeledText], split: str, path: str) -> list[LabeledText]:
    selected = [text for text in texts if text.split == split and not text.claimed]
    if not selected:
        raise InputError(f"{Path(path).name}, texts of split {split}", 0, "at least one")
    return selected


def _others(compare: list[str] | None) -> list[tuple[str, str]]:
    """Name and predictor of each entry NAME=PREDICTOR."""
    pairs = [entry.partition("=") for entry in compare or []]
    for name, equals, predictor in pairs:
        if not (name and equals and predictor) or name in BASELINES:
            raise InputError("compare", f"{name}{equals}{predictor}", "NAME=PREDICTOR with a name of its own")
    return [(name, predictor) for name, _, predictor in pairs]


def _by_recipe(reports: list[tuple[str, UrgencyReport]]) -> dict[str, list[UrgencyReport]]:
    """Reports of one name together, in the order of the names."""
    groups: dict[str, list[UrgencyReport]] = {}
    for name, report in reports:
        groups.setdefault(name.replace("_", " "), []).append(report)
    return groups


def _open(predictor: str, config: EvaluateUrgencyConfig, train: list[LabeledText]) -> Predict:
    from training.urgency.predictors import BagOfWordsBaseline, ConstantBaseline, open_urgency

    if predictor == "constant":
        return ConstantBaseline(train)
    if predictor == "bag-of-words":
        return BagOfWordsBaseline(train)
    if predictor.startswith(FROZEN):
        from training.urgency.predictors import FrozenEncoderBaseline

        return FrozenEncoderBaseline(train, predictor.removeprefix(FROZEN), config.batch_size)
    return open_urgency(predictor, accelerator=config.accelerator, batch_size=config.batch_size)


def _baselines(train: list[LabeledText]) -> dict[str, Predict]:
    from training.urgency.predictors import BagOfWordsBaseline, ConstantBaseline

    if not train:
        raise InputError("data, texts of split train", 0, "at least one, or --baselines false")
    return {"constant": ConstantBaseline(train), "bag_of_words": BagOfWordsBaseline(train)}


def _log(name: str, report: UrgencyReport) -> None:
    log.info(
        "%s: accuracy %s, kappa %s, critical under-triage %s (decided: %s), jump rate %s (decided: %s), "
        "abstains below %s: answers %s",
        name,
        _percent(report.predicted.accuracy.value),
        "undefined" if report.predicted.kappa is None else f"{report.predicted.kappa:.3f}",
        _percent(report.predicted.critical_under_triage.value),
        _percent(report.decided.critical_under_triage.value),
        _percent(report.adversarial.scheduled.jumped.value),
        _percent(report.adversarial.decided.jumped.value),
        "always" if report.threshold.threshold is None else f"{report.threshold.threshold:.2f}",
        _percent(report.answered.value),
    )


def _percent(value: Any) -> str:
    return "undefined" if value is None else f"{100 * value:.1f} %"


def main(args: Sequence[str] | None = None) -> int:
    """Entry point of `evaluate-urgency`."""
    return run_command(
        "evaluate-urgency",
        EvaluateUrgencyConfig,
        evaluate_urgency_command,
        positionals=("predictor",),
        extra="train",
        args=args,
    )


if __name__ == "__main__":
    raise SystemExit(main())
