"""Command `tailcast-proxy`: an OpenAI-compatible proxy in front of an engine, until SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from predictors.proxy.config import ProxyConfig
from scheduler_core.command import run_command
from scheduler_core.errors import MissingExtraError
from scheduler_core.files import atomic_file, remove_output, writable_target

if TYPE_CHECKING:
    from predictors.proxy.server import ProxyServer

logger = logging.getLogger(__name__)


def main(args: Sequence[str] | None = None) -> int:
    """Console script `tailcast-proxy`; returns the exit code."""
    return run_command(
        "tailcast-proxy", ProxyConfig, serve, positionals=("engine_url",), extra="serve", args=args
    )


def serve(config: ProxyConfig) -> int:
    """Serves until SIGTERM or SIGINT; then finishes the requests in flight."""
    try:
        from predictors.edge import run, set_up_logs
        from predictors.proxy.server import ProxyServer
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "aiohttp", "serve") from error

    port_file = None if config.port_file is None else writable_target(config.port_file, "port_file")
    set_up_logs(config.log_format)
    run(_serve(config, ProxyServer(config), port_file))
    logger.info("stopped")
    return 0


async def _serve(config: ProxyConfig, server: ProxyServer, port_file: Path | None) -> None:
    stop = asyncio.Event()
    for name in ("SIGTERM", "SIGINT"):
        try:
            asyncio.get_running_loop().add_signal_handler(getattr(signal, name), stop.set)
        except NotImplementedError:  # Windows: Ctrl-C ends asyncio.run by itself
            break
    try:
        port, admin = await server.start()
        if port_file is not None:
            with atomic_file(port_file) as temporary:
                temporary.write_text(f"{port}\n" + ("" if admin is None else f"{admin}\n"), encoding="ascii")
        probes = "" if admin is None else f", probes and metrics on {config.host}:{admin}"
        logger.info("ready on %s:%d in front of %s%s", config.host, port, config.engine_url, probes)
        await stop.wait()
        logger.info("draining %d requests", server.num_in_flight)
    finally:
        if port_file is not None:
            remove_output(port_file)
        await server.stop()


if __name__ == "__main__":
    raise SystemExit(main())
