"""Towers: small networks on the pooled features, the building blocks of heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from predictors.heads import Tower

XAVIER_GAIN = 0.5


def build_tower(
    num_features: int, tower: Tower, num_outputs: int = 1, generator: torch.Generator | None = None
) -> nn.Sequential:
    """A tower: features [B, num_features] -> [B, num_outputs]. Each hidden layer is Linear, optional
    LayerNorm (except in the last), activation, dropout. Initialized Xavier-uniform, gain 0.5; biases 0."""
    layers: list[nn.Module] = []
    width = num_features
    for index, (size, rate) in enumerate(zip(tower.hidden_sizes, tower.dropouts, strict=True)):
        layers.append(nn.Linear(width, size))
        if tower.layer_norm and index < len(tower.hidden_sizes) - 1:
            layers.append(nn.LayerNorm(size))
        layers += [nn.GELU() if tower.activation == "gelu" else nn.ReLU(), nn.Dropout(rate)]
        width = size
    layers.append(nn.Linear(width, num_outputs))
    for layer in layers:
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight, gain=XAVIER_GAIN, generator=generator)
            nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


class ConditionedTower(nn.Module):
    """A tower whose first hidden layer is scaled, and whose outputs are shifted, by linear functions of the conditions.

    The effect of a served model depends on the prompt. Products learn that from fewer examples than layers on
    the concatenation of features and conditions (FiLM: Perez et al. 2018). Both functions start at 0. Without
    conditions it is a plain tower. `num_outputs` None: one output, without an axis.
    """

    def __init__(
        self,
        num_features: int,
        num_conditions: int,
        tower: Tower,
        num_outputs: int | None = 1,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.is_scalar = num_outputs is None
        width = num_outputs or 1
        layers = build_tower(num_features + num_conditions, tower, width, generator)
        num_first = 0
        if num_conditions and tower.hidden_sizes:
            num_first = [isinstance(layer, nn.Dropout) for layer in layers].index(True) + 1
        self.first, self.rest = nn.Sequential(*list(layers)[:num_first]), layers[num_first:]
        self.scale = _zero_linear(num_conditions, tower.hidden_sizes[0]) if num_first else None
        self.shift = _zero_linear(num_conditions, width) if num_conditions else None

    def forward(
        self, features: Tensor, conditions: Tensor | None, row_prompt: Tensor | None = None
    ) -> Tensor:
        """Scores [R, num_outputs] or [R] from features of prompts [P, F] and conditions of rows [R, C] or
        None. `row_prompt` is the index of the prompt of each row, int64 [R]; None: R = P."""
        if conditions is None or self.shift is None:
            scores: Tensor = self.rest(features if row_prompt is None else features[row_prompt])
        elif self.scale is None:
            rows = features if row_prompt is None else features[row_prompt]
            scores = self.rest(torch.cat([rows, conditions], dim=-1)) + self.shift(conditions)
        else:
            if row_prompt is None:
                hidden = self.first(torch.cat([features, conditions], dim=-1))
            else:  # compute the first and largest product only once per prompt
                linear, width = self.first[0], features.shape[-1]
                assert isinstance(linear, nn.Linear)
                hidden = functional.linear(features, linear.weight[:, :width], linear.bias)[row_prompt]
                hidden = self.first[1:](torch.addmm(hidden, conditions, linear.weight[:, width:].T))
            scores = self.rest(hidden * (1 + self.scale(conditions))) + self.shift(conditions)
        return scores.squeeze(-1) if self.is_scalar else scores


def _zero_linear(num_inputs: int, num_outputs: int) -> nn.Linear:
    linear = nn.Linear(num_inputs, num_outputs)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear
