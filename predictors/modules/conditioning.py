"""Served model and sampling temperature as numbers that the heads see beside the prompt's features."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from predictors.modules.config import Conditioning

# Greedy decoding has temperature 0, which has no logarithm; below this, sampling is as good as greedy.
GREEDY_TEMPERATURE = 0.05
EMBEDDING_STD = 0.1


class ConditionFeatures(nn.Module):
    """Embedding of the served model, ln temperature, and whether the temperature is known.

    Args:
        conditioning: What is seen.
        generator: Draws the initial embeddings, N(0, 0.1^2); unset, torch's global generator does.
    """

    def __init__(self, conditioning: Conditioning, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.sees_temperature = conditioning.temperature
        self.num_features = conditioning.width + 2 * conditioning.temperature
        self.served_model = nn.Embedding(len(conditioning.served_models) + 1, conditioning.width)
        nn.init.normal_(self.served_model.weight, std=EMBEDDING_STD, generator=generator)

    def forward(self, features: Tensor, served_model: Tensor | None, temperature: Tensor | None) -> Tensor:
        """The conditions of each row.

        Args:
            features: The prompts' features [B, F], for their number, kind and place.
            served_model: Numbers of served models, int64 [B]; 0 = unknown; None = all unknown.
            temperature: Sampling temperatures, at least 0, [B]; NaN = unknown; None = all unknown.

        Returns:
            [B, num_features].
        """
        if served_model is None:
            served_model = torch.zeros(features.shape[0], dtype=torch.int64, device=features.device)
        parts = [self.served_model(served_model).to(features.dtype)]
        if self.sees_temperature:
            if temperature is None:
                known = torch.zeros(features.shape[0], dtype=torch.bool, device=features.device)
                logs = torch.zeros(features.shape[0], device=features.device)
            else:
                known = ~torch.isnan(temperature)
                # NaN is replaced before the logarithm, not after: its gradient would be NaN too.
                filled = torch.where(known, temperature, torch.ones_like(temperature))
                logs = torch.log(filled.clamp_min(GREEDY_TEMPERATURE))
            parts.append(torch.stack([logs, known.to(logs.dtype)], dim=-1).to(features.dtype))
        return torch.cat(parts, dim=-1)
