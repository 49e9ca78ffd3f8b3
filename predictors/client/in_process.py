"""Clients without a network: the artifact runs in this process, behind the same interface."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from predictors.client.channel import checked_timeout
from predictors.client.messages import (
    Result,
    failure,
    length_prediction,
    outcome_result,
    request_message,
    succeeded,
)
from predictors.proto import predictor_v1_pb2 as pb
from scheduler_core.errors import TailcastError
from scheduler_core.predictions import LengthPrediction
from scheduler_core.predictor import PredictionRequest

if TYPE_CHECKING:
    from predictors.service.batcher import BatchingSettings
    from predictors.service.calls import PredictorCalls

MAX_MESSAGE_BYTES = 2**31 - 1  # nothing is transported
MAX_BATCH_REQUESTS = 256


class LocalService:
    """An artifact with the service's batching and checks, without its ports. Needs extra `serve`.

    Args:
        artifact: Artifact folder; loaded at the first call.
        batching: How requests are grouped; default: the service's for a CPU with one worker.
        public_key: PEM file of an Ed25519 key that the artifact has to be signed with; None: signatures are ignored.
    """

    def __init__(
        self,
        artifact: str | Path,
        batching: BatchingSettings | None = None,
        *,
        public_key: str | Path | None = None,
    ) -> None:
        self._artifact = artifact
        self._public_key = public_key
        self._batching = batching
        self._started: tuple[asyncio.AbstractEventLoop, asyncio.Task[PredictorCalls]] | None = None

    async def calls(self) -> PredictorCalls:
        """The service's methods, of this event loop; loaded once.

        Raises:
            InputError: The artifact is refused.
        """
        loop = asyncio.get_running_loop()
        if self._started is None or self._started[0] is not loop:
            self._started = (loop, asyncio.ensure_future(self._start()))
        started = self._started
        try:
            return await asyncio.shield(started[1])
        except TailcastError:
            if self._started is started:
                self._started = None  # the next call tries again
            raise

    async def close(self) -> None:
        """Waits for the model calls under way and ends the threads; it can be used again."""
        started, self._started = self._started, None
        if started is None or started[0] is not asyncio.get_running_loop():
            return
        [calls] = await asyncio.gather(started[1], return_exceptions=True)
        if not isinstance(calls, BaseException):
            await calls.artifacts.close()

    async def _start(self) -> PredictorCalls:
        from predictors.runtime import open_runtime
        from predictors.service.artifacts import ArtifactTable
        from predictors.service.batcher import BatchingSettings
        from predictors.service.calls import PredictorCalls

        runtime = await asyncio.to_thread(open_runtime, self._artifact, public_key=self._public_key)
        table = ArtifactTable([runtime], self._batching or BatchingSettings.cpu(1))
        try:
            await table.start()
        except BaseException:
            await table.close()
            raise
        return PredictorCalls(
            table, max_batch_requests=MAX_BATCH_REQUESTS, max_message_bytes=MAX_MESSAGE_BYTES
        )


class InProcessPredictor:
    """Runs an artifact in threads of this process; implements `scheduler_core.predictor.Predictor`.

    Requests are batched as in the service, and the event loop is never blocked: loading, tokenizing and the model run
    in threads. Needs extra `serve`.

    Args:
        artifact: Artifact folder; loaded at the first call.
        batching: How requests are grouped; default: the service's for a CPU with one worker.
        timeout_s: Deadline of one call, loading not included.
        public_key: As of `LocalService`.
    """

    def __init__(
        self,
        artifact: str | Path,
        batching: BatchingSettings | None = None,
        *,
        timeout_s: float = 10.0,
        public_key: str | Path | None = None,
    ) -> None:
        self.address = str(artifact)
        self.timeout_s = checked_timeout(timeout_s)
        self._service = LocalService(artifact, batching, public_key=public_key)

    async def predict(
        self, requests: Sequence[PredictionRequest], *, timeout_s: float | None = None
    ) -> list[LengthPrediction]:
        """Predicted lengths in the order of `requests`; arguments and errors as of `GrpcPredictor.predict`."""
        responses = await self.responses(requests, timeout_s=timeout_s)
        return [length_prediction(response, self.address) for response in responses]

    async def responses(
        self,
        requests: Sequence[PredictionRequest],
        *,
        timeout_s: float | None = None,
        truncated_length: bool = False,
    ) -> list[pb.PredictResponse]:
        """All predictions of the artifact, in the order of `requests`; arguments as of `GrpcPredictor.responses`."""
        seconds = self.timeout_s if timeout_s is None else checked_timeout(timeout_s)
        messages = [request_message(request, truncated_length) for request in requests]
        if not messages:
            return []
        calls = await self._service.calls()
        tasks = [asyncio.ensure_future(self._one(calls, message, seconds)) for message in messages]
        try:
            return succeeded(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def metadata(self) -> pb.GetMetadataResponse:
        """Artifact and limits."""
        return (await self._service.calls()).metadata(pb.GetMetadataRequest())

    async def close(self) -> None:
        """Waits for the model calls under way and ends the threads; the client can be used again."""
        await self._service.close()

    async def __aenter__(self) -> InProcessPredictor:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _one(self, calls: PredictorCalls, message: pb.PredictRequest, seconds: float) -> Result:
        try:
            async with asyncio.timeout(seconds):
                outcome = await calls.outcome(message, seconds, method="InProcess")
        except TimeoutError:
            return failure(message, "DEADLINE_EXCEEDED", "no response in time", self.address)
        return outcome_result(outcome, message, self.address)
