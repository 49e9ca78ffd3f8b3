"""Connections used by how busy they are."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

C = TypeVar("C")


class LeastBusy(Generic[C]):
    """Hands out the connection with the fewest calls under way, of several the one longest not used. Threads may share it.

    Args:
        connections: At least one.
    """

    def __init__(self, connections: Sequence[C]) -> None:
        self._connections = tuple(connections)
        self._num_calls = [0] * len(self._connections)
        self._last_used = [0] * len(self._connections)
        self._count = 0
        self._lock = threading.Lock()

    @property
    def num_calls(self) -> tuple[int, ...]:
        """Calls under way on each connection."""
        return tuple(self._num_calls)

    @contextlib.contextmanager
    def lease(self) -> Iterator[C]:
        """A connection for one call."""
        with self._lock:
            index = min(
                range(len(self._connections)), key=lambda at: (self._num_calls[at], self._last_used[at])
            )
            self._num_calls[index] += 1
            self._count += 1
            self._last_used[index] = self._count
        try:
            yield self._connections[index]
        finally:
            with self._lock:
                self._num_calls[index] -= 1
