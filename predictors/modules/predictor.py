"""The length predictor: encoder, pooling and one tower each for mu and sigma.

Source: TIE, section on the predictor (DeBERTa-v3-base, [CLS; mean; max] features, two separate towers).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from predictors.modules.normalization import Normalization
from predictors.modules.pooling import check_poolings, pool
from scheduler_core.errors import InputError

# Smallest sigma a predictor gives, log tokens: the inverse of log(1 + sigma) may be negative.
SIGMA_FLOOR = 1e-6
XAVIER_GAIN = 0.5


class LengthParameters(NamedTuple):
    """Parameters of the log-t distribution in log tokens: mu [B], sigma [B] > 0."""

    mu: Tensor
    sigma: Tensor


class NormalizedParameters(NamedTuple):
    """z-scores of mu [B] and of log(1 + sigma) [B]: what the towers give and the loss compares."""

    mu: Tensor
    sigma: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorConfig:
    """What defines a predictor beside its weights.

    Attributes:
        encoder: Where the encoder came from, as the user named it (for the record; a checkpoint does not need it).
        max_length: Most tokens of a prompt that are read, special tokens included.
        truncation_side: The end of a longer prompt that is dropped.
        pooling: Poolings whose features are concatenated, out of cls, mean, max.
        hidden_sizes: Widths of a tower's hidden layers; all but the last are followed by a LayerNorm.
        dropouts: Dropout after each hidden layer.
        nu: Degrees of freedom of the log-t distribution the targets were fitted with.
        served_models: LLMs whose lengths it was trained on.
    """

    encoder: str
    max_length: int = 512
    truncation_side: str = "right"
    pooling: tuple[str, ...] = ("cls", "mean", "max")
    hidden_sizes: tuple[int, ...] = (256, 256, 128)
    dropouts: tuple[float, ...] = (0.2, 0.2, 0.1)
    nu: float = 3.5
    served_models: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("pooling", "hidden_sizes", "dropouts", "served_models"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        check_poolings(self.pooling)
        if self.max_length < 3:
            raise InputError("max_length", self.max_length, "a whole number of at least 3")
        if self.truncation_side not in ("left", "right"):
            raise InputError("truncation_side", self.truncation_side, "left or right")
        if not self.hidden_sizes or min(self.hidden_sizes) < 1:
            raise InputError("hidden_sizes", self.hidden_sizes, "one or more whole numbers of at least 1")
        if len(self.dropouts) != len(self.hidden_sizes) or not all(0 <= rate < 1 for rate in self.dropouts):
            raise InputError("dropouts", self.dropouts, f"{len(self.hidden_sizes)} numbers from 0 to below 1")
        if not 0 < self.nu < float("inf"):
            raise InputError("nu", self.nu, "a finite number above 0")


def build_tower(num_features: int, hidden_sizes: Sequence[int], dropouts: Sequence[float]) -> nn.Sequential:
    """Features [B, num_features] -> [B, 1]: Linear, LayerNorm (not in the last), GELU, dropout; then Linear to 1."""
    layers: list[nn.Module] = []
    width = num_features
    for index, (size, rate) in enumerate(zip(hidden_sizes, dropouts, strict=True)):
        layers.append(nn.Linear(width, size))
        if index < len(hidden_sizes) - 1:
            layers.append(nn.LayerNorm(size))
        layers += [nn.GELU(), nn.Dropout(rate)]
        width = size
    return nn.Sequential(*layers, nn.Linear(width, 1))


class Towers(nn.Module):
    """The two heads, independent of each other; Xavier-uniform with gain 0.5, bias 0.

    Args:
        num_features: Width of the pooled features.
        config: Layer sizes and dropouts.
        generator: Draws the initial weights; unset, torch's global generator does.
    """

    def __init__(
        self, num_features: int, config: PredictorConfig, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.mu = build_tower(num_features, config.hidden_sizes, config.dropouts)
        self.sigma = build_tower(num_features, config.hidden_sizes, config.dropouts)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight, gain=XAVIER_GAIN, generator=generator)
                nn.init.zeros_(module.bias)

    def forward(self, features: Tensor) -> NormalizedParameters:
        """Features [B, F] -> z-scores [B], [B]."""
        return NormalizedParameters(self.mu(features).squeeze(-1), self.sigma(features).squeeze(-1))


class LengthPredictor(nn.Module):
    """Prompt tokens in, parameters of the length distribution out.

    Args:
        config: Poolings and towers.
        encoder: A transformers encoder: called with input_ids and attention_mask, gives last_hidden_state.
        normalization: Statistics of the targets.
        generator: Draws the towers' initial weights; unset, torch's global generator does.

    Raises:
        InputError: `max_length` is beyond the encoder's positions.
    """

    mu_mean: Tensor
    mu_std: Tensor
    sigma_log_mean: Tensor
    sigma_log_std: Tensor

    def __init__(
        self,
        config: PredictorConfig,
        encoder: nn.Module,
        normalization: Normalization,
        *,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        positions = getattr(encoder.config, "max_position_embeddings", None)
        if positions is not None and config.max_length > positions:
            raise InputError("max_length", config.max_length, f"at most the encoder's {positions} positions")
        self.config = config
        self.normalization = normalization
        self.encoder = encoder
        hidden_size: int = encoder.config.hidden_size  # type: ignore[union-attr,assignment]
        self.num_features = hidden_size * len(config.pooling)
        self.towers = Towers(self.num_features, config, generator)
        for name, value in normalization.to_json().items():
            # Not in the weights file: normalization.json is the one place that holds them.
            self.register_buffer(name, torch.tensor(value, dtype=torch.float32), persistent=False)

    def features(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Pooled features [B, F] of token ids [B, S] under a mask [B, S] (1 = token, 0 = padding on the right).

        They do not depend on the other rows of the batch, nor on how far a row is padded.
        """
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return pool(states, attention_mask, self.config.pooling)

    def normalized(self, input_ids: Tensor, attention_mask: Tensor) -> NormalizedParameters:
        """z-scores [B], [B] of token ids [B, S]: what is trained."""
        return self.towers(self.features(input_ids, attention_mask))  # type: ignore[no-any-return]

    def denormalize(self, scores: NormalizedParameters) -> LengthParameters:
        """z-scores [B], [B] to mu and sigma [B] in log tokens, sigma at least 1e-6."""
        mu = scores.mu * self.mu_std + self.mu_mean
        sigma = torch.expm1(scores.sigma * self.sigma_log_std + self.sigma_log_mean)
        return LengthParameters(mu, sigma.clamp_min(SIGMA_FLOOR))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> LengthParameters:
        """Predicts.

        Args:
            input_ids: Token ids, int64 [B, S].
            attention_mask: 1 at tokens, 0 at padding, int64 [B, S]; at least one token in each row.

        Returns:
            mu [B] and sigma [B], float32, log tokens.
        """
        return self.denormalize(self.normalized(input_ids, attention_mask))
