"""Lexical features of the prompt's text as columns that the heads see beside the encoder's features."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from predictors.manifest import LexicalInput

# Features further out than so many standard deviations are as far out as these.
LARGEST = 5.0
# A feature that never changed in training has no scale of its own.
SMALLEST_STD = 1e-3


class LexicalColumns(nn.Module):
    """Standardised features and a mark that they are known; all 0 where they are not.

    Args:
        lexical: Which features, F of them.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, lexical: LexicalInput) -> None:
        super().__init__()
        num_features = len(lexical.feature_names)
        self.width = num_features + 1
        self.register_buffer("mean", torch.zeros(num_features))
        self.register_buffer("std", torch.ones(num_features))

    def set_scale(self, table: Tensor) -> None:
        """Takes mean and standard deviation from the training prompts' features [N, F], N at least 1."""
        self.mean.copy_(table.mean(dim=0))
        self.std.copy_(table.std(dim=0, correction=0).clamp_min(SMALLEST_STD))

    def forward(self, features: Tensor) -> Tensor:
        """Features [B, F], a row of NaN where they are not known -> [B, F + 1]."""
        unknown = torch.isnan(features)
        standard = ((features - self.mean) / self.std).clamp(-LARGEST, LARGEST)
        # Replaced and not multiplied: NaN times 0 is NaN.
        standard = torch.where(unknown, torch.zeros_like(standard), standard)
        known = (~unknown[:, :1]).to(standard.dtype)
        return torch.cat([standard, known], dim=-1)
