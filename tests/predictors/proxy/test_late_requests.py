"""Requests that stop half-way end in time, and no fault of a client is the proxy's or the engine's."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest

from predictors.proxy.config import ProxyConfig
from scheduler_core.errors import InputError
from tests.predictors.proxy.fake_engine import CHAT, chat, running_engine, running_proxy, until

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


@pytest.mark.parametrize(
    "headers",
    [
        b"x-tailcast-tenant: caf\xc3\xa9\r\nx-own: \xe2\x82\xac\r\nAuthorization: Bearer \xc3\xbc\r\n",
        b"Authorization: Bearer \xc3\xbc\r\nx-own: \xe2\x82\xac\r\n",
    ],
)
async def test_headers_in_utf8_pass_and_others_are_refused(headers: bytes) -> None:
    body = json.dumps(chat("x")).encode()
    end = b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    async with (
        running_engine() as fake,
        running_proxy(fake.url, engine="llm-d", feedback_prompts="hashed") as proxy,
    ):
        assert (await proxy.raw(HEAD + headers + end))[9:12] == b"200"
        [(_, _, found, _)] = fake.requests
        assert found["x-own"] == "€"
        assert found["Authorization"] == "Bearer ü"
        if "x-tailcast-tenant" in found:
            assert found["x-llm-d-inference-fairness-id"] == "café"
        for name in (b"x-own", b"x-tailcast-tenant", b"x-tailcast-tier", b"Authorization", b"api-key"):
            answer = await proxy.raw(HEAD + name + b": caf\xe9\r\n" + end)
            assert answer[9:12] == b"400"
            error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
            assert error["message"].lower() == f"{name.decode()}: got 'other bytes'; allowed: utf-8".lower()
        assert len(fake.requests) == 1


@pytest.mark.parametrize(
    "target",
    [
        "*",
        "x",
        "host:80",
        "/v1/\u00e9",
        "http://h:99999/",
        "http://[::1/",
        "/v1/models?a=\x7f",
        "//",
        "/%",
        "/%ff",
        "/a#b",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "CONNECT"])
async def test_odd_targets_are_no_fault_of_the_engine(method: str, target: str) -> None:
    data = f"{method} {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\n\r\n".encode()
    async with running_engine() as fake, running_proxy(fake.url, engine="vllm") as proxy:
        fake.script = _ok
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


def test_the_time_for_a_request_has_a_range() -> None:
    with pytest.raises(InputError, match="request_timeout_s: got 0"):
        ProxyConfig(engine_url="http://x", request_timeout_s=0)


async def _ok(request: object, body: bytes) -> aiohttp.web.Response:
    return aiohttp.web.Response()
