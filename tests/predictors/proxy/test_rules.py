"""Whatever a client sends to a proxy with rules: no fault of the server, no hang, and no hint outside of the rules."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from predictors.proxy.engines import CLIENT_HEADERS
from predictors.proxy.server import READING, UNQUEUED
from tests.predictors.proxy.fake_engine import (
    CHAT,
    RunningProxy,
    chat,
    gated,
    respond,
    running_engine,
    running_proxy,
    until,
)

#: The client's priority; no policy gives a request this one.
MARK = -77777
RULES: dict[str, dict[str, Any]] = {
    "vllm": {"engine": "vllm", "client_priority": "replace"},
    "dynamo": {"engine": "dynamo", "client_priority": "replace"},
    "sglang": {"engine": "sglang", "client_priority": "replace"},
    "queue": {"engine": "none", "client_priority": "replace", "release": 1},
    "llm-d": {"engine": "llm-d", "most_urgent_tier": 1},
}


def _check(method: str, path: str, headers: dict[str, str], body: bytes, rules: str) -> None:
    """Reads the body as leniently as Python does, and takes any of two members with the same name."""
    for name, value in headers.items():
        if name.lower().replace("_", "-").startswith(CLIENT_HEADERS):
            assert (rules, name) == ("llm-d", "x-llm-d-inference-fairness-id")
            assert value != str(MARK)
    if method in READING or path in UNQUEUED:
        return
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


Check = Callable[[str, bytes], str]


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
            _check(*request, rules)
        return code

    proxies: dict[str, RunningProxy] = {}
    stack = AsyncExitStack()
    with asyncio.Runner() as runner:
        engine = runner.run(stack.enter_async_context(running_engine(respond)))
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
    "x-gateway-inference-objective x-slo-ttft-ms x-dynamo-request-priority x-dynamo-request-strict-priority"
)
HINT_HEADERS = [f"{name}: {MARK}".encode() for name in NAMES.split()]


@pytest.mark.parametrize("member", KNOWN)
def test_known_ways_around_the_rules(check: Check, member: str) -> None:
    for rules in RULES:
        for path in PLACES:
            assert check(rules, message(path, beside(member), *HINT_HEADERS)) == "200"


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


BODY = json.dumps(chat("x"))


async def test_without_rules_everything_of_the_client_passes() -> None:
    hints = {"x-llm-d-slo-ttft-ms": "7", "x-smg-priority": "7", "x_dynamo_request_priority": "7"}
    async with running_engine() as fake, running_proxy(fake.url, engine="vllm") as proxy:
        body = beside('"priority": "-5", "nvext": {"agent_hints": {"priority": 9}}')
        assert (await proxy.send("POST", CHAT, body, hints))[0] == 200
        _, _, headers, sent = fake.requests.pop()
        assert sent == body
        assert set(hints) <= set(headers)


async def test_a_declared_header_counts_once() -> None:
    async with running_engine() as fake, running_proxy(fake.url, engine="vllm") as proxy:
        for name in ("x-tailcast-tier", "x-tailcast-tenant"):
            async with proxy.client.post(
                proxy.url + CHAT, json=chat("x"), headers=[(name, "1"), (name, "0")]
            ) as response:
                assert response.status == 400
                assert (await response.json())["error"]["param"] == name
        assert not fake.requests


LINES = (
    f"POST {CHAT},POST /v1/responses,POST /v1/messages,PUT /generate,POST /api/chat,POST {CHAT}/,POST /{CHAT},"
    "POST /v1/./chat/completions,POST /v1%2fchat%2fcompletions,POST /V1/Chat/Completions,"
    f"POST {CHAT}?a=b,POST /tokenize/..{CHAT},POST /tokenize?/,PROPFIND /generate"
)


@pytest.mark.parametrize("line", LINES.split(","))
async def test_no_request_passes_the_queue(line: str) -> None:
    method, path = line.split()
    go = asyncio.Event()
    rules = {"release": 1, "max_in_flight": 3}
    async with running_engine(gated(go)) as fake, running_proxy(fake.url, **rules) as proxy:
        tasks = [asyncio.create_task(proxy.post(chat("x")))]
        await until(lambda: fake.num_in_flight == 1)
        tasks.append(asyncio.create_task(proxy.send(method, path, BODY.encode(), {})))
        gzipped = {"Content-Encoding": "gzip"}
        tasks.append(asyncio.create_task(proxy.send("POST", "/unknown", b"\0 no JSON", gzipped)))
        await until(lambda: proxy.server.num_in_flight == 3)
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
