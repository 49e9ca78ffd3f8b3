"""What clients send is in no log record and not on stderr, whatever goes wrong."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from predictors.client import InProcessPredictor
from predictors.proxy.server import ProxyServer
from scheduler_core.errors import InputError
from tests.predictors.proxy.fake_engine import (
    CHAT,
    break_off,
    respond,
    running_engine,
    running_proxy,
    stalled,
    until,
)

CANARY = "canary4711"
HEADERS = (
    f"Host: x\r\nAuthorization: Bearer {CANARY}\r\napi-key: {CANARY}\r\n"
    f"x-tailcast-tenant: {CANARY}\r\nContent-Type: application/json\r\nConnection: close\r\n"
).encode()
BODY = json.dumps({"model": CANARY, "messages": [{"role": "user", "content": CANARY}], "n": 1}).encode()


def message(body: bytes = BODY, *, line: str = f"POST {CHAT}", headers: bytes = b"") -> bytes:
    """A request with a canary in each place."""
    length = b"Content-Length: %d\r\n\r\n" % len(body)
    return f"{line} HTTP/1.1\r\n".encode() + HEADERS + headers + length + body


@pytest.fixture(autouse=True)
def no_canary(
    log: io.StringIO, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> Iterator[None]:
    """Fails a test after which the canary is in a record, or in what a handler of the root logger has written."""
    caplog.set_level(logging.DEBUG)
    yield
    assert CANARY not in "".join(str(record.__dict__) + record.getMessage() for record in caplog.records)
    assert CANARY not in caplog.text + log.getvalue()
    assert CANARY not in "".join(capfd.readouterr())


CHUNKED = f"POST {CHAT} HTTP/1.1\r\n".encode() + HEADERS + b"Transfer-Encoding: chunked\r\n\r\n"
MALFORMED = {
    "request line": f"GET {CANARY} {CANARY}\r\n\r\n".encode(),
    "method": f"{CANARY} / HTTP/1.1\r\n\r\n".encode(),
    "header without colon": f"GET / HTTP/1.1\r\nAuthorization Bearer {CANARY}\r\n\r\n".encode(),
    "header value": f"GET / HTTP/1.1\r\nAuthorization: Bearer {CANARY}\0\r\n\r\n".encode(),
    "header too long": f"GET / HTTP/1.1\r\nAuthorization: {CANARY * 2000}\r\n\r\n".encode(),
    "line too long": f"GET /{CANARY * 2000} HTTP/1.1\r\n\r\n".encode(),
    "length": message(headers=f"Content-Length: {CANARY}\r\n".encode()),
    "length and chunks": message(headers=b"Transfer-Encoding: chunked\r\n"),
    "chunk size": CHUNKED + f"{CANARY}\r\n".encode(),
    "late chunk": CHUNKED + b"3\r\nabc\r\n" + f"z{CANARY}\r\n".encode(),
    "coding": message(headers=f"Transfer-Encoding: {CANARY}\r\n".encode()),
    "after the body": message() + f"{CANARY} {CANARY}\r\n\r\n".encode(),
    "JSON": message(BODY[:-1]),
    "UTF-8": message(BODY.replace(b"canary", b"\xffcanary4711", 1)),
    "gzip": message(headers=b"Content-Encoding: gzip\r\n"),
    "header in latin-1": message(headers=f"x-own: \xe9{CANARY}\r\n".encode("latin-1")),
    "tier": message(headers=b"x-tailcast-tier: 9\r\n"),
    "WebSocket": message(headers=b"Upgrade: websocket\r\nConnection: upgrade\r\n"),
    "too large": message(BODY + b" " * 2**20),
    "target": message(line=f"CONNECT {CANARY}:80"),
    "query": message(line=f"GET /v1/models?key={CANARY}"),
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_a_bad_request(name: str) -> None:
    options = {"client_priority": "replace", "max_body_mib": 1, "access_log": True, "request_timeout_s": 1.0}
    async with running_engine(respond) as fake, running_proxy(fake.url, engine="vllm", **options) as proxy:
        code = (await proxy.raw(MALFORMED[name]))[9:12]
        assert code == b"200" if name in ("query", "WebSocket") else code[:1] in (b"4", b"5")
        assert code not in (b"500", b"502", b"503", b"504")
        assert len(fake.requests) == (code == b"200")


@pytest.mark.parametrize(
    "error",
    [RuntimeError(CANARY), InputError("prompt", CANARY, CANARY), UnicodeDecodeError("x", b"", 0, 1, CANARY)],
)
@pytest.mark.parametrize("engine", ["vllm", "none"])
async def test_a_predictor_that_quotes(
    engine: str, error: Exception, artifact_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def responses(*arguments: Any, **options: Any) -> Any:
        raise error

    monkeypatch.setattr(InProcessPredictor, "responses", responses, raising=False)
    options: dict[str, Any] = {"engine": engine, "predictor": str(artifact_folder)}
    async with running_engine() as fake, running_proxy(fake.url, **options) as proxy:
        assert (await proxy.raw(message()))[9:12] == b"200"


async def test_an_engine_that_is_gone_or_breaks_off_or_is_silent_or_sends_no_http() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {CANARY}\r\n\r\n".encode())
        writer.close()

    async def breaks(request: web.Request, body: bytes) -> web.StreamResponse:
        return await break_off(request, CANARY.encode(), {"Content-Length": "99", "x-own": CANARY})

    async def code(url: str) -> bytes:
        async with running_proxy(url, engine="vllm", idle_timeout_s=0.2, access_log=True) as proxy:
            response = await proxy.raw(message())
            assert (b'"code": "engine_unavailable"' in response) is (response[9:10] == b"5")
            return response[9:12]

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert await code(url) == b"502"
    assert await code(url) == b"502"
    for script, expected in ((breaks, b"200"), (stalled, b"504")):
        async with running_engine(script) as fake:
            assert await code(fake.url) == expected
            await until(lambda fake=fake: not fake.num_in_flight)


async def test_a_fault_of_the_proxy_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails(self: ProxyServer, request: web.Request) -> web.StreamResponse:
        raise RuntimeError(f"{await request.read()!r} {request.headers}")

    monkeypatch.setattr(ProxyServer, "_generate", fails)
    async with running_engine() as fake, running_proxy(fake.url, engine="vllm") as proxy:
        assert (await proxy.raw(message()))[9:12] == b"500"
    assert "RuntimeError" in caplog.text
