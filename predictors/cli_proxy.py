"""Command `tailcast-proxy`: runs an OpenAI-compatible proxy in front of an engine until SIGTERM."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from predictors.edge import PortFile, on_signals, run, set_up_logs
from predictors.proxy.config import ProxyConfig
from scheduler_core.command import command

if TYPE_CHECKING:
    from predictors.proxy.server import ProxyServer

logger = logging.getLogger(__name__)


def serve(config: ProxyConfig) -> int:
    """Serves until SIGTERM or SIGINT, then finishes the requests in flight."""
    from predictors.proxy.server import ProxyServer

    port_file = PortFile(config.port_file)
    set_up_logs(config.log_format)
    run(_serve(config, ProxyServer(config), port_file))
    logger.info("stopped")
    return 0


async def _serve(config: ProxyConfig, server: ProxyServer, port_file: PortFile) -> None:
    stop = asyncio.Event()
    on_signals(stop.set)
    try:
        port, admin = await server.start()
        port_file.write(port, admin)
        probes = "" if admin is None else f", probes and metrics on {config.host}:{admin}"
        logger.info("ready on %s:%d in front of %s%s", config.host, port, config.engine_url, probes)
        await stop.wait()
        logger.info("draining %d requests", server.num_in_flight)
    finally:
        port_file.remove()
        await server.stop()


main = command("tailcast-proxy", ProxyConfig, serve, positionals=("engine_url",), extra="serve")


if __name__ == "__main__":
    raise SystemExit(main())
