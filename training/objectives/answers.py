"""Answers of a batch as padded tensors, and means over them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Answers(NamedTuple):
    """Answer lengths of R rows, at most K of each.

    Attributes:
        lengths: Tokens, float32 [R, K]; of a cut answer the length it was cut at; 1 where there is none.
        finished: Whether the answer ended by itself, bool [R, K].
        present: Whether there is an answer, bool [R, K]; at least one in each row.
        cap: Length at which answers of the row are cut, float32 [R]; infinite if unknown.
    """

    lengths: Tensor
    finished: Tensor
    present: Tensor
    cap: Tensor

    def mean(self, values: Tensor) -> Tensor:
        """Mean of values [R, K] over each row's answers [R]."""
        total = torch.where(self.present, values, torch.zeros_like(values)).sum(dim=-1)
        return total / self.present.sum(dim=-1)
