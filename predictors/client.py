"""Clients of the prediction service.

`connect("host:port")` gives the asynchronous client that a scheduler or simulator uses (the `Predictor` protocol of
scheduler_core); `SyncPredictor` is the same for programs without an event loop. Both open their connection at the first
call, retry only what no server has taken (UNAVAILABLE, CANCELLED), and give every call a deadline.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from scheduler_core.errors import InputError, MissingExtraError, TailcastError
from scheduler_core.predictions import LengthPrediction
from scheduler_core.predictor import PredictionRequest

try:
    import grpc

    from predictors.proto import predictor_v1_pb2 as pb
    from predictors.proto import predictor_v1_pb2_grpc
except ModuleNotFoundError as error:
    package = {"grpc": "grpcio", "google": "protobuf"}.get((error.name or "").partition(".")[0])
    if package is None:
        raise
    raise MissingExtraError(package, "client") from error

if TYPE_CHECKING:
    from grpc.aio import Channel

METHOD_PREFIX = "tailcast.predictor.v1.Predictor"


class PredictorError(TailcastError):
    """The service could not be reached, refused a request or failed.

    Args:
        message: What happened, naming the address.
        code: Name of the gRPC status, for example "RESOURCE_EXHAUSTED".
        request_id: The request it is about, if it is about one.
    """

    def __init__(self, message: str, code: str, request_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.request_id = request_id

    def __reduce__(self) -> tuple[type[PredictorError], tuple[str, str, str | None]]:
        return type(self), (str(self), self.code, self.request_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """Limits of a client.

    Attributes:
        timeout_s: Deadline of one call, retries included.
        max_attempts: Tries of one call, 1 to 5; only UNAVAILABLE and CANCELLED are tried again.
        first_backoff_s: Wait before the second try; doubled for each further one, randomised by gRPC.
        max_batch_requests: Most requests in one call; more are sent in several calls at the same time.
        max_batch_bytes: Largest sum of prompt bytes in one call of more than one request.
        max_message_bytes: Largest message.
    """

    timeout_s: float = 10.0
    max_attempts: int = 4
    first_backoff_s: float = 0.05
    max_batch_requests: int = 64
    max_batch_bytes: int = 2 * 2**20
    max_message_bytes: int = 16 * 2**20

    def __post_init__(self) -> None:
        if not (0 < self.timeout_s < math.inf):
            raise InputError("timeout_s", self.timeout_s, "a finite number of seconds > 0")
        if not 1 <= self.max_attempts <= 5:
            raise InputError("max_attempts", self.max_attempts, "1 to 5")
        # gRPC 1.85 never makes the next try when its random share of the wait comes out below 1 ms.
        if not 0.005 <= self.first_backoff_s <= 60:
            raise InputError("first_backoff_s", self.first_backoff_s, "0.005 to 60 seconds")
        for name in ("max_batch_requests", "max_batch_bytes", "max_message_bytes"):
            if getattr(self, name) < 1:
                raise InputError(name, getattr(self, name), "an integer >= 1")

    def channel_options(self) -> list[tuple[str, Any]]:
        """Options of a gRPC channel; the retries are done by gRPC itself, within the call's deadline."""
        method: dict[str, Any] = {"name": [{"service": METHOD_PREFIX}]}
        if self.max_attempts > 1:
            method["retryPolicy"] = {
                "maxAttempts": self.max_attempts,
                "initialBackoff": f"{self.first_backoff_s}s",
                "maxBackoff": f"{self.first_backoff_s * 8}s",
                "backoffMultiplier": 2,
                # CANCELLED is what a call gets that reaches a server in the moment of its shutdown.
                "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
            }
        return [
            ("grpc.service_config", json.dumps({"methodConfig": [method]})),
            ("grpc.max_send_message_length", self.max_message_bytes),
            ("grpc.max_receive_message_length", self.max_message_bytes),
            # Reconnect quickly: a restarted server is back in about a second.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 2000),
        ]


class GrpcPredictor:
    """Asynchronous client; implements `scheduler_core.predictor.Predictor`.

    Args:
        address: "host:port" or "unix:PATH".
        settings: Limits.

    Raises:
        InputError: The address has another form. Nothing is connected yet.
    """

    def __init__(self, address: str, settings: ClientSettings | None = None) -> None:
        self.address = _checked_address(address)
        self.settings = settings or ClientSettings()
        self._channel: Channel | None = None
        self._stub: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def predict(self, requests: Sequence[PredictionRequest]) -> list[LengthPrediction]:
        """Predicted lengths in the order of `requests`.

        Raises:
            PredictorError: The service could not be reached in time, or refused or failed one of the requests, or its
                artifact predicts no length distribution.
            InputError: A prompt cannot be sent.
        """
        return [_prediction(found, self.address) for found in await self.responses(requests)]

    async def responses(self, requests: Sequence[PredictionRequest]) -> list[pb.PredictResponse]:
        """All that the service says (urgency, buckets, rank, ...), in the order of `requests`; raises as `predict`."""
        stub = self._connected()
        calls = [asyncio.ensure_future(self._call(stub, chunk)) for chunk in _chunks(requests, self.settings)]
        try:
            answers = await asyncio.gather(*calls)
        finally:
            for call in calls:
                call.cancel()
        return [response for answer in answers for response in answer]

    async def metadata(self) -> pb.GetMetadataResponse:
        """What the service serves: artifact, limits, provider."""
        try:
            response: pb.GetMetadataResponse = await self._connected().GetMetadata(
                pb.GetMetadataRequest(), timeout=self.settings.timeout_s
            )
        except grpc.aio.AioRpcError as error:
            _raise(error, self.address)
        return response

    async def close(self) -> None:
        """Ends the connection; the client can be used again and then opens a new one."""
        channel, self._channel, self._loop = self._channel, None, None
        if channel is not None:
            await channel.close(None)

    async def __aenter__(self) -> GrpcPredictor:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _connected(self) -> Any:
        """The stub of this event loop's channel: a channel cannot move from one loop to another."""
        loop = asyncio.get_running_loop()
        if self._channel is None or self._loop is not loop:
            self._channel = grpc.aio.insecure_channel(self.address, options=self.settings.channel_options())
            self._stub = predictor_v1_pb2_grpc.PredictorStub(self._channel)  # type: ignore[no-untyped-call]
            self._loop = loop
        return self._stub

    async def _call(self, stub: Any, requests: Sequence[PredictionRequest]) -> list[pb.PredictResponse]:
        messages = [_message(request) for request in requests]
        try:
            if len(messages) == 1:
                return [await stub.Predict(messages[0], timeout=self.settings.timeout_s)]
            batch = pb.PredictBatchRequest(requests=messages)
            response = await stub.PredictBatch(batch, timeout=self.settings.timeout_s)
        except grpc.aio.AioRpcError as error:
            _raise(error, self.address, requests)
        return _responses(response, requests, self.address)


class SyncPredictor:
    """Blocking client with the same limits and errors; may be shared by threads.

    Args:
        address: "host:port" or "unix:PATH".
        settings: Limits.
    """

    def __init__(self, address: str, settings: ClientSettings | None = None) -> None:
        self.address = _checked_address(address)
        self.settings = settings or ClientSettings()
        self._channel: grpc.Channel | None = None

    def predict(self, requests: Sequence[PredictionRequest]) -> list[LengthPrediction]:
        """Predicted lengths in the order of `requests`; raises as `GrpcPredictor.predict` does."""
        return [_prediction(found, self.address) for found in self.responses(requests)]

    def responses(self, requests: Sequence[PredictionRequest]) -> list[pb.PredictResponse]:
        """All that the service says (urgency, buckets, rank, ...), in the order of `requests`; raises as `predict`."""
        stub = self._connected()
        calls = []
        for chunk in _chunks(requests, self.settings):
            message = pb.PredictBatchRequest(requests=[_message(request) for request in chunk])
            calls.append((chunk, stub.PredictBatch.future(message, timeout=self.settings.timeout_s)))
        found = []
        try:
            for chunk, call in calls:
                found += _responses(_result(call, chunk, self.address), chunk, self.address)
        finally:
            for _, call in calls:
                call.cancel()
        return found

    def metadata(self) -> pb.GetMetadataResponse:
        """What the service serves: artifact, limits, provider."""
        try:
            response: pb.GetMetadataResponse = self._connected().GetMetadata(
                pb.GetMetadataRequest(), timeout=self.settings.timeout_s
            )
        except grpc.RpcError as error:
            _raise(error, self.address)
        return response

    def close(self) -> None:
        """Ends the connection; the client can be used again and then opens a new one."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def __enter__(self) -> SyncPredictor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _connected(self) -> Any:
        if self._channel is None:
            self._channel = grpc.insecure_channel(self.address, options=self.settings.channel_options())
        return predictor_v1_pb2_grpc.PredictorStub(self._channel)  # type: ignore[no-untyped-call]


def connect(address: str) -> GrpcPredictor:
    """A client for "host:port", as `open_predictor("grpc://host:port")` makes it; connects at the first call."""
    return GrpcPredictor(address)


def _checked_address(address: str) -> str:
    if re.fullmatch(r"unix:.+", address):
        return address
    match = re.fullmatch(r"(?:[\w.-]+|\[[0-9a-fA-F:.]+\]):(\d{1,5})", address)
    if match is None or not 1 <= int(match[1]) <= 65535:
        raise InputError("predictor address", address, "HOST:PORT with a port from 1 to 65535, or unix:PATH")
    return address


def _chunks(
    requests: Sequence[PredictionRequest], settings: ClientSettings
) -> Iterator[list[PredictionRequest]]:
    """Consecutive parts of `requests` within the limits of one call; a prompt over the byte limit goes alone."""
    chunk: list[PredictionRequest] = []
    num_bytes = 0
    for request in requests:
        size = len(request.prompt) * 4  # bytes of a character in UTF-8: at most 4
        if chunk and (
            len(chunk) >= settings.max_batch_requests or num_bytes + size > settings.max_batch_bytes
        ):
            yield chunk
            chunk, num_bytes = [], 0
        chunk.append(request)
        num_bytes += size
    if chunk:
        yield chunk


def _message(request: PredictionRequest) -> pb.PredictRequest:
    try:
        return pb.PredictRequest(
            request_id=request.request_id,
            prompt=request.prompt,
            served_model=request.served_model,
            temperature=request.temperature,
        )
    except (TypeError, ValueError) as error:
        raise InputError(
            f"prompt of request {request.request_id!r}", request.prompt[:40], f"valid Unicode text ({error})"
        ) from error


def _responses(
    response: pb.PredictBatchResponse, requests: Sequence[PredictionRequest], address: str
) -> list[pb.PredictResponse]:
    if len(response.outcomes) != len(requests):
        raise PredictorError(
            f"predictor {address}: {len(response.outcomes)} outcomes for {len(requests)} requests", "INTERNAL"
        )
    found = []
    for outcome, request in zip(response.outcomes, requests, strict=True):
        if outcome.WhichOneof("outcome") != "prediction":
            code = _code_name(outcome.error.code)
            raise PredictorError(
                f"predictor {address}: request {request.request_id!r}: {code}: {outcome.error.message}",
                code,
                request.request_id,
            )
        found.append(outcome.prediction)
    return found


def _prediction(found: pb.PredictResponse, address: str) -> LengthPrediction:
    if not found.HasField("mu"):
        message = f"artifact {found.artifact_id!r} predicts no length distribution"
        raise PredictorError(f"predictor {address}: {message}", "FAILED_PRECONDITION", found.request_id)
    return LengthPrediction(
        mu=found.mu,
        sigma=found.sigma,
        nu=found.nu,
        artifact_id=found.artifact_id,
        artifact_version=found.artifact_version,
    )


def _result(call: Any, requests: Sequence[PredictionRequest], address: str) -> pb.PredictBatchResponse:
    try:
        response: pb.PredictBatchResponse = call.result()
    except grpc.RpcError as error:
        _raise(error, address, requests)
    return response


def _code_name(number: int) -> str:
    return next((code.name for code in grpc.StatusCode if code.value[0] == number), "UNKNOWN")


def _raise(error: Any, address: str, requests: Sequence[PredictionRequest] = ()) -> NoReturn:
    """Turns a gRPC error into ours, naming the request where the call had just one."""
    code = error.code().name
    request_id = requests[0].request_id if len(requests) == 1 else None
    about = "" if request_id is None else f" request {request_id!r}:"
    raise PredictorError(
        f"predictor {address}:{about} {code}: {error.details()}", code, request_id
    ) from error
