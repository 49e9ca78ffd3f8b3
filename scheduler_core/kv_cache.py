"""The KV-cache accountant: paged blocks, counted, never more than there are."""

from __future__ import annotations

from scheduler_core.errors import InputError


class KVCache:
    """Counts the blocks every request holds.

    Admission takes all blocks of the tokens to be processed at once and must leave `watermark_blocks` free for
    the growth of running requests (vLLM's and Vidur's rule); growth may use every block.

    Args:
        num_blocks: Blocks in the cache, > 0.
        block_tokens: Tokens per block, > 0.
        watermark: Share of the blocks that admission leaves free, in [0, 1).
    """

    __slots__ = ("_held", "_least_free", "_num_free", "block_tokens", "num_blocks", "watermark_blocks")

    def __init__(self, num_blocks: int, block_tokens: int, watermark: float) -> None:
        if num_blocks <= 0:
            raise InputError("num_kv_blocks", num_blocks, "integers > 0")
        if block_tokens <= 0:
            raise InputError("kv_block_tokens", block_tokens, "integers > 0")
        if not 0.0 <= watermark < 1.0:
            raise InputError("kv_watermark", watermark, "numbers in [0, 1)")
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.watermark_blocks = int(watermark * num_blocks)
        self._held: dict[str, int] = {}
        self._num_free = num_blocks
        self._least_free = num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks nobody holds."""
        return self._num_free

    @property
    def peak_blocks(self) -> int:
        """Most blocks ever held at the same time."""
        return self.num_blocks - self._least_free

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit when one request has the cache to itself."""
        return self.num_blocks * self.block_tokens

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens of one request fill."""
        return -(-num_tokens // self.block_tokens)

    def held_by(self, request_id: str) -> int:
        """Blocks the request holds; 0 if none."""
        return self._held.get(request_id, 0)

    def admit(self, request_id: str, num_tokens: int, *, alone: bool) -> bool:
        """Takes the blocks for a newcomer's tokens; False (and nothing taken) if it does not fit now.

        Args:
            request_id: Must hold nothing yet.
            num_tokens: Tokens it will process before its next output token.
            alone: Nothing is running: the watermark would protect nobody and is waived.
        """
        assert request_id not in self._held
        need = self.blocks_for(num_tokens)
        spare = 0 if alone else self.watermark_blocks
        if self._num_free - need < spare:
            return False
        self._held[request_id] = need
        self._num_free -= need
        self._least_free = min(self._least_free, self._num_free)
        return True

    def grow(self, request_id: str, num_tokens: int) -> bool:
        """Makes room for `num_tokens` tokens in all; False (and nothing taken) if there are too few blocks."""
        held = self._held[request_id]
        if num_tokens <= held * self.block_tokens:
            return True
        more = self.blocks_for(num_tokens) - held
        if more > self._num_free:
            return False
        self._held[request_id] = held + more
        self._num_free -= more
        self._least_free = min(self._least_free, self._num_free)
        return True

    def release(self, request_id: str) -> None:
        """Gives back everything the request holds."""
        self._num_free += self._held.pop(request_id)

    def validate(self, holders: set[str]) -> None:
        """Checks that blocks are conserved and held by exactly `holders`; AssertionError otherwise."""
        assert set(self._held) == holders, (set(self._held), holders)
        assert all(count > 0 for count in self._held.values())
        assert sum(self._held.values()) + self._num_free == self.num_blocks
        assert self._num_free >= 0
