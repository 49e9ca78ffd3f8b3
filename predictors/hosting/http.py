"""Hardening of HTTP servers: time limits, bounded bodies, no request data in logs and error pages."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from aiohttp import web

from predictors.hosting.logs import RequestDataFilter, redacted
from scheduler_core.errors import InputError

# A body of several MiB over a slow connection takes seconds.
REQUEST_TIMEOUT_S = 30.0

logger = logging.getLogger(__name__)
logger.addFilter(RequestDataFilter())


class HttpRunner(web.AppRunner):
    """aiohttp's runner without access log; a disconnect cancels the request, bodies are not decompressed.

    A connection is closed if the head (request line and headers) is incomplete `request_timeout_s` after its
    first byte. A malformed request gets a fixed error page, and a log line without its bytes; `on_refused` gets
    the status of each request that is refused before the application sees it.
    """

    def __init__(
        self,
        application: web.Application,
        *,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
        on_refused: Callable[[int], None] = lambda status: None,
        **options: Any,
    ) -> None:
        super().__init__(
            application,
            access_log=None,
            handler_cancellation=True,
            auto_decompress=False,  # aiohttp would also decompress data that is not read, possibly gigabytes
            logger=logger,
            **options,
        )
        self._request_timeout_s = request_timeout_s
        self._on_refused = on_refused

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

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()

        async def handle(request: Any) -> web.StreamResponse:
            # The default page of aiohttp quotes the header, and fails with status 500 if that is not ASCII.
            if request.headers.get("Expect", "100-continue").lower() != "100-continue":
                self._on_refused(web.HTTPExpectationFailed.status_code)
                raise web.HTTPExpectationFailed(text="Expect can only be 100-continue\n")
            return await server.request_handler(request)

        options = {"request_factory": server.request_factory, **server._kwargs}
        result = _Server(handle, handler_cancellation=server.handler_cancellation, **options)
        result.request_timeout_s, result.on_refused = self._request_timeout_s, self._on_refused
        return result


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


class _Server(web.Server):
    request_timeout_s: float
    on_refused: Callable[[int], None]

    def __call__(self) -> web.RequestHandler:
        connection = _Connection(self, loop=self._loop, **self._kwargs)
        connection.request_timeout_s, connection.on_refused = self.request_timeout_s, self.on_refused
        return connection


class _Connection(web.RequestHandler):
    """Adds a time limit of heads and a fixed error page; aiohttp has no public API for them."""

    request_timeout_s = REQUEST_TIMEOUT_S
    on_refused: Callable[[int], None]
    _head_timer: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        num_heads = self._request_count
        super().data_received(data)
        if self._request_count > num_heads:
            self._stop_timer()
        elif self._waiter is not None and self._head_timer is None:
            # No request is in progress, so the data is an incomplete head.
            self._head_timer = self._loop.call_later(self.request_timeout_s, self.force_close)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, *args: Any
    ) -> web.StreamResponse:
        if status >= 500 or exc is None:
            return super().handle_error(request, status, exc, *args)
        self.on_refused(status)
        self.logger.info("refused a malformed request from %s: %s", request.remote, redacted(exc))
        response = web.Response(status=status, text="malformed HTTP request\n")
        response.force_close()
        return response

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
