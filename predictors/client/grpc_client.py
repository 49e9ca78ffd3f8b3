"""The clients over gRPC: asynchronous for schedulers and simulators, blocking for programs without an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
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
        self.timeout_s = self.settings.timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._channels: list[grpc.aio.Channel] = []
        self._stubs: Iterator[Any] = iter(())

    async def send(self, messages: Sequence[pb.PredictRequest], timeout_s: float) -> list[pb.PredictResponse]:
        batches = chunks(messages, self.settings.max_batch_requests)
        responses = await gathered([self._call(self._stub(), batch, timeout_s) for batch in batches])
        return list(itertools.chain.from_iterable(responses))

    async def metadata(self) -> pb.GetMetadataResponse:
        try:
            response: pb.GetMetadataResponse = await self._stub().GetMetadata(
                pb.GetMetadataRequest(), timeout=self.settings.timeout_s, metadata=self.settings.metadata
            )
        except grpc.aio.AioRpcError as error:
            text = f"predictor {self.address}: {error.code().name}: {error.details()}"
            raise PredictorError(text, error.code().name) from error
        return response

    async def close(self) -> None:
        channels, self._channels = self._channels, []
        if asyncio.get_running_loop() is not self._loop:
            return  # their loop has ended, and with it all that could be waited for
        for channel in channels:
            await channel.close(None)

    def _stub(self) -> Any:
        """That of the next connection of this event loop: connections cannot move from one loop to another."""
        loop = asyncio.get_running_loop()
        if not self._channels or self._loop is not loop:
            self._loop = loop
            self._channels = self.settings.channels(grpc.aio, self.address)
            self._stubs = itertools.cycle(map(PredictorStub, self._channels))
        return next(self._stubs)

    async def _call(
        self, stub: Any, messages: Sequence[pb.PredictRequest], timeout_s: float
    ) -> list[pb.PredictResponse]:
        metadata = self.settings.metadata
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

    It uses gRPC's blocking interface and no event loop, so it works in a process that runs loops of its own.

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
                self._channels = self.settings.channels(grpc, self.address)
                self._stubs = itertools.cycle(map(PredictorStub, self._channels))
            return next(self._stubs)
