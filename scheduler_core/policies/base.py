"""What a policy is: an order over waiting requests, and hooks for the events it may learn from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

from scheduler_core.request import RequestState

KeyChanges = Literal["never", "on_event", "with_time"]


class Policy(ABC):
    """Orders the waiting requests; the smallest key is served first, ties by arrival.

    A policy is a keyword-only slots dataclass whose fields are the parameters of its paper.

    Attributes:
        key_changes: When a key already given out becomes wrong. "never": only the request's own events (arrival,
            prediction) change it; "on_event": also when `on_pressure` says so; "with_time": with every step.
            The queue is a heap for the first two and is sorted anew every step for the last.
    """

    __slots__ = ()

    key_changes: ClassVar[KeyChanges]

    @abstractmethod
    def key(self, state: RequestState, now: float) -> float:
        """Smallest is served first."""

    def on_pressure(self, num_waiting: int, max_num_seqs: int) -> bool:
        """Called before each step with the queue's length; True if all keys must be computed anew."""
        return False

    def on_prediction(self, state: RequestState) -> None:  # noqa: B027
        """The request's prediction has come; called before its key is computed anew."""

    def on_finish(self, state: RequestState) -> None:  # noqa: B027
        """The request has finished or was aborted."""
