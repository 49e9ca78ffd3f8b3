"""Configurations of `adapt` and `calibrate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from predictors.pretrained import PRETRAINED
from scheduler_core.ranges import INTEGERS, check_ranges
from scheduler_core.shell.threads import check_threads
from training.fitting.grouping import GroupingOptions


@dataclass(frozen=True, kw_only=True)
class AdaptConfig:
    """Correct an artifact's predicted lengths for each served model of a log, compare it with the old one on held-back requests, and write it if it is better."""

    INPUTS = ("log",)
    OUTPUTS = ("out", "report")

    log: str
    """Log of finished requests with their prompts: a file of OpenAI-style requests and responses, a feedback folder of tailcast-proxy (with --feedback_prompts stored), or any table; see docs/importing.md."""
    out: str
    """Artifact folder to write, with the same artifact id. With --overwrite true it may be the old one's: a running service then loads it."""
    artifact: str = PRETRAINED
    """Artifact folder to start from, or pretrained."""
    overwrite: bool = False
    """Replace an earlier artifact at `out`, if it holds nothing else, and the report; anything else there is never replaced."""
    report: str | None = None
    """HTML page to write, with the comparison; unset: OUT.html."""
    kind: str = "auto"
    """Kind of the log, as in import-lengths; samples: the output of import-lengths; auto: detected from the content."""
    columns: str = ""
    """Column mapping for kind log, as in import-lengths."""
    model: str = ""
    """Name of the served model for requests without one."""
    on_error: Literal["skip", "stop"] = "skip"
    """Rows that cannot be used: skip them and report their number and reasons, or stop at the first."""
    max_tokens: int | None = None
    """Maximum number of output tokens of each request, for logs that do not record it."""
    held_back: float = 0.3
    """Fraction of the prompts excluded from fitting; the old and the new artifact are compared on their requests."""
    max_requests: int = 5000
    """Maximum number of requests; only the last ones of the log are used."""
    seed: int = 0
    """Seed of the split and of the bootstrap intervals."""
    threads: int = 2
    """Threads of the model."""
    progress: bool = True
    """Show progress bars on a terminal, or a line every ten seconds elsewhere."""

    def __post_init__(self) -> None:
        check_ranges(self, max_tokens=(1, INTEGERS), max_requests=(50, INTEGERS), seed=(0, INTEGERS))
        check_ranges(self, held_back=(0.1, 0.9))
        check_threads("threads", self.threads)
        if self.report is None:  # so that it is checked as any output
            object.__setattr__(self, "report", f"{self.out.rstrip('/')}.html")


@dataclass(frozen=True, kw_only=True)
class CalibrateConfig(GroupingOptions):
    """Calibrate a predictor's distributions for each served model, compare them with the old ones on held-back prompts, and write a new checkpoint."""

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
    split: Literal["all", "train", "validation", "test"] = "all"
    """Prompts to calibrate on: all, or a split of the predictor's training (by prompt id)."""
    held_back: float = 0.3
    """Fraction of the prompts excluded from fitting; old and new predictions are compared on them."""
    seed: int = 0
    """Seed of the split and of the bootstrap intervals."""
    batch_size: int = 16
    """Prompts per call of the model."""
    threads: int | None = None
    """Threads of the model; unset: torch's default."""
    report: str | None = None
    """HTML file to write: comparison of old and new predictions, by served model."""
    progress: bool = True
    """Show progress bars on a terminal, or a line every ten seconds elsewhere."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, batch_size=(1, INTEGERS), seed=(0, INTEGERS), held_back=(0.1, 0.9))
        check_threads("threads", self.threads)
