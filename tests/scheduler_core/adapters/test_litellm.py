"""The routing strategy in the real LiteLLM Router, in front of two engines that speak the OpenAI API."""

import asyncio
import contextlib
import gc
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from benchmarks.shared.processes import free_port, listens, running
from scheduler_core.adapters.live_routing import RoutingSettings
from scheduler_core.errors import TailcastError
from tests.fake_openai import GOOD, Completions, FakeEngine, error, running_engine
from tests.waiting import until

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
litellm = pytest.importorskip("litellm")
# LiteLLM's own and those of its dependencies.
pytestmark = [
    pytest.mark.filterwarnings(*(f"ignore::{kind}Warning" for kind in ("User", "Deprecation", "Resource"))),
    pytest.mark.asyncio(loop_scope="module"),  # LiteLLM's queue of callbacks belongs to the first loop
]

Session = aiohttp.ClientSession
MESSAGES = [{"role": "user", "content": "hello there"}]
CHAT: dict[str, Any] = {"model": "m", "messages": MESSAGES, "max_tokens": 50}
KEY = "sk-" + 8 * "test"


@pytest_asyncio.fixture(loop_scope="module")
async def engines() -> AsyncIterator[list[FakeEngine]]:
    slow = Completions(delay_s=0.2)
    async with running_engine(slow) as first, running_engine(slow) as second:
        yield [first, second]


def model_list(engines: list[FakeEngine], model: str, **more: str) -> list[dict[str, Any]]:
    """One deployment of the model m on each engine."""
    given = [{"model": model, "api_base": f"{engine.url}/v1", **more} for engine in engines]
    ids = ({"id": str(number)} for number in range(len(engines)))
    return [{"model_name": "m", "litellm_params": one, "model_info": next(ids)} for one in given]


@pytest_asyncio.fixture(loop_scope="module")
async def strategy(engines: list[FakeEngine]) -> AsyncIterator[Any]:
    from scheduler_core.adapters.litellm import TailcastStrategy

    deployments = model_list(engines, "openai/m", api_key="x")
    strategy = TailcastStrategy(litellm.Router(model_list=deployments, num_retries=2), RoutingSettings())
    strategy.install()
    yield strategy
    strategy.close()


async def ended(strategy: Any) -> dict[str, int]:
    """The live requests, after LiteLLM's callbacks have had time to run."""

    def is_forgotten() -> bool:
        gc.collect()
        return not strategy.routing.num_requests

    with contextlib.suppress(AssertionError):
        await until(is_forgotten, 5)
    return dict(strategy.routing.num_requests)


async def test_requests_are_distributed_and_forgotten(strategy: Any, engines: list[FakeEngine]) -> None:
    sent = asyncio.gather(*(strategy.router.acompletion(**CHAT) for _ in range(8)))
    await until(lambda: sum(strategy.routing.num_requests.values()) >= 8)
    assert strategy.routing.num_requests == {"0": 4, "1": 4}
    await sent
    assert [len(engine.requests) for engine in engines] == [4, 4]
    assert "tailcast_attempt" not in engines[0].requests[0][3].decode()
    assert await ended(strategy) == {}


async def test_streams_end_when_complete_and_when_the_client_leaves(strategy: Any) -> None:
    stream = await strategy.router.acompletion(**CHAT, stream=True)
    assert sum(strategy.routing.num_requests.values()) == 1
    assert len([piece async for piece in stream]) > 2
    assert await ended(strategy) == {}
    stream = await strategy.router.acompletion(**CHAT, stream=True)
    await anext(stream)
    await stream.aclose()
    del stream
    assert await ended(strategy) == {}


async def test_cancelled_requests_are_forgotten(strategy: Any) -> None:
    tasks = [asyncio.create_task(strategy.router.acompletion(**CHAT)) for _ in range(6)]
    await until(lambda: sum(strategy.routing.num_requests.values()) >= 6)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    tasks.clear()
    del task
    assert await ended(strategy) == {}


async def test_an_engine_killed_under_load_loses_no_request(strategy: Any, engines: list[FakeEngine]) -> None:
    """LiteLLM retries on the other one, and leaves the dead one out while it cools down."""
    sent = asyncio.gather(*(strategy.router.acompletion(**CHAT) for _ in range(10)))
    await until(lambda: strategy.routing.num_requests.get("1", 0) >= 5)
    await engines[1].stop()
    assert len(await sent) == 10
    assert len(await asyncio.gather(*(strategy.router.acompletion(**CHAT) for _ in range(10)))) == 10
    assert await ended(strategy) == {}
    await engines[1].start()


async def test_a_failure_everywhere_is_raised_and_forgotten(strategy: Any, engines: list[FakeEngine]) -> None:
    for engine in engines:
        engine.script.behave = lambda number, body: error(400)  # type: ignore[attr-defined]
    with pytest.raises(litellm.BadRequestError):
        await strategy.router.acompletion(**CHAT)
    assert await ended(strategy) == {}


async def test_a_deployment_that_is_deleted_is_forgotten(strategy: Any) -> None:
    await asyncio.gather(*(strategy.router.acompletion(**CHAT) for _ in range(4)))
    assert (await ended(strategy), set(strategy.routing.replica_ids)) == ({}, {"0", "1"})
    strategy.router.delete_deployment(id="1")
    await strategy.router.acompletion(**CHAT)
    assert strategy.routing.replica_ids == ["0"]


async def test_synchronous_calls_are_refused(strategy: Any) -> None:
    with pytest.raises(TailcastError, match="acompletion"):
        strategy.get_available_deployment("m")


@pytest_asyncio.fixture(loop_scope="module")
async def proxy(engines: list[FakeEngine], tmp_path: Path) -> AsyncIterator[aiohttp.ClientSession]:
    """LiteLLM's proxy in a process of its own, with jsq: a request goes to the first engine unless that has more."""
    pytest.importorskip("apscheduler", reason="needs litellm[proxy]")
    config = {
        "model_list": model_list(engines, "hosted_vllm/m"),
        "litellm_settings": {"callbacks": ["scheduler_core.adapters.litellm.proxy_handler"]},
        "router_settings": {"num_retries": 2, "cooldown_time": 1}, "general_settings": {"master_key": KEY},
    }  # fmt: skip
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    (tmp_path / "routing.yaml").write_text(json.dumps({"router": "jsq"}))
    port = free_port()
    command = [str(Path(sys.executable).with_name("litellm")), "--config", str(tmp_path / "config.yaml")]
    environment = {"TAILCAST_ROUTING_CONFIG": str(tmp_path / "routing.yaml"), "PYTHONPATH": os.getcwd()}
    command += ["--host", "127.0.0.1", "--port", str(port)]
    with running(command, lambda: listens(port), environment=environment, timeout_s=600):
        headers = {"Authorization": f"Bearer {KEY}"}
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", headers=headers) as session:
            yield session


async def sent_to(
    proxy: Session, engines: list[FakeEngine], num: int, path: str = "chat/completions", **more: Any
) -> list[int]:
    """Requests that each engine gets of `num`, sent at the same time; all have to succeed."""
    before = [len(engine.requests) for engine in engines]
    body = {name: value for name, value in {**CHAT, **more}.items() if value is not None}

    async def one() -> None:
        async with proxy.post(f"/v1/{path}", json=body) as response:
            text = await response.text()
            assert response.status == 200, text
            assert "error" not in text, text

    await asyncio.gather(*(one() for _ in range(num)))
    return [len(engine.requests) - number for engine, number in zip(engines, before, strict=True)]


@pytest.mark.slow
async def test_the_proxy_retries_and_forgets(proxy: aiohttp.ClientSession, engines: list[FakeEngine]) -> None:
    """Equal numbers while requests are live, the first engine where none is: LiteLLM's own default chooses at random."""

    async def assert_that_none_is_live() -> None:
        # After the cooldown and LiteLLM's callbacks; a request that stays live keeps the numbers unequal for ever.
        async def is_equal() -> bool:
            return await sent_to(proxy, engines, 8) == [4, 4]

        async def goes_to_the_first() -> bool:
            return await sent_to(proxy, engines, 1) == [1, 0]

        await until(is_equal)
        for _ in range(10):
            await until(goes_to_the_first)

    await assert_that_none_is_live()
    for path, more in (
        ("chat/completions", {"stream": True}),
        ("completions", {"prompt": "hello there", "messages": None}),
        ("messages", {"metadata": {"user_id": "u"}}),
    ):
        assert await sent_to(proxy, engines, 8, path, **more) == [4, 4]
        await assert_that_none_is_live()
    assert not any("tailcast" in body.decode() for engine in engines for _, _, _, body in engine.requests)

    for engine in engines:
        engine.script.behave = lambda number, body: error(500)  # type: ignore[attr-defined]
    with pytest.raises(AssertionError, match="500"):
        await sent_to(proxy, engines, 1)
    for engine in engines:
        engine.script.behave = lambda number, body: GOOD  # type: ignore[attr-defined]
    await assert_that_none_is_live()

    engines[1].script.delay_s = 3600.0  # type: ignore[attr-defined]
    sent = asyncio.create_task(sent_to(proxy, engines, 20))
    await until(lambda: sent.done() or engines[1].num_in_flight >= 10)
    assert not sent.done()
    await engines[1].stop()
    engines[1].script.delay_s = 0.2  # type: ignore[attr-defined]
    assert (await sent, await sent_to(proxy, engines, 20)) == ([20, 10], [20, 0])
    await engines[1].start()
    await assert_that_none_is_live()
