"""What migration planners and the migration state machine say to each other and to whoever runs them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class Move:
    """A request shall change its replica.

    Attributes:
        request_id: Which.
        source: Where it is.
        destination: Where it goes.
    """

    request_id: str
    source: str
    destination: str


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy blocks of the request's KV cache, then call `Migrations.copied`.

    Attributes:
        move: Whose, from where to where.
        first_block: Number of the first block, from 0.
        num_blocks: How many; 0 if all of them are there already.
        live: The request goes on generating meanwhile; else it is stopped until it runs at the destination.
    """

    move: Move
    first_block: int
    num_blocks: int
    live: bool


@dataclass(frozen=True, slots=True)
class Committed:
    """The request is at its destination.

    Attributes:
        move: Which, from where to where.
        num_stages: Copies it took; 0 for a waiting request, which has no cache.
        num_blocks: Blocks that were copied.
    """

    move: Move
    num_stages: int
    num_blocks: int


class AbortReason(Enum):
    """Why a migration ended without a change of replica."""

    NOT_MOVABLE = "the request is neither waiting nor generating on the source"
    FINISHED = "the request is done"
    PREEMPTED = "the request lost its cache on the source"
    ABORTED = "the request was given up"
    DESTINATION_FULL = "the destination has no blocks or no seat left"
    DESTINATION_DRAINING = "the destination drains"
    DESTINATION_FAILED = "the destination is gone"
    SOURCE_FAILED = "the source is gone, and with it the request's cache"
    STALLED = "the request grows as fast as it is copied"


@dataclass(frozen=True, slots=True)
class Aborted:
    """The migration is over; the request is where it was, if it is anywhere.

    Attributes:
        move: Which, from where to where.
        reason: Why.
    """

    move: Move
    reason: AbortReason


Outcome = Copy | Committed | Aborted
