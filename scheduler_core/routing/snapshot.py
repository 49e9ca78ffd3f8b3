"""Snapshots of replicas, the input of routers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import NamedTuple

from scheduler_core.engine.kv_cache import KVCache
from scheduler_core.engine.pool import Pool
from scheduler_core.prediction.predictions import LengthPrediction
from scheduler_core.request import Phase, Request, RequestState, Status
from scheduler_core.scheduler import Scheduler


class ReplicaStatus(Enum):
    """Whether a replica accepts new requests."""

    ACTIVE = "active"
    DRAINING = "draining"


class ReplicaRole(Enum):
    """Phases that a replica runs (DistServe, section 4)."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class RequestView(NamedTuple):
    """One request on a replica; a named tuple, because many are created. `tier` is the urgency level at which it is
    scheduled, 0 = most urgent; `kv_blocks` are the held blocks, 0 while it waits; `demand_blocks` those needed for
    admission, or the held ones while it runs; `decoding`: its prefill is complete."""

    request_id: str
    arrival_s: float
    tier: int
    prompt_tokens: int
    max_tokens: int
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    kv_blocks: int = 0
    demand_blocks: int = 0
    running: bool = False
    decoding: bool = False
    prediction: LengthPrediction | None = None

    @property
    def prefill_left_tokens(self) -> int:
        """Tokens to process before the next token can be sampled."""
        if self.decoding:
            return 0
        return self.prompt_tokens + self.num_output_tokens - self.num_computed_tokens


def _nothing(_: object = None) -> int:
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSnapshot:
    """One replica at one time.

    Attributes:
        num_kv_blocks: Blocks in its KV cache, > 0; M in the multi-tier paper.
        num_free_blocks: Blocks neither held nor reserved.
        num_running: Running requests; B in the multi-tier paper.
        used_blocks: Blocks held by running requests.
        head_demand_blocks: Blocks needed by the first waiting request; 0 if no request waits.
        waiting_prefill_tokens: Tokens that the waiting requests must process before their next output token.
        tiers: Distinct tiers of its running and waiting requests, in order.
        requests: Its requests, running ones first, if the router needs them (`Router.needs_requests`).
        resident_tokens: Tokens of the context of a session in its KV cache, see `EngineView`.
        cached_tokens: Tokens of the prompt of a request in its KV cache.
        running_prefill_tokens: Prompt tokens that its running requests still have to process. All three are always of the
            current state.
    """

    replica_id: str
    status: ReplicaStatus = ReplicaStatus.ACTIVE
    role: ReplicaRole = ReplicaRole.BOTH
    num_kv_blocks: int
    num_free_blocks: int
    kv_block_tokens: int = 16
    max_num_seqs: int = 64
    num_running: int = 0
    num_waiting: int = 0
    used_blocks: int = 0
    head_demand_blocks: int = 0
    waiting_prefill_tokens: int = 0
    tiers: tuple[int, ...] = ()
    requests: Iterable[RequestView] = ()
    resident_tokens: Callable[[str], int] = field(default=_nothing, repr=False, compare=False)
    cached_tokens: Callable[[Request], int] = field(default=_nothing, repr=False, compare=False)
    running_prefill_tokens: Callable[[], int] = field(default=_nothing, repr=False, compare=False)

    @property
    def num_requests(self) -> int:
        """Number of running and waiting requests."""
        return self.num_running + self.num_waiting

    @property
    def kv_load(self) -> float:
        """Fraction of the KV cache that is held, reserved or needed by waiting requests; may exceed 1."""
        committed = self.num_kv_blocks - self.num_free_blocks
        return (committed + self.blocks_for(self.waiting_prefill_tokens)) / self.num_kv_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks needed for `num_tokens` tokens of one request."""
        return -(-num_tokens // self.kv_block_tokens)

    def with_waiting(self, view: RequestView) -> ReplicaSnapshot:
        """The snapshot with one more waiting request, for dispatching several requests at once.

        The new request is the head of the queue only if no other request waits.
        """
        return replace(
            self,
            num_waiting=self.num_waiting + 1,
            head_demand_blocks=self.head_demand_blocks if self.num_waiting else view.demand_blocks,
            waiting_prefill_tokens=self.waiting_prefill_tokens + view.prefill_left_tokens,
            tiers=tuple(sorted({*self.tiers, view.tier})),
            requests=(*self.requests, view),
        )


def take_snapshot(
    scheduler: Scheduler,
    replica_id: str,
    *,
    status: ReplicaStatus = ReplicaStatus.ACTIVE,
    role: ReplicaRole = ReplicaRole.BOTH,
    keep_requests: bool = True,
) -> ReplicaSnapshot:
    """Snapshot of a scheduler. Its requests are collected at their first access, O(requests), which must
    precede any change of the scheduler."""
    pool, config = scheduler.pool, scheduler.config
    reserved = sum(pool.kv.held_by(name) for name in pool.reserved)
    head = pool.waiting.peek()
    return ReplicaSnapshot(
        replica_id=replica_id,
        status=status,
        role=role,
        num_kv_blocks=config.capacity_blocks,
        num_free_blocks=pool.kv.num_free_blocks,
        kv_block_tokens=config.kv_block_tokens,
        max_num_seqs=config.max_num_seqs,
        num_running=pool.num_running,
        num_waiting=len(pool.waiting),
        used_blocks=config.capacity_blocks - pool.kv.num_free_blocks - reserved,
        head_demand_blocks=0 if head is None else pool.kv.blocks_for(head.known_tokens),
        waiting_prefill_tokens=pool.waiting_prefill_tokens,
        tiers=tuple(sorted(level for level, num in pool.num_by_level.items() if num)),
        requests=_Views(pool) if keep_requests else (),
        resident_tokens=pool.resident_tokens,
        cached_tokens=partial(_cached_tokens, pool),
        running_prefill_tokens=partial(_running_prefill_tokens, pool),
    )


def _cached_tokens(pool: Pool, request: Request) -> int:
    prefixes = pool.kv.prefixes
    if prefixes is None or not request.content:
        return 0
    # At least the last token of a prompt is computed.
    hit = prefixes.find(request.content, request.prompt_tokens, request.prompt_tokens - 1)
    return hit.num_blocks * pool.kv.block_tokens


def _running_prefill_tokens(pool: Pool) -> int:
    return sum([state.prefill_target_tokens - state.num_computed_tokens for state in pool.by_phase()[0]])


class _Views(Iterable[RequestView]):
    """The requests of a pool, running ones first, collected at the first access."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._views: tuple[RequestView, ...] | None = None

    def __iter__(self) -> Iterator[RequestView]:
        if self._views is None:
            waiting = sorted(self._pool.waiting, key=lambda state: state.order)
            states = (*self._pool.running.values(), *waiting)
            self._views = tuple(_view(state, self._pool.kv) for state in states)
        return iter(self._views)


def _view(state: RequestState, kv: KVCache) -> RequestView:
    running = state.status is Status.RUNNING
    return RequestView(
        request_id=state.request_id,
        arrival_s=state.request.arrival_s,
        tier=state.effective_level(),
        prompt_tokens=state.request.prompt_tokens,
        max_tokens=state.request.max_tokens,
        num_computed_tokens=state.num_computed_tokens,
        num_output_tokens=state.num_output_tokens,
        kv_blocks=kv.held_by(state.request_id),
        demand_blocks=kv.held_by(state.request_id) if running else kv.blocks_for(state.known_tokens),
        running=running,
        decoding=running and state.phase is Phase.DECODE,
        prediction=state.prediction,
    )


def waiting_view(
    request: Request, tier: int, prediction: LengthPrediction | None, kv_block_tokens: int
) -> RequestView:
    """View of a new request in the queue of a replica with blocks of `kv_block_tokens` tokens."""
    return RequestView(
        request_id=request.request_id,
        arrival_s=request.arrival_s,
        tier=tier,
        prompt_tokens=request.prompt_tokens,
        max_tokens=request.max_tokens,
        demand_blocks=-(-request.prompt_tokens // kv_block_tokens),
        prediction=prediction,
    )


class Capacity:
    """Remaining capacity of a replica for the moves of one plan."""

    def __init__(self, replica: ReplicaSnapshot) -> None:
        self._replica = replica
        self._blocks = replica.num_free_blocks
        self._slots = replica.max_num_seqs - replica.num_running

    @property
    def kv_load(self) -> float:
        """`ReplicaSnapshot.kv_load` after the moves so far."""
        taken = self._replica.num_free_blocks - self._blocks
        return self._replica.kv_load + taken / self._replica.num_kv_blocks

    @property
    def free_blocks(self) -> int:
        """Blocks that are left; 0 without a slot."""
        return self._blocks if self._slots > 0 else 0

    def fits(self, row: RequestView) -> bool:
        """Whether blocks and a slot are left for a request."""
        return row.demand_blocks <= self.free_blocks

    def take(self, row: RequestView) -> None:
        """Subtracts the blocks and the slot of a request."""
        self._blocks -= row.demand_blocks
        self._slots -= 1
