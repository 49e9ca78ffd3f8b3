"""What a replica still has in its cache of the earlier turns of conversations."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import sha256

from scheduler_core.errors import InputError
from scheduler_core.simulator.trace import TraceRequest


class PrefixCache:
    """The last turn of every conversation, the one used longest ago forgotten first.

    It has memory of its own, beside the blocks of the running requests: `KVCache` charges each request for all its
    tokens, as nobody knows who shares what. Copies of the prefix of a request that runs are not counted twice.

    Args:
        capacity_tokens: Tokens that are kept in all, >= 0.

    Raises:
        InputError: The capacity is negative.
    """

    __slots__ = ("_kept", "capacity_tokens", "num_hit_tokens", "num_tokens")

    def __init__(self, capacity_tokens: int) -> None:
        if capacity_tokens < 0:
            raise InputError("capacity_tokens", capacity_tokens, "integers >= 0")
        self.capacity_tokens = capacity_tokens
        #: Tokens kept now.
        self.num_tokens = 0
        #: Tokens that needed no prefill, of all requests so far.
        self.num_hit_tokens = 0
        self._kept: OrderedDict[str, int] = OrderedDict()

    def hit(self, row: TraceRequest) -> int:
        """Tokens of a new turn's prompt that are in the cache; the conversation counts as used now."""
        if row.session_id is None or row.session_id not in self._kept:
            return 0
        self._kept.move_to_end(row.session_id)
        tokens = min(row.prefix_tokens, self._kept[row.session_id])
        self.num_hit_tokens += tokens
        return tokens

    def keep(self, row: TraceRequest) -> None:
        """A turn has ended; its prompt and answer stay, as far as there is room."""
        name = row.session_id
        if name is None:
            return
        self.num_tokens += row.prompt_tokens + row.output_tokens - self._kept.pop(name, 0)
        self._kept[name] = row.prompt_tokens + row.output_tokens
        while self.num_tokens > self.capacity_tokens:
            self.num_tokens -= self._kept.popitem(last=False)[1]


def prefix_blocks(row: TraceRequest, kv_block_tokens: int) -> tuple[int, ...]:
    """Names of the full blocks of a conversation's prompt, which its turns share from the first block on.

    Args:
        row: A turn; one that belongs to no conversation shares nothing and has no names.
        kv_block_tokens: Tokens per block, > 0.
    """
    if row.session_id is None:
        return ()
    return tuple(
        int.from_bytes(sha256(f"{row.session_id} {block}".encode()).digest()[:8])
        for block in range(row.prompt_tokens // kv_block_tokens)
    )
