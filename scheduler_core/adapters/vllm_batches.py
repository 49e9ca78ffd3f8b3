"""Steps of batch formers inside vLLM: its memory as a former sees it, and the execution of a plan by vLLM's own loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from scheduler_core.adapters.live_batches import LiveBatches
from scheduler_core.adapters.settings import EngineSettings
from scheduler_core.adapters.vllm_cache import VllmCache
from scheduler_core.adapters.vllm_failures import guarded
from scheduler_core.adapters.vllm_version import check_plannable
from scheduler_core.batching.base import BatchFormer
from scheduler_core.engine.kv_cache import KVCache, Limits
from scheduler_core.engine.memory_victim import MemoryVictims
from scheduler_core.engine.prefix_cache import NO_HIT, Hit
from scheduler_core.errors import InputError
from scheduler_core.policies.base import Policy
from scheduler_core.request import Request, RequestState, Status


class VllmBlocks(KVCache):
    """vLLM's blocks for a batch former: a block is the memory of `block_size` tokens in all groups of layers.

    Between two steps `synchronize` copies what vLLM has done. A request keeps what its admission has reserved, although vLLM
    allocates it chunk by chunk.
    """

    def __init__(self, manager: Any, cache: VllmCache, block_size: int) -> None:
        managers = manager.coordinator.single_type_managers
        self._num_groups = max(len(managers), 1)
        num_blocks = (manager.block_pool.num_gpu_blocks - 1) // self._num_groups
        super().__init__(num_blocks, block_size, 0.0)
        self.watermark_blocks = -(-manager.watermark_blocks // self._num_groups)
        self._pool, self._cache = manager.block_pool, cache
        self._allocated = managers[cache.main_group].req_to_blocks

    def synchronize(
        self,
        running: Iterable[Any],
        unexecuted: Iterable[str],
        states: Mapping[str, RequestState],
        now: float,
    ) -> list[RequestState]:
        """Copies the progress and memory of vLLM's running requests to their states, and the number of free blocks. What
        admitted requests have reserved beyond their blocks is not free; `unexecuted` ones have only that. Returns the requests
        that vLLM has admitted without a plan."""
        free = self._pool.get_num_free_blocks() // self._num_groups
        allocated, held, size, waiting = self._allocated, self._held, self.block_tokens, Status.WAITING
        unplanned = []
        for request in running:
            name = request.request_id
            state = states.get(name)
            if state is None:
                continue
            state.num_computed_tokens = request.num_computed_tokens
            num_blocks, reserved = len(allocated.get(name, ())), held.get(name, 0)
            if num_blocks >= reserved:
                held[name] = reserved = num_blocks
            else:
                free -= reserved - num_blocks
            state.kv_tokens = reserved * size
            if request.num_output_placeholders:
                state.last_token_s = now  # its latest token is still being computed
            if state.status is waiting:
                unplanned.append(state)
        self.num_free_blocks = free - sum([held.get(name, 0) for name in unexecuted])
        return unplanned

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
        self._held[request_id] = num_blocks = self.blocks_for(num_tokens)
        self.take(num_blocks - hit.num_pinned)
        return True

    def _free(self, request_id: str, session: str) -> None:
        if request_id in self._held:
            self.num_free_blocks += self.freed_by(request_id)
            del self._held[request_id]


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
    kv_cache_manager: Any
    pause_state: Any
    scheduler_reserve_full_isl: bool
    _handle_blocked_waiting_request: Any
    # Attributes of ours.
    _tailcast_settings: EngineSettings
    _tailcast_evict: Callable[[Any, float], None]
    #: The order, if a batch former plans the steps.
    _tailcast_batches: LiveBatches | None
    _tailcast_chunks: dict[str, int]

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
        kv = VllmBlocks(self.kv_cache_manager, cache, self.block_size)
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
        return LiveBatches(policy, former, kv, limits, cache.costs, level, cache, victims)

    @guarded
    def _tailcast_plan(self, now: float) -> list[Any] | None:
        """Lets the batch former plan the step; the running requests in it. None: vLLM decides."""
        batches, queue = self._tailcast_batches, self.waiting
        if batches is None or self.pause_state.name != "UNPAUSED":
            self._tailcast_chunks = {}
            if batches is not None:
                queue.plan(())
            return None
        queue.release(self._handle_blocked_waiting_request)
        pool = batches.pool
        assert isinstance(pool.kv, VllmBlocks)
        for state in pool.kv.synchronize(self.running, batches.unexecuted, batches.states, now):
            pool.adopt(state, now)
        batch = batches.form(now)
        for request_id in batch.preempted:
            if not queue.holds(request_id):
                self._tailcast_evict(self.requests[request_id], now)
        self._tailcast_chunks = {chunk.request_id: chunk.num_tokens for _, chunk in batch.prefills}
        chosen = {state.request_id: None for state in batch.decodes} | dict.fromkeys(self._tailcast_chunks)
        if not chosen and len(queue) and not self.running:
            chosen = {head.request_id: None for head in (batches.waiting.peek(),) if head is not None}
        queue.plan(chosen if batches.unexecuted or not batch.decodes else ())
        if len(chosen) == len(self.running) and not batches.unexecuted:
            return None  # all of them
        # vLLM must also see requests of its own, which have no state here.
        paused = {request_id for request_id in pool.running if request_id not in chosen}
        return [request for request in self.running if request.request_id not in paused]

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
            former, preempted = set(before), set(planned).difference(self.running)
            admitted = [request for request in self.running if request not in former]
            remaining = [request for request in before if request not in preempted]
            self.running = [*remaining, *admitted]
