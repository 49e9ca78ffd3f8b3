"""Command `tailcast-proxy`: runs an OpenAI-compatible proxy in front of an engine until SIGTERM; SIGHUP reloads."""

from __future__ import annotations

import asyncio
import functools
import logging
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from predictors.proxy.config import ProxyConfig
from scheduler_core.errors import TailcastError
from scheduler_core.shell.command import command

if TYPE_CHECKING:
    from predictors.proxy.server import ProxyServer

logger = logging.getLogger(__name__)
POSITIONALS = ("engine_url", "replicas")


def serve(config: ProxyConfig, read_again: Callable[[], ProxyConfig]) -> int:
    """Serves until SIGTERM or SIGINT, then finishes the requests in flight. On SIGHUP applies the options that
    `read_again` returns."""
    from predictors.hosting.logs import set_up_logs
    from predictors.hosting.process import PortFile, ignore_hangups, run, run_until_stopped
    from predictors.hosting.tracing import set_up_exporting

    ignore_hangups()
    from predictors.proxy.server import ProxyServer

    port_file = PortFile(config.port_file)
    set_up_logs(config.log_format)
    if config.traces:
        set_up_exporting()
    server = ProxyServer(config)
    reload = functools.partial(_reload, server, read_again)

    def on_ready(ports: tuple[int, int | None]) -> None:
        port_file.write(*ports)
        server.reload_on_changes(reload)

    run(run_until_stopped(server, reload, on_ready, port_file.remove))
    logger.info("stopped")
    return 0


async def _reload(server: ProxyServer, read_again: Callable[[], ProxyConfig]) -> None:
    """Reads options, certificates and artifacts again; a failure changes nothing. Logs and counts both."""
    outcome = "refused"
    try:
        await server.reload(await asyncio.to_thread(read_again))
        outcome = "applied"
    except TailcastError as error:
        logger.error("the reload failed, everything stays as it was: %s", error)
    except Exception:
        logger.exception("the reload failed, everything stays as it was")
    server.handler.metrics.reloads.labels(outcome).inc()


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command with arguments, by default those of the process; returns its exit code."""
    words = sys.argv[1:] if args is None else args

    def read_again() -> ProxyConfig:
        from scheduler_core.shell.options import read_config

        return read_config("tailcast-proxy", ProxyConfig, POSITIONALS, "serve", words)

    function = functools.partial(serve, read_again=read_again)
    return command("tailcast-proxy", ProxyConfig, function, positionals=POSITIONALS, extra="serve")(args)


if __name__ == "__main__":
    raise SystemExit(main())
