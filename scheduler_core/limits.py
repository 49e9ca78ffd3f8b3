"""What one engine replica can hold and do in one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scheduler_core.errors import InputError
from scheduler_core.kv_cache import KVCache

#: Engines have 16 to 256; per replica there is a table with an entry for each token of a block.
MAX_BLOCK_TOKENS = 65_536


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one engine replica.

    Raises:
        InputError: A value is outside its range.
    """

    max_num_seqs: int = 64
    """Most requests in one step, B in TIE's beta; most batch formers let no more than that hold memory either."""
    max_num_batched_tokens: int = 2048
    """Most tokens in one step, prefill and decode together; at least max_num_seqs."""
    num_kv_blocks: int = 8192
    """Blocks in the KV cache."""
    kv_block_tokens: int = 16
    """Tokens per KV block."""
    kv_watermark: float = 0.01
    """Share of the KV blocks that admission leaves free for running requests, in [0, 1)."""
    preemption: Literal["recompute", "swap"] = "recompute"
    """What becomes of a preempted request's cache: recompute (thrown away), swap (copied to the host's memory, as long
    as there is room)."""
    num_swap_blocks: int | None = None
    """Swap: blocks in the host's memory. Unset: as many as in the KV cache."""

    def __post_init__(self) -> None:
        if self.max_num_seqs <= 0:
            raise InputError("max_num_seqs", self.max_num_seqs, "integers > 0")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InputError(
                "max_num_batched_tokens",
                self.max_num_batched_tokens,
                f"integers >= max_num_seqs = {self.max_num_seqs}",
            )
        if self.preemption not in ("recompute", "swap"):
            raise InputError("preemption", self.preemption, "recompute, swap")
        if self.kv_block_tokens > MAX_BLOCK_TOKENS:
            raise InputError(
                "kv_block_tokens", self.kv_block_tokens, f"integers from 1 to {MAX_BLOCK_TOKENS}"
            )
        if self.num_swap_blocks is not None and self.preemption != "swap":
            raise InputError("num_swap_blocks", self.num_swap_blocks, "unset, unless preemption is swap")
        self.kv_cache()

    def kv_cache(self) -> KVCache:
        """An empty cache of this size."""
        host_blocks = 0
        if self.preemption == "swap":
            host_blocks = self.num_kv_blocks if self.num_swap_blocks is None else self.num_swap_blocks
        return KVCache(self.num_kv_blocks, self.kv_block_tokens, self.kv_watermark, host_blocks)
