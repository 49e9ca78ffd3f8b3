"""Whether the engine can be reached: from the requests that the proxy forwards, and from probes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from scheduler_core.errors import TailcastError

logger = logging.getLogger(__name__)
#: Seconds for which an observation holds; until then nothing is probed.
FRESH_S = 2.0
#: Minimum seconds between two log lines that the engine is gone.
GONE_S = 60.0


class EngineMonitor:
    """State of the engine; logs when it is gone and when it is back.

    `probe` raises TailcastError, with the reason, if the engine cannot be reached. At most one probe runs at a time, and
    none while a request or probe was observed in the last `FRESH_S` seconds. `clock` is monotonic, in seconds.
    """

    def __init__(
        self, probe: Callable[[], Awaitable[None]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._probe = probe
        self._clock = clock
        self._observed_s: float | None = None
        self._gone_s: float | None = None
        self._logged_s: float | None = None
        self._probing: asyncio.Task[None] | None = None
        #: Called when the engine is back.
        self.on_back: Callable[[], None] | None = None
        #: Called when it is gone.
        self.on_gone: Callable[[], None] | None = None

    @property
    def is_up(self) -> bool:
        """Whether the engine responded when it was last observed; true before the first observation."""
        return self._gone_s is None

    def succeeded(self) -> None:
        """Observes a response."""
        self._observed_s = self._clock()
        if self._gone_s is not None:
            if self._logged_s == self._gone_s:
                logger.info(
                    "the engine is back after %.0f s; /readyz is 200", self._observed_s - self._gone_s
                )
            self._gone_s = None
            if self.on_back is not None:
                self.on_back()

    def failed(self, reason: str) -> None:
        """Observes that the engine cannot be reached."""
        self._observed_s = self._clock()
        if self._gone_s is None:
            self._gone_s = self._observed_s
            if self._logged_s is None or self._gone_s - self._logged_s >= GONE_S:
                self._logged_s = self._gone_s
                logger.warning("the engine is gone: it %s; /readyz is 503 until it responds", reason)
            if self.on_gone is not None:
                self.on_gone()

    def doubt(self) -> None:
        """Makes the next `check` probe the engine, because a request has failed in a way that may be its own."""
        self._observed_s = None

    async def check(self) -> bool:
        """`is_up`, after a probe if there is no fresh observation."""
        if self._observed_s is None or self._clock() - self._observed_s >= FRESH_S:
            if self._probing is None:
                self._probing = asyncio.create_task(self._probe_once())
            await asyncio.shield(self._probing)
        return self.is_up

    async def watch(self, every_s: float) -> None:
        """Checks the engine every `every_s` seconds until it is cancelled."""
        while True:
            await asyncio.sleep(every_s)
            await self.check()

    async def close(self) -> None:
        """Cancels a running probe."""
        if self._probing is not None:
            self._probing.cancel()
            with suppress(asyncio.CancelledError):
                await self._probing

    async def _probe_once(self) -> None:
        try:
            await self._probe()
        except TailcastError as error:
            self.failed(str(error).removeprefix("the engine "))
        else:
            self.succeeded()
        finally:
            self._probing = None
