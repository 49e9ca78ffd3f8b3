"""Time as an argument: the batcher reads and waits on a clock that tests can move by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """A pending call that can be cancelled."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """Seconds since some fixed moment, and calls at a given second."""

    def now(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer: ...


class LoopClock:
    """The running event loop's monotonic clock."""

    def now(self) -> float:
        """Seconds of the loop's clock."""
        return asyncio.get_running_loop().time()

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        """Calls `callback` in the loop at second `when`."""
        return asyncio.get_running_loop().call_at(when, callback)
