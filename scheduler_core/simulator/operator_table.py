"""Step times from profiles: the time of every operator of a layer, tabulated by the size of its input.

Source: Agrawal et al. 2024, "Vidur: A Large-Scale Simulation Framework for LLM Inference", sections 4.2 and 4.3; keys and
rounding as in its code (microsoft/vidur @ 7d47513).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from scheduler_core.errors import InputError
from scheduler_core.simulator.decode_run import DecodeRun, PiecewiseRun
from scheduler_core.simulator.step_time import StepWork, total_of

#: Operators whose time depends on the number of tokens, rounded up to a multiple of 8, and which every profile has.
TOKEN_OPERATORS = (
    "attn_pre_proj",
    "attn_post_proj",
    "attn_rope",
    "mlp_up_proj",
    "mlp_down_proj",
    "mlp_act",
    "input_layernorm",
    "post_attention_layernorm",
    "add",
)
KV_STEP = 64
"""Cache sizes are rounded up to a multiple of this."""
TOKEN_STEP = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OperatorTable:
    """t = num_layers * (tokens[N] + decode[D, K] + prefill[K', s]).

    N tokens in the step, D decodes, K the mean of their contexts, the new token among them, rounded down and then up to
    a multiple of 64; K' the sum over the chunks of the tokens before each, rounded up to multiples of 64; s the root of
    the sum of the squared chunks, rounded. Embedding, output layer and the time of the host are not in it, nor in the
    profiles. Copies to the host are not profiled and an error.

    Attributes:
        num_layers: Layers of the model.
        tokens_s: What depends on the number of tokens alone, per layer: element N is the time of N tokens; [most + 1].
        decode_s: Attention of decodes per layer, [most decodes + 1, cache sizes / 64].
        prefill_s: Attention of prompts per layer, [cache sizes / 64, most tokens of a chunk + 1]. In all tables NaN
            stands for sizes that were not profiled.
        batching_overhead: What attention takes longer, as a share, with more than one decode or more than one chunk;
            Vidur takes 0.1 for grouped-query attention.
    """

    num_layers: int
    tokens_s: NDArray[np.float64]
    decode_s: NDArray[np.float64]
    prefill_s: NDArray[np.float64]
    batching_overhead: float = 0.0
    _tokens_row: list[float] = field(init=False, repr=False)
    #: Rows that were needed so far.
    _decode_rows: dict[int, list[float]] = field(init=False, repr=False, default_factory=dict)
    _prefill_rows: dict[int, list[float]] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.num_layers <= 0:
            raise InputError("num_layers", self.num_layers, "integers > 0")
        if not 0 <= self.batching_overhead < math.inf:
            raise InputError("batching_overhead", self.batching_overhead, "numbers >= 0")
        object.__setattr__(self, "_tokens_row", self.tokens_s.tolist())

    def step_s(self, work: StepWork) -> float:
        """See `StepTime`.

        Raises:
            InputError: Tokens are copied to or from the host, or the step is larger than the profile.
        """
        if work.num_swapped_tokens:
            raise InputError(
                "num_swapped_tokens", work.num_swapped_tokens, "0: the profile has no time of copies"
            )
        contexts, prefills = work.contexts, work.prefills
        num = len(contexts)
        if len(prefills) == 1:
            chunk = prefills[0]
            num_tokens = chunk.num_tokens
            layer_s = self._prefill(-(-chunk.start_token // KV_STEP), num_tokens, 1)
        else:
            num_tokens = work.num_prefill_tokens
            row = sum([-(-chunk.start_token // KV_STEP) for chunk in prefills])
            squared = sum([chunk.num_tokens**2 for chunk in prefills])
            layer_s = self._prefill(row, round(math.sqrt(squared)), len(prefills)) if prefills else 0.0
        layer_s += self._tokens(num_tokens + num)
        if num:
            layer_s += self._decode(num, total_of(contexts) // num + 1)
        return self.num_layers * layer_s

    def run(self, contexts: Sequence[int], start_s: float) -> DecodeRun:
        """The mean context grows by one token per step, so up to 64 steps in a row take equally long."""
        num = len(contexts)
        mean = total_of(contexts) // num + 1
        tokens_s = self._tokens(num)

        def stretch(step: int) -> tuple[float, int]:
            column = -(-(mean + step) // KV_STEP)
            each_s = self.num_layers * (tokens_s + self._decode(num, mean + step))
            return each_s, column * KV_STEP - mean + 1

        return PiecewiseRun(start_s, stretch)

    def _tokens(self, num_tokens: int) -> float:
        seconds = self._tokens_row[num_tokens] if num_tokens < len(self._tokens_row) else math.nan
        if seconds != seconds:
            raise _unknown(self.tokens_s, (num_tokens,), "tokens", (1,))
        return seconds

    def _decode(self, num_decodes: int, mean_context: int) -> float:
        column = -(-mean_context // KV_STEP)
        row = self._decode_rows.get(num_decodes)
        if row is None:
            row = self._decode_rows[num_decodes] = _row(self.decode_s, num_decodes)
        seconds = row[column] if column < len(row) else math.nan
        if seconds != seconds:
            what = "decodes, mean context"
            raise _unknown(self.decode_s, (num_decodes, column), what, (1, KV_STEP))
        return seconds * (1.0 + self.batching_overhead) if num_decodes > 1 else seconds

    def _prefill(self, before: int, size: int, num_chunks: int) -> float:
        row = self._prefill_rows.get(before)
        if row is None:
            row = self._prefill_rows[before] = _row(self.prefill_s, before)
        seconds = row[size] if size < len(row) else math.nan
        if seconds != seconds:
            what = "tokens before the chunks, root of their squared sizes"
            raise _unknown(self.prefill_s, (before, size), what, (KV_STEP, 1))
        return seconds * (1.0 + self.batching_overhead) if num_chunks > 1 else seconds


def _row(table: NDArray[np.float64], row: int) -> list[float]:
    """A row as a list, whose items are found several times as fast; empty if there is no such row."""
    return table[row].tolist() if row < len(table) else []


def _unknown(
    table: NDArray[np.float64], place: tuple[int, ...], what: str, units: tuple[int, ...]
) -> InputError:
    most = tuple((size - 1) * unit for size, unit in zip(table.shape, units, strict=True))
    sizes = tuple(index * unit for index, unit in zip(place, units, strict=True))
    return InputError(what, sizes, f"sizes that were profiled, at most {most}")
