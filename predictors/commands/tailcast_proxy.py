"""Command `tailcast-proxy`: runs an OpenAI-compatible proxy in front of an engine until SIGTERM; SIGHUP reloads."""

from __future__ import annotations

import asyncio
import functools
import logging
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from predictors.edge import PortFile, ignore_hangups, on_signals, run, set_up_logs
from predictors.proxy.config import ProxyConfig
from scheduler_core.errors import TailcastError
from scheduler_core.shell.command import command

if TYPE_CHECKING:
    from predictors.proxy.server import ProxyServer

logger = logging.getLogger(__name__)


def serve(config: ProxyConfig, read_again: Callable[[], ProxyConfig]) -> int:
    """Serves until SIGTERM or SIGINT, then finishes the requests in flight. On SIGHUP applies the options that
    `read_again` returns."""
    ignore_hangups()
    from predictors.proxy.server import ProxyServer

    port_file = PortFile(config.port_file)
    set_up_logs(config.log_format)
    run(_serve(config, ProxyServer(config), port_file, read_again))
    logger.info("stopped")
    return 0


async def _serve(
    config: ProxyConfig, server: ProxyServer, port_file: PortFile, read_again: Callable[[], ProxyConfig]
) -> None:
    stop = asyncio.Event()
    tasks: set[asyncio.Task[None]] = set()

    def reload() -> None:
        task = asyncio.create_task(_reload(server, read_again))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    on_signals(stop.set, reload)
    try:
        port, admin = await server.start()
        port_file.write(port, admin)
        probes = "" if admin is None else f", probes and metrics on {config.host}:{admin}"
        logger.info("ready on %s:%d in front of %s%s", config.host, port, config.engine_url, probes)
        await stop.wait()
        logger.info("draining %d requests", server.num_in_flight)
    finally:
        for task in tasks:
            task.cancel()
        port_file.remove()
        await server.stop()


async def _reload(server: ProxyServer, read_again: Callable[[], ProxyConfig]) -> None:
    """Reads the options and the artifacts again; a failure changes nothing, and is logged."""
    try:
        await server.reload(await asyncio.to_thread(read_again))
    except TailcastError as error:
        logger.error("the reload failed, everything stays as it was: %s", error)
    except Exception:
        logger.exception("the reload failed, everything stays as it was")


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command with arguments, by default those of the process; returns its exit code."""
    words = sys.argv[1:] if args is None else args

    def read_again() -> ProxyConfig:
        from scheduler_core.shell.options import read_config

        return read_config("tailcast-proxy", ProxyConfig, ("engine_url",), "serve", words)

    function = functools.partial(serve, read_again=read_again)
    return command("tailcast-proxy", ProxyConfig, function, positionals=("engine_url",), extra="serve")(args)


if __name__ == "__main__":
    raise SystemExit(main())
