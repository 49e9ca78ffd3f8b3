"""From the encoder's states to one feature vector for each prompt, padding ignored."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from scheduler_core.errors import InputError


def cls_pool(states: Tensor, mask: Tensor) -> Tensor:
    """State of the first position; [B, S, H], bool [B, S] -> [B, H]."""
    return states[:, 0]


def mean_pool(states: Tensor, mask: Tensor) -> Tensor:
    """Mean over the positions in the mask; [B, S, H], bool [B, S] -> [B, H]."""
    # masked_fill and not a product: what stands at padding may be anything, infinities included.
    total = states.masked_fill(~mask.unsqueeze(-1), 0.0).sum(dim=1)
    return total / mask.sum(dim=1, keepdim=True).to(states.dtype)


def max_pool(states: Tensor, mask: Tensor) -> Tensor:
    """Largest value over the positions in the mask; [B, S, H], bool [B, S] -> [B, H]."""
    return states.masked_fill(~mask.unsqueeze(-1), torch.finfo(states.dtype).min).amax(dim=1)


def last_pool(states: Tensor, mask: Tensor) -> Tensor:
    """State of the last position in the mask, where a decoder has seen all of the text; [B, S, H], bool [B, S] -> [B, H]."""
    last = mask.sum(dim=1, keepdim=True).to(torch.int64) - 1  # padding stands on the right
    return states.gather(1, last.unsqueeze(-1).expand(-1, -1, states.shape[-1])).squeeze(1)


POOLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cls": cls_pool,
    "mean": mean_pool,
    "max": max_pool,
    "last": last_pool,
}


def pool(states: Tensor, attention_mask: Tensor, poolings: Sequence[str]) -> Tensor:
    """Concatenation of the named poolings.

    Args:
        states: Last hidden states [B, S, H].
        attention_mask: 1 at tokens, 0 at padding [B, S]; at least one token in each row, padding on the right.
        poolings: Names out of `POOLINGS`, in order.

    Returns:
        Features [B, len(poolings) * H].
    """
    mask = attention_mask.to(torch.bool)
    return torch.cat([POOLINGS[name](states, mask) for name in poolings], dim=-1)


def check_poolings(poolings: Sequence[str]) -> None:
    """Raises InputError unless `poolings` is a list of known, different names that is not empty."""
    known = ", ".join(POOLINGS)
    if not poolings or len(set(poolings)) < len(poolings) or not set(poolings) <= set(POOLINGS):
        raise InputError("pooling", list(poolings), f"one or more of {known}, each once")
