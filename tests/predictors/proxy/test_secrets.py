"""What clients send is in no log record and not on stderr, whatever goes wrong."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from predictors.edge import set_up_logs
from predictors.proxy.completions import Completions
from scheduler_core.errors import InputError
from tests.predictors.proxy.fake_engine import CHAT, break_off, running_engine, running_proxy, stalled

CANARY = "canary4711"
HEADERS = (
    f"Host: x\r\nAuthorization: Bearer {CANARY}\r\napi-key: {CANARY}\r\n"
    f"x-tailcast-tenant: {CANARY}\r\nContent-Type: application/json\r\nConnection: close\r\n"
).encode()
BODY = json.dumps({"model": CANARY, "messages": [{"role": "user", "content": CANARY}], "n": 1}).encode()


def message(body: bytes = BODY, *, line: str = f"POST {CHAT}", headers: bytes = b"") -> bytes:
    """A request with a canary in each place."""
    return b"%s HTTP/1.1\r\n%s%sContent-Length: %d\r\n\r\n%s" % (
        line.encode(),
        HEADERS,
        headers,
        len(body),
        body,
    )


@pytest.fixture(autouse=True)
def no_canary(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Fails a test after which the canary is in a record, or in what a handler of the root logger has written."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    root = logging.getLogger()
    filters = {one: list(one.filters) for one in root.handlers}
    root.addHandler(handler)
    set_up_logs("text")
    caplog.set_level(logging.DEBUG)
    yield
    root.removeHandler(handler)
    for one, before in filters.items():
        one.filters[:] = before
    assert CANARY not in "".join(str(record.__dict__) + record.getMessage() for record in caplog.records)
    assert CANARY not in caplog.text + written.getvalue()
    assert CANARY not in "".join(capfd.readouterr())


CHUNKED = f"POST {CHAT} HTTP/1.1\r\n".encode() + HEADERS + b"Transfer-Encoding: chunked\r\n\r\n"
MALFORMED = {
    "request line": f"GET {CANARY} {CANARY}\r\n\r\n".encode(),
    "method": f"{CANARY} / HTTP/1.1\r\n\r\n".encode(),
    "version": f"GET /{CANARY} HTTP/9.{CANARY}\r\n\r\n".encode(),
    "header without colon": f"GET / HTTP/1.1\r\nAuthorization Bearer {CANARY}\r\n\r\n".encode(),
    "header name": f"GET / HTTP/1.1\r\nAuthorization{CANARY} : Bearer\r\n\r\n".encode(),
    "header value": f"GET / HTTP/1.1\r\nAuthorization: Bearer {CANARY}\0\r\n\r\n".encode(),
    "header too long": f"GET / HTTP/1.1\r\nAuthorization: {CANARY * 2000}\r\n\r\n".encode(),
    "line too long": f"GET /{CANARY * 2000} HTTP/1.1\r\n\r\n".encode(),
    "length": message(headers=f"Content-Length: {CANARY}\r\n".encode()),
    "two lengths": message(headers=b"Content-Length: 3\r\n"),
    "length and chunks": message(headers=b"Transfer-Encoding: chunked\r\n"),
    "chunk size": CHUNKED + f"{CANARY}\r\n".encode(),
    "chunk end": CHUNKED + b"3\r\n" + BODY,
    "late chunk": CHUNKED + b"3\r\nabc\r\n" + f"z{CANARY}\r\n".encode(),
    "coding": message(headers=f"Transfer-Encoding: {CANARY}\r\n".encode()),
    "after the body": message() + f"{CANARY} {CANARY}\r\n\r\n".encode(),
    "expect": message(headers=f"Expect: {CANARY}\r\n".encode()),
    "JSON": message(BODY[:-1]),
    "UTF-8": message(BODY.replace(b"canary", b"\xffcanary4711", 1)),
    "half a pair": message(BODY.replace(b"canary4711", b"\\ud800canary4711")),
    "gzip": message(headers=b"Content-Encoding: gzip\r\n"),
    "header in latin-1": message(headers=f"x-own: \xe9{CANARY}\r\n".encode("latin-1")),
    "tier": message(headers=b"x-tailcast-tier: 9\r\n"),
    "priority": message(BODY.replace(b'"n": 1', b'"priority": "canary4711"')),
    "upgrade": message(line="GET /", headers=f"Upgrade: {CANARY}\r\nConnection: upgrade\r\n".encode()),
    "WebSocket": message(headers=b"Upgrade: websocket\r\nConnection: upgrade\r\n"),
    "too large": message(BODY + b" " * 2**20),
    "announced too large": message().replace(b"Content-Length: ", b"Content-Length: 9999999"),
    "target": message(line=f"CONNECT {CANARY}:80"),
    "query": message(line=f"GET /v1/models?key={CANARY}"),
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_a_bad_request(name: str) -> None:
    options = {"lowest_priority": 0, "max_body_mib": 1, "access_log": True, "request_timeout_s": 1.0}
    async with running_engine(_ok) as fake, running_proxy(fake.url, engine="vllm", **options) as proxy:
        code = (await proxy.raw(MALFORMED[name]))[9:12]
        assert code == b"200" if name in ("query", "WebSocket") else code[:1] in (b"4", b"5")
        assert code not in (b"500", b"502", b"503", b"504")
        assert len(fake.requests) == (code == b"200")


async def _ok(request: web.Request, body: bytes) -> web.Response:
    return web.Response()


@pytest.mark.parametrize(
    "error",
    [RuntimeError(CANARY), InputError("prompt", CANARY, CANARY), UnicodeDecodeError("x", b"", 0, 1, CANARY)],
)
@pytest.mark.parametrize("engine", ["vllm", "none"])
async def test_a_predictor_that_quotes(
    engine: str, error: Exception, artifact_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from predictors.client import InProcessPredictor

    async def responses(*arguments: Any, **options: Any) -> Any:
        raise error

    monkeypatch.setattr(InProcessPredictor, "responses", responses, raising=False)
    options: dict[str, Any] = {"engine": engine, "predictor": str(artifact_folder)}
    async with running_engine() as fake, running_proxy(fake.url, **options) as proxy:
        assert (await proxy.raw(message()))[9:12] == b"200"


@pytest.mark.parametrize("predictor", ["artifact", "grpc"])
async def test_a_served_model_that_is_none_of_the_artifacts(predictor: str, artifact_folder: Path) -> None:
    from predictors.runtime import open_runtime
    from tests.predictors.fakes import running_server

    async with running_engine() as fake, running_server(open_runtime(artifact_folder)) as (_, address):
        place = f"grpc://{address}" if predictor == "grpc" else str(artifact_folder)
        async with running_proxy(fake.url, engine="vllm", predictor=place, served_model=None) as proxy:
            for prompt in ("x", "nan nan", "crash"):
                body = BODY.replace(b'"content": "', b'"content": "%s ' % prompt.encode())
                assert (await proxy.raw(message(body)))[9:12] == b"200"


async def test_an_engine_that_is_gone_or_breaks_off_or_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        gone = f"http://127.0.0.1:{taken.getsockname()[1]}"

    async def breaks(request: web.Request, body: bytes) -> web.StreamResponse:
        return await break_off(request, CANARY.encode(), {"Content-Length": "99", "x-own": CANARY})

    async with running_proxy(gone, engine="vllm") as proxy:
        assert (await proxy.raw(message()))[9:12] == b"502"
    for script, code in ((breaks, b"200"), (stalled, b"504")):
        async with (
            running_engine(script) as fake,
            running_proxy(fake.url, engine="vllm", idle_timeout_s=0.2, access_log=True) as proxy,
        ):
            assert (await proxy.raw(message()))[9:12] == code


async def test_an_engine_that_speaks_no_http() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {CANARY}\r\n\r\n".encode())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, running_proxy(url, engine="vllm") as proxy:
        assert (await proxy.raw(message()))[9:12] == b"502"


async def test_a_fault_of_the_proxy_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails(self: Completions, request: web.Request) -> web.StreamResponse:
        raise RuntimeError(f"{await request.read()!r} {request.headers}")

    monkeypatch.setattr(Completions, "handle", fails)
    async with running_engine() as fake, running_proxy(fake.url, engine="vllm") as proxy:
        assert (await proxy.raw(message()))[9:12] == b"500"
    assert "RuntimeError" in caplog.text


async def test_a_client_that_hangs_up() -> None:
    async with running_engine() as fake, running_proxy(fake.url, engine="vllm") as proxy:
        host, port = proxy.url.removeprefix("http://").split(":")
        for data in (message()[:-5], message(), CHUNKED + b"3\r\n"):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(data)
            await asyncio.sleep(0)
            writer.transport.abort()
        assert (await proxy.raw(message()))[9:12] == b"200"
