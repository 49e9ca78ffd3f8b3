"""gRPC clients: asynchronous for schedulers and simulators, blocking for programs without an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from predictors.client.messages import (
    AsyncClient,
    PredictorError,
    batch_responses,
    checked_timeout,
    chunks,
    gathered,
    observe_requests,
    predictions,
    refused,
    request_message,
)
from predictors.hosting.tracing import trace_headers
from predictors.proto import predictor_v1_pb2 as pb
from predictors.proto.predictor_v1_pb2_grpc import PredictorStub
from scheduler_core.errors import InputError
from scheduler_core.prediction.predictions import Prediction
from scheduler_core.prediction.predictor import PredictionRequest
from scheduler_core.ranges import INTEGERS, check_ranges
from scheduler_core.shell.files import existing_file

# Maximum message size of a call, far above the default limit of the service.
MAX_MESSAGE_BYTES = 16 * 2**20
# Maximum length of a header of the trace context, which W3C has systems pass on; servers limit all metadata to 8 KiB.
MAX_TRACE_CHARS = 512
# gRPC's retry policy and throttling (https://grpc.io/docs/guides/retry). A call is retried if no server
# processed it: UNAVAILABLE, and CANCELLED, the status of calls that reach a server during its shutdown.
# Predictions are idempotent, so retries are safe. RESOURCE_EXHAUSTED is not retried, as that would add load
# to a full server. To avoid overload, retries stop while the failures of a channel exceed a fifth of its
# successes by more than 50.
RETRY_POLICY = {
    "initialBackoff": "0.1s",
    "maxBackoff": "2s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
}
RETRY_THROTTLING = {"maxTokens": 100, "tokenRatio": 0.2}


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSettings:
    """TLS encryption. `ca` is a PEM file with the certificates that verify the server (None: those of the
    system); `certificate` and `key` are PEM files of the client for mutual TLS (both or neither)."""

    ca: str | None = None
    certificate: str | None = None
    key: str | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            allowed = "a certificate together with its key, or neither"
            raise InputError("certificate", self.certificate, allowed)

    def credentials(self) -> grpc.ChannelCredentials:
        """Reads the files; InputError if one is missing."""
        ca, key, certificate = (
            None if path is None else existing_file(path, f"tls {name}").read_bytes()
            for name, path in (("ca", self.ca), ("key", self.key), ("certificate", self.certificate))
        )
        return grpc.ssl_channel_credentials(ca, key, certificate)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """Limits of a client.

    Attributes:
        timeout_s: Default deadline of `predict`, including retries.
        num_connections: Number of channels used in turn, to reach several workers at one address.
        wait_for_ready: Whether a call waits until its deadline for an unreachable service, instead of failing
            after its attempts.
        max_attempts: Attempts per call, including the first, 1 to 5 (gRPC's limit); 1: no retries.
        tls: TLS settings; None: no encryption.
        token: Bearer token sent with every call; None: no token.
    """

    timeout_s: float = 10.0
    num_connections: int = 1
    wait_for_ready: bool = False
    max_attempts: int = 5
    tls: TlsSettings | None = None
    token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        checked_timeout(self.timeout_s)
        check_ranges(self, max_attempts=(1, 5), num_connections=(1, INTEGERS))
        if self.token is not None and not (self.token.isascii() and self.token.isprintable() and self.token):
            raise InputError("token", "...", "printable ASCII characters, at least one")

    def call_options(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Deadline (default: `self.timeout_s`) and metadata of a call."""
        metadata = () if self.token is None else (("authorization", f"Bearer {self.token}"),)
        return {"timeout": timeout_s or self.timeout_s, "metadata": metadata}

    def predict_options(self, timeout_s: float | None = None) -> dict[str, Any]:
        """As `call_options`, with the trace context of the caller's span if it uses OpenTelemetry."""
        options = self.call_options(timeout_s)
        headers = trace_headers().items()
        metadata = [(name, value) for name, value in headers if len(value) <= MAX_TRACE_CHARS]
        return options | {"metadata": (*options["metadata"], *metadata)}

    def channels(self, package: Any, address: str) -> list[Any]:
        """New channels; `package` is `grpc` or `grpc.aio`."""
        options, count = self._channel_options(), range(self.num_connections)
        if self.tls is None:
            return [package.insecure_channel(address, options=options) for _ in count]
        credentials = self.tls.credentials()
        return [package.secure_channel(address, credentials, options=options) for _ in count]

    def _channel_options(self) -> list[tuple[str, Any]]:
        method: dict[str, Any] = {"name": [{}], "waitForReady": self.wait_for_ready}
        # A name with several addresses (a headless Kubernetes service) is balanced over all of them.
        config: dict[str, Any] = {"loadBalancingConfig": [{"round_robin": {}}], "methodConfig": [method]}
        if self.max_attempts > 1:
            method["retryPolicy"] = RETRY_POLICY | {"maxAttempts": self.max_attempts}
            config["retryThrottling"] = RETRY_THROTTLING
        return [
            ("grpc.service_config", json.dumps(config)),
            # A call is only retried while its request is buffered; the default is 256 KiB.
            ("grpc.per_rpc_retry_buffer_size", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            # Reconnect quickly: a restarted server is back in about a second.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
            # Despite its name, the timeout of a connection attempt; a busy or distant server needs seconds.
            ("grpc.min_reconnect_backoff_ms", 10_000),
            # Pings detect a dead connection within half a minute; the service permits them at this rate.
            ("grpc.keepalive_time_ms", 20_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.http2.max_pings_without_data", 0),
            # By default, channels to the same address share one connection.
            ("grpc.use_local_subchannel_pool", 1),
        ]


def checked_address(address: str) -> str:
    """Returns `address` if it is "host:port" or "unix:PATH"; otherwise raises InputError."""
    if re.fullmatch(r"unix:.+", address):
        return address
    match = re.fullmatch(r"(?:[\w.-]+|\[[0-9a-fA-F:.]+\]):(\d{1,5})", address)
    if match is None or not 1 <= int(match[1]) <= 65535:
        host = address.rpartition("@")[2]
        public = address if host == address else f"...@{host}"  # without user and password
        raise InputError("predictor address", public, "HOST:PORT with a port from 1 to 65535, or unix:PATH")
    return address


def _failure(error: Any, address: str, message: pb.PredictRequest | None = None) -> PredictorError:
    """The client error for a gRPC error; `message` is the request that it refers to, if any."""
    return PredictorError.about(message, error.code().name, error.details(), address)


class GrpcPredictor(AsyncClient):
    """Asynchronous client for "host:port" or "unix:PATH" (else InputError); connects at the first call.

    The event loop is never blocked by connecting, name resolution, waiting or retries.
    """

    def __init__(self, address: str, settings: ClientSettings | None = None) -> None:
        self.address = checked_address(address)
        self.settings = settings or ClientSettings()
        self.timeout_s = self.settings.timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._channels: list[grpc.aio.Channel] = []
        self._stubs: Iterator[Any] = iter(())

    @property
    def is_connected(self) -> bool:
        states = [channel.get_state() for channel in self._channels]
        return not states or grpc.ChannelConnectivity.READY in states

    async def send(self, messages: Sequence[pb.PredictRequest], timeout_s: float) -> list[pb.PredictResponse]:
        responses = await gathered([self._call(self._stub(), batch, timeout_s) for batch in chunks(messages)])
        return list(itertools.chain.from_iterable(responses))

    async def observe(self, observations: Sequence[pb.Observation]) -> list[pb.ObservationError]:
        """Reports true lengths to the service; returns those that it refused. PredictorError if it cannot be reached or does
        not learn."""
        options = self.settings.call_options()
        try:
            responses = [
                await self._stub().Observe(call, **options) for call in observe_requests(observations)
            ]
        except grpc.aio.AioRpcError as error:
            raise _failure(error, self.address) from error
        return refused(responses)

    async def metadata(self) -> pb.GetMetadataResponse:
        request, options = pb.GetMetadataRequest(), self.settings.call_options()
        try:
            response: pb.GetMetadataResponse = await self._stub().GetMetadata(request, **options)
        except grpc.aio.AioRpcError as error:
            raise _failure(error, self.address) from error
        return response

    async def close(self) -> None:
        channels, self._channels = self._channels, []
        if asyncio.get_running_loop() is not self._loop:
            return  # the channels belong to another event loop, which has ended
        for channel in channels:
            await channel.close(None)

    def _stub(self) -> Any:
        """Stub of the next channel; channels cannot move between event loops, so a new loop gets new ones."""
        loop = asyncio.get_running_loop()
        if not self._channels or self._loop is not loop:
            self._loop = loop
            self._channels = self.settings.channels(grpc.aio, self.address)
            self._stubs = itertools.cycle(map(PredictorStub, self._channels))
        return next(self._stubs)

    async def _call(
        self, stub: Any, messages: Sequence[pb.PredictRequest], timeout_s: float
    ) -> list[pb.PredictResponse]:
        options = self.settings.predict_options(timeout_s)
        try:
            if len(messages) == 1:
                return [await stub.Predict(messages[0], **options)]
            outcomes = await stub.PredictBatch(pb.PredictBatchRequest(requests=messages), **options)
        except grpc.aio.AioRpcError as error:
            raise _failure(error, self.address, messages[0]) from error
        return batch_responses(outcomes, messages, self.address)


class SyncPredictor:
    """Blocking client with the settings and errors of `GrpcPredictor`; thread-safe. It does not use an event
    loop, so it also works in a process that runs one."""

    def __init__(self, address: str, settings: ClientSettings | None = None) -> None:
        self.address = checked_address(address)
        self.settings = settings or ClientSettings()
        self._lock = threading.Lock()
        self._channels: list[grpc.Channel] = []
        self._stubs: Iterator[Any] = iter(())

    def predict(
        self, requests: Sequence[PredictionRequest], *, timeout_s: float | None = None
    ) -> list[Prediction]:
        """Predictions in the order of `requests`; arguments and errors as in `GrpcPredictor.predict`."""
        return predictions(self.responses(requests, timeout_s=timeout_s), self.address)

    def responses(
        self,
        requests: Sequence[PredictionRequest],
        *,
        timeout_s: float | None = None,
        truncated_length: bool = False,
    ) -> list[pb.PredictResponse]:
        """Responses in the order of `requests`; arguments and errors as in `GrpcPredictor.responses`."""
        options = self.settings.predict_options(None if timeout_s is None else checked_timeout(timeout_s))
        messages = [request_message(request, truncated_length=truncated_length) for request in requests]
        results: list[pb.PredictResponse] = []
        with contextlib.ExitStack() as calls:
            pending = []
            for chunk in chunks(messages):
                call = self._stub().PredictBatch.future(pb.PredictBatchRequest(requests=chunk), **options)
                calls.callback(call.cancel)
                pending.append((call, chunk))
            for call, chunk in pending:
                try:
                    outcomes = call.result()
                except grpc.RpcError as error:
                    raise _failure(error, self.address, chunk[0]) from error
                except grpc.FutureCancelledError as error:
                    details = "the client was closed"
                    raise PredictorError.about(chunk[0], "CANCELLED", details, self.address) from error
                results += batch_responses(outcomes, chunk, self.address)
        return results

    def observe(self, observations: Sequence[pb.Observation]) -> list[pb.ObservationError]:
        """Reports true lengths; as `GrpcPredictor.observe`."""
        options = self.settings.call_options()
        try:
            responses = [self._stub().Observe(call, **options) for call in observe_requests(observations)]
        except grpc.RpcError as error:
            raise _failure(error, self.address) from error
        return refused(responses)

    def metadata(self) -> pb.GetMetadataResponse:
        """Artifact, limits and provider of the service."""
        request, options = pb.GetMetadataRequest(), self.settings.call_options()
        try:
            response: pb.GetMetadataResponse = self._stub().GetMetadata(request, **options)
        except grpc.RpcError as error:
            raise _failure(error, self.address) from error
        return response

    def close(self) -> None:
        """Closes the connections; a later call opens new ones."""
        with self._lock:
            channels, self._channels = self._channels, []
        for channel in channels:
            channel.close()

    def __enter__(self) -> SyncPredictor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stub(self) -> Any:
        """Stub of the next channel."""
        with self._lock:
            if not self._channels:
                self._channels = self.settings.channels(grpc, self.address)
                self._stubs = itertools.cycle(map(PredictorStub, self._channels))
            return next(self._stubs)
