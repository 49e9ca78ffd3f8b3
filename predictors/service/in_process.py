"""The service without a network: a predictor that runs an artifact in this process, with batching and checks."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from predictors.client.messages import AsyncClient, PredictorError, gathered, response
from predictors.pretrained import artifact_folder
from predictors.proto import predictor_v1_pb2 as pb
from scheduler_core.errors import TailcastError
from scheduler_core.prediction.predictor import addresses

if TYPE_CHECKING:
    from predictors.service.batcher import BatchingSettings
    from predictors.service.calls import PredictorCalls

MAX_MESSAGE_BYTES = 2**31 - 1  # messages are not sent over a network


class InProcessPredictor(AsyncClient):
    """Runs an artifact in threads, with the batching and checks of the service; requires extra `serve`.

    The event loop is never blocked: loading (at the first call), tokenizing and the model run in threads.

    Args:
        artifact, public_key: As in `open_artifact`; several artifacts with different heads are joined by "+".
        batching: Batching settings; default: those of the service for a CPU with one worker.
    """

    timeout_s = 10.0

    def __init__(
        self,
        artifact: str | Path,
        batching: BatchingSettings | None = None,
        *,
        public_key: str | Path | None = None,
    ) -> None:
        self._folders = [artifact_folder(part) for part in addresses(str(artifact))]
        self.address = "+".join(map(str, self._folders))
        self._public_key = public_key
        self._batching = batching
        self._started: tuple[asyncio.AbstractEventLoop, asyncio.Task[PredictorCalls]] | None = None

    async def send(self, messages: Sequence[pb.PredictRequest], timeout_s: float) -> list[pb.PredictResponse]:
        if not messages:
            return []
        calls = await self.calls()
        return await gathered([self._call(calls, message, timeout_s) for message in messages])

    async def metadata(self) -> pb.GetMetadataResponse:
        return (await self.calls()).metadata(pb.GetMetadataRequest())

    async def close(self) -> None:
        started, self._started = self._started, None
        if started is None or started[0] is not asyncio.get_running_loop():
            return
        [calls] = await asyncio.gather(started[1], return_exceptions=True)
        if not isinstance(calls, BaseException):
            await calls.artifacts.close()

    async def calls(self) -> PredictorCalls:
        """The methods of the service in this event loop; loads the artifact once. InputError if invalid."""
        loop, started = asyncio.get_running_loop(), self._started
        if started is None or started[0] is not loop:
            started = self._started = (loop, asyncio.ensure_future(self._start()))
        try:
            return await asyncio.shield(started[1])
        except TailcastError:
            if self._started is started:
                self._started = None  # the next call tries again
            raise

    async def _start(self) -> PredictorCalls:
        from predictors.runtime import open_runtime
        from predictors.service.artifacts import ArtifactTable, length_first
        from predictors.service.batcher import BatchingSettings
        from predictors.service.calls import PredictorCalls

        load = functools.partial(open_runtime, public_key=self._public_key)
        runtimes = length_first([await asyncio.to_thread(load, folder) for folder in self._folders])
        first, *others = (runtime.artifact.manifest.artifact_id for runtime in runtimes)
        joined = {first: others} if others else None
        table = ArtifactTable(runtimes, self._batching or BatchingSettings.cpu(1), joined=joined)
        try:
            await table.start()
        except BaseException:
            await table.close()
            raise
        return PredictorCalls(table, MAX_MESSAGE_BYTES)

    async def _call(
        self, calls: PredictorCalls, message: pb.PredictRequest, seconds: float
    ) -> pb.PredictResponse:
        try:
            async with asyncio.timeout(seconds):
                outcome = await calls.outcome(message, seconds, method="InProcess")
        except TimeoutError as error:
            code, details = "DEADLINE_EXCEEDED", "no response in time"
            raise PredictorError.about(message, code, details, self.address) from error
        return response(outcome, message, self.address)
