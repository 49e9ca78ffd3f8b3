"""A client's hints reach an engine within the rules, however they are written."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import pytest

from tests.predictors.proxy.fake_engine import CHAT, chat, gated, running_engine, running_proxy, until

BODY = json.dumps(chat("x"))


def beside(member: str) -> bytes:
    """A chat request with further members, as text."""
    return ("{" + member + "," + BODY[1:]).encode()


UNREADABLE = {
    "a number of 5000 digits": beside('"priority": -5, "seed": ' + "1" * 5000),
    "NaN": beside('"priority": -5, "seed": NaN'),
    "Infinity": beside('"priority": -5, "seed": -Infinity'),
    "1e400": beside('"priority": -5, "seed": 1e400'),
    "deep": beside('"priority": -5, "seed": ' + "[" * 100_000 + "]" * 100_000),
    "half a pair": beside('"priority": -5, "user": "\\ud800"'),
    "byte order mark": b"\xef\xbb\xbf" + beside('"priority": -5'),
    "UTF-16": beside('"priority": -5').decode().encode("utf-16"),
    "UTF-16 without mark": beside('"priority": -5').decode().encode("utf-16-be"),
    "UTF-32": beside('"priority": -5').decode().encode("utf-32"),
    "not UTF-8": beside('"priority": -5, "user": "X"').replace(b"X", b"\xff"),
    "two bodies": beside('"priority": -5') * 2,
    "a comment": beside('/* */ "priority": -5'),
    "cut": beside('"priority": -5')[:-1],
}
RESTRICTED: list[dict[str, Any]] = [
    {"client_priority": "replace"},
    {"lowest_priority": 0},
    {"most_urgent_tier": 1},
]


@pytest.mark.parametrize("rules", RESTRICTED, ids=str)
@pytest.mark.parametrize("engine", ["vllm", "none"])
async def test_a_body_that_cannot_be_read_is_refused(engine: str, rules: dict[str, Any]) -> None:
    async with running_engine() as fake, running_proxy(fake.url, engine=engine, **rules) as proxy:
        for path in (CHAT, "/v1/completions", "/v1/responses", "/generate"):
            for name, body in UNREADABLE.items():
                status, answer = await proxy.post(body, path=path)
                assert (status, json.loads(answer)["error"]["param"]) == (400, "body"), (path, name)
            packed = gzip.compress(beside('"priority": -5'))
            for encoding in ("gzip", "identity, GZIP", "br"):
                status, answer = await proxy.post(packed, {"Content-Encoding": encoding}, path=path)
                assert (status, json.loads(answer)["error"]["param"]) == (400, "Content-Encoding"), path
        assert not fake.requests
        assert (await proxy.post(BODY.encode(), {"Content-Encoding": "identity"}))[0] == 200


HIDDEN = [
    ('"priority": -5', "priority"),
    ('"prior\\u0069ty": -5', "priority"),
    ('"priority": -5, "priority": null', "priority"),
    ('"priority": null, "priority": -5', "priority"),
    ('"priority": -5e0', "priority"),
    ('"priority": -5.0', "priority"),
    ('"priority": "-5"', "priority"),
    ('"priority": true', "priority"),
    ('"priority": [-5]', "priority"),
    ('"Priority": -5', "priority"),
    ('"parameters": {"priority": -5}', "priority"),
    ('"nvext": {"agent_hints": {"priority": 9}}', "agent_hints"),
    ('"nvext": {"agent_hints": {"strict_priority": 9, "osl": 1}}', "agent_hints"),
    ('"nvext": {"agent_hints": {"osl": 1}, "agent_hints": {"osl": 2}}', "agent_hints"),
    ('"nvext": {"agent_hints": {"priority": 9}}, "nvext": {}', "agent_hints"),
]
HEADERS = dict.fromkeys([
    "x-llm-d-slo-ttft-ms", "X-LLM-D-Inference-Objective", "x-llm-d-inference-fairness-id",
    "x_llm_d_slo_tpot_ms", "x-gateway-inference-objective", "x-slo-ttft-ms", "x-dynamo-request-priority",
    "x-dynamo-request-strict-priority", "x-smg-priority",
], "7")  # fmt: skip


@pytest.mark.parametrize("engine", ["vllm", "sglang", "dynamo", "llm-d", "none"])
async def test_replaced_hints_of_every_engine_stay_behind(engine: str) -> None:
    async with (
        running_engine() as fake,
        running_proxy(fake.url, engine=engine, client_priority="replace") as proxy,
    ):
        for path in (CHAT, "/v1/responses", "//v1/chat/completions", "/v1/chat%2Fcompletions", "/new"):
            for member, name in HIDDEN:
                assert (await proxy.send("POST", path, beside(member), HEADERS))[0] == 200
                _, _, headers, sent = fake.requests.pop()
                text = sent.decode().lower()
                content = json.loads(text)
                assert {"messages", "model"} <= set(content)
                assert '"-5"' not in text
                hints = content.get("nvext", {}).get("agent_hints", {})
                if name == "priority" and "priority" in content:
                    assert engine in ("vllm", "sglang")
                    assert content["priority"] not in (-5, True, [-5])
                if engine != "dynamo":
                    assert not hints
                assert hints.get("priority") != 9
                assert not {"osl", "strict_priority"} & set(hints)
                assert content.get("parameters", {}) == {}
                assert not {found.lower().replace("_", "-") for found in headers} & {
                    found.lower().replace("_", "-") for found in HEADERS
                } - {"x-llm-d-inference-fairness-id"}
                assert "7" not in headers.values()
        await proxy.send("GET", "/v1/models", None, HEADERS)
        assert "7" not in fake.requests.pop()[2].values()


@pytest.mark.parametrize("engine", ["vllm", "sglang", "none"])
async def test_a_kept_priority_is_an_integer_within_its_bounds(engine: str) -> None:
    rules = {"lowest_priority": -4, "highest_priority": 4}
    async with running_engine() as fake, running_proxy(fake.url, engine=engine, **rules) as proxy:
        for path in (CHAT, "/v1/responses"):
            for value in ("-5", "-5.0", "-5e0", '"-5"', "true", "[-5]", "1" * 400, "-0.5", "3.0"):
                for member in (
                    '"priority": %s',
                    '"parameters": {"priority": %s}',
                    '"nvext": {"agent_hints": {"priority": %s}}',
                ):
                    status, answer = await proxy.send("POST", path, beside(member % value), {})
                    assert status == 400, (path, value)
                    assert json.loads(answer)["error"]["param"].endswith("priority")
            assert not fake.requests
            status, _ = await proxy.send("POST", path, beside('"priority": -5, "priority": 3'), {})
            assert status == 200
            assert fake.requests.pop()[3].count(b"priority") == 1
            hints = '"nvext": {"agent_hints": {"priority": -4, "osl": 1}}'
            assert (await proxy.send("POST", path, beside(hints), {}))[0] == 200
            assert json.loads(fake.requests.pop()[3])["nvext"] == {"agent_hints": {"priority": -4}}
        body = beside('"priority": 4')
        assert (await proxy.send("POST", CHAT, body, {}))[0] == 200
        assert fake.requests.pop()[3] == body  # nothing had to change


async def test_without_rules_everything_of_the_client_passes() -> None:
    async with running_engine() as fake, running_proxy(fake.url, engine="vllm") as proxy:
        body = beside('"priority": "-5", "nvext": {"agent_hints": {"priority": 9}}')
        assert (await proxy.send("POST", CHAT, body, HEADERS))[0] == 200
        _, _, headers, sent = fake.requests.pop()
        assert sent == body
        assert set(HEADERS) <= set(headers)


async def test_a_declared_header_counts_once() -> None:
    async with running_engine() as fake, running_proxy(fake.url, engine="vllm") as proxy:
        for name in ("x-tailcast-tier", "x-tailcast-tenant"):
            async with proxy.client.post(
                proxy.url + CHAT, json=chat("x"), headers=[(name, "1"), (name, "0")]
            ) as response:
                assert response.status == 400
                assert (await response.json())["error"]["param"] == name
        assert not fake.requests


@pytest.mark.parametrize(
    "line",
    (
        f"POST {CHAT},POST /v1/responses,POST /v1/messages,PUT /generate,POST /api/chat,POST {CHAT}/,POST /{CHAT},"
        "POST /v1/./chat/completions,POST /v1%2fchat%2fcompletions,POST /V1/Chat/Completions,POST "
        f"{CHAT}?a=b,POST /tokenize/..{CHAT},POST /tokenize?/,PROPFIND /generate"
    ).split(","),
)
async def test_no_request_passes_the_queue(line: str) -> None:
    method, path = line.split()
    go = asyncio.Event()

    async with (
        running_engine(gated(go)) as fake,
        running_proxy(fake.url, release=1, max_in_flight=3) as proxy,
    ):
        first = asyncio.create_task(proxy.post(chat("x")))
        await until(lambda: fake.num_in_flight == 1)
        others = [
            asyncio.create_task(proxy.send(method, path, BODY.encode(), {})),
            asyncio.create_task(proxy.send("POST", "/unknown", b"\0 no JSON", {"Content-Encoding": "gzip"})),
        ]
        await until(lambda: proxy.server.num_in_flight == 3)
        assert (await proxy.send(method, path, BODY.encode(), {}))[0] == 429
        assert len(fake.requests) == 1
        assert await proxy.metric("tailcast_proxy_waiting") == 2
        go.set()
        assert [status for status, _ in await asyncio.gather(first, *others)] == [200, 200, 200]


async def test_the_hint_of_other_endpoints_is_the_engines_to_take() -> None:
    async with running_engine() as fake, running_proxy(fake.url, engine="vllm") as proxy:
        for path, hinted in (("/v1/responses", True), ("/v1/embeddings", False)):
            assert (await proxy.send("POST", path, b'{"input": "x"}', {}))[0] == 200
            assert ("priority" in json.loads(fake.requests.pop()[3])) is hinted
