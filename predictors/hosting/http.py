"""HTTP ports: bounded heads and bodies, probes, no request data in logs and error pages."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from aiohttp import web

from predictors.hosting.logs import RequestDataFilter, redacted
from scheduler_core.errors import InputError

# A body of several MiB over a slow connection takes seconds.
REQUEST_TIMEOUT_S = 30.0
# For idle connections and for heads (request line and headers); longer than pools keep a connection (Go: 90 s).
KEEPALIVE_S = 120.0

logger = logging.getLogger(__name__)
logger.addFilter(RequestDataFilter())


class HttpRunner(web.AppRunner):
    """aiohttp's runner without access log; a disconnect cancels the request, bodies are not decompressed.

    A connection without a complete head for `keepalive_timeout` seconds is closed by aiohttp. A malformed request, also
    one with an unknown `Expect`, gets a fixed error page; `on_refused` gets its status. Its bytes are not logged.
    """

    def __init__(
        self,
        application: web.Application,
        *,
        shutdown_timeout: float,
        on_refused: Callable[[int], None] = lambda status: None,
        **options: Any,
    ) -> None:
        # aiohttp would also decompress data that is not read, possibly gigabytes.
        options = {"keepalive_timeout": KEEPALIVE_S, "auto_decompress": False, "logger": logger} | options
        self._on_refused = on_refused
        self._connect = partial(_Connection, on_refused, access_log=None, **options)
        super().__init__(application, handler_cancellation=True, shutdown_timeout=shutdown_timeout)

    @property
    def server(self) -> Any:
        """The factory of the protocol of a connection, for `web.TCPSite`."""
        return None if super().server is None else self._new_connection

    def _new_connection(self) -> web.RequestHandler:
        return self._connect(super().server, loop=asyncio.get_running_loop())

    async def setup(self) -> None:
        """Prepares the application; before any port is bound."""
        await super().setup()
        server = super().server
        assert server is not None
        handle_request = server.request_handler

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            # aiohttp's page quotes the header, and fails with status 500 if that is not UTF-8.
            if request.headers.get("Expect", "100-continue").lower() != "100-continue":
                self._on_refused(web.HTTPExpectationFailed.status_code)
                return web.Response(status=417, text="Expect can only be 100-continue\n")
            return await handle_request(request)

        server.request_handler = handle

    async def bind(self, field: str, host: str, port: int, **options: Any) -> int:
        """Binds and serves a port; returns its number. InputError about the option `field` on failure."""
        await self.setup()
        try:
            await web.TCPSite(self, host, port, **options).start()
        except OSError as error:
            await self.cleanup()
            allowed = f"an address that can be bound ({error.strerror})"
            raise InputError(field, f"{host}:{port}", allowed) from error
        return int(self.addresses[0][1])


class _Connection(web.RequestHandler):
    def __init__(self, on_refused: Callable[[int], None], *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._on_refused = on_refused

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, *args: Any
    ) -> web.StreamResponse:
        if status >= 500 or exc is None:
            return super().handle_error(request, status, exc, *args)
        self._on_refused(status)
        logger.info("refused a malformed request from %s: %s", request.remote, redacted(exc))
        response = web.Response(status=status, text="malformed HTTP request\n")
        response.force_close()
        return response


def probe_routes(exposition: Callable[[], bytes], problem: Callable[[], Awaitable[str]]) -> web.RouteTableDef:
    """Routes /metrics, rendered by `exposition` in a thread; /healthz; and /readyz, ready while `problem` is empty."""
    routes = web.RouteTableDef()

    @routes.get("/metrics")
    async def metrics(request: web.Request) -> web.Response:
        text = await asyncio.to_thread(exposition)
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    @routes.get("/healthz")
    async def live(request: web.Request) -> web.Response:
        return web.Response(text="live\n")

    @routes.get("/readyz")
    async def ready(request: web.Request) -> web.Response:
        text = await problem()
        return web.Response(text=f"{text or 'ready'}\n", status=503 if text else 200)

    return routes


async def read_body(request: web.Request, timeout_s: float = REQUEST_TIMEOUT_S) -> bytes:
    """The body of a request; InputError for malformed chunks. HTTP errors: 408 if it is not complete in time,
    413 if it exceeds the application's `client_max_size`, 415 if it is compressed."""
    if request.headers.get("Content-Encoding", "").lower() not in ("", "identity"):
        raise web.HTTPUnsupportedMediaType(headers={"Accept-Encoding": "identity"})
    try:
        async with asyncio.timeout(timeout_s):
            return await request.read()
    except web.RequestPayloadError as error:
        raise InputError("body", "malformed data", "a body that matches its headers") from error
    except TimeoutError as error:
        late = web.HTTPRequestTimeout(text=f"the body was not complete after {timeout_s:g} s\n")
        late.force_close()
        raise late from error
