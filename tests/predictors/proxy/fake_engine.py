"""A scripted engine of the OpenAI API, and a proxy in front of it."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import aiohttp
from aiohttp import web
from yarl import URL

from predictors.proxy.config import ProxyConfig
from predictors.proxy.server import ProxyServer
from tests import fake_openai
from tests.fake_openai import FakeEngine, Script, break_off, event  # noqa: F401
from tests.waiting import PATIENCE_S, until

CHAT = "/v1/chat/completions"


def stream_events(words: Iterable[str], usage: int | None, *, null_usage: bool = False) -> list[bytes]:
    """A streamed completion; with `usage` its last event has the counts, with `null_usage` all others have null."""
    null: dict[str, Any] = {"usage": None} if null_usage else {}
    events = [event({"id": "c", "choices": [{"index": 0, "delta": {"content": word}, "finish_reason": None}], **null}) for word in words]  # fmt: skip
    events.append(event({"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], **null}))
    if usage is not None:
        counts = {"prompt_tokens": 3, "completion_tokens": usage}
        events.append(event({"id": "c", "choices": [], "usage": counts}))
    return [*events, b"data: [DONE]\n\n"]


def completion(usage: int, reason: str = "stop") -> dict[str, Any]:
    """A completion that is not streamed."""
    choice = {"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": reason}
    counts = {"prompt_tokens": 3, "completion_tokens": usage}
    return {"id": "c", "model": "tiny-llm", "choices": [choice], "usage": counts}


async def plain(request: web.Request, body: bytes, tokens: int = 7) -> web.StreamResponse:
    """So many tokens, streamed where that is asked for, with counts where those are asked for."""
    content = json.loads(body) if body.startswith(b"{") else {}
    if not content.get("stream"):
        return web.json_response(completion(tokens))
    wants = (content.get("stream_options") or {}).get("include_usage") is True
    return await streamed(request, stream_events(["a", "b", "c"], tokens if wants else None))


async def streamed(request: web.Request, pieces: Iterable[bytes]) -> web.StreamResponse:
    """Each piece is a chunk of its own."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    for piece in pieces:
        await response.write(piece)
        await asyncio.sleep(0)
    await response.write_eof()
    return response


def gated(go: asyncio.Event, tokens: int = 7) -> Script:
    """As `plain`, once the event is set."""

    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        await go.wait()
        return await plain(request, body, tokens)

    return script


def paused(events: list[bytes], go: asyncio.Event | None) -> Script:
    """The first event, then the others once `go` is set; without it the stream stalls for ever."""

    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(events[0])
        await (go or asyncio.Event()).wait()
        await response.write(b"".join(events[1:]))
        await response.write_eof()
        return response

    return script


async def respond(request: web.Request, body: bytes) -> web.Response:
    return web.Response()


async def stalled(request: web.Request, body: bytes) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


def running_engine(script: Script = plain) -> AbstractAsyncContextManager[FakeEngine]:
    return fake_openai.running_engine(script)


@dataclass
class RunningProxy:
    server: ProxyServer
    url: str
    admin: str
    client: aiohttp.ClientSession

    async def post(self, content: Any, headers: dict[str, str] | None = None, path: str = CHAT) -> tuple[int, bytes]:  # fmt: skip
        """Status and body of the response; bytes are sent as they are."""
        data = content if isinstance(content, bytes | BytesIO) else json.dumps(content).encode()
        return await self.send("POST", path, data, {"Content-Type": "application/json"} | (headers or {}))

    async def send(self, method: str, path: str, data: Any, headers: dict[str, str]) -> tuple[int, bytes]:
        """As `post`, for any method and with the path's own bytes."""
        url = URL(self.url + path, encoded=True)
        async with self.client.request(method, url, data=data, headers=headers) as response:
            return response.status, await response.read()

    async def raw(self, data: bytes) -> bytes:
        """Everything that the proxy sends for these bytes until it closes the connection."""
        host, port = self.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(data)
            async with asyncio.timeout(PATIENCE_S):
                return await reader.read()
        except ConnectionResetError:
            return b""
        finally:
            writer.close()

    async def metric(self, line: str) -> float:
        """The number of a line of /metrics; 0 where there is none."""
        async with self.client.get(self.admin + "/metrics") as response:
            text = await response.text()
        return next((float(row.split()[-1]) for row in text.splitlines() if row.startswith(line + " ")), 0.0)

    async def reaches(self, line: str, value: float) -> None:
        """Waits until the number of a line of /metrics is at least this."""

        async def is_reached() -> bool:
            return await self.metric(line) >= value

        await until(is_reached)


@asynccontextmanager
async def running_proxy(engine_url: str, **options: Any) -> AsyncIterator[RunningProxy]:
    """A proxy on free ports with these options of `tailcast-proxy`."""
    defaults: dict[str, Any] = {
        "deadline_s": 20.0,
        "served_model": "",
        "predictor": "none",
        "engine_probe_s": 0.0,
    }
    config = ProxyConfig(engine_url=engine_url, port=0, admin_port=0, **(defaults | options))
    server = ProxyServer(config)
    port, admin = await server.start()
    scheme, host = ("http", "127.0.0.1") if config.tls_cert is None else ("https", "localhost")
    url = f"{scheme}://{host}:{port}"
    try:
        timeout = aiohttp.ClientTimeout(total=60)
        async with aiohttp.ClientSession(auto_decompress=False, timeout=timeout) as client:
            yield RunningProxy(server, url, f"{scheme}://{host}:{admin}", client)
    finally:
        await server.stop()


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "tiny-llm", "messages": [{"role": "user", "content": text}], "max_tokens": 500} | more
