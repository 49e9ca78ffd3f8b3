"""Limits by tenant name, their file, and places shared out by weight."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from predictors.cli_proxy import ProxyConfig, build_proxy
from predictors.proxy.holding import HoldQueue
from predictors.proxy.order import aged_policy
from predictors.proxy.problems import Refusal
from predictors.proxy.tenant_file import read_tenants
from predictors.proxy.tenants import TenantBook, TenantLimits, Tenants
from scheduler_core.errors import InputError
from scheduler_core.request import Request, RequestState
from tests.predictors.proxy.fake_engine import CHAT, asks, plain, running_engine, running_proxy
from tests.predictors.proxy.test_limits import Clock
from tests.predictors.proxy.test_relay import until

HEADER = "x-tailcast-tenant"
PAGE = Path(__file__).parents[3] / "docs" / "proxy.md"


def write(folder: Path, text: str) -> str:
    path = folder / "tenants.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def state(number: int, tenant: str, arrival_s: float = 0.0) -> RequestState:
    request = Request(
        request_id=f"{tenant}{number}", arrival_s=arrival_s, prompt_tokens=5, max_tokens=50, tenant=tenant
    )
    return RequestState(request, order=number)


def test_what_an_entry_leaves_out_is_the_defaults(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "default: {rate_per_s: 5, most_urgent_tier: 2}\ntenants:\n  lab: {rate_per_s: null, burst: 7}\n  x:\n",
    )
    book = read_tenants(path, TenantLimits(max_concurrent=3, burst=4))
    assert book.default == TenantLimits(max_concurrent=3, rate_per_s=5, burst=4, most_urgent_tier=2)
    assert book.limits("lab") == TenantLimits(max_concurrent=3, burst=7, most_urgent_tier=2)
    assert book.limits("x") == book.limits("never heard of") == book.default
    assert (book.needs_queue, book.has_weights) == (None, False)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- lab", "tenants: got"),
        ("tenant: {}", "tenants, section: got 'tenant'; allowed: default, tenants"),
        ("tenants: {lab: {rate: 3}}", "tenants.lab, limit: got 'rate'; allowed: burst, "),
        ("tenants: {lab: {rate_per_s: 0}}", "tenants.lab.rate_per_s: got 0"),
        ("tenants: {lab: {rate_per_s: fast}}", "tenants.lab.rate_per_s: got 'fast'; allowed: a number"),
        ("tenants: {lab: {max_concurrent: 1.5}}", "tenants.lab.max_concurrent: got 1.5; allowed: an integer"),
        ("tenants: {lab: {burst: null}}", "tenants.lab.burst: got None"),
        ("default: {most_urgent_tier: 5}", "tenants.default.most_urgent_tier: got 5; allowed: 0 to 4"),
        ("default: {weight: -1}", "tenants.default.weight: got -1"),
        ("tenants: {7: {}}", "name: got 7"),
        ("tenants: {others: {}}", "name: got 'others'"),
        ("tenants: [", "allowed: a readable YAML file"),
    ],
)
def test_a_bad_file_says_where(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(InputError, match=re.escape(says)):
        read_tenants(write(tmp_path, text), TenantLimits())


@pytest.mark.parametrize("limit", ["max_waiting: 3", "weight: 2"])
def test_limits_of_the_queue_are_refused_where_the_engine_has_it(tmp_path: Path, limit: str) -> None:
    path = write(tmp_path, f"tenants: {{lab: {{{limit}}}}}")
    with pytest.raises(InputError, match="only engine none leaves it to the proxy"):
        build_proxy(ProxyConfig(engine_url="http://127.0.0.1:1", engine="vllm", tenants=path))
    build_proxy(ProxyConfig(engine_url="http://127.0.0.1:1", tenants=path))


def test_each_tenant_has_its_own_limits() -> None:
    clock = Clock()
    named = {"lab": TenantLimits(rate_per_s=2.0, burst=4)}
    tenants = Tenants(TenantBook(default=TenantLimits(rate_per_s=0.1, burst=1), named=named), clock)
    for _ in range(4):
        tenants.enter("lab")
    for stranger in ("a", "b"):
        tenants.enter(stranger)
        with pytest.raises(Refusal, match="allowed: 0.1, 1 at once; retry after 10 s") as refused:
            tenants.enter(stranger)
        assert (refused.value.code, refused.value.retry_after_s) == ("tenant_rate", 10)
    with pytest.raises(Refusal) as refused:
        tenants.enter("lab")
    assert refused.value.retry_after_s == 1
    clock.now = 0.5
    tenants.enter("lab")


async def test_a_full_part_of_the_queue_is_its_tenants_alone() -> None:
    clock = Clock()
    book = TenantBook(named={"lab": TenantLimits(max_waiting=1)})
    queue = HoldQueue(aged_policy("fcfs", {}, 0.0), max_running=1, max_waiting=9, clock=clock, book=book)
    states = [state(number, "lab") for number in range(3)]
    await queue.enter(states[0])
    waits = asyncio.create_task(queue.enter(states[1]))
    await asyncio.sleep(0)
    with pytest.raises(Refusal, match="waiting requests: got 2; allowed: 1") as refused:
        await queue.enter(states[2])
    assert (refused.value.code, refused.value.retry_after_s) == ("tenant_queue", 1)
    other = asyncio.create_task(queue.enter(state(0, "other")))
    queue.leave(states[0])
    await waits
    third = asyncio.create_task(queue.enter(states[2]))  # its place in the queue is free again
    await asyncio.sleep(0)
    assert queue.num_waiting == 2
    queue.leave(states[1])
    await other
    third.cancel()
    await asyncio.gather(third, return_exceptions=True)
    assert queue.num_waiting == 0


async def test_places_are_shared_out_by_weight_and_idling_saves_nothing_up() -> None:
    clock = Clock()
    book = TenantBook(named={"gold": TenantLimits(weight=3.0), "iron": TenantLimits(weight=1.0)})
    queue = HoldQueue(aged_policy("fcfs", {}, 0.0), max_running=2, max_waiting=999, clock=clock, book=book)
    inside: list[RequestState] = []
    passed: list[str] = []

    async def visit(one: RequestState) -> None:
        await queue.enter(one)
        inside.append(one)
        passed.append(one.request.tenant)

    tasks = [asyncio.create_task(visit(state(n, "iron"))) for n in range(60)]
    await asyncio.sleep(0)

    async def serve(count: int) -> list[str]:
        begin = len(passed)
        for _ in range(count):
            clock.now += 1.0
            queue.leave(inside.pop(0))
            await until(lambda: len(inside) == 2)
        return passed[begin:]

    assert set(await serve(20)) == {"iron"}, "alone it has all places"
    tasks += [asyncio.create_task(visit(state(n, "gold"))) for n in range(60)]
    await asyncio.sleep(0)
    both = await serve(40)
    assert 28 <= both.count("gold") <= 32, "three quarters, and no more for the time before"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_request_over_its_limit_gets_429_and_metrics_name_only_known_tenants(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "default: {rate_per_s: 0.01, burst: 2}\ntenants:\n  lab: {max_concurrent: 1, rate_per_s: null}\n",
    )
    go = asyncio.Event()

    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        await go.wait()
        return await plain(request, body)

    async with running_engine(script) as fake, running_proxy(fake.url, engine="vllm", tenants=path) as proxy:
        first = asyncio.create_task(proxy.post(asks("x"), {HEADER: "lab"}))
        await until(lambda: len(fake.requests) == 1)
        url, sent = proxy.url + CHAT, {HEADER: "lab"}
        async with proxy.client.post(url, json=asks("x"), headers=sent) as response:
            error = (await response.json())["error"]
            assert (response.status, response.headers["Retry-After"]) == (429, "1")
            assert (error["type"], error["code"]) == ("rate_limit_exceeded", "tenant_concurrency")
            assert error["message"] == "this tenant's concurrent requests: got 2; allowed: 1; retry after 1 s"
        assert await proxy.metric('tailcast_proxy_tenant_inside{tenant="lab"}') == 1
        go.set()
        assert (await first)[0] == 200
        for stranger in ("a", "b", "c"):
            codes = [(await proxy.post(asks("x"), {HEADER: stranger}))[0] for _ in range(3)]
            assert codes == [200, 200, 429]
        name = "tailcast_proxy_tenant_requests_total"
        assert await proxy.metric(f'{name}{{outcome="passed",tenant="lab"}}') == 1
        assert await proxy.metric(f'{name}{{outcome="tenant_concurrency",tenant="lab"}}') == 1
        assert await proxy.metric(f'{name}{{outcome="passed",tenant="others"}}') == 6
        assert await proxy.metric(f'{name}{{outcome="tenant_rate",tenant="others"}}') == 3
        async with proxy.client.get(proxy.admin + "/metrics") as page:
            labels = set(re.findall(r'tenant="([^"]*)"', await page.text()))
        assert labels == {"lab", "others"}


async def test_the_tier_that_may_be_declared_is_the_tenants(tmp_path: Path) -> None:
    path = write(tmp_path, "default: {most_urgent_tier: 3}\ntenants:\n  lab: {most_urgent_tier: 0}\n")
    objectives = [f"o{tier}" for tier in range(5)]
    options: dict[str, Any] = {"engine": "llm-d", "objectives": objectives, "tenants": path}
    async with running_engine() as fake, running_proxy(fake.url, **options) as proxy:

        async def told(tenant: str, tier: str | None) -> tuple[int, str]:
            headers = {HEADER: tenant} | ({} if tier is None else {"x-tailcast-tier": tier})
            status, body = await proxy.post(asks("x"), headers)
            if status != 200:
                return status, str(json.loads(body)["error"]["message"])
            _, _, seen, _ = fake.requests[-1]
            return status, str(seen["x-llm-d-inference-objective"])

        assert await told("lab", "0") == (200, "o0")
        assert await told("lab", None) == (200, "o2")
        assert await told("stranger", "3") == (200, "o3")
        assert await told("stranger", None) == (200, "o3"), "saying nothing is no way to a more urgent tier"
        assert await told("stranger", "2") == (
            400,
            "x-tailcast-tier: got 2; allowed: whole numbers from 3 to 4",
        )


def test_the_pages_example_is_read(tmp_path: Path) -> None:
    [example] = re.findall(
        r"^    # tenants\.yaml\n((?:    .*\n)+)", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    book = read_tenants(write(tmp_path, re.sub(r"^    ", "", example, flags=re.MULTILINE)), TenantLimits())
    assert book.needs_queue is None
    assert len(book.named) == 2
    assert book.limits("nobody").rate_per_s is not None
