"""The command `calibrate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scheduler_core.command import command
from scheduler_core.ranges import BELOW_ONE, INTEGERS, POSITIVE, check_ranges
from scheduler_core.threads import check_threads
from training.progress import prepare_models


@dataclass(frozen=True, kw_only=True)
class CalibrateConfig:
    """Shift and scale a predictor's distributions so that coverage is right for each served model, and make conformal quantiles; writes a new checkpoint."""

    INPUTS = ("predictor", "data")
    OUTPUTS = ("out", "report")

    predictor: str
    """Checkpoint folder of train with a length head."""
    data: str
    """File with fits or output lengths, with prompts that were not trained on."""
    out: str
    """Checkpoint folder to write."""
    overwrite: bool = False
    """Replace an earlier checkpoint at `out`, if it holds nothing else; anything else there is never replaced."""
    method: Literal["auto", "likelihood", "quantiles", "coverage", "identity"] = "auto"
    """How shift and scale are estimated; auto: as covers best on held-out prompts of the data. How far served models are pooled is chosen in the same way."""
    split: Literal["all", "train", "validation", "test"] = "all"
    """Which prompts: all, or a split as training made it (by prompt id)."""
    conformal_fraction: float = 0.4
    """Fraction of the prompts that only the conformal quantiles are made from; the others fit shift and scale."""
    seed: int = 0
    """Seed of the fractions and folds, and of the sample of each prompt that counts for the conformal quantiles."""
    group_by: str = "prompt_id,model"
    """Columns that name a group, separated by commas."""
    max_tokens: int | None = None
    """Limit on all outputs; see evaluate."""
    batch_size: int = 16
    """Prompts per call of the model."""
    threads: int | None = None
    """Threads of the model; unset: torch's own choice."""
    report: str | None = None
    """HTML file to write: coverage of each served model before and after."""
    progress: bool = True
    """Show progress bars on a terminal, a line now and then elsewhere."""

    def __post_init__(self) -> None:
        check_ranges(self, batch_size=(1, INTEGERS), max_tokens=(1, INTEGERS), seed=(0, INTEGERS))
        check_ranges(self, conformal_fraction=(POSITIVE, BELOW_ONE))
        check_threads("threads", self.threads)

    @property
    def keys(self) -> tuple[str, ...]:
        """Columns that name a group."""
        return tuple(name.strip() for name in self.group_by.split(","))


main = command(
    "calibrate",
    CalibrateConfig,
    "training.calibrating.run:calibrate_command",
    positionals=("predictor",),
    extra="train",
    prepare=prepare_models,
)


if __name__ == "__main__":
    raise SystemExit(main())
