"""The blocking client, for programs without an event loop."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any

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
    failure,
    length_prediction,
    request_message,
    succeeded,
)
from predictors.client.settings import ClientSettings, checked_timeout
from predictors.proto import predictor_v1_pb2 as pb
from predictors.proto import predictor_v1_pb2_grpc
from scheduler_core.predictions import LengthPrediction
from scheduler_core.predictor import PredictionRequest


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
        self._pool: LeastBusy[Any] | None = None

    def predict(
        self, requests: Sequence[PredictionRequest], *, timeout_s: float | None = None
    ) -> list[LengthPrediction]:
        """Predicted lengths in the order of `requests`; arguments and errors as of `GrpcPredictor.predict`."""
        responses = self.responses(requests, timeout_s=timeout_s)
        return [length_prediction(response, self.address) for response in responses]

    def responses(
        self, requests: Sequence[PredictionRequest], *, timeout_s: float | None = None, capped: bool = False
    ) -> list[pb.PredictResponse]:
        """The service's responses, in the order of `requests`; arguments as of `GrpcPredictor.responses`."""
        seconds = self.settings.timeout_s if timeout_s is None else checked_timeout(timeout_s)
        messages = [request_message(request, capped=capped) for request in requests]
        pool, metadata = self._connected(), call_metadata(self.settings)
        results: list[Result] = []
        with contextlib.ExitStack() as calls:
            pending = []
            for chunk in chunks(messages, self.settings):
                stub = calls.enter_context(pool.lease())
                batch = pb.PredictBatchRequest(requests=chunk)
                call = stub.PredictBatch.future(batch, timeout=seconds, metadata=metadata)
                calls.callback(call.cancel)
                pending.append((call, chunk))
            for call, chunk in pending:
                results += self._results(call, chunk)
        return succeeded(results)

    def metadata(self) -> pb.GetMetadataResponse:
        """Artifact, limits and provider of the service."""
        with self._connected().lease() as stub:
            try:
                response: pb.GetMetadataResponse = stub.GetMetadata(
                    pb.GetMetadataRequest(),
                    timeout=self.settings.timeout_s,
                    metadata=call_metadata(self.settings),
                )
            except grpc.RpcError as error:
                code = error.code().name
                details = error.details()
                raise PredictorError(f"predictor {self.address}: {code}: {details}", code) from error
        return response

    def close(self) -> None:
        """Ends the connections; the client can be used again and then opens new ones."""
        with self._lock:
            channels, self._channels, self._pool = self._channels, [], None
        for channel in channels:
            channel.close()

    def __enter__(self) -> SyncPredictor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _connected(self) -> LeastBusy[Any]:
        with self._lock:
            if self._pool is None:
                self._channels = [
                    _channel(self.address, self.settings) for _ in range(self.settings.num_connections)
                ]
                stub: Any = predictor_v1_pb2_grpc.PredictorStub
                self._pool = LeastBusy([stub(channel) for channel in self._channels])
            return self._pool

    def _results(self, call: Any, messages: Sequence[pb.PredictRequest]) -> Sequence[Result]:
        try:
            return batch_results(call.result(), messages, self.address)
        except grpc.RpcError as error:
            return call_failed(error, messages, self.address)
        except grpc.FutureCancelledError:
            return [
                failure(message, "CANCELLED", "the client was closed", self.address) for message in messages
            ]


def _channel(address: str, settings: ClientSettings) -> grpc.Channel:
    options = channel_options(settings)
    if settings.tls is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, channel_credentials(settings.tls), options=options)
