"""Which running requests of vLLM must go for a waiting one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from scheduler_core.adapters.live_order import LiveOrder
from scheduler_core.request import RequestState


@dataclass(frozen=True, slots=True)
class Seats:
    """What vLLM has left, and what its running requests hold.

    Attributes:
        num_free: Requests that may still be admitted.
        num_free_blocks: KV blocks that nobody holds.
        blocks_for: Blocks that a waiting request needs to be admitted.
        held_by: Blocks that a running request holds; shared prefixes make it more than what it would give back.
        may_go: Whether a running request's blocks can be given back now.
    """

    num_free: int
    num_free_blocks: int
    blocks_for: Callable[[Any], int]
    held_by: Callable[[str], int]
    may_go: Callable[[str], bool]

    @classmethod
    def of(cls, scheduler: Any) -> Seats:
        """Those of a scheduler of vLLM."""
        manager, requests = scheduler.kv_cache_manager, scheduler.requests
        num_groups = max(len(scheduler.kv_cache_config.kv_cache_groups), 1)
        return cls(
            num_free=scheduler.max_num_active_reqs
            - len(scheduler.running)
            - scheduler.num_waiting_for_streaming_input,
            num_free_blocks=manager.block_pool.get_num_free_blocks(),
            blocks_for=lambda request: num_groups * -(-(request.num_tokens + 1) // scheduler.block_size),
            held_by=lambda request_id: sum(map(len, manager.get_blocks(request_id).blocks)),
            may_go=lambda request_id: scheduler._request_blocks_can_be_freed(requests[request_id]),
        )


def victims_for(
    order: LiveOrder, worst: Sequence[tuple[float, RequestState]], head: Any, seats: Seats, now: float
) -> list[RequestState]:
    """The fewest running requests that must go for the first waiting one to be admitted.

    Args:
        order: The policy and the states.
        worst: Running requests with their eviction keys, the first to go at the front.
        head: vLLM's request that waits first.
        seats: What there is.
        now: Time in seconds.

    Returns:
        Nobody if it needs nobody's place, or may not displace enough of them.
    """
    waiting = order.states[head.request_id]
    num_free, num_blocks, need = seats.num_free, seats.num_free_blocks, seats.blocks_for(head)
    victims: list[RequestState] = []
    for eviction_key, running in worst:
        if num_free >= 1 and num_blocks >= need:
            return victims
        if not seats.may_go(running.request_id) or not order.may_displace(
            running, eviction_key, waiting, now
        ):
            return []
        victims.append(running)
        num_free += 1
        num_blocks += seats.held_by(running.request_id)
    return victims if num_free >= 1 and num_blocks >= need else []
