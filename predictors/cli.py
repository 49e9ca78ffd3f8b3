"""Command `serve-predictor`: one artifact behind a gRPC port until SIGTERM."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from scheduler_core.command import run_command
from scheduler_core.errors import InputError, MissingExtraError
from scheduler_core.files import atomic_file, writable_target

if TYPE_CHECKING:
    from predictors.runtime import ArtifactRuntime
    from predictors.service.grouping import BatchingSettings
    from predictors.service.server import PredictionServer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Serves the length predictions of an artifact over gRPC, until SIGTERM or Ctrl-C."""

    artifact: str
    """Artifact folder, as export-onnx writes it."""
    port: int = 50051
    """Port to listen on; 0 takes a free one."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all IPv4 interfaces."""
    port_file: str | None = None
    """File that gets the port number once the service is ready; removed at the end."""
    provider: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; auto takes CUDA where it works, else the CPU; cuda fails where it does not work."""
    max_batch: int | None = None
    """Most requests in one model call; default: 4 on a CPU, 32 on a GPU."""
    max_wait_s: float | None = None
    """Seconds the oldest request waits for a full batch while a worker is free; default: 0 on a CPU, 0.003 on a GPU."""
    max_padding: float | None = None
    """Largest ratio of padded to real tokens in a batch; default: 1.1 on a CPU, no limit on a GPU."""
    order: Literal["length", "arrival"] = "length"
    """Which requests share a batch: the oldest and its nearest neighbours in length, or simply the oldest ones."""
    max_queue: int = 512
    """Most requests inside the service; further ones are refused at once with RESOURCE_EXHAUSTED."""
    num_workers: int | None = None
    """Model calls that run at the same time; default: one per core on a CPU, 1 on a GPU."""
    threads_per_worker: int = 1
    """Threads of one model call on a CPU."""
    max_message_mib: int = 16
    """Largest gRPC message in MiB."""
    drain_timeout_s: float = 30.0
    """Seconds that SIGTERM leaves to the requests inside."""

    def __post_init__(self) -> None:
        if not self.artifact:
            raise InputError("artifact", self.artifact, "the path of an artifact folder")
        if not 0 <= self.port <= 65535:
            raise InputError("port", self.port, "0 to 65535; 0 takes a free port")
        if not 1 <= self.max_message_mib <= 1024:
            raise InputError("max_message_mib", self.max_message_mib, "1 to 1024")


def main(args: Sequence[str] | None = None) -> int:
    """Console script `serve-predictor`; returns the exit code."""
    return run_command(
        "serve-predictor", ServeConfig, serve, positionals=("artifact",), extra="serve", args=args
    )


def serve(config: ServeConfig) -> int:
    """Loads the artifact and serves it until SIGTERM or SIGINT; requests inside are answered first."""
    try:
        import grpc_health
        import grpc_reflection

        del grpc_health, grpc_reflection
        from predictors.runtime import open_runtime
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "grpcio", "serve") from error
    port_file = None if config.port_file is None else writable_target(config.port_file, "port_file")
    if port_file is not None and port_file.is_dir():
        raise InputError("port_file", config.port_file, "a file path, but a folder stands there")
    runtime = open_runtime(
        config.artifact, provider=config.provider, threads_per_run=config.threads_per_worker
    )
    manifest = runtime.artifact.manifest
    logger.info(
        "artifact %s version %s from %s", manifest.artifact_id, manifest.artifact_version, config.artifact
    )
    logger.info("execution provider %s (asked for: %s)", runtime.provider, config.provider)
    server = build_server(config, runtime)
    asyncio.run(_serve(server, config.host, port_file))
    logger.info("stopped")
    return 0


def build_server(config: ServeConfig, runtime: ArtifactRuntime) -> PredictionServer:
    """The server that `config` asks for; nothing is bound yet."""
    from predictors.service.server import PredictionServer, ServerSettings

    return PredictionServer(
        runtime,
        batching_settings(config, runtime.provider),
        ServerSettings(
            host=config.host,
            port=config.port,
            max_message_bytes=config.max_message_mib * 2**20,
            drain_timeout_s=config.drain_timeout_s,
        ),
    )


def batching_settings(config: ServeConfig, provider: str) -> BatchingSettings:
    """The provider's defaults with what `config` sets."""
    from predictors.runtime import CPU
    from predictors.service.grouping import BatchingSettings

    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    defaults = BatchingSettings.cpu(num_cores) if provider == CPU else BatchingSettings.gpu()
    chosen = {
        name: getattr(config, name)
        for name in ("max_batch", "max_wait_s", "max_padding", "order", "max_queue", "num_workers")
        if getattr(config, name) is not None
    }
    return dataclasses.replace(defaults, **chosen)


async def _serve(server: PredictionServer, host: str, port_file: Path | None) -> None:
    stop = asyncio.Event()
    _on_signals(stop.set)
    try:
        port = await server.start()
        if port_file is not None:
            with atomic_file(port_file) as temporary:
                temporary.write_text(f"{port}\n", encoding="ascii")
        logger.info("ready on %s:%d with %s", host, port, server.pipeline.settings)
        await stop.wait()
        logger.info("draining %d requests", server.pipeline.num_inside)
    finally:
        if port_file is not None:
            port_file.unlink(missing_ok=True)
        await server.stop()


def _on_signals(stop: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        try:
            loop.add_signal_handler(name, stop)
        except NotImplementedError:  # Windows: Ctrl-C ends asyncio.run by itself
            return


if __name__ == "__main__":
    raise SystemExit(main())
