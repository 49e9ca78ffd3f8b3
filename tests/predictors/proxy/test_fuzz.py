"""Whatever a client sends to a proxy with rules: no fault of the server, no hang, and no hint outside of the rules."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from predictors.proxy.engines import CLIENT_HEADERS
from predictors.proxy.server import READING, UNQUEUED
from tests.predictors.proxy.fake_engine import CHAT, FakeEngine, RunningProxy, running_engine, running_proxy

#: The client's priority; no policy gives a request this one.
MARK = -77777
RULES: dict[str, dict[str, Any]] = {
    "vllm": {"engine": "vllm", "client_priority": "replace"},
    "dynamo": {"engine": "dynamo", "client_priority": "replace"},
    "bounds": {"engine": "sglang", "lowest_priority": 0},
    "queue": {"engine": "none", "client_priority": "replace", "release": 1},
    "llm-d": {"engine": "llm-d", "most_urgent_tier": 1, "highest_priority": -1, "lowest_priority": -2},
}


class Bench:
    """An engine and a proxy for each entry of `RULES`, on a loop of their own."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.stack = AsyncExitStack()
        self.proxies: dict[str, RunningProxy] = {}

    async def open(self) -> None:
        self.engine: FakeEngine = await self.stack.enter_async_context(running_engine(_respond))
        for name, options in RULES.items():
            manager = running_proxy(self.engine.url, request_timeout_s=5.0, **options)
            self.proxies[name] = await self.stack.enter_async_context(manager)

    def check(self, rules: str, data: bytes) -> None:
        self.engine.requests.clear()
        answer = self.runner.run(self.proxies[rules].raw(data))
        code = answer[9:12].decode()
        assert answer.startswith(b"HTTP/1."), data
        assert code[0] in "24" or code == "501", (code, data)
        assert len(self.engine.requests) <= 1
        for method, path, headers, body in self.engine.requests:
            _check_headers(headers, rules)
            if method not in READING and path not in UNQUEUED:
                _check_body(path, body, rules)


def _check_headers(headers: dict[str, str], rules: str) -> None:
    for name, value in headers.items():
        if name.lower().replace("_", "-").startswith(CLIENT_HEADERS):
            assert rules == "llm-d"
            assert name == "x-llm-d-inference-fairness-id"
            assert value != str(MARK)


def _check_body(path: str, body: bytes, rules: str) -> None:
    """Reads the body as leniently as Python does, and takes any of two members with the same name."""
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
    assert all(type(value) is int for value in priorities)
    if rules == "bounds":
        assert -1 not in priorities  # the policy's are below it by far
    if rules == "llm-d":
        assert set(priorities) <= {-1, -2}
    if rules == "queue":
        assert not priorities
    assert MARK not in priorities
    assert sum(name == "priority" for name, _ in members) <= 1
    assert not {"strict_priority", "latency_sensitivity"} & set(hints)


async def _respond(request: web.Request, body: bytes) -> web.Response:
    return web.Response()


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    world = Bench()
    with world.runner:
        world.runner.run(world.open())
        yield world
        world.runner.run(world.stack.aclose())


PATHS = st.sampled_from(
    (
        f"{CHAT} /v1/completions /v1/responses /generate /invocations /api/chat {CHAT}/ /{CHAT} /v1/./chat/completions "
        f"/v1%2Fchat/completions {CHAT}?a=%00 /tokenize"
    ).split()
) | st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=20).map(lambda text: "/" + text)
METHODS = st.sampled_from(["POST", "POST", "POST", "PUT", "PATCH", "GET", "DELETE", "OPTIONS"])
VALUES = st.sampled_from([str(MARK), "-2", "0", "5", "now", "", "9" * 400, "\u00e9", "nan", "1,2"]) | st.text(
    st.characters(min_codepoint=32, max_codepoint=255, exclude_categories=["Cc"]), max_size=20
)
NAMES = st.sampled_from([
    "x-llm-d-slo-ttft-ms", "X-Llm-D-Inference-Objective", "x_llm_d_slo_tpot_ms",
    "x-gateway-inference-fairness-id", "x-dynamo-request-priority", "x-smg-priority", "x-tailcast-tier",
    "x-tailcast-tenant", "Authorization", "Connection", "Content-Type", "Content-Encoding", "Expect",
    "Upgrade", "X-Own", "Accept-Encoding", "TE",
])  # fmt: skip
HEADERS = st.lists(st.tuples(NAMES, VALUES, st.sampled_from(["utf-8", "latin-1"])), max_size=4)
# Texts of JSON values, so that they may be written as no encoder would.
LEAVES = st.sampled_from(
    [
        *(
            str(MARK),
            f"{MARK}.0",
            f"{MARK}e0",
            f'"{MARK}"',
            "true",
            "null",
            "-1",
            "0",
            "5",
            "NaN",
            "-Infinity",
        ),
        *("1e400", "9" * 5000, "1e2", '"\\ud800"', '"\\ud83d\\ude00"', '"\u00e9"', "[]", "{}", "-0", "01"),
        "[" * 2000 + "]" * 2000,
    ]
)
KEYS = st.sampled_from([
    '"priority"', '"prior\\u0069ty"', '"Priority"', '"nvext"', '"agent_hints"', '"parameters"',
    '"strict_priority"', '"max_tokens"', '"messages"', '"prompt"', '"stream"', '"n"', '"model"',
    '"stream_options"', '"osl"', '"input"',
])  # fmt: skip
SPACES = st.sampled_from(["", " ", "\n\t", "/**/", "\ufeff", "\0", "", "", "", "", "", ""])


def _object(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    members = st.lists(st.tuples(KEYS, SPACES, values), max_size=4)
    return members.map(
        lambda pairs: "{" + ",".join(f"{key}{space}:{value}" for key, space, value in pairs) + "}"
    )


HINTS = LEAVES.map(lambda leaf: '{"agent_hints":{"priority":LEAF,"strict_priority":1}}'.replace("LEAF", leaf))
MESSAGES = LEAVES.map(lambda leaf: '[{"role":"user","content":LEAF},{"role":LEAF}]'.replace("LEAF", leaf))
OBJECTS = st.recursive(
    _object(LEAVES | HINTS | MESSAGES), lambda inner: _object(LEAVES | inner), max_leaves=4
)
TEXTS = st.builds(lambda before, text, after: before + text + after, SPACES, OBJECTS, SPACES | st.just("{}"))
BODIES = st.binary(max_size=60) | st.builds(
    lambda text, encoding: text.encode(encoding, "surrogatepass"),
    TEXTS,
    st.sampled_from(["utf-8", "utf-8", "utf-8", "utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32"]),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    rules=st.sampled_from(sorted(RULES)),
    method=METHODS,
    path=PATHS,
    headers=HEADERS,
    body=BODIES,
)
def test_any_request(
    bench: Bench, rules: str, method: str, path: str, headers: list[tuple[str, str, str]], body: bytes
) -> None:
    lines = [f"{method} {path} HTTP/1.1", "Host: x", "Connection: close", f"Content-Length: {len(body)}"]
    head = b"\r\n".join(
        [line.encode() for line in lines]
        + [name.encode() + b": " + value.encode(encoding, "replace") for name, value, encoding in headers]
    )
    bench.check(rules, head + b"\r\n\r\n" + body)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(rules=st.sampled_from(sorted(RULES)), path=PATHS, body=OBJECTS)
def test_any_object(bench: Bench, rules: str, path: str, body: str) -> None:
    data = body.encode()
    bench.check(
        rules,
        b"POST %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s"
        % (path.encode(), len(data), data),
    )
