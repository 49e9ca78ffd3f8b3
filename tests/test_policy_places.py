"""Every policy in every place where requests are ordered; docs/extending.md has the result.

`python -m tests.test_policy_places` writes the table.
"""

import asyncio
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from predictors.proxy.config import ProxyConfig
from predictors.proxy.engines import PriorityEngine
from predictors.proxy.order import HoldQueue, SentOrder
from predictors.proxy.server import ProxyServer
from scheduler_core.adapters import vllm as adapter
from scheduler_core.errors import InputError
from scheduler_core.policies import POLICIES
from scheduler_core.prediction.predictions import Prediction
from scheduler_core.request import DEFAULT_TIER, Request
from tests.scheduler_core.adapters.length_reader import LengthReader, of_length, settle
from tests.scheduler_core.adapters.stand_in import FakeRequest, modules, run_step, vllm_config
from tests.scheduler_core.helpers import Drive, scheduler

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"
BLOCK = re.compile(r"(?<=<!-- policies and places -->\n).*(?=<!-- end of policies and places -->)", re.DOTALL)
ARRIVAL = [f"r{number}" for number in range(6)]
#: The first one runs alone; those that come after it are each shorter, more urgent and in less of a hurry by fairness.
LENGTHS = (52, 48, 40, 32, 24, 16)
STEP_S = 0.05
#: Their deadlines come from times that differ between these engines.
OWN_TIMES = {"working_set"}


@dataclass(frozen=True)
class Item:
    """A request, what is predicted for it, and its true length."""

    request: Request
    prediction: Prediction
    output_tokens: int


def items(name: str) -> list[Item]:
    """All that a policy may order by, in reverse of the order of arrival. Priority and tier are declared only if the policy
    itself uses them; else proxy and plugin would serve by them."""
    inputs = POLICIES[name].inputs
    priority, tier = "priority" in inputs, "tier" in inputs
    return [
        Item(
            Request(
                request_id=request_id, arrival_s=0.1 * number, prompt_tokens=50 + 600 * (5 - number), max_tokens=400,
                priority=-number if priority else 0, tier=5 - number if tier else DEFAULT_TIER,
                tenant="ab"[number // 3], ttft_slo_s=100.0 - number, ttlt_slo_s=200.0 - 2 * number,
            ),
            of_length(LENGTHS[number]), LENGTHS[number],
        )
        for number, request_id in enumerate(ARRIVAL)
    ]  # fmt: skip


def in_simulator(name: str) -> list[str]:
    """The scheduler that simulators drive."""
    core = scheduler(name, max_num_seqs=1, num_kv_blocks=4000, max_num_batched_tokens=4096)
    rows = [(item.request, item.output_tokens) for item in items(name)]
    run = Drive(core, rows, STEP_S, {item.request.request_id: item.prediction for item in items(name)})
    run.run()
    return list(run.finished)


def proxy(name: str, engine: Any) -> ProxyServer:
    options = {"engine": engine, "policy": name, "release": 1, "predictor": "none"}
    return ProxyServer(ProxyConfig(engine_url="http://engine", **options))


def in_proxy_queue(name: str) -> list[str]:
    """The queue of the proxy, with streams of one token per step."""
    queue = proxy(name, "none").handler.queue
    assert queue is not None
    return asyncio.run(held(queue, name))


async def held(queue: HoldQueue, name: str) -> list[str]:
    now = 0.0
    queue.clock = lambda: now
    finished: list[str] = []

    async def serve(item: Item) -> None:
        nonlocal now
        request_id = item.request.request_id
        await queue.enter(item.request)
        await all_wait.wait()
        for _ in range(item.output_tokens):
            now += STEP_S
            queue.on_output(request_id, 1)
        finished.append(request_id)
        queue.leave(request_id)

    tasks, all_wait = [], asyncio.Event()
    for item in items(name):
        now = item.request.arrival_s
        tasks.append(asyncio.create_task(serve(item)))
        await asyncio.sleep(0)
        queue.update(item.request.request_id, item.prediction)
    all_wait.set()
    await asyncio.gather(*tasks)
    return finished


def in_engine_hints(name: str) -> list[str]:
    """An engine that serves by the priorities that the proxy has sent."""
    parts = proxy(name, "vllm")
    order, engine = parts.handler.order, parts.handler._engine
    assert isinstance(order, SentOrder)
    assert isinstance(engine, PriorityEngine)
    now = 0.0
    order.clock = lambda: now
    priorities = {}
    for item in items(name):
        now, request_id = item.request.arrival_s, item.request.request_id
        state = order.enter(item.request)
        order.update(request_id, item.prediction)
        priorities[request_id] = engine.priority(*order.key(state))
    return ["r0", *sorted(ARRIVAL[1:], key=priorities.__getitem__)]


def in_vllm(name: str) -> list[str]:
    """The plugin on the stand-in for vLLM; test_vllm_engine.py runs the real one."""
    settings = {"policy": name, "predictor": "prompted://answers"}
    scheduler = adapter.TailcastScheduler(vllm_config=vllm_config(settings, max_num_seqs=1))
    now = 0.0
    scheduler._tailcast_clock = scheduler.waiting._clock = lambda: now
    finished: list[str] = []
    for item in items(name):
        request = item.request
        hints = {"tailcast_tier": request.tier, "tailcast_tenant": request.tenant}
        hints |= {"tailcast_ttft_slo_s": request.ttft_slo_s, "tailcast_ttlt_slo_s": request.ttlt_slo_s}
        sent = (request.request_id, item.output_tokens, request.priority, hints, request.prompt_tokens, 400)
        now = request.arrival_s
        scheduler.add_request(FakeRequest(*sent))
        if request.request_id in ("r0", "r5"):
            settle(scheduler._tailcast_thread)
            run_step(scheduler)
    while scheduler.requests:
        now += STEP_S
        finished += run_step(scheduler)[1]
    scheduler.shutdown()
    return finished


#: Place: how it runs.
PLACES: dict[str, Callable[[str], list[str]]] = {"simulator": in_simulator, "proxy queue": in_proxy_queue}
PLACES |= {"engine hints": in_engine_hints, "vLLM": in_vllm}


def served(name: str, place: str) -> list[str] | None:
    """Requests in the order of their ends; None where the policy is refused."""
    try:
        finished = PLACES[place](name)
    except InputError:
        return None
    assert sorted(finished) == ARRIVAL, f"{name} in {place} has served {finished}"
    return finished


def row(name: str) -> str:
    """The policy's row; its order is the simulator's wherever nothing has to be taken back."""
    cells = []
    orders = {place: served(name, place) for place in PLACES}
    for place, finished in orders.items():
        if finished is None:
            cells.append("no")
        elif name in OWN_TIMES:
            cells.append("yes")
        elif finished == ARRIVAL:
            cells.append("arrival")
        elif place in ("simulator", "vLLM") or not POLICIES[name].preemptive:
            assert finished == orders["simulator"], f"{name} in {place}"
            cells.append("yes")
        else:
            cells.append("waiting")
    return f"| `{name}` | {' | '.join(cells)} |\n"


@contextmanager
def stand_in() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules().items():
            patch.setitem(sys.modules, name, module)
        patch.delenv("TAILCAST_CONFIG", raising=False)
        patch.setattr(adapter, "open_predictor", lambda url, **_: LengthReader(url.partition("://")[2]))
        adapter.scheduler_class.cache_clear()
        yield
        adapter.scheduler_class.cache_clear()


@pytest.mark.parametrize("name", POLICIES)
def test_the_page_says_where_each_policy_works(name: str) -> None:
    match = BLOCK.search(PAGE.read_text(encoding="utf-8"))
    assert match is not None
    with stand_in():
        assert row(name) in match[0].splitlines(keepends=True)
    assert len(match[0].splitlines()) == 2 + len(POLICIES)


if __name__ == "__main__":
    with stand_in():
        header = f"| policy | {' | '.join(PLACES)} |\n|---|{'---|' * len(PLACES)}\n"
        table = header + "".join(map(row, POLICIES))
    PAGE.write_text(BLOCK.sub(lambda _: table, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
