"""How long one step of the engine takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scheduler_core.errors import InputError
from scheduler_core.plan import StepPlan


@dataclass(frozen=True, kw_only=True)
class LinearStepTime:
    """t = base_s + per_prefill_token_s * P + per_decode_s * D + per_context_token_s * C + per_swapped_token_s * S.

    P prefill tokens, D decoding requests, C tokens read from the KV cache, S tokens copied between the KV cache and the
    host. The defaults stand for a 7B model on one
    48 GB GPU: base and per-token times are the least-squares line through the chunk timings that SLAI ships for
    Mistral-7B on an RTX 6000 Ada (64 to 1024 tokens: 22.7 to 74.7 ms; agrimUT/SLAI @ 5098a7a); the context term is
    Mistral-7B's 128 KiB of keys and values per token (32 layers, 8 heads of 128, fp16) over 960 GB/s;
    the swap term is the same 128 KiB over the 25 GB/s that PCIe 4.0 x16 reaches.

    Raises:
        InputError: A time is negative or not finite, or a step could take no time.
    """

    base_s: float = 0.01716
    """Seconds every step takes."""
    per_prefill_token_s: float = 5.47e-5
    """Seconds per prompt token processed."""
    per_decode_s: float = 5.47e-5
    """Seconds per request that generates a token."""
    per_context_token_s: float = 1.37e-7
    """Seconds per token read from the KV cache."""
    per_swapped_token_s: float = 5.24e-6
    """Seconds per token copied between the KV cache and the host's memory; the step waits for it."""

    def __post_init__(self) -> None:
        for name in (
            "base_s",
            "per_prefill_token_s",
            "per_decode_s",
            "per_context_token_s",
            "per_swapped_token_s",
        ):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise InputError(name, value, "seconds >= 0")
        if self.base_s + min(self.per_prefill_token_s, self.per_decode_s) <= 0:
            raise InputError("base_s", self.base_s, "seconds > 0, if the time per token is 0")

    def step_s(self, plan: StepPlan) -> float:
        """Duration of the step in seconds."""
        return (
            self.base_s
            + self.per_prefill_token_s * plan.num_prefill_tokens
            + self.per_decode_s * len(plan.decodes)
            + self.per_context_token_s * plan.num_context_tokens
            + self.per_swapped_token_s * plan.num_swapped_tokens
        )

    def run_s(self, num_decodes: int, num_context_tokens: int, num_steps: int) -> float:
        """Duration of `num_steps` decode steps of the same requests, whose context grows by one token each per step.

        k (base + D per_decode + C per_context) + D per_context k (k-1) / 2.
        """
        first = self.base_s + self.per_decode_s * num_decodes + self.per_context_token_s * num_context_tokens
        growth = self.per_context_token_s * num_decodes
        return num_steps * first + growth * (num_steps * (num_steps - 1) // 2)


class DecodeRun:
    """Consecutive decode steps of the same requests, timed from their start.

    The end of the k-th step is a function of the start and k alone, so that taking the steps one by one or many at
    once gives the same times to the last bit.

    Args:
        step_time: Durations.
        start_s: Start of the first step.
        decodes: The requests.
        num_context_tokens: Tokens in their caches at the start.
    """

    __slots__ = ("_context", "_start_s", "_step_time", "decodes", "num_done")

    def __init__(
        self, step_time: LinearStepTime, start_s: float, decodes: tuple[str, ...], num_context_tokens: int
    ) -> None:
        self._step_time = step_time
        self._start_s = start_s
        self._context = num_context_tokens
        self.decodes = decodes
        self.num_done = 0

    def end_s(self, more_steps: int) -> float:
        """When the run will have taken `more_steps` steps more."""
        steps = self.num_done + more_steps
        return self._start_s + self._step_time.run_s(len(self.decodes), self._context, steps)

    def steps_to_reach(self, time_s: float, limit: int) -> int:
        """The fewest steps more, from 1 to `limit`, that end at or after `time_s`; `limit` if none does."""
        if self.end_s(limit) < time_s:
            return limit
        low, high = 0, limit  # end_s(low) < time_s <= end_s(high), or low = 0
        while high - low > 1:
            middle = (low + high) // 2
            if self.end_s(middle) < time_s:
                low = middle
            else:
                high = middle
        return high
