"""The KV-cache accountant: paged blocks on the device and offloaded ones on the host, never more than there are."""

from __future__ import annotations

from scheduler_core.errors import InputError


class KVCache:
    """Counts the blocks every request holds.

    Admission takes all blocks of the tokens to be processed at once and must leave `watermark_blocks` free for
    the growth of running requests (vLLM's and Vidur's rule); growth may use every block. A request that loses its
    blocks may keep a copy of the first ones in the host's memory (swap), which admission brings back.

    A prefix that is in the engine's prefix cache already saves work, not blocks: who shares a block with whom is not
    known here, so each request is charged for all of its tokens, and no memory is promised that may not be there.

    Args:
        num_blocks: Blocks in the cache, > 0.
        block_tokens: Tokens per block, > 0.
        watermark: Share of the blocks that admission leaves free, in [0, 1).
        num_host_blocks: Blocks in the host's memory for offloaded requests, >= 0.
    """

    __slots__ = (
        "_held",
        "_least_free",
        "_num_host_free",
        "_offloaded",
        "block_tokens",
        "capacity_tokens",
        "num_blocks",
        "num_free_blocks",
        "num_host_blocks",
        "watermark_blocks",
    )

    def __init__(
        self, num_blocks: int, block_tokens: int, watermark: float, num_host_blocks: int = 0
    ) -> None:
        if num_blocks <= 0:
            raise InputError("num_kv_blocks", num_blocks, "integers > 0")
        if block_tokens <= 0:
            raise InputError("kv_block_tokens", block_tokens, "integers > 0")
        if not 0.0 <= watermark < 1.0:
            raise InputError("kv_watermark", watermark, "numbers in [0, 1)")
        if num_host_blocks < 0:
            raise InputError("num_swap_blocks", num_host_blocks, "integers >= 0")
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        #: Tokens that fit when one request has the cache to itself.
        self.capacity_tokens = num_blocks * block_tokens
        self.watermark_blocks = int(watermark * num_blocks)
        self.num_host_blocks = num_host_blocks
        self._held: dict[str, int] = {}
        #: Blocks nobody holds; to be read only.
        self.num_free_blocks = num_blocks
        self._least_free = num_blocks
        self._offloaded: dict[str, int] = {}
        self._num_host_free = num_host_blocks

    @property
    def num_free_host_blocks(self) -> int:
        """Blocks in the host's memory that are free."""
        return self._num_host_free

    @property
    def use(self) -> float:
        """Share of the blocks that are held."""
        return 1.0 - self.num_free_blocks / self.num_blocks

    @property
    def peak_blocks(self) -> int:
        """Most blocks ever held at the same time."""
        return self.num_blocks - self._least_free

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens of one request fill."""
        return -(-num_tokens // self.block_tokens)

    def held_by(self, request_id: str) -> int:
        """Blocks the request holds; 0 if none."""
        return self._held.get(request_id, 0)

    def offloaded_by(self, request_id: str) -> int:
        """Blocks of the request in the host's memory; 0 if none."""
        return self._offloaded.get(request_id, 0)

    def fits(self, num_tokens: int, *, alone: bool, freed_blocks: int = 0) -> bool:
        """Whether a newcomer with so many tokens could be admitted, if others gave back `freed_blocks`."""
        spare = 0 if alone else self.watermark_blocks
        return self.num_free_blocks + freed_blocks - self.blocks_for(num_tokens) >= spare

    def admit(self, request_id: str, num_tokens: int, *, alone: bool) -> bool:
        """Takes the blocks for a newcomer's tokens; False (and nothing taken) if it does not fit now.

        Args:
            request_id: Must hold nothing yet; what it has offloaded is back then.
            num_tokens: Tokens it will process before its next output token.
            alone: Nothing is running: the watermark would protect nobody and is waived.
        """
        assert request_id not in self._held
        if not self.fits(num_tokens, alone=alone):
            return False
        need = self.blocks_for(num_tokens)
        self._held[request_id] = need
        self.num_free_blocks -= need
        if self.num_free_blocks < self._least_free:
            self._least_free = self.num_free_blocks
        self._num_host_free += self._offloaded.pop(request_id, 0)
        return True

    def grow(self, request_id: str, num_tokens: int) -> bool:
        """Makes room for `num_tokens` tokens in all; False (and nothing taken) if there are too few blocks."""
        held = self._held[request_id]
        more = -(-num_tokens // self.block_tokens) - held
        if more <= 0:
            return True
        left = self.num_free_blocks - more
        if left < 0:
            return False
        self._held[request_id] = held + more
        self.num_free_blocks = left
        if left < self._least_free:
            self._least_free = left
        return True

    def take(self, num_blocks: int) -> None:
        """Takes blocks, which must be there, for holders who are named later; see `credit`."""
        self.num_free_blocks = left = self.num_free_blocks - num_blocks
        assert left >= 0, "more blocks are taken than are free"
        if left < self._least_free:
            self._least_free = left

    def credit(self, request_id: str, num_blocks: int) -> None:
        """So many of the blocks that were taken are the request's, which holds some already."""
        self._held[request_id] += num_blocks

    def offload(self, request_id: str, num_tokens: int) -> bool:
        """Moves the first `num_tokens` tokens to the host and gives back all blocks; False (and nothing moved) if
        the host has no room.
        """
        need = self.blocks_for(num_tokens)
        if need > self._num_host_free:
            return False
        self.num_free_blocks += self._held.pop(request_id)
        self._offloaded[request_id] = need
        self._num_host_free -= need
        return True

    def release(self, request_id: str) -> None:
        """Gives back everything the request holds, here and on the host."""
        self.num_free_blocks += self._held.pop(request_id, 0)
        self._num_host_free += self._offloaded.pop(request_id, 0)

    def validate(self, holders: set[str], offloaded: set[str]) -> None:
        """Checks that blocks are conserved and held by exactly the requests named; AssertionError otherwise."""
        assert set(self._held) == holders, (set(self._held), holders)
        assert set(self._offloaded) == offloaded, (set(self._offloaded), offloaded)
        assert all(count > 0 for count in [*self._held.values(), *self._offloaded.values()])
        assert sum(self._held.values()) + self.num_free_blocks == self.num_blocks
        assert sum(self._offloaded.values()) + self._num_host_free == self.num_host_blocks
        assert self.num_free_blocks >= 0
        assert self._num_host_free >= 0
