"""Live migration of requests between replicas, as a state machine (Llumnix, Sun et al. 2024, section 4.2; multi-tier,
section 3.5).

A running request is copied in stages of at most `stage_blocks` blocks while it continues to generate; full blocks
never change. As in Llumnix, each stage copies what the request has added during the one before (pre-copy), until at most
`LAST_STAGE_BLOCKS` are left: the request stops while they are copied, and the destination takes over. The pause thus does
not depend on the length of its context. A waiting request has no cache and moves to the queue of the destination at once.

    start -> copying (live) -> ... -> handover (stopped) -> committed
                  |                        |
                  +------- aborted --------+

The request belongs to the source until the commit and to the destination afterwards, always to exactly one of
them. The destination reserves blocks stage by stage; they are freed when the migration ends without a commit.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from scheduler_core.errors import InputError
from scheduler_core.ranges import FINITE, INTEGERS, POSITIVE, check_ranges
from scheduler_core.request import Phase, RequestState, Status
from scheduler_core.scheduler import Scheduler

#: Blocks that may be left for the last stage: a full one and the one that is being filled.
LAST_STAGE_BLOCKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLink:
    """Link of a replica to the others; it sends one copy at a time.

    Attributes:
        kv_bytes_per_token: Keys and values of a token in all layers; 128 KiB for Llama-3-8B and Mistral-7B.
        bytes_per_s: Bandwidth; 100 Gb/s in the multi-tier paper's code, which declares but never charges it.
        latency_s: Time of a copy beside its transfer, from the same code.
    """

    kv_bytes_per_token: int = 131_072
    bytes_per_s: float = 12.5e9
    latency_s: float = 5e-3

    def __post_init__(self) -> None:
        check_ranges(self, kv_bytes_per_token=(1, INTEGERS))
        check_ranges(self, bytes_per_s=(POSITIVE, FINITE), latency_s=(0, FINITE))

    def copy_s(self, num_tokens: int) -> float:
        """Seconds to copy the keys and values of so many tokens."""
        return self.latency_s + num_tokens * self.kv_bytes_per_token / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Move:
    """A planned migration of a request."""

    request_id: str
    source: str
    destination: str


@dataclass(frozen=True, slots=True)
class Copy:
    """Instruction to copy blocks of the request's KV cache and then call `Migrations.copied`.

    During a live copy the request continues to generate; otherwise it is stopped until it runs at the destination.
    """

    move: Move
    num_blocks: int
    live: bool


@dataclass(frozen=True, slots=True)
class Committed:
    """The request is at its destination, after `num_stages` copies; 0 for a waiting request, which has no cache."""

    move: Move
    num_stages: int
    num_blocks: int


class AbortReason(Enum):
    """Reason for a migration that ended without a change of replica."""

    NOT_MOVABLE = "the request is neither waiting nor generating on the source"
    FINISHED = "the request is done"
    PREEMPTED = "the request lost its cache on the source"
    DESTINATION_FULL = "the destination has no blocks or no slot left"
    DESTINATION_DRAINING = "the destination drains"
    STALLED = "the request grows as fast as it is copied"
    FAILED = "the source or the destination has failed"
    GIVEN_UP = "the client gave the request up"


@dataclass(frozen=True, slots=True)
class Aborted:
    """The migration ended without a commit; the request stays on its source, if it is live."""

    move: Move
    reason: AbortReason


Outcome = Copy | Committed | Aborted


@dataclass(slots=True)
class _Ongoing:
    move: Move
    num_stages: int = 0
    copied_blocks: int = 0
    copying_blocks: int = 0
    left_blocks: int = 0  # at the start of the current stage
    stopped: RequestState | None = None  # detached from the source for the last stage


class Migrations:
    """All ongoing migrations: returns the copies to execute, and handles events that end a copy or a migration.

    `schedulers` maps ids to schedulers. At most `stage_blocks` > 0 blocks are copied in one stage during which the request
    generates. None: one stage with the request stopped (disaggregated serving).
    """

    def __init__(self, schedulers: Mapping[str, Scheduler], stage_blocks: int | None = 64) -> None:
        if stage_blocks is not None and stage_blocks < 1:
            raise InputError("stage_blocks", stage_blocks, "integers > 0, or None")
        self._schedulers = schedulers
        self._stage_blocks = stage_blocks
        self._ongoing: dict[str, _Ongoing] = {}

    @property
    def in_flight(self) -> frozenset[str]:
        """Ids of the migrating requests."""
        return frozenset(self._ongoing)

    @property
    def replicas(self) -> frozenset[str]:
        """The replicas that take part in a migration."""
        moves = [ongoing.move for ongoing in self._ongoing.values()]
        return frozenset(side for move in moves for side in (move.source, move.destination))

    def stopped(self, request_id: str) -> RequestState | None:
        """The state of a request in its last stage: detached, with memory reserved at its source; None for other requests."""
        ongoing = self._ongoing.get(request_id)
        return None if ongoing is None else ongoing.stopped

    def start(self, move: Move, now: float) -> Outcome:
        """Starts a migration: returns `Copy` for a request with a cache, `Committed` for a waiting one, else
        `Aborted`. `InputError` if source and destination are the same, or their block sizes differ."""
        assert move.request_id not in self._ongoing, "a second migration of a request"
        source, destination = self._schedulers[move.source], self._schedulers[move.destination]
        if (
            move.source == move.destination
            or source.config.kv_block_tokens != destination.config.kv_block_tokens
        ):
            allowed = f"another replica than {move.source}, with the same block size"
            raise InputError("destination", move.destination, allowed)
        state = source.find(move.request_id)
        if state is not None and state.status is Status.WAITING:
            destination.attach(source.detach(move.request_id, now), now)
            return Committed(move, 0, 0)
        if state is None or state.phase is not Phase.DECODE:
            return Aborted(move, AbortReason.NOT_MOVABLE)
        ongoing = self._ongoing[move.request_id] = _Ongoing(move)
        return self._next_stage(ongoing, state, now)

    def copied(self, request_id: str, now: float) -> Outcome:
        """Called when the last `Copy` of a request is complete; returns the next outcome."""
        ongoing = self._ongoing[request_id]
        ongoing.copied_blocks += ongoing.copying_blocks
        if ongoing.stopped is None:
            state = self._schedulers[ongoing.move.source].find(request_id)
            assert state is not None, "the request has left its source without an event"
            return self._next_stage(ongoing, state, now)
        move = ongoing.move
        del self._ongoing[request_id]
        self._schedulers[move.source].unreserve(request_id, now)
        self._schedulers[move.destination].attach(ongoing.stopped, now)
        return Committed(move, ongoing.num_stages, ongoing.copied_blocks)

    def left_source(self, request_id: str, reason: AbortReason, now: float) -> Aborted | None:
        """Ends the migration of a request that left its source or lost its cache; None if not migrating."""
        ongoing = self._ongoing.get(request_id)
        if ongoing is None:
            return None
        assert ongoing.stopped is None, "a request that is stopped for its handover has left its source"
        return self._end(ongoing, reason, now)

    def given_up(self, request_id: str, now: float) -> Aborted | None:
        """Ends the migration of a request that its client has given up, also during its last stage; None if not migrating."""
        ongoing = self._ongoing.get(request_id)
        if ongoing is None:
            return None
        self._schedulers[ongoing.move.source].unreserve(request_id, now)
        return self._end(ongoing, AbortReason.GIVEN_UP, now)

    def on_draining(self, replica_id: str, now: float) -> tuple[Aborted, ...]:
        """Ends migrations to a draining replica; those away from it continue."""
        incoming = [ongoing for ongoing in self._ongoing.values() if ongoing.move.destination == replica_id]
        return tuple(self._stay(ongoing, AbortReason.DESTINATION_DRAINING, now) for ongoing in incoming)

    def on_failed(self, replica_id: str, now: float) -> tuple[Aborted, ...]:
        """Ends the migrations of a replica that fails: those to it stay on their source, those from it are lost."""
        ended = []
        for ongoing in [*self._ongoing.values()]:
            if ongoing.move.destination == replica_id:
                ended.append(self._stay(ongoing, AbortReason.FAILED, now))
            elif ongoing.move.source == replica_id:
                self._schedulers[replica_id].unreserve(ongoing.move.request_id, now)
                ended.append(self._end(ongoing, AbortReason.FAILED, now))
        return tuple(ended)

    def _next_stage(self, ongoing: _Ongoing, state: RequestState, now: float) -> Outcome:
        move = ongoing.move
        source, destination = self._schedulers[move.source], self._schedulers[move.destination]
        left = -(-state.num_computed_tokens // source.config.kv_block_tokens) - ongoing.copied_blocks
        if ongoing.num_stages and left >= ongoing.left_blocks:
            return self._stay(ongoing, AbortReason.STALLED, now)
        count, live = left, False
        if self._stage_blocks is not None and left > LAST_STAGE_BLOCKS:
            full = state.num_computed_tokens // source.config.kv_block_tokens - ongoing.copied_blocks
            count, live = min(full, self._stage_blocks), True
        if not destination.reserve(move.request_id, count, now):
            return self._stay(ongoing, AbortReason.DESTINATION_FULL, now)
        if not live:
            ongoing.stopped = source.detach(move.request_id, now)
        ongoing.num_stages += 1
        ongoing.copying_blocks, ongoing.left_blocks = count, left
        return Copy(move, count, live)

    def _stay(self, ongoing: _Ongoing, reason: AbortReason, now: float) -> Aborted:
        """Ends a migration with the request on its source."""
        if ongoing.stopped is not None:
            self._schedulers[ongoing.move.source].attach(ongoing.stopped, now)
        return self._end(ongoing, reason, now)

    def _end(self, ongoing: _Ongoing, reason: AbortReason, now: float) -> Aborted:
        self._schedulers[ongoing.move.destination].unreserve(ongoing.move.request_id, now)
        del self._ongoing[ongoing.move.request_id]
        return Aborted(ongoing.move, reason)
