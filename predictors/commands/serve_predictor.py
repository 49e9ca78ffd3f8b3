"""Command `serve-predictor`: serves artifacts over gRPC and optionally HTTP until SIGTERM."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from predictors.edge import PortFile, ignore_hangups, on_signals, run, set_up_logs
from scheduler_core.errors import InputError
from scheduler_core.ranges import INTEGERS, check_ranges
from scheduler_core.shell.command import command
from scheduler_core.shell.threads import check_threads

if TYPE_CHECKING:
    from predictors.service.artifacts import ArtifactSource
    from predictors.service.batcher import BatchingSettings
    from predictors.service.server import PredictionServer

logger = logging.getLogger(__name__)

STOP_GRACE_S = 2.0  # for a worker to close its ports and exit, in addition to its other timeouts


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Serve predictions over gRPC and optionally HTTP. SIGTERM or Ctrl-C stops; SIGHUP reloads artifacts."""

    INPUTS = (
        *("artifact", "more_artifacts", "public_key", "token_file"),
        *("tls_cert", "tls_key", "tls_client_ca"),
    )
    OUTPUTS = ("port_file",)

    artifact: str = "pretrained"
    """Artifact folder written by export-onnx, or pretrained or tiny, the artifacts shipped with tailcast. It
    serves all requests that do not name an artifact."""
    more_artifacts: list[str] = field(default_factory=list)
    """Further artifact folders to serve; requests select them by artifact_id."""
    port: int = 50051
    """gRPC port to listen on; 0 selects a free port."""
    http_port: int | None = None
    """HTTP port for JSON, metrics and probes; 0 selects a free port; default: no HTTP."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all IPv4 interfaces."""
    port_file: str | None = None
    """File to write the port number to when the service is ready; removed at startup and at shutdown."""
    provider: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model: auto uses CUDA if it works, otherwise the CPU; cuda fails if it does not work."""
    max_batch: int | None = None
    """Maximum number of requests in one model call; default: 4 on a CPU, 32 on a GPU."""
    max_wait_s: float | None = None
    """Maximum seconds that an idle worker waits for a full batch; default: 0 on a CPU, 0.003 on a GPU."""
    max_padding: float | None = None
    """Maximum ratio of padded to real tokens in a batch; default: 1.1 on a CPU, no limit on a GPU."""
    max_padded_tokens: int | None = None
    """Maximum padded tokens of a batch with more than one request; default: 256 on a CPU, 16384 on a GPU."""
    max_queue: int = 512
    """Maximum number of requests in flight; further requests fail immediately with RESOURCE_EXHAUSTED."""
    num_workers: int | None = None
    """Number of concurrent model calls; default: one per core on a CPU, 1 on a GPU."""
    threads_per_worker: int = 1
    """Number of threads of one model call on a CPU."""
    max_message_mib: int = 4
    """Maximum gRPC message or HTTP body in MiB; parsing blocks the server for up to 10 ms per MiB."""
    max_prompt_chars: int | None = None
    """Maximum number of characters of a prompt; default: no limit except the message size."""
    cache_entries: int = 0
    """Maximum number of cached predictions per artifact; 0: no cache."""
    workers: int = 1
    """Number of processes that share the ports; a process that dies is restarted."""
    tls_cert: str | None = None
    """PEM file with the server certificate; enables TLS on both ports, together with tls_key."""
    tls_key: str | None = None
    """PEM file with the private key of tls_cert."""
    tls_client_ca: str | None = None
    """PEM file with the CA of client certificates; default: clients need no certificate."""
    public_key: str | None = None
    """PEM file of an Ed25519 public key to verify the artifacts' signatures; default: do not verify."""
    token_file: str | None = None
    """File with the valid bearer tokens, one per line; default: no authentication."""
    reload_poll_s: float = 0.0
    """Seconds between checks for a new version of an artifact; 0: only at SIGHUP."""
    log_format: Literal["text", "json"] = "text"
    """Format of log lines: text, or one JSON object per line."""
    traces: bool = False
    """Export OpenTelemetry traces; the OTEL_* environment variables configure the exporter."""
    drain_delay_s: float = 0.0
    """Seconds to keep serving after SIGTERM with health NOT_SERVING, so that load balancers react."""
    drain_timeout_s: float = 30.0
    """Maximum seconds to finish requests in flight; if workers > 1, workers are killed 2.5 s later."""

    def __post_init__(self) -> None:
        for name in ("artifact", "host"):
            if not getattr(self, name):
                raise InputError(name, "", "a non-empty text")
        day_s = (0.0, 86_400.0)
        check_ranges(
            self,
            port=(0, 65535),
            http_port=(0, 65535),
            max_message_mib=(1, 1024),
            max_prompt_chars=(1, INTEGERS),
            cache_entries=(0, INTEGERS),
            workers=(1, 256),
            reload_poll_s=day_s,
            drain_delay_s=day_s,
            drain_timeout_s=day_s,
        )
        check_threads("num_workers", self.num_workers)
        check_threads("threads_per_worker", self.threads_per_worker)
        if self.workers > 1 and not hasattr(socket, "SO_REUSEPORT"):
            raise InputError("workers", self.workers, "1: this system cannot share a port")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InputError("tls_cert, tls_key", self.tls_cert or self.tls_key, "both or none of them")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise InputError("tls_client_ca", self.tls_client_ca, "a file together with tls_cert and tls_key")

    @property
    def max_message_bytes(self) -> int:
        """Maximum size of a gRPC message or HTTP body."""
        return self.max_message_mib * 2**20


def serve(config: ServeConfig) -> int:
    """Loads the artifacts and serves them until SIGTERM or SIGINT; then finishes requests in flight."""
    ignore_hangups()
    port_file = PortFile(config.port_file)
    set_up_logs(config.log_format)
    if config.workers > 1:
        return asyncio.run(_supervise(config, port_file))
    server, sources = build_server(config)
    run(_serve(server, config, sources, port_file.write, port_file.remove))
    logger.info("stopped")
    return 0


def serve_worker(config: ServeConfig, number: int) -> int:
    """Runs one of several workers, numbered from 0. It shares its ports, stops when stdin is closed, and
    writes one byte to stdout when it is ready; later output goes to stderr."""
    from predictors.service.metrics import count_as_worker

    def on_ready(port: int) -> None:
        os.write(sys.stdout.fileno(), b"\n")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    ignore_hangups()
    set_up_logs(config.log_format)
    if config.http_port is not None:
        count_as_worker(number)
    server, sources = build_server(config, worker=number)
    run(_serve(server, config, sources, on_ready, until_eof=True))
    return 0


def build_server(
    config: ServeConfig, *, worker: int | None = None
) -> tuple[PredictionServer, dict[str, ArtifactSource]]:
    """The unbound server of `config`, and its artifact sources by id; `worker` is its number, if any."""
    from predictors.runtime import CPU
    from predictors.service.artifacts import open_sources
    from predictors.service.pipeline import worker_cores
    from predictors.service.server import PredictionServer
    from predictors.service.tracing import set_up_exporting

    sources, runtimes = open_sources(config)
    provider = runtimes[0].provider
    batching = batching_settings(config, provider)
    cores: list[int] = []
    if provider == CPU and config.threads_per_worker == 1:
        cores = worker_cores(batching.num_workers, worker or 0, config.workers)
    if config.traces:
        set_up_exporting()
    server = PredictionServer(
        runtimes,
        batching,
        config,
        reopen=lambda name: sources[name].open(),
        shares_ports=worker is not None,
        worker_cores=cores,
    )
    return server, sources


def batching_settings(config: ServeConfig, provider: str) -> BatchingSettings:
    """Batching defaults of the provider, overridden by `config`."""
    from predictors.runtime import CPU
    from predictors.service.batcher import BatchingSettings

    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    on_cpu = BatchingSettings.cpu(max(1, num_cores // config.workers))
    defaults = on_cpu if provider == CPU else BatchingSettings.gpu()
    options = {name: getattr(config, name, None) for name in dataclasses.asdict(defaults)}
    return dataclasses.replace(
        defaults, **{name: value for name, value in options.items() if value is not None}
    )


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

    on_signals(stop.set, reload)
    if until_eof:
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), stop.set)
    try:
        port = await server.start()
        on_ready(port)
        http = "" if server.http_port is None else f", http on {config.host}:{server.http_port}"
        logger.info("ready on %s:%d%s with %s", config.host, port, http, server.batching)
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
    """Reloads the artifacts whenever the manifest of a source has changed."""
    previous = {name: source.state() for name, source in sources.items()}
    while True:
        await asyncio.sleep(every_s)
        states = {name: source.state() for name, source in sources.items()}
        if states != previous:
            previous = states
            await server.reload()


async def _supervise(config: ServeConfig, port_file: PortFile) -> int:
    from predictors.service.metrics import WorkerMetricFiles
    from predictors.service.server import STREAM_GRACE_S
    from predictors.service.workers import Supervisor, reserved_port

    with ExitStack() as stack:
        port = reserved_port(stack, config.host, config.port, "port")
        http_port = config.http_port
        counting: dict[str, Any] = {}
        if http_port is not None:
            http_port = reserved_port(stack, config.host, http_port, "http_port")
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tailcast-metrics-")))
            files = WorkerMetricFiles(folder, config.workers, 1 + len(config.more_artifacts))
            counting = {"environment": files.environment, "on_end": files.reset_live}
        shared = dataclasses.replace(config, port=port, http_port=http_port, port_file=None)
        supervisor = Supervisor(
            [sys.executable, "-m", "predictors.service.workers", json.dumps(dataclasses.asdict(shared))],
            config.workers,
            stop_timeout_s=config.drain_delay_s + config.drain_timeout_s + STREAM_GRACE_S + STOP_GRACE_S,
            **counting,
        )

        def stop() -> None:
            port_file.remove()  # before the workers drain, so that programs that watch it stop sending
            supervisor.stop()

        def on_ready() -> None:
            port_file.write(port)
            http = "" if http_port is None else f", http on {config.host}:{http_port}"
            logger.info("ready on %s:%d%s with %d workers", config.host, port, http, config.workers)

        on_signals(stop, supervisor.reload)
        try:
            return await supervisor.run(on_ready)
        finally:
            port_file.remove()


main = command("serve-predictor", ServeConfig, serve, positionals=("artifact",), extra="serve")


if __name__ == "__main__":
    raise SystemExit(main())
