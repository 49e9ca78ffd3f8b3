"""vLLM's prefix cache, as policies use it: hits of waiting requests, contexts of sessions, order of eviction; and how turns end.

Nothing of vLLM is changed but the order of its queue of free blocks, from whose front blocks are taken.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, takewhile
from typing import Any

from scheduler_core.adapters.vllm_version import copies_of
from scheduler_core.engine.step_costs import StepCosts
from scheduler_core.prediction.session import END_TURN, TOOL_USE
from scheduler_core.request import RequestState

#: Ended prompts of unnamed sessions that are remembered, and sessions before those without blocks are dropped.
_MAX_TAILS, _MIN_CONTEXTS = 20_000, 4096
#: Beginning of the names of sessions without a name.
_UNNAMED = "~"
#: Tokens with which models begin or end a call of a tool, as in vLLM's parsers of them.
_CALLS = re.compile(
    r"tool_?calls?|tool_request|tools_prefix|function_?calls?|\|call\||python_(?:tag|start)", re.I
)


class OutputEnds:
    """How outputs of a served model end (`RequestState.ended_by`), by the tokens of its tokenizer for calls of tools.

    The ends of models that call tools in plain text are unknown, and so are those before the first call.
    """

    def __init__(self, tokenizer: Any) -> None:
        tokens = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        tokens |= tokenizer.get_added_vocab()
        #: Ids of these tokens.
        self._calls = {token for text, token in tokens.items() if _CALLS.search(text.replace("▁", "_"))}
        self._has_called = False

    def of(self, output_token_ids: Iterable[int]) -> str:
        """How a complete output has ended."""
        if self._calls and not self._calls.isdisjoint(output_token_ids):
            self._has_called = True
            return TOOL_USE
        return END_TURN if self._has_called else ""


class VllmCache:
    """See `LiveEngine`. Block hashes of a prompt are looked up in vLLM's block pool, without references or statistics.

    A block's hash depends on all tokens up to its end, and vLLM frees the blocks of a request from its end: where a block
    is cached, those before it are, too, so the number of cached blocks is found by bisection. (Only an order of requests
    and of evictions depends on this; vLLM searches itself at the admission.)

    With several groups of layers, such as sliding windows, hits are those of the first one with full attention, an upper
    bound; without one, nothing counts as cached, and the order of eviction is vLLM's.

    Args:
        manager: vLLM's `KVCacheManager`.
        capacity_tokens, step_tokens: Tokens that the KV cache has memory for, and that fit into one step.
        retention: `Policy.retention_key` if the policy orders evictions; else None: least recently used first, as in vLLM.
    """

    has_host_tier = False

    def __init__(
        self,
        manager: Any,
        capacity_tokens: int,
        step_tokens: int,
        retention: Callable[[str], float] | None,
    ) -> None:
        from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

        self.capacity_tokens = capacity_tokens
        self.step_tokens = step_tokens
        self.costs = StepCosts()
        self._manager = manager
        self._pool = manager.block_pool
        groups = enumerate(manager.coordinator.single_type_managers if manager.enable_caching else ())
        self._groups = [number for number, group in groups if type(group) is FullAttentionManager][:1]
        managers = manager.coordinator.single_type_managers
        self.block_size = managers[self._groups[0]].block_size if self._groups else 1
        #: Group of layers whose blocks stand for those of all.
        self.main_group = self._groups[0] if self._groups else 0
        #: Hashes of a block, each of so many tokens as vLLM hashes at once.
        self._scale = max(self.block_size // self._pool.hash_block_size, 1)
        is_orderable = bool(self._groups) and len(managers) == 1 and self._scale == 1
        self._retention = retention if is_orderable else None
        self._requests: dict[str, Any] = {}
        #: Hashes of the blocks of each session's last request as far as they were cached at the last look, and in how
        #: many of these contexts each hash is.
        self._contexts: dict[str, list[bytes]] = {}
        self._uses: dict[bytes, int] = {}
        self._max_contexts = _MIN_CONTEXTS
        #: Number of the block after which `_take_unused` goes on.
        self._next_block = 0
        #: Unnamed session by its tenant and the last whole block of its last prompt; empty: of several.
        self._tails: OrderedDict[tuple[str, bytes], str] = OrderedDict()

    @property
    def evicts_by_policy(self) -> bool:
        """See `EngineView`."""
        return self._retention is not None

    def add(self, request: Any) -> None:
        """Called before a request of vLLM arrives at the policy."""
        self._requests[request.request_id] = request

    def continued_session(self, request: Any, tenant: str = "") -> str:
        """The session of a request without a name: that of an ended one of its tenant whose prompt it continues, else a new one.

        The prompt begins with all whole blocks of the former one and has more of them. To tell sessions with the same
        system prompt apart, a prompt is continued once, and not if several sessions ended with the same block.
        """
        for value in reversed(request.block_hashes[:-1]):
            if session := self._tails.get((tenant, value)):
                del self._tails[tenant, value]
                return session
        return f"{_UNNAMED}{request.request_id}"

    def look_up(self, states: Iterable[RequestState]) -> None:
        """Updates `cached_tokens` of waiting requests; two look-ups for each where nothing has changed."""
        for state in states:
            request = self._requests.get(state.request_id)
            if request is None or not self._manager.prefix_cache_lookup_enabled(request):
                continue
            # vLLM computes at least one token of a prompt again.
            limit = min((request.num_tokens - 1) // self.block_size, len(request.block_hashes) // self._scale)
            num = self._num_cached(request.block_hashes, limit, state.cached_tokens // self.block_size)
            state.cached_tokens = num * self.block_size

    look_up_again = look_up

    def read_outputs(self, state: RequestState) -> None:
        """Updates `num_output_tokens` of a running request."""
        if (request := self._requests.get(state.request_id)) is not None:
            state.num_output_tokens = request.num_output_tokens

    def resident_tokens(self, session: str) -> int:
        """See `EngineView`."""
        context = self._contexts.get(session)
        return 0 if context is None else self._trim(context) * self.block_size

    def stop(self, request: Any, session: str) -> None:
        """Called before a request stops running: its blocks are the context of its session."""
        scale = self._scale
        num_blocks = min(len(request.block_hashes) // scale, request.num_computed_tokens // self.block_size)
        if session and self._groups and num_blocks:
            self._set_context(session, list(request.block_hashes[scale - 1 : num_blocks * scale : scale]))

    def end(self, request: Any, session: str, tenant: str = "") -> None:
        """Called when a request has ended, after `stop` if it ran."""
        num_prompt = request.num_prompt_tokens // self._pool.hash_block_size
        is_known = self._requests.pop(request.request_id, None) is not None
        if is_known and session.startswith(_UNNAMED) and 0 < num_prompt <= len(request.block_hashes):
            self._set_tail((tenant, request.block_hashes[num_prompt - 1]), session)

    def reserve(self, num_blocks: int) -> None:
        """Moves blocks of least value to the front of the queue of free blocks, so that at least `num_blocks` are there.

        These are blocks without content, those that are in no session's context, and the ends of the contexts of the sessions
        with the smallest `Policy.retention_key`; what several of them share goes with the last one. All others stay in vLLM's
        order: least recently used first, ends before beginnings. O(num_blocks), and O(sessions log sessions) if a
        context has to shrink.
        """
        if self._retention is None or num_blocks <= 0:
            return
        queue = self._pool.free_block_queue
        first = takewhile(self._is_unused, queue.iter_blocks_after(None))
        front = list(islice(first, num_blocks))
        if len(front) == num_blocks:
            return
        for block in front:
            queue.remove(block)
        front += self._take_unused(num_blocks - len(front), front)
        front += self._shrink_contexts(num_blocks - len(front))
        queue.prepend_n(front)

    def _is_unused(self, block: Any) -> bool:
        """Whether a free block is in no session's context."""
        return block.block_hash is None or block.block_hash[:-4] not in self._uses

    def _take_unused(self, num_blocks: int, others: list[Any]) -> list[Any]:
        """Takes free blocks with content that is in no context out of the queue, except `others`, from the next 2 `num_blocks`
        blocks of the pool."""
        blocks: list[Any] = []
        pool, numbers = self._pool.blocks, {block.block_id for block in others}
        for _ in range(min(2 * num_blocks, len(pool))):
            self._next_block = (self._next_block + 1) % len(pool)
            block = pool[self._next_block]
            if block.ref_cnt or block.is_null or block.block_hash is None or block.block_id in numbers:
                continue
            if self._is_unused(block):
                self._pool.free_block_queue.remove(block)
                blocks.append(block)
                if len(blocks) == num_blocks:
                    break
        return blocks

    def _shrink_contexts(self, num_blocks: int) -> list[Any]:
        """Takes free blocks of the contexts of least value out of the queue, in the order in which they are to be evicted."""
        queue = self._pool.free_block_queue
        blocks: list[Any] = []
        assert self._retention is not None
        if not num_blocks:
            return blocks
        for session in sorted(self._contexts, key=self._retention):
            context = self._contexts[session]
            self._trim(context)
            while context and len(blocks) < num_blocks:
                block = self._block(context[-1])
                copies = [] if block is None else copies_of(self._pool, block)
                if any(copy.ref_cnt > 0 for copy in copies):  # a request uses it and hence all before it
                    break
                if self._release(context.pop()):
                    # All of them: a copy that stayed would be found behind blocks that are gone.
                    for copy in copies:
                        queue.remove(copy)
                    blocks += copies
            if not context:
                del self._contexts[session]
            if len(blocks) >= num_blocks:
                break
        return blocks

    def _set_context(self, session: str, context: list[bytes]) -> None:
        old = self._contexts.get(session, [])
        # As each hash depends on all before it, the lists are equal up to a point.
        num = min(len(old), len(context))
        num_common = bisect_left(range(num), True, key=lambda index: old[index] != context[index])
        for value in context[num_common:]:
            self._uses[value] = self._uses.get(value, 0) + 1
        for value in old[num_common:]:
            self._release(value)
        self._contexts[session] = context
        # After that each hash is of a block that is cached.
        if len(self._contexts) > self._max_contexts or len(self._uses) > 2 * len(self._pool.blocks):
            self._contexts = {name: each for name, each in self._contexts.items() if self._trim(each)}
            self._max_contexts = max(2 * len(self._contexts), _MIN_CONTEXTS)

    def _set_tail(self, value: tuple[str, bytes], session: str) -> None:
        former = self._tails.pop(value, session)
        self._tails[value] = session if former == session else ""
        if len(self._tails) > _MAX_TAILS:
            self._tails.popitem(last=False)

    def _release(self, value: bytes) -> bool:
        """Removes a hash from one context; whether it is in no other."""
        self._uses[value] -= 1
        if self._uses[value]:
            return False
        del self._uses[value]
        return True

    def _trim(self, context: list[bytes]) -> int:
        """Drops what is no longer cached from the end of a context; the number of blocks that are left."""
        num = bisect_left(range(len(context)), True, key=lambda index: self._block(context[index]) is None)
        for value in context[num:]:
            self._release(value)
        del context[num:]
        return num

    def _num_cached(self, hashes: Sequence[bytes], limit: int, guess: int) -> int:
        """Number of leading blocks that are cached, at most `limit`; fast if it is near `guess`."""
        if not self._groups:
            return 0
        scale = self._scale

        def is_missing(index: int) -> bool:
            return self._block(hashes[(index + 1) * scale - 1]) is None

        low, high, step = 0, limit, 1
        guess = min(guess, limit)
        if guess and is_missing(guess - 1):
            high = guess - 1
        else:
            low = guess
            while low + step <= limit and not is_missing(low + step - 1):
                low += step
                step *= 2
            high = min(low + step - 1, limit)
        return bisect_left(range(high), True, lo=low, key=is_missing)

    def _block(self, value: bytes) -> Any:
        blocks = self._pool.get_cached_block(value, self._groups)
        return None if blocks is None else blocks[0]

    def num_used_by_others(self, state: RequestState, num_blocks: int) -> int:
        """Those of the leading cached blocks of a waiting request that running requests use."""
        request = self._requests.get(state.request_id)
        if request is None or not self._groups:
            return 0
        scale = self._scale

        def is_free(index: int) -> bool:
            block = self._block(request.block_hashes[(index + 1) * scale - 1])
            return block is None or block.ref_cnt == 0

        # Who uses a block also uses those before it.
        return bisect_left(range(num_blocks), True, key=is_free)
