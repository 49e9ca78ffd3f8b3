"""A real vLLM behind the proxy: a later short or urgent request overtakes earlier long ones, and nobody is lost.

vLLM's engine stands still until all requests are there: on a loaded machine the first ones could be answered before.

Minutes, in vLLM's own environment (see tests/data_gen/conftest.py).
"""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from predictors.runtime import open_runtime
from tests.data_gen.conftest import save_tiny_llama, vllm_environment, vllm_python
from tests.predictors.fakes import running_server
from tests.predictors.proxy.fake_engine import CHAT, RunningProxy, running_proxy
from tests.scheduler_core.adapters.test_vllm_engine import Server, answers
from tests.waiting import taken, until

__all__ = ["vllm_python"]  # a fixture
pytestmark = pytest.mark.slow

LONG, SHORT = "essay essay", "name name name"  # the artifact's predictions: see test_limits.py
NUM_LONG = 8
#: Until requests that the proxy has received are in the queue of vLLM, whose stopped engine reports nothing.
SENDING_S = 1.0


class Engine(NamedTuple):
    """A running vLLM; while it is stopped requests reach it, and none is begun."""

    url: str
    stopped: Callable[[], AbstractContextManager[None]]


@pytest.fixture(scope="module")
def engine(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """With one place, by priority."""
    from benchmarks.shared.processes import free_port

    folder = tmp_path_factory.mktemp("vllm")
    model = save_tiny_llama(folder / "tiny", hidden_size=128, heads=4, kv_heads=2)
    port = free_port()
    command = [str(vllm_python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "tiny-llm", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--max-model-len", "96", "--enforce-eager", "--max-num-seqs", "1"]
    command += ["--scheduling-policy", "priority"]
    server = Server(command, vllm_environment(), folder / "log")
    try:
        url = f"http://127.0.0.1:{port}"
        server.wait(lambda: answers(f"{url}/health"), 900)
        yield Engine(url, partial(server.stopped, "VLLM::EngineCor"))
    finally:
        server.kill()


def asks(text: str, num_tokens: int) -> dict[str, Any]:
    message = {"role": "user", "content": text}
    return {
        "model": "tiny-llm", "messages": [message], "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0
    }  # fmt: skip


async def finish_order(
    engine: Engine, proxy: RunningProxy, last_prompt: str, last_tier: int | None
) -> list[str]:
    """Long requests one after the other, and then a last one; their names as their responses come."""
    finished: list[str] = []

    async def send(name: str, text: str, num_tokens: int, tier: int | None) -> None:
        headers = {} if tier is None else {"x-tailcast-tier": str(tier)}
        status, body = await proxy.post(asks(text, num_tokens), headers)
        assert status == 200, body
        assert json.loads(body)["usage"]["completion_tokens"] == num_tokens
        finished.append(name)

    tasks = []
    with engine.stopped():
        for number in range(NUM_LONG):
            tasks.append(asyncio.create_task(send(f"long{number}", LONG, 80, None)))
            await until(lambda number=number: proxy.server.num_in_flight == number + 1)
        tasks.append(asyncio.create_task(send("last", last_prompt, 4, last_tier)))
        await taken(SENDING_S)
        assert not finished
    await asyncio.gather(*tasks)
    return finished


def num_overtaken(order: list[str]) -> int:
    """Earlier requests that the last one has overtaken."""
    return len(order) - 1 - order.index("last")


@pytest.mark.parametrize(
    ("policy", "prompt", "tier"), [("sept", SHORT, None), ("tie", SHORT, None), ("semantic", LONG, 0)]
)
@pytest.mark.parametrize("kind", ["vllm", "none"])
async def test_a_later_short_or_urgent_request_overtakes(
    engine: Engine, artifact_folder: Path, kind: str, policy: str, prompt: str, tier: int | None
) -> None:
    """By hints, and held by the proxy as in front of an engine without them."""
    options: dict[str, Any] = {"engine": kind, "predictor": str(artifact_folder), "release": 1}
    async with running_proxy(engine.url, policy=policy, max_num_seqs=1, **options) as proxy:
        assert num_overtaken(await finish_order(engine, proxy, prompt, tier)) >= NUM_LONG // 2
        outcome = "policy" if kind == "vllm" else "held"
        assert await proxy.metric(f'tailcast_proxy_hints_total{{outcome="{outcome}"}}') == NUM_LONG + 1


async def test_first_come_first_served_does_not(engine: Engine, artifact_folder: Path) -> None:
    options = {"predictor": str(artifact_folder), "policy": "fcfs"}
    async with running_proxy(engine.url, engine="vllm", **options) as proxy:
        assert num_overtaken(await finish_order(engine, proxy, SHORT, None)) == 0


@pytest.mark.parametrize(("tier", "num_expected"), [(0, NUM_LONG), (4, 0)])
async def test_a_declared_tier_comes_before_the_default_policy(
    engine: Engine, artifact_folder: Path, tier: int, num_expected: int
) -> None:
    """All but the first ones, which run already."""
    async with running_proxy(engine.url, engine="vllm", predictor=str(artifact_folder)) as proxy:
        num = num_overtaken(await finish_order(engine, proxy, SHORT, tier))
    assert num >= NUM_LONG // 2 if num_expected else num == 0


async def test_anthropics_endpoint_is_ordered_by_the_header(engine: Engine, artifact_folder: Path) -> None:
    """vLLM reads no priority in its body: without the header it would have 0, and be first."""
    urgent, batch = ({"x-tailcast-tier": tier} for tier in ("0", "4"))
    finished: list[str] = []

    async def send(name: str, path: str, body: dict[str, Any], headers: dict[str, str]) -> None:
        status, data = await proxy.post(body, headers, path)
        assert status == 200, data
        finished.append(name)

    message = {"model": "tiny-llm", "messages": [{"role": "user", "content": SHORT}], "max_tokens": 4}
    async with running_proxy(engine.url, engine="vllm", predictor=str(artifact_folder)) as proxy:
        with engine.stopped():
            tasks = []
            for number in range(NUM_LONG):
                tasks.append(asyncio.create_task(send(f"long{number}", CHAT, asks(LONG, 80), {})))
                await until(lambda number=number: proxy.server.num_in_flight == number + 1)
            for name, headers in (("batch", batch), ("urgent", urgent)):
                tasks.append(asyncio.create_task(send(name, "/v1/messages", message, headers)))
            await taken(SENDING_S)
        await asyncio.gather(*tasks)
    assert finished.index("urgent") < NUM_LONG // 2
    assert finished[-1] == "batch"


async def test_counted_streams_look_the_same(engine: Engine, artifact_folder: Path, tmp_path: Path) -> None:
    """vLLM understands the priority and the request for token counts."""
    options: dict[str, Any] = {"feedback": str(tmp_path), "feedback_usage": True, "policy": "uniboost"}
    async with running_proxy(engine.url, engine="vllm", predictor=str(artifact_folder), **options) as proxy:
        for path, body in (
            (CHAT, asks(SHORT, 9)),
            ("/v1/completions", {"model": "tiny-llm", "prompt": SHORT, "max_tokens": 9, "ignore_eos": True}),
        ):
            status, data = await proxy.post(body | {"stream": True}, path=path)
            assert status == 200
            assert data.endswith(b"data: [DONE]\n\n")
            assert b"completion_tokens" not in data
        assert await proxy.metric('tailcast_proxy_hints_total{outcome="policy"}') == 2
    rows = [json.loads(line) for file in tmp_path.iterdir() for line in file.read_bytes().splitlines()]
    assert [(row["output_tokens"], row["counted_by"]) for row in rows] == [(9, "usage")] * 2


async def test_no_request_is_lost_when_the_predictor_goes(engine: Engine, artifact_folder: Path) -> None:
    answered = 'tailcast_proxy_predictions_total{outcome="answered"}'
    async with running_server(open_runtime(artifact_folder)) as (_, address):
        options = {"predictor": f"grpc://{address}", "max_num_seqs": 1, "deadline_s": 2.0}
        manager = running_proxy(engine.url, engine="vllm", **options)
        proxy = await manager.__aenter__()
        with engine.stopped():
            first = [asyncio.create_task(proxy.post(asks(LONG, 40))) for _ in range(6)]
            await proxy.reaches(answered, 6)
            assert not any(task.done() for task in first)
    rest = [asyncio.create_task(proxy.post(asks(SHORT, 40))) for _ in range(6)]
    assert [status for status, _ in await asyncio.gather(*first, *rest)] == [200] * 12
    assert await proxy.metric(answered) == 6
    await manager.__aexit__(None, None, None)
