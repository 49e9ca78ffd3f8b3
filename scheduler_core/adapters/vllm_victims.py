"""Which running request vLLM preempts when memory runs out, or for a waiting one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

from scheduler_core.adapters.engine_metrics import EngineMetrics
from scheduler_core.adapters.live_order import LiveOrder
from scheduler_core.engine.memory_victim import cheapest_last
from scheduler_core.request import RequestState


class Victims:
    """Orders vLLM's running requests before a step, because it preempts the last one. Without a batch former, which evicts
    itself."""

    # Attributes of vLLM's scheduler.
    running: list[Any]
    waiting: Any
    requests: dict[str, Any]
    block_size: int
    kv_cache_config: Any
    kv_cache_manager: Any
    max_num_active_reqs: int
    max_num_scheduled_tokens: int
    num_lookahead_tokens: int
    num_waiting_for_streaming_input: int
    pause_state: Any
    prev_step_scheduled_req_ids: set[str]
    requires_kv_delivery: bool
    _is_blocked_waiting_status: Any
    _preempt_request: Any
    _request_blocks_can_be_freed: Any
    # Attributes of ours.
    _tailcast_follows: bool
    _tailcast_metrics: EngineMetrics
    _tailcast_order: LiveOrder
    _tailcast_progress: Any

    def _tailcast_victim_last(self, now: float) -> None:
        """Moves the running request to preempt to the end, where vLLM takes it, if memory may run out in this step: with a prefix
        cache the last admitted one of the least urgent declared level, without one the cheapest. Those whose blocks cannot be
        freed go first, because vLLM gives up at them."""
        order, has_prefixes = self._tailcast_order, self.kv_cache_manager.enable_caching
        if has_prefixes and len(order.levels) < 2:
            return  # vLLM's own choice
        if len(self.running) < 2 or self._tailcast_missing_blocks() <= 0:
            return
        evictable = {
            request.request_id: request
            for request in self.running
            if request.request_id in order.states and self._request_blocks_can_be_freed(request)
        }
        states = [order.states[name] for name in evictable]
        if not has_prefixes:
            if not self._tailcast_follows:
                for request in evictable.values():
                    self._tailcast_progress(request, 0, 0, now)
            states = cheapest_last(states)
        states.sort(key=attrgetter("declared_level"))  # stable
        others = [request for request in self.running if request.request_id not in evictable]
        self.running = [*others, *(evictable[state.request_id] for state in states)]

    def _tailcast_missing_blocks(self) -> int:
        """Blocks beyond the free ones that the running requests may take in the next step, an upper bound; O(running) if few
        are free."""
        managers = self.kv_cache_manager.coordinator.single_type_managers
        num_blocks = -self.kv_cache_manager.block_pool.get_num_free_blocks()
        smallest = min([manager.block_size for manager in managers], default=1)
        # Each takes at most two blocks more than its tokens fill: the first and the last one.
        tokens = self.max_num_scheduled_tokens + len(self.running) * (
            self.num_lookahead_tokens + 2 * smallest
        )
        if num_blocks + len(managers) * -(-tokens // smallest) <= 0:
            return 0
        for request in self.running:
            end = request.num_tokens_with_spec + request.num_output_placeholders
            end = min(end, request.num_computed_tokens + self.max_num_scheduled_tokens)
            for manager in managers:
                held = len(manager.req_to_blocks.get(request.request_id, ()))
                num_blocks += max(-(-(end + self.num_lookahead_tokens) // manager.block_size) - held, 0)
        return int(num_blocks)

    def _tailcast_sort_running(self, now: float) -> None:
        """Sorts the running requests by eviction key, because vLLM preempts the last one when memory runs out. Before
        that, a preemptive policy may displace some of them for the first waiting request."""
        running = {request.request_id: request for request in self.running}
        worst = self._tailcast_order.worst_first(running, now)
        if self._tailcast_order.policy.preemptive:
            self._tailcast_displace(running, worst, now)
        still = {request.request_id for request in self.running}
        ids = [state.request_id for _, state in reversed(worst)]
        self.running = [running[request_id] for request_id in ids if request_id in still]

    def _tailcast_displace(
        self, running: Mapping[str, Any], worst: Sequence[tuple[float, RequestState]], now: float
    ) -> None:
        """Preempts running requests for the first waiting one if the policy allows it, for at most one per step.

        `running` has vLLM's running requests by id; `worst` is their order of eviction.
        """
        order = self._tailcast_order
        head = self.waiting.peek_request() if self.waiting and self.pause_state.name == "UNPAUSED" else None
        if head is not None and not self._is_blocked_waiting_status(head.status):
            num_groups = max(len(self.kv_cache_config.kv_cache_groups), 1)
            num_blocks = num_groups * -(-(head.num_tokens + 1) // self.block_size)
            manager = self.kv_cache_manager

            def held_blocks(request_id: str) -> int | None:
                is_free = self._request_blocks_can_be_freed(self.requests[request_id])
                return sum(map(len, manager.get_blocks(request_id).blocks)) if is_free else None

            num_running = len(self.running) + self.num_waiting_for_streaming_input
            for state in order.victims_for(
                head.request_id,
                num_blocks,
                worst,
                now,
                num_free_slots=self.max_num_active_reqs - num_running,
                num_free_blocks=manager.block_pool.get_num_free_blocks(),
                held_blocks=held_blocks,
            ):
                self._tailcast_evict(running[state.request_id], now)

    def _tailcast_evict(self, request: Any, now: float) -> None:
        """Preempts a running request between two steps."""
        self.running.remove(request)
        self._preempt_request(request, now, drop_stale_output=self.requires_kv_delivery)
        # If it is admitted again in this step, vLLM must not treat it as running all the time.
        self.prev_step_scheduled_req_ids.discard(request.request_id)
        self._tailcast_metrics.displacements.inc()
