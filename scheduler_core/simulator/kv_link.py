"""How long copies of KV blocks between replicas take."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scheduler_core.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLink:
    """How long it takes to copy KV blocks; each replica sends one copy at a time.

    t = latency_s + blocks * block_bytes / bytes_per_s

    The defaults are 16 tokens of Mistral-7B (128 KiB each) over 100 Gb/s, and the 5 ms that the multi-tier paper's code
    declares and never charges.

    Raises:
        InputError: A value is outside its range.
    """

    bytes_per_s: float = 12.5e9
    """Bandwidth of the link."""
    block_bytes: int = 16 * 131_072
    """Bytes of keys and values in one block."""
    latency_s: float = 5e-3
    """Seconds every copy takes beside the transfer."""

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0:
            raise InputError("bytes_per_s", self.bytes_per_s, "numbers > 0")
        if self.block_bytes < 0:
            raise InputError("block_bytes", self.block_bytes, "integers >= 0")
        if not 0 <= self.latency_s < math.inf:
            raise InputError("latency_s", self.latency_s, "seconds >= 0")

    def copy_s(self, num_blocks: int) -> float:
        """Seconds that a copy takes."""
        return self.latency_s + num_blocks * self.block_bytes / self.bytes_per_s
