"""Whatever a client sends to a proxy: no fault of the server, no hang, no hint outside of the rules, nothing of it in a log."""

import asyncio
import gzip
import io
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from predictors.proxy.client_rules import CLIENT_HEADERS
from predictors.proxy.handler import RequestHandler
from predictors.service.in_process import InProcessPredictor
from scheduler_core.errors import InputError
from tests.predictors.proxy import fake_engine
from tests.predictors.proxy.fake_engine import CHAT, chat, running_engine, running_proxy

#: The client's priority; no policy gives a request this one.
MARK = -77777
RULES: dict[str, dict[str, Any]] = {
    "vllm": {"engine": "vllm", "client_priority": "replace"},
    "dynamo": {"engine": "dynamo", "client_priority": "replace"},
    "sglang": {"engine": "sglang", "client_priority": "replace"},
    "queue": {"engine": "none", "client_priority": "replace", "release": 1},
    "llm-d": {"engine": "llm-d", "most_urgent_tier": 1},
}
#: Headers of the proxy, with its own values.
OWN_HEADERS = {
    ("llm-d", "x-llm-d-inference-fairness-id"),
    ("vllm", "X-Vllm-Priority"),
    ("dynamo", "x-dynamo-request-priority"),
}
Check = Callable[[str, bytes], str]
#: Encodings in which a body may be declared.
CODECS = ("utf-8", "utf-16-le", "utf-16-be", "utf-7", "cp037", "latin-1")
#: What lenient parsers skip before an object.
SKIPPED = (
    b" ",
    b"\n",
    b"\0",
    b"\xa0",
    b"\xc2\xa0",
    b"\xef\xbb\xbf",
    b"/* a */",
    b"// a\n",
    b"# a\n",
    b"[",
    b"(",
    b",",
    b"\xff",
)
BODY = json.dumps(chat("x"))


def _check(path: str, headers: dict[str, str], body: bytes, rules: str) -> None:
    """Reads the body as leniently as Python does, and takes any of two members with the same name."""
    for name, value in headers.items():
        if name.lower().replace("_", "-").startswith(CLIENT_HEADERS):
            assert (rules, name) in OWN_HEADERS
            assert value != str(MARK)
    for codec in CODECS:
        assert str(MARK) not in body.decode(codec, "ignore")
    members: list[tuple[str, Any]] = []

    def collect(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members[:] = pairs  # at last those of the outermost object
        return dict(pairs)

    try:
        content = json.loads(body, object_pairs_hook=collect)
    except (ValueError, RecursionError):
        assert path.partition("?")[0] not in (CHAT, "/v1/completions")
        return
    if not isinstance(content, dict):
        return
    extension = content.get("nvext")
    hints = extension.get("agent_hints") if isinstance(extension, dict) else None
    hints = hints if isinstance(hints, dict) else {}
    priorities = [value for value in (content.get("priority"), hints.get("priority")) if value is not None]
    assert all(type(value) is int and value != MARK for value in priorities)
    assert rules not in ("llm-d", "queue") or not priorities
    assert sum(name == "priority" for name, _ in members) <= 1
    assert not {"strict_priority", "latency_sensitivity"} & set(hints)


@pytest.fixture(scope="module")
def check() -> Iterator[Check]:
    """Sends bytes to the proxy of an entry of `RULES` and checks what its engine gets; the status of the response."""

    async def start() -> None:
        for name, options in RULES.items():
            manager = running_proxy(engine.url, request_timeout_s=5.0, **options)
            proxies[name] = await stack.enter_async_context(manager)

    def send(rules: str, data: bytes) -> str:
        engine.requests.clear()
        response = runner.run(proxies[rules].raw(data))
        code = response[9:12].decode()
        assert response.startswith(b"HTTP/1."), data
        assert code[0] in "24" or code == "501", (code, data)
        assert len(engine.requests) <= 1
        for request in engine.requests:
            _check(*request[1:], rules)
        return code

    proxies: dict[str, fake_engine.RunningProxy] = {}
    stack = AsyncExitStack()
    with asyncio.Runner() as runner:
        engine = runner.run(stack.enter_async_context(running_engine(fake_engine.respond)))
        runner.run(start())
        yield send
        runner.run(stack.aclose())


def message(path: str, body: bytes, *headers: bytes, method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: x", "Connection: close", f"Content-Length: {len(body)}"]
    return b"\r\n".join([*(line.encode() for line in lines), *headers, b"", body])


def beside(member: str) -> bytes:
    """A chat request with further members, as text."""
    return ("{" + member + "," + json.dumps(chat("x"))[1:]).encode()


HINT = f'"priority": {MARK}'
URLENCODED = "application/x-www-form-urlencoded"
KNOWN = [
    *(f'"priority": {value}' for value in (f"{MARK}e0", f"{MARK}.0", f'"{MARK}"', "true", f"[{MARK}]")),
    *(HINT, f'"prior\\u0069ty": {MARK}', HINT + ', "priority": null', '"priority": null, ' + HINT),
    *(f'"Priority": {MARK}', f'"parameters": {{{HINT}}}', f'"nvext": {{"agent_hints": {{{HINT}}}}}'),
    '"nvext": {"agent_hints": {"strict_priority": 9, "osl": 1}}',
    '"nvext": {"agent_hints": {"osl": 1}, "agent_hints": {"strict_priority": 2}}',
    f'"nvext": {{"agent_hints": {{{HINT}}}}}, "nvext": {{}}',
]
PLACES = (CHAT, "/v1/completions", "/v1/responses", "//v1/chat/completions", "/v1/chat%2Fcompletions", "/new")
NAMES = (
    "x-llm-d-slo-ttft-ms X-LLM-D-Inference-Objective x-llm-d-inference-fairness-id x_llm_d_slo_tpot_ms x-smg-priority "
    "x-vllm-priority x-gateway-inference-objective x-slo-ttft-ms x-dynamo-request-priority x-dynamo-request-strict-priority"
)
HINT_HEADERS = [f"{name}: {MARK}".encode() for name in NAMES.split()]


# Compressed bodies, NaN, 5,000-digit numbers and headers of other engines took a refused priority.
@pytest.mark.mend
@pytest.mark.parametrize("member", KNOWN)
def test_known_ways_around_the_rules(check: Check, member: str) -> None:
    for rules in RULES:
        for path in PLACES:
            assert check(rules, message(path, beside(member), *HINT_HEADERS)) == "200"
        for method in ("GET", "DELETE", "OPTIONS"):
            assert check(rules, message("/tokenize", beside(member), *HINT_HEADERS, method=method)) == "200"


# Hints passed in bodies of GET and DELETE, after comments and odd spaces, in forms and in other charsets.
@pytest.mark.mend
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rules=st.sampled_from([*RULES]),
    method=st.sampled_from(["POST", "PUT", "GET", "DELETE", "OPTIONS", "PATCH"]),
    path=st.sampled_from([CHAT, "/v1/files", "/tokenize", "http://x/generate"]),
    start=st.lists(st.sampled_from(SKIPPED), max_size=3),
    codec=st.sampled_from(CODECS),
    kind=st.sampled_from(["application/json", "text/plain", "multipart/form-data; boundary=b", URLENCODED]),
)
def test_no_body_hides_a_hint(
    check: Check, rules: str, method: str, path: str, start: list[bytes], codec: str, kind: str
) -> None:
    bodies = {
        "multipart": f'--b\r\nContent-Disposition: form-data; name="priority"\r\n\r\n{MARK}\r\n--b--\r\n'.encode()
    }
    bodies["application/x"] = f"a=1&priority={MARK}".encode()
    body = bodies.get(kind[:13], bodies.get(kind[:9], b"".join(start) + beside(HINT).decode().encode(codec)))
    check(rules, message(path, body, f"Content-Type: {kind}; charset={codec}".encode(), method=method))


UNREADABLE = {
    "a number of 5000 digits": beside(HINT + ', "seed": ' + "1" * 5000),
    "deep": beside(HINT + ', "seed": ' + "[" * 100_000 + "]" * 100_000),
    "half a pair": beside(HINT + ', "user": "\\ud800"'),
    "byte order mark": b"\xef\xbb\xbf" + beside(HINT),
    **{code: beside(HINT).decode().encode(code) for code in ("utf-16", "utf-16-be", "utf-32")},
    "two bodies": beside(HINT) * 2,
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_body_that_cannot_be_read_is_refused(check: Check, name: str) -> None:
    for rules in RULES:
        for path in (*PLACES, "/generate"):
            assert check(rules, message(path, UNREADABLE[name])) == "400"
            for encoding in (b"gzip", b"identity, GZIP", b"br"):
                data = gzip.compress(beside(HINT))
                assert check(rules, message(path, data, b"Content-Encoding: " + encoding)) == "400"


async def test_without_rules_only_the_priority_of_the_client_is_changed() -> None:
    hints = {"x-llm-d-slo-ttft-ms": "7", "x-smg-priority": "7", "x_dynamo_request_priority": "7"}
    async with running_engine() as fake, running_proxy(fake.url, engine="vllm") as proxy:
        body = beside('"priority": "-5", "nvext": {"agent_hints": {"priority": 9}}')
        assert (await proxy.send("POST", CHAT, body, hints))[0] == 200
        _, _, headers, sent = fake.requests.pop()
        assert json.loads(sent) == json.loads(body) | {"priority": int(headers["X-Vllm-Priority"])}
        assert set(hints) <= set(headers)


async def test_a_declared_header_counts_once() -> None:
    async with running_engine() as fake, running_proxy(fake.url, engine="vllm") as proxy:
        for name in ("x-tailcast-tier", "x-tailcast-tenant"):
            twice = [(name, "1"), (name, "0")]
            async with proxy.client.post(proxy.url + CHAT, json=chat("x"), headers=twice) as response:
                assert response.status == 400
                assert (await response.json())["error"]["param"] == name
        assert not fake.requests


LINES = (
    f"POST {CHAT},POST /v1/responses,POST /v1/messages,PUT /generate,POST /api/chat,POST {CHAT}/,POST /{CHAT},"
    "POST /v1/./chat/completions,POST /v1%2fchat%2fcompletions,POST /V1/Chat/Completions,"
    f"POST {CHAT}?a=b,POST /tokenize/..{CHAT},POST /tokenize?/,PROPFIND /generate"
)


# Unreadable requests passed --release and the queue.
@pytest.mark.mend
@pytest.mark.parametrize("line", LINES.split(","))
async def test_no_request_passes_the_queue(line: str) -> None:
    method, path = line.split()
    go = asyncio.Event()
    rules = {"release": 1, "max_in_flight": 3}
    async with running_engine(fake_engine.gated(go)) as fake, running_proxy(fake.url, **rules) as proxy:
        tasks = [asyncio.create_task(proxy.post(chat("x")))]
        await fake_engine.until(lambda: fake.num_in_flight == 1)
        tasks.append(asyncio.create_task(proxy.send(method, path, BODY.encode(), {})))
        gzipped = {"Content-Encoding": "gzip"}
        tasks.append(asyncio.create_task(proxy.send("POST", "/unknown", b"\0 no JSON", gzipped)))
        await fake_engine.until(lambda: proxy.server.num_in_flight == 3)
        assert (await proxy.send(method, path, BODY.encode(), {}))[0] == 429
        assert len(fake.requests) == 1
        assert await proxy.metric("tailcast_proxy_waiting") == 2
        go.set()
        assert [status for status, _ in await asyncio.gather(*tasks)] == [200, 200, 200]


async def test_the_hint_of_other_endpoints_is_the_engines_to_take() -> None:
    async with running_engine() as fake, running_proxy(fake.url, engine="vllm") as proxy:
        for path, hinted in (("/v1/responses", True), ("/v1/embeddings", False)):
            assert (await proxy.send("POST", path, b'{"input": "x"}', {}))[0] == 200
            assert ("priority" in json.loads(fake.requests.pop()[3])) is hinted


CANARY = "canary4711"
HEADERS = (
    f"Host: x\r\nAuthorization: Bearer {CANARY}\r\napi-key: {CANARY}\r\n"
    f"x-tailcast-tenant: {CANARY}\r\nContent-Type: application/json\r\nConnection: close\r\n"
).encode()
CANARY_CHAT = {"model": CANARY, "messages": [{"role": "user", "content": CANARY}], "n": 1}
CANARY_BODY = json.dumps(CANARY_CHAT).encode()
QUOTING = [RuntimeError(CANARY), InputError("a", CANARY, CANARY), UnicodeDecodeError("x", b"", 0, 1, CANARY)]


def with_canary(body: bytes = CANARY_BODY, *, line: str = f"POST {CHAT}", headers: bytes = b"") -> bytes:
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
    "length": with_canary(headers=f"Content-Length: {CANARY}\r\n".encode()),
    "length and chunks": with_canary(headers=b"Transfer-Encoding: chunked\r\n"),
    "chunk size": CHUNKED + f"{CANARY}\r\n".encode(),
    "late chunk": CHUNKED + b"3\r\nabc\r\n" + f"z{CANARY}\r\n".encode(),
    "coding": with_canary(headers=f"Transfer-Encoding: {CANARY}\r\n".encode()),
    "after the body": with_canary() + f"{CANARY} {CANARY}\r\n\r\n".encode(),
    "JSON": with_canary(CANARY_BODY[:-1]),
    "UTF-8": with_canary(CANARY_BODY.replace(b"canary", b"\xffcanary4711", 1)),
    "gzip": with_canary(headers=b"Content-Encoding: gzip\r\n"),
    "header in latin-1": with_canary(headers=f"x-own: \xe9{CANARY}\r\n".encode("latin-1")),
    "tier": with_canary(headers=b"x-tailcast-tier: 9\r\n"),
    "WebSocket": with_canary(headers=b"Upgrade: websocket\r\nConnection: upgrade\r\n"),
    "too large": with_canary(CANARY_BODY + b" " * 2**20),
    "target": with_canary(line=f"CONNECT {CANARY}:80"),
    "query": with_canary(line=f"GET /v1/models?key={CANARY}"),
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_a_bad_request(name: str) -> None:
    options: dict[str, Any] = {"engine": "vllm", "client_priority": "replace", "max_body_mib": 1}
    options |= {"access_log": True, "request_timeout_s": 1.0}
    async with running_engine(fake_engine.respond) as fake, running_proxy(fake.url, **options) as proxy:
        code = (await proxy.raw(MALFORMED[name]))[9:12]
        assert code == b"200" if name in ("query", "WebSocket") else code[:1] in (b"4", b"5")
        assert code not in (b"500", b"502", b"503", b"504")
        assert len(fake.requests) == (code == b"200")


@pytest.mark.parametrize("error", QUOTING)
@pytest.mark.parametrize("engine", ["vllm", "none"])
async def test_a_predictor_that_quotes(
    engine: str, error: Exception, artifact_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def responses(*arguments: Any, **options: Any) -> Any:
        raise error

    monkeypatch.setattr(InProcessPredictor, "responses", responses, raising=False)
    options: dict[str, Any] = {"engine": engine, "predictor": str(artifact_folder)}
    async with running_engine() as fake, running_proxy(fake.url, **options) as proxy:
        assert (await proxy.raw(with_canary()))[9:12] == b"200"


async def test_an_engine_that_is_gone_or_breaks_off_or_is_silent_or_sends_no_http() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {CANARY}\r\n\r\n".encode())
        writer.close()

    async def breaks(request: web.Request, body: bytes) -> web.StreamResponse:
        headers = {"Content-Length": "99", "x-own": CANARY}
        return await fake_engine.break_off(request, CANARY.encode(), headers)

    async def code(url: str) -> bytes:
        async with running_proxy(url, engine="vllm", idle_timeout_s=0.2, access_log=True) as proxy:
            response = await proxy.raw(with_canary())
            assert (b'"code": "engine_unavailable"' in response) is (response[9:10] == b"5")
            return response[9:12]

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert await code(url) == b"502"
    assert await code(url) == b"502"
    for script, expected in ((breaks, b"200"), (fake_engine.stalled, b"504")):
        async with running_engine(script) as fake:
            assert await code(fake.url) == expected
            await fake_engine.until(lambda fake=fake: not fake.num_in_flight)


async def test_a_proxy_fault(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    async def fails(self: RequestHandler, request: web.Request, span: object) -> web.StreamResponse:
        raise RuntimeError(f"{await request.read()!r} {request.headers}")

    monkeypatch.setattr(RequestHandler, "_generate", fails)
    async with running_engine() as fake, running_proxy(fake.url, engine="vllm") as proxy:
        assert (await proxy.raw(with_canary()))[9:12] == b"500"
    assert "RuntimeError" in caplog.text
