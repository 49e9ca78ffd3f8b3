"""One proxy in front of several replicas: sessions stay, move when evicted, and lose nothing when an engine is gone."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from predictors.proxy.config import ProxyConfig
from scheduler_core.errors import InputError
from scheduler_core.prediction.outcome import read_log
from tests.fake_openai import FakeEngine
from tests.predictors.proxy.fake_engine import RunningProxy, gated, running_engine, running_proxy
from tests.predictors.proxy.test_sessions import OPTIONS, CachingEngine, chat, send
from tests.waiting import until

#: Probes come by request, not by time.
WORKING_SET: dict[str, Any] = {"policy": "working_set", "release": 8, "engine_probe_s": 3600.0}


def num_posts(engine: FakeEngine) -> int:
    return sum(method == "POST" for method, *_ in engine.requests)


def texts(engine: FakeEngine) -> list[str]:
    """First messages of the completions that an engine got."""
    return [json.loads(body)["messages"][0]["content"] for _, _, _, body in engine.requests if body]


@asynccontextmanager
async def two(
    first: Any, second: Any, **options: Any
) -> AsyncIterator[tuple[FakeEngine, FakeEngine, RunningProxy]]:
    async with (
        running_engine(first) as one,
        running_engine(second) as other,
        running_proxy(one.url, replicas=[other.url], **WORKING_SET | options) as proxy,
    ):
        yield one, other, proxy


async def test_sessions_share_the_engines_and_stay() -> None:
    async with two(CachingEngine(), CachingEngine()) as (one, other, proxy):
        contexts = {name: [name * 200] for name in "abcd"}
        for _ in range(3):
            for name, context in contexts.items():
                assert (await send(proxy, name, *context))[0] == 200
                context += ["yes", "next " * 20]
        for engine in (one, other):
            assert len(texts(engine)) == 6
            assert len(set(texts(engine))) == 2
        assert await proxy.metric("tailcast_proxy_kv_tokens") == 8000
        assert await proxy.metric("tailcast_proxy_sessions") == 4
        assert await proxy.metric(f'tailcast_proxy_engine_up{{engine="{other.url}"}}') == 1
        sessions: Any = proxy.server.live_page.order().sessions  # type: ignore[union-attr]
        assert (sessions.num_known, sessions.num_active, sessions.kv_tokens) == (4, 4, 8000)


async def test_the_log_has_the_engine_of_each_request(tmp_path: Path) -> None:
    async with two(CachingEngine(), CachingEngine(), feedback=str(tmp_path)) as (one, other, proxy):
        for name in "abcd":
            assert (await send(proxy, name, name * 200))[0] == 200
        urls = {one.url: len(texts(one)), other.url: len(texts(other))}
    assert Counter(outcome.replica for _, outcome in read_log(tmp_path, Counter())) == urls
    assert set(urls.values()) == {2}


@pytest.mark.mend
async def test_a_session_whose_context_is_evicted_moves_and_its_former_engine_forgets_it() -> None:
    async with two(CachingEngine(1000), CachingEngine(1000), **OPTIONS) as (one, other, proxy):
        former: Any = proxy.server.handler.engines[1].order.policy
        context = ["b" * 500]
        await send(proxy, "a", "a" * 600)
        await send(proxy, "b", *context)
        context += ["yes", "more"]
        await send(proxy, "a", "a" * 600, "yes", "more")
        await send(proxy, "b", *context)
        assert (len(texts(one)), len(texts(other))) == (2, 2)  # each stays where its context is
        await send(proxy, "c", "c" * 900)  # on the engine with less, where it takes the place of b
        assert len(texts(other)) == 3
        name = former.active
        assert not any(end.startswith("last of") for end in former.ends)
        await send(proxy, "b", *context, "yes", "again")
        assert (len(texts(one)), len(texts(other))) == (3, 3)
        ended = [end for end in former.ends if end.startswith("last of")]
        assert len(ended) == 1
        assert ended != [f"last of {name}"]


@pytest.mark.mend
async def test_nothing_is_lost_or_sent_twice_when_an_engine_is_gone() -> None:
    go = asyncio.Event()
    options = {"policy": "bounded_shortest", "release": 2}
    async with two(gated(go), gated(go), **options) as (one, other, proxy):
        sent = [asyncio.create_task(proxy.post(chat(f"{number}"))) for number in range(12)]
        await until(lambda: num_posts(one) == num_posts(other) == 2)
        await until(lambda: proxy.server.handler.num_in_flight == 12)
        first, second = (engine.order for engine in proxy.server.handler.engines)
        assert (first.num_live, second.num_live) == (6, 6)
        running = set(texts(one))
        await one.stop()
        # The running ones are lost with the engine, as behind a proxy of one; the waiting ones are not.
        await until(lambda: first.num_live == 0)
        assert second.num_live == 10
        go.set()
        codes = dict(zip(map(str, range(12)), [code for code, _ in await asyncio.gather(*sent)], strict=True))
        assert {text for text, code in codes.items() if code == 502} == running
        assert [code for text, code in codes.items() if text not in running] == [200] * 10
        served = texts(one) + texts(other)
        assert sorted(served, key=int) == list(codes)
        async with proxy.client.get(proxy.admin + "/readyz") as response:
            assert response.status == 200
        assert await proxy.metric(f'tailcast_proxy_engine_up{{engine="{one.url}"}}') == 0
        await one.start()
        monitor = proxy.server.handler.relay.monitor
        monitor.doubt()
        assert await monitor.check()
        assert [code for code, _ in await asyncio.gather(*(proxy.post(chat("x")) for _ in range(4)))] == [
            200
        ] * 4
        assert num_posts(one) > 2


async def test_sessions_of_a_gone_engine_move_and_without_any_engine_clients_get_502() -> None:
    async with two(CachingEngine(), CachingEngine()) as (one, other, proxy):
        await send(proxy, "a", "a" * 300)
        await one.stop()
        assert (await send(proxy, "a", "a" * 300, "yes", "more"))[0] == 200
        assert len(texts(other)) == 1
        await other.stop()
        assert (await send(proxy, "a", "a" * 300, "yes", "more", "yes", "again"))[0] == 502
        async with proxy.client.get(proxy.admin + "/readyz") as response:
            assert response.status == 503
        await one.start()
        await other.start()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"replicas": ["http://a/"]}, "replicas"),
        ({"replicas": ["ftp://b"]}, "replicas"),
        ({"replicas": ["http://b"], "engine": "vllm"}, "engine"),
        ({"replicas": ["http://b"], "engine_probe_s": 0.0}, "engine_probe_s"),
    ],
)
def test_what_cannot_work_with_several_engines(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError, match=f"^{field}: "):
        ProxyConfig(engine_url="http://a", **options)
