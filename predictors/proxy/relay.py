"""Forwarding of requests to the engine and of responses to the client, byte for byte."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import re
import select
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
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

from predictors.hosting.tls import client_context
from predictors.proxy.config import ProxyConfig
from predictors.proxy.engine_monitor import EngineMonitor
from predictors.proxy.errors import EngineLostError, Refusal, bad_body, engine_failed
from predictors.proxy.responses import Reader

logger = logging.getLogger(__name__)
#: Shorter than the keep-alive of servers (uvicorn: 5 s), so that connections about to be closed are not used.
KEEPALIVE_S = 2.0
LARGE_BYTES = 2**19
#: Hop-by-hop headers (RFC 9110, section 7.6.1).
HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "proxy-connection", "proxy-authenticate", "proxy-authorization"}
    | {"te", "trailer", "transfer-encoding", "upgrade"}
)
_NOT_SENT = frozenset({"host", "content-length", "expect"})
#: Headers of the proxy that replace those of the client: the priority contains the client's own, and the span of the proxy
#: is a child of the client's.
_REPLACED = frozenset(
    {"Accept-Encoding", "X-Vllm-Priority", "x-dynamo-request-priority", "traceparent", "tracestate"}
)
_ORIGIN = re.compile(r"https?://[^/?#]*", re.IGNORECASE)
#: Maximum seconds to connect to the engine, and of a probe.
CONNECT_S = PROBE_S = 5.0
_OWN_HEADERS = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")


def engine_tls(config: ProxyConfig) -> ssl.SSLContext | bool:
    """How engines at https:// are verified, for `Relay`: with the current content of `engine_ca`, or True: by the CAs of the
    system. InputError for a missing or invalid file."""
    return True if config.engine_ca is None else client_context(config.engine_ca, "engine_ca")


def origin_form(target: str) -> str | None:
    """Path and query of a request target, which is a path or an absolute URL, byte for byte; None for others."""
    absolute = _ORIGIN.match(target)
    if absolute is not None:
        target = target[absolute.end() :]
        target = target if target.startswith("/") else f"/{target}"
    return target if target.startswith("/") else None


def end_to_end(
    headers: CIMultiDictProxy[str], *, without: frozenset[str] = frozenset(), prefixes: tuple[str, ...] = ()
) -> CIMultiDict[str]:
    """The headers to forward, in their order, including repeated ones. Hop-by-hop headers, the names
    `without` and names with `prefixes` (lower case; `_` equals `-`, as in some servers) are dropped."""
    dropped = HOP_BY_HOP | without
    if "Connection" in headers:
        names = (name.strip().lower() for value in headers.getall("Connection") for name in value.split(","))
        dropped |= frozenset(names)
    passed = ((name, value) for name, value in headers.items() if name.lower() not in dropped)
    if prefixes:
        passed = (pair for pair in passed if not pair[0].lower().replace("_", "-").startswith(prefixes))
    return CIMultiDict((name, _as_utf8(value)) for name, value in passed)


def _as_utf8(value: str) -> str:
    """Decodes a header value of a response that is not UTF-8 as Latin-1; aiohttp would omit it."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return value.encode("utf-8", "surrogateescape").decode("latin-1")
    return value


class LiveConnector(aiohttp.TCPConnector):
    """Reuses an idle connection only if the engine has not closed it.

    A request is never sent twice, because the engine may have processed it even if its response is lost. So
    it must not be sent over a closed connection.
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
    """Whether an idle connection has input: its end, or bytes that belong to no request."""
    file = None if transport is None else transport.get_extra_info("socket")
    if file is None or file.fileno() < 0:
        return True
    poll = select.poll()
    poll.register(file.fileno(), select.POLLIN)
    return bool(poll.poll(0))


async def _send_once(request: aiohttp.ClientRequest, handler: ClientHandlerType) -> aiohttp.ClientResponse:
    """Converts errors after which aiohttp would send GET, PUT and DELETE again."""
    try:
        return await handler(request)
    except aiohttp.ClientConnectorError:
        raise  # nothing was sent, and aiohttp does not retry
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        raise engine_failed("closed the connection without a response") from error


@dataclass(slots=True)
class HeldBody:
    """The body of a request, and the memory that it counts for in bytes."""

    data: bytes = b""
    num_bytes: int = 0


class Relay:
    """Connections to the engine at `url`. `config` and `tls`, how an engine at https:// is verified, may be replaced while requests
    are in flight; `monitor` observes them."""

    def __init__(self, config: ProxyConfig, url: str, tls: ssl.SSLContext | bool) -> None:
        self._url = url.rstrip("/")
        self.config, self.tls = config, tls
        self.monitor = EngineMonitor(self._probe)
        self.num_held_bytes = 0
        self._num_reading = 0
        self._all_read = asyncio.Event()
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Creates the session, without connecting."""
        self._session = aiohttp.ClientSession(
            connector=LiveConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=_OWN_HEADERS,
            middlewares=(_send_once,),
        )

    async def stop(self) -> None:
        """Closes the connections."""
        await self.monitor.close()
        if self._session is not None:
            await self._session.close()

    @contextlib.asynccontextmanager
    async def body(self, request: web.Request) -> AsyncIterator[HeldBody]:
        """The body of a request, which counts as held in memory until the end of the block. Refusal if it is too large
        (413), late (408) or not valid HTTP (400), or if too many bodies are held (429)."""
        held = HeldBody()
        try:
            await self._read(request, held)
            yield held
        finally:
            self.num_held_bytes -= held.num_bytes

    def hold(self, body: HeldBody, num_bytes: int) -> None:
        """Adds to the memory of a body; Refusal (429) if too many bodies are held."""
        body.num_bytes += num_bytes
        self.num_held_bytes += num_bytes
        if self.num_held_bytes > (limit := self.config.max_held_mib) * 2**20:
            text = f"bodies in memory: got {self.num_held_bytes / 2**20:.0f} MiB; allowed: {limit} MiB"
            raise Refusal(429, text, "bodies_full")

    async def _read(self, request: web.Request, held: HeldBody) -> None:
        """Reads the data of a body; raises as `body`."""
        limit, timeout_s = self.config.max_body_mib * 2**20, self.config.request_timeout_s
        if request.content_length is not None and request.content_length > limit:
            raise _too_large(f"{request.content_length} bytes", limit)
        parts: list[bytes] = []
        self._num_reading += 1
        try:
            async with asyncio.timeout(timeout_s):
                while data := await request.content.readany():
                    parts.append(data)
                    self.hold(held, len(data))
                    if held.num_bytes > limit:
                        raise _too_large("more", limit)
            held.data = b"".join(parts)
        except TimeoutError as error:
            text = f"body: not complete after {timeout_s:g} s"
            raise Refusal(408, text, "body_late", "body") from error
        except (web.RequestPayloadError, HttpProcessingError) as error:
            raise bad_body("not valid HTTP") from error
        finally:
            self._num_reading -= 1
            if not self._num_reading:
                self._all_read.set()

    async def finish_reading(self) -> None:
        """Waits until all bodies that are being read are complete or late."""
        if self._num_reading:
            self._all_read.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.config.request_timeout_s):
                    await self._all_read.wait()

    async def send(
        self,
        request: web.Request,
        body: bytes | None,
        headers: Mapping[str, str],
        without: tuple[str, ...],
        head_s: float | None = None,
    ) -> aiohttp.ClientResponse:
        """Forwards a request once, and returns after the head of the response. Headers of the client override
        `headers`, except those in `_REPLACED`; those with the prefixes `without` are dropped. Refusal if the
        engine cannot be reached or disconnects before a response (502), or does not respond in time (504): within
        `idle_timeout_s`, and within `head_s` seconds if that is not None."""
        assert self._session is not None
        sent = end_to_end(request.headers, without=_NOT_SENT, prefixes=without)
        for name, value in headers.items():
            if name in _REPLACED or name not in sent:
                sent[name] = value
        path, config = origin_form(request.raw_path), self.config
        # A large body is sent in chunks, so that it does not block the event loop.
        data = body if body is None or len(body) <= LARGE_BYTES else io.BytesIO(body)
        try:
            async with asyncio.timeout(head_s):
                response = await self._session.request(
                    request.method,
                    URL(f"{self._url}{path}", encoded=True),
                    headers=sent,
                    data=data,
                    ssl=self.tls,
                    allow_redirects=False,
                    timeout=aiohttp.ClientTimeout(
                        total=None, sock_connect=CONNECT_S, sock_read=config.idle_timeout_s
                    ),
                )
        except aiohttp.ConnectionTimeoutError as error:
            self.monitor.failed("cannot be reached: no connection in time")
            refusal = engine_failed("did not respond in time", late=True)
            refusal.was_sent = False
            raise refusal from error
        except TimeoutError as error:
            self.monitor.doubt()
            raise engine_failed("did not respond in time", late=True) from error
        except aiohttp.ClientResponseError as error:
            raise engine_failed("sent an invalid HTTP response") from error
        except (aiohttp.ClientError, OSError) as error:
            refusal = engine_failed(f"cannot be reached ({type(error).__name__})")
            refusal.was_sent = not isinstance(error, aiohttp.ClientConnectorError)
            self.monitor.failed(f"cannot be reached ({type(error).__name__})")
            raise refusal from error
        except Refusal:
            self.monitor.doubt()
            raise
        self.monitor.succeeded()
        return response

    async def _probe(self) -> None:
        """Sends GET /health; Refusal if there is no response, or one that says that the engine does not serve."""
        assert self._session is not None
        url = URL(f"{self._url}/health", encoded=True)
        timeout = aiohttp.ClientTimeout(total=PROBE_S)
        try:
            async with self._session.get(
                url, ssl=self.tls, timeout=timeout, allow_redirects=False
            ) as response:
                status = response.status
        except TimeoutError as error:
            raise engine_failed("did not respond in time to GET /health", late=True) from error
        except (aiohttp.ClientError, OSError) as error:
            raise engine_failed(f"cannot be reached ({type(error).__name__})") from error
        if status in (502, 503, 504):
            raise engine_failed(f"answers GET /health with {status}")

    async def read_metrics(self) -> str:
        """The engine's /metrics; empty if it has none or cannot be reached."""
        assert self._session is not None
        url = URL(f"{self._url}/metrics", encoded=True)
        timeout = aiohttp.ClientTimeout(total=PROBE_S)
        try:
            async with self._session.get(url, ssl=self.tls, timeout=timeout) as response:
                data = await response.read()
                return data.decode("utf-8", "replace") if response.status == 200 else ""
        except aiohttp.ClientConnectorError as error:
            self.monitor.failed(f"cannot be reached ({type(error).__name__})")
        except (aiohttp.ClientError, TimeoutError, OSError):
            logger.debug("the engine has no /metrics", exc_info=True)
        return ""

    async def respond(
        self, request: web.Request, upstream: aiohttp.ClientResponse, reader: Reader | None
    ) -> web.StreamResponse:
        """Forwards a response, no faster than the client reads it. ConnectionError if the client disconnects;
        EngineLostError, after closing the client's connection, if the engine disconnects."""
        shortens = reader is not None and reader.shortens  # Content-Length of the engine would be wrong
        headers = end_to_end(upstream.headers, without=frozenset({"content-length"} if shortens else ()))
        response = web.StreamResponse(status=upstream.status, reason=upstream.reason, headers=headers)
        await response.prepare(request)
        failure: Exception | None = None
        is_open = True
        while is_open:
            data = b""
            try:
                data = await upstream.content.readany()  # one write for events that arrive together
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                failure = error
            is_open = bool(data)
            if reader is not None:
                data = reader.feed(data) if is_open else reader.end()
            if data:
                await response.write(data)
        if failure is not None:
            if request.transport is not None:
                request.transport.close()  # without ending the body, so that the client detects the error
            raise EngineLostError(type(failure).__name__) from failure
        await response.write_eof()
        return response


def _too_large(size: str, limit: int) -> Refusal:
    text = f"body: got {size}; allowed: at most {limit} bytes"
    return Refusal(413, text, "body_too_large", "body")
