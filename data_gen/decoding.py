"""Continuous-batch decoding with a transformers causal model, optimized for many samples of each prompt.

Differences from `generate` (both are measured by `benchmarks/sampling/throughput.py`): a prompt is prefilled once, and its KV cache
is shared by all samples; finished rows leave the batch immediately and are replaced by samples of the next prompt;
attention of one new token uses grouped heads without copying the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

ATTENTION = "tailcast_grouped"
_GROWTH_TOKENS = 32


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention that does not repeat the KV heads for a single new token per row; otherwise torch's SDPA.

    Args:
        module: The attention layer.
        query: [rows, heads, new tokens, head size].
        key, value: [rows, kv heads, tokens, head size].
        attention_mask: Boolean, broadcastable to [rows, heads, new tokens, tokens]; True is attended.
        scaling: Factor of the scores, default 1/sqrt(head size).
        dropout, kwargs: Passed to SDPA.

    Returns:
        Output [rows, new tokens, heads, head size], and None for the attention weights.
    """
    if query.shape[2] != 1 or attention_mask is None:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output, None
    rows, heads, _, size = query.shape
    groups = key.shape[1]
    scale = size**-0.5 if scaling is None else scaling
    scores = torch.matmul(query.reshape(rows, groups, heads // groups, size) * scale, key.transpose(2, 3))
    scores.masked_fill_(~attention_mask, float("-inf"))
    output = torch.matmul(scores.softmax(-1), value)
    return output.reshape(rows, 1, heads, size), None


AttentionInterface.register(ATTENTION, grouped_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


class _GrowingLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """KV cache of one layer in a preallocated buffer, so that a step writes one column instead of copying everything."""

    keys: torch.Tensor
    values: torch.Tensor

    def set(self, keys: torch.Tensor, values: torch.Tensor, length: int) -> None:
        self._key_buffer, self._value_buffer, self._length = keys, values, length
        self.keys, self.values = keys[:, :, :length], values[:, :, :length]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.set(key_states, value_states, key_states.shape[2])
            return self.keys, self.values
        end = self._length + key_states.shape[2]
        if end > self._key_buffer.shape[2]:
            self.set(self._grown(self.keys, end), self._grown(self.values, end), self._length)
        self._key_buffer[:, :, self._length : end] = key_states
        self._value_buffer[:, :, self._length : end] = value_states
        self.set(self._key_buffer, self._value_buffer, end)
        return self.keys, self.values

    @staticmethod
    def _grown(states: torch.Tensor, needed: int) -> torch.Tensor:
        rows, heads, length, size = states.shape
        buffer = states.new_zeros(rows, heads, needed + _GROWTH_TOKENS, size)
        buffer[:, :, :length] = states
        return buffer

    def keep(self, rows: torch.Tensor, first_token: int) -> None:
        self.set(
            self._key_buffer[rows, :, first_token:],
            self._value_buffer[rows, :, first_token:],
            self._length - first_token,
        )

    def join(self, other: _GrowingLayer, repeats: int) -> None:
        length = max(self._length, other._length)

        def joined(own: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
            return torch.cat(
                [_left_padded(own, length), _left_padded(new, length).repeat_interleave(repeats, 0)]
            )

        self.set(joined(self.keys, other.keys), joined(self.values, other.values), length)


def _left_padded(states: torch.Tensor, length: int) -> torch.Tensor:
    missing = length - states.shape[2]
    return torch.nn.functional.pad(states, (0, 0, missing, 0)) if missing else states


class DecodingBatch:
    """Right-aligned batch of rows; `join` adds the rows of a prompt, `keep` removes rows.

    Independent of the sampling method: `logits` holds the next-token scores of every row, and `advance` takes the
    sampled tokens.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._layers: list[_GrowingLayer] = []
        self._mask = torch.zeros(0, 0, dtype=torch.bool)
        self._positions = torch.zeros(0, dtype=torch.long)
        self.logits = torch.zeros(0, int(model.config.vocab_size))

    def __len__(self) -> int:
        return len(self._positions)

    @torch.inference_mode()
    def join(self, prompt_tokens: list[int], repeats: int) -> None:
        """Prefills a prompt once and appends `repeats` rows that continue it."""
        ids = torch.tensor([prompt_tokens], device=self._model.device)
        cache, layers = self._new_cache()
        logits = self._model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits[:, -1]
        length = len(prompt_tokens)
        mask = torch.ones(repeats, length, dtype=torch.bool)
        if len(self):
            total = max(length, self._mask.shape[1])
            for mine, new in zip(self._layers, layers, strict=True):
                mine.join(new, repeats)
            pads = [torch.nn.functional.pad(part, (total - part.shape[1], 0)) for part in (self._mask, mask)]
            self._mask = torch.cat(pads)
        else:
            for layer in layers:
                layer.set(
                    layer.keys.repeat_interleave(repeats, 0),
                    layer.values.repeat_interleave(repeats, 0),
                    length,
                )
            self._layers, self._mask = layers, mask
        self._positions = torch.cat([self._positions, torch.full((repeats,), length - 1)])
        self.logits = torch.cat([self.logits.to(logits), logits.repeat(repeats, 1)])

    def keep(self, rows: torch.Tensor) -> None:
        """Keeps only the rows with these indices (int64, increasing), and drops columns that no row attends to."""
        self._mask, self._positions, self.logits = self._mask[rows], self._positions[rows], self.logits[rows]
        first = int(self._mask.any(0).int().argmax()) if len(rows) else self._mask.shape[1]
        self._mask = self._mask[:, first:]
        for layer in self._layers:
            layer.keep(rows, first)

    @torch.inference_mode()
    def advance(self, tokens: torch.Tensor) -> None:
        """Feeds one chosen token per row ([rows], int64) and computes the next `logits`."""
        self._positions = self._positions + 1
        self._mask = torch.nn.functional.pad(self._mask, (0, 1), value=True)
        cache, _ = self._new_cache(self._layers)
        self.logits = self._model(
            input_ids=tokens[:, None].to(self._model.device),
            attention_mask=self._mask.to(self._model.device),
            position_ids=self._positions[:, None].to(self._model.device),
            past_key_values=cache,
        ).logits[:, -1]

    def _new_cache(
        self, layers: list[_GrowingLayer] | None = None
    ) -> tuple[DynamicCache, list[_GrowingLayer]]:
        count = int(self._model.config.num_hidden_layers)
        cache = DynamicCache()
        own = layers if layers is not None else [_GrowingLayer() for _ in range(count)]  # type: ignore[no-untyped-call]
        cache.layers = list(own)
        return cache, own
