"""The predictor a run starts with: fresh heads on a pretrained encoder, or what a checkpoint holds."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from predictors.lexical import FEATURE_NAMES, FEATURE_VERSION, MAX_CHARS
from predictors.manifest import LexicalInput
from predictors.modules import (
    BucketHead,
    Calibration,
    Conditioning,
    Heads,
    LengthHead,
    Normalization,
    PredictorConfig,
    PromptPredictor,
    RankHead,
    RegressionHead,
    Tower,
    UrgencyHead,
    load_checkpoint,
    load_encoder,
    load_tokenizer,
    read_lexical,
)
from predictors.modules.checkpoint import TRAINING
from predictors.modules.heads import FreeOdds, OrdinalTower
from scheduler_core.errors import InputError
from training.config import TrainConfig
from training.labels import Labels
from training.rows import Rows
from training.tasks import TowerOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

# Standard deviation of the Student-t distribution at nu = 3.5: what turns a standard deviation into a scale.
T_STD = (3.5 / 1.5) ** 0.5
# Share of the spread of mu between prompts that sigma starts with.
SHARE_OF_SPREAD = 0.5
# Scale of log(1 + sigma) where no row has answers enough to show its spread, and the smallest where some have.
SIGMA_LOG_STD, MIN_SIGMA_LOG_STD = 0.2, 0.1
# Answers of a row that show its spread.
MIN_ANSWERS = 3
# Below this spread of log lengths there is nothing to learn.
MIN_SPREAD = 1e-6


@dataclass(frozen=True, slots=True)
class Start:
    """A predictor to be trained.

    Attributes:
        model: The predictor.
        tokenizer: Its encoder's.
        first_new_model: With `only_conditioning`, number of the first served model whose embedding is trained.
    """

    model: PromptPredictor
    tokenizer: PreTrainedTokenizerBase
    first_new_model: int | None = None


def build(config: TrainConfig, train: Rows, labels: Labels) -> Start:
    """The predictor that `config` describes, for the rows and labels it is trained on.

    Raises:
        InputError: Encoder or checkpoint cannot be used, or do not fit the configuration or the data.
    """
    start = (
        _fresh(config, train, labels) if config.init is None else _from_checkpoint(config, config.init, train)
    )
    if config.encoder_dropout is not None:
        set_dropout(start.model.encoder, config.encoder_dropout)
    return start


def set_dropout(encoder: nn.Module, rate: float) -> None:
    """Gives all dropouts of an encoder another rate; some architectures keep them as numbers instead of modules."""
    for module in encoder.modules():
        if isinstance(module, nn.Dropout):
            module.p = rate
        for name in ("dropout", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, rate)


def _encoder(encoder: str) -> nn.Module:
    """A pretrained encoder; of a checkpoint folder of `train` the encoder that it ended with."""
    if (Path(encoder) / TRAINING).is_file():
        return load_checkpoint(encoder).model.encoder
    return load_encoder(encoder)


def _fresh(config: TrainConfig, train: Rows, labels: Labels) -> Start:
    tokenizer = load_tokenizer(config.encoder, truncation_side=config.truncation_side)
    names = tuple(sorted(train.models))
    conditioning = None
    if config.conditioning is not None:
        if not names:
            raise InputError("conditioning", "rows without a served model", "data with a column model")
        options = config.conditioning
        conditioning = Conditioning(
            served_models=names,
            width=options.width,
            temperature=options.temperature,
            unknown=options.served_model_dropout > 0,
        )
    predictor = PredictorConfig(
        encoder=config.encoder,
        heads=_heads(config, train),
        conditioning=conditioning,
        max_length=config.max_length,
        truncation_side=config.truncation_side,
        pooling=config.pooling,
        prompt_length=config.prompt_length,
        lexical=_lexical() if config.lexical else None,
        conversations=config.conversations,
        served_models=() if conditioning is not None else names,
    )
    generator = torch.Generator().manual_seed(config.seed)
    model = PromptPredictor(
        predictor, _encoder(config.encoder), _normalization(config, train), generator=generator
    )
    _check_vocabulary(config.encoder, model, tokenizer)
    if model.lexical is not None:
        table = read_lexical(predictor.lexical, train.prompts)
        assert table is not None
        model.lexical.set_scale(torch.from_numpy(table))
    if config.urgency is not None:
        set_level_shares(model, labels)
    return Start(model, tokenizer)


def _lexical() -> LexicalInput:
    """The features that this version computes."""
    return LexicalInput(feature_names=FEATURE_NAMES, feature_version=FEATURE_VERSION, max_chars=MAX_CHARS)


def _heads(config: TrainConfig, train: Rows) -> Heads:
    def tower(own: TowerOptions | None) -> Tower:
        return Tower(**asdict(own or config.tower))

    heads: dict[str, Any] = {}
    if (length := config.length) is not None:
        heads["length"] = LengthHead(
            tower=tower(length.tower), nu=length.nu, learn_nu=length.learn_nu, within=length.within
        )
    if (urgency := config.urgency) is not None:
        heads["urgency"] = UrgencyHead(tower=tower(urgency.tower), levels=urgency.levels, odds=urgency.odds)
    if (bucket := config.bucket) is not None:
        edges = bucket.edges if bucket.edges is not None else quantile_edges(train, bucket.num_buckets)
        heads["bucket"] = BucketHead(tower=tower(bucket.tower), edges=edges)
    if config.regression is not None:
        heads["regression"] = RegressionHead(tower=tower(config.regression.tower))
    if config.rank is not None:
        heads["rank"] = RankHead(tower=tower(config.rank.tower))
    return Heads(**heads)


def quantile_edges(train: Rows, num_buckets: int) -> tuple[float, ...]:
    """Bounds of buckets with about the same number of training answers each; fewer where answers are equal.

    Raises:
        InputError: All answers are alike.
    """
    levels = np.arange(1, num_buckets) / num_buckets
    edges = np.unique(np.quantile(train.lengths, levels, method="higher"))
    edges = edges[edges > train.lengths.min()]
    if len(edges) == 0:
        raise InputError("bucket.edges", None, "edges in tokens, because most training answers are alike")
    return tuple(float(edge) for edge in edges)


def _normalization(config: TrainConfig, train: Rows) -> Normalization:
    statistics = Normalization()
    if config.regression is not None:
        statistics = Normalization.of(tokens=train.lengths)
    if config.length is None:
        return statistics
    fitted = Normalization.of(train.mu, train.sigma) if config.needs_fits else length_statistics(train)
    if config.length.within:
        within = Normalization.of(within=train.sigma[np.isfinite(train.sigma)])
        statistics = replace(
            statistics, within_log_mean=within.within_log_mean, within_log_std=within.within_log_std
        )
    names = ("mu_mean", "mu_std", "sigma_log_mean", "sigma_log_std")
    return replace(statistics, **{name: getattr(fitted, name) for name in names})


def length_statistics(train: Rows) -> Normalization:
    """Scales of mu and sigma out of raw answers: only where training starts depends on them.

    mu: mean and spread over rows of their mean log length. sigma: the spread of the answers of a row, as a scale of the t
    distribution, together with half the spread of mu, which an untrained predictor cannot tell.

    Raises:
        InputError: All answers are alike.
    """
    logs = np.log(train.lengths.astype(np.float64))
    means = train.row_means(logs)
    spread = float(logs.std())
    if spread < MIN_SPREAD:
        raise InputError("answers in the training split", int(train.lengths[0]), "lengths that differ")
    mu_std = max(float(means.std()), 0.1 * spread)
    within, sigma_log_std = 0.0, SIGMA_LOG_STD
    repeated = train.counts >= MIN_ANSWERS
    if repeated.any():
        counts = train.counts[repeated]
        variance = np.maximum(train.row_means(logs**2) - means**2, 0.0)[repeated] * counts / (counts - 1)
        scale = np.log1p(np.sqrt(variance) / T_STD)
        within, sigma_log_std = float(np.expm1(scale.mean())), max(float(scale.std()), MIN_SIGMA_LOG_STD)
    start = np.hypot(within, SHARE_OF_SPREAD * mu_std / T_STD)
    return Normalization(
        mu_mean=float(means.mean()),
        mu_std=mu_std,
        sigma_log_mean=float(np.log1p(start)),
        sigma_log_std=sigma_log_std,
    )


def set_level_shares(model: PromptPredictor, labels: Labels) -> None:
    """Lets the urgency head start with the levels' shares of the training labels, each level counted once more."""
    head = model.heads["urgency"]
    assert isinstance(head, OrdinalTower | FreeOdds)
    assert model.config.heads.urgency is not None
    counts = (
        np.bincount(labels.level, weights=labels.weight, minlength=len(model.config.heads.urgency.levels)) + 1
    )
    below = np.cumsum(counts)[:-1] / counts.sum()
    head.set_thresholds(torch.from_numpy(np.log(below / (1 - below))).float())


def _check_vocabulary(encoder: str, model: PromptPredictor, tokenizer: PreTrainedTokenizerBase) -> None:
    embeddings = getattr(model.encoder.config, "vocab_size", None)
    highest = max(tokenizer.get_vocab().values())
    if embeddings is not None and highest >= embeddings:
        raise InputError(
            "encoder", encoder, f"a tokenizer with ids below {embeddings}; it has ids up to {highest}"
        )


def _from_checkpoint(config: TrainConfig, path: str, train: Rows) -> Start:
    checkpoint = load_checkpoint(path)
    model, held = checkpoint.model, checkpoint.config
    _check_heads(config, held.heads, path)
    if held.conditioning is None:
        if config.conditioning is not None:
            raise InputError("conditioning", path, "a checkpoint that sees the served model")
        return Start(model, checkpoint.tokenizer)
    new = tuple(sorted(set(train.models) - set(held.conditioning.served_models)))
    first_new = len(held.conditioning.served_models) + 1
    if config.only_conditioning and not new:
        raise InputError(
            "only_conditioning", sorted(train.models), "data of a served model that is new to the checkpoint"
        )
    if new:
        log.info("served models added: %s", ", ".join(new))
        model = with_served_models(model, new)
    return Start(model, checkpoint.tokenizer, first_new if config.only_conditioning else None)


def _check_heads(config: TrainConfig, heads: Heads, path: str) -> None:
    for name in config.tasks:
        if getattr(heads, name) is None:
            raise InputError(name, path, f"a checkpoint with this head; it has {', '.join(heads.names)}")
    if config.length is not None and heads.length is not None and config.length.nu != heads.length.nu:
        raise InputError("length.nu", config.length.nu, f"{heads.length.nu:g}, as the checkpoint has")
    if config.length is not None and heads.length is not None and config.length.within > heads.length.within:
        raise InputError("length.within", True, "false, because the checkpoint does not predict sigma_within")
    urgency = config.urgency
    if urgency is not None and heads.urgency is not None and urgency.levels != heads.urgency.levels:
        raise InputError("urgency.levels", urgency.levels, f"{heads.urgency.levels}, as the checkpoint has")


def with_served_models(model: PromptPredictor, names: Sequence[str]) -> PromptPredictor:
    """A predictor that knows further served models, each with the embedding and calibration of the unknown one.

    All other weights are the same tensors' values, and predictions for the served models it had stay as they were.
    """
    held, table = model.config.conditioning, model.calibration
    assert held is not None
    conditioning = replace(held, served_models=(*held.served_models, *names))
    calibration = Calibration(
        (*table.sigma_scale, *(table.sigma_scale[:1] * len(names))),
        (*table.mu_shift, *(table.mu_shift[:1] * len(names))),
    )
    larger = PromptPredictor(
        replace(model.config, conditioning=conditioning),
        model.encoder,
        model.normalization,
        calibration=calibration,
    )
    weights = model.state_dict()
    name = "conditions.served_model.weight"
    known = weights[name]
    # Without a trained entry for unknown models, the middle of the known ones is the best guess.
    start = known[:1] if held.unknown else known[1:].mean(dim=0, keepdim=True)
    weights[name] = torch.cat([known, start.expand(len(names), -1)])
    larger.load_state_dict(weights)
    return larger.eval()
