"""Requests to the engine and its answers back, byte for byte."""

from __future__ import annotations

import asyncio
import contextlib
import io
import math
import select
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import aiohttp
from aiohttp import web
from aiohttp.client_middlewares import ClientHandlerType
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from aiohttp.http_exceptions import HttpProcessingError
from yarl import URL

from predictors.proxy.answers import Reader
from predictors.proxy.headers import end_to_end
from predictors.proxy.problems import Refusal, bad_body, engine_failed, too_large
from scheduler_core.errors import InputError

#: Servers close kept connections after some seconds (uvicorn: 5); one that is about to be closed is better not used.
KEEPALIVE_S = 2.0
LARGE_BYTES = 2**19
_NOT_SENT = frozenset({"host", "content-length", "expect"})
_OWN_HEADERS = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")


class EngineLostError(Exception):
    """The engine's answer ended before its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAddress:
    """Where the engine is, and how long it may be silent.

    Attributes:
        url: http(s)://HOST:PORT, maybe with a path in front of /v1.
        connect_timeout_s: Longest time to make a connection, in seconds > 0.
        idle_timeout_s: Longest silence, before an answer and inside one, in seconds > 0.

    Raises:
        InputError: An attribute is outside its range.
    """

    url: str
    connect_timeout_s: float = 5.0
    idle_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        try:
            parsed = URL(self.url)
            valid = parsed.scheme in ("http", "https") and bool(parsed.host) and not parsed.query_string
        except ValueError:
            valid = False
        if not valid:
            raise InputError(
                "engine_url", self.url, "http://HOST:PORT or https://HOST:PORT, maybe with a path"
            )
        for name in ("connect_timeout_s", "idle_timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(name, getattr(self, name), "a finite number of seconds > 0")


class LiveConnector(aiohttp.TCPConnector):
    """Keeps connections, and uses a kept one again only if the engine has not ended it meanwhile.

    A request is never sent twice: whether the engine has worked on one whose answer is lost, nobody knows. So one that
    would meet a connection which has ended must not be sent at all.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._used = WeakSet[ResponseHandler]()

    async def connect(self, *arguments: Any, **options: Any) -> Connection:
        """See `aiohttp.BaseConnector.connect`."""
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
    """Whether a connection at rest has something to read that is its end or an answer to no request."""
    file = None if transport is None else transport.get_extra_info("socket")
    if file is None or file.fileno() < 0:
        return True
    if sys.platform == "win32":
        return bool(select.select([file.fileno()], [], [], 0)[0])
    poll = select.poll()
    poll.register(file.fileno(), select.POLLIN)
    return bool(poll.poll(0))


async def _send_once(request: aiohttp.ClientRequest, handler: ClientHandlerType) -> aiohttp.ClientResponse:
    """Takes errors out of the reach of aiohttp, which sends GET, PUT and DELETE again after some of them."""
    try:
        return await handler(request)
    except aiohttp.ClientConnectorError:
        raise  # nothing was sent, and aiohttp leaves it at that
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        raise engine_failed("closed the connection without an answer") from error


class Relay:
    """The connections to one engine.

    Args:
        address: Where it is.
        max_body_bytes: Largest body of a request.
        request_timeout_s: Longest time until a client has sent a body, in seconds > 0.
    """

    def __init__(self, address: EngineAddress, max_body_bytes: int, request_timeout_s: float) -> None:
        self._address = address
        self._base = address.url.rstrip("/")
        self._max_body_bytes = max_body_bytes
        self._request_timeout_s = request_timeout_s
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
                total=None,
                sock_connect=self._address.connect_timeout_s,
                sock_read=self._address.idle_timeout_s,
            ),
            middlewares=(_send_once,),
        )

    async def stop(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()

    async def read(self, request: web.Request) -> bytes:
        """The body of a request.

        Raises:
            Refusal: It is too large (413), late (408), or breaks the rules of HTTP (400).
        """
        limit = self._max_body_bytes
        if request.content_length is not None and request.content_length > limit:
            raise too_large(request.content_length, limit)
        self._num_reading += 1
        try:
            async with asyncio.timeout(self._request_timeout_s):
                return await request.read()
        except web.HTTPRequestEntityTooLarge as error:
            raise too_large(None, limit) from error
        except TimeoutError as error:
            text = f"body: not complete after {self._request_timeout_s:g} s"
            raise Refusal(408, text, param="body", code="body_late") from error
        except (web.RequestPayloadError, HttpProcessingError) as error:
            raise bad_body("not valid HTTP") from error
        finally:
            self._num_reading -= 1
            if not self._num_reading:
                self._all_read.set()

    async def finish_reading(self) -> None:
        """Waits until all bodies that are under way are there, or late."""
        if self._num_reading:
            self._all_read.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._request_timeout_s):
                    await self._all_read.wait()

    async def send(
        self,
        request: web.Request,
        body: bytes | None,
        headers: Mapping[str, str] | None = None,
        *,
        without: tuple[str, ...] = (),
    ) -> aiohttp.ClientResponse:
        """Sends a request on, once; returns when the head of the answer is there.

        Args:
            request: Method, path, query and headers go on.
            body: The body; None: there is none.
            headers: Further ones; a header of the client's wins over one of these, but for Accept-Encoding.
            without: Beginnings of names of the client's headers that stay behind.

        Raises:
            Refusal: The engine cannot be reached or breaks off before an answer (502), or does not answer in time (504).
        """
        assert self._session is not None
        sent = end_to_end(request.headers, without=_NOT_SENT, prefixes=without)
        for name, value in (headers or {}).items():
            if name == "Accept-Encoding" or name not in sent:
                sent[name] = value
        path = request.raw_path if request.raw_path.startswith("/") else request.rel_url.raw_path_qs
        # A large body is written piece by piece, so that others get their turn.
        data = body if body is None or len(body) <= LARGE_BYTES else io.BytesIO(body)
        try:
            return await self._session.request(
                request.method,
                URL(self._base + path, encoded=True),
                headers=sent,
                data=data,
                allow_redirects=False,
            )
        except TimeoutError as error:
            raise engine_failed("did not answer in time", late=True) from error
        except aiohttp.ClientResponseError as error:
            raise engine_failed("sent no valid HTTP") from error
        except (aiohttp.ClientError, OSError) as error:
            raise engine_failed(f"cannot be reached ({type(error).__name__})") from error

    async def answer(
        self,
        request: web.Request,
        upstream: aiohttp.ClientResponse,
        reader: Reader | None,
        *,
        shortens: bool = False,
    ) -> web.StreamResponse:
        """Passes an answer on, no faster than the client reads it.

        Args:
            request: Whose answer it is.
            upstream: The engine's.
            reader: Sees the bytes; None: nobody does.
            shortens: The reader takes some of them out, so that the engine's Content-Length is not true any more.

        Raises:
            EngineLostError: The answer broke off; the client's connection is closed where it broke.
            ConnectionError: The client is gone.
        """
        without = frozenset({"content-length"}) if shortens else frozenset()
        response = web.StreamResponse(
            status=upstream.status,
            reason=upstream.reason,
            headers=end_to_end(upstream.headers, without=without),
        )
        await response.prepare(request)
        content = upstream.content
        while True:
            try:
                data = await content.readany()  # all that is there: one write for events that came together
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                if reader is not None:
                    await _write(response, reader.end())
                if request.transport is not None:
                    request.transport.close()  # no end of the body: the client sees the break as it was
                raise EngineLostError(type(error).__name__) from error
            if not data:
                break
            await _write(response, data if reader is None else reader.feed(data))
        if reader is not None:
            await _write(response, reader.end())
        await response.write_eof()
        return response


async def _write(response: web.StreamResponse, data: bytes) -> None:
    if data:
        await response.write(data)
