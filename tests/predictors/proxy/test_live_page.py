"""The live page of the proxy: its data, what the memory found for a prompt, the order, and the page in a browser."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from predictors.hosting.live_page import MAX_ENDED, EndedRequest
from tests.browser import needs_chromium, running_browser
from tests.fake_openai import Script
from tests.predictors.proxy import fake_engine
from tests.predictors.proxy.fake_engine import RunningProxy, running_engine, running_proxy
from tests.waiting import until

LENGTHS = {"Classify": 3, "Translate": 30, "Write": 900}
NOUNS = "rivers tides engines glaciers violins graphs caches bridges stars wheat ports corals".split()  # noqa: SIM905
HOSTILE = "<script>document.title='broken'</script><b>bold"


async def by_task(request: web.Request, body: bytes) -> web.StreamResponse:
    """So many tokens as the first word of the prompt stands for."""
    content = json.loads(body)
    tokens = LENGTHS[content["messages"][-1]["content"].split()[0]]
    if tokens > content["max_tokens"]:
        return web.json_response(fake_engine.completion(content["max_tokens"], "length"))
    return web.json_response(fake_engine.completion(tokens))


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "tiny-llm", "messages": [{"role": "user", "content": text}], "max_tokens": 2000} | more


@asynccontextmanager
async def proxy_of(script: Script = by_task, **options: Any) -> AsyncIterator[RunningProxy]:
    defaults: dict[str, Any] = {"engine": "none", "predictor": "tiny", "served_model": None}
    async with running_engine(script) as fake, running_proxy(fake.url, **(defaults | options)) as proxy:
        yield proxy


async def sends(proxy: RunningProxy, **more: Any) -> int:
    """Sends one request for each task and noun, and waits until all are on the page; returns their number."""
    start = len(proxy.server.handler.recorder.ended)
    for noun in NOUNS:
        for task in LENGTHS:
            assert (await proxy.post(chat(f"{task} something about {noun}", **more)))[0] == 200
    num = len(NOUNS) * len(LENGTHS)
    await until(lambda: len(proxy.server.handler.recorder.ended) == start + num)
    return num


async def state_of(proxy: RunningProxy, query: str = "") -> dict[str, Any]:
    async with proxy.client.get(f"{proxy.admin}/ui/state.json{query}") as response:
        assert (response.status, response.headers["Cache-Control"]) == (200, "no-store")
        content: dict[str, Any] = await response.json()
        return content


async def explained(proxy: RunningProxy, data: Any, **headers: str) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json"} | headers
    body = data if isinstance(data, bytes) else json.dumps(data).encode()
    async with proxy.client.post(
        proxy.admin + "/ui/explain", data=BytesIO(body), headers=headers
    ) as response:
        text = await response.text()
        return response.status, json.loads(text) if response.content_type == "application/json" else text


async def test_predicted_and_true_lengths_of_a_served_model_without_texts() -> None:
    async with proxy_of() as proxy:
        empty = await state_of(proxy)
        assert (empty["models"], empty["ended"]["p50"], empty["learned"]["metrics"]) == ([], [], None)
        assert empty["hint"].startswith("Send requests through the proxy")
        num = await sends(proxy)
        await proxy.post(chat("Write of a long summer", model="other", max_tokens=50))
        await until(lambda: len(proxy.server.handler.recorder.ended) == num + 1)
        latest, state = await state_of(proxy), await state_of(proxy, "?model=tiny-llm")
    assert latest["model"] == "other"
    assert latest["ended"]["is_finished"] == [False]
    assert latest["ended"]["output_tokens"] == [50]
    assert set(state["models"]) == {"tiny-llm", "other"}
    ended, metrics = state["ended"], state["learned"]["metrics"]
    assert {len(column) for column in ended.values()} == {num}
    assert set(ended["output_tokens"]) == set(LENGTHS.values())
    assert all(0 < low < high for low, high in zip(ended["p50"], ended["p90"], strict=True))
    assert metrics["num_outputs"] == num
    assert set(metrics["versions"]) == {"raw", "calibrated", "remembered"}
    for scores in metrics["versions"].values():
        assert set(scores["coverage"]) == {"p50", "p90", "p99"}
    assert state["learned"]["num_remembered"] >= num
    assert not any(noun in json.dumps(state) for noun in NOUNS)


async def test_nearest_past_requests_of_a_prompt_by_id() -> None:
    async with proxy_of() as proxy:
        for _ in range(3):
            await sends(proxy)
        ended = (await state_of(proxy))["ended"]
        query = {"prompt": "Classify something about rivers", "model": "tiny-llm"}
        status, near = await explained(proxy, query)
        other_status, other = await explained(proxy, query | {"prompt": "Write something about rivers"})
    assert status == other_status == 200
    assert near["used"] == "remembered"
    assert near["neighbors"][0]["similarity"] == pytest.approx(1, abs=1e-3)
    assert near["neighbors"][0]["output_tokens"] == pytest.approx(3)
    lengths = dict(zip(ended["request_id"], ended["output_tokens"], strict=True))
    for neighbor in (*near["neighbors"], *other["neighbors"]):
        assert neighbor["output_tokens"] == pytest.approx(lengths[neighbor["request_id"]])
    used, others = near["versions"]["remembered"], other["versions"]["remembered"]
    assert used["p10"] < used["p50"] < used["p90"] < used["p99"]
    assert used["p50"] < others["p50"]


async def test_invalid_queries_are_refused() -> None:
    async with proxy_of() as proxy:
        assert (await explained(proxy, {"prompt": "Write", "model": 3}))[0] == 400
        assert (await explained(proxy, {"prompt": " "}))[1]["error"].startswith("prompt: ")
        assert (await explained(proxy, {"prompt": "Write", "tenant": "x" * 257}))[0] == 400
        assert (await explained(proxy, b"[1]"))[0] == 400
        assert (await explained(proxy, b'{"prompt"'))[0] == 400
        assert (await explained(proxy, {"prompt": "x" * 2**20}))[0] == 413
        # A page of another site can send this type without asking, but not JSON's.
        assert (await explained(proxy, {"prompt": "Write"}, **{"Content-Type": "text/plain"}))[0] == 415
    async with proxy_of(predictor="none", served_model="") as proxy:
        status, content = await explained(proxy, {"prompt": "Write"})
        assert (status, content["error"]) == (503, "the proxy has no predictor (--predictor none)")
        assert "--predictor none" in (await state_of(proxy))["hint"]


async def test_tenants_have_their_own_memory_on_the_page() -> None:
    async with proxy_of() as proxy:
        for _ in range(2):
            for noun in NOUNS:
                for task in LENGTHS:
                    await proxy.post(chat(f"{task} something about {noun}"), {"x-tailcast-tenant": "team"})
        await until(lambda: len(proxy.server.handler.recorder.ended) == 2 * len(NOUNS) * len(LENGTHS))
        query = {"prompt": "Classify something about rivers", "model": "tiny-llm"}
        assert (await explained(proxy, query | {"tenant": "team"}))[1]["tenant"] == "team"
        assert (await explained(proxy, query | {"tenant": "unknown"}))[1]["tenant"] == ""


async def test_waiting_requests_in_the_order_of_the_queue() -> None:
    go = asyncio.Event()
    async with proxy_of(fake_engine.gated(go), release=1, policy="ssjf") as proxy:
        texts = [
            "Write a long essay about the sea",
            "Write an epic of many chapters",
            "Classify: good",
            "yes or no?",
        ]
        sent = []
        for number, text in enumerate(texts):
            sent.append(asyncio.create_task(proxy.post(chat(text), {"x-tailcast-tenant": "team"})))
            await until(lambda number=number: proxy.server.handler.order.num_live == number + 1)
        states = proxy.server.handler.order._order.states
        await until(lambda: all(state.prediction is not None for state in states.values()))
        order = (await state_of(proxy))["order"]
        go.set()
        assert [status for status, _ in await asyncio.gather(*sent)] == [200] * len(texts)
        assert (order["policy"], order["num_waiting"], order["num_running"]) == ("ssjf", 3, 1)
        rows = order["requests"]
        assert [row["position"] for row in rows] == [1, 2, 3, None]
        assert [row["state"] for row in rows] == ["waiting"] * 3 + ["running"]
        assert [row["p50"] for row in rows[:3]] == sorted(row["p50"] for row in rows[:3])
        assert {row["tenant"] for row in rows} == {"team"}
        assert rows[-1]["running_s"] > 0
        assert rows[0]["running_s"] is None


async def test_sessions_of_a_policy_that_uses_them() -> None:
    go = asyncio.Event()
    async with proxy_of(
        fake_engine.gated(go), release=4, policy="working_set", engine_kv_tokens=1000
    ) as proxy:
        texts = {session: chat(session * 2000) for session in "abc"}
        sent = []
        for number, (session, content) in enumerate(texts.items()):
            sent.append(asyncio.create_task(proxy.post(content, {"x-session-id": session})))
            await until(lambda number=number: proxy.server.handler.order.num_live == number + 1)
        sessions = (await state_of(proxy))["order"]["sessions"]
        go.set()
        await asyncio.gather(*sent)
        now = proxy.server.live_page.clock()
        proxy.server.live_page.clock = lambda: now + 1.5
        ended = (await state_of(proxy))["order"]["sessions"]
    assert (sessions["num_known"], sessions["kv_tokens"], sessions["hit_rate"]) == (3, 1000, None)
    assert sessions["num_running"] + sessions["num_held"] == 3
    assert sessions["num_running"] == sessions["num_active"] > 0
    assert sessions["resident_tokens"] > 0
    assert (ended["num_running"], ended["num_held"], ended["hit_rate"]) == (0, 0, 0.0)


async def test_sent_requests_in_the_order_that_the_engine_gets() -> None:
    go = asyncio.Event()
    async with proxy_of(fake_engine.gated(go), engine="vllm", policy="ssjf") as proxy:
        texts = ["Write a long essay about the sea", "Classify: good"]
        sent = [asyncio.create_task(proxy.post(chat(text))) for text in texts]
        await until(lambda: proxy.server.handler.order.num_running == len(texts))
        order = (await state_of(proxy))["order"]
        go.set()
        await asyncio.gather(*sent)
        rows = order["requests"]
        assert [(row["position"], row["state"]) for row in rows] == [(1, "sent"), (2, "sent")]
        assert rows[0]["p50"] <= rows[1]["p50"]


async def test_data_are_computed_at_most_once_per_second_and_are_bounded() -> None:
    async with proxy_of() as proxy:
        recorder = proxy.server.handler.recorder
        await proxy.post(chat("Write something"))
        await until(lambda: len(recorder.ended) == 1)
        first = await state_of(proxy, "?model=tiny-llm")
        request = recorder.ended[0]
        for number in range(2 * MAX_ENDED):
            recorder.ended.append(EndedRequest(str(number), "tiny-llm", request.prediction, 3, True))
        pages = proxy.server.live_page
        now = pages.clock()
        pages.clock = lambda: now
        assert await state_of(proxy, "?model=tiny-llm") == first
        pages.clock = lambda: now + 1.5
        state = await state_of(proxy, "?model=tiny-llm")
        assert state["ended"]["request_id"] == [str(number) for number in range(MAX_ENDED, 2 * MAX_ENDED)]
        for number in range(100):
            assert (await state_of(proxy, f"?model={number}"))["ended"]["p50"] == []
        assert len(pages._kept) < 10


async def test_the_page_loads_nothing_else_and_is_not_on_the_port_of_clients() -> None:
    async with proxy_of(fake_engine.respond) as proxy:
        async with proxy.client.get(proxy.admin + "/") as response:
            policy, html = response.headers["Content-Security-Policy"], await response.text()
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in html.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
        assert (await proxy.send("GET", "/", None, {}))[1] == b""  # the engine's response


@needs_chromium
async def test_page_in_a_browser(tmp_path: Path) -> None:
    async with proxy_of() as proxy, running_browser(tmp_path / "profile") as tab:
        await tab.open(proxy.admin + "/")
        await tab.shows("document.getElementById('empty').textContent.startsWith('Send requests')")
        headers = {"x-tailcast-tenant": HOSTILE}
        num = await sends(proxy, model=HOSTILE)
        await tab.shows(f"document.querySelectorAll('#scatter .dot').length === {num}")
        await tab.shows("document.querySelectorAll('#coverage rect').length >= 3")
        options = await tab.value(
            "[...document.getElementById('model').options].map((each) => each.textContent)"
        )
        assert options == [HOSTILE]
        # The form by keyboard alone.
        await tab.value("document.getElementById('prompt').focus()")
        await tab.write("Classify something about rivers")
        await tab.press("Tab")
        await tab.press("Tab")
        assert await tab.value("document.activeElement.value") == HOSTILE  # the served model is filled in
        await tab.press("Enter")
        await tab.shows("document.querySelectorAll('#neighbors tr').length === 10")
        nearest = await tab.value("document.querySelector('#neighbors td').textContent")
        assert nearest in {request.request_id for request in proxy.server.handler.recorder.ended}
        assert (
            await tab.value("document.querySelectorAll('#neighbors td:last-child')[0].textContent") == HOSTILE
        )
        assert "P50" in await tab.value("document.getElementById('verdict').textContent")
        # Updates keep what the reader is doing.
        await proxy.post(chat("Write something else", model=HOSTILE), headers)
        await tab.shows(f"document.querySelectorAll('#scatter .dot').length === {num + 1}")
        assert await tab.value("document.getElementById('prompt').value") == "Classify something about rivers"
        assert await tab.value("document.title") == "tailcast-proxy"
        for width, dark in ((400, True), (1400, False)):
            await tab.resize(width, 900, dark=dark)
            await tab.shows(f"innerWidth === {width}")
            assert await tab.value("document.documentElement.scrollWidth") <= width
        assert tab.problems == []
