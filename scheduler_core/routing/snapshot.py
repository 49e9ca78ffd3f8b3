"""What a router sees of a replica: a picture taken at one time, which never changes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from scheduler_core.errors import InputError
from scheduler_core.predictions import LengthPrediction


class ReplicaStatus(Enum):
    """What a replica may be given."""

    ACTIVE = "active"
    DRAINING = "draining"
    FAILED = "failed"


class ReplicaRole(Enum):
    """Which phases a replica runs (DistServe, section 4)."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestView:
    """One request on a replica.

    Attributes:
        request_id: Id of the request.
        arrival_s: When it arrived, in seconds.
        tier: Urgency level it is scheduled at, 0 the most urgent.
        prompt_tokens: Length of its prompt.
        max_tokens: Its cap on output tokens.
        num_computed_tokens: Tokens whose keys and values are in the cache.
        num_output_tokens: Tokens generated so far.
        kv_blocks: Blocks it holds; 0 while it waits.
        demand_blocks: Blocks it needs to be admitted; what it holds while it runs.
        running: Admitted, not waiting.
        decoding: Its prompt is processed.
        prediction: Predicted length of the output; None without one.
    """

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
        """Tokens to process before the next one can be sampled."""
        if self.decoding:
            return 0
        return self.prompt_tokens + self.num_output_tokens - self.num_computed_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSnapshot:
    """One replica at one time.

    Attributes:
        replica_id: Id of the replica.
        status: What it may be given.
        role: Which phases it runs.
        num_kv_blocks: Blocks in its KV cache, > 0; M in the multi-tier paper.
        num_free_blocks: Blocks neither held nor reserved.
        kv_block_tokens: Tokens per block.
        max_num_seqs: Most requests running at the same time.
        num_running: Running requests; B in the multi-tier paper.
        num_waiting: Waiting requests.
        used_blocks: Blocks held by running requests.
        head_demand_blocks: Blocks the request served next needs; 0 if nothing waits.
        waiting_prefill_tokens: Tokens that the waiting requests have to process before their next output token.
        tiers: Tiers of all requests here, running or waiting, each once, in order.
        requests: All of them, if whoever took the picture was asked for them (`Router.needs_requests`); in order of
            admission, then the waiting ones.
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
    requests: tuple[RequestView, ...] = ()

    @property
    def num_requests(self) -> int:
        """Running and waiting requests."""
        return self.num_running + self.num_waiting

    @property
    def kv_load(self) -> float:
        """Share of the KV cache that is held, reserved or waited for; above 1 if more is waited for than there is."""
        committed = self.num_kv_blocks - self.num_free_blocks
        return (committed + self.blocks_for(self.waiting_prefill_tokens)) / self.num_kv_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that the tokens of one request fill here."""
        return -(-num_tokens // self.kv_block_tokens)

    def with_waiting(self, view: RequestView) -> ReplicaSnapshot:
        """The picture after one more request has started to wait: what a dispatcher of many requests goes on with.

        The newcomer is taken to be served next only if nothing else waits.
        """
        return replace(
            self,
            num_waiting=self.num_waiting + 1,
            head_demand_blocks=self.head_demand_blocks if self.num_waiting else view.demand_blocks,
            waiting_prefill_tokens=self.waiting_prefill_tokens + view.prefill_left_tokens,
            tiers=_in_order({*self.tiers, view.tier}),
            requests=(*self.requests, view),
        )


def snapshot_from_requests(
    replica_id: str,
    requests: Iterable[RequestView],
    *,
    num_kv_blocks: int,
    kv_block_tokens: int = 16,
    max_num_seqs: int = 64,
    num_reserved_blocks: int = 0,
    head: str | None = None,
    status: ReplicaStatus = ReplicaStatus.ACTIVE,
    role: ReplicaRole = ReplicaRole.BOTH,
) -> ReplicaSnapshot:
    """The picture of a replica that holds these requests.

    Args:
        replica_id: Id of the replica.
        requests: Running and waiting requests.
        num_kv_blocks: Blocks in its KV cache.
        kv_block_tokens: Tokens per block.
        max_num_seqs: Most requests running at the same time.
        num_reserved_blocks: Blocks kept for requests that are on their way here.
        head: The waiting request served next; None takes the most urgent, then the earliest.
        status: What it may be given.
        role: Which phases it runs.

    Raises:
        InputError: The requests hold more blocks than there are, or `head` does not wait here.
    """
    rows = tuple(requests)
    running = [row for row in rows if row.running]
    waiting = [row for row in rows if not row.running]
    used = sum(row.kv_blocks for row in running)
    free = num_kv_blocks - used - num_reserved_blocks
    if free < 0:
        raise InputError(
            f"blocks held on replica {replica_id}",
            used + num_reserved_blocks,
            f"at most {num_kv_blocks}, the whole KV cache",
        )
    return ReplicaSnapshot(
        replica_id=replica_id,
        status=status,
        role=role,
        num_kv_blocks=num_kv_blocks,
        num_free_blocks=free,
        kv_block_tokens=kv_block_tokens,
        max_num_seqs=max_num_seqs,
        num_running=len(running),
        num_waiting=len(waiting),
        used_blocks=used,
        head_demand_blocks=_head_demand(replica_id, waiting, head),
        waiting_prefill_tokens=sum(row.prefill_left_tokens for row in waiting),
        tiers=_in_order({row.tier for row in rows}),
        requests=(*running, *waiting),
    )


def _head_demand(replica_id: str, waiting: list[RequestView], head: str | None) -> int:
    if not waiting:
        return 0
    if head is None:
        return min(waiting, key=lambda row: (row.tier, row.arrival_s, row.request_id)).demand_blocks
    for row in waiting:
        if row.request_id == head:
            return row.demand_blocks
    raise InputError(f"head of replica {replica_id}", head, "a request that waits there")


def _in_order(tiers: set[int]) -> tuple[int, ...]:
    return tuple(sorted(tiers))
