"""Options of `evaluate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scheduler_core.errors import InputError


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Compare a predictor's distributions with sampled answers: parameters, ranking, coverage, CRPS."""

    predictor: str
    """Artifact folder of export-onnx, or checkpoint folder of train."""
    data: str
    """Parquet file with fits (fits/2), or with answer lengths (samples/2 or lists), which are fitted first; with prompts."""
    json: str
    """JSON file to write."""
    split: Literal["all", "train", "validation", "test"] = "all"
    """Which prompts: all, or a split as the predictor's training made it (by prompt id)."""
    figure: str | None = None
    """PNG file to write: predicted against fitted parameters, and calibration."""
    predictions: str | None = None
    """Parquet file to write: predicted and fitted mu and sigma of each group."""
    served_model: str | None = None
    """Use only rows whose column `model` has this value."""
    censoring: Literal["right", "none"] = "right"
    """What a cut answer means, when the data are answer lengths; see fit-dist."""
    group_by: str = "prompt_id,model"
    """Columns that name a group, separated by commas."""
    max_tokens: int | None = None
    """Cap on all answers, when the data are answer lengths; see fit-dist."""
    batch_size: int = 16
    """Prompts per call of the model."""
    threads: int | None = None
    """Threads of the model; unset: one for an artifact, torch's own choice for a checkpoint."""
    progress: bool = True
    """Show progress bars on a terminal, a line now and then elsewhere."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "threads", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(name, value, "a whole number of at least 1")
        if not all(self.keys):
            raise InputError("group_by", self.group_by, "column names separated by commas")

    @property
    def keys(self) -> tuple[str, ...]:
        """Columns that name a group."""
        return tuple(name.strip() for name in self.group_by.split(","))
