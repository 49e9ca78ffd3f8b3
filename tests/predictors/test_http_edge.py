"""The edge of an HTTP port: half-sent requests end, compressed bodies are refused, error pages quote nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from predictors.http_edge import HttpRunner, read_body
from scheduler_core.errors import InputError

CANARY = b"canary-4711"
MAX_BYTES = 2**20
HEAD = b"POST / HTTP/1.1\r\nHost: x\r\n"


async def echo(request: web.Request) -> web.Response:
    try:
        return web.Response(body=await read_body(request, timeout_s=0.05))
    except InputError as error:
        return web.Response(status=400, text=str(error))


async def fail(request: web.Request) -> web.Response:
    raise RuntimeError(CANARY.decode())


@contextlib.asynccontextmanager
async def serving(request_timeout_s: float) -> AsyncIterator[int]:
    application = web.Application(client_max_size=MAX_BYTES)
    application.router.add_post("/", echo)
    application.router.add_get("/fail", fail)
    runner = HttpRunner(application, request_timeout_s=request_timeout_s, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@pytest.fixture
async def port() -> AsyncIterator[int]:
    async with serving(60.0) as port:
        yield port


async def replies(port: int, *parts: bytes) -> bytes:
    """All that a connection gives, its parts sent one after another, until the server closes it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        return await asyncio.wait_for(reader.read(), 60)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def whole(body: bytes, *headers: bytes) -> bytes:
    lines = b"".join(header + b"\r\n" for header in (b"Connection: close", *headers))
    return HEAD + b"Content-Length: %d\r\n" % len(body) + lines + b"\r\n" + body


async def status_and_body(port: int, request: bytes) -> tuple[int, bytes]:
    head, _, body = (await replies(port, request)).partition(b"\r\n\r\n")
    return int(head.split()[1]), body


async def test_half_a_head_ends() -> None:
    async with serving(0.05) as port:
        for parts in ((b"P",), (HEAD,), (b"POST / HTTP/1.1\r\nX-Any: ", b"a")):
            assert await replies(port, *parts) == b""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(whole(b"a").replace(b"close", b"keep-alive"))
        await reader.readuntil(b"\r\n\r\na")
        writer.write(b"GET ")
        assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()


@pytest.mark.parametrize(
    "half",
    [b"Content-Length: 10\r\n\r\nab", b"Transfer-Encoding: chunked\r\n\r\n5\r\nab"],
    ids=["length", "chunks"],
)
async def test_half_a_body_is_408(port: int, half: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD + half)
    found = await asyncio.wait_for(reader.readuntil(b" 0.05 s\n"), 60)
    assert found.startswith(b"HTTP/1.1 408 ")
    writer.close()


async def test_an_idle_connection_stays_open() -> None:
    async with serving(0.05) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        loop = asyncio.get_running_loop()
        for _ in range(2):
            writer.write(whole(b"a").replace(b"close", b"keep-alive"))
            assert (await reader.readuntil(b"\r\n\r\na")).startswith(b"HTTP/1.1 200")
            idle = loop.create_future()  # all timers of that time have run when this one has
            loop.call_later(0.06, idle.set_result, None)
            await idle
        writer.close()


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate", b"br", b"\xff" + CANARY])
async def test_compressed_bodies_are_refused_unread(port: int, encoding: bytes) -> None:
    status, page = await status_and_body(port, whole(CANARY, b"Content-Encoding: " + encoding))
    assert status == 415
    assert CANARY not in page


@pytest.mark.parametrize(
    "request_bytes",
    [
        CANARY + b"\r\n\r\n",
        b"G\x00T / HTTP/1.1\r\nAuthorization: Bearer " + CANARY + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nAuthorization: Bearer \x00" + CANARY + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: " + CANARY + b"\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + CANARY + b"\r\n",
        HEAD + b"Expect: \xff" + CANARY + b"\r\nConnection: close\r\n\r\n",
        b"GET /fail HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"GET /" + CANARY + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    ],
)
async def test_neither_page_nor_log_quotes_a_request(
    port: int, request_bytes: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        found = await replies(port, request_bytes)
    status = int(found.split()[1])
    assert 400 <= status < 500 or (b"/fail" in request_bytes and status == 500)
    assert CANARY not in found
    for record in caplog.records:
        assert record.exc_info is None
        assert CANARY.decode() not in str(record.__dict__)
