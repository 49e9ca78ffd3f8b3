"""Clients without a network: the artifact runs in this process, behind the same interface."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from predictors.client.messages import (
    Result,
    failure,
    length_prediction,
    outcome_result,
    request_message,
    succeeded,
)
from predictors.client.settings import checked_timeout
from predictors.proto import predictor_v1_pb2 as pb
from scheduler_core.errors import TailcastError
from scheduler_core.predictions import LengthPrediction
from scheduler_core.predictor import PredictionRequest

if TYPE_CHECKING:
    from predictors.service.calls import PredictorCalls
    from predictors.service.grouping import BatchingSettings

MAX_MESSAGE_BYTES = 2**31 - 1  # nothing is transported
MAX_BATCH_REQUESTS = 256


class LocalService:
    """An artifact with the service's batching and checks, without its ports. Needs extra `serve`.

    Args:
        artifact: Artifact folder; loaded at the first call.
        batching: How requests are grouped; default: the service's for a CPU with one worker.
        public_key: Public key of minisign, file or base64 line: the artifact must be signed with it. None: a signature
            is not looked at.
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
        """The service's methods, of this event loop; loaded once however many ask.

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
        from predictors.service.calls import PredictorCalls
        from predictors.service.grouping import BatchingSettings
        from predictors.service.models import ArtifactTable

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

    Requests are batched as in the service, and the event loop is never blocked: loading, tokenising and the model run
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
        found = await self.responses(requests, timeout_s=timeout_s)
        return [length_prediction(response, self.address) for response in found]

    async def responses(
        self, requests: Sequence[PredictionRequest], *, timeout_s: float | None = None, capped: bool = False
    ) -> list[pb.PredictResponse]:
        """All that the artifact says, in the order of `requests`; arguments as of `GrpcPredictor.responses`."""
        seconds = self.timeout_s if timeout_s is None else checked_timeout(timeout_s)
        messages = [request_message(request, capped=capped) for request in requests]
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
        """What the artifact is."""
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
            return failure(message, "DEADLINE_EXCEEDED", "no answer in time", self.address)
        return outcome_result(outcome, message, self.address)


class SyncInProcessPredictor:
    """`InProcessPredictor` for programs without an event loop; may be shared by threads.

    Args:
        artifact, batching, timeout_s, public_key: As of `InProcessPredictor`.
    """

    def __init__(
        self,
        artifact: str | Path,
        batching: BatchingSettings | None = None,
        *,
        timeout_s: float = 10.0,
        public_key: str | Path | None = None,
    ) -> None:
        self._predictor = InProcessPredictor(artifact, batching, timeout_s=timeout_s, public_key=public_key)
        self.address = self._predictor.address
        self._lock = threading.Lock()
        self._thread: tuple[asyncio.AbstractEventLoop, threading.Thread] | None = None

    def predict(
        self, requests: Sequence[PredictionRequest], *, timeout_s: float | None = None
    ) -> list[LengthPrediction]:
        """Predicted lengths in the order of `requests`; arguments and errors as of `GrpcPredictor.predict`."""
        found = self.responses(requests, timeout_s=timeout_s)
        return [length_prediction(response, self.address) for response in found]

    def responses(
        self, requests: Sequence[PredictionRequest], *, timeout_s: float | None = None, capped: bool = False
    ) -> list[pb.PredictResponse]:
        """All that the artifact says, in the order of `requests`; arguments as of `GrpcPredictor.responses`."""
        asking = self._predictor.responses(requests, timeout_s=timeout_s, capped=capped)
        return asyncio.run_coroutine_threadsafe(asking, self._loop()).result()

    def metadata(self) -> pb.GetMetadataResponse:
        """What the artifact is."""
        return asyncio.run_coroutine_threadsafe(self._predictor.metadata(), self._loop()).result()

    def close(self) -> None:
        """Waits for the model calls under way and ends the threads; the client can be used again."""
        with self._lock:
            running, self._thread = self._thread, None
        if running is None:
            return
        loop, thread = running
        asyncio.run_coroutine_threadsafe(self._predictor.close(), loop).result()
        asyncio.run_coroutine_threadsafe(loop.shutdown_default_executor(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    def __enter__(self) -> SyncInProcessPredictor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._thread is None:
                loop = asyncio.new_event_loop()
                thread = threading.Thread(target=loop.run_forever, name="tailcast-in-process", daemon=True)
                thread.start()
                self._thread = (loop, thread)
            return self._thread[0]
