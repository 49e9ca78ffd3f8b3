"""Bytes, breaks, cancellation and drain: the proxy is not there."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from scheduler_core.errors import InputError
from tests.predictors.fakes import running_server
from tests.predictors.proxy.fake_engine import (
    CHAT,
    PATIENCE_S,
    break_off,
    chat,
    paused,
    plain,
    running_engine,
    running_proxy,
    stalled,
    stream_events,
    streamed,
    until,
)

ODD = [b"data: {", b'"choices":[{"delta":{"content":"\xc3', b'\xa9"}}]}\r\n\r', b"\n", b": comment\n\n", b"data: [DO", b"NE]\n\n\x00tail"]  # fmt: skip


@pytest.mark.parametrize("feedback", [False, True])
async def test_odd_pieces_of_a_stream_arrive_as_they_are(feedback: bool, tmp_path: Path) -> None:
    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        return await streamed(request, ODD)

    options = {"feedback": str(tmp_path), "feedback_usage": False} if feedback else {}
    async with (
        running_engine(script) as fake,
        running_proxy(fake.url, engine="vllm", **options) as proxy,
        proxy.client.post(proxy.url + CHAT, json=chat("x", stream=True)) as response,
    ):
        pieces = [data async for data, _ in response.content.iter_chunks()]
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert b"".join(pieces) == b"".join(ODD)


async def test_chunk_boundaries_are_kept() -> None:
    go = asyncio.Semaphore(0)

    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in ODD:
            await go.acquire()
            await response.write(piece)
        await response.write_eof()
        return response

    async with (
        running_engine(script) as fake,
        running_proxy(fake.url, engine="vllm") as proxy,
        proxy.client.post(proxy.url + CHAT, json=chat("x", stream=True)) as response,
    ):
        for piece in ODD:
            go.release()
            async with asyncio.timeout(PATIENCE_S):  # each comes before the next is written
                assert await response.content.readany() == piece


@pytest.mark.parametrize("status", [400, 429, 500, 503])
async def test_errors_of_the_engine_are_the_engines(status: int) -> None:
    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        return web.Response(status=status, reason="So", body=b'{"error": 1}', headers={"Retry-After": "3", "X-Own": "y"})  # fmt: skip

    async with (
        running_engine(script) as fake,
        running_proxy(fake.url, engine="vllm") as proxy,
        proxy.client.post(proxy.url + CHAT, json=chat("x")) as response,
    ):
        assert (response.status, response.reason) == (status, "So")
        assert await response.read() == b'{"error": 1}'
        assert (response.headers["Retry-After"], response.headers["X-Own"]) == ("3", "y")


async def test_everything_else_passes_through() -> None:
    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        answer = gzip.compress(b"yes") if request.method != "HEAD" else b""
        return web.Response(
            body=answer, headers={"Content-Encoding": "gzip", "Set-Cookie": "a=b", "X-Own": "1"}
        )

    async with running_engine(script) as fake, running_proxy(fake.url + "/base/", engine="vllm") as proxy:
        client = proxy.client
        async with client.get(URL(proxy.url + "/v1/models?a=%2F&b=c%20d", encoded=True), headers={"X-In": "1", "Connection": "X-Hop", "X-Hop": "1"}) as response:  # fmt: skip
            assert gzip.decompress(await response.read()) == b"yes"
            assert response.headers["Content-Encoding"] == "gzip"
            assert response.headers["Set-Cookie"] == "a=b"
        body = gzip.compress(b"sent")
        async with client.post(proxy.url + "/v1/embeddings", data=body, headers={"Content-Encoding": "gzip"}) as response:  # fmt: skip
            assert response.status == 200
        async with client.head(proxy.url + "/health") as response:
            assert response.status == 200

        async def pieces() -> Any:
            yield b"one"
            yield b"two"

        async with client.put(proxy.url + "/files", data=pieces()) as response:
            assert response.status == 200
    methods = [(method, path, found) for method, path, _, found in fake.requests]
    assert methods == [
        ("GET", "/base/v1/models?a=%2F&b=c%20d", b""),
        ("POST", "/base/v1/embeddings", body),
        ("HEAD", "/base/health", b""),
        ("PUT", "/base/files", b"onetwo"),
    ]
    headers = fake.requests[0][2]
    assert headers["X-In"] == "1"
    assert "X-Hop" not in headers
    assert headers["Host"] == fake.url.removeprefix("http://")


async def test_a_completion_that_cannot_be_read_is_refused() -> None:
    async with running_engine() as fake, running_proxy(fake.url, engine="vllm") as proxy:
        for body, says in (
            (
                b"{",
                "not valid JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
            ),
            (b"", "not valid JSON: Expecting value: line 1 column 1 (char 0)"),
            (b"[1]", "no JSON object"),
            (b'\xff\xfe{"a":1}', "not UTF-8"),
            (b'{"a":"\\ud800"}', "not valid JSON: half of a surrogate pair"),
            (b'{"a":' + b"[" * 100_000, "not valid JSON: nested too deeply"),
            (b'{"a":1e999}', "not valid JSON: 1e999 is not a finite number"),
        ):
            status, answer = await proxy.post(body)
            assert (status, json.loads(answer)["error"]["message"]) == (400, f"the body is {says}")
        packed = gzip.compress(json.dumps(chat("x")).encode())
        status, answer = await proxy.post(packed, {"Content-Encoding": "gzip"})
        assert json.loads(answer)["error"]["message"] == "Content-Encoding: got 'gzip'; allowed: identity"
        assert not fake.requests


async def test_an_answer_that_breaks_off_breaks_off_for_the_client() -> None:
    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        if json.loads(body)["max_tokens"] == 1:
            return await plain(request, body)
        return await break_off(request, b"data: 1\n\ndata: half", {"Content-Type": "text/event-stream"})

    async with running_engine(script) as fake, running_proxy(fake.url, engine="none") as proxy:
        for _ in range(3):
            async with proxy.client.post(proxy.url + CHAT, json=chat("x", stream=True)) as response:
                assert response.status == 200
                got = b""
                with pytest.raises(aiohttp.ClientPayloadError):
                    async for data in response.content.iter_any():
                        got += data
                assert got == b"data: 1\n\ndata: half"
        status, _ = await proxy.post(chat("x") | {"max_tokens": 1})
        assert status == 200  # the proxy lives, and no seat of the queue is lost
        assert proxy.server.num_in_flight == 0
        assert await proxy.metric('tailcast_proxy_ends_total{end="engine_lost"}') == 3


async def test_headers_of_an_answer_arrive_in_utf8() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nx-one: caf\xe9\r\nx-two: caf\xc3\xa9\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with (
        server,
        running_proxy(url) as proxy,
        proxy.client.get(proxy.url + "/v1/models") as response,
    ):
        assert (response.headers["x-one"], response.headers["x-two"]) == ("café", "café")


async def test_no_engine_is_an_error_in_the_apis_form() -> None:
    async with running_engine() as fake:
        gone = fake.url
    async with running_proxy(gone, engine="vllm") as proxy:
        for path in (CHAT, "/v1/embeddings"):
            status, body = await proxy.post(chat("x"), path=path)
            assert status == 502
            assert json.loads(body)["error"]["code"] == "engine_unavailable"


async def test_an_engine_that_never_answers_is_given_up() -> None:
    async with (
        running_engine(stalled) as fake,
        running_proxy(fake.url, engine="none", idle_timeout_s=0.2) as proxy,
    ):
        status, body = await proxy.post(chat("x"))
        assert status == 504
        assert json.loads(body)["error"]["message"] == "the engine did not respond in time"
        await until(lambda: fake.num_gone == 1)


@pytest.mark.parametrize("engine", ["vllm", "none"])
async def test_who_hangs_up_stops_the_engine(engine: str) -> None:
    script = paused([b"data: 1\n\n"], None)
    async with running_engine(script) as fake, running_proxy(fake.url, engine=engine, release=1) as proxy:
        for number in (1, 2):  # the second one needs the first one's seat
            response = await proxy.client.post(proxy.url + CHAT, json=chat("x", stream=True))
            assert await response.content.readany() == b"data: 1\n\n"
            response.close()
            await until(lambda number=number: fake.num_gone == number)
        await until(lambda: proxy.server.num_in_flight == 0)


async def test_a_slow_reader_slows_the_engine_down() -> None:
    piece, written = b"x" * 65536, 0

    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        nonlocal written
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(piece)
            written += len(piece)

    async with running_engine(script) as fake, running_proxy(fake.url, engine="vllm") as proxy:
        response = await proxy.client.post(proxy.url + CHAT, json=chat("x"))
        before = -1
        async with asyncio.timeout(PATIENCE_S):
            while written != before:
                before = written
                await asyncio.sleep(0.3)
        assert written < 64 * 2**20  # buffers of the sockets, not the endless answer
        response.close()
        await until(lambda: fake.num_gone == 1)


async def test_large_bodies_are_refused_before_the_engine() -> None:
    async def pieces() -> Any:
        for _ in range(40):
            yield b"x" * 65536

    async with running_engine() as fake, running_proxy(fake.url, engine="vllm", max_body_mib=1) as proxy:
        status, body = await proxy.post(BytesIO(b"x" * (2**20 + 1)))
        assert status == 413
        assert (
            json.loads(body)["error"]["message"] == "body: got 1048577 bytes; allowed: at most 1048576 bytes"
        )
        for path in (CHAT, "/v1/files"):
            async with proxy.client.post(proxy.url + path, data=pieces()) as response:
                assert response.status == 413
        async with proxy.client.post(proxy.url + "/v1/files", data=BytesIO(b"x" * (2**20 + 1))) as response:
            assert response.status == 413
        assert not fake.requests
        assert (await proxy.post(chat("x" * 900_000)))[0] == 200
        assert len(fake.bodies[0]["messages"][0]["content"]) == 900_000


@pytest.mark.parametrize("fault", ["absent", "down", "slow", "wrong"])
@pytest.mark.parametrize("engine", ["vllm", "none"])
async def test_no_fault_of_the_predictor_costs_a_request(
    fault: str, engine: str, artifact_folder: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"engine": engine}
    if fault == "down":
        options |= {"predictor": "grpc://127.0.0.1:1", "deadline_s": 1.0}
    if fault == "slow":
        silent = socket.create_server(("127.0.0.1", 0))  # takes connections and says nothing
        options |= {"predictor": f"grpc://127.0.0.1:{silent.getsockname()[1]}", "deadline_s": 0.05}
    if fault == "wrong":  # the artifact gives NaN
        options |= {"predictor": str(artifact_folder)}
    async with (
        running_engine() as fake,
        running_proxy(fake.url, warm_up_s=0.3 if fault == "slow" else 10.0, **options) as proxy,
    ):
        for _ in range(4):
            assert (await proxy.post(chat("nan nan")))[0] == 200
        if engine == "vllm":
            assert [type(body["priority"]) for body in fake.bodies] == [int] * 4
            assert await proxy.metric('tailcast_proxy_predictions_total{outcome="answered"}') == 0
    if fault == "slow":
        silent.close()


async def test_a_predictor_that_dies_in_the_middle_loses_nothing(artifact_folder: Path) -> None:
    from predictors.runtime import open_runtime

    async with running_engine() as fake:
        async with running_server(open_runtime(artifact_folder)) as (_, address):
            manager = running_proxy(fake.url, engine="vllm", predictor=f"grpc://{address}", deadline_s=2.0)
            proxy = await manager.__aenter__()
            answers = [await proxy.post(chat("name sea")) for _ in range(5)]
            assert await proxy.metric('tailcast_proxy_predictions_total{outcome="answered"}') == 5
        answers += await asyncio.gather(*(proxy.post(chat("name sea")) for _ in range(20)))
        assert [status for status, _ in answers] == [200] * 25
        assert all("priority" in body for body in fake.bodies)
        assert await proxy.metric('tailcast_proxy_hints_total{outcome="policy_unpredicted"}') > 0
        await manager.__aexit__(None, None, None)


async def test_stop_answers_what_is_inside() -> None:
    go = asyncio.Event()

    script = paused(stream_events(["a", "b"], None), go)
    async with running_engine(script) as fake, running_proxy(fake.url, engine="none", release=1) as proxy:
        # The second one is still held when the proxy is told to end.
        posts = [asyncio.create_task(proxy.post(chat("x", stream=True))) for _ in range(2)]
        await until(lambda: proxy.server.num_in_flight == 2 and len(fake.requests) == 1)
        stopping = asyncio.create_task(proxy.server.stop())
        await asyncio.sleep(0.05)
        async with proxy.client.get(proxy.admin + "/readyz") as response:
            assert response.status == 503
        with pytest.raises(aiohttp.ClientConnectionError):
            async with aiohttp.ClientSession() as fresh, fresh.post(proxy.url + CHAT, json=chat("x")):
                pass
        go.set()
        wanted = b"".join(stream_events(["a", "b"], None))
        assert await asyncio.gather(*posts) == [(200, wanted)] * 2
        await stopping


async def test_probes_have_a_port_of_their_own() -> None:
    async with running_engine() as fake, running_proxy(fake.url, engine="vllm") as proxy:
        for path in ("/healthz", "/readyz"):
            async with proxy.client.get(proxy.admin + path) as response:
                assert response.status == 200
        async with proxy.client.get(proxy.url + "/ws", headers={"Upgrade": "websocket", "Connection": "upgrade"}) as response:  # fmt: skip
            assert response.status == 501
    with pytest.raises(InputError, match="engine_url"):
        async with running_proxy("localhost:8000"):
            pass
