"""The held queue and its order."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictors.proxy.client_rules import ClientRules
from predictors.proxy.config import ProxyConfig
from predictors.proxy.order import HoldQueue, aging_policy
from scheduler_core.policies import POLICIES
from scheduler_core.predictions import LengthPrediction, Prediction
from scheduler_core.request import Request
from tests.predictors.proxy.fake_engine import chat, gated, running_engine, running_proxy, until


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def request(number: int, arrival_s: float = 0.0) -> Request:
    return Request(request_id=f"r{number}", arrival_s=arrival_s, prompt_tokens=5, max_tokens=500)


def of_length(mu: float) -> Prediction:
    return Prediction(length=LengthPrediction(mu, 0.5, 3.5))


def test_a_tenant_is_its_header_or_its_keys_hash() -> None:
    rules = ClientRules(ProxyConfig(engine_url="http://x", tenant_header="x-t"))
    assert rules.tenant({"x-t": " lab "}) == "lab"
    one = rules.tenant({"Authorization": "Bearer one"})
    assert one.startswith("key-")
    assert "one" not in one
    assert one != rules.tenant({"Authorization": "Bearer two"})
    assert rules.tenant({}) == ""


@pytest.mark.parametrize("policy", sorted(POLICIES))
async def test_the_queue_lets_n_through_in_the_order_of_any_policy(policy: str) -> None:
    clock = Clock()
    queue = HoldQueue(aging_policy(policy, {}, 0.0), max_running=2, max_waiting=100, clock=clock)
    requests = [request(number, number * 0.01) for number in range(12)]
    passed: list[str] = []

    async def visit(one: Request) -> None:
        await queue.enter(one)
        passed.append(one.request_id)

    tasks = []
    for number, one in enumerate(requests):
        clock.now = one.arrival_s
        tasks.append(asyncio.create_task(visit(one)))
        await asyncio.sleep(0)
        queue.update(one.request_id, of_length(6.0 - 0.2 * number))
    assert (queue.num_running, queue.num_waiting, passed) == (2, 10, ["r0", "r1"])
    while len(passed) < 12:
        clock.now += 0.1
        count = len(passed)
        queue.leave(passed[count - 2])
        await until(lambda count=count: len(passed) == count + 1)
        assert queue.num_running == 2
    if policy in ("sept", "ssjf", "tie"):
        assert passed[2:] == [f"r{number}" for number in range(11, 1, -1)]
    if policy == "fcfs":
        assert passed == [f"r{number}" for number in range(12)]
    for one in requests:
        queue.leave(one.request_id)
    assert (queue.num_running, queue.num_waiting) == (0, 0)
    await asyncio.gather(*tasks)


async def test_aging_overtakes_a_shorter_newcomer() -> None:
    clock = Clock()
    queue = HoldQueue(aging_policy("sept", {}, 50.0), max_running=1, max_waiting=9, clock=clock)
    first, long, short = request(0), request(1, 0.0), request(2, 100.0)
    await queue.enter(first)
    passed = []

    async def visit(one: Request) -> None:
        await queue.enter(one)
        passed.append(one.request_id)

    tasks = [asyncio.create_task(visit(one)) for one in (long, short)]
    await asyncio.sleep(0)
    queue.update("r1", of_length(6.0))
    queue.update("r2", of_length(1.0))
    clock.now = 100.0
    queue.leave("r0")
    await until(lambda: passed == ["r1"])
    queue.leave("r1")
    await asyncio.gather(*tasks)
    assert passed == ["r1", "r2"]


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.sampled_from(["enter", "leave", "cancel", "predict"]), st.integers(0, 30)), max_size=60
    )
)
def test_no_slot_and_no_request_is_lost(steps: list[tuple[str, int]]) -> None:
    async def run() -> None:
        clock = Clock()
        queue = HoldQueue(aging_policy("tie", {}, 0.0), max_running=2, max_waiting=5, clock=clock)
        tasks: dict[int, asyncio.Task[None]] = {}
        requests: dict[int, Request] = {}
        for what, number in steps:
            clock.now += 1.0
            if what == "enter" and number not in requests:
                requests[number] = request(number, clock.now)
                tasks[number] = asyncio.create_task(queue.enter(requests[number]))
            elif (
                number in requests
                and what == "leave"
                and tasks[number].done()
                and not tasks[number].cancelled()
            ):
                queue.leave(f"r{number}")
            elif number in requests and what == "cancel":
                tasks[number].cancel()
            elif number in requests and what == "predict":
                queue.update(f"r{number}", of_length(float(number % 7)))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert queue.num_running <= 2
            assert queue.num_waiting == 0 or queue.num_running == 2
            waiting = sum(not task.done() for task in tasks.values())
            assert waiting == queue.num_waiting
        for number in requests:
            tasks[number].cancel()
            await asyncio.gather(tasks[number], return_exceptions=True)
            queue.leave(f"r{number}")
        assert (queue.num_running, queue.num_waiting) == (0, 0)

    asyncio.run(run())


async def test_an_engine_without_hints_sees_n_at_a_time_and_the_short_first(artifact_folder: Path) -> None:
    go = asyncio.Event()

    texts = ["sea sea sea", "essay essay", "rivers three", "name name name"]  # shorter and shorter
    options: dict[str, Any] = {"predictor": str(artifact_folder), "policy": "sept", "release": 1}
    async with running_engine(gated(go)) as fake, running_proxy(fake.url, **options) as proxy:
        tasks = [asyncio.create_task(proxy.post(chat("a a a")))]
        await until(lambda: fake.requests)
        for text in texts:
            tasks.append(asyncio.create_task(proxy.post(chat(text))))
            await until(lambda: proxy.server.num_in_flight == len(tasks))
        answered = 'tailcast_proxy_predictions_total{outcome="answered"}'
        async with asyncio.timeout(60):
            while await proxy.metric(answered) < 5:
                await asyncio.sleep(0.01)
        assert await proxy.metric("tailcast_proxy_waiting") == 4
        go.set()
        assert [status for status, _ in await asyncio.gather(*tasks)] == [200] * 5
        order = [body["messages"][0]["content"] for body in fake.bodies]
        assert order == ["a a a", *reversed(texts)]
        assert fake.max_in_flight == 1
        assert all("priority" not in body for body in fake.bodies)


async def test_a_full_queue_refuses_at_once() -> None:
    go = asyncio.Event()

    async with running_engine(gated(go)) as fake, running_proxy(fake.url, release=1, max_waiting=1) as proxy:
        tasks = [asyncio.create_task(proxy.post(chat("x"))) for _ in range(2)]
        await until(lambda: proxy.server.num_in_flight == 2 and fake.requests)
        await asyncio.sleep(0.01)
        status, body = await proxy.post(chat("x"))
        assert (status, json.loads(body)["error"]["code"]) == (429, "queue_full")
        go.set()
        assert [status for status, _ in await asyncio.gather(*tasks)] == [200, 200]
