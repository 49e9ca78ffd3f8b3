"""The clients over gRPC: asynchronous for schedulers and simulators, blocking for programs without an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import grpc

from predictors.client.channel import ClientSettings, checked_address, checked_timeout
from predictors.client.messages import (
    PredictorError,
    Result,
    batch_results,
    call_failed,
    chunks,
    failure,
    length_prediction,
    outcome_result,
    request_message,
    succeeded,
)
from predictors.proto import predictor_v1_pb2 as pb
from predictors.proto import predictor_v1_pb2_grpc
from scheduler_core.predictions import LengthPrediction
from scheduler_core.predictor import PredictionRequest

PredictorStub: Any = predictor_v1_pb2_grpc.PredictorStub


class GrpcPredictor:
    """Asynchronous client; implements `scheduler_core.predictor.Predictor`.

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
            InputError: A prompt cannot be sent, or the deadline is not allowed.
        """
        responses = await self.responses(requests, timeout_s=timeout_s)
        return [length_prediction(response, self.address) for response in responses]

    async def responses(
        self,
        requests: Sequence[PredictionRequest],
        *,
        timeout_s: float | None = None,
        truncated_length: bool = False,
    ) -> list[pb.PredictResponse]:
        """The service's responses with all heads (urgency, buckets, rank, ...), in the order of `requests`; raises as
        `predict`.

        Args:
            requests: Any number.
            timeout_s: Deadline of this call; None: that of the settings.
            truncated_length: Also request the statistics of the length truncated at each request's max_tokens.
        """
        seconds = self.settings.timeout_s if timeout_s is None else checked_timeout(timeout_s)
        messages = [request_message(request, truncated_length) for request in requests]
        connections = self._connected()
        calls = [
            self._call(connections.next(), chunk, seconds)
            for chunk in chunks(messages, self.settings.max_batch_requests)
        ]
        return succeeded([result for results in await _gathered(calls) for result in results])

    async def metadata(self) -> pb.GetMetadataResponse:
        """Artifact, limits and provider of the service."""
        stub = self._connected().next().stub
        try:
            response: pb.GetMetadataResponse = await stub.GetMetadata(
                pb.GetMetadataRequest(), timeout=self.settings.timeout_s, metadata=self.settings.metadata
            )
        except grpc.aio.AioRpcError as error:
            raise _metadata_error(self.address, error) from error
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
        self, connection: _Connection, messages: Sequence[pb.PredictRequest], timeout_s: float
    ) -> Sequence[Result]:
        """One result per message."""
        if self.settings.transport == "stream":
            return await connection.stream.send(messages, timeout_s)
        stub, metadata = connection.stub, self.settings.metadata
        try:
            if len(messages) == 1:
                return [await stub.Predict(messages[0], timeout=timeout_s, metadata=metadata)]
            batch = pb.PredictBatchRequest(requests=messages)
            response = await stub.PredictBatch(batch, timeout=timeout_s, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            return call_failed(error, messages, self.address)
        return batch_results(response, messages, self.address)


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
    ) -> list[LengthPrediction]:
        """Predicted lengths in the order of `requests`; arguments and errors as of `GrpcPredictor.predict`."""
        responses = self.responses(requests, timeout_s=timeout_s)
        return [length_prediction(response, self.address) for response in responses]

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
        results: list[Result] = []
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
                results += self._results(call, chunk)
        return succeeded(results)

    def metadata(self) -> pb.GetMetadataResponse:
        """Artifact, limits and provider of the service."""
        try:
            response: pb.GetMetadataResponse = self._stub().GetMetadata(
                pb.GetMetadataRequest(), timeout=self.settings.timeout_s, metadata=self.settings.metadata
            )
        except grpc.RpcError as error:
            raise _metadata_error(self.address, error) from error
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

    def _results(self, call: Any, messages: Sequence[pb.PredictRequest]) -> Sequence[Result]:
        try:
            return batch_results(call.result(), messages, self.address)
        except grpc.RpcError as error:
            return call_failed(error, messages, self.address)
        except grpc.FutureCancelledError:
            return [
                failure(message, "CANCELLED", "the client was closed", self.address) for message in messages
            ]


class _Connection:
    def __init__(self, address: str, settings: ClientSettings) -> None:
        self.channel = settings.channel(grpc.aio, address)
        self.stub = PredictorStub(self.channel)
        self.stream = _StreamTransport(self.stub, settings.metadata, address)


class _Connections:
    """The connections of one event loop, used in turn."""

    def __init__(self, address: str, settings: ClientSettings, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._all = [_Connection(address, settings) for _ in range(settings.num_connections)]
        self._cycle = itertools.cycle(self._all)

    def next(self) -> _Connection:
        return next(self._cycle)

    async def close(self) -> None:
        if asyncio.get_running_loop() is not self.loop:
            return  # their loop has ended, and with it all that could be waited for
        for connection in self._all:
            await connection.stream.close()
            await connection.channel.close(None)


def _metadata_error(address: str, error: Any) -> PredictorError:
    code = error.code().name
    return PredictorError(f"predictor {address}: {code}: {error.details()}", code)


async def _gathered(calls: Sequence[Coroutine[Any, Any, Sequence[Result]]]) -> list[Sequence[Result]]:
    """All results; when this is canceled or one fails, the others are canceled too."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


@dataclass(slots=True, eq=False)
class _InFlight:
    """A request in flight and the future of its result."""

    message: pb.PredictRequest
    future: asyncio.Future[Result]


class _StreamTransport:
    """Opens a stream at the first request, and another one when it has ended.

    Args:
        stub: Of a connection.
        metadata: What the call carries.
        address: Named in errors.
    """

    def __init__(self, stub: Any, metadata: tuple[tuple[str, str], ...], address: str) -> None:
        self._stub = stub
        self._metadata = metadata
        self._address = address
        self._open: _OpenStream | None = None

    async def send(self, messages: Sequence[pb.PredictRequest], timeout_s: float) -> list[Result]:
        """One result per message. The service goes on with the requests of a canceled call."""
        if self._open is None or self._open.ended:
            self._open = _OpenStream(self._stub.PredictStream(metadata=self._metadata), self._address)
        return await self._open.send(messages, timeout_s)

    async def close(self) -> None:
        """Ends the stream; requests in flight fail with code "CANCELLED"."""
        if self._open is not None:
            await self._open.close("CANCELLED", "the client was closed")


class _OpenStream:
    def __init__(self, call: Any, address: str) -> None:
        self._call = call
        self._address = address
        self._numbers = itertools.count(1)
        self._in_flight: dict[str, _InFlight] = {}
        self._to_write: asyncio.Queue[pb.PredictRequest] = asyncio.Queue()
        self.ended = False
        self._tasks = [asyncio.ensure_future(self._write()), asyncio.ensure_future(self._read())]

    async def send(self, messages: Sequence[pb.PredictRequest], timeout_s: float) -> list[Result]:
        sent = {}
        loop = asyncio.get_running_loop()
        for message in messages:
            number = str(next(self._numbers))
            sent[number] = _InFlight(message, loop.create_future())
            numbered = pb.PredictRequest()
            numbered.CopyFrom(message)
            numbered.request_id = number
            numbered.timeout_s = timeout_s
            self._to_write.put_nowait(numbered)
        self._in_flight |= sent
        try:
            await asyncio.wait([one.future for one in sent.values()], timeout=timeout_s)
        finally:  # also when the caller gives up, which at the deadline may happen first
            for number in sent:
                self._in_flight.pop(number, None)
        return [self._result(one) for one in sent.values()]

    async def close(self, code: str, details: str) -> None:
        """Ends the stream; requests in flight fail."""
        self._end(code, details)
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _result(self, one: _InFlight) -> Result:
        if one.future.done():
            return one.future.result()
        return failure(one.message, "DEADLINE_EXCEEDED", "no response in time", self._address)

    async def _write(self) -> None:
        try:
            while True:
                message = await self._to_write.get()
                if message.request_id in self._in_flight:  # else given up in the meantime
                    await self._call.write(message)
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError, grpc.aio.UsageError):
            return  # the stream has ended; `_read` gets the reason

    async def _read(self) -> None:
        code, details = "UNAVAILABLE", "the stream ended"
        try:
            while (outcome := await self._call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                self._resolve(outcome)
            code, details = (await self._call.code()).name, await self._call.details() or ""
        except grpc.aio.AioRpcError as error:
            code, details = error.code().name, error.details() or ""
        except asyncio.CancelledError:
            code, details = "CANCELLED", "the call was cancelled"
            raise
        finally:
            # "OK" with requests in flight: a server that ended in between. And where a write met the end of a stream, the
            # library hides the true status behind one of its own.
            hidden = code == "INTERNAL" and details.startswith("Internal error from Core")
            self._end("UNAVAILABLE" if code == "OK" or hidden else code, details)
            self._call.cancel()
            self._tasks[0].cancel()

    def _resolve(self, outcome: pb.Outcome) -> None:
        number = outcome.prediction.request_id or outcome.error.request_id
        request = self._in_flight.get(number)
        if request is None or request.future.done():
            return
        result = outcome_result(outcome, request.message, self._address)
        if not isinstance(result, PredictorError):
            result.request_id = request.message.request_id
        request.future.set_result(result)

    def _end(self, code: str, details: str) -> None:
        self.ended = True
        for request in self._in_flight.values():
            if not request.future.done():
                request.future.set_result(failure(request.message, code, details, self._address))
