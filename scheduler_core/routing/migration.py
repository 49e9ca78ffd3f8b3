"""Live migration of requests between replicas, as a state machine (Llumnix, Sun et al. 2024, section 4.2; multi-tier,
section 3.5).

A running request is copied in stages of `stage_blocks` blocks while it goes on generating: full blocks never change. What
is left for the last stage, at most `stage_blocks`, is copied with the request stopped; then the destination takes it
over. A request that does not grow meanwhile takes ceil(blocks / stage_blocks) stages. A waiting request has no cache and
changes its queue at once.

    start -> copying (live) -> ... -> handover (stopped) -> committed
                  |                        |
                  +------- aborted --------+

Until it is committed the request is the source's, afterwards the destination's: it is never on both sides, and never on
none. The destination reserves blocks stage by stage; whatever ends the migration gives them back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from scheduler_core.errors import InputError, TailcastError
from scheduler_core.request import RequestState
from scheduler_core.routing.moves import Aborted, AbortReason, Committed, Copy, Move, Outcome


class Holding(Enum):
    """What a replica has of a request."""

    NOTHING = "nothing"
    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"


class MigrationPort(Protocol):
    """What migration needs of a replica."""

    def holding(self, request_id: str) -> Holding:
        """What it has of the request."""
        ...

    def cached_tokens(self, request_id: str) -> int:
        """Tokens of the request in its cache."""
        ...

    @property
    def kv_block_tokens(self) -> int:
        """Tokens per block."""
        ...

    def detach(self, request_id: str, now: float) -> RequestState:
        """Takes the request out. The blocks and the seat of a running one stay reserved for it."""
        ...

    def attach(self, state: RequestState, now: float) -> None:
        """Takes the request in: running on what was reserved for it, or waiting if nothing was."""
        ...

    def reserve(self, request_id: str, num_blocks: int, now: float) -> bool:
        """Reserves that many blocks more, and with the first ones a seat; False (and nothing taken) if there are none."""
        ...

    def unreserve(self, request_id: str, now: float) -> None:
        """Gives back what is reserved for the request, if anything is."""
        ...


class MigrationError(TailcastError):
    """A call that does not belong here: a second migration of the same request, or news of one that is not under way."""


@dataclass(slots=True)
class _Ongoing:
    """A migration under way.

    Attributes:
        move: What it is about.
        num_stages: Stages begun.
        copied_blocks: Blocks at the destination.
        copying_blocks: Blocks of the stage under way.
        left_blocks: Blocks that were left when the stage under way began.
        stopped: The request, taken out of the source for the last stage; None before.
    """

    move: Move
    num_stages: int = 0
    copied_blocks: int = 0
    copying_blocks: int = 0
    left_blocks: int = 0
    stopped: RequestState | None = None


class Migrations:
    """All migrations under way; says what to copy, hears that it is copied and what happens meanwhile.

    Args:
        ports: The replicas by id; looked up at every call, so replicas may join and leave.
        stage_blocks: Most blocks copied in one stage, > 0; None copies everything in one stage, stopped
            (disaggregated serving).

    Raises:
        InputError: `stage_blocks` is not above 0.
    """

    def __init__(self, ports: Mapping[str, MigrationPort], stage_blocks: int | None = 64) -> None:
        if stage_blocks is not None and stage_blocks < 1:
            raise InputError("stage_blocks", stage_blocks, "integers > 0, or None")
        self._ports = ports
        self._stage_blocks = stage_blocks
        self._ongoing: dict[str, _Ongoing] = {}

    @property
    def in_flight(self) -> frozenset[str]:
        """Ids of the requests that are being migrated."""
        return frozenset(self._ongoing)

    @property
    def replicas(self) -> frozenset[str]:
        """The replicas that take part in a migration."""
        moves = [ongoing.move for ongoing in self._ongoing.values()]
        return frozenset(side for move in moves for side in (move.source, move.destination))

    def stopped(self, request_id: str) -> bool:
        """Whether the request is in its last stage, and so on no replica's books but reserved at its source."""
        ongoing = self._ongoing.get(request_id)
        return ongoing is not None and ongoing.stopped is not None

    def start(self, move: Move, now: float) -> Outcome:
        """Begins a migration.

        Returns:
            `Copy` for a request with a cache, `Committed` for a waiting one, `Aborted` if it cannot begin.

        Raises:
            MigrationError: The request is being migrated already.
            InputError: A replica does not exist, source and destination are the same, or their blocks differ in size.
        """
        if move.request_id in self._ongoing:
            raise MigrationError(f"request {move.request_id} is being migrated already")
        source, destination = self._port(move.source), self._port(move.destination)
        if move.source == move.destination or source.kv_block_tokens != destination.kv_block_tokens:
            allowed = f"another replica than {move.source}, with as many tokens per block"
            raise InputError("destination", move.destination, allowed)
        holding = source.holding(move.request_id)
        if holding is Holding.WAITING:
            destination.attach(source.detach(move.request_id, now), now)
            return Committed(move, 0, 0)
        if holding is not Holding.DECODING:
            return Aborted(move, AbortReason.NOT_MOVABLE)
        ongoing = self._ongoing[move.request_id] = _Ongoing(move)
        return self._next_stage(ongoing, now)

    def copied(self, request_id: str, now: float) -> Outcome:
        """The last `Copy` of this request is done.

        Returns:
            The next `Copy`, or `Committed`, or `Aborted`.

        Raises:
            MigrationError: The request is not being migrated.
        """
        ongoing = self._ongoing.get(request_id)
        if ongoing is None:
            raise MigrationError(f"request {request_id} is not being migrated")
        ongoing.copied_blocks += ongoing.copying_blocks
        if ongoing.stopped is None:
            return self._next_stage(ongoing, now)
        del self._ongoing[request_id]
        self._port(ongoing.move.source).unreserve(request_id, now)
        self._port(ongoing.move.destination).attach(ongoing.stopped, now)
        return Committed(ongoing.move, ongoing.num_stages, ongoing.copied_blocks)

    def on_finished(self, request_id: str, now: float) -> Aborted | None:
        """The request is done on its source; None if it was not being migrated. A stopped one cannot finish."""
        return self._leaves(request_id, AbortReason.FINISHED, now)

    def on_preempted(self, request_id: str, now: float) -> Aborted | None:
        """The request lost its cache on the source; None if it was not being migrated."""
        return self._leaves(request_id, AbortReason.PREEMPTED, now)

    def on_aborted(self, request_id: str, now: float) -> Aborted | None:
        """The user gave the request up; None if it was not being migrated. A stopped one is dropped here."""
        ongoing = self._ongoing.get(request_id)
        if ongoing is None:
            return None
        if ongoing.stopped is not None:
            self._port(ongoing.move.source).unreserve(request_id, now)
        return self._end(ongoing, AbortReason.ABORTED, now)

    def on_draining(self, replica_id: str, now: float) -> tuple[Aborted, ...]:
        """A replica drains: nobody moves there any more; those who leave it go on leaving."""
        return tuple(
            self._stay(ongoing, AbortReason.DESTINATION_DRAINING, now)
            for ongoing in self._touching(replica_id)
            if ongoing.move.destination == replica_id
        )

    def on_failed(self, replica_id: str, now: float) -> tuple[Aborted, ...]:
        """A replica is gone: those who were moving there stay, those who were leaving it are gone with it.

        To be called while its port can still be looked up or afterwards; it is not called.
        """
        ended = []
        for ongoing in self._touching(replica_id):
            if ongoing.move.source == replica_id:
                self._port(ongoing.move.destination).unreserve(ongoing.move.request_id, now)
                del self._ongoing[ongoing.move.request_id]
                ended.append(Aborted(ongoing.move, AbortReason.SOURCE_FAILED))
            else:
                self._resume(ongoing, now)
                del self._ongoing[ongoing.move.request_id]
                ended.append(Aborted(ongoing.move, AbortReason.DESTINATION_FAILED))
        return tuple(ended)

    def _next_stage(self, ongoing: _Ongoing, now: float) -> Outcome:
        move = ongoing.move
        source, destination = self._port(move.source), self._port(move.destination)
        tokens = source.cached_tokens(move.request_id)
        left = -(-tokens // source.kv_block_tokens) - ongoing.copied_blocks
        if ongoing.num_stages and left >= ongoing.left_blocks:
            return self._stay(ongoing, AbortReason.STALLED, now)
        live = self._stage_blocks is not None and left > self._stage_blocks
        count = self._stage_blocks if live and self._stage_blocks is not None else left
        if not destination.reserve(move.request_id, count, now):
            return self._stay(ongoing, AbortReason.DESTINATION_FULL, now)
        if not live:
            ongoing.stopped = source.detach(move.request_id, now)
        ongoing.num_stages += 1
        ongoing.copying_blocks, ongoing.left_blocks = count, left
        return Copy(move, ongoing.copied_blocks, count, live)

    def _leaves(self, request_id: str, reason: AbortReason, now: float) -> Aborted | None:
        ongoing = self._ongoing.get(request_id)
        if ongoing is None:
            return None
        if ongoing.stopped is not None:
            raise MigrationError(f"request {request_id} is stopped for its handover: {reason.value}")
        return self._end(ongoing, reason, now)

    def _stay(self, ongoing: _Ongoing, reason: AbortReason, now: float) -> Aborted:
        """Ends a migration with the request where it was."""
        self._resume(ongoing, now)
        return self._end(ongoing, reason, now)

    def _resume(self, ongoing: _Ongoing, now: float) -> None:
        if ongoing.stopped is not None:
            self._port(ongoing.move.source).attach(ongoing.stopped, now)

    def _end(self, ongoing: _Ongoing, reason: AbortReason, now: float) -> Aborted:
        self._port(ongoing.move.destination).unreserve(ongoing.move.request_id, now)
        del self._ongoing[ongoing.move.request_id]
        return Aborted(ongoing.move, reason)

    def _touching(self, replica_id: str) -> list[_Ongoing]:
        return [
            ongoing
            for ongoing in self._ongoing.values()
            if replica_id in (ongoing.move.source, ongoing.move.destination)
        ]

    def _port(self, replica_id: str) -> MigrationPort:
        port = self._ports.get(replica_id)
        if port is None:
            raise InputError("replica", replica_id, ", ".join(self._ports) or "none: there is no replica")
        return port
