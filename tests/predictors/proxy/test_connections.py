"""Connections that end or stop at any moment: requests reach the engine at most once and end in time."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from predictors.proxy.relay import LiveConnector
from tests.predictors.proxy.fake_engine import CHAT, chat, respond, running_engine, running_proxy, until

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
#: When the engine closes the connection, and what a client gets.
MOMENTS = dict.fromkeys(("accepted", "first byte", "headers", "body", "inside the head"), 502)
MOMENTS["inside the body"] = 200


@dataclass
class RawEngine:
    """Answers requests of a connection, and closes the connection at a moment (a key of `MOMENTS`) of request `at` of each.

    It does that by a reset if it `resets`. `num_requests` counts requests of which a byte has come.
    """

    moment: str | None
    at: int = 0
    resets: bool = False
    num_requests: int = 0
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        number = 0
        while await self._request(self.moment if number == self.at else None, reader, writer):
            number += 1
        if self.resets:
            writer.transport.abort()
        writer.close()

    async def _request(
        self, moment: str | None, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        if moment == "accepted":
            return False
        first = await reader.read(1)
        self.num_requests += bool(first)
        if not first or moment == "first byte":
            return False
        head = first + await reader.readuntil(b"\r\n\r\n")
        if moment == "headers":
            return False
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        await reader.readexactly(int(lengths[0].split(b":")[1]) if lengths else 0)
        if moment == "body":
            return False
        parts = {"inside the head": ANSWER[:20], "inside the body": ANSWER[:-1]}
        writer.write(parts.get(moment or "", ANSWER))
        await writer.drain()
        return moment is None


@asynccontextmanager
async def raw_engine(*options: Any) -> AsyncIterator[tuple[RawEngine, str]]:
    engine = RawEngine(*options)
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
    for method, path in (("POST", CHAT), ("DELETE", "/v1/responses/1"), ("GET", "/v1/models"), ("PUT", "/x")):
        body = b'{"messages": []}' if method in ("POST", "PUT") else None
        async with (
            raw_engine(moment, int(kept), resets) as (engine, url),
            running_proxy(url, engine="vllm") as proxy,
        ):
            if kept:
                assert await proxy.send(method, path, body, {}) == (200, b"ok")
            before = engine.num_requests
            expected = 0 if moment == "accepted" and not kept else 1
            if moment == "accepted" and kept:  # it ends before it is used again: another one is made
                await until(lambda engine=engine: engine.writers[0].is_closing())
                assert await proxy.send(method, path, body, {}) == (200, b"ok")
                assert len(engine.writers) == 2
            elif MOMENTS[moment] == 502:
                assert (await proxy.send(method, path, body, {}))[0] == 502
            else:
                with pytest.raises(Exception, match=r"payload|reset|disconnected"):
                    await proxy.send(method, path, body, {})
            assert engine.num_requests - before == expected


async def test_a_connection_is_used_again_until_it_has_just_ended() -> None:
    async with raw_engine(None) as (engine, url), aiohttp.ClientSession(connector=LiveConnector()) as client:
        for number in (1, 1, 2):
            async with client.post(url, data=b"x") as response:
                assert await response.read() == b"ok"
            assert len(engine.writers) == number
            if number == 1 and engine.num_requests == 2:
                # The event loop has had no turn to notice it when the next request comes.
                engine.writers[-1].get_extra_info("socket").shutdown(socket.SHUT_WR)


HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\n".encode()


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", b""),
        (b"POST /v1", b""),
        (HEAD + b"Content-Le", b""),
        (HEAD + b"Content-Length: 9\r\n\r\n{", b"408"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{", b"408"),
        (HEAD.replace(b"POST", b"DELETE") + b"Content-Length: 9\r\n\r\n{", b"408"),
    ],
)
async def test_half_a_request_ends(data: bytes, code: bytes) -> None:
    async with running_engine() as fake, running_proxy(fake.url, request_timeout_s=0.1, release=1) as proxy:
        answer = await proxy.raw(data)
        assert answer[9:12] == code
        if code:
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "body_late"
        assert not fake.requests
        assert proxy.server.num_in_flight == 0
        assert (await proxy.post(chat("x")))[0] == 200


async def test_a_refusal_keeps_a_connection_whose_request_is_complete() -> None:
    data = HEAD + b"x-tailcast-tier: 9\r\nContent-Length: 2\r\n\r\n{}"
    async with running_engine() as fake, running_proxy(fake.url, request_timeout_s=0.5) as proxy:
        answers = await proxy.raw(data + data)
        assert answers.count(b"HTTP/1.1 400") == 2
        assert b"Connection: close" not in answers


async def test_half_a_request_holds_no_drain() -> None:
    async with running_engine() as fake:
        manager = running_proxy(fake.url, request_timeout_s=0.2, drain_timeout_s=600.0)
        proxy = await manager.__aenter__()
        answers = [
            asyncio.create_task(proxy.raw(data)) for data in (HEAD, HEAD + b"Content-Length: 9\r\n\r\n{")
        ]
        await until(lambda: proxy.server.num_in_flight == 1)
        async with asyncio.timeout(30):
            await manager.__aexit__(None, None, None)
            assert [answer[9:12] for answer in await asyncio.gather(*answers)] == [b"", b"408"]


async def test_a_body_that_comes_in_time_is_answered_though_the_proxy_drains() -> None:
    body = json.dumps(chat("x")).encode()
    go = asyncio.Event()

    async def pieces() -> object:
        yield body[:9]
        await go.wait()
        yield body[9:]

    async with running_engine() as fake:
        manager = running_proxy(fake.url)
        proxy = await manager.__aenter__()
        async with aiohttp.ClientSession() as client:
            post = asyncio.create_task(client.post(proxy.url + CHAT, data=pieces()))
            await until(lambda: proxy.server.num_in_flight == 1)
            stop = asyncio.create_task(manager.__aexit__(None, None, None))
            await asyncio.sleep(0.01)
            go.set()
            async with await post as response:
                assert response.status == 200
            await stop


async def test_headers_in_utf8_pass_and_others_are_refused() -> None:
    headers = b"x-tailcast-tenant: caf\xc3\xa9\r\nx-own: \xe2\x82\xac\r\nAuthorization: Bearer \xc3\xbc\r\n"
    body = json.dumps(chat("x")).encode()
    end = b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    async with running_engine() as fake, running_proxy(fake.url, engine="llm-d") as proxy:
        assert (await proxy.raw(HEAD + headers + end))[9:12] == b"200"
        [(_, _, found, _)] = fake.requests
        assert found["x-own"] == "€"
        assert found["Authorization"] == "Bearer ü"
        assert found["x-llm-d-inference-fairness-id"] == "café"
        for name in (b"x-own", b"x-tailcast-tenant", b"x-tailcast-tier", b"Authorization", b"api-key"):
            answer = await proxy.raw(HEAD + name + b": caf\xe9\r\n" + end)
            assert answer[9:12] == b"400"
            error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
            assert error["message"].lower() == f"{name.decode()}: got 'other bytes'; allowed: utf-8".lower()
        assert len(fake.requests) == 1


TARGETS = "* x host:80 /v1/\u00e9 http://h:99999/ http://[::1/ /v1/models?a=\x7f // /% /%ff /a#b"


@pytest.mark.parametrize("target", TARGETS.split())
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "CONNECT"])
async def test_odd_targets_are_no_fault_of_the_engine(method: str, target: str) -> None:
    data = f"{method} {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\n\r\n".encode()
    async with running_engine(respond) as fake, running_proxy(fake.url, engine="vllm") as proxy:
        code = (await proxy.raw(data))[9:12]
        assert code in (b"200", b"400", b"404")
        assert len(fake.requests) == (code == b"200")


@pytest.mark.parametrize("value", [2**63, 2**64, -1, 0, True, "9", 1.5, None, [], 10**400])
@pytest.mark.parametrize("engine", ["vllm", "none", "dynamo"])
async def test_odd_caps_are_the_engines_to_judge(engine: str, value: object) -> None:
    async with running_engine() as fake, running_proxy(fake.url, engine=engine) as proxy:
        for name in ("max_tokens", "max_completion_tokens", "n", "temperature", "top_p", "stream_options"):
            assert (await proxy.post(chat("x") | {name: value}))[0] in (200, 500)
            assert fake.bodies[-1][name] == value
