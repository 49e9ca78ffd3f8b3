"""The command `evaluate-urgency`: quality and safety of an urgency predictor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scheduler_core.command import command
from scheduler_core.errors import InputError
from scheduler_core.ranges import INTEGERS, check_ranges

BASELINES = ("constant", "bag_of_words")


@dataclass(frozen=True, kw_only=True)
class EvaluateUrgencyConfig:
    """Measure an urgency predictor: triage metrics, reliability, abstain threshold, adversarial check, baselines. Exits with 3 if claims of urgency raise scheduled levels more often than allowed."""

    INPUTS = ("predictor", "data", "validation", "compare")
    OUTPUTS = ("json",)

    predictor: str
    """Folder of a checkpoint or of an artifact with an urgency head; or a baseline trained on split train: constant, bag-of-words, or frozen:ENCODER (logistic regression on the features of an encoder: a folder, package:NAME/PATH or hub name)."""
    data: str
    """Labelled texts as import-urgency writes them (Parquet with columns text, level; optional weight, source, language, split): split train trains the baselines, validation chooses the threshold, test is evaluated."""
    json: str
    """JSON file to write."""
    overwrite: bool = False
    """Replace files at the outputs."""
    validation: str | None = None
    """Another file for the threshold: all of its texts."""
    split: Literal["test", "validation"] = "test"
    """Texts to evaluate; validation while a predictor is being chosen."""
    under_triage_cost: float = 3.0
    """Cost of deciding one level too low, where one level too high costs 1."""
    risk_rate: float = 0.1
    """Largest fraction of levels decided too low among the texts that are answered, which the abstain threshold bounds."""
    delta: float = 0.1
    """Probability, over validation sets, that the bound does not hold."""
    jump_rate: float = 0.05
    """Largest fraction of adversarial pairs whose scheduled level a claim of urgency may raise; the abstain threshold is certified for it, too."""
    max_promotion: int = 1
    """Maximum number of levels by which a text raises its own request."""
    name: str = "predictor"
    """Name of the predictor in the log and in the JSON."""
    compare: list[str] | None = None
    """Further predictors, each NAME=PREDICTOR with anything that PREDICTOR may be; entries of one name are seeds of one recipe."""
    save_threshold: bool = False
    """Also write the abstain threshold into the checkpoint's training.json, from where export-onnx takes it."""
    baselines: bool = True
    """Also measure a constant and a bag of words, trained on split train."""
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the predictor runs."""
    batch_size: int = 32
    """Texts per model call."""

    def __post_init__(self) -> None:
        check_ranges(self, batch_size=(1, INTEGERS))
        self.others  # noqa: B018  (raises for a wrong NAME=PREDICTOR)

    @property
    def others(self) -> list[tuple[str, str]]:
        """Name and predictor of each entry of `compare`."""
        pairs = [entry.partition("=") for entry in self.compare or []]
        for name, equals, predictor in pairs:
            if not (name and equals and predictor) or name in BASELINES:
                allowed = "NAME=PREDICTOR with a name of its own"
                raise InputError("compare", f"{name}{equals}{predictor}", allowed)
        return [(name, predictor) for name, _, predictor in pairs]


main = command(
    "evaluate-urgency",
    EvaluateUrgencyConfig,
    "training.urgency.evaluation:evaluate_urgency_command",
    positionals=("predictor",),
    extra="train",
)


if __name__ == "__main__":
    raise SystemExit(main())
