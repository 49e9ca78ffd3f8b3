"""Online calibration that several proxies share: lengths are reported to the service, which corrects its predictions."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from predictors.proto import predictor_v1_pb2 as pb
from scheduler_core.adapters.live_calibration import MAX_PENDING, REMINDER_S
from scheduler_core.errors import TailcastError
from scheduler_core.prediction.correction import RequestContext
from scheduler_core.prediction.outcome import Outcome

logger = logging.getLogger(__name__)
#: Maximum observations of one call, seconds between calls, and after a failed one, and seconds of the last one.
MAX_CALL, INTERVAL_S, RETRY_S, CLOSE_S = 500, 0.2, 2.0, 5.0


class ObservingClient(Protocol):
    """A client of the service."""

    async def observe(self, observations: Sequence[pb.Observation]) -> Sequence[pb.ObservationError]:
        """Reports lengths; returns those that the service refused. TailcastError if it cannot be reached."""


class SharedCalibration:
    """Reports the lengths of ended requests to the service, in the background; nothing fails or waits for it.

    Args:
        client: Returns the client in use, None without one.
        skipped: Counts lengths that the service has not learned, by reason.
        clock: Monotonic, in seconds.
    """

    def __init__(
        self,
        client: Callable[[], ObservingClient | None],
        skipped: Callable[[str, int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._skipped, self._clock = client, skipped, clock
        self._pending: deque[pb.Observation] = deque()
        self._task: asyncio.Task[None] | None = None
        self._reminded_s: dict[str, float] = {}

    def observe(self, context: RequestContext, outcome: Outcome) -> bool:
        """Queues an ended request, whose id is that of its prediction; returns whether there is room for it."""
        if len(self._pending) >= MAX_PENDING:
            self.skip("queue_full", "the service does not take them as fast as requests end")
            return False
        observation = pb.Observation(
            request_id=outcome.request_id or "",
            output_tokens=outcome.output_tokens,
            finished=outcome.finished,
            max_tokens=outcome.max_tokens,
        )
        self._pending.append(observation)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        return True

    def skip(self, reason: str, explanation: str, count: int = 1) -> None:
        """Counts lengths that are not learned, and logs why once per reason and hour; reasons are labels of a metric."""
        self._skipped(reason, count)
        self._warn(reason, f"the service does not learn from some outputs: {explanation}")

    async def close(self) -> None:
        """Reports what is left within `CLOSE_S` seconds; the rest is counted as lost."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                while self._pending and await self._send():
                    pass
        if self._pending:
            self.skip("lost", "the proxy ended before they could be reported", len(self._pending))
            self._pending.clear()

    def _warn(self, reason: str, text: str) -> None:
        """Logs a text once per reason and hour."""
        now = self._clock()
        if now - self._reminded_s.get(reason, -REMINDER_S) >= REMINDER_S:
            self._reminded_s[reason] = now
            logger.warning("%s", text)

    async def _run(self) -> None:
        while self._pending:
            await asyncio.sleep(INTERVAL_S)
            if not await self._send():
                await asyncio.sleep(RETRY_S)

    async def _send(self) -> bool:
        """Reports the first observations; returns whether the service has answered."""
        client = self._client()
        batch = [self._pending[index] for index in range(min(len(self._pending), MAX_CALL))]
        if client is None:
            return False
        try:
            errors = await client.observe(batch)
        except TailcastError as error:
            self._warn("unreported", f"lengths of outputs wait, because they cannot be reported: {error}")
            return False
        for _ in batch:
            self._pending.popleft()
        if errors:
            self.skip("refused", f"the service refuses them ({errors[0].message})", len(errors))
        return True
