"""gRPC clients: asynchronous for schedulers and simulators, blocking for programs without an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import math
import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import grpc

from predictors.client.access import AccessFiles, TlsSettings, is_loopback, is_token, tls_problem
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
from scheduler_core.prediction.predictor import PredictionRequest, PredictorAddress
from scheduler_core.prediction.service_access import ServiceAccess
from scheduler_core.ranges import INTEGERS, check_ranges

logger = logging.getLogger(__name__)

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
#: Maximum seconds for calls over a connection with replaced certificates, and seconds between two log lines about a problem.
RETIRED_S, REPORT_S = 600.0, 60.0
#: Names of the files in `ServiceAccess` by those in errors of `ClientSettings`.
OPTIONS = {
    "tls ca": "predictor_ca",
    "tls certificate": "predictor_cert",
    "tls key": "predictor_key",
    "token_file": "predictor_token_file",
}


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
        token: Bearer token sent with every call; None: no token. Without encryption only to this machine.
        token_file: File that has the token, on a line of its own.
    """

    timeout_s: float = 10.0
    num_connections: int = 1
    wait_for_ready: bool = False
    max_attempts: int = 5
    tls: TlsSettings | None = None
    token: str | None = field(default=None, repr=False)
    token_file: str | None = None

    def __post_init__(self) -> None:
        checked_timeout(self.timeout_s)
        check_ranges(self, max_attempts=(1, 5), num_connections=(1, INTEGERS))
        if self.token is not None and not is_token(self.token):
            raise InputError("token", "...", "printable ASCII characters, at least one")
        if self.token is not None and self.token_file is not None:
            raise InputError("token_file", self.token_file, "unset together with token")

    @classmethod
    def of(cls, address: PredictorAddress, access: ServiceAccess) -> Self:
        """The settings for a service at grpc:// or grpcs://. InputError if `access` does not fit to it."""
        token_file = access.predictor_token_file
        if address.scheme == "grpcs":
            names = ("predictor_ca", "predictor_cert", "predictor_key")
            ca, certificate, key = (getattr(access, name) for name in names)
            if (certificate is None) != (key is None):
                raise InputError("predictor_cert, predictor_key", certificate or key, "both or none of them")
            tls = TlsSettings(ca=ca, certificate=certificate, key=key)
            return cls(tls=tls, token_file=token_file)
        for name in ("predictor_ca", "predictor_cert", "predictor_key"):
            if (file := getattr(access, name)) is not None:
                allowed = f"unset with grpc://{address.target}, which has no TLS; with grpcs:// a file"
                raise InputError(name, file, allowed)
        return cls(token_file=token_file)

    def files(self, address: str) -> AccessFiles:
        """Reads the files for connections to `address`. InputError if one is missing or invalid, or if a token would be sent
        to another machine without encryption."""
        name = "token" if self.token_file is None else "token_file"
        has_token = (self.token, self.token_file) != (None, None)
        if has_token and self.tls is None and not is_loopback(address):
            allowed = f"unset without TLS, unless the service is on this machine; {address} is not"
            raise InputError(name, self.token_file or "...", allowed)
        return AccessFiles(self.tls, self.token, self.token_file, address)

    def call_options(self, timeout_s: float | None = None, token: str | None = None) -> dict[str, Any]:
        """Deadline (default: `self.timeout_s`) and metadata of a call; `token` (default: `self.token`)."""
        token = token or self.token
        metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        return {"timeout": timeout_s or self.timeout_s, "metadata": metadata}

    def predict_options(self, timeout_s: float | None = None, token: str | None = None) -> dict[str, Any]:
        """As `call_options`, with the trace context of the caller's span if it uses OpenTelemetry."""
        options = self.call_options(timeout_s, token)
        headers = trace_headers().items()
        metadata = [(name, value) for name, value in headers if len(value) <= MAX_TRACE_CHARS]
        return options | {"metadata": (*options["metadata"], *metadata)}

    def channels(self, package: Any, address: str, files: AccessFiles) -> list[Any]:
        """New channels; `package` is `grpc` or `grpc.aio`."""
        options, count = self._channel_options(), range(self.num_connections)
        credentials = files.credentials()
        if credentials is None:
            return [package.insecure_channel(address, options=options) for _ in count]
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


@contextlib.contextmanager
def options_named() -> Iterator[None]:
    """Errors about files have the names of `ServiceAccess` instead of those of `ClientSettings`."""
    try:
        yield
    except InputError as error:
        if error.field not in OPTIONS:
            raise
        raise InputError(OPTIONS[error.field], error.value, error.allowed) from error


class GrpcPredictor(AsyncClient):
    """Asynchronous client for "host:port" or "unix:PATH" (else InputError); connects at the first call.

    The event loop is never blocked by connecting, name resolution, waiting or retries.
    """

    def __init__(self, address: str, settings: ClientSettings | None = None) -> None:
        self.address = checked_address(address)
        self.settings = settings or ClientSettings()
        self.timeout_s = self.settings.timeout_s
        self._files = self.settings.files(address)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._channels: list[grpc.aio.Channel] = []
        #: Channels with replaced certificates, until their calls have ended.
        self._retired: dict[asyncio.Task[None], grpc.aio.Channel] = {}
        self._stubs: Iterator[Any] = iter(())
        self._problem: asyncio.Task[str] | None = None
        self._diagnosed_s = 0.0
        self._reported = ("", -math.inf)

    @classmethod
    def of(cls, address: PredictorAddress, access: ServiceAccess) -> Self:
        """The client of a service at grpc:// or grpcs://, with the files of `access`; InputError names its options."""
        with options_named():
            return cls(address.target, ClientSettings.of(address, access))

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
        try:
            responses = [
                await self._stub().Observe(call, **self._options()) for call in observe_requests(observations)
            ]
        except grpc.aio.AioRpcError as error:
            raise await self._failure(error) from error
        return refused(responses)

    async def metadata(self) -> pb.GetMetadataResponse:
        try:
            stub: Any = self._stub()
            response: pb.GetMetadataResponse = await stub.GetMetadata(
                pb.GetMetadataRequest(), **self._options()
            )
        except grpc.aio.AioRpcError as error:
            raise await self._failure(error) from error
        return response

    async def close(self) -> None:
        channels, self._channels = self._channels, []
        retired, self._retired = self._retired, {}
        problem, self._problem = self._problem, None
        if asyncio.get_running_loop() is not self._loop:
            return  # the channels belong to another event loop, which has ended
        ending: list[asyncio.Task[Any]] = [*retired, *([] if problem is None else [problem])]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        for channel in (*channels, *retired.values()):
            await channel.close(None)

    def _options(self) -> dict[str, Any]:
        return self.settings.call_options(token=self._files.token)

    def _stub(self) -> Any:
        """Stub of the next channel; channels cannot move between event loops, so a new loop gets new ones, and they keep their
        certificates, so that new files get new ones too."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._channels, self._retired, self._problem = loop, [], {}, None
        if self._files.refresh():
            for channel in self._channels:
                task = loop.create_task(channel.close(RETIRED_S))
                self._retired[task] = channel
                task.add_done_callback(lambda task: self._retired.pop(task, None))
            self._channels, self._problem = [], None
        if not self._channels:
            self._channels = self.settings.channels(grpc.aio, self.address, self._files)
            self._stubs = itertools.cycle(map(PredictorStub, self._channels))
        return next(self._stubs)

    async def _call(
        self, stub: Any, messages: Sequence[pb.PredictRequest], timeout_s: float
    ) -> list[pb.PredictResponse]:
        options = self.settings.predict_options(timeout_s, self._files.token)
        try:
            if len(messages) == 1:
                responses = [await stub.Predict(messages[0], **options)]
            else:
                outcomes = await stub.PredictBatch(pb.PredictBatchRequest(requests=messages), **options)
                responses = batch_responses(outcomes, messages, self.address)
        except grpc.aio.AioRpcError as error:
            raise await self._failure(error, messages[0]) from error
        except asyncio.CancelledError:  # the caller has a deadline of its own
            self._diagnosis()
            raise
        self._problem = None
        return responses

    async def _failure(self, error: Any, message: pb.PredictRequest | None = None) -> PredictorError:
        """The error of a failed call about `message`, if any. Logs why there is no TLS connection, or that the token is refused."""
        code, details = error.code().name, error.details()
        if code == "UNAUTHENTICATED":
            self._report(f"{details}; the token is that of predictor_token_file")
        diagnosis = self._diagnosis() if code in ("UNAVAILABLE", "DEADLINE_EXCEEDED") else None
        if diagnosis is not None and code == "UNAVAILABLE":
            details = await asyncio.shield(diagnosis) or details
        return PredictorError.about(message, code, details, self.address)

    def _diagnosis(self) -> asyncio.Task[str] | None:
        """Finds out what is wrong with TLS, once until a call succeeds or a minute has passed; None if there is a connection,
        or no TLS."""
        context = self._files.context
        if context is None or self.is_connected:
            return None
        now = time.monotonic()
        if self._problem is None or now - self._diagnosed_s > REPORT_S:
            self._diagnosed_s = now

            async def find() -> str:
                problem = await asyncio.to_thread(tls_problem, self.address, context)
                if problem:
                    self._report(problem)
                return problem

            self._problem = asyncio.get_running_loop().create_task(find())
        return self._problem

    def _report(self, problem: str) -> None:
        """Logs why predictions fail, once a minute."""
        (reported, reported_s), now = self._reported, time.monotonic()
        if problem != reported or now - reported_s > REPORT_S:
            self._reported = (problem, now)
            logger.warning("predictor %s: %s", self.address, problem)


class SyncPredictor:
    """Blocking client with the settings and errors of `GrpcPredictor`; thread-safe. It does not use an event
    loop, so it also works in a process that runs one."""

    def __init__(self, address: str, settings: ClientSettings | None = None) -> None:
        self.address = checked_address(address)
        self.settings = settings or ClientSettings()
        self._files = self.settings.files(address)
        self._lock = threading.Lock()
        self._channels: list[grpc.Channel] = []
        #: Channels with replaced certificates, whose calls may not have ended.
        self._retired: list[grpc.Channel] = []
        self._stubs: Iterator[Any] = iter(())

    @classmethod
    def of(cls, address: PredictorAddress, access: ServiceAccess) -> Self:
        """As `GrpcPredictor.of`."""
        with options_named():
            return cls(address.target, ClientSettings.of(address, access))

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
        timeout_s = None if timeout_s is None else checked_timeout(timeout_s)
        messages = [request_message(request, truncated_length=truncated_length) for request in requests]
        results: list[pb.PredictResponse] = []
        with contextlib.ExitStack() as calls:
            pending = []
            for chunk in chunks(messages):
                stub = self._stub()
                options = self.settings.predict_options(timeout_s, self._files.token)
                call = stub.PredictBatch.future(pb.PredictBatchRequest(requests=chunk), **options)
                calls.callback(call.cancel)
                pending.append((call, chunk))
            for call, chunk in pending:
                try:
                    outcomes = call.result()
                except grpc.RpcError as error:
                    raise self._failure(error, chunk[0]) from error
                except grpc.FutureCancelledError as error:
                    details = "the client was closed"
                    raise PredictorError.about(chunk[0], "CANCELLED", details, self.address) from error
                results += batch_responses(outcomes, chunk, self.address)
        return results

    def observe(self, observations: Sequence[pb.Observation]) -> list[pb.ObservationError]:
        """Reports true lengths; as `GrpcPredictor.observe`."""
        try:
            responses = [
                self._stub().Observe(call, **self._options()) for call in observe_requests(observations)
            ]
        except grpc.RpcError as error:
            raise self._failure(error) from error
        return refused(responses)

    def metadata(self) -> pb.GetMetadataResponse:
        """Artifact, limits and provider of the service."""
        try:
            stub = self._stub()
            response: pb.GetMetadataResponse = stub.GetMetadata(pb.GetMetadataRequest(), **self._options())
        except grpc.RpcError as error:
            raise self._failure(error) from error
        return response

    def close(self) -> None:
        """Closes the connections; a later call opens new ones."""
        with self._lock:
            channels, self._channels, self._retired = [*self._channels, *self._retired], [], []
        for channel in channels:
            channel.close()

    def __enter__(self) -> SyncPredictor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _options(self) -> dict[str, Any]:
        return self.settings.call_options(token=self._files.token)

    def _failure(self, error: Any, message: pb.PredictRequest | None = None) -> PredictorError:
        """The error of a failed call about `message`, if any, with the reason why there is no TLS connection."""
        code, details = error.code().name, error.details()
        if code == "UNAVAILABLE" and self._files.context is not None:
            details = tls_problem(self.address, self._files.context) or details
        return PredictorError.about(message, code, details, self.address)

    def _stub(self) -> Any:
        """Stub of the next channel; new certificates get new channels."""
        with self._lock:
            if self._files.refresh():
                for channel in self._retired:  # since the certificates before
                    channel.close()
                self._channels, self._retired = [], self._channels
            if not self._channels:
                self._channels = self.settings.channels(grpc, self.address, self._files)
                self._stubs = itertools.cycle(map(PredictorStub, self._channels))
            return next(self._stubs)
