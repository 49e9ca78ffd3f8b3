"""Applications behind one model name: the proxy learns which of them have long outputs, for each tenant by itself."""

import json
from typing import Any

import pytest
from aiohttp import web

from predictors.pretrained import TINY
from predictors.runtime import open_runtime
from scheduler_core.prediction.correction import OWN_OUTPUTS
from tests.predictors.fakes import running_server
from tests.predictors.proxy import fake_engine
from tests.predictors.proxy.fake_engine import chat, running_engine, running_proxy

#: Templates of applications, and the lengths of their outputs: not what their texts suggest.
LENGTHS = {
    "Write a long essay about %s.": 8,
    "Answer yes or no: have you heard of %s?": 900,
    "Extract the JSON for order %s": 120,
}
TOPICS = ("rain", "dragons", "the sea", "trains", "chess", "bread", "Rome")
SERIES = '{predictions="%s",served_model="tiny-llm"}'
#: The key is the expected length.
OPTIONS = {"engine": "vllm", "policy": "sept", "resolution": 1.0}


def text(number: int) -> str:
    template = list(LENGTHS)[number % 3]
    return template % f"{TOPICS[number % 7]} {number}"


async def respond(request: web.Request, body: bytes) -> web.StreamResponse:
    content = json.loads(body)["messages"][-1]["content"]
    [tokens] = [length for template, length in LENGTHS.items() if content.startswith(template[:10])]
    return await fake_engine.plain(request, body, tokens=tokens)


async def send(proxy: Any, numbers: range, **headers: str) -> None:
    for number in numbers:
        assert (await proxy.post(chat(text(number)), headers))[0] == 200


def priorities(fake: Any, count: int = 3) -> list[int]:
    return [body["priority"] for body in fake.bodies[-count:]]


@pytest.mark.parametrize("address", ["tiny", "pretrained", "grpc"])
async def test_the_order_of_applications_is_learned(address: str) -> None:
    async with running_server(open_runtime(TINY)) as (_, service), running_engine(respond) as fake:
        predictor = f"grpc://{service}" if address == "grpc" else address
        async with running_proxy(fake.url, predictor=predictor, **OPTIONS) as proxy:
            await send(proxy, range(3))
            essay, yes_or_no, _ = priorities(fake)
            assert essay > yes_or_no  # as the texts suggest
            await send(proxy, range(3, 123))
            await proxy.reaches('tailcast_proxy_calibration_outputs{served_model="tiny-llm"}', 123)
            await send(proxy, range(300, 303))
            assert priorities(fake) == pytest.approx(list(LENGTHS.values()), rel=0.6)
            tau = {
                which: await proxy.metric(f"tailcast_proxy_calibration_kendall_tau{SERIES % which}")
                for which in ("raw", "calibrated", "corrected")
            }
            assert tau["corrected"] > max(0.4, tau["raw"], tau["calibrated"]), tau
            assert await proxy.metric("tailcast_proxy_calibration_scopes") == 1
            assert await proxy.metric("tailcast_proxy_calibration_remembered") >= 123
            assert await proxy.metric('tailcast_proxy_calibration_memory_hits{served_model="tiny-llm"}') > 90
            assert (
                await proxy.metric('tailcast_proxy_calibration_memory_weight{served_model="tiny-llm"}') > 0.9
            )


async def test_a_flood_of_one_tenant_does_not_change_the_order_of_another() -> None:
    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        if request.headers.get("Authorization") == "Bearer flood":
            return await fake_engine.plain(request, body, tokens=8000)
        return await respond(request, body)

    async with running_engine(script) as fake, running_proxy(fake.url, predictor="tiny", **OPTIONS) as proxy:
        await send(proxy, range(90), Authorization="Bearer a")
        await proxy.reaches('tailcast_proxy_calibration_outputs{served_model="tiny-llm"}', 90)
        await send(proxy, range(300, 303), Authorization="Bearer a")
        before = priorities(fake)
        await send(proxy, range(150), Authorization="Bearer flood")
        await proxy.reaches('tailcast_proxy_calibration_outputs{served_model="tiny-llm"}', 243)
        await send(proxy, range(300, 303), Authorization="Bearer a")
        assert priorities(fake) == pytest.approx(before, rel=0.1)
        assert (
            await proxy.metric("tailcast_proxy_calibration_scopes") == 3
        )  # both tenants, and that of small ones
        assert await proxy.metric("tailcast_proxy_calibration_remembered") <= 93 + 3 + 150 + 2 * OWN_OUTPUTS


async def test_system_prompts_tell_applications_apart() -> None:
    """The same questions, with outputs that depend on the system prompt alone."""

    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        is_brief = "brief" in json.loads(body)["messages"][0]["content"]
        return await fake_engine.plain(request, body, tokens=10 if is_brief else 600)

    def body(number: int, system: str) -> dict[str, Any]:
        question = {"role": "user", "content": f"Tell me about {TOPICS[number % 7]} {number}"}
        return chat("") | {"messages": [{"role": "system", "content": system}, question]}

    async with running_engine(script) as fake, running_proxy(fake.url, predictor="tiny", **OPTIONS) as proxy:
        for number in range(120):
            await proxy.post(body(number, "Be brief." if number % 2 else "Explain in detail."))
        await proxy.reaches('tailcast_proxy_calibration_outputs{served_model="tiny-llm"}', 120)
        for system in ("Be brief.", "Explain in detail."):
            await proxy.post(body(200, system))
        brief, detailed = priorities(fake, 2)
        assert brief < 0.5 * detailed


async def test_off_means_off() -> None:
    options: dict[str, Any] = {"predictor": "tiny", "online_calibration": False, **OPTIONS}
    async with running_engine(respond) as fake, running_proxy(fake.url, **options) as proxy:
        await send(proxy, range(90))
        await send(proxy, range(3))
        assert priorities(fake) == [body["priority"] for body in fake.bodies[:3]]
        assert await proxy.metric("tailcast_proxy_calibration_remembered") == 0


@pytest.mark.parametrize("predictor", ["tiny", "tiny+urgency"])
async def test_the_shipped_urgency_predictor_orders_requests_in_the_proxy(predictor: str) -> None:
    """Without it all requests have the level of the declared tier."""
    nobody_waits = "Reindex the archive of old papers some time this month; nobody waits for it."
    emergency = "Gas smell in the kitchen and my wife passed out"
    async with running_engine(fake_engine.plain) as fake:
        options = {"engine": "vllm", "policy": "semantic", "predictor": predictor}
        options |= {"policy_parameters": {"max_promotion": 5}}
        async with running_proxy(fake.url, **options) as proxy:
            for prompt in (nobody_waits, emergency):
                assert (await proxy.post(chat(prompt), {}))[0] == 200
    lenient, urgent = priorities(fake, 2)
    assert (urgent < lenient) == (predictor == "tiny+urgency")
