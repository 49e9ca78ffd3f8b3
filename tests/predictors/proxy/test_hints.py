"""The order of requests: hints, against what engines accept, and the held queue."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictors.proxy.client_rules import ClientRules
from predictors.proxy.config import ProxyConfig
from predictors.proxy.order import HoldQueue
from scheduler_core.lengths import LogT
from scheduler_core.policies import make_policy
from scheduler_core.prediction.predictions import LengthPrediction, Prediction
from scheduler_core.request import Request
from tests.predictors.fakes import NU, expected, write_rich_artifact
from tests.predictors.proxy.fake_engine import chat, gated, running_engine, running_proxy, until
from tests.scheduler_core.helpers import Clock

SHORT, LONG = "name name name", "sea sea sea"


@pytest.mark.parametrize(("engine", "lower_first"), [("vllm", True), ("sglang", False), ("dynamo", False)])
async def test_shorter_answers_go_first(engine: str, lower_first: bool, artifact_folder: Path) -> None:
    options: dict[str, Any] = {"predictor": str(artifact_folder), "engine": engine, "policy": "sept"}
    async with running_engine() as fake, running_proxy(fake.url, **options) as proxy:
        for text in (SHORT, LONG):
            status, _ = await proxy.post(chat(text))
            assert status == 200
        found = [body["nvext"]["agent_hints"] if engine == "dynamo" else body for body in fake.bodies]
        priorities = [hints["priority"] for hints in found]
        assert all(type(number) is int for number in priorities)
        assert (priorities[0] < priorities[1]) is lower_first
        assert expected(SHORT)[0] < expected(LONG)[0]
        if engine == "dynamo":
            for text, hints in zip((SHORT, LONG), found, strict=True):
                mean = float(LogT(*expected(text), NU).expected(500))
                assert set(hints) == {"priority", "osl"}
                assert hints["osl"] == pytest.approx(mean, abs=0.51 + 1e-3 * mean)
                assert 0 < hints["osl"] < 2**32
                assert -(2**31) <= hints["priority"] < 2**31
        assert await proxy.metric('tailcast_proxy_hints_total{outcome="policy"}') == 2
        assert await proxy.metric('tailcast_proxy_predictions_total{outcome="answered"}') == 2


async def test_the_rest_of_the_body_keeps_its_bytes(artifact_folder: Path) -> None:
    body = b' {"seed": 1e2, "messages":[{"role":"user","content":"name \\u0041"}] ,"big":123456789012345678901}\n'
    options = {"engine": "vllm", "predictor": str(artifact_folder)}
    async with running_engine() as fake, running_proxy(fake.url, **options) as proxy:
        await proxy.post(body)
        [(_, path, _, sent)] = fake.requests
    assert path == "/v1/chat/completions"
    number = json.loads(sent)["priority"]
    assert sent == body.replace(b"{", b'{"priority":%d,' % number, 1)


ACTIONS = st.sampled_from(["enter", "leave", "cancel", "predict", "output"])
LEVELS: dict[str, Any] = {"slo_ttft_ms": [100, 200, 300, 400, 500], "slo_tpot_ms": [10, 20, 30, 40, 50]}
LEVELS["objectives"] = ["now", "soon", "chat", "batch", "free"]


async def test_llm_d_gets_headers_of_the_declared_tier(artifact_folder: Path) -> None:
    options = LEVELS | {"engine": "llm-d", "predictor": str(artifact_folder)}
    async with running_engine() as fake, running_proxy(fake.url, **options) as proxy:
        await proxy.post(chat(SHORT), {"x-tailcast-tier": "1", "x-tailcast-tenant": "lab"})
        await proxy.post(chat(SHORT), {"x-llm-d-slo-ttft-ms": "7"})
        first, second = (headers for _, _, headers, _ in fake.requests)
        assert fake.bodies[0] == chat(SHORT)
    prefix = "x-llm-d-"
    names = ("slo-ttft-ms", "slo-tpot-ms", "inference-objective", "inference-fairness-id")
    assert [first.get(prefix + name) for name in names] == ["200", "20", "soon", "lab"]
    assert [second.get(prefix + name) for name in names] == ["7", "30", "chat", None]


async def test_a_text_raises_its_request_by_one_level_above_the_artifacts_threshold(tmp_path: Path) -> None:
    """The artifact is 98 % sure of its most urgent level."""
    for threshold, objective in ((None, "soon"), (0.9, "soon"), (0.999, "chat"), (1.0, "chat")):
        artifact = write_rich_artifact(tmp_path / str(threshold), abstain_threshold=threshold)
        options = LEVELS | {"engine": "llm-d", "predictor": str(artifact), "served_model": "tiny-llm"}
        async with running_engine() as fake, running_proxy(fake.url, **options) as proxy:
            await proxy.post(chat(SHORT), {"x-tailcast-tier": "2"})
        assert fake.requests[0][2]["x-llm-d-inference-objective"] == objective


async def test_prompts_are_counted_by_the_artifacts_tokenizer(artifact_folder: Path) -> None:
    """Words and two special tokens; of the last message, whose tokens per character hold for all."""
    messages = [{"role": "system", "content": SHORT}, {"role": "user", "content": SHORT}]
    for predictor, expected_tokens in ((str(artifact_folder), [5, 3, 10]), (None, [4, 11, 8])):
        options: dict[str, Any] = {"engine": "vllm", "policy": "spf", "predictor": predictor}
        async with running_engine() as fake, running_proxy(fake.url, **options) as proxy:
            for body in (chat(SHORT), chat("x" * 40), chat("") | {"messages": messages}):
                assert (await proxy.post(body))[0] == 200
            assert [body["priority"] for body in fake.bodies] == [1000 * count for count in expected_tokens]


async def test_members_of_dynamos_client_stay(artifact_folder: Path) -> None:
    given_hints = {"annotations": ["x"], "agent_hints": {"osl": 3, "speculative_prefill": True}}
    options = {"engine": "dynamo", "predictor": str(artifact_folder)}
    async with running_engine() as fake, running_proxy(fake.url, **options) as proxy:
        await proxy.post(chat(SHORT, nvext=given_hints))
        await proxy.post(chat(SHORT, nvext="no object"))
        first, second = fake.bodies
    assert first["nvext"]["annotations"] == ["x"]
    assert first["nvext"]["agent_hints"]["osl"] == 3
    assert first["nvext"]["agent_hints"]["speculative_prefill"] is True
    assert "priority" in first["nvext"]["agent_hints"]
    assert second["nvext"] == "no object"


async def test_a_tier_that_may_not_be_declared_is_refused() -> None:
    async with running_engine() as fake, running_proxy(fake.url, engine="vllm", most_urgent_tier=2) as proxy:
        for tier in ("1", "5", "x", ""):
            status, body = await proxy.post(chat(SHORT), {"x-tailcast-tier": tier})
            error = json.loads(body)["error"]
            assert (status, error["param"]) == (400, "x-tailcast-tier")
            assert "from 2 to 4" in error["message"]
        assert not fake.requests


async def test_a_key_beyond_the_range_costs_the_hint_and_not_the_request(artifact_folder: Path) -> None:
    options: dict[str, Any] = {"engine": "dynamo", "resolution": 1e12, "predictor": str(artifact_folder)}
    async with running_engine() as fake, running_proxy(fake.url, **options) as proxy:
        status, _ = await proxy.post(chat(SHORT))
        assert (status, fake.bodies) == (200, [chat(SHORT)])
        assert await proxy.metric('tailcast_proxy_hints_total{outcome="impossible"}') == 1


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
    tasks = [asyncio.create_task(visit(queue, one, passed)) for one in (request(1, 0.0), request(2, 100.0))]
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
        queue = proxy.server.handler.queue
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
@given(st.lists(st.tuples(ACTIONS, st.integers(0, 30)), max_size=60))
def test_no_slot_and_no_request_is_lost(steps: list[tuple[str, int]]) -> None:
    async def run() -> None:
        queue, clock = new_queue("bounded_shortest", 2)
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
        queue = proxy.server.handler.queue
        await until(lambda: queue is not None and queue.num_waiting == 1 and fake.requests)
        status, body = await proxy.post(chat("x"))
        assert (status, json.loads(body)["error"]["code"]) == (429, "queue_full")
        go.set()
        assert [status for status, _ in await asyncio.gather(*tasks)] == [200, 200]
