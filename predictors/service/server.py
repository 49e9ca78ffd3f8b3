"""The gRPC server's life: bind, warm up, serve, drain."""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from predictors.proto import predictor_v1_pb2, predictor_v1_pb2_grpc
from predictors.service.clock import Clock
from predictors.service.grouping import BatchingSettings
from predictors.service.pipeline import PredictionPipeline, Runtime
from predictors.service.servicer import PredictorServicer
from scheduler_core.errors import InputError

logger = logging.getLogger(__name__)

SERVICE = predictor_v1_pb2.DESCRIPTOR.services_by_name["Predictor"].full_name
LAST_WORDS_S = (
    0.5  # for streams that never end by themselves (health watchers) once all predictions are answered
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Where and within what limits the server answers.

    Attributes:
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        max_message_bytes: Largest message in and out; larger ones are refused with RESOURCE_EXHAUSTED.
        max_batch_requests: Most requests in one PredictBatch.
        drain_timeout_s: How long `stop` waits for requests that are inside.
    """

    host: str = "127.0.0.1"
    port: int = 0
    max_message_bytes: int = 16 * 2**20
    max_batch_requests: int = 256
    drain_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if not self.host:
            raise InputError("host", self.host, "a host name or address")
        if not 0 <= self.port <= 65535:
            raise InputError("port", self.port, "0 to 65535; 0 takes a free port")
        if not 1024 <= self.max_message_bytes < 2**31:
            raise InputError("max_message_bytes", self.max_message_bytes, "1024 to 2147483647")
        if self.max_batch_requests < 1:
            raise InputError("max_batch_requests", self.max_batch_requests, "an integer >= 1")
        if not 0 <= self.drain_timeout_s <= 86_400:
            raise InputError("drain_timeout_s", self.drain_timeout_s, "0 to 86400 seconds")


class PredictionServer:
    """One artifact behind one port.

    Args:
        runtime: The loaded artifact.
        batching: How requests are grouped.
        settings: Where to listen, and limits.
        clock: Source of time of the batcher; default: the event loop's.
    """

    def __init__(
        self,
        runtime: Runtime,
        batching: BatchingSettings,
        settings: ServerSettings,
        clock: Clock | None = None,
    ) -> None:
        self.settings = settings
        self.pipeline = PredictionPipeline(runtime, batching, clock)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # missing in the stubs
        self._server: grpc.aio.Server | None = None

    async def start(self) -> int:
        """Binds, starts to answer, warms up, then reports SERVING; returns the port.

        Raises:
            InputError: The port is in use or may not be bound.
        """
        limit = self.settings.max_message_bytes
        server = grpc.aio.server(
            options=[
                # Two servers on one port would silently share its requests.
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", limit),
                ("grpc.max_send_message_length", limit),
            ]
        )
        servicer = PredictorServicer(
            self.pipeline, max_batch_requests=self.settings.max_batch_requests, max_message_bytes=limit
        )
        predictor_v1_pb2_grpc.add_PredictorServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        port = self._bind(server)
        await self._report(health_pb2.HealthCheckResponse.NOT_SERVING)
        await server.start()
        self._server = server
        await self.pipeline.start()
        await self._report(health_pb2.HealthCheckResponse.SERVING)
        return port

    async def stop(self) -> None:
        """Refuses new requests, answers those inside (for `drain_timeout_s`), then closes."""
        if self._server is None:
            return
        self.pipeline.refuse_new()
        await self._health.enter_graceful_shutdown()
        draining = asyncio.create_task(self.pipeline.close())
        # gRPC's own grace period would answer newcomers with CANCELLED; until all predictions are made (or the time
        # is up) the pipeline answers them with UNAVAILABLE, which clients know how to take.
        await asyncio.wait({draining}, timeout=self.settings.drain_timeout_s)
        await self._server.stop(LAST_WORDS_S)
        await draining
        self._server = None

    async def _report(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for service in ("", SERVICE):
            await self._health.set(service, status)

    def _bind(self, server: grpc.aio.Server) -> int:
        host, port = self.settings.host, self.settings.port
        _probe(host, port)
        try:
            return server.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        except RuntimeError as error:
            raise InputError("port", f"{host}:{port}", "an address that can be bound") from error


def _probe(host: str, port: int) -> None:
    """Binds and lets go again: gRPC would hide the reason of a failure and write to stderr by itself."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise InputError(
            "port", f"{host}:{port}", f"an address that can be bound ({error.strerror})"
        ) from error
