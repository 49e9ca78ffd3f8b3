"""The command `calibrate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scheduler_core.ranges import BELOW_ONE, INTEGERS, POSITIVE, check_ranges
from scheduler_core.shell.command import command
from scheduler_core.shell.threads import check_threads
from training.progress import prepare_models


@dataclass(frozen=True, kw_only=True)
class CalibrateConfig:
    """Calibrate a predictor's distributions for each served model by a shift and a scale, compute conformal quantiles, and write a new checkpoint."""

    INPUTS = ("predictor", "data")
    OUTPUTS = ("out", "report")

    predictor: str
    """Checkpoint folder of train with a length head."""
    data: str
    """File of fits or output lengths, with prompts that were not used for training."""
    out: str
    """Checkpoint folder to write."""
    overwrite: bool = False
    """Replace an earlier checkpoint at `out`, if it holds nothing else; anything else there is never replaced."""
    method: Literal["auto", "likelihood", "quantiles", "coverage", "identity"] = "auto"
    """Estimator of shift and scale; auto: the one with the best cross-validated coverage. The pooling of served models is always selected by cross-validation."""
    split: Literal["all", "train", "validation", "test"] = "all"
    """Prompts to calibrate on: all, or a split of the predictor's training (by prompt id)."""
    conformal_fraction: float = 0.4
    """Fraction of the prompts reserved for the conformal quantiles; shift and scale are fitted to the others."""
    seed: int = 0
    """Seed of the data split, of the folds, and of the sample drawn from each row for the conformal quantiles."""
    group_by: str = "prompt_id,model"
    """Columns that identify a group, separated by commas."""
    max_tokens: int | None = None
    """Limit of all outputs; see evaluate."""
    batch_size: int = 16
    """Prompts per call of the model."""
    threads: int | None = None
    """Threads of the model; unset: torch's default."""
    report: str | None = None
    """HTML file to write: coverage of each served model before and after."""
    progress: bool = True
    """Show progress bars on a terminal, or a line every ten seconds elsewhere."""

    def __post_init__(self) -> None:
        check_ranges(self, batch_size=(1, INTEGERS), max_tokens=(1, INTEGERS), seed=(0, INTEGERS))
        check_ranges(self, conformal_fraction=(POSITIVE, BELOW_ONE))
        check_threads("threads", self.threads)

    @property
    def keys(self) -> tuple[str, ...]:
        """Columns that identify a group."""
        return tuple(name.strip() for name in self.group_by.split(","))


main = command(
    "calibrate",
    CalibrateConfig,
    "training.correcting.calibrate:calibrate_command",
    positionals=("predictor",),
    extra="train",
    prepare=prepare_models,
)


if __name__ == "__main__":
    raise SystemExit(main())
