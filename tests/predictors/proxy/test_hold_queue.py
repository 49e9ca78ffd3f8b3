"""The held queue: its order, its slots, and what its policy learns from outputs."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictors.proxy.config import ProxyConfig
from predictors.proxy.engines import ClientRules
from predictors.proxy.order import HoldQueue
from scheduler_core.policies import make_policy
from scheduler_core.predictions import LengthPrediction, Prediction
from scheduler_core.request import Request
from tests.predictors.proxy.fake_engine import chat, gated, running_engine, running_proxy, until


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def new_queue(policy: str, release: int, aging_per_s: float = 0.0) -> tuple[HoldQueue, Clock]:
    clock = Clock()
    return HoldQueue(make_policy(policy), release, clock, aging_per_s, max_waiting=9), clock


def request(number: int, arrival_s: float = 0.0) -> Request:
    return Request(request_id=f"r{number}", arrival_s=arrival_s, prompt_tokens=5, max_tokens=500)


def of_length(mu: float) -> Prediction:
    return Prediction(length=LengthPrediction(mu, 0.5, 3.5))


async def visit(queue: HoldQueue, one: Request, passed: list[str]) -> None:
    await queue.enter(one)
    passed.append(one.request_id)


def test_a_tenant_is_its_header_or_its_keys_hash() -> None:
    rules = ClientRules(ProxyConfig(engine_url="http://x", tenant_header="x-t"))
    assert (rules.tenant({"x-t": " lab "}), rules.tenant({})) == ("lab", "")
    one, two = (rules.tenant({"Authorization": f"Bearer {key}"}) for key in ("one", "two"))
    assert one.startswith("key-")
    assert "one" not in one
    assert one != two


async def test_aging_overtakes_a_shorter_newcomer() -> None:
    queue, clock = new_queue("sept", 1, 50.0)
    passed: list[str] = []
    await queue.enter(request(0))
    late = (request(1, 0.0), request(2, 100.0))
    tasks = [asyncio.create_task(visit(queue, one, passed)) for one in late]
    await asyncio.sleep(0)
    queue.update("r1", of_length(6.0))
    queue.update("r2", of_length(1.0))
    clock.now = 100.0
    queue.leave("r0")
    await until(lambda: passed == ["r1"])
    queue.leave("r1")
    await asyncio.gather(*tasks)
    assert passed == ["r1", "r2"]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_starving_request_is_promoted_by_steps_seen_in_the_stream(stream: bool) -> None:
    """`ltr`: without the steps of running requests the long one would wait for all of the short ones."""
    options: dict[str, Any] = {"release": 1, "policy": "ltr", "policy_parameters": {"starvation_steps": 2}}
    go = asyncio.Event()
    async with running_engine(gated(go, tokens=3)) as fake, running_proxy(fake.url, **options) as proxy:
        queue = proxy.server.queue
        assert queue is not None
        tasks = []
        for name in ("first", "long", "short", "short", "short"):
            tasks.append(asyncio.create_task(proxy.post(chat(name, stream=stream))))
            await until(lambda: proxy.server.num_in_flight == len(tasks) and queue.num_running == 1)
            if name != "first":
                await until(lambda: queue.num_waiting == len(tasks) - 1)
                request_id = list(queue._order.states)[-1]
                queue.update(request_id, of_length(6.0 if name == "long" else 1.0))
        go.set()
        assert [status for status, _ in await asyncio.gather(*tasks)] == [200] * 5
        order = [body["messages"][0]["content"] for body in fake.bodies]
        assert fake.max_in_flight == 1
        assert all("priority" not in body for body in fake.bodies)
    # A stream of three tokens ends two steps; a response in one piece ends one.
    assert order.index("long") == (1 if stream else 2)


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.sampled_from(["enter", "leave", "cancel", "predict", "output"]), st.integers(0, 30)),
        max_size=60,
    )
)
def test_no_slot_and_no_request_is_lost(steps: list[tuple[str, int]]) -> None:
    async def run() -> None:
        queue, clock = new_queue("tail_guard", 2)
        tasks: dict[int, asyncio.Task[None]] = {}
        for action, number in steps:
            clock.now += 1.0
            task = tasks.get(number)
            if action == "enter" and task is None and queue.num_waiting < 9:
                tasks[number] = asyncio.create_task(queue.enter(request(number, clock.now)))
            elif task is not None and action == "leave" and task.done() and not task.cancelled():
                queue.leave(f"r{number}")
            elif task is not None and action == "cancel":
                task.cancel()
            elif action == "predict":
                queue.update(f"r{number}", of_length(float(number % 7)))
            elif task is not None and action == "output" and task.done():
                queue.on_output(f"r{number}", 1 + number % 3)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert queue.num_running <= 2
            assert queue.num_waiting == 0 or queue.num_running == 2
            assert sum(not task.done() for task in tasks.values()) == queue.num_waiting
        for number, task in tasks.items():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            queue.leave(f"r{number}")
        assert (queue.num_running, queue.num_waiting) == (0, 0)

    asyncio.run(run())


async def test_a_full_queue_refuses_at_once() -> None:
    go = asyncio.Event()
    async with running_engine(gated(go)) as fake, running_proxy(fake.url, release=1, max_waiting=1) as proxy:
        tasks = [asyncio.create_task(proxy.post(chat("x"))) for _ in range(2)]
        queue = proxy.server.queue
        await until(lambda: queue is not None and queue.num_waiting == 1 and fake.requests)
        status, body = await proxy.post(chat("x"))
        assert (status, json.loads(body)["error"]["code"]) == (429, "queue_full")
        go.set()
        assert [status for status, _ in await asyncio.gather(*tasks)] == [200, 200]
