"""Command `serve-predictor`: artifacts behind a gRPC port and, on request, an HTTP port, until SIGTERM."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from predictors.edge import run, set_up_logs
from scheduler_core.command import run_command
from scheduler_core.errors import InputError, MissingExtraError
from scheduler_core.files import atomic_file, remove_output, writable_target
from scheduler_core.threads import check_threads

if TYPE_CHECKING:
    from predictors.service.artifacts import ArtifactSource
    from predictors.service.batcher import BatchingSettings
    from predictors.service.server import PredictionServer

logger = logging.getLogger(__name__)

STOP_GRACE_S = 2.0  # for a worker to close its ports and end, after all it may wait for


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Serves the predictions of artifacts over gRPC and, on request, HTTP, until SIGTERM or Ctrl-C. SIGHUP reloads changed artifacts."""

    INPUTS = (
        "artifact",
        "more_artifacts",
        "tls_cert",
        "tls_key",
        "tls_client_ca",
        "public_key",
        "token_file",
    )
    OUTPUTS = ("port_file",)

    artifact: str
    """Artifact folder, as export-onnx writes it; the default of requests that name no artifact."""
    more_artifacts: list[str] = field(default_factory=list)
    """Further artifact folders to serve beside it; requests name them by their artifact_id."""
    port: int = 50051
    """gRPC port to listen on; 0 takes a free one."""
    http_port: int | None = None
    """HTTP port for JSON, OpenAPI, metrics and probes; 0 takes a free one; default: no HTTP."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all IPv4 interfaces."""
    port_file: str | None = None
    """File for the port number, written once the service is ready; removed before the start and at the end."""
    provider: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; auto takes CUDA where it works, else the CPU; cuda fails where it does not work."""
    max_batch: int | None = None
    """Maximum number of requests in one model call; default: 4 on a CPU, 32 on a GPU."""
    max_wait_s: float | None = None
    """Seconds the oldest request waits for a full batch while a worker is free; default: 0 on a CPU, 0.003 on a GPU."""
    max_padding: float | None = None
    """Largest ratio of padded to real tokens in a batch; default: 1.1 on a CPU, no limit on a GPU."""
    max_padded_tokens: int | None = None
    """Largest product of a batch's size and its longest prompt's tokens, where it holds more than one; default: 256 on a CPU, 16384 on a GPU."""
    order: Literal["length", "arrival"] = "length"
    """Which requests share a batch: the oldest and its nearest neighbours in length, or simply the oldest ones."""
    max_queue: int = 512
    """Maximum number of requests in flight; further ones are refused at once with RESOURCE_EXHAUSTED."""
    num_workers: int | None = None
    """Model calls that run at the same time; default: one per core on a CPU, 1 on a GPU."""
    threads_per_worker: int = 1
    """Threads of one model call on a CPU."""
    max_message_mib: int = 4
    """Largest gRPC message or HTTP body in MiB; parsing takes up to 10 ms per MiB, in which nothing else runs."""
    max_prompt_chars: int | None = None
    """Longest prompt in characters; longer ones are refused; default: what fits into a message."""
    max_streams: int = 256
    """Maximum number of streams at the same time; further ones are refused with RESOURCE_EXHAUSTED."""
    cache_entries: int = 0
    """Size of each artifact's cache of predictions, by a hash of the prompt; 0: no cache."""
    workers: int = 1
    """Processes that share the ports; one that dies is started again."""
    tls_cert: str | None = None
    """PEM file with the server's certificate; with tls_key both ports speak TLS."""
    tls_key: str | None = None
    """PEM file with the certificate's private key."""
    tls_client_ca: str | None = None
    """PEM file with the authority that signs the clients' certificates; default: clients need none."""
    public_key: str | None = None
    """PEM file of an Ed25519 public key: artifacts must be signed with it, at the start and at every reload; default: signatures are ignored."""
    token_file: str | None = None
    """File with the valid bearer tokens, one a line; default: no authentication."""
    reload_poll_s: float = 0.0
    """Seconds between checks for a new version of an artifact; 0: only at SIGHUP."""
    log_format: Literal["text", "json"] = "text"
    """Log lines for people, or one JSON object a line."""
    traces: bool = False
    """Exports OpenTelemetry traces, configured by the OTEL_* environment variables."""
    drain_delay_s: float = 0.0
    """Seconds of service after SIGTERM, while health reports NOT_SERVING, so that load balancers look away first."""
    drain_timeout_s: float = 30.0
    """Seconds after that for the requests in flight; with workers > 1 a worker that still runs 2.5 s later is killed."""

    def __post_init__(self) -> None:
        if not self.artifact:
            raise InputError("artifact", self.artifact, "the path of an artifact folder")
        for name in ("port", "http_port"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 65535:
                raise InputError(name, value, "0 to 65535; 0 takes a free port")
        if not 1 <= self.max_message_mib <= 1024:
            raise InputError("max_message_mib", self.max_message_mib, "1 to 1024")
        check_threads("num_workers", self.num_workers)
        check_threads("threads_per_worker", self.threads_per_worker)
        if not 1 <= self.workers <= 256:
            raise InputError("workers", self.workers, "1 to 256")
        if self.workers > 1 and not hasattr(socket, "SO_REUSEPORT"):
            raise InputError("workers", self.workers, "1: this system cannot share a port")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InputError("tls_cert, tls_key", self.tls_cert or self.tls_key, "both or none of them")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise InputError("tls_client_ca", self.tls_client_ca, "a file beside tls_cert and tls_key")
        if not 0 <= self.reload_poll_s <= 86_400:
            raise InputError("reload_poll_s", self.reload_poll_s, "0 to 86400 seconds")


def main(args: Sequence[str] | None = None) -> int:
    """Console script `serve-predictor`; returns the exit code."""
    return run_command(
        "serve-predictor", ServeConfig, serve, positionals=("artifact",), extra="serve", args=args
    )


def serve(config: ServeConfig) -> int:
    """Loads the artifacts and serves them until SIGTERM or SIGINT; requests in flight are answered first."""
    port_file = _PortFile(config.port_file)
    _check_packages()
    set_up_logs(config.log_format)
    if config.workers > 1:
        return asyncio.run(_supervise(config, port_file))
    server, sources = build_server(config)
    run(_serve(server, config, sources, port_file.write, port_file.remove))
    logger.info("stopped")
    return 0


def serve_worker(config: ServeConfig, number: int, ready_fd: int) -> int:
    """One of several workers: as `serve`, but it shares its ports, and ends when its standard input does.

    Args:
        config: What to serve, where.
        number: Of the worker, from 0.
        ready_fd: File descriptor that gets a byte when the worker is ready.
    """
    from predictors.service.metrics import count_as_worker

    def on_ready(port: int) -> None:
        os.write(ready_fd, b"\n")
        os.close(ready_fd)

    set_up_logs(config.log_format)
    if config.http_port is not None:
        count_as_worker(number)
    server, sources = build_server(config, worker=number)
    run(_serve(server, config, sources, on_ready, until_eof=True))
    return 0


class _PortFile:
    """The file for the port of a ready service, or none.

    The file of a killed service is removed at once: a program that waits for it must not take it for this one's.
    """

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else writable_target(path, "port_file")
        if self._path is not None and self._path.is_dir():
            raise InputError("port_file", path, "a file path, but a folder stands there")
        self.remove()

    def write(self, port: int) -> None:
        """Writes the port, atomically."""
        if self._path is not None:
            with atomic_file(self._path) as temporary:
                temporary.write_text(f"{port}\n", encoding="ascii")

    def remove(self) -> None:
        """Removes the file if it is there."""
        if self._path is not None:
            remove_output(self._path)


def build_server(
    config: ServeConfig, *, worker: int | None = None
) -> tuple[PredictionServer, dict[str, ArtifactSource]]:
    """The server of `config`, nothing bound yet; and the sources of its artifacts by id.

    Args:
        config: What to serve, where.
        worker: Number of the worker process that it runs in; None: there is one process.
    """
    from predictors.runtime import CPU
    from predictors.service.artifacts import open_sources
    from predictors.service.pipeline import worker_cores
    from predictors.service.security import BearerTokens, TlsFiles
    from predictors.service.server import PredictionServer, ServerSettings
    from predictors.service.tracing import Tracing, set_up_exporting

    tls = None
    if config.tls_cert is not None and config.tls_key is not None:
        authority = None if config.tls_client_ca is None else Path(config.tls_client_ca)
        tls = TlsFiles(
            certificate=Path(config.tls_cert), key=Path(config.tls_key), client_authority=authority
        )
    settings = ServerSettings(
        host=config.host,
        port=config.port,
        http_port=config.http_port,
        reuse_port=worker is not None,
        max_message_bytes=config.max_message_mib * 2**20,
        max_prompt_chars=config.max_prompt_chars,
        max_streams=config.max_streams,
        cache_entries=config.cache_entries,
        drain_delay_s=config.drain_delay_s,
        drain_timeout_s=config.drain_timeout_s,
        tls=tls,
        tokens=None if config.token_file is None else BearerTokens.of_file(config.token_file),
    )
    sources, runtimes = open_sources(
        [config.artifact, *config.more_artifacts],
        provider=config.provider,
        threads_per_run=config.threads_per_worker,
        public_key=config.public_key,
    )
    provider = runtimes[0].provider
    batching = batching_settings(config, provider)
    if provider == CPU and config.threads_per_worker == 1:
        cores = worker_cores(batching.num_workers, worker or 0, config.workers)
        settings = dataclasses.replace(settings, worker_cores=tuple(cores))
    if config.traces:
        set_up_exporting()
    server = PredictionServer(
        runtimes,
        batching,
        settings,
        reopen=lambda name: sources[name].open(),
        tracing=Tracing() if config.traces else None,
    )
    return server, sources


def batching_settings(config: ServeConfig, provider: str) -> BatchingSettings:
    """The provider's defaults, overridden by `config`."""
    from predictors.runtime import CPU
    from predictors.service.batcher import BatchingSettings

    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    defaults = (
        BatchingSettings.cpu(max(1, num_cores // config.workers))
        if provider == CPU
        else BatchingSettings.gpu()
    )
    names = (
        "max_batch",
        "max_wait_s",
        "max_padding",
        "max_padded_tokens",
        "order",
        "max_queue",
        "num_workers",
    )
    overrides = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    return dataclasses.replace(defaults, **overrides)


async def _serve(
    server: PredictionServer,
    config: ServeConfig,
    sources: dict[str, ArtifactSource],
    on_ready: Callable[[int], None],
    on_stop: Callable[[], None] = lambda: None,
    *,
    until_eof: bool = False,
) -> None:
    stop = asyncio.Event()
    tasks: set[asyncio.Task[None]] = set()

    def reload() -> None:
        task = asyncio.get_running_loop().create_task(server.reload())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    _on_signals(stop.set, reload)
    if until_eof:
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), stop.set)
    try:
        port = await server.start()
        on_ready(port)
        http = "" if server.http_port is None else f", http on {config.host}:{server.http_port}"
        logger.info("ready on %s:%d%s with %s", config.host, port, http, server.pipeline.settings)
        if config.reload_poll_s:
            tasks.add(asyncio.create_task(_watch(server, sources, config.reload_poll_s)))
        await stop.wait()
        logger.info("draining %d requests", server.artifacts.num_in_flight)
    finally:
        for task in tasks:
            task.cancel()
        on_stop()
        await server.stop()


async def _watch(server: PredictionServer, sources: dict[str, ArtifactSource], every_s: float) -> None:
    """Reloads when a manifest at one of the sources has changed."""
    previous = {name: source.state() for name, source in sources.items()}
    while True:
        await asyncio.sleep(every_s)
        states = {name: source.state() for name, source in sources.items()}
        if states != previous:
            previous = states
            await server.reload()


async def _supervise(config: ServeConfig, port_file: _PortFile) -> int:
    from predictors.service.metrics import WorkerMetricFiles
    from predictors.service.server import STREAM_GRACE_S
    from predictors.service.workers import Supervisor, reserved_port, worker_command

    with ExitStack() as stack:
        port = reserved_port(stack, config.host, config.port)
        http_port = config.http_port
        metric_files: WorkerMetricFiles | None = None
        if http_port is not None:
            http_port = reserved_port(stack, config.host, http_port, "http_port")
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tailcast-metrics-")))
            metric_files = WorkerMetricFiles(folder, config.workers, 1 + len(config.more_artifacts))
        shared = dataclasses.replace(config, port=port, http_port=http_port, port_file=None)
        supervisor = Supervisor(
            worker_command(json.dumps(dataclasses.asdict(shared))),
            config.workers,
            stop_timeout_s=config.drain_delay_s + config.drain_timeout_s + STREAM_GRACE_S + STOP_GRACE_S,
            environment={} if metric_files is None else metric_files.environment,
            on_end=None if metric_files is None else metric_files.reset_live,
        )

        def stop() -> None:
            port_file.remove()  # programs that watch it look away before the workers drain
            supervisor.stop()

        def on_ready() -> None:
            port_file.write(port)
            http = "" if http_port is None else f", http on {config.host}:{http_port}"
            logger.info("ready on %s:%d%s with %d workers", config.host, port, http, config.workers)

        _on_signals(stop, supervisor.reload)
        try:
            return await supervisor.run(on_ready)
        finally:
            port_file.remove()


def _check_packages() -> None:
    try:
        import grpc_health
        import grpc_reflection
        import onnxruntime

        del grpc_health, grpc_reflection, onnxruntime
        from google.rpc import status_pb2

        del status_pb2
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "grpcio", "serve") from error


def _on_signals(stop: Callable[[], None], reload: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    for name, action in (("SIGTERM", stop), ("SIGINT", stop), ("SIGHUP", reload)):
        try:
            loop.add_signal_handler(getattr(signal, name), action)
        except (AttributeError, NotImplementedError):  # Windows: Ctrl-C ends asyncio.run by itself
            return


if __name__ == "__main__":
    raise SystemExit(main())
