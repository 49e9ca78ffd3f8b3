"""Bytes, in whatever pieces they come, breaks, cancellation and drain: requests reach the engine at most once and end in time."""

import asyncio
import gzip
import itertools
import json
import socket
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from yarl import URL

from predictors.proxy.relay import LiveConnector
from predictors.proxy.responses import EventStreamReader, JsonReader, ReadBudget
from tests.predictors.fakes import running_server
from tests.predictors.proxy import fake_engine
from tests.predictors.proxy.fake_engine import CHAT, chat, event, running_engine, running_proxy, until

ODD = [b"data: {", b'"choices":[{"delta":{"content":"\xc3', b'\xa9"}}]}\r\n\r', b"\n", b": comment\n\n", b"data: [DO", b"NE]\n\n\x00tail"]  # fmt: skip
ODD_WORDS = ['"usage":null', ',"usage":null', "\n\n", "data: [DONE]", "é", '"finish_reason":"x"']
WORDS = st.lists(st.one_of(st.text(max_size=8), st.sampled_from(ODD_WORDS)), max_size=8)
SPACES = st.sampled_from([b"\n\n", b"\r\n\r\n", b"\r\r"])
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
#: When the engine closes the connection, and what a client gets.
MOMENTS = dict.fromkeys(("accepted", "first byte", "headers", "body", "inside the head"), 502)
MOMENTS["inside the body"] = 200
HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\n".encode()
TARGETS = "* x host:80 /v1/\u00e9 http://h:99999/ http://[::1/ /v1/models?a=\x7f // /% /%ff /a#b"


@pytest.mark.parametrize(
    "options", [{"engine": "vllm"}, {"policy": "uniboost"}, {"feedback": "log"}], ids=str
)
async def test_odd_pieces_of_a_stream_arrive_as_they_are(options: dict[str, Any], tmp_path: Path) -> None:
    go = asyncio.Semaphore(0)

    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for piece in ODD:
            await go.acquire()
            await response.write(piece)
        await response.write_eof()
        return response

    options = {name: str(tmp_path) if name == "feedback" else value for name, value in options.items()}
    async with (
        running_engine(script) as fake,
        running_proxy(fake.url, **options) as proxy,
        proxy.client.post(proxy.url + CHAT, json=chat("x", stream=True)) as response,
    ):
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        for piece in ODD:
            go.release()
            async with asyncio.timeout(fake_engine.PATIENCE_S):  # each comes before the next is written
                assert await response.content.readany() == piece
        assert await response.content.readany() == b""


async def test_requests_and_responses_pass_as_they_are() -> None:
    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        data = gzip.compress(b"yes") if request.method != "HEAD" else b""
        headers = {"Content-Encoding": "gzip", "Set-Cookie": "a=b", "Retry-After": "3"}
        return web.Response(status=429, reason="So", body=data, headers=headers)

    async def pieces() -> Any:
        yield b"one"
        yield b"two"

    packed = gzip.compress(b"sent")
    sent: list[tuple[str, str, Any, dict[str, str]]] = [
        ("GET", "/v1/models?a=%2F&b=c%20d", None, {"X-In": "1", "Connection": "X-Hop", "X-Hop": "1"}),
        ("POST", "/v1/embeddings", packed, {"Content-Encoding": "gzip"}),
        ("HEAD", "/health", None, {}),
        ("POST", CHAT, b"{}", {}),
        ("PUT", "/files", pieces(), {}),
    ]
    async with running_engine(script) as fake, running_proxy(fake.url + "/base/", engine="vllm") as proxy:
        for method, path, data, headers in sent:
            url = URL(proxy.url + path, encoded=True)
            async with proxy.client.request(method, url, data=data, headers=headers) as response:
                assert (response.status, response.reason) == (429, "So")
                names = ("Content-Encoding", "Set-Cookie", "Retry-After")
                assert [response.headers[name] for name in names] == ["gzip", "a=b", "3"]
                assert await response.read() == (b"" if method == "HEAD" else gzip.compress(b"yes"))
    bodies = [(method, path, body) for method, path, _, body in fake.requests]
    assert [(method, path) for method, path, _ in bodies] == [(row[0], "/base" + row[1]) for row in sent]
    assert [body for _, _, body in bodies] == [b"", packed, b"", b"{}", b"onetwo"]
    headers = fake.requests[0][2]
    assert headers["X-In"] == "1"
    assert "X-Hop" not in headers
    assert headers["Host"] == fake.url.removeprefix("http://")


# Bodies that only the engine could read passed with their hints.
@pytest.mark.mend
async def test_a_completion_that_cannot_be_read_is_refused() -> None:
    packed = gzip.compress(json.dumps(chat("x")).encode())
    async with running_engine() as fake, running_proxy(fake.url, engine="vllm") as proxy:
        for body, headers, reason in (
            (b"{", {}, "the body is not valid JSON: Expecting property name enclosed in double quotes"),
            (b"[1]", {}, "the body is not a JSON object"),
            (packed, {"Content-Encoding": "gzip"}, "Content-Encoding: got 'gzip'; allowed: identity"),
        ):
            status, data = await proxy.post(body, headers)
            assert status == 400
            assert json.loads(data)["error"]["message"].startswith(reason)
        assert not fake.requests


async def test_an_answer_that_breaks_off_breaks_off_for_the_client() -> None:
    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        if json.loads(body)["max_tokens"] == 1:
            return await fake_engine.plain(request, body)
        headers = {"Content-Type": "text/event-stream"}
        return await fake_engine.break_off(request, b"data: 1\n\ndata: half", headers)

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
    async with server, running_proxy(url) as proxy, proxy.client.get(proxy.url + "/v1/models") as response:
        assert (response.headers["x-one"], response.headers["x-two"]) == ("café", "café")


@pytest.mark.parametrize("engine", ["vllm", "none"])
async def test_who_hangs_up_stops_the_engine(engine: str) -> None:
    script = fake_engine.paused([b"data: 1\n\n"], None)
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
        latest: deque[int] = deque(maxlen=30)

        def has_stopped() -> bool:
            latest.append(written)
            return len(latest) == latest.maxlen and len(set(latest)) == 1

        await until(has_stopped)
        assert written < 64 * 2**20  # buffers of the sockets, not the endless answer
        response.close()
        await until(lambda: fake.num_gone == 1)


async def test_large_bodies_are_refused_before_the_engine() -> None:
    async def pieces() -> Any:
        for _ in range(40):
            yield b"x" * 65536

    async with running_engine() as fake, running_proxy(fake.url, engine="vllm", max_body_mib=1) as proxy:
        _, body = await proxy.post(BytesIO(b"x" * (2**20 + 1)))
        message = "body: got 1048577 bytes; allowed: at most 1048576 bytes"
        assert json.loads(body)["error"]["message"] == message
        for path in (CHAT, "/v1/files"):
            for data in (pieces(), BytesIO(b"x" * (2**20 + 1))):
                assert (await proxy.send("POST", path, data, {}))[0] == 413
        assert not fake.requests
        assert (await proxy.post(chat("x" * 900_000)))[0] == 200
        assert len(fake.bodies[0]["messages"][0]["content"]) == 900_000


@pytest.mark.parametrize("fault", ["absent", "down", "slow", "wrong"])
@pytest.mark.parametrize("engine", ["vllm", "none"])
async def test_no_predictor_fault_costs_a_request(fault: str, engine: str, artifact_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and sends nothing
        address = f"grpc://127.0.0.1:{silent.getsockname()[1]}"
        options: dict[str, Any] = {
            "absent": {},
            "down": {"predictor": "grpc://127.0.0.1:1", "deadline_s": 1.0, "warm_up_s": 2.0},
            "slow": {"predictor": address, "deadline_s": 0.05, "warm_up_s": 0.3},
            "wrong": {"predictor": str(artifact_folder)},  # the artifact gives NaN
        }[fault]
        async with running_engine() as fake, running_proxy(fake.url, engine=engine, **options) as proxy:
            for _ in range(4):
                assert (await proxy.post(chat("nan nan")))[0] == 200
            if engine == "vllm":
                assert [type(body["priority"]) for body in fake.bodies] == [int] * 4
                assert await proxy.metric('tailcast_proxy_predictions_total{outcome="answered"}') == 0


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
    script = fake_engine.paused(fake_engine.stream_events(["a", "b"], None), go)
    async with running_engine(script) as fake, running_proxy(fake.url, engine="none", release=1) as proxy:
        # The second one is still held when the proxy is told to end.
        posts = [asyncio.create_task(proxy.post(chat("x", stream=True))) for _ in range(2)]
        await until(lambda: proxy.server.num_in_flight == 2 and len(fake.requests) == 1)
        stopping = asyncio.create_task(proxy.server.stop())
        await until(lambda: not proxy.server._is_ready)
        async with proxy.client.get(proxy.admin + "/readyz") as response:
            assert response.status == 503
        with pytest.raises(aiohttp.ClientConnectionError):
            async with aiohttp.ClientSession() as fresh, fresh.post(proxy.url + CHAT, json=chat("x")):
                pass
        go.set()
        wanted = b"".join(fake_engine.stream_events(["a", "b"], None))
        assert await asyncio.gather(*posts) == [(200, wanted)] * 2
        await stopping


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({place % (len(data) + 1) for place in places} | {0, len(data)})
    return [data[one:two] for one, two in itertools.pairwise(ends)]


def passed(reader: EventStreamReader, pieces: list[bytes]) -> bytes:
    return b"".join([reader.feed(piece) for piece in pieces]) + reader.end()


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=12))
def test_any_bytes_pass_in_any_pieces(data: bytes, places: list[int]) -> None:
    assert passed(EventStreamReader(True, ReadBudget()), cut(data, places)) == data


@settings(max_examples=30)
@given(WORDS, st.lists(st.integers(0, 4000), max_size=12), st.booleans(), st.integers(1, 999), SPACES)
def test_counts_that_the_client_has_not_asked_for_leave_no_trace(
    words: list[str], places: list[int], null_usage: bool, usage: int, ends: bytes
) -> None:
    wanted = b"".join(fake_engine.stream_events(words, None, null_usage=null_usage)).replace(b"\n\n", ends)
    told = b"".join(fake_engine.stream_events(words, usage, null_usage=null_usage)).replace(b"\n\n", ends)
    reader = EventStreamReader(True, ReadBudget())
    assert passed(reader, cut(told, places)) == wanted
    stats = reader.stats
    assert (stats.output_tokens, stats.prompt_tokens, stats.finish_reason) == (usage, 3, "stop")
    assert stats.num_deltas == sum(map(bool, words))
    assert (stats.first_s is None) is (stats.num_deltas == 0)


def test_an_error_with_counts_stays() -> None:
    told = event({"choices": [], "usage": {"completion_tokens": 1}, "error": {"message": "x"}})
    assert passed(EventStreamReader(True, ReadBudget()), [told]) == told


def test_odd_completions_have_no_length() -> None:
    for odd in (b"", b"[]", b'{"choices": 3}', b'{"choices":[{}],"usage":{"completion_tokens":true}}'):
        reader = JsonReader(ReadBudget())
        reader.feed(odd)
        assert reader.end() == b""
        assert reader.stats.output_tokens is None


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


# A POST was sent twice and a DELETE four times when its answer was lost.
@pytest.mark.mend
@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_request_is_sent_once(moment: str, kept: bool, resets: bool) -> None:
    for method, path in (("POST", CHAT), ("DELETE", "/v1/responses/1"), ("GET", "/v1/models"), ("PUT", "/x")):
        body = b'{"messages": []}' if method in ("POST", "PUT") else None
        script = (moment, int(kept), resets)
        async with raw_engine(*script) as (engine, url), running_proxy(url, engine="vllm") as proxy:
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


# One body sent half held the drain.
@pytest.mark.mend
async def test_half_a_request_holds_no_drain() -> None:
    async with running_engine() as fake:
        manager = running_proxy(fake.url, request_timeout_s=0.2, drain_timeout_s=600.0)
        proxy = await manager.__aenter__()
        halves = (HEAD, HEAD + b"Content-Length: 9\r\n\r\n{")
        answers = [asyncio.create_task(proxy.raw(data)) for data in halves]
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
            await until(lambda: not proxy.server._is_ready)
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


@pytest.mark.parametrize("target", TARGETS.split())
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "CONNECT"])
async def test_odd_targets_are_no_fault_of_the_engine(method: str, target: str) -> None:
    data = f"{method} {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\n\r\n".encode()
    async with running_engine(fake_engine.respond) as fake, running_proxy(fake.url, engine="vllm") as proxy:
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
