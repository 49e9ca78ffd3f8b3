"""One HTTP client for all servers: sends a request, reads the answer, names what went wrong."""

from __future__ import annotations

import asyncio
import errno
import json
import time
from collections.abc import Mapping
from typing import Any

import aiohttp
from yarl import URL

from data_gen.openai.options import EngineError, OpenAIOptions
from data_gen.openai.pace import retry_after_s
from data_gen.openai.wire import Reply, ReplyError, StreamReader, read_refusal, read_reply
from scheduler_core.errors import InputError
from scheduler_core.json_text import parse_json

UNREACHABLE = "unreachable"
DISCONNECTED = "disconnected"
_KEEP_ALIVE_S = 30.0
_PROBE_S = 10.0
_SPARE_DESCRIPTORS = 128


class Client:
    """Holds the connections; lives in one event loop."""

    def __init__(self, options: OpenAIOptions, secrets: Mapping[str, str]) -> None:
        path = "/chat/completions" if options.api == "chat" else "/completions"
        self._urls = {url: URL(url + path) for url in options.base_urls}
        self._stream = options.stream
        self._hidden = [value.removeprefix("Bearer ") for value in secrets.values() if len(value) > 5]
        self._timeout = aiohttp.ClientTimeout(
            total=options.timeout_s,
            sock_connect=options.connect_timeout_s,
            sock_read=options.chunk_timeout_s if options.stream else None,
        )
        self._now = asyncio.get_running_loop().time
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Content-Type": "application/json", "Accept-Encoding": "identity", **secrets},
            timeout=self._timeout,
            trust_env=options.trust_env,
        )

    async def ask(self, base_url: str, body: bytes) -> Reply:
        """Sends one request.

        Raises:
            ReplyError: Whatever kept it from being answered; kind "unreachable" if no connection came about.
            EngineError: If this process may not open more connections.
        """
        try:
            async with self._session.post(self._urls[base_url], data=body, allow_redirects=False) as response:
                if response.status != 200:
                    refusal = read_refusal(response.status, await response.read())
                    refusal.retry_after_s = retry_after_s(response.headers, time.time())
                    raise self._without_secrets(refusal)
                if not self._stream:
                    return read_reply(await response.read())
                return await self._read_stream(response)
        except (aiohttp.ClientError, OSError) as error:
            raise self._named(error) from error

    async def _read_stream(self, response: aiohttp.ClientResponse) -> Reply:
        if response.content_type != "text/event-stream":
            return read_reply(await response.read())
        reader = StreamReader()
        async for data in response.content.iter_any():
            reader.feed(data, self._now())
        return reader.finish()

    def _named(self, error: Exception) -> ReplyError:
        reason = str(error) or type(error).__name__
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            raise EngineError(f"too many open connections for this process: {reason}") from error
        kind = "malformed"
        if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
            kind = UNREACHABLE
        elif isinstance(error, TimeoutError):
            kind = "timeout"
        elif isinstance(error, aiohttp.ClientPayloadError):
            kind = "truncated"
        elif isinstance(error, aiohttp.ClientConnectionError | OSError):
            kind = DISCONNECTED
        return self._without_secrets(ReplyError(kind, reason, retry=True))

    def _without_secrets(self, error: ReplyError) -> ReplyError:
        for value in self._hidden:
            error.reason = error.reason.replace(value, "***")
        return error

    async def get(self, url: str) -> tuple[int, Any]:
        """Status and JSON (None if it is none) of a page.

        Raises:
            ReplyError: If there is no answer.
        """
        return await self._small("GET", url, None)

    async def post(self, url: str, fields: Mapping[str, Any]) -> tuple[int, Any]:
        """Status and JSON of the answer to a small request; raises as `get`."""
        return await self._small("POST", url, json.dumps(fields).encode())

    async def _small(self, method: str, url: str, body: bytes | None) -> tuple[int, Any]:
        timeout = aiohttp.ClientTimeout(total=_PROBE_S)
        try:
            async with self._session.request(method, url, data=body, timeout=timeout) as response:
                payload = await response.read()
                try:
                    return response.status, parse_json(payload)
                except ValueError:
                    return response.status, None
        except (aiohttp.ClientError, OSError) as error:
            raise self._named(error) from error

    async def close(self) -> None:
        """Closes all connections."""
        await self._session.close()


def allow_descriptors(num_connections: int) -> None:
    """Raises this process's soft limit on open files as far as so many connections need.

    Raises:
        InputError: If the hard limit is lower.
    """
    try:
        import resource
    except ImportError:
        return
    needed = num_connections + _SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        allowed = f"at most {hard - _SPARE_DESCRIPTORS} over all servers: this process may open {hard} files"
        raise InputError("concurrency", num_connections, allowed)
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
