"""The clients over gRPC: asynchronous for schedulers and simulators, blocking for programs without an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from types import TracebackType
from typing import Any

import grpc

from predictors.client.channel import ClientSettings, checked_address, checked_timeout
from predictors.client.messages import (
    AsyncClient,
    PredictorError,
    batch_responses,
    chunks,
    gathered,
    predictions,
    request_message,
    response,
)
from predictors.proto import predictor_v1_pb2 as pb
from predictors.proto import predictor_v1_pb2_grpc
from scheduler_core.predictions import Prediction
from scheduler_core.predictor import PredictionRequest

PredictorStub: Any = predictor_v1_pb2_grpc.PredictorStub


class GrpcPredictor(AsyncClient):
    """Asynchronous client.

    It never blocks the event loop: connecting, name look-ups, waits and retries happen beside the caller.

    Args:
        address: "host:port" or "unix:PATH".
        settings: Limits.

    Raises:
        InputError: The address has another form. Nothing is connected yet.
    """

    def __init__(self, address: str, settings: ClientSettings | None = None) -> None:
        self.address = checked_address(address)
        self.settings = settings or ClientSettings()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connections: list[_Connection] = []
        self._turns: Iterator[_Connection] = iter(())

    async def responses(
        self,
        requests: Sequence[PredictionRequest],
        *,
        timeout_s: float | None = None,
        truncated_length: bool = False,
    ) -> list[pb.PredictResponse]:
        seconds = self.settings.timeout_s if timeout_s is None else checked_timeout(timeout_s)
        messages = [request_message(request, truncated_length) for request in requests]
        calls = [
            self._call(self._connection(), chunk, seconds)
            for chunk in chunks(messages, self.settings.max_batch_requests)
        ]
        return list(itertools.chain.from_iterable(await gathered(calls)))

    async def metadata(self) -> pb.GetMetadataResponse:
        stub = self._connection().stub
        try:
            response: pb.GetMetadataResponse = await stub.GetMetadata(
                pb.GetMetadataRequest(), timeout=self.settings.timeout_s, metadata=self.settings.metadata
            )
        except grpc.aio.AioRpcError as error:
            text = f"predictor {self.address}: {error.code().name}: {error.details()}"
            raise PredictorError(text, error.code().name) from error
        return response

    async def close(self) -> None:
        connections, self._connections = self._connections, []
        if asyncio.get_running_loop() is not self._loop:
            return  # their loop has ended, and with it all that could be waited for
        for connection in connections:
            await connection.close()

    def _connection(self) -> _Connection:
        """The next one of this event loop: connections cannot move from one loop to another."""
        loop = asyncio.get_running_loop()
        if not self._connections or self._loop is not loop:
            self._loop = loop
            num_connections = self.settings.num_connections
            self._connections = [_Connection(self.address, self.settings) for _ in range(num_connections)]
            self._turns = itertools.cycle(self._connections)
        return next(self._turns)

    async def _call(
        self, connection: _Connection, messages: Sequence[pb.PredictRequest], timeout_s: float
    ) -> list[pb.PredictResponse]:
        if self.settings.transport == "stream":
            return await connection.stream(messages, timeout_s)
        stub, metadata = connection.stub, self.settings.metadata
        try:
            if len(messages) == 1:
                return [await stub.Predict(messages[0], timeout=timeout_s, metadata=metadata)]
            batch = pb.PredictBatchRequest(requests=messages)
            outcomes = await stub.PredictBatch(batch, timeout=timeout_s, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise PredictorError.about(
                messages[0], error.code().name, error.details(), self.address
            ) from error
        return batch_responses(outcomes, messages, self.address)


class SyncPredictor:
    """Blocking client with the same limits and errors; thread-safe.

    It uses gRPC's blocking interface and no event loop, so it works in a process that runs loops of its own. Of the
    settings it does not use `transport`.

    Args:
        address: "host:port" or "unix:PATH".
        settings: Limits.
    """

    def __init__(self, address: str, settings: ClientSettings | None = None) -> None:
        self.address = checked_address(address)
        self.settings = settings or ClientSettings()
        self._lock = threading.Lock()
        self._channels: list[grpc.Channel] = []
        self._stubs: Iterator[Any] = iter(())

    def predict(
        self, requests: Sequence[PredictionRequest], *, timeout_s: float | None = None
    ) -> list[Prediction]:
        """Predictions in the order of `requests`; arguments and errors as of `GrpcPredictor.predict`."""
        return predictions(self.responses(requests, timeout_s=timeout_s), self.address)

    def responses(
        self,
        requests: Sequence[PredictionRequest],
        *,
        timeout_s: float | None = None,
        truncated_length: bool = False,
    ) -> list[pb.PredictResponse]:
        """The service's responses, in the order of `requests`; arguments as of `GrpcPredictor.responses`."""
        seconds = self.settings.timeout_s if timeout_s is None else checked_timeout(timeout_s)
        messages = [request_message(request, truncated_length) for request in requests]
        results: list[pb.PredictResponse] = []
        with contextlib.ExitStack() as calls:
            pending = []
            for chunk in chunks(messages, self.settings.max_batch_requests):
                batch = pb.PredictBatchRequest(requests=chunk)
                call = self._stub().PredictBatch.future(
                    batch, timeout=seconds, metadata=self.settings.metadata
                )
                calls.callback(call.cancel)
                pending.append((call, chunk))
            for call, chunk in pending:
                try:
                    outcomes = call.result()
                except grpc.RpcError as error:
                    code, details = error.code().name, error.details()
                    raise PredictorError.about(chunk[0], code, details, self.address) from error
                except grpc.FutureCancelledError as error:
                    details = "the client was closed"
                    raise PredictorError.about(chunk[0], "CANCELLED", details, self.address) from error
                results += batch_responses(outcomes, chunk, self.address)
        return results

    def metadata(self) -> pb.GetMetadataResponse:
        """Artifact, limits and provider of the service."""
        try:
            response: pb.GetMetadataResponse = self._stub().GetMetadata(
                pb.GetMetadataRequest(), timeout=self.settings.timeout_s, metadata=self.settings.metadata
            )
        except grpc.RpcError as error:
            text = f"predictor {self.address}: {error.code().name}: {error.details()}"
            raise PredictorError(text, error.code().name) from error
        return response

    def close(self) -> None:
        """Ends the connections; the client can be used again and then opens new ones."""
        with self._lock:
            channels, self._channels = self._channels, []
        for channel in channels:
            channel.close()

    def __enter__(self) -> SyncPredictor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stub(self) -> Any:
        """The next connection's stub."""
        with self._lock:
            if not self._channels:
                self._channels = [
                    self.settings.channel(grpc, self.address) for _ in range(self.settings.num_connections)
                ]
                self._stubs = itertools.cycle([PredictorStub(channel) for channel in self._channels])
            return next(self._stubs)


class _Connection:
    """A channel, and a stream that is opened at its first request and again when it has ended."""

    def __init__(self, address: str, settings: ClientSettings) -> None:
        self._address = address
        self._metadata = settings.metadata
        self._channel = settings.channel(grpc.aio, address)
        self.stub = PredictorStub(self._channel)
        self._stream: _OpenStream | None = None

    async def stream(
        self, messages: Sequence[pb.PredictRequest], timeout_s: float
    ) -> list[pb.PredictResponse]:
        """One response per message. The service goes on with the requests of a canceled call."""
        if self._stream is None or self._stream.ended:
            self._stream = _OpenStream(self.stub, self._metadata, self._address)
        return await self._stream.send(messages, timeout_s)

    async def close(self) -> None:
        """Ends the stream and the channel; requests in flight fail with code "CANCELLED"."""
        if self._stream is not None:
            await self._stream.close()
        await self._channel.close(None)


class _OpenStream:
    def __init__(self, stub: Any, metadata: tuple[tuple[str, str], ...], address: str) -> None:
        self._address = address
        self._numbers = map(str, itertools.count(1))
        self._in_flight: dict[str, asyncio.Future[pb.Outcome | tuple[str, str]]] = {}
        self._to_write: asyncio.Queue[pb.PredictRequest] = asyncio.Queue()
        self.ended = False
        self._call = stub.PredictStream(self._messages(), metadata=metadata)
        self._reader = asyncio.ensure_future(self._read())

    async def send(self, messages: Sequence[pb.PredictRequest], timeout_s: float) -> list[pb.PredictResponse]:
        loop = asyncio.get_running_loop()
        sent = {next(self._numbers): loop.create_future() for _ in messages}
        self._in_flight |= sent
        for number, message in zip(sent, messages, strict=True):
            numbered = pb.PredictRequest()
            numbered.CopyFrom(message)
            numbered.request_id = number
            numbered.timeout_s = timeout_s
            self._to_write.put_nowait(numbered)
        try:
            await asyncio.wait(sent.values(), timeout=timeout_s)
        finally:  # also when the caller gives up, which at the deadline may happen first
            for number in sent:
                self._in_flight.pop(number, None)
        late = ("DEADLINE_EXCEEDED", "no response in time")
        return [
            self._response(future.result() if future.done() else late, message)
            for future, message in zip(sent.values(), messages, strict=True)
        ]

    async def close(self) -> None:
        """Ends the stream; requests in flight fail."""
        self._end("CANCELLED", "the client was closed")
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    def _response(
        self, outcome: pb.Outcome | tuple[str, str], message: pb.PredictRequest
    ) -> pb.PredictResponse:
        if isinstance(outcome, tuple):
            code, details = outcome
            raise PredictorError.about(message, code, details, self._address)
        result = response(outcome, message, self._address)
        result.request_id = message.request_id
        return result

    async def _messages(self) -> AsyncIterator[pb.PredictRequest]:
        while True:
            message = await self._to_write.get()
            if message.request_id in self._in_flight:  # else given up in the meantime
                yield message

    async def _read(self) -> None:
        code, details = "UNAVAILABLE", "the stream ended"  # a server that ended in between
        try:
            async for outcome in self._call:
                future = self._in_flight.get(outcome.prediction.request_id or outcome.error.request_id)
                if future is not None and not future.done():
                    future.set_result(outcome)
        except grpc.aio.AioRpcError as error:
            details = error.details() or ""
            # Where a write met the end of a stream, the library hides the true status behind one of its own.
            if not details.startswith("Internal error from Core"):
                code = error.code().name
        finally:
            self._end(code, details)
            self._call.cancel()

    def _end(self, code: str, details: str) -> None:
        self.ended = True
        for future in self._in_flight.values():
            if not future.done():
                future.set_result((code, details))
