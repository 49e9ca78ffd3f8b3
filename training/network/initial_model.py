"""Initial predictor of a training run: new heads on a pretrained encoder, or a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from predictors.modules.checkpoint import TRAINING, load_checkpoint
from predictors.modules.config import Conditioning, PredictorConfig
from predictors.modules.encoder import load_encoder, load_tokenizer
from predictors.modules.heads import HEADS, FreeOdds, Heads, ProportionalOdds
from predictors.modules.normalization import Normalization
from predictors.modules.predictor import PromptPredictor
from scheduler_core.errors import InputError
from training.fitting.rows import Rows
from training.network.config import ConditioningOptions, LoraOptions, StageConfig, TrainConfig
from training.network.data import UrgencyLabels

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

# Standard deviation of the standard Student-t distribution at nu = 3.5; converts standard deviations to scales.
T_STD = (3.5 / 1.5) ** 0.5
# Initial sigma as a fraction of the standard deviation of mu between prompts.
INITIAL_SIGMA_FRACTION = 0.5
# Standard deviation of log(1 + sigma): default if no row has enough samples for an estimate, and lower bound otherwise.
SIGMA_LOG_STD, MIN_SIGMA_LOG_STD = 0.2, 0.1
# Minimum number of samples of a row for an estimate of its sigma.
MIN_SAMPLES = 3
# Lengths whose logarithms have a smaller standard deviation are considered equal.
MIN_LOG_STD = 1e-6
_ARCHITECTURE = (
    *("max_length", "truncation_side", "pooling", "prompt_length"),
    *("conversations", "part_tokens", "amounts"),
)


@dataclass(frozen=True, slots=True)
class InitialModel:
    """A predictor to train; with `first_new_model`, only the embeddings of served models from this number on are trained."""

    model: PromptPredictor
    tokenizer: PreTrainedTokenizerBase
    first_new_model: int | None = None


def initial_model(config: TrainConfig, train: Rows, labels: UrgencyLabels) -> InitialModel:
    """Creates the predictor described by `config` for the given training rows and labels."""
    initial = (
        _fresh(config, train, labels) if config.init is None else _from_checkpoint(config, config.init, train)
    )
    if config.encoder_dropout is not None:
        set_dropout(initial.model.encoder, config.encoder_dropout)
    if config.lora is not None:
        initial.model.encoder = with_adapters(initial.model.encoder, config.lora)
    return initial


def with_adapters(encoder: nn.Module, options: LoraOptions) -> nn.Module:
    """Adds low-rank adapters, initially without effect, to an encoder; `merge_adapters` removes them again. InputError if
    the encoder has fewer layers than `options.layers`, or no list of layers."""
    from peft import LoraConfig, LoraModel

    num_layers = int(encoder.config.num_hidden_layers)  # type: ignore[union-attr,arg-type]
    if options.layers is not None and options.layers > num_layers:
        raise InputError("lora.layers", options.layers, f"at most the encoder's {num_layers}")
    lists = [module for module in encoder.modules() if isinstance(module, nn.ModuleList)]
    layers = next((module for module in lists if len(module) == num_layers), None)
    if layers is None:
        kind = type(encoder).__name__
        raise InputError("lora", kind, f"an encoder with a list of its {num_layers} layers, or no adapters")
    trained = set(layers[num_layers - (options.layers or num_layers) :].modules())
    names = [
        name
        for name, module in encoder.named_modules()
        if isinstance(module, nn.Linear) and module in trained
    ]
    adapters = LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules=names)
    return LoraModel(encoder, adapters, "default")


def merge_adapters(model: PromptPredictor) -> None:
    """Merges the adapters into the weights of the encoder and removes them."""
    model.encoder = model.encoder.merge_and_unload()  # type: ignore[operator]


def set_dropout(encoder: nn.Module, rate: float) -> None:
    """Sets the rate of all dropouts of an encoder; some architectures store it as a number instead of a module."""
    for module in encoder.modules():
        if isinstance(module, nn.Dropout):
            module.p = rate
        for name in ("dropout", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, rate)


def _encoder(encoder: str) -> nn.Module:
    """Loads a pretrained encoder, or that of a checkpoint folder of `train`."""
    if (Path(encoder) / TRAINING).is_file():
        return load_checkpoint(encoder).model.encoder
    return load_encoder(encoder)


def _fresh(config: TrainConfig, train: Rows, labels: UrgencyLabels) -> InitialModel:
    tokenizer = load_tokenizer(config.encoder, truncation_side=config.truncation_side)
    names = tuple(sorted(train.models))
    conditioning = None
    if (options := config.conditioning) is not None:
        if not names:
            raise InputError("conditioning", "rows without a served model", "data with a column model")
        conditioning = Conditioning(
            served_models=names,
            width=options.width,
            temperature=options.temperature,
            unknown=options.served_model_dropout > 0 or options.unknown_is_mean,
            unknown_is_mean=options.unknown_is_mean,
        )
    predictor = PredictorConfig(
        encoder=config.encoder,
        heads=_heads(config, train),
        conditioning=conditioning,
        max_length=config.max_length,
        truncation_side=config.truncation_side,
        pooling=config.pooling,
        prompt_length=config.prompt_length,
        conversations=config.conversations,
        part_tokens=config.part_tokens,
        amounts=config.amounts,
        served_models=() if conditioning is not None else names,
    )
    generator = torch.Generator().manual_seed(config.seed)
    model = PromptPredictor(
        predictor, _encoder(config.encoder), _normalization(config, train), generator=generator
    )
    _check_vocabulary(config.encoder, model, tokenizer)
    if config.urgency is not None:
        set_level_frequencies(model, labels)
    return InitialModel(model, tokenizer)


def _heads(config: TrainConfig, train: Rows) -> Heads:
    """Heads of `config`; options that are not fields of a head are ignored."""
    heads: dict[str, Any] = {}
    for name in config.tasks:
        options = getattr(config, name)
        fields = {field: value for field, value in vars(options).items() if field in HEADS[name].__slots__}
        fields["tower"] = options.tower or config.tower
        if name == "bucket" and options.edges is None:
            fields["edges"] = quantile_edges(train, options.num_buckets)
        heads[name] = HEADS[name](**fields)
    return Heads(**heads)


def quantile_edges(train: Rows, num_buckets: int) -> tuple[float, ...]:
    """Bounds of buckets with about the same number of training samples each; fewer buckets if many lengths are equal.
    InputError if there would be only one bucket."""
    levels = np.arange(1, num_buckets) / num_buckets
    edges = np.unique(np.quantile(train.lengths, levels, method="higher"))
    edges = edges[edges > train.lengths.min()]
    if len(edges) == 0:
        raise InputError("bucket.edges", None, "edges in tokens, because most training lengths are equal")
    return tuple(float(edge) for edge in edges)


def _normalization(config: TrainConfig, train: Rows) -> Normalization:
    length, fitted = config.length, np.isfinite(train.sigma)
    statistics = Normalization.of(
        mu=train.mu if config.needs_fits else None,
        sigma=train.sigma if config.needs_fits else None,
        tokens=None if config.regression is None else train.lengths,
        within=train.sigma[fitted] if length is not None and length.within else None,
    )
    return statistics if length is None or config.needs_fits else length_statistics(train, statistics)


def length_statistics(train: Rows, others: Normalization) -> Normalization:
    """`others` with an initial normalization of mu and sigma, estimated from raw samples; InputError if all lengths are equal.

    mu: mean and standard deviation of the rows' mean log lengths. sigma: scale of the samples within a row, combined with
    a fraction of the scale of mu between rows, to account for the initial error in mu.
    """
    logs = np.log(train.lengths.astype(np.float64))
    means = train.row_means(logs)
    std = float(logs.std())
    if std < MIN_LOG_STD:
        raise InputError("output_tokens in the training split", int(train.lengths[0]), "lengths that differ")
    mu_std = max(float(means.std()), 0.1 * std)
    within, sigma_log_std = 0.0, SIGMA_LOG_STD
    is_repeated = train.counts >= MIN_SAMPLES
    if is_repeated.any():
        counts = train.counts[is_repeated]
        variance = np.maximum(train.row_means(logs**2) - means**2, 0.0)[is_repeated] * counts / (counts - 1)
        scale = np.log1p(np.sqrt(variance) / T_STD)
        within, sigma_log_std = float(np.expm1(scale.mean())), max(float(scale.std()), MIN_SIGMA_LOG_STD)
    sigma = np.hypot(within, INITIAL_SIGMA_FRACTION * mu_std / T_STD)
    return replace(
        others,
        mu_mean=float(means.mean()),
        mu_std=mu_std,
        sigma_log_mean=float(np.log1p(sigma)),
        sigma_log_std=sigma_log_std,
    )


def set_level_frequencies(model: PromptPredictor, labels: UrgencyLabels) -> None:
    """Initializes the urgency head's thresholds to the level frequencies of the training labels, with add-one smoothing."""
    head = model.heads["urgency"]
    assert isinstance(head, ProportionalOdds | FreeOdds) and model.config.heads.urgency is not None  # noqa: PT018
    num_levels = len(model.config.heads.urgency.levels)
    level, weight = zip(*labels.values(), strict=True)
    counts = np.bincount(level, weights=weight, minlength=num_levels) + 1
    cumulative = np.cumsum(counts)[:-1] / counts.sum()
    head.set_thresholds(torch.from_numpy(np.log(cumulative / (1 - cumulative))).float())


def _check_vocabulary(encoder: str, model: PromptPredictor, tokenizer: PreTrainedTokenizerBase) -> None:
    embeddings = getattr(model.encoder.config, "vocab_size", None)
    highest = max(tokenizer.get_vocab().values())
    if embeddings is not None and highest >= embeddings:
        allowed = f"a tokenizer with ids below {embeddings}; it has ids up to {highest}"
        raise InputError("encoder", encoder, allowed)


def _from_checkpoint(config: TrainConfig, path: str, train: Rows) -> InitialModel:
    checkpoint = load_checkpoint(path)
    model, conditioning = checkpoint.model, checkpoint.config.conditioning
    form = {name: getattr(config, name) for name in ("conversations", "part_tokens", "amounts")}
    model.config = replace(model.config, **form)  # what the texts of this run are made of
    _check_heads(config, checkpoint.config.heads, path)
    if conditioning is None:
        if config.conditioning is not None:
            raise InputError("conditioning", path, "a checkpoint conditioned on the served model")
        return InitialModel(model, checkpoint.tokenizer)
    new = tuple(sorted(set(train.models) - set(conditioning.served_models)))
    first_new = len(conditioning.served_models) + 1
    if config.only_conditioning and not new:
        allowed = "data of a served model that the checkpoint does not have"
        raise InputError("only_conditioning", sorted(train.models), allowed)
    if new:
        log.info("served models added: %s", ", ".join(new))
        model = with_served_models(model, new)
    return InitialModel(model, checkpoint.tokenizer, first_new if config.only_conditioning else None)


#: Stage 2 of a run that trains only embeddings: few parameters, initialized far from their optimum.
EMBEDDING_STAGE = StageConfig(epochs=60, learning_rate=3e-2, patience=10)


def with_architecture_of_init(config: TrainConfig) -> TrainConfig:
    """Options of a run with `only_conditioning`: the architecture of the checkpoint `init`, and EMBEDDING_STAGE if stage2
    has its default.

    InputError if the checkpoint is damaged, or is not conditioned on the served model.
    """
    predictor = load_checkpoint(config.init or "").config
    conditioning, length = predictor.conditioning, predictor.heads.length
    if conditioning is None:
        raise InputError("init", config.init, "a checkpoint conditioned on the served model")
    task = config.length
    if task is not None and length is not None:
        is_likelihood = task.objective == "nll"
        task = replace(
            task,
            objective="crps" if length.quantiles else task.objective,
            nu=length.nu,
            learn_nu=length.learn_nu,
            within=length.within and is_likelihood,
            quantiles=length.quantiles,
        )
    default = next(each.default for each in fields(TrainConfig) if each.name == "stage2")
    return replace(
        config,
        length=task,
        conditioning=ConditioningOptions(
            width=conditioning.width,
            temperature=conditioning.temperature,
            served_model_dropout=0.1 if conditioning.unknown else 0.0,
        ),
        stage2=EMBEDDING_STAGE if config.stage2 == default else config.stage2,
        **{name: getattr(predictor, name) for name in _ARCHITECTURE},
    )


def _check_heads(config: TrainConfig, heads: Heads, path: str) -> None:
    for name in config.tasks:
        head, task = getattr(heads, name), getattr(config, name)
        if head is None:
            raise InputError(name, path, f"a checkpoint with this head; it has {', '.join(heads.names)}")
        for field in ("nu", "quantiles", "levels"):
            if (value := getattr(task, field, None)) != (stored := getattr(head, field, None)):
                raise InputError(f"{name}.{field}", value, f"{stored}, as in the checkpoint")
        if name == "length" and task.within > head.within:
            raise InputError(
                "length.within", True, "false, because the checkpoint does not predict sigma_within"
            )


def with_served_models(model: PromptPredictor, names: Sequence[str]) -> PromptPredictor:
    """Adds served models to a predictor, initialized with the embedding and the calibration of the unknown model.

    All other weights and the predictions for the existing served models are unchanged.
    """
    conditioning, table = model.config.conditioning, model.calibration
    assert conditioning is not None
    larger_conditioning = replace(conditioning, served_models=(*conditioning.served_models, *names))
    larger = PromptPredictor(
        replace(model.config, conditioning=larger_conditioning),
        model.encoder,
        model.normalization,
        calibration=table.with_models(len(names)),
    )
    weights = model.state_dict()
    name = "conditions.served_model.weight"
    embeddings = weights[name]
    # Without a trained embedding of the unknown model, use the mean of the existing ones.
    new = embeddings[:1] if conditioning.unknown else embeddings[1:].mean(dim=0, keepdim=True)
    weights[name] = torch.cat([embeddings, new.expand(len(names), -1)])
    larger.load_state_dict(weights)
    return larger.eval()
