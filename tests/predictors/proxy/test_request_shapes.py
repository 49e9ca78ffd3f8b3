"""The order of requests of every API, and what clients declare about it."""

import asyncio
import json
from typing import Any

import pytest

from scheduler_core.request import RequestState
from tests.predictors.proxy.fake_engine import (
    CHAT,
    RunningProxy,
    chat,
    gated,
    running_engine,
    running_proxy,
)

#: The same prediction for the same text, whatever was served before.
TINY: dict[str, Any] = {"predictor": "tiny", "online_calibration": False}
ESSAY = "Write a 3000 word essay on the history of Portugal."
SHORT = "Say yes."
ITEMS = [{"role": "user", "content": [{"type": "input_text", "text": SHORT}]}]
TEXT_PART = [{"type": "text", "text": SHORT}]
#: Path and body of a request for the same short answer.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": [{"role": "user", "content": SHORT}], "max_tokens": 16}),
    "responses": ("/v1/responses", {"input": SHORT, "max_output_tokens": 16}),
    "responses items": ("/v1/responses", {"input": ITEMS, "max_output_tokens": 16, "stream": True}),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": TEXT_PART}], "max_tokens": 16}),
    "completion": ("/v1/completions", {"prompt": SHORT, "max_tokens": 16}),
    "completion list": ("/v1/completions", {"prompt": [SHORT], "max_tokens": "16"}),
    "behind a gateway": (
        "/openai" + CHAT,
        {"messages": [{"role": "user", "content": SHORT}], "max_tokens": 16.0},
    ),
    "without v1": ("/chat/completions", {"messages": [{"role": "user", "content": SHORT}], "max_tokens": 16}),
    "of Azure": (
        "/openai/deployments/m-1/chat/completions?api-version=2026-01-01",
        {"messages": [{"role": "user", "content": SHORT}], "max_tokens": 16},
    ),
    "responses without v1": ("/openai/responses", {"input": SHORT, "max_output_tokens": 16}),
}


async def priorities(proxy: RunningProxy, fake: Any, requests: list[tuple[str, dict[str, Any]]]) -> list[int]:
    """The priorities that the engine gets, by header where it has one."""
    fake.requests.clear()
    for path, body in requests:
        status, _ = await proxy.post({"model": "m-1"} | body, path=path)
        assert status == 200
    found = []
    for _, _, headers, body in fake.requests:
        number = headers.get("X-Vllm-Priority", json.loads(body).get("priority"))
        assert json.loads(body).get("priority", int(number)) == int(number)
        found.append(int(number))
    return found


@pytest.mark.parametrize("policy", ["tie", "sept"])
@pytest.mark.parametrize("shape", SHAPES)
async def test_a_short_answer_comes_before_an_essay_in_every_api(shape: str, policy: str) -> None:
    essay = (CHAT, {"messages": [{"role": "user", "content": ESSAY}], "max_tokens": 4096})
    async with (
        running_engine() as fake,
        running_proxy(fake.url, engine="vllm", policy=policy, **TINY) as proxy,
    ):
        long, short, same = await priorities(proxy, fake, [essay, SHAPES[shape], SHAPES["chat"]])
        assert short < long
        assert not await proxy.metric('tailcast_proxy_hints_total{outcome="other_endpoint"}')
        assert short == pytest.approx(same, abs=200 if policy == "tie" else 0)
        assert await proxy.metric('tailcast_proxy_predictions_total{outcome="answered"}') == 3


async def test_ollamas_requests_are_predicted() -> None:
    go = asyncio.Event()
    async with running_engine(gated(go)) as fake, running_proxy(fake.url, engine="none", **TINY) as proxy:
        bodies = (
            ("/api/chat", {"messages": [{"role": "user", "content": SHORT}], "options": {"num_predict": 16}}),
            ("/api/generate", {"prompt": SHORT, "options": {"num_predict": 16}}),
        )
        tasks = [asyncio.create_task(proxy.post(body, path=path)) for path, body in bodies]
        await proxy.reaches('tailcast_proxy_predictions_total{outcome="answered"}', 2)
        states = [*proxy.server.handler.order._order.states.values()]
        assert [state.request.max_tokens for state in states] == [16, 16]
        assert states[0].prediction == states[1].prediction is not None
        go.set()
        assert [status for status, _ in await asyncio.gather(*tasks)] == [200, 200]


async def test_token_ids_are_prompt_tokens() -> None:
    ids = [1000 + number for number in range(4000)]
    bodies = [{"prompt": ids}, {"prompt": [ids[:1000], ids[1000:]]}, {"prompt": "Say hi to all of them now."}]
    async with running_engine() as fake, running_proxy(fake.url, engine="vllm", policy="spf") as proxy:
        found = await priorities(proxy, fake, [("/v1/completions", body) for body in bodies])
    assert found[:2] == [4_000_000, 4_000_000]
    assert found[2] < 100_000


async def test_several_outputs_and_forced_lengths_are_more_work() -> None:
    extras: list[dict[str, Any]] = [
        {},
        {"n": 8},
        {"n": "8"},
        {"min_tokens": 400},
        {"ignore_eos": True},
        {"max_tokens": -1},
    ]
    async with (
        running_engine() as fake,
        running_proxy(fake.url, engine="vllm", policy="sept", **TINY) as proxy,
    ):
        found = await priorities(proxy, fake, [(CHAT, chat(SHORT, **extra)) for extra in extras])
    one, eight, text, at_least, forced, no_limit = (number / 1000 for number in found)
    assert 5 * one < eight == text
    assert at_least > 400 > one
    assert forced == pytest.approx(500, rel=0.01)
    assert one <= no_limit < 1000


@pytest.mark.parametrize("policy", ["tie", "sept", "ssjf", "spf"])
async def test_a_request_that_cannot_be_read_is_neither_first_nor_last(policy: str) -> None:
    """It is counted by its endpoint. 'Unread' has no prompt in any known form, and is sent twice."""
    known = [
        (CHAT, {"messages": [{"role": "user", "content": text}], "max_tokens": 4096})
        for text in (SHORT, ESSAY * 4) * 8
    ]
    unread = [("/v1/responses", {"prompt_ref": {"id": "p_1"}}), ("/v1/chat/completions", {"messages": []})]
    async with (
        running_engine() as fake,
        running_proxy(fake.url, engine="vllm", policy=policy, **TINY) as proxy,
    ):
        found = await priorities(proxy, fake, known + unread)
        for number in found[-2:]:
            assert min(found[:-2]) < number < max(found[:-2])
        assert await proxy.metric('tailcast_proxy_unread_requests_total{endpoint="/v1/responses"}') == 1
        assert await proxy.metric(f'tailcast_proxy_unread_requests_total{{endpoint="{CHAT}"}}') == 1


#: Engine -> a priority that is less urgent than none, one that is more urgent, and whether lower numbers come first.
DECLARED = {"vllm": (10, -1, True), "sglang": (-3, 5, False), "dynamo": (-3, 5, False)}


def declared(engine: str, priority: int | None) -> dict[str, Any]:
    if priority is None:
        return chat(SHORT)
    return (
        chat(SHORT, nvext={"agent_hints": {"priority": priority}})
        if engine == "dynamo"
        else chat(SHORT, priority=priority)
    )


@pytest.mark.parametrize("engine", DECLARED)
async def test_a_declared_priority_means_what_it_means_to_the_engine(engine: str) -> None:
    """Batch jobs come last, urgent requests first, and within a level the policy decides."""
    low, high, lower_first = DECLARED[engine]
    async with running_engine() as fake, running_proxy(fake.url, engine=engine, **TINY) as proxy:
        for priority in (low, None, high):
            for body in (
                declared(engine, priority),
                declared(engine, priority) | chat(ESSAY, max_tokens=4096),
            ):
                assert (await proxy.post(body))[0] == 200
        sent = [
            body["nvext"]["agent_hints"]["priority"] if engine == "dynamo" else body["priority"]
            for body in fake.bodies
        ]
    order = sorted(range(6), key=sent.__getitem__, reverse=not lower_first)
    assert order == [4, 5, 2, 3, 0, 1]
    assert engine != "dynamo" or all(-(2**31) <= number < 2**31 for number in sent)


@pytest.mark.parametrize(
    ("header", "engine"), [("X-Vllm-Priority", "vllm"), ("x-dynamo-request-priority", "dynamo")]
)
async def test_a_priority_in_the_engines_header_counts_before_the_one_in_the_body(
    header: str, engine: str
) -> None:
    low, high, lower_first = DECLARED[engine]
    async with running_engine() as fake, running_proxy(fake.url, engine=engine, **TINY) as proxy:
        for priority in (low, high):
            await proxy.post(declared(engine, -priority), {header: str(priority)})
        first, second = (int(headers[header]) for _, _, headers, _ in fake.requests)
    assert (second < first) is lower_first
    assert abs(second - first) > 2**20


@pytest.mark.parametrize("engine", ["vllm", "none"])
async def test_a_tier_is_one_step_of_priority(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the default policy, which does not use tiers itself."""
    async with running_engine() as fake, running_proxy(fake.url, engine=engine, **TINY) as proxy:
        order = proxy.server.handler.order._order
        levels = []
        states: list[RequestState] = []
        monkeypatch.setattr(type(order.policy), "on_finish", lambda _, state: states.append(state))
        for headers, priority in (
            ({}, 0),
            ({"x-tailcast-tier": "0"}, 0),
            ({"x-tailcast-tier": "4"}, 0),
            ({"x-tailcast-tier": "4"}, -3),
        ):
            await proxy.post(chat(SHORT, priority=priority), headers)
            levels.append(states[-1].declared_level)
        assert levels == [0, -2, 2, -1]
        if engine == "vllm":
            sent = [int(headers["X-Vllm-Priority"]) for _, _, headers, _ in fake.requests]
            assert sorted(range(4), key=sent.__getitem__) == [1, 3, 0, 2]
