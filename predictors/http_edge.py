"""HTTP server options against hostile clients: time limits, bounded bodies, no request data in logs and error pages."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from aiohttp import web

from predictors.edge import RequestDataFilter, redacted
from scheduler_core.errors import InputError

# A body of some MiB over a slow line takes seconds.
REQUEST_TIMEOUT_S = 30.0

logger = logging.getLogger(__name__)
logger.addFilter(RequestDataFilter())


class HttpRunner(web.AppRunner):
    """aiohttp's runner without access log; a client that hangs up cancels its request, bodies stay compressed.

    A connection is closed `request_timeout_s` after the first byte of a head (request line and headers) that is incomplete by
    then. Malformed requests get a fixed page and a line in the log without their bytes.
    """

    def __init__(
        self, application: web.Application, *, request_timeout_s: float = REQUEST_TIMEOUT_S, **options: Any
    ) -> None:
        super().__init__(
            application,
            access_log=None,
            handler_cancellation=True,
            auto_decompress=False,  # aiohttp would decompress what is no longer read, gigabytes of it
            logger=logger,
            **options,
        )
        self._request_timeout_s = request_timeout_s

    async def bind(self, field: str, host: str, port: int, **options: Any) -> int:
        """Binds the port of the option `field` (InputError if it cannot) and answers; returns its number."""
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
            # aiohttp's own page quotes the header, and is a 500 where that is not ASCII.
            if request.headers.get("Expect", "100-continue").lower() != "100-continue":
                raise web.HTTPExpectationFailed(text="Expect can only be 100-continue\n")
            return await server.request_handler(request)

        options = {"request_factory": server.request_factory, **server._kwargs}
        result = _Server(handle, handler_cancellation=server.handler_cancellation, **options)
        result.request_timeout_s = self._request_timeout_s
        return result


async def read_body(request: web.Request, timeout_s: float = REQUEST_TIMEOUT_S) -> bytes:
    """The body of a request; InputError for malformed chunks, 408 if it is not complete in time, 413 if it is larger than the
    application's `client_max_size`, 415 if it is compressed: a MiB may unpack to a GiB."""
    if request.headers.get("Content-Encoding", "").lower() not in ("", "identity"):
        raise web.HTTPUnsupportedMediaType(headers={"Accept-Encoding": "identity"})
    try:
        async with asyncio.timeout(timeout_s):
            return await request.read()
    except web.RequestPayloadError as error:
        raise InputError("body", "malformed data", "a body as its headers describe it") from error
    except TimeoutError as error:
        late = web.HTTPRequestTimeout(text=f"the body was not complete after {timeout_s:g} s\n")
        late.force_close()
        raise late from error


class _Server(web.Server):
    request_timeout_s: float

    def __call__(self) -> web.RequestHandler:
        connection = _Connection(self, loop=self._loop, **self._kwargs)
        connection.request_timeout_s = self.request_timeout_s
        return connection


class _Connection(web.RequestHandler):
    """aiohttp has no public place for a time limit of heads and for the page of a malformed request."""

    request_timeout_s = REQUEST_TIMEOUT_S
    _head_timer: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        num_heads = self._request_count
        super().data_received(data)
        if self._request_count > num_heads:
            self._stop_timer()
        elif self._waiter is not None and self._head_timer is None:
            # No request is under way, so this is half a head.
            self._head_timer = self._loop.call_later(self.request_timeout_s, self.force_close)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, *rest: Any
    ) -> web.StreamResponse:
        if status >= 500 or exc is None:
            return super().handle_error(request, status, exc, *rest)
        self.logger.info("refused a malformed request from %s: %s", request.remote, redacted(exc))
        response = web.Response(status=status, text="malformed HTTP request\n")
        response.force_close()
        return response

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
