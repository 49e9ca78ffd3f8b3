"""An engine that closes connections at any moment gets each request at most once."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import pytest

from predictors.proxy.relay import LiveConnector
from tests.predictors.proxy.fake_engine import CHAT, running_proxy, until

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
#: When the engine closes the connection, and what a client gets.
MOMENTS = {
    "accepted": 502,
    "first byte": 502,
    "headers": 502,
    "body": 502,
    "inside the head": 502,
    "inside the body": 200,
}


@dataclass
class RawEngine:
    """Answers requests of a connection, and closes the connection at a moment of one of them.

    Attributes:
        moment: A key of `MOMENTS`; None: it answers all.
        at: Which request of each connection that is, from 0.
        resets: It closes by a reset.
        num_requests: Requests of which a byte has come.
        num_connections: Connections.
        writers: To each of them.
    """

    moment: str | None
    at: int
    resets: bool = False
    num_requests: int = 0
    num_connections: int = 0
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.writers.append(writer)
        number = 0
        while await self._request(number, reader, writer):
            number += 1
        if self.resets:
            writer.transport.abort()
        writer.close()

    async def _request(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        moment = self.moment if number == self.at else None
        if moment == "accepted":
            return False
        first = await reader.read(1)
        if not first:
            return False
        self.num_requests += 1
        if moment == "first byte":
            return False
        head = first + await reader.readuntil(b"\r\n\r\n")
        if moment == "headers":
            return False
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        await reader.readexactly(int(lengths[0].split(b":")[1]) if lengths else 0)
        if moment == "body":
            return False
        answer = {"inside the head": ANSWER[:20], "inside the body": ANSWER[:-1]}.get(moment or "", ANSWER)
        writer.write(answer)
        await writer.drain()
        return moment is None


@asynccontextmanager
async def raw_engine(
    moment: str | None, at: int = 0, *, resets: bool = False
) -> AsyncIterator[tuple[RawEngine, str]]:
    engine = RawEngine(moment, at, resets)
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    try:
        yield engine, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        for writer in engine.writers:
            writer.close()
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_request_is_sent_once(moment: str, kept: bool, resets: bool) -> None:
    for method, path in (
        ("POST", CHAT),
        ("DELETE", "/v1/responses/1"),
        ("GET", "/v1/models"),
        ("PUT", "/x"),
    ):
        body = b'{"messages": []}' if method in ("POST", "PUT") else None
        async with (
            raw_engine(moment, at=1 if kept else 0, resets=resets) as (engine, url),
            running_proxy(url, engine="vllm") as proxy,
        ):
            if kept:
                assert await proxy.send(method, path, body, {}) == (200, b"ok")
            before = engine.num_requests
            if (
                moment == "accepted" and kept
            ):  # the connection ends before it is used again: another one is made
                await until(lambda engine=engine: engine.writers[0].is_closing())
                assert await proxy.send(method, path, body, {}) == (200, b"ok")
                assert engine.num_connections == 2
            elif MOMENTS[moment] == 502:
                assert (await proxy.send(method, path, body, {}))[0] == 502
            else:
                with pytest.raises(Exception, match=r"payload|reset|disconnected"):
                    await proxy.send(method, path, body, {})
            expected = 0 if moment == "accepted" and not kept else 1
            assert engine.num_requests - before == expected


async def test_a_connection_is_used_again_while_it_lives() -> None:
    async with raw_engine(None) as (engine, url), running_proxy(url, engine="vllm") as proxy:
        for _ in range(3):
            assert await proxy.send("POST", CHAT, b'{"messages": []}', {}) == (200, b"ok")
        assert engine.num_connections == 1


async def test_unasked_bytes_on_a_kept_connection_end_it() -> None:
    """Such as the 408 that some servers send to a connection at rest."""
    async with raw_engine(None) as (engine, url), running_proxy(url, engine="vllm") as proxy:
        for number in (1, 2):
            assert await proxy.send("POST", CHAT, b'{"messages": []}', {}) == (200, b"ok")
            assert engine.num_connections == number
            engine.writers[-1].write(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
            await engine.writers[-1].drain()


async def test_a_connection_that_has_just_ended_is_not_used() -> None:
    async with (
        raw_engine(None) as (engine, url),
        aiohttp.ClientSession(connector=LiveConnector()) as client,
    ):
        for number in (1, 2):
            async with client.post(url, data=b"x") as response:
                assert await response.read() == b"ok"
            assert engine.num_connections == number
            # The event loop has had no turn to notice it when the next request comes.
            engine.writers[-1].get_extra_info("socket").shutdown(socket.SHUT_WR)
