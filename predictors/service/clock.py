"""Time as an argument: the batcher reads and waits on a clock that tests can move by hand."""

from __future__ import annotations

import asyncio
import time
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
    """The system's monotonic clock, and timers of the running event loop.

    Not the loop's own `time()`: on uvloop that is in whole milliseconds and stands still while callbacks run, so that a
    request's short durations would be told as 0.
    """

    def now(self) -> float:
        """Seconds of the monotonic clock."""
        return time.monotonic()

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        """Calls `callback` in the loop at second `when`."""
        return asyncio.get_running_loop().call_later(max(0.0, when - time.monotonic()), callback)
