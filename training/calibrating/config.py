"""Options of `calibrate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scheduler_core.errors import InputError
from scheduler_core.threads import check_threads


@dataclass(frozen=True, kw_only=True)
class CalibrateConfig:
    """Shift and scale a predictor's distributions so that coverage is right for each served model, and make conformal quantiles; writes a new checkpoint."""

    INPUTS = ("predictor", "data")
    OUTPUTS = ("out",)

    predictor: str
    """Checkpoint folder of train with a length head."""
    data: str
    """File with fits or output lengths, with prompts that were not trained on."""
    out: str
    """Checkpoint folder to write."""
    overwrite: bool = False
    """Replace an earlier checkpoint at `out`, if it holds nothing else; anything else there is never replaced."""
    method: Literal["auto", "likelihood", "quantiles", "coverage", "identity"] = "auto"
    """How shift and scale are estimated; auto: what covers best on held-out prompts of the data, pooling included."""
    pooling: float = 0.0
    """Weight, from 0 to 1, of the estimate for all served models together in that of each; with auto it is chosen."""
    split: Literal["all", "train", "validation", "test"] = "all"
    """Which prompts: all, or a split as training made it (by prompt id)."""
    folds: int = 5
    """Folds of the prompts, by hash of the text, for the cross-validation of auto."""
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
    progress: bool = True
    """Show progress bars on a terminal, a line now and then elsewhere."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(name, value, "integers > 0")
        check_threads("threads", self.threads)
        if not 0 < self.conformal_fraction < 1:
            raise InputError("conformal_fraction", self.conformal_fraction, "numbers between 0 and 1")
        if not 0 <= self.pooling <= 1:
            raise InputError("pooling", self.pooling, "numbers from 0 to 1")
        if self.folds < 2:
            raise InputError("folds", self.folds, "integers >= 2")
        if self.seed < 0:
            raise InputError("seed", self.seed, "integers >= 0")

    @property
    def keys(self) -> tuple[str, ...]:
        """Columns that name a group."""
        return tuple(name.strip() for name in self.group_by.split(","))
