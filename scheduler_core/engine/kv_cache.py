"""Limits of one engine replica, and the accounting of its paged KV cache with its prefix cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scheduler_core.engine.prefix_cache import NO_HIT, Hit, PrefixCache
from scheduler_core.errors import InputError
from scheduler_core.ranges import INTEGERS, check_choice, check_ranges
from scheduler_core.request import RequestState

#: Engines use 16 to 256. Each replica has a table with one entry per token of a block.
MAX_BLOCK_TOKENS = 65_536

#: Blocks in the KV cache, if nothing says how many.
DEFAULT_KV_BLOCKS = 8192

Preemption = Literal["recompute", "swap"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one engine replica. `InputError` if a value is outside its range."""

    max_num_seqs: int = 64
    """Maximum number of requests in one step (B in TIE's beta); with most batch formers also the maximum in memory."""
    max_num_batched_tokens: int = 2048
    """Maximum number of tokens in one step, prefill and decode together; at least max_num_seqs."""
    num_kv_blocks: int | None = None
    """Blocks in the KV cache. Unset: 8192; in simulations with step times from data sheets (roofline), as many as fit into the
    memory."""
    kv_block_tokens: int = 16
    """Tokens per KV block."""
    kv_watermark: float = 0.01
    """Fraction of the KV blocks that admission leaves free for running requests, in [0, 1)."""
    preemption: Preemption = "recompute"
    """What happens to the KV cache of a preempted request: recompute (it is discarded) or swap (it is copied
    to host memory while that has free blocks)."""
    num_swap_blocks: int | None = None
    """Blocks in host memory for swap. Unset: as many as in the KV cache."""
    prefix_caching: bool = True
    """Keep the blocks of ended and preempted requests until their memory is needed, and share blocks of equal content.
    Without effect on requests whose content is unknown."""
    num_host_cache_blocks: int = 0
    """Prefix caching: blocks in host memory for what the KV cache evicts; from there it is copied back instead of computed."""

    def __post_init__(self) -> None:
        check_ranges(self, max_num_seqs=(1, INTEGERS), max_num_batched_tokens=(self.max_num_seqs, INTEGERS))
        check_ranges(self, num_kv_blocks=(1, INTEGERS), kv_block_tokens=(1, MAX_BLOCK_TOKENS))
        check_ranges(self, kv_watermark=(0.0, 0.999), num_swap_blocks=(0, INTEGERS))
        check_choice("preemption", self.preemption, ("recompute", "swap"))
        if self.num_swap_blocks is not None and self.preemption != "swap":
            raise InputError("num_swap_blocks", self.num_swap_blocks, "unset, unless preemption is swap")
        check_ranges(self, num_host_cache_blocks=(0, INTEGERS))
        if self.num_host_cache_blocks and not self.prefix_caching:
            raise InputError("num_host_cache_blocks", self.num_host_cache_blocks, "0 without prefix_caching")

    @property
    def capacity_blocks(self) -> int:
        """Blocks in the KV cache: `num_kv_blocks`, or the default."""
        return DEFAULT_KV_BLOCKS if self.num_kv_blocks is None else self.num_kv_blocks

    def kv_cache(self) -> KVCache:
        """An empty cache of this size."""
        host_blocks = 0
        if self.preemption == "swap":
            host_blocks = self.capacity_blocks if self.num_swap_blocks is None else self.num_swap_blocks
        prefixes = None
        if self.prefix_caching:
            prefixes = PrefixCache(self.kv_block_tokens, self.num_host_cache_blocks)
        return KVCache(self.capacity_blocks, self.kv_block_tokens, self.kv_watermark, host_blocks, prefixes)


class KVCache:
    """Block counts of every request, on the device and offloaded to the host, which has `num_host_blocks`.

    Admission takes the blocks for all tokens to process at once and must leave `watermark_blocks` free for
    the growth of running requests (vLLM's and Vidur's rule); growth may use every block. A preempted request
    may keep a copy of its first blocks on the host (swap), which is loaded again at admission.

    With `prefixes` requests share blocks, and blocks without a running request are free: they are evicted when others need
    the memory. Without, each request is charged for all of its tokens.
    """

    def __init__(
        self,
        num_blocks: int,
        block_tokens: int,
        watermark: float,
        num_host_blocks: int = 0,
        prefixes: PrefixCache | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        #: Tokens that fit if one request has the whole cache.
        self.capacity_tokens = num_blocks * block_tokens
        self.watermark_blocks = int(watermark * num_blocks)
        self.num_host_blocks = num_host_blocks
        self.prefixes = prefixes
        #: Free blocks on the device and on the host; read-only.
        self.num_free_blocks = num_blocks
        self.num_free_host_blocks = num_host_blocks
        self._min_free = num_blocks
        self._held: dict[str, int] = {}
        self._offloaded: dict[str, int] = {}

    @property
    def use(self) -> float:
        """Fraction of the blocks that are held."""
        return 1.0 - self.num_free_blocks / self.num_blocks

    @property
    def peak_blocks(self) -> int:
        """Maximum number of blocks held at the same time so far."""
        return self.num_blocks - self._min_free

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks needed for `num_tokens` tokens."""
        return -(-num_tokens // self.block_tokens)

    def held_by(self, request_id: str) -> int:
        """Blocks of a request; 0 if it holds none."""
        return self._held.get(request_id, 0)

    def offloaded_by(self, request_id: str) -> int:
        """Blocks of a request on the host; 0 if it has none there."""
        return self._offloaded.get(request_id, 0)

    def find(self, state: RequestState) -> Hit:
        """What the prefix cache has of a waiting request, at most all but the last of its known tokens."""
        request = state.request
        if self.prefixes is None or not request.content or request.request_id in self._offloaded:
            return NO_HIT
        return self.prefixes.find(request.content, request.prompt_tokens, state.known_tokens - 1)

    def freed_by(self, request_id: str) -> int:
        """Blocks that become free when a request leaves the cache."""
        held = self._held.get(request_id, 0)
        if self.prefixes is None or not held:
            return held
        return held - self.prefixes.own(request_id) + self.prefixes.exclusive(request_id)

    def fits(
        self, num_tokens: int, *, waive_watermark: bool, freed_blocks: int = 0, hit: Hit = NO_HIT
    ) -> bool:
        """Whether a request of `num_tokens` tokens could be admitted after others freed `freed_blocks`."""
        spare = 0 if waive_watermark else self.watermark_blocks
        need = self.blocks_for(num_tokens) - hit.num_pinned
        return self.num_free_blocks + freed_blocks - need >= spare

    def admit(self, request_id: str, num_tokens: int, *, waive_watermark: bool, hit: Hit = NO_HIT) -> bool:
        """Takes blocks for the tokens that a request without blocks processes before its next output token,
        and frees its host blocks. Returns False, without taking any, if they do not fit.

        `waive_watermark`: ignore the watermark, because no running request needs it. `hit`: those that the prefix cache has.
        """
        assert request_id not in self._held
        if not self.fits(num_tokens, waive_watermark=waive_watermark, hit=hit):
            return False
        num_blocks = self.blocks_for(num_tokens)
        self._held[request_id] = num_blocks
        if self.prefixes is not None and hit.path:
            # The blocks of the hit are pinned before others are evicted.
            num_blocks += self.prefixes.pin(request_id, hit) - hit.num_blocks - hit.num_host_blocks
        self.take(num_blocks)
        self.num_free_host_blocks += self._offloaded.pop(request_id, 0)
        return True

    def publish(self, state: RequestState) -> None:
        """Adds the computed blocks of a running request to the prefix cache."""
        prefixes, request = self.prefixes, state.request
        if prefixes is None or not request.content:
            return
        name, before = request.request_id, prefixes.own(request.request_id)
        grown = prefixes.publish(name, request.content, request.prompt_tokens, state.num_computed_tokens)
        # Own copies of what others have computed as well become free.
        self.num_free_blocks += prefixes.own(name) - before - grown

    def grow(self, request_id: str, num_tokens: int) -> bool:
        """Grows a request to `num_tokens` tokens; False, without taking any blocks, if too few are free."""
        held = self._held[request_id]
        more = -(-num_tokens // self.block_tokens) - held
        if more <= 0:
            return True
        if more > self.num_free_blocks:
            return False
        self._held[request_id] = held + more
        self.take(more)
        return True

    def take(self, num_blocks: int) -> None:
        """Takes free blocks that `credit` assigns to requests later. AssertionError if there are too few."""
        self.num_free_blocks = free = self.num_free_blocks - num_blocks
        assert free >= 0, "more blocks are taken than are free"
        if free < self._min_free:
            self._min_free = free
        if self.prefixes is not None and free < self.prefixes.num_unused:
            self.prefixes.evict(self.prefixes.num_unused - free)

    def credit(self, request_id: str, num_blocks: int) -> None:
        """Assigns blocks taken by `take` to a request that already holds some."""
        self._held[request_id] += num_blocks

    def offload(self, request_id: str, num_tokens: int) -> bool:
        """Moves the first `num_tokens` tokens to the host and frees all device blocks; False, without moving
        any, if the host has too few free blocks."""
        num_blocks = self.blocks_for(num_tokens)
        if num_blocks > self.num_free_host_blocks:
            return False
        self._free(request_id, "")
        self._offloaded[request_id] = num_blocks
        self.num_free_host_blocks -= num_blocks
        return True

    def release(self, request_id: str, session: str = "") -> None:
        """Frees all blocks of the request, on the device and on the host. The prefix cache keeps what was published, as last
        used by `session`."""
        self._free(request_id, session)
        self.num_free_host_blocks += self._offloaded.pop(request_id, 0)

    def _free(self, request_id: str, session: str) -> None:
        """Frees the blocks of a request on the device."""
        held = self._held.pop(request_id, 0)
        if self.prefixes is not None and held:
            held -= self.prefixes.own(request_id)
            held += self.prefixes.unpin(request_id, session)
        self.num_free_blocks += held

    def validate(self, holders: set[str], offloaded: set[str]) -> None:
        """Checks that blocks are conserved and only held by these requests. AssertionError otherwise."""
        assert set(self._held) == holders, (set(self._held), holders)
        assert set(self._offloaded) == offloaded, (set(self._offloaded), offloaded)
        assert all(count > 0 for count in [*self._held.values(), *self._offloaded.values()])
        held = sum(self._held.values())
        if self.prefixes is not None:
            self.prefixes.validate()
            shared = {name: self.prefixes.own(name) for name in self._held}
            assert all(shared[name] <= count for name, count in self._held.items())
            held += self.prefixes.num_pinned - sum(shared.values())
            assert self.prefixes.num_unused <= self.num_free_blocks
        assert held + self.num_free_blocks == self.num_blocks
        assert sum(self._offloaded.values()) + self.num_free_host_blocks == self.num_host_blocks
        assert min(self.num_free_blocks, self.num_free_host_blocks) >= 0
