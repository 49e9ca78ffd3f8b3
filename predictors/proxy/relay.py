"""Requests to the engine and its answers back, byte for byte."""

from __future__ import annotations

import io
import math
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

import aiohttp
from aiohttp import web
from yarl import URL

from predictors.proxy.answers import Reader
from predictors.proxy.headers import end_to_end
from predictors.proxy.problems import Refusal, engine_failed, too_large
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


class Relay:
    """The connections to one engine.

    Args:
        address: Where it is.
        max_body_bytes: Largest body of a request.
        retried: Called when a request is sent again.
    """

    def __init__(
        self, address: EngineAddress, max_body_bytes: int, retried: Callable[[], None] = lambda: None
    ) -> None:
        self._address = address
        self._base = address.url.rstrip("/")
        self._max_body_bytes = max_body_bytes
        self._retried = retried
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Makes the session; nothing is connected yet."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=_OWN_HEADERS,
            timeout=aiohttp.ClientTimeout(
                total=None,
                sock_connect=self._address.connect_timeout_s,
                sock_read=self._address.idle_timeout_s,
            ),
        )

    async def stop(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()

    async def read(self, request: web.Request) -> bytes:
        """The body of a request.

        Raises:
            Refusal: It is too large (413).
        """
        limit = self._max_body_bytes
        if request.content_length is not None and request.content_length > limit:
            raise too_large(request.content_length, limit)
        try:
            return await request.read()
        except web.HTTPRequestEntityTooLarge as error:
            raise too_large(None, limit) from error

    async def send(
        self, request: web.Request, body: bytes | None, headers: Mapping[str, str] | None = None
    ) -> aiohttp.ClientResponse:
        """Sends a request on; returns when the head of the answer is there.

        Args:
            request: Method, path, query and headers go on.
            body: What goes instead of the request's own body; None: its own, as it comes.
            headers: Further ones; a header of the client's wins over one of these, but for Accept-Encoding.

        Raises:
            Refusal: The engine cannot be reached (502), does not answer in time (504), or the body is too large (413).
        """
        assert self._session is not None
        sent = end_to_end(request.headers, without=_NOT_SENT)
        for name, value in (headers or {}).items():
            if name == "Accept-Encoding" or name not in sent:
                sent[name] = value
        path = request.raw_path if request.raw_path.startswith("/") else request.rel_url.raw_path_qs
        url = URL(self._base + path, encoded=True)
        data: bytes | io.BytesIO | AsyncIterator[bytes] | None
        data = None if body is not None else self._own_body(request, sent)
        for attempt in (1, 2):
            if body is not None:  # a large one is written piece by piece, so that others get their turn
                data = body if len(body) <= LARGE_BYTES else io.BytesIO(body)
            try:
                return await self._session.request(
                    request.method, url, headers=sent, data=data, allow_redirects=False
                )
            except (aiohttp.ServerDisconnectedError, ConnectionResetError) as error:
                # A kept connection may end in the moment it is used again, before the engine has seen the request.
                if attempt == 2 or (body is None and data is not None):
                    raise engine_failed("closed the connection without an answer") from error
                self._retried()
            except (aiohttp.ServerTimeoutError, TimeoutError) as error:
                raise engine_failed("did not answer in time", late=True) from error
            except (aiohttp.ClientError, OSError) as error:
                cause = error.__cause__
                if isinstance(cause, Refusal):
                    raise cause from error
                raise engine_failed(f"cannot be reached ({type(error).__name__})") from error
        raise AssertionError("the second attempt returns or raises")

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
                raise EngineLostError(str(error) or type(error).__name__) from error
            if not data:
                break
            await _write(response, data if reader is None else reader.feed(data))
        if reader is not None:
            await _write(response, reader.end())
        await response.write_eof()
        return response

    def _own_body(self, request: web.Request, sent: Mapping[str, str]) -> AsyncIterator[bytes] | None:
        if not request.body_exists:
            return None
        length = request.content_length
        if length is not None:
            if length > self._max_body_bytes:
                raise too_large(length, self._max_body_bytes)
            sent["Content-Length"] = str(length)  # type: ignore[index]
        return self._limited(request)

    async def _limited(self, request: web.Request) -> AsyncIterator[bytes]:
        size = 0
        async for data in request.content.iter_any():
            size += len(data)
            if size > self._max_body_bytes:
                raise too_large(None, self._max_body_bytes)
            yield data


async def _write(response: web.StreamResponse, data: bytes) -> None:
    if data:
        await response.write(data)
