"""The asynchronous client: what schedulers and simulators use."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import grpc

from predictors.client.channel import (
    LeastBusy,
    call_metadata,
    channel_credentials,
    channel_options,
    checked_address,
)
from predictors.client.messages import (
    PredictorError,
    Result,
    batch_results,
    call_failed,
    chunks,
    length_prediction,
    request_message,
    succeeded,
)
from predictors.client.settings import ClientSettings, checked_timeout
from predictors.client.streaming import PredictionStream
from predictors.proto import predictor_v1_pb2 as pb
from predictors.proto import predictor_v1_pb2_grpc
from scheduler_core.predictions import LengthPrediction
from scheduler_core.predictor import PredictionRequest

if TYPE_CHECKING:
    from grpc.aio import Channel


class GrpcPredictor:
    """Asynchronous client; implements `scheduler_core.predictor.Predictor`.

    Nothing in it blocks the event loop: connecting, name look-ups, waits and retries happen beside the caller.

    Args:
        address: "host:port" or "unix:PATH".
        settings: Limits.

    Raises:
        InputError: The address has another form. Nothing is connected yet.
    """

    def __init__(self, address: str, settings: ClientSettings | None = None) -> None:
        self.address = checked_address(address)
        self.settings = settings or ClientSettings()
        self._connections: _Connections | None = None

    async def predict(
        self, requests: Sequence[PredictionRequest], *, timeout_s: float | None = None
    ) -> list[LengthPrediction]:
        """Predicted lengths in the order of `requests`.

        Args:
            requests: Any number.
            timeout_s: Deadline of this call; None: that of the settings.

        Raises:
            PredictorError: The service could not be reached in time, or refused or failed one of the requests, or its
                artifact predicts no length distribution.
            InputError: A prompt cannot be sent, or the deadline is none.
        """
        responses = await self.responses(requests, timeout_s=timeout_s)
        return [length_prediction(response, self.address) for response in responses]

    async def responses(
        self, requests: Sequence[PredictionRequest], *, timeout_s: float | None = None, capped: bool = False
    ) -> list[pb.PredictResponse]:
        """The service's responses with all heads (urgency, buckets, rank, ...), in the order of `requests`; raises as
        `predict`.

        Args:
            requests: Any number.
            timeout_s: Deadline of this call; None: that of the settings.
            capped: Also ask for the statistics of the length truncated at each request's max_tokens.
        """
        seconds = self.settings.timeout_s if timeout_s is None else checked_timeout(timeout_s)
        messages = [request_message(request, capped=capped) for request in requests]
        pool = self._connected().pool
        calls = [self._call(pool, chunk, seconds) for chunk in chunks(messages, self.settings)]
        return succeeded([result for results in await _gathered(calls) for result in results])

    @property
    def num_calls(self) -> tuple[int, ...]:
        """Calls in flight on each connection; empty before the first call."""
        return () if self._connections is None else self._connections.pool.num_calls

    async def metadata(self) -> pb.GetMetadataResponse:
        """Artifact, limits and provider of the service."""
        with self._connected().pool.lease() as connection:
            try:
                response: pb.GetMetadataResponse = await connection.stub.GetMetadata(
                    pb.GetMetadataRequest(),
                    timeout=self.settings.timeout_s,
                    metadata=call_metadata(self.settings),
                )
            except grpc.aio.AioRpcError as error:
                text = f"predictor {self.address}: {error.code().name}: {error.details()}"
                raise PredictorError(text, error.code().name) from error
        return response

    async def close(self) -> None:
        """Ends the connections; the client can be used again and then opens new ones."""
        connections, self._connections = self._connections, None
        if connections is not None:
            await connections.close()

    async def __aenter__(self) -> GrpcPredictor:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _connected(self) -> _Connections:
        """The connections of this event loop: they cannot move from one loop to another."""
        loop = asyncio.get_running_loop()
        if self._connections is None or self._connections.loop is not loop:
            self._connections = _Connections(self.address, self.settings, loop)
        return self._connections

    async def _call(
        self, pool: LeastBusy[_Connection], messages: Sequence[pb.PredictRequest], timeout_s: float
    ) -> Sequence[Result]:
        """One result per message."""
        with pool.lease() as connection:
            if self.settings.transport == "stream":
                return await connection.stream.send(messages, timeout_s)
            stub, metadata = connection.stub, call_metadata(self.settings)
            try:
                if len(messages) == 1:
                    return [await stub.Predict(messages[0], timeout=timeout_s, metadata=metadata)]
                batch = pb.PredictBatchRequest(requests=messages)
                response = await stub.PredictBatch(batch, timeout=timeout_s, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                return call_failed(error, messages, self.address)
        return batch_results(response, messages, self.address)


class _Connection:
    def __init__(self, address: str, settings: ClientSettings) -> None:
        self.channel = _channel(address, settings)
        self.stub: Any = predictor_v1_pb2_grpc.PredictorStub(self.channel)  # type: ignore[no-untyped-call]
        self.stream = PredictionStream(self.stub, call_metadata(settings), address)

    async def close(self) -> None:
        await self.stream.close()
        await self.channel.close(None)


class _Connections:
    """The connections of one event loop."""

    def __init__(self, address: str, settings: ClientSettings, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._all = [_Connection(address, settings) for _ in range(settings.num_connections)]
        self.pool = LeastBusy(self._all)

    async def close(self) -> None:
        if asyncio.get_running_loop() is not self.loop:
            return  # their loop has ended, and with it all that could be waited for
        for connection in self._all:
            await connection.close()


def _channel(address: str, settings: ClientSettings) -> Channel:
    options = channel_options(settings)
    if settings.tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, channel_credentials(settings.tls), options=options)


async def _gathered(calls: Sequence[Coroutine[Any, Any, Sequence[Result]]]) -> list[Sequence[Result]]:
    """All results; when this is cancelled or one fails, the others are cancelled too."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
