"""The prediction server: bind, warm up, serve, reload artifacts, certificates and tokens, drain."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from predictors.hosting.process import bound_socket
from predictors.hosting.tracing import Tracing
from predictors.proto import open_inference_pb2, predictor_v1_pb2
from predictors.runtime import ArtifactRuntime
from predictors.service.artifacts import ArtifactTable, Reopen
from predictors.service.batcher import BatchingSettings
from predictors.service.calls import PredictorCalls
from predictors.service.config import ServeConfig
from predictors.service.errors import ReloadError
from predictors.service.grpc_methods import SERVICE, predictor_handler
from predictors.service.learning import Learner
from predictors.service.metrics import ServiceMetrics
from predictors.service.oip import OIP_SERVICE, open_inference_handler
from predictors.service.security import BearerInterceptor, BearerTokens, Certificates
from scheduler_core.adapters.live_calibration import CalibrationGauges, LiveCalibration
from scheduler_core.errors import InputError, TailcastError

if TYPE_CHECKING:
    from aiohttp.web import AppRunner
    from prometheus_client import Counter

logger = logging.getLogger(__name__)

# Grace period for streams without an end (health watchers) after all predictions.
STREAM_GRACE_S = 0.5


class PredictionServer:
    """Serves artifacts on a gRPC port and optionally an HTTP port.

    Args:
        runtimes: Loaded artifacts with distinct ids, the default first.
        batching: Batching settings.
        config: Addresses, limits and access; `artifact`, `workers` and batching options are ignored.
        reopen, joined, worker_cores: As in `ArtifactTable` and `ServiceThreads`.
        source_state: A value that changes when the files of an artifact do; read every `config.reload_poll_s`, as those of
            certificates and tokens.
        shares_ports: Whether other processes listen on the same ports and share their connections.
        num_listeners: Number of gRPC servers on the port, which share its connections. A single server
            accepts calls one by one with two thread switches each, so that on a busy machine calls wait
            before they can be rejected. Without SO_REUSEPORT (Windows) it is 1.
    """

    def __init__(
        self,
        runtimes: Sequence[ArtifactRuntime],
        batching: BatchingSettings,
        config: ServeConfig,
        *,
        reopen: Reopen | None = None,
        joined: Mapping[str, Sequence[str]] | None = None,
        source_state: Callable[[], object] = lambda: None,
        shares_ports: bool = False,
        worker_cores: Sequence[int] = (),
        num_listeners: int = 4,
    ) -> None:
        self.config = config
        self.batching = batching
        self.http_port: int | None = None
        self.address = ""
        self.metrics = ServiceMetrics()
        self.artifacts = ArtifactTable(
            runtimes,
            batching,
            cache_entries=config.cache_entries,
            max_prompt_chars=config.max_prompt_chars,
            worker_cores=worker_cores,
            metrics=self.metrics,
            reopen=reopen,
            joined=joined,
        )
        tracing = Tracing() if config.traces else None
        learner = None
        if config.learns:
            gauges = CalibrationGauges("tailcast_", self.metrics.registry)
            learner = Learner(LiveCalibration(config.calibration_file, gauges))
        elif config.online_calibration:
            logger.info("online calibration is off, because it needs a single process (workers 1)")
        self._calls = PredictorCalls(self.artifacts, config.max_message_bytes, tracing, learner)
        self._tokens = None if config.token_file is None else BearerTokens(config.token_file)
        self._certificates: Certificates | None = None  # before `start`
        self._source_state = source_state
        self._watching: asyncio.Task[None] | None = None
        self._shares_ports = shares_ports
        self._num_listeners = num_listeners if hasattr(socket, "SO_REUSEPORT") else 1
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # missing in the stubs
        self._servers: list[grpc.aio.Server] = []
        self._gateway: AppRunner | None = None

    async def start(self) -> int:
        """Binds the ports, warms up, then reports SERVING; returns the gRPC port. InputError if a port cannot
        be bound, or a certificate is invalid."""
        port = self.config.port
        if not self._shares_ports:
            bound_socket(self.config.host, port, "port", socket.SO_REUSEADDR).close()
        self._certificates = Certificates(self.config)
        # Clients can connect now; they wait for the first bytes until `server.start`.
        servers = [self._new_server() for _ in range(self._num_listeners)]
        for server in servers:
            port = self._bind(server, port, self._certificates.grpc_credentials())
        await self._report(health_pb2.HealthCheckResponse.NOT_SERVING)
        if self.config.http_port is not None:
            from predictors.service.gateway import start_gateway

            self._gateway = await start_gateway(
                self.config,
                self._calls,
                self.metrics,
                self._tokens,
                tls=self._certificates.http,
                shares_port=self._shares_ports,
            )
            self.http_port = self._gateway.addresses[0][1]
        for server in servers:
            await server.start()
        self._servers = servers
        await self.artifacts.start()
        await self._report(health_pb2.HealthCheckResponse.SERVING)
        if self.config.reload_poll_s:
            self._watching = asyncio.create_task(self._watch())
        http = "" if self.http_port is None else f", http on {self.config.host}:{self.http_port}"
        self.address = f"{self.config.host}:{port}{http} with {self.batching}"
        return port

    @property
    def num_in_flight(self) -> int:
        """Number of predictions in flight."""
        return self.artifacts.num_in_flight

    async def _watch(self) -> None:
        """Reloads artifacts, certificates and tokens whenever their files have changed."""
        previous = self._source_state()
        while True:
            await asyncio.sleep(self.config.reload_poll_s)
            for name, files, reloads in self._access_files():
                if files.have_changed:
                    self._read_again(name, files, reloads)
            state = self._source_state()
            if state != previous:
                previous = state
                await self._reload_artifacts()

    async def reload(self) -> None:
        """Reads certificates and tokens again, and replaces every artifact whose files have changed; what fails is logged, and
        the old one stays."""
        for access in self._access_files():
            self._read_again(*access)
        await self._reload_artifacts()

    def _access_files(self) -> Iterator[tuple[str, Certificates | BearerTokens, Counter]]:
        """What decides who may call, with its name and the counter of its reloads."""
        if self._certificates is not None and self._certificates.http is not None:
            yield "certificates", self._certificates, self.metrics.certificate_reloads
        if self._tokens is not None:
            yield "tokens", self._tokens, self.metrics.token_reloads

    @staticmethod
    def _read_again(name: str, files: Certificates | BearerTokens, reloads: Counter) -> None:
        """Reads files again; if they are invalid, what was read before stays in use."""
        outcome = "refused"
        try:
            files.reload()
            outcome = "taken"
            logger.info("%s: read again, for new connections and calls", name)
        except (TailcastError, OSError) as error:
            logger.error("%s: rejected the new files, kept the old ones: %s", name, error)
        reloads.labels(outcome).inc()

    async def _reload_artifacts(self) -> None:
        for name in self.artifacts.names:
            try:
                if not await self.artifacts.reload(name):
                    logger.info("artifact %s: no change", name)
            except ReloadError as error:
                logger.error("%s", error)

    async def stop(self) -> None:
        """Rejects new requests, finishes those in flight (up to `drain_timeout_s`), then closes."""
        if self._watching is not None:
            self._watching.cancel()
        if not self._servers:
            if self._gateway is not None:
                await self._gateway.cleanup()
            return
        await self._health.enter_graceful_shutdown()
        self.artifacts.is_ending = True
        await asyncio.sleep(self.config.drain_delay_s)
        draining = asyncio.create_task(self.artifacts.close())
        # During gRPC's grace period new calls would get CANCELLED. Until all predictions are finished (or the
        # timeout), the pipeline returns UNAVAILABLE, which clients retry.
        await asyncio.wait({draining}, timeout=self.config.drain_timeout_s)
        if self._gateway is not None:
            await self._gateway.cleanup()
        await asyncio.gather(*(server.stop(STREAM_GRACE_S) for server in self._servers))
        await draining
        self._servers = []
        if self._calls.learner is not None:
            await asyncio.to_thread(self._calls.learner.close)

    def _new_server(self) -> grpc.aio.Server:
        """An unbound server with all methods."""
        server = grpc.aio.server(
            interceptors=[] if self._tokens is None else [BearerInterceptor(self._tokens)],
            options=[
                ("grpc.so_reuseport", int(self._shares_ports or self._num_listeners > 1)),
                ("grpc.max_receive_message_length", self.config.max_message_bytes),
                ("grpc.max_send_message_length", self.config.max_message_bytes),
                # Clients may send a keepalive ping every ten seconds.
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
                ("grpc.keepalive_permit_without_calls", 1),
            ],
        )
        server.add_generic_rpc_handlers((predictor_handler(self._calls), open_inference_handler(self._calls)))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (SERVICE, OIP_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server, _descriptions())
        return server

    async def _report(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for service in ("", SERVICE, OIP_SERVICE, *self.artifacts.names):
            await self._health.set(service, status)

    def _bind(self, server: grpc.aio.Server, port: int, tls: grpc.ServerCredentials | None) -> int:
        host = self.config.host
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            return server.add_insecure_port(address) if tls is None else server.add_secure_port(address, tls)
        except RuntimeError as error:
            raise InputError("port", f"{host}:{port}", "an address that can be bound") from error


def _descriptions() -> DescriptorPool:
    """One pool with the messages of all services, for reflection."""
    pool = DescriptorPool()
    for file in (predictor_v1_pb2, open_inference_pb2, health_pb2, reflection_pb2):
        pool.AddSerializedFile(file.DESCRIPTOR.serialized_pb)
    return pool
