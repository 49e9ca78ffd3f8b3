"""Steps of batch formers inside vLLM: its memory as a former sees it, and the execution of a plan by vLLM's own loop."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain
from typing import Any

from scheduler_core.adapters.live_batches import LiveBatches
from scheduler_core.adapters.settings import EngineSettings
from scheduler_core.adapters.vllm_cache import VllmCache
from scheduler_core.adapters.vllm_failures import guarded
from scheduler_core.adapters.vllm_version import check_plannable
from scheduler_core.batching.base import BatchFormer
from scheduler_core.engine.kv_cache import KVCache, Limits
from scheduler_core.engine.memory_victim import MemoryVictims
from scheduler_core.engine.plan import PrefillChunk
from scheduler_core.engine.prefix_cache import NO_HIT, Hit
from scheduler_core.errors import InputError
from scheduler_core.policies.base import Policy
from scheduler_core.request import Request, RequestState, Status


class VllmBlocks(KVCache):
    """vLLM's blocks for a batch former: a block is the memory of `block_size` tokens in all groups of layers.

    Between two steps `synchronize` copies what vLLM has done. A request keeps what its admission has reserved, although vLLM
    allocates it chunk by chunk.
    """

    def __init__(self, manager: Any, cache: VllmCache, block_size: int, lookahead_tokens: int) -> None:
        managers = manager.coordinator.single_type_managers
        self._num_groups = max(len(managers), 1)
        num_blocks = (manager.block_pool.num_gpu_blocks - 1) // self._num_groups
        super().__init__(num_blocks, block_size, 0.0)
        self.watermark_blocks = -(-manager.watermark_blocks // self._num_groups)
        self._pool, self._cache = manager.block_pool, cache
        self._allocated = managers[cache.main_group].req_to_blocks
        #: Tokens beyond those of a step that vLLM allocates memory for.
        self._lookahead_tokens = lookahead_tokens
        #: Blocks that vLLM has not allocated yet, of those that requests have reserved.
        self._unallocated: dict[str, int] = {}
        #: Tokens in the blocks that vLLM had allocated at the last look.
        self._allocated_tokens: dict[str, int] = {}
        #: Requests to synchronize.
        self._touched: list[Iterable[str]] = []

    def touch(self, request_ids: Iterable[str]) -> None:
        """Called with requests of which vLLM may have computed tokens or allocated blocks."""
        self._touched.append(request_ids)

    def synchronize(
        self,
        requests: Mapping[str, Any],
        running: Collection[Any],
        states: Mapping[str, RequestState],
        now: float,
    ) -> list[RequestState]:
        """Copies the progress and memory of touched requests to their states, and the number of free blocks. What requests have
        reserved beyond their blocks is not free. Returns the requests that vLLM has admitted without a plan."""
        unplanned, lookahead_tokens, waiting = [], self._lookahead_tokens, Status.WAITING
        allocated_tokens = self._allocated_tokens.get
        names = list(chain.from_iterable(self._touched))
        for name, request, state in zip(names, map(requests.get, names), map(states.get, names), strict=True):
            if request is None or state is None:
                continue
            if state.status is waiting:
                if state in unplanned or all(each is not request for each in running):
                    continue
                unplanned.append(state)
            state.num_computed_tokens = computed = request.num_computed_tokens
            if request.num_output_placeholders:
                state.last_token_s = now  # its latest token is still being computed
            if computed + lookahead_tokens > allocated_tokens(name, 0):
                self._copy_blocks(state)
        self._touched = []
        free = self._pool.get_num_free_blocks() // self._num_groups
        self.num_free_blocks = free - sum(self._unallocated.values())
        return unplanned

    def _copy_blocks(self, state: RequestState) -> None:
        name, size = state.request_id, self.block_tokens
        num_blocks, reserved = len(self._allocated.get(name, ())), self._held.get(name, 0)
        self._held[name] = held = max(reserved, num_blocks)
        state.kv_tokens = held * size
        self._allocated_tokens[name] = num_blocks * size
        self._reserve(name, reserved - num_blocks)

    def _reserve(self, request_id: str, num_blocks: int) -> None:
        """Sets the blocks of a request that vLLM has not allocated yet."""
        if num_blocks > 0:
            self._unallocated[request_id] = num_blocks
        else:
            self._unallocated.pop(request_id, None)

    def find(self, state: RequestState) -> Hit:
        """See `KVCache`."""
        self._cache.look_up([state])
        num_blocks = state.cached_tokens // self.block_tokens
        if not num_blocks:
            return NO_HIT
        return Hit(num_blocks, self._cache.num_used_by_others(state, num_blocks))

    def freed_by(self, request_id: str) -> int:
        """See `KVCache`."""
        blocks = self._allocated.get(request_id, ())
        reserved = self._held.get(request_id, 0) - len(blocks)
        return int(reserved + sum([block.ref_cnt == 1 for block in blocks]))

    def admit(self, request_id: str, num_tokens: int, *, waive_watermark: bool, hit: Hit = NO_HIT) -> bool:
        """See `KVCache`."""
        if not self.fits(num_tokens, waive_watermark=waive_watermark, hit=hit):
            return False
        self._held[request_id] = self._unallocated[request_id] = num_blocks = self.blocks_for(num_tokens)
        self.take(num_blocks - hit.num_pinned)
        return True

    def grow(self, request_id: str, num_tokens: int) -> bool:
        """See `KVCache`."""
        has_grown = super().grow(request_id, num_tokens)
        self._reserve(request_id, self._held[request_id] - len(self._allocated.get(request_id, ())))
        return has_grown

    def _free(self, request_id: str, session: str) -> None:
        if request_id in self._held:
            self.num_free_blocks += self.freed_by(request_id)
            del self._held[request_id]
            self._unallocated.pop(request_id, None)
            self._allocated_tokens.pop(request_id, None)


class PlannedSteps:
    """Lets a batch former plan vLLM's steps.

    vLLM's own `schedule` executes a plan: it sees only the running requests and the waiting ones that the plan has, and at most
    the planned tokens of each prompt. So what it decides itself (prefix cache, speculative tokens, encoder inputs, structured
    output) stays as it is. Where it executes less than was planned, the rest is planned again.
    """

    # Attributes of vLLM's scheduler.
    running: list[Any]
    waiting: Any
    requests: dict[str, Any]
    block_size: int
    max_model_len: int
    max_num_running_reqs: int
    max_num_scheduled_tokens: int
    num_lookahead_tokens: int
    kv_cache_manager: Any
    encoder_cache_manager: Any
    pause_state: Any
    _reserve_prefill_lookahead: Any
    scheduler_reserve_full_isl: bool
    _handle_blocked_waiting_request: Any
    # Attributes of ours.
    _tailcast_settings: EngineSettings
    _tailcast_evict: Callable[[Any, float], None]
    #: The order, if a batch former plans the steps.
    _tailcast_batches: LiveBatches | None
    _tailcast_chunks: dict[str, int]
    #: Planned prompts of the last step that vLLM could not go on with, because the encoder cache was full.
    _tailcast_blocked: frozenset[str] = frozenset()

    def _tailcast_make_batches(
        self,
        config: Any,
        policy: Policy,
        former: BatchFormer,
        cache: VllmCache,
        level: Callable[[RequestState], int],
    ) -> LiveBatches:
        """`InputError` if the former cannot plan the steps of this engine."""
        check_plannable(self, config, str(self._tailcast_settings.batching))
        kv = VllmBlocks(self.kv_cache_manager, cache, self.block_size, self.num_lookahead_tokens)
        limits = Limits(
            max_num_seqs=config.scheduler_config.max_num_seqs,
            max_num_batched_tokens=self.max_num_scheduled_tokens,
            num_kv_blocks=kv.num_blocks,
            kv_block_tokens=self.block_size,
        )
        longest = Request(
            request_id="longest", arrival_s=0.0, prompt_tokens=max(self.max_model_len - 1, 1), max_tokens=1
        )
        if (error := former.refusal(longest, limits)) is not None:
            allowed = f"{error.allowed}; raise --max-num-batched-tokens or lower --max-model-len"
            raise InputError(
                f"batching {self._tailcast_settings.batching}: {error.field}", error.value, allowed
            )
        # The former keeps memory for what it admits; vLLM's own check would be a second one.
        self.scheduler_reserve_full_isl = False
        victims: MemoryVictims = "last_admitted" if self.kv_cache_manager.enable_caching else "cheapest"
        batches = LiveBatches(policy, former, kv, limits, cache.costs, level, cache, victims)
        batches.pool.read_outputs = cache.read_outputs
        return batches

    @guarded
    def _tailcast_plan(self, now: float) -> list[Any] | None:
        """Lets the batch former plan the step; the running requests in it. None: vLLM decides."""
        batches, queue = self._tailcast_batches, self.waiting
        if batches is None or self.pause_state.name != "UNPAUSED":
            self._tailcast_limit_chunks(())
            if batches is not None:
                queue.plan(())
            return None
        queue.release(self._handle_blocked_waiting_request)
        pool = batches.pool
        assert isinstance(pool.kv, VllmBlocks)
        requests = self.requests
        for state in pool.kv.synchronize(requests, self.running, batches.states, now):
            pool.adopt(state, now)
        batch = batches.form(now)
        for request_id in batch.preempted:
            if not queue.holds(request_id):
                self._tailcast_evict(requests[request_id], now)
        self._tailcast_limit_chunks(batch.prefills)
        chosen = [state.request_id for state in batch.decodes]
        chosen += self._tailcast_chunks
        unexecuted = batches.unexecuted
        num_running = len(chosen) - len(unexecuted & self._tailcast_chunks.keys())
        if not chosen and len(queue) and not self.running:
            chosen = [head.request_id for head in (batches.waiting.peek(),) if head is not None]
        queue.plan(chosen if unexecuted or not batch.decodes else ())
        if num_running == len(self.running) and not self._tailcast_blocked:
            return None  # all of them
        if len(self.running) == pool.num_running - len(unexecuted):
            return self._tailcast_unblocked([requests[name] for name in chosen if name not in unexecuted])
        # vLLM must also see requests of its own, which have no state here.
        paused = pool.running.keys() - set(chosen)
        return self._tailcast_unblocked(
            [request for request in self.running if request.request_id not in paused]
        )

    def _tailcast_unblocked(self, planned: list[Any]) -> list[Any]:
        """The planned requests; after a step with blocked ones without these, and with those running ones at the end whose encoder
        outputs fill the cache: they are freed when their prompts go on."""
        if not self._tailcast_blocked:
            return planned
        chosen = {request.request_id for request in planned}
        remaining = [request for request in planned if request.request_id not in self._tailcast_blocked]
        holders = [
            request
            for request in self.running
            if request.request_id not in chosen and self.encoder_cache_manager.get_cached_input_ids(request)
        ]
        return remaining + holders[: max(self.max_num_running_reqs - len(remaining), 0)]

    def _tailcast_note_blocked(self, scheduled: Mapping[str, int]) -> None:
        """Called with the tokens of the step that was planned last."""
        if self._tailcast_blocked:  # they were left out of it
            self._tailcast_blocked = frozenset()
            return
        names = (name for name in self._tailcast_chunks if name not in scheduled)
        self._tailcast_blocked = frozenset(
            name for name in names if (request := self.requests.get(name)) and request.has_encoder_inputs
        )

    def _tailcast_touch(self, request_ids: Iterable[str]) -> None:
        """Called with the requests of a step that was scheduled or has ended."""
        if self._tailcast_batches is not None:
            kv = self._tailcast_batches.pool.kv
            assert isinstance(kv, VllmBlocks)
            kv.touch(request_ids)

    def _tailcast_limit_chunks(self, prefills: Collection[tuple[RequestState, PrefillChunk]]) -> None:
        """Limits the tokens of prompts in the next step. vLLM's method, which it calls for every running request, is only replaced
        if vLLM alone might process more: of prompts that are planned in parts, or of which the prefix cache has had blocks that an
        admission may take; or of preempted requests, whose last token may have come afterwards."""
        self._tailcast_chunks = {chunk.request_id: chunk.num_tokens for _, chunk in prefills}
        if any(not chunk.is_last or chunk.start_token or state.num_preemptions for state, chunk in prefills):
            self._reserve_prefill_lookahead = self._tailcast_num_tokens
        else:
            self.__dict__.pop("_reserve_prefill_lookahead", None)

    def _tailcast_num_tokens(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Called by vLLM for the tokens of a request in this step: those of a prompt are at most the planned ones."""
        limit = self._tailcast_chunks.get(request.request_id)
        if limit is not None and num_new_tokens > limit:
            num_new_tokens = limit
        own = type(self)._reserve_prefill_lookahead
        num_tokens: int = own(self, request, num_computed_tokens, num_new_tokens)
        return num_tokens

    def _tailcast_execute(
        self, planned: list[Any] | None, schedule: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """vLLM's own `schedule`, which sees only the `planned` ones of the running requests; None: all.

        With a batch former more requests may be in memory than the model runner takes in a step.
        """
        before = self.running
        if planned is None:
            if self._tailcast_batches is None or len(before) <= self.max_num_running_reqs:
                return schedule(*args, **kwargs)
            planned = before[: self.max_num_running_reqs]
        self.running = [*planned]
        try:
            return schedule(*args, **kwargs)
        finally:
            chosen = set(planned)
            admitted = [request for request in self.running if request not in chosen]
            preempted = chosen.difference(self.running)
            remaining = [request for request in before if request not in preempted] if preempted else before
            self.running = [*remaining, *admitted]
