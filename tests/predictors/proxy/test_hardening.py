"""Hostile clients of a proxy: bounds of memory, names and requests; hints where a parser may find them; odd requests."""

import asyncio
import json
import re
import threading
from io import BytesIO
from typing import Any

import pytest
from prometheus_client import generate_latest

from predictors.proxy import client_rules, handler, server
from predictors.proxy.config import ProxyConfig
from predictors.proxy.parsing import MAX_VALUES, json_body
from scheduler_core.errors import InputError
from scheduler_core.prediction.predictor import open_predictor
from tests.predictors.proxy import fake_engine
from tests.predictors.proxy.fake_engine import CHAT, chat, running_engine, running_proxy, until

RULES: dict[str, Any] = {"engine": "vllm", "client_priority": "replace"}
HINTED = b'{"priority": -7, "messages": []}'


def message(method: str, target: str, body: bytes = b"", *headers: str) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", "Host: x", "Connection: close", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


@pytest.mark.mend  # the password was logged, and every authorized request got a 500
@pytest.mark.parametrize(
    "url",
    ["http://user:s3cret@h:1", "https://s3cret@h/v1", "http://:s3cret@h", "ftp://u:s3cret@h", "http://u:s3c@s3cret@h:99999",
     "http://u:a/s3cret@h", "http://h/?key=s3cret"],
)  # fmt: skip
def test_a_url_with_a_password_is_refused_and_not_quoted(url: str) -> None:
    with pytest.raises(InputError) as caught:
        ProxyConfig(engine_url=url)
    assert "s3cret" not in str(caught.value)


@pytest.mark.mend  # as above, for predictors
@pytest.mark.parametrize("url", ["grpc://user:s3cret@h:1", "grpc://s3cret@h:1", "https://user:s3cret@h:1"])
def test_a_predictor_with_a_password_is_refused_and_not_quoted(url: str) -> None:
    for field in ("predictor", "shadow_predictor"):
        with pytest.raises(InputError) as caught:
            open_predictor(url, field)
        assert "s3cret" not in str(caught.value)


@pytest.mark.mend  # 64 names of 1 MB gave scrapes of 896 MB
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/messages", "/api/generate"])
async def test_the_name_of_a_model_is_bounded(path: str) -> None:
    async with running_engine() as fake, running_proxy(fake.url, engine="vllm") as proxy:
        for name, expected in (("x" * 256, 200), ("x" * 257, 400), ("x" * 2**20, 400)):
            data = BytesIO(json.dumps(chat("x", model=name)).encode())
            status, body = await proxy.post(data, path=path)
            assert status == expected
            if status == 400:
                assert json.loads(body)["error"]["param"] == "model"
                assert len(body) < 1000
        assert len(fake.requests) == 1
        assert await proxy.metric('tailcast_proxy_refused_total{code="invalid_value"}') == 2


async def test_the_name_of_a_tenant_is_bounded() -> None:
    async with running_engine() as fake, running_proxy(fake.url, engine="vllm") as proxy:
        for name, expected in (("x" * 256, 200), ("x" * 257, 400)):
            assert (await proxy.post(chat("x"), {"x-tailcast-tenant": name}))[0] == expected
        assert len(fake.requests) == 1


@pytest.mark.mend  # clients waited 14.5 s for a scrape
async def test_metrics_are_rendered_outside_of_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def rendered(registry: Any) -> bytes:
        threads.append(threading.current_thread())
        return generate_latest(registry)

    monkeypatch.setattr(server, "generate_latest", rendered)
    async with running_engine() as fake, running_proxy(fake.url) as proxy:
        await proxy.metric("tailcast_proxy_waiting")
    assert threads
    assert threading.main_thread() not in threads


@pytest.mark.mend  # 3 GB of bodies were held: their number was bounded, but not their size
async def test_the_bytes_of_all_bodies_are_bounded() -> None:
    go, size = asyncio.Event(), 400_000
    options = {"max_held_mib": 1, "release": 1}
    async with running_engine(fake_engine.gated(go)) as fake, running_proxy(fake.url, **options) as proxy:
        posts = [asyncio.create_task(proxy.post(chat("x" * size))) for _ in range(2)]
        held = proxy.server.handler.relay
        await until(lambda: held.num_held_bytes > 2 * size and fake.num_in_flight == 1)
        assert held._num_reading == 0
        for method, path in (("POST", CHAT), ("POST", "/new"), ("DELETE", "/files"), ("POST", "/tokenize")):
            status, body = await proxy.send(method, path, json.dumps(chat("x" * size)).encode(), {})
            assert (status, json.loads(body)["error"]["code"]) == (429, "bodies_full")
        values = b'{"messages": [' + b",".join([b"{}"] * 10_000) + b"]}"  # 30 kB, but 1 MB when it is parsed
        assert (await proxy.post(values))[0] == 429
        assert await proxy.metric("tailcast_proxy_held_bytes") < 2**20
        go.set()
        assert [status for status, _ in await asyncio.gather(*posts)] == [200, 200]
        await until(lambda: not held.num_held_bytes)
        assert (await proxy.post(chat("x" * size)))[0] == 200


@pytest.mark.mend  # hanging GETs used up --max_in_flight
async def test_hanging_reads_leave_room_for_completions() -> None:
    go = asyncio.Event()

    async def script(request: Any, body: bytes) -> Any:
        return await (fake_engine.plain(request, body) if body else fake_engine.gated(go)(request, body))

    async with running_engine(script) as fake, running_proxy(fake.url, max_in_flight=3) as proxy:
        reads = [asyncio.create_task(proxy.send("GET", "/v1/models", None, {})) for _ in range(3)]
        await until(lambda: fake.num_in_flight == 3)
        assert (await proxy.post(chat("x")))[0] == 200
        status, body = await proxy.send("GET", "/v1/models", None, {})
        assert (status, json.loads(body)["error"]["code"]) == (429, "proxy_full")
        go.set()
        assert [status for status, _ in await asyncio.gather(*reads)] == [200] * 3


async def test_a_read_without_an_answer_ends_before_a_completion_would() -> None:
    options = {"request_timeout_s": 0.1, "idle_timeout_s": 60.0}
    async with running_engine(fake_engine.stalled) as fake, running_proxy(fake.url, **options) as proxy:
        for method in ("GET", "DELETE", "OPTIONS"):
            assert (await proxy.send(method, "/v1/models", None, {}))[0] == 504


@pytest.mark.parametrize(
    ("target", "sent"),
    [
        ("http://x/v1/models", "/v1/models"),
        ("http://user:key@x:80/v1/models?a=%2F&b", "/v1/models?a=%2F&b"),
        ("HTTPS://x/v1//models", "/v1//models"),
        ("http://x", "/"),
        ("http://x?a", "/?a"),
    ],
)
async def test_absolute_targets_are_forwarded(target: str, sent: str) -> None:
    async with running_engine() as fake, running_proxy(fake.url, engine="vllm") as proxy:
        for method, body in (("GET", b""), ("POST", b'{"messages": []}')):
            assert (await proxy.raw(message(method, target, body)))[9:12] == b"200"
        assert [(method, path) for method, path, _, _ in fake.requests] == [("GET", sent), ("POST", sent)]


@pytest.mark.mend  # an absolute target would be the way around the queue or the rules
async def test_absolute_targets_have_the_same_rules() -> None:
    async with running_engine() as fake, running_proxy(fake.url, **RULES) as proxy:
        assert (await proxy.raw(message("POST", f"http://x{CHAT}", HINTED)))[9:12] == b"200"
        assert fake.bodies[0]["priority"] != -7
        assert await proxy.metric('tailcast_proxy_requests_total{code="200",kind="completion"}') == 1


@pytest.mark.parametrize(
    ("method", "target"),
    [
        *(
            ("OPTIONS", "*"),
            ("CONNECT", "x:80"),
            ("CONNECT", "/"),
            ("GET", "/v1%0d%0aX"),
            ("POST", "/v1/%0A"),
        ),
        *(("GET", "/%00"), ("GET", "http://x/%7f"), ("DELETE", "/a%1fb?c")),
    ],
)
async def test_odd_requests_get_an_error_of_the_proxy(method: str, target: str) -> None:
    async with running_engine() as fake, running_proxy(fake.url, engine="vllm") as proxy:
        head, _, body = (await proxy.raw(message(method, target))).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400")
        assert json.loads(body)["error"]["param"] in ("request target", "method")
        assert not fake.requests
        assert await proxy.metric('tailcast_proxy_requests_total{code="400",kind="other"}') == 1


async def test_malformed_http_is_counted() -> None:
    bad = [
        b"GET x y z HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
    ]
    async with running_engine() as fake, running_proxy(fake.url) as proxy:
        codes = [(await proxy.raw(data))[9:12] for data in bad]
        assert codes == [b"400", b"400"]
        assert await proxy.metric('tailcast_proxy_requests_total{code="400",kind="malformed"}') == 2
        assert await proxy.metric('tailcast_proxy_refused_total{code="malformed_http"}') == 2


FORM = 'Content-Disposition: form-data; name="{}"\r\n\r\n-7\r\n--b--\r\n'


def multipart(name: str) -> bytes:
    return f"--b\r\n{FORM.format(name)}".encode()


JSON, MULTIPART = "application/json", "multipart/form-data; boundary=b"
URLENCODED = "application/x-www-form-urlencoded"
#: Content type and body: an engine may find the hint in each.
HIDDEN = {
    "block comment": (JSON, b"/* a */ " + HINTED),
    "line comment": (JSON, b"// a\n" + HINTED),
    "hash comment": (JSON, b"# a\n" + HINTED),
    "list": (JSON, b"[" + HINTED + b"]"),
    "space then list": (JSON, b" \n[" + HINTED + b"]"),
    "no-break space": (JSON, "\u00a0".encode() + HINTED),
    "no-break space in Latin-1": (JSON, b"\xa0" + HINTED),
    "wide space": (JSON, "\u3000".encode() + HINTED),
    "separators": (JSON, "\u2028\x85\x1c".encode() + HINTED),
    "byte order mark": (JSON, b"\xef\xbb\xbf" + HINTED),
    "UTF-16": (JSON, HINTED.decode().encode("utf-16")),
    "UTF-16 without mark": (JSON, HINTED.decode().encode("utf-16-be")),
    "UTF-7": (JSON + "; charset=utf-7", HINTED.replace(b"{", b"+AHs-").replace(b"}", b"+AH0-")),
    "EBCDIC": (JSON + "; Charset=\"cp037\"", HINTED.decode().encode("cp037")),
    "UTF-16 by charset": (JSON + ";charset = utf-16-le", HINTED.decode().encode("utf-16-le")),
    "form": (URLENCODED, b"a=b&priority=-7"),
    "encoded form": (URLENCODED, b"a=b;%70riority=-7"),
    "nested form": (URLENCODED, b"nvext[agent_hints][priority]=-7"),
    "multipart": (MULTIPART, multipart("priority")),
    "nested multipart": (MULTIPART, multipart("parameters.Priority")),
    "quoted multipart": (MULTIPART, multipart('pri\\"ority')),
    "multipart without quotes": (MULTIPART, multipart("x").replace(b'"x"', b"priority")),
    "folded multipart": (MULTIPART, multipart("priority").replace(b"; name", b";\r\n name")),
    "extended multipart": (MULTIPART, multipart("x").replace(b'name="x"', b"name*=utf-8''%70riority")),
    "JSON in multipart": (MULTIPART, b"--b\r\nContent-Type: application/json\r\n\r\n" + HINTED + b"\r\n--b--\r\n"),
}  # fmt: skip


@pytest.mark.mend  # with --client_priority replace these hints reached the engine
@pytest.mark.parametrize("method", ["POST", "GET", "DELETE", "OPTIONS"])
async def test_hidden_hints_are_refused(method: str) -> None:
    async with running_engine(fake_engine.respond) as fake, running_proxy(fake.url, **RULES) as proxy:
        for name, (content_type, body) in HIDDEN.items():
            for headers in ([content_type], ["text/plain", content_type]):
                lines = [f"Content-Type: {value}" for value in headers]
                for path in ("/v1/other", "/tokenize"):
                    answer = await proxy.raw(message(method, path, body, *lines))
                    assert (name, answer[9:12]) == (name, b"400")
        assert not fake.requests


@pytest.mark.mend  # only POST and PUT were read
@pytest.mark.parametrize("method", ["GET", "DELETE", "OPTIONS", "POST"])
@pytest.mark.parametrize("path", ["/v1/responses/1", "/tokenize"])
async def test_hints_are_removed_whatever_the_method(method: str, path: str) -> None:
    async with running_engine(fake_engine.respond) as fake, running_proxy(fake.url, **RULES) as proxy:
        assert (await proxy.raw(message(method, path, HINTED)))[9:12] == b"200"
        assert re.search(rb'"priority":\s*-7', fake.requests[0][3]) is None
        assert b"messages" in fake.requests[0][3]


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        (MULTIPART, multipart("prompt").replace(b'"prompt"', b'"file"; filename="a b.wav"')),
        (MULTIPART, multipart("timestamp_granularities[]")),
        (URLENCODED, b"a=priority&model=x"),
        ("application/octet-stream", b"GGUF\0\0{"),
        ("image/png", b"\x89PNG\r\n\x1a\n{"),
        ("text/plain; charset=UTF-8", b"some text"),
    ],
)
async def test_other_bodies_pass_unchanged_under_the_rules(content_type: str, body: bytes) -> None:
    async with running_engine(fake_engine.respond) as fake, running_proxy(fake.url, **RULES) as proxy:
        assert (await proxy.raw(message("POST", "/v1/files", body, f"Content-Type: {content_type}")))[
            9:12
        ] == b"200"
        assert fake.requests[0][3] == body


async def test_without_rules_hidden_hints_are_the_clients_to_send() -> None:
    async with running_engine(fake_engine.respond) as fake, running_proxy(fake.url, engine="vllm") as proxy:
        for content_type, body in HIDDEN.values():
            fake.requests.clear()
            answer = await proxy.raw(message("POST", "/v1/other", body, f"Content-Type: {content_type}"))
            assert answer[9:12] == b"200"
            assert fake.requests[0][3] == body


@pytest.mark.mend  # a body of 0.3 MB with a repeated name took 33 s, one of 15 MB of {} blocked others for 2.7 s
@pytest.mark.parametrize(
    "value", [b"{}", b"[]", b"0", b'{"a":0}', b'"a"'], ids=["objects", "lists", "numbers", "members", "texts"]
)
async def test_the_values_of_a_body_are_bounded(value: bytes) -> None:
    many = b'{"messages": [' + b",".join([value] * (MAX_VALUES + 10)) + b"]}"
    async with running_engine() as fake, running_proxy(fake.url, engine="vllm") as proxy:
        assert (await proxy.post(BytesIO(many)))[0] == 400
        assert not fake.requests


@pytest.mark.mend  # large bodies were parsed in the event loop
async def test_large_bodies_are_parsed_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = {}

    def parsed(data: bytes) -> Any:
        threads[len(data) > handler.LARGE_BYTES] = threading.current_thread()
        return json_body(data)

    monkeypatch.setattr(client_rules, "json_body", parsed)
    async with running_engine() as fake, running_proxy(fake.url, engine="vllm") as proxy:
        for text in ("x", "x" * handler.LARGE_BYTES):
            assert (await proxy.post(chat(text)))[0] == 200
        assert fake.bodies[1]["messages"][0]["content"] == text
    assert threads[False] is threading.main_thread()
    assert threads[True] is not threading.main_thread()
