"""HTTP client for all servers of a run: sends requests, reads responses of limited size, and classifies errors."""

from __future__ import annotations

import contextlib
import email.utils
import errno
import math
import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from yarl import URL

from data_gen.openai.options import EngineError, OpenAIOptions
from data_gen.openai.responses import (
    ResponseError,
    ServerResponse,
    read_error_response,
    read_response,
)
from scheduler_core.errors import InputError
from scheduler_core.ranges import parse_number
from scheduler_core.shell.json_text import parse_json

UNREACHABLE = "unreachable"
DISCONNECTED = "disconnected"
#: Maximum size of a response; larger ones are rejected.
MAX_BODY_BYTES = 64 << 20
_KEEP_ALIVE_S = 30.0
_PROBE_S = 10.0
_CONNECT_S = 20.0
_SPARE_DESCRIPTORS = 128

#: Exception types of aiohttp -> kind of failure; the first match is used.
_KINDS = (
    ((aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError), UNREACHABLE),
    (TimeoutError, "timeout"),
    (aiohttp.ClientPayloadError, "truncated"),
    ((aiohttp.ClientConnectionError, OSError), DISCONNECTED),
)
#: Engine by `owned_by` of /v1/models.
_OWNERS = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp", "library": "ollama"}
#: (engine, path, field with its version).
_VERSION_PAGES = (
    ("vllm", "/version", "version"),
    ("sglang", "/get_server_info", "version"),
    ("llama.cpp", "/props", "build_info"),
    ("ollama", "/api/version", "version"),
    ("tgi", "/info", "version"),
)
#: Engines that support a seed per request.
SEEDED_ENGINES = ("vllm", "llama.cpp", "ollama", "tgi")


@dataclass(frozen=True, slots=True)
class ServerIdentity:
    """Engine, version and served model of an address."""

    name: str
    version: str
    model: str


class CompletionsClient:
    """Connection pool for all addresses; must be used in a single event loop."""

    def __init__(self, options: OpenAIOptions, secrets: Mapping[str, str]) -> None:
        path = "/chat/completions" if options.api == "chat" else "/completions"
        self._urls = {url: URL(url + path) for url in options.base_urls}
        self._secrets = [value.removeprefix("Bearer ") for value in secrets.values() if len(value) > 5]
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Content-Type": "application/json", "Accept-Encoding": "identity", **secrets},
            timeout=aiohttp.ClientTimeout(total=options.timeout_s, sock_connect=_CONNECT_S),
            trust_env=options.trust_env,
            auto_decompress=False,  # compressed responses are not accepted, which rules out decompression bombs
        )

    async def complete(self, base_url: str, body: bytes, max_tokens: int) -> ServerResponse:
        """Sends one completion request; ResponseError for any failure (kind "unreachable" if no connection could be
        established), EngineError if this process cannot open more connections."""
        try:
            async with self._session.post(self._urls[base_url], data=body, allow_redirects=False) as response:
                if response.status != 200:
                    error = read_error_response(response.status, await _body(response))
                    error.retry_after_s = retry_after_s(response.headers, time.time())
                    raise self._redacted(error)
                return read_response(await _body(response), max_tokens)
        except (aiohttp.ClientError, OSError) as error:
            raise self._named(error) from error

    async def get(self, url: str) -> tuple[int, Any]:
        """Status and JSON content (None if invalid) of a URL; ResponseError if there is no response."""
        try:
            async with self._session.get(url, timeout=aiohttp.ClientTimeout(total=_PROBE_S)) as response:
                payload = await _body(response)
        except (aiohttp.ClientError, OSError) as error:
            raise self._named(error) from error
        try:
            return response.status, parse_json(payload)
        except ValueError:
            return response.status, None

    def _named(self, error: Exception) -> ResponseError:
        reason = str(error) or type(error).__name__
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            raise EngineError(f"too many open connections for this process: {reason}") from error
        kind = next((kind for types, kind in _KINDS if isinstance(error, types)), "malformed")
        return self._redacted(ResponseError(kind, reason, retry=True))

    def _redacted(self, error: ResponseError) -> ResponseError:
        for secret in self._secrets:
            error.reason = error.reason.replace(secret, "***")
        return error

    async def identify(self, base_url: str, model: str) -> ServerIdentity:
        """Identifies engine, version and model of a base URL ending in /v1; the model is `model`, or if empty the only one.

        InputError if the server does not serve the model or rejects the key; ResponseError if it does not respond or is
        not ready."""
        status, listed = await self.get(base_url + "/models")
        if status in (401, 403):
            allowed = "a variable with a key that the server accepts"
            raise InputError("api_key_env", f"HTTP {status} from {base_url}", allowed)
        if status in (408, 425, 429) or status >= 500:
            raise ResponseError(f"http_{status}", f"HTTP {status} from {base_url}/models", retry=True)
        entries = listed.get("data") if status == 200 and isinstance(listed, dict) else None
        models = [entry for entry in entries if isinstance(entry, dict) and "id" in entry] if entries else []
        owners = {str(entry["id"]): str(entry.get("owned_by")) for entry in models}
        if not model and len(owners) != 1:
            allowed = f"one of the names at {base_url}/models: {', '.join(owners)[:200]}"
            raise InputError("model", model, allowed)
        names = [name for name in (model or next(iter(owners)), f"{model}:latest") if name in owners]
        if owners and not names:
            raise InputError("model", model, f"a model of the server: {', '.join(owners)[:200]}")
        model = names[0] if names else model
        engine = _OWNERS.get(owners.get(model, ""))
        for name, page, key in _VERSION_PAGES:
            if engine in (None, name):
                status, content = await self.get(base_url.removesuffix("/v1") + page)
                if status == 200 and isinstance(content, dict) and isinstance(content.get(key), str):
                    return ServerIdentity(name, content[key], model)
        return ServerIdentity(engine or "openai-compatible", "unknown", model)

    async def close(self) -> None:
        """Closes all connections."""
        await self._session.close()


async def _body(response: aiohttp.ClientResponse) -> bytes:
    if response.content_length is not None and response.content_length <= MAX_BODY_BYTES:
        return await response.read()
    parts, size = [], 0
    async for data in response.content.iter_any():
        size += len(data)
        if size > MAX_BODY_BYTES:
            raise ResponseError("malformed", f"a response of more than {MAX_BODY_BYTES} bytes", retry=True)
        parts.append(data)
    return b"".join(parts)


def retry_after_s(headers: Mapping[str, str], now_unix_s: float) -> float | None:
    """Requested wait in seconds, from Retry-After (seconds or HTTP date) or retry-after-ms; None if missing or invalid."""
    for name, unit_s in (("retry-after-ms", 1e-3), ("Retry-After", 1.0)):
        with contextlib.suppress(ValueError):
            seconds = parse_number(headers.get(name, "")) * unit_s
            if math.isfinite(seconds):
                return max(0.0, seconds)
    try:
        moment = email.utils.parsedate_to_datetime(headers.get("Retry-After", ""))
    except (TypeError, ValueError):
        return None
    return max(0.0, moment.timestamp() - now_unix_s)


def allow_descriptors(num_connections: int) -> None:
    """Raises the soft limit on open files of this process for that many connections; InputError if the hard limit is too
    low."""
    needed = num_connections + _SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        allowed = f"at most {hard - _SPARE_DESCRIPTORS} over all servers (limit of open files: {hard})"
        raise InputError("concurrency", num_connections, allowed)
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
