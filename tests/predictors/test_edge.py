"""The edge of the servers: no log or error page quotes a client, half-sent requests end, compressed bodies are refused."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from predictors.edge import _json_formatter, redacted_traceback
from predictors.http_edge import HttpRunner, read_body
from scheduler_core.errors import InputError, TailcastError

CANARY = "canary-4711"


def chained() -> Exception:
    """An exception with a cause, a context, a note and members of a group, each with the canary."""
    try:
        try:
            try:
                raise UnicodeDecodeError("utf-8", CANARY.encode(), 0, 1, CANARY)
            except ValueError:
                raise KeyError(CANARY) from ExceptionGroup(CANARY, [SyntaxError(CANARY), OSError(CANARY)])
        except KeyError as error:
            raise RuntimeError(CANARY) from error
    except RuntimeError as error:
        error.add_note(CANARY)
        return error


def test_an_exception_that_causes_itself_ends() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert redacted_traceback(first).count("Traceback") == 2


async def test_no_record_holds_a_text_of_a_client(log: io.StringIO, caplog: pytest.LogCaptureFixture) -> None:
    error = chained()
    logging.getLogger("aiohttp.server").error("Error handling request from %s", "::1", exc_info=error)
    logging.getLogger("any").warning("it broke: %s (%r)", error, error)
    logging.getLogger("any").warning(error)
    logging.getLogger("any").error("%s", ConnectionRefusedError(111, "Connection refused", CANARY))
    logging.getLogger("any").error("%s", TailcastError("artifact tiny: model.onnx is missing"))
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    failed.set_exception(RuntimeError(CANARY))
    asyncio.get_running_loop().call_exception_handler(
        {"message": "Task exception was never retrieved", "exception": failed.exception(), "future": failed}
    )
    text = log.getvalue()
    assert CANARY not in text
    for line in ("Error handling request from ::1\n", "it broke: RuntimeError", "Task exception was never"):
        assert line in text
    # Errors of the system and of tailcast stay readable.
    assert "\nConnectionRefusedError: [Errno 111] Connection refused\nartifact tiny: model.onnx is" in text
    for record in caplog.records:
        assert record.exc_info is None
        assert CANARY not in str(record.__dict__)


def test_json_lines_have_the_redacted_traceback(log: io.StringIO) -> None:
    [handler] = [one for one in logging.getLogger().handlers if getattr(one, "stream", None) is log]
    handler.setFormatter(_json_formatter())
    logging.getLogger("any").error("it broke", exc_info=chained())
    record = json.loads(log.getvalue())
    assert record["message"] == "it broke"
    assert record["traceback"].endswith("RuntimeError")
    assert CANARY not in log.getvalue()


SECRET = b"canary-4711"
MAX_BYTES = 2**20
HEAD = b"POST / HTTP/1.1\r\nHost: x\r\n"


async def echo(request: web.Request) -> web.Response:
    try:
        return web.Response(body=await read_body(request, timeout_s=0.05))
    except InputError as error:
        return web.Response(status=400, text=str(error))


async def fail(request: web.Request) -> web.Response:
    raise RuntimeError(SECRET.decode())


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


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate", b"br", b"\xff" + SECRET])
async def test_compressed_bodies_are_refused_unread(port: int, encoding: bytes) -> None:
    status, page = await status_and_body(port, whole(SECRET, b"Content-Encoding: " + encoding))
    assert status == 415
    assert SECRET not in page


@pytest.mark.parametrize(
    "request_bytes",
    [
        SECRET + b"\r\n\r\n",
        b"G\x00T / HTTP/1.1\r\nAuthorization: Bearer " + SECRET + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nAuthorization: Bearer \x00" + SECRET + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: " + SECRET + b"\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + SECRET + b"\r\n",
        HEAD + b"Expect: \xff" + SECRET + b"\r\nConnection: close\r\n\r\n",
        b"GET /fail HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"GET /" + SECRET + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    ],
)
async def test_neither_page_nor_log_quotes_a_request(
    port: int, request_bytes: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        found = await replies(port, request_bytes)
    status = int(found.split()[1])
    assert 400 <= status < 500 or (b"/fail" in request_bytes and status == 500)
    assert SECRET not in found
    for record in caplog.records:
        assert record.exc_info is None
        assert SECRET.decode() not in str(record.__dict__)
