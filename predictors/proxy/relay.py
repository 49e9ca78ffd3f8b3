"""Requests to the engine and its responses back, byte for byte."""

from __future__ import annotations

import asyncio
import contextlib
import io
import select
from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

import aiohttp
from aiohttp import web
from aiohttp.client_middlewares import ClientHandlerType
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from aiohttp.http_exceptions import HttpProcessingError
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from predictors.proxy.config import ProxyConfig
from predictors.proxy.errors import EngineLostError, Refusal, bad_body, engine_failed
from predictors.proxy.responses import Reader

#: Servers close idle connections after some seconds (uvicorn: 5); one that is about to be closed is better not used.
KEEPALIVE_S = 2.0
LARGE_BYTES = 2**19
#: Headers of one connection (RFC 9110, section 7.6.1).
HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "proxy-connection", "proxy-authenticate", "proxy-authorization"}
    | {"te", "trailer", "transfer-encoding", "upgrade"}
)
_NOT_SENT = frozenset({"host", "content-length", "expect"})
_OWN_HEADERS = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")


def end_to_end(
    headers: CIMultiDictProxy[str], *, without: frozenset[str] = frozenset(), prefixes: tuple[str, ...] = ()
) -> CIMultiDict[str]:
    """The headers that pass, in their order; repeated ones stay repeated. `without` has further names to leave out,
    `prefixes` beginnings of them, in lower case; there `_` counts as `-`, as some servers take it."""
    dropped = HOP_BY_HOP | without
    if "Connection" in headers:
        names = (name.strip().lower() for value in headers.getall("Connection") for name in value.split(","))
        dropped |= frozenset(names)
    passed = ((name, value) for name, value in headers.items() if name.lower() not in dropped)
    if prefixes:
        passed = (pair for pair in passed if not pair[0].lower().replace("_", "-").startswith(prefixes))
    return CIMultiDict((name, _as_utf8(value)) for name, value in passed)


def _as_utf8(value: str) -> str:
    """A response's value in other bytes than UTF-8, which aiohttp leaves out, as Latin-1; requests are checked."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return value.encode("utf-8", "surrogateescape").decode("latin-1")
    return value


class LiveConnector(aiohttp.TCPConnector):
    """Uses an idle connection again only if the engine has not ended it meanwhile.

    A request is never sent twice, because the engine may have worked on one whose response is lost. So it must not be
    sent on a connection that has ended.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._used = WeakSet[ResponseHandler]()

    async def connect(self, *arguments: Any, **options: Any) -> Connection:
        while True:
            connection = await super().connect(*arguments, **options)
            protocol = connection.protocol
            assert protocol is not None
            if protocol not in self._used:
                self._used.add(protocol)
                return connection
            if not protocol.should_close and not _has_input(connection.transport):
                return connection
            connection.close()


def _has_input(transport: asyncio.Transport | None) -> bool:
    """Whether an idle connection has something to read: its end, or bytes that respond to no request."""
    file = None if transport is None else transport.get_extra_info("socket")
    if file is None or file.fileno() < 0:
        return True
    poll = select.poll()
    poll.register(file.fileno(), select.POLLIN)
    return bool(poll.poll(0))


async def _send_once(request: aiohttp.ClientRequest, handler: ClientHandlerType) -> aiohttp.ClientResponse:
    """Hides errors from aiohttp, which sends GET, PUT and DELETE again after some of them."""
    try:
        return await handler(request)
    except aiohttp.ClientConnectorError:
        raise  # nothing was sent, and aiohttp leaves it at that
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        raise engine_failed("closed the connection without a response") from error


class Relay:
    """The connections to one engine."""

    def __init__(self, config: ProxyConfig) -> None:
        self._config = config
        self._num_reading = 0
        self._all_read = asyncio.Event()
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Makes the session; nothing is connected yet."""
        self._session = aiohttp.ClientSession(
            connector=LiveConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=_OWN_HEADERS,
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=self._config.connect_timeout_s, sock_read=self._config.idle_timeout_s
            ),
            middlewares=(_send_once,),
        )

    async def stop(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()

    async def read(self, request: web.Request) -> bytes:
        """The body of a request; a Refusal if it is too large (413), late (408), or breaks the rules of HTTP (400)."""
        limit = self._config.max_body_mib * 2**20
        if request.content_length is not None and request.content_length > limit:
            raise _too_large(f"{request.content_length} bytes", limit)
        self._num_reading += 1
        try:
            async with asyncio.timeout(self._config.request_timeout_s):
                return await request.read()
        except web.HTTPRequestEntityTooLarge as error:
            raise _too_large("more", limit) from error
        except TimeoutError as error:
            text = f"body: not complete after {self._config.request_timeout_s:g} s"
            raise Refusal(408, text, "body_late", "body") from error
        except (web.RequestPayloadError, HttpProcessingError) as error:
            raise bad_body("not valid HTTP") from error
        finally:
            self._num_reading -= 1
            if not self._num_reading:
                self._all_read.set()

    async def finish_reading(self) -> None:
        """Waits until all bodies on their way are complete, or late."""
        if self._num_reading:
            self._all_read.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.request_timeout_s):
                    await self._all_read.wait()

    async def send(
        self, request: web.Request, body: bytes | None, headers: Mapping[str, str], without: tuple[str, ...]
    ) -> aiohttp.ClientResponse:
        """Sends a request on, once, with method, path, query and headers; returns with the head of the response. Of `headers`
        a client's own one wins, but for Accept-Encoding; `without` has beginnings of the client's to leave out. A Refusal if
        the engine cannot be reached or breaks off before a response (502), or is too late (504)."""
        assert self._session is not None
        sent = end_to_end(request.headers, without=_NOT_SENT, prefixes=without)
        for name, value in headers.items():
            if name == "Accept-Encoding" or name not in sent:
                sent[name] = value
        path = request.raw_path if request.raw_path.startswith("/") else request.rel_url.raw_path_qs
        # A large body is written piece by piece, so that others get their turn.
        data = body if body is None or len(body) <= LARGE_BYTES else io.BytesIO(body)
        try:
            return await self._session.request(
                request.method,
                URL(self._config.engine_url.rstrip("/") + path, encoded=True),
                headers=sent,
                data=data,
                allow_redirects=False,
            )
        except TimeoutError as error:
            raise engine_failed("did not respond in time", late=True) from error
        except aiohttp.ClientResponseError as error:
            raise engine_failed("sent no valid HTTP") from error
        except (aiohttp.ClientError, OSError) as error:
            raise engine_failed(f"cannot be reached ({type(error).__name__})") from error

    async def respond(
        self, request: web.Request, upstream: aiohttp.ClientResponse, reader: Reader | None
    ) -> web.StreamResponse:
        """Passes a response on, no faster than the client reads it; ConnectionError if the client is gone, EngineLostError if the
        response broke off (the client's connection is closed where it broke)."""
        shortens = reader is not None and reader.shortens  # the engine's Content-Length does not hold then
        headers = end_to_end(upstream.headers, without=frozenset({"content-length"} if shortens else ()))
        response = web.StreamResponse(status=upstream.status, reason=upstream.reason, headers=headers)
        await response.prepare(request)
        failure: Exception | None = None
        is_open = True
        while is_open:
            data = b""
            try:
                data = await upstream.content.readany()  # one write for events that came together
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                failure = error
            is_open = bool(data)
            if reader is not None:
                data = reader.feed(data) if is_open else reader.end()
            if data:
                await response.write(data)
        if failure is not None:
            if request.transport is not None:
                request.transport.close()  # no end of the body: the client sees the break as it was
            raise EngineLostError(type(failure).__name__) from failure
        await response.write_eof()
        return response


def _too_large(size: str, limit: int) -> Refusal:
    text = f"body: got {size}; allowed: at most {limit} bytes"
    return Refusal(413, text, "body_too_large", "body")
