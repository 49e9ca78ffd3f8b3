"""Tenants, the held queue and its order."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from predictors.proxy.holding import HoldQueue
from predictors.proxy.order import aged_policy
from predictors.proxy.problems import Refusal
from predictors.proxy.tenants import TenantBook, TenantLimits, Tenants, tenant_of
from scheduler_core.errors import InputError
from scheduler_core.policies import POLICIES
from scheduler_core.predictions import LengthPrediction, Prediction
from scheduler_core.request import Request, RequestState
from tests.predictors.proxy.fake_engine import asks, plain, running_engine, running_proxy
from tests.predictors.proxy.test_relay import until


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def state(number: int, arrival_s: float = 0.0) -> RequestState:
    return RequestState(
        Request(request_id=f"r{number}", arrival_s=arrival_s, prompt_tokens=5, max_tokens=500), order=number
    )


def of_length(mu: float) -> Prediction:
    return Prediction(length=LengthPrediction(mu, 0.5, 3.5))


def test_rates_and_concurrency_are_each_tenants_own() -> None:
    clock = Clock()
    limits = TenantLimits(max_concurrent=3, rate_per_s=0.5, burst=2)
    tenants = Tenants(TenantBook(default=limits), clock)
    tenants.enter("a")
    tenants.enter("a")
    with pytest.raises(Refusal, match="allowed: 0.5, 2 at once") as refused:
        tenants.enter("a")
    assert (refused.value.status, refused.value.retry_after_s) == (429, 2)
    tenants.enter("b")
    clock.now = 2.0
    tenants.enter("a")
    clock.now = 100.0
    with pytest.raises(Refusal, match="concurrent requests: got 4; allowed: 3"):
        tenants.enter("a")
    tenants.leave("a")
    tenants.enter("a")
    tenants.enter("b")


def test_a_tenant_is_its_header_or_its_keys_hash() -> None:
    assert tenant_of({"x-t": " lab "}, "x-t") == "lab"
    one = tenant_of({"Authorization": "Bearer one"}, "x-t")
    assert one.startswith("key-")
    assert "one" not in one
    assert one != tenant_of({"Authorization": "Bearer two"}, "x-t")
    assert tenant_of({}, "x-t") == ""
    with pytest.raises(InputError, match="tenant_burst"):
        TenantLimits(burst=0)


async def test_over_the_limit_is_429_in_the_apis_form() -> None:
    go = asyncio.Event()

    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        await go.wait()
        return await plain(request, body)

    async with (
        running_engine(script) as fake,
        running_proxy(fake.url, engine="vllm", tenant_max_concurrent=1) as proxy,
    ):
        first = asyncio.create_task(proxy.post(asks("x"), {"Authorization": "Bearer one"}))
        await until(lambda: len(fake.requests) == 1)
        status, body = await proxy.post(asks("x"), {"Authorization": "Bearer one"})
        assert status == 429
        assert json.loads(body)["error"]["type"] == "rate_limit_exceeded"
        other = asyncio.create_task(proxy.post(asks("x"), {"Authorization": "Bearer two"}))
        go.set()
        assert [status for status, _ in await asyncio.gather(first, other)] == [200, 200]
        assert (await proxy.post(asks("x"), {"Authorization": "Bearer one"}))[0] == 200


@pytest.mark.parametrize("policy", sorted(POLICIES))
async def test_the_queue_lets_n_through_in_the_order_of_any_policy(policy: str) -> None:
    clock = Clock()
    queue = HoldQueue(aged_policy(policy, {}, 0.0), max_running=2, max_waiting=100, clock=clock)
    states = [state(number, number * 0.01) for number in range(12)]
    passed: list[str] = []

    async def visit(one: RequestState) -> None:
        await queue.enter(one)
        passed.append(one.request_id)

    tasks = []
    for number, one in enumerate(states):
        clock.now = one.request.arrival_s
        tasks.append(asyncio.create_task(visit(one)))
        await asyncio.sleep(0)
        queue.update(one, of_length(6.0 - 0.2 * number))
    assert (queue.num_running, queue.num_waiting, passed) == (2, 10, ["r0", "r1"])
    while len(passed) < 12:
        clock.now += 0.1
        count = len(passed)
        queue.leave(next(one for one in states if one.request_id == passed[count - 2]))
        await until(lambda count=count: len(passed) == count + 1)
        assert queue.num_running == 2
    if policy in ("sept", "ssjf", "tie"):
        assert passed[2:] == [f"r{number}" for number in range(11, 1, -1)]
    if policy == "fcfs":
        assert passed == [f"r{number}" for number in range(12)]
    for one in states:
        queue.leave(one)
    assert (queue.num_running, queue.num_waiting) == (0, 0)
    await asyncio.gather(*tasks)


async def test_ageing_overtakes_a_shorter_newcomer() -> None:
    clock = Clock()
    queue = HoldQueue(aged_policy("sept", {}, 50.0), max_running=1, max_waiting=9, clock=clock)
    first, long, short = state(0), state(1, 0.0), state(2, 100.0)
    await queue.enter(first)
    passed = []

    async def visit(one: RequestState) -> None:
        await queue.enter(one)
        passed.append(one.request_id)

    tasks = [asyncio.create_task(visit(one)) for one in (long, short)]
    await asyncio.sleep(0)
    queue.update(long, of_length(6.0))
    queue.update(short, of_length(1.0))
    clock.now = 100.0
    queue.leave(first)
    await until(lambda: passed == ["r1"])
    queue.leave(long)
    await asyncio.gather(*tasks)
    assert passed == ["r1", "r2"]


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.sampled_from(["enter", "leave", "cancel", "predict"]), st.integers(0, 30)), max_size=60
    )
)
def test_no_seat_and_no_request_is_lost(steps: list[tuple[str, int]]) -> None:
    async def run() -> None:
        clock = Clock()
        queue = HoldQueue(aged_policy("tie", {}, 0.0), max_running=2, max_waiting=5, clock=clock)
        tasks: dict[int, asyncio.Task[None]] = {}
        states: dict[int, RequestState] = {}
        for what, number in steps:
            clock.now += 1.0
            if what == "enter" and number not in states:
                states[number] = state(number, clock.now)
                tasks[number] = asyncio.create_task(queue.enter(states[number]))
            elif (
                number in states
                and what == "leave"
                and tasks[number].done()
                and not tasks[number].cancelled()
            ):
                queue.leave(states[number])
            elif number in states and what == "cancel":
                tasks[number].cancel()
            elif number in states and what == "predict":
                queue.update(states[number], of_length(float(number % 7)))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert queue.num_running <= 2
            assert queue.num_waiting == 0 or queue.num_running == 2
            waiting = sum(not task.done() for task in tasks.values())
            assert waiting == queue.num_waiting
        for number in states:
            tasks[number].cancel()
            await asyncio.gather(tasks[number], return_exceptions=True)
            queue.leave(states[number])
        assert (queue.num_running, queue.num_waiting) == (0, 0)

    asyncio.run(run())


async def test_an_engine_without_hints_sees_n_at_a_time_and_the_short_first(artifact_folder: Path) -> None:
    go = asyncio.Event()

    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        await go.wait()
        return await plain(request, body)

    texts = ["sea sea sea", "essay essay", "rivers three", "name name name"]  # shorter and shorter
    options: dict[str, Any] = {"predictor": str(artifact_folder), "policy": "sept", "release": 1}
    async with running_engine(script) as fake, running_proxy(fake.url, **options) as proxy:
        tasks = [asyncio.create_task(proxy.post(asks("a a a")))]
        await until(lambda: fake.requests)
        for text in texts:
            tasks.append(asyncio.create_task(proxy.post(asks(text))))
            await until(lambda: proxy.server.num_inside == len(tasks))
        answered = 'tailcast_proxy_predictions_total{outcome="answered"}'
        async with asyncio.timeout(60):
            while await proxy.metric(answered) < 5:
                await asyncio.sleep(0.01)
        assert await proxy.metric("tailcast_proxy_waiting") == 4
        go.set()
        assert [status for status, _ in await asyncio.gather(*tasks)] == [200] * 5
        order = [body["messages"][0]["content"] for body in fake.bodies]
        assert order == ["a a a", *reversed(texts)]
        assert fake.most_inside == 1
        assert all("priority" not in body for body in fake.bodies)


async def test_a_full_queue_refuses_at_once() -> None:
    go = asyncio.Event()

    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        await go.wait()
        return await plain(request, body)

    async with running_engine(script) as fake, running_proxy(fake.url, release=1, max_waiting=1) as proxy:
        tasks = [asyncio.create_task(proxy.post(asks("x"))) for _ in range(2)]
        await until(lambda: proxy.server.num_inside == 2 and fake.requests)
        await asyncio.sleep(0.01)
        status, body = await proxy.post(asks("x"))
        assert (status, json.loads(body)["error"]["code"]) == (429, "queue_full")
        go.set()
        assert [status for status, _ in await asyncio.gather(*tasks)] == [200, 200]
