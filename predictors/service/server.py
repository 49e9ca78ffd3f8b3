"""The server: bind, warm up, serve, replace artifacts, drain."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from predictors.proto import open_inference_pb2, predictor_v1_pb2
from predictors.service.artifacts import ArtifactTable, Reopen
from predictors.service.batcher import BatchingSettings, Clock
from predictors.service.calls import PredictorCalls
from predictors.service.errors import ReloadError
from predictors.service.grpc_methods import SERVICE, PredictorMethods
from predictors.service.metrics import ServiceMetrics
from predictors.service.oip import OIP_SERVICE, OpenInferenceMethods
from predictors.service.pipeline import PredictionPipeline, Runtime
from predictors.service.security import BearerInterceptor, BearerTokens, TlsFiles
from predictors.service.tracing import Tracing
from scheduler_core.errors import InputError, MissingExtraError

if TYPE_CHECKING:
    from predictors.service.gateway import HttpGateway

__all__ = ["OIP_SERVICE", "SERVICE", "PredictionServer", "ServerSettings"]

logger = logging.getLogger(__name__)

# For streams that never end by themselves (health watchers) once all predictions are answered.
STREAM_GRACE_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Addresses and limits.

    Attributes:
        host: Address to listen on.
        port: gRPC port to listen on; 0 takes a free one.
        http_port: HTTP port to listen on; 0 takes a free one; None: no HTTP.
        reuse_port: Other processes may listen on the same ports and share their connections.
        max_message_bytes: Largest message in and out; larger ones are refused with RESOURCE_EXHAUSTED. Parsing takes up
            to 10 ms per MiB, in which nothing else runs (`benchmarks/hostile_bodies.py`).
        max_batch_requests: Maximum number of requests in one PredictBatch or ModelInfer.
        max_prompt_chars: Longest prompt; None: any that fits into a message.
        max_streams: Maximum number of PredictStream calls at the same time.
        max_stream_requests: Requests of one stream in flight.
        cache_entries: Size of each artifact's cache of predictions; 0: no cache.
        drain_delay_s: How long `stop` goes on to take requests while health reports NOT_SERVING, so that load balancers
            look away first.
        drain_timeout_s: How long `stop` then waits for requests in flight.
        tls: Certificates; None: no TLS.
        tokens: Valid bearer tokens; None: no authentication.
        worker_cores: Cores of the model threads, one each; empty: the system places them.
        num_listeners: gRPC servers on the port, which share its connections. One takes in one call after the other, with
            two changes of thread for each, so that on a busy machine calls wait in the library before they can be refused
            (`benchmarks/refusals.py`). Where ports cannot be shared (Windows) there is one.
    """

    host: str = "127.0.0.1"
    port: int = 0
    http_port: int | None = None
    reuse_port: bool = False
    max_message_bytes: int = 4 * 2**20
    max_batch_requests: int = 256
    max_prompt_chars: int | None = None
    max_streams: int = 256
    max_stream_requests: int = 128
    cache_entries: int = 0
    drain_delay_s: float = 0.0
    drain_timeout_s: float = 30.0
    tls: TlsFiles | None = None
    tokens: BearerTokens | None = None
    worker_cores: tuple[int, ...] = ()
    num_listeners: int = 4

    def __post_init__(self) -> None:
        if not self.host:
            raise InputError("host", self.host, "a host name or address")
        for name in ("port", "http_port"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 65535:
                raise InputError(name, value, "0 to 65535; 0 takes a free port")
        if not 1024 <= self.max_message_bytes < 2**31:
            raise InputError("max_message_bytes", self.max_message_bytes, "1024 to 2147483647")
        for name in (
            "max_batch_requests",
            "max_prompt_chars",
            "max_streams",
            "max_stream_requests",
            "num_listeners",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(name, value, "an integer >= 1")
        if self.cache_entries < 0:
            raise InputError("cache_entries", self.cache_entries, "an integer >= 0")
        for name in ("drain_delay_s", "drain_timeout_s"):
            if not 0 <= getattr(self, name) <= 86_400:
                raise InputError(name, getattr(self, name), "0 to 86400 seconds")


class PredictionServer:
    """Artifacts behind one gRPC port and, on request, one HTTP port.

    Args:
        runtimes: The loaded artifact, or several of different ids, the default first.
        batching: How requests are grouped.
        settings: Addresses and limits.
        clock: Source of time of the batchers; default: the event loop's.
        reopen: Loads the artifact of an id again, for `reload`; called in a thread.
        metrics: Counters, exposed on the HTTP port.
        tracing: Records spans; None: no spans.
    """

    def __init__(
        self,
        runtimes: Runtime | Sequence[Runtime],
        batching: BatchingSettings,
        settings: ServerSettings,
        clock: Clock | None = None,
        *,
        reopen: Reopen | None = None,
        metrics: ServiceMetrics | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self.settings = settings
        self.http_port: int | None = None
        self._metrics = metrics or ServiceMetrics()
        self.artifacts = ArtifactTable(
            runtimes if isinstance(runtimes, Sequence) else [runtimes],
            batching,
            clock=clock,
            cache_entries=settings.cache_entries,
            max_prompt_chars=settings.max_prompt_chars,
            worker_cores=settings.worker_cores,
            metrics=self._metrics,
            reopen=reopen,
        )
        self._calls = PredictorCalls(
            self.artifacts,
            max_batch_requests=settings.max_batch_requests,
            max_message_bytes=settings.max_message_bytes,
            max_prompt_chars=settings.max_prompt_chars,
            tracing=tracing,
        )
        self._methods = PredictorMethods(
            self._calls, max_streams=settings.max_streams, max_stream_requests=settings.max_stream_requests
        )
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # missing in the stubs
        self._servers: list[grpc.aio.Server] = []
        self._gateway: HttpGateway | None = None

    @property
    def pipeline(self) -> PredictionPipeline:
        """The default artifact's pipeline."""
        return self.artifacts.default.pipeline

    async def start(self) -> int:
        """Binds, answers, warms up, then reports SERVING; returns the gRPC port.

        Raises:
            InputError: A port is in use or may not be bound, or a certificate cannot be read.
        """
        settings = self.settings
        if not settings.reuse_port:
            probe_port(settings.host, settings.port)
        if settings.http_port is not None:
            self._gateway = self._new_gateway()
        # From here on clients can connect; until `server.start` they wait for the first bytes.
        servers = [self._new_server() for _ in range(self._num_listeners)]
        port = settings.port
        for server in servers:
            port = self._bind(server, port)
        await self._report(health_pb2.HealthCheckResponse.NOT_SERVING)
        if self._gateway is not None and settings.http_port is not None:
            tls = None if settings.tls is None else settings.tls.http_context()
            self.http_port = await self._gateway.start(
                settings.host, settings.http_port, tls, reuse_port=settings.reuse_port
            )
        for server in servers:
            await server.start()
        self._servers = servers
        await self.artifacts.start()
        await self._report(health_pb2.HealthCheckResponse.SERVING)
        return port

    async def reload(self) -> None:
        """Replaces every artifact whose files have changed; a refused one stays as it is, with its reason in the log."""
        for name in self.artifacts.names:
            try:
                if not await self.artifacts.reload(name):
                    logger.info("artifact %s: nothing has changed", name)
            except ReloadError as error:
                logger.error("%s", error)

    async def stop(self) -> None:
        """Refuses new requests, answers those in flight (for `drain_timeout_s`), then closes."""
        if not self._servers:
            if self._gateway is not None:
                await self._gateway.stop()
            return
        await self._health.enter_graceful_shutdown()
        self.artifacts.announce_end()
        if self.settings.drain_delay_s:
            await asyncio.sleep(self.settings.drain_delay_s)
        self.artifacts.refuse_new()
        self._methods.end_streams()
        draining = asyncio.create_task(self.artifacts.close())
        # gRPC's own grace period would answer new calls with CANCELLED; until all predictions are made (or the time is up)
        # the pipeline answers them with UNAVAILABLE, which clients retry.
        await asyncio.wait({draining}, timeout=self.settings.drain_timeout_s)
        if self._gateway is not None:
            await self._gateway.stop()
        await asyncio.gather(*(server.stop(STREAM_GRACE_S) for server in self._servers))
        await draining
        self._servers = []

    @property
    def _num_listeners(self) -> int:
        return self.settings.num_listeners if hasattr(socket, "SO_REUSEPORT") else 1

    def _new_server(self) -> grpc.aio.Server:
        """A server with all methods, not bound."""
        settings = self.settings
        shares_port = settings.reuse_port or self._num_listeners > 1
        server = grpc.aio.server(
            interceptors=[] if settings.tokens is None else [BearerInterceptor(settings.tokens)],
            options=[
                ("grpc.so_reuseport", int(shares_port)),
                ("grpc.max_receive_message_length", settings.max_message_bytes),
                ("grpc.max_send_message_length", settings.max_message_bytes),
                # Clients may ping their connection every ten seconds.
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
                ("grpc.keepalive_permit_without_calls", 1),
            ],
        )
        server.add_generic_rpc_handlers(
            (self._methods.handler(), OpenInferenceMethods(self._calls).handler())
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (SERVICE, OIP_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server, _descriptions())
        return server

    def _new_gateway(self) -> HttpGateway:
        try:
            from predictors.service.gateway import HttpGateway
        except ModuleNotFoundError as error:
            raise MissingExtraError(error.name or "aiohttp", "serve") from error
        limit = self.settings.max_message_bytes
        return HttpGateway(self._calls, self._metrics, max_message_bytes=limit, tokens=self.settings.tokens)

    async def _report(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for service in ("", SERVICE, OIP_SERVICE, *self.artifacts.names):
            await self._health.set(service, status)

    def _bind(self, server: grpc.aio.Server, port: int) -> int:
        host = self.settings.host
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        tls = self.settings.tls
        try:
            if tls is None:
                return server.add_insecure_port(address)
            return server.add_secure_port(address, tls.grpc_credentials())
        except RuntimeError as error:
            raise InputError("port", f"{host}:{port}", "an address that can be bound") from error


def _descriptions() -> DescriptorPool:
    """The messages of all services in one pool, for reflection."""
    pool = DescriptorPool()
    for file in (predictor_v1_pb2, open_inference_pb2, health_pb2, reflection_pb2):
        pool.AddSerializedFile(file.DESCRIPTOR.serialized_pb)
    return pool


def probe_port(host: str, port: int, field: str = "port") -> None:
    """Binds and releases a port: gRPC would hide the reason of a failure and write to stderr by itself.

    Raises:
        InputError: It cannot be bound.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise InputError(
            field, f"{host}:{port}", f"an address that can be bound ({error.strerror})"
        ) from error
