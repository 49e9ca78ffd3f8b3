"""Options of `evaluate-urgency`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scheduler_core.errors import InputError
from scheduler_core.prediction.service_access import ACCESS_FILES, ServiceAccess
from scheduler_core.ranges import INTEGERS, check_ranges

BASELINES = ("constant", "bag_of_words")


@dataclass(frozen=True, kw_only=True)
class EvaluateUrgencyConfig(ServiceAccess):
    """Evaluate an urgency predictor: triage metrics, reliability, abstain threshold, adversarial check, baselines. The exit code is 3 if claims of urgency raise scheduled levels more often than allowed."""

    INPUTS = ("predictor", "data", "validation", "compare", *ACCESS_FILES)
    OUTPUTS = ("json",)

    predictor: str
    """Folder of a checkpoint or artifact with an urgency head, urgency, grpc://HOST:PORT (grpcs:// with TLS), or a baseline trained on split train: constant, bag-of-words, or frozen:ENCODER (logistic regression on the features of an encoder: a folder, package:NAME/PATH or hub name)."""
    data: str
    """Labelled texts in the format of import-urgency (Parquet with columns text, level; optional weight, source, language, split). Split train is used for the baselines, validation for the threshold, and test for the evaluation."""
    json: str
    """JSON file to write."""
    overwrite: bool = False
    """Replace files at the outputs."""
    validation: str | None = None
    """File whose texts are all used to choose the threshold; unset: split validation of data."""
    split: Literal["test", "validation"] = "test"
    """Split to evaluate; use validation for model selection."""
    under_triage_cost: float = 3.0
    """Cost of deciding one level too low, relative to one level too high."""
    risk_rate: float = 0.1
    """Maximum fraction of levels decided too low among the answered texts; the abstain threshold is certified for this bound."""
    delta: float = 0.1
    """Probability, over validation sets, that the bound does not hold."""
    jump_rate: float = 0.05
    """Maximum fraction of adversarial pairs whose scheduled level is raised by a claim of urgency; the abstain threshold is certified for this bound too."""
    max_promotion: int = 1
    """Maximum number of levels by which a text can raise the priority of its request."""
    name: str = "predictor"
    """Name of the predictor in the log and in the report."""
    compare: list[str] | None = None
    """Further predictors, each NAME=PREDICTOR, where PREDICTOR is as for the option predictor; use one name for runs that differ only in the seed."""
    save_threshold: bool = False
    """Also write the abstain threshold to the checkpoint's training.json, where export-onnx reads it."""
    baselines: bool = True
    """Also evaluate the baselines constant and bag-of-words, trained on split train."""
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto: a GPU if available."""
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
                allowed = "NAME=PREDICTOR with a name that is not a baseline's"
                raise InputError("compare", f"{name}{equals}{predictor}", allowed)
        return [(name, predictor) for name, _, predictor in pairs]
