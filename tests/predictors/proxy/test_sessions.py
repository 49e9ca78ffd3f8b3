"""Agents behind the proxy: a policy holds sessions although slots are free, by what the engine's cache has of them."""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from predictors.proxy.config import ProxyConfig
from predictors.proxy.engine_model import CacheSize, End, EngineModel
from predictors.proxy.errors import Refusal
from predictors.proxy.order import HoldQueue, order_policy
from predictors.proxy.server import ProxyServer
from scheduler_core.adapters.live_calibration import unpacked
from scheduler_core.errors import InputError
from scheduler_core.policies import make_policy
from scheduler_core.policies.base import EngineView, Policy
from scheduler_core.request import Request, RequestState, Segment
from tests.fake_openai import event
from tests.predictors.proxy import fake_engine
from tests.predictors.proxy.fake_engine import RunningProxy, running_engine, running_proxy, until
from tests.scheduler_core.helpers import Clock

#: Seconds after which `Single` lets another session run.
TURN_S = 60.0


@dataclass(kw_only=True, slots=True)
class Single(Policy):
    """One session at a time, which changes when its requests have ended, or after `TURN_S`."""

    key_changes = "on_event"
    progress = "unused"
    inputs: ClassVar[frozenset[str]] = frozenset({"session"})
    active: str = field(default="", init=False)
    since_s: float = field(default=0.0, init=False)
    engine: EngineView = field(init=False)
    #: How requests have ended, and the number of these at each update of the queue.
    ends: list[str] = field(default_factory=list, init=False)
    num_ends: list[int] = field(default_factory=list, init=False)

    def key(self, state: RequestState, now: float) -> float:
        return 0.0 if state.request.session == self.active else 1.0

    def bind(self, engine: EngineView) -> None:
        self.engine = engine

    def may_admit(self, state: RequestState, now: float) -> bool:
        return state.request.session in ("", self.active) or now > self.since_s + TURN_S

    def on_pressure(self, num_waiting: int, max_num_seqs: int) -> bool:
        self.num_ends.append(len(self.ends))
        return False

    def on_admit(self, state: RequestState, now: float) -> None:
        if state.request.session:
            self.active, self.since_s = state.request.session, now

    def on_finish(self, state: RequestState) -> None:
        self.ends.append(state.ended_by)

    def on_session_end(self, session: str, now: float) -> None:
        self.ends.append(f"last of {session}")


OPTIONS: dict[str, Any] = {"policy": f"{__name__}:Single", "release": 8}


class CachingEngine:
    """An engine of one token per character, whose prefix cache has the prompts used last."""

    def __init__(self, num_tokens: int = 4000) -> None:
        self.num_tokens = num_tokens
        self.go = asyncio.Event()
        self.go.set()
        self.prompts: OrderedDict[str, None] = OrderedDict()
        self.reason = "tool_calls"

    async def __call__(self, request: web.Request, body: bytes) -> web.StreamResponse:
        if request.path == "/metrics":
            return web.Response(
                text=f'vllm:cache_config_info{{block_size="10",num_gpu_blocks="{self.num_tokens // 10}"}} 1.0\n'
            )
        if not body:
            return web.Response()
        content = json.loads(body)
        prompt = "\n".join(message["content"] for message in content["messages"])
        cached = max((shared(prompt, other) for other in self.prompts), default=0)
        await self.go.wait()
        for other in [other for other in self.prompts if prompt.startswith(other)]:
            del self.prompts[other]
        self.prompts[prompt] = None
        while sum(map(len, self.prompts)) > self.num_tokens:
            self.prompts.popitem(last=False)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": 3}
        usage |= {"prompt_tokens_details": {"cached_tokens": cached}}
        if not content.get("stream"):
            return web.json_response(fake_engine.completion(3, self.reason) | {"usage": usage})
        events = fake_engine.stream_events(["a", "b", "c"], None)
        if (content.get("stream_options") or {}).get("include_usage"):
            events.insert(-1, event({"id": "c", "choices": [], "usage": usage}))
        return await fake_engine.streamed(request, events)


def shared(first: str, second: str) -> int:
    """Characters of the common beginning of two texts."""
    return next(
        (n for n, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]),
        min(len(first), len(second)),
    )


def chat(*texts: str, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant", "tool")
    messages = [{"role": roles[min(i, 1 + i % 2)], "content": text} for i, text in enumerate(texts)]
    return {"model": "m", "messages": messages, "max_tokens": 50} | more


def send(proxy: RunningProxy, session: str, *texts: str, **more: Any) -> asyncio.Task[tuple[int, bytes]]:
    return asyncio.create_task(proxy.post(chat(*texts, **more), {"x-session-id": session} if session else {}))


def policy_of(proxy: RunningProxy) -> Single:
    queue = proxy.server.handler.queue
    assert queue is not None
    policy: Single = queue.policy  # type: ignore[assignment]
    return policy


async def test_sessions_are_held_although_slots_are_free() -> None:
    script = CachingEngine()
    script.go.clear()
    async with running_engine(script) as fake, running_proxy(fake.url, **OPTIONS) as proxy:
        first = send(proxy, "a", "x" * 100)
        await until(lambda: fake.num_in_flight == 1)
        others = [send(proxy, "b", "y" * 100), send(proxy, "b", "z" * 100), send(proxy, "", "single")]
        second = send(proxy, "a", "x" * 100, "ls", "a.py")
        queue = proxy.server.handler.queue
        assert queue is not None
        # The session that runs is not held; what is behind the first held one is.
        await until(lambda: (queue.num_waiting, fake.num_in_flight) == (3, 2))
        assert await proxy.metric("tailcast_proxy_held_sessions") == 1
        assert await proxy.metric("tailcast_proxy_waiting") == 3
        script.go.set()
        assert [(await task)[0] for task in (first, second, *others)] == [200] * 5
        assert await proxy.metric("tailcast_proxy_sessions") == 2
        assert await proxy.metric("tailcast_proxy_session_held_seconds_count") == 4
        assert await proxy.metric("tailcast_proxy_held_sessions") == 0
        assert set(policy_of(proxy).ends) == {"tool_use"}


async def test_the_policy_sees_the_engines_cache() -> None:
    script = CachingEngine()
    async with running_engine(script) as fake, running_proxy(fake.url, **OPTIONS) as proxy:
        engine = policy_of(proxy).engine
        assert (engine.capacity_tokens, await proxy.metric("tailcast_proxy_kv_tokens")) == (4000, 4000)
        texts = ["x" * 1000]
        for number in range(3):
            await send(proxy, "a", *texts, stream=number == 1)
            texts += ["call", "y" * 500]
        [session] = {header["x-session-id"] for _, path, header, _ in fake.requests if path != "/metrics"}
        assert session == "a"  # the client's own
        name = next(iter(proxy.server.handler.sessions._contexts._sessions))  # type: ignore[union-attr]
        assert engine.resident_tokens(name) == pytest.approx(2010, abs=10)
        reported = await proxy.metric('tailcast_proxy_cached_tokens_total{by="engine"}')
        assert await proxy.metric('tailcast_proxy_cached_tokens_total{by="model"}') == pytest.approx(
            reported, rel=0.05
        )
        assert reported == pytest.approx(2500, abs=20)
        assert await proxy.metric("tailcast_proxy_prompt_tokens_total") == pytest.approx(4520, abs=10)
        assert await proxy.metric("tailcast_proxy_resident_tokens") <= 4000
        await send(proxy, "", "single")
        assert "x-session-id" not in fake.requests[-1][2]
        await send(proxy, "", "Fix it.", "ls", "a.py")
        assert len(fake.requests[-1][2]["x-session-id"]) == 24  # for replicas behind a balancer


@pytest.mark.mend  # a held request whose client was gone would have kept its place for ever
async def test_clients_that_disconnect_and_engines_that_fail_lose_no_session() -> None:
    script = CachingEngine()
    script.go.clear()
    async with running_engine(script) as fake, running_proxy(fake.url, **OPTIONS) as proxy:
        queue = proxy.server.handler.queue
        assert queue is not None
        first, held, gone = send(proxy, "a", "x"), send(proxy, "b", "y"), send(proxy, "c", "z")
        await until(lambda: queue.num_waiting == 2)
        gone.cancel()
        await until(lambda: queue.num_waiting == 1)
        first.cancel()  # aborted in the engine
        await until(lambda: queue.num_waiting == 0)
        await fake.stop()
        assert (await held)[0] in (502, 504)
        assert (await send(proxy, "b", "y"))[0] == 502
        script.num_tokens = 9000
        script.go.set()
        await fake.start()
        assert (await send(proxy, "b", "y"))[0] == 200
        await proxy.reaches("tailcast_proxy_kv_tokens", 9000)  # read again from the new engine
        assert policy_of(proxy).engine.capacity_tokens == 9000
        assert (queue.num_running, queue.num_waiting, queue.num_live) == (0, 0, 0)


@pytest.mark.mend  # killing the proxy or the engine must not lose a session
async def test_agents_finish_although_engine_and_proxy_are_killed() -> None:
    script = CachingEngine()
    num_turns = 20
    done: list[str] = []

    async def agent(url: list[str], session: str) -> None:
        """Repeats a turn until it has an output, as clients of agents do."""
        texts = [session * 400]
        async with aiohttp.ClientSession() as client:
            for turn in range(num_turns):
                status = 0
                while status != 200:
                    try:
                        async with client.post(
                            url[0], json=chat(*texts), headers={"x-session-id": session}
                        ) as response:
                            await response.read()
                            status = response.status
                    except aiohttp.ClientError:
                        await asyncio.sleep(0)
                texts += ["call", f"{session}{turn}" * 20]
                done.append(session)

    async with running_engine(script) as fake, running_proxy(fake.url, **OPTIONS) as first:
        url = [first.url + fake_engine.CHAT]
        agents = [asyncio.create_task(agent(url, session)) for session in "abcdef"]
        await until(lambda: len(done) > 6)
        await fake.stop()
        await fake.start()
        await until(lambda: len(done) > 40)
        await first.server.stop()
        async with running_proxy(fake.url, **OPTIONS) as second:
            url[0] = second.url + fake_engine.CHAT
            await asyncio.gather(*agents)
            queue = second.server.handler.queue
            assert queue is not None
            assert (queue.num_live, queue.num_running, queue.num_waiting) == (0, 0, 0)
    assert len(done) == 6 * num_turns


@pytest.mark.mend  # a restarted engine has lost the contexts that the model has
async def test_the_cache_of_a_restarted_engine_is_empty() -> None:
    script = CachingEngine()
    async with running_engine(script) as fake, running_proxy(fake.url, **OPTIONS) as proxy:
        await send(proxy, "a", "x" * 1000)
        assert await proxy.metric("tailcast_proxy_resident_tokens") >= 1000
        monitor = proxy.server.handler.relay.monitor
        monitor.failed("cannot be reached")
        assert (await send(proxy, "b", "y" * 10))[0] == 200
        assert await proxy.metric("tailcast_proxy_resident_tokens") <= 20
        for session in "cde":
            await send(proxy, session, session * 1000)
        script.prompts.clear()  # a restart that nobody has seen
        await send(proxy, "d", "d" * 1000, "ls", "a.py")
        assert (
            await proxy.metric("tailcast_proxy_resident_tokens") <= 2030
        )  # those of d, and of e, used later


async def test_a_last_request_ends_its_session() -> None:
    script = CachingEngine()
    last = {"x-dynamo-session-final": "true", "x-dynamo-session-id": "a"}
    async with running_engine(script) as fake, running_proxy(fake.url, **OPTIONS) as proxy:
        name = proxy.server.handler.sessions._ids.session_of({"x-session-id": "a"}, {}, None, "\n")  # type: ignore
        await send(proxy, "a", "x" * 100)
        script.go.clear()
        turns = [
            asyncio.create_task(proxy.post(chat("x" * 100, "ls", "a"), last)),
            send(proxy, "a", "x" * 100),
        ]
        await until(lambda: fake.num_in_flight == 2)
        turns[0].cancel()  # another one of the session runs, so it has not ended
        await until(lambda: proxy.server.handler.order.num_running == 1)
        script.go.set()
        await turns[1]
        assert policy_of(proxy).ends == ["tool_use", "", "tool_use"]
        assert (await proxy.post(chat("x" * 100, "ls", "a"), last))[0] == 200
        assert policy_of(proxy).ends[3:] == ["tool_use", f"last of {name}"]
        assert await proxy.metric("tailcast_proxy_sessions") == 0
        assert [fake.requests[-1][2][header] for header in last] == ["true", "a"]
        await fake.stop()
        assert (await proxy.post(chat("y"), last))[0] == 502
        assert policy_of(proxy).ends[5:] == ["", f"last of {name}"]


async def test_the_context_of_a_session_that_has_ended_is_free_at_once() -> None:
    script = CachingEngine(num_tokens=3000)
    options = {"policy": "working_set", "release": 8}
    async with running_engine(script) as fake, running_proxy(fake.url, **options) as proxy:
        policy: Any = proxy.server.handler.order.policy
        for session in "ab":
            await proxy.post(chat(session * 1400), {"x-dynamo-session-id": session})
        assert [session.is_active for session in policy.sessions.values()] == [True, True]
        last = {"x-dynamo-session-id": "a", "x-dynamo-session-final": "true"}
        await proxy.post(chat("a" * 1400, "call", "b"), last)
        assert (await proxy.post(chat("c" * 1400), {"x-dynamo-session-id": "c"}))[0] == 200
        assert [session.is_active for session in policy.sessions.values()] == [True, True]
        assert len(policy.sessions) == 2


@pytest.mark.mend  # a restarted proxy took each context for lost, and learned from it that prompts cost nothing
async def test_sessions_go_on_after_a_restart_of_the_proxy(tmp_path: Path) -> None:
    script = CachingEngine(num_tokens=20_000)
    options = {"policy": "working_set", "release": 8, "session_file": str(tmp_path / "sessions")}
    texts = {session: [session * 2000] for session in "abcd"}

    async def turns(proxy: RunningProxy) -> None:
        for session, each in texts.items():
            assert (await send(proxy, session, *each))[0] == 200
            each += ["call", f"{session}{len(each)}" * 20]

    async def by_model(proxy: RunningProxy) -> float:
        return await proxy.metric('tailcast_proxy_cached_tokens_total{by="model"}')

    async with running_engine(script) as fake:
        async with running_proxy(fake.url, **options) as proxy:
            for _ in range(3):
                await turns(proxy)
            before = proxy.server.handler.order.policy.returns.state()  # type: ignore[attr-defined]
            with pytest.raises(InputError, match="session_file"):
                async with running_proxy(fake.url, **options):
                    pass
        async with running_proxy(fake.url, **options) as proxy:
            assert await proxy.metric("tailcast_proxy_sessions") == 4
            assert await proxy.metric("tailcast_proxy_resident_tokens") == pytest.approx(8000, rel=0.1)
            after = proxy.server.handler.order.policy.returns.state()  # type: ignore[attr-defined]
            assert after["groups"] == before["groups"] != []
            assert after["counts"].tolist() == before["counts"].tolist()
            await turns(proxy)
            reported = await proxy.metric('tailcast_proxy_cached_tokens_total{by="engine"}')
            assert await by_model(proxy) == pytest.approx(reported, rel=0.05)
            assert reported > 8000
        script.prompts.clear()  # the engine was restarted, too
        async with running_proxy(fake.url, **options) as proxy:
            assert await proxy.metric("tailcast_proxy_resident_tokens") > 8000
            await send(proxy, "d", *texts["d"])
            # It reports no hit: all that was used before has gone.
            assert await proxy.metric("tailcast_proxy_resident_tokens") < 2500
        script.num_tokens = 30_000
        async with running_proxy(fake.url, **options) as proxy:
            assert await proxy.metric("tailcast_proxy_resident_tokens") == 0, "another engine"
            assert await proxy.metric("tailcast_proxy_sessions") == 4


@pytest.mark.mend  # a proxy that is killed writes nothing at its end
async def test_sessions_are_written_while_the_proxy_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("predictors.proxy.sessions.SAVE_S", 0.01)
    file = tmp_path / "sessions"
    async with (
        running_engine(CachingEngine()) as fake,
        running_proxy(fake.url, **OPTIONS, session_file=str(file)) as proxy,
    ):
        await send(proxy, "a", "x" * 1000)

        def is_written() -> bool:
            return file.exists() and len(unpacked(file.read_bytes())["cache"]["contexts"]) == 1

        await until(is_written)
        (tmp_path / "copy").write_bytes(file.read_bytes())
    options = OPTIONS | {"session_file": str(tmp_path / "copy")}
    async with running_engine(CachingEngine()) as fake, running_proxy(fake.url, **options) as proxy:
        assert await proxy.metric("tailcast_proxy_resident_tokens") >= 1000


async def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "sessions"
    options = OPTIONS | {"session_file": str(file)}
    for content in (b"", b"[]", b"{}", b'{"format": "tailcast-proxy-sessions/1", "responses": 3}', b"PK"):
        file.write_bytes(content)
        with pytest.raises(InputError, match="session_file"):
            ProxyServer(ProxyConfig(engine_url="http://127.0.0.1:1", predictor="none", **options))
    with pytest.raises(InputError, match="a policy that uses sessions"):
        ProxyServer(ProxyConfig(engine_url="http://127.0.0.1:1", policy="fcfs", session_file=str(file)))


async def test_sighup_and_unknown_sizes(caplog: pytest.LogCaptureFixture) -> None:
    go = asyncio.Event()
    async with running_engine(fake_engine.gated(go)) as fake, running_proxy(fake.url, **OPTIONS) as proxy:
        assert "set --engine_kv_tokens" in caplog.text
        assert await proxy.metric("tailcast_proxy_kv_tokens") == 0
        assert policy_of(proxy).engine.capacity_tokens > 2**60
        tasks = [send(proxy, "a", "x"), send(proxy, "b", "x")]
        await until(lambda: fake.num_in_flight == 1)
        await proxy.server.reload(replace(proxy.server.handler.config, release=9, engine_kv_tokens=7))
        assert "these options need a restart: engine_kv_tokens" in caplog.text
        go.set()
        assert [(await task)[0] for task in tasks] == [200, 200]
    options = OPTIONS | {"engine_kv_tokens": 500}
    async with running_engine(CachingEngine()) as fake, running_proxy(fake.url, **options) as proxy:
        assert await proxy.metric("tailcast_proxy_kv_tokens") == 500


async def test_an_event_lets_a_held_session_run() -> None:
    clock = Clock()
    queue = HoldQueue(Single(), 8, clock, model=EngineModel())
    await queue.enter(Request(request_id="a", arrival_s=0.0, prompt_tokens=1, max_tokens=1, session="a"))
    held = asyncio.create_task(
        queue.enter(Request(request_id="b", arrival_s=0.0, prompt_tokens=1, max_tokens=1, session="b"))
    )
    await until(lambda: queue.num_waiting == 1)
    clock.now = TURN_S + 1.0
    queue.set_size(CacheSize(1000))
    await held
    assert queue.num_running == 2


@pytest.mark.mend  # held requests were accepted without limit while slots were free
async def test_a_queue_is_full_also_while_the_policy_holds_its_requests() -> None:
    queue = HoldQueue(Single(), 8, Clock(), model=EngineModel(), max_waiting=2)
    requests = [
        Request(request_id=name, arrival_s=0.0, prompt_tokens=1, max_tokens=1, session=name)
        for name in "abcd"
    ]
    tasks = [asyncio.create_task(queue.enter(request)) for request in requests[:3]]
    await until(lambda: queue.num_waiting == 2)
    with pytest.raises(Refusal) as refusal:
        await queue.enter(requests[3])
    assert (refusal.value.status, queue.num_running, queue.num_waiting) == (429, 1, 2)
    for request in requests:
        queue.leave(request.request_id)
    await asyncio.gather(*tasks)


@pytest.mark.mend  # sessions that a policy pauses at the end of a turn were not, because no request waited
async def test_the_policy_acts_on_an_end_that_no_request_waits_for() -> None:
    policy = Single()
    queue = HoldQueue(policy, 8, Clock(), model=EngineModel())
    await queue.enter(Request(request_id="a", arrival_s=0.0, prompt_tokens=1, max_tokens=1, session="a"))
    queue.leave("a")
    assert policy.num_ends[-1] == 1


def test_engines_with_priorities_cannot_hold_sessions() -> None:
    with pytest.raises(InputError, match="--engine none"):
        order_policy(f"{__name__}:Single", {}, sent_once=True)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "arrive", "counted", "output", "end", "fail", "gone", "restart"]),
        st.integers(0, 9),
        st.integers(1, 600),
    ),
    max_size=40,
)


@pytest.mark.mend  # a bound on waits: whatever is held is sent as soon as nothing runs
@pytest.mark.parametrize(
    "policy", ["working_set", "thunder_agent", "continuum", "hrrn", "bounded_shortest", "Single"]
)
@settings(max_examples=40, deadline=None)
@given(ACTIONS)
def test_no_request_is_held_by_an_idle_engine(policy: str, actions: list[tuple[str, int, int]]) -> None:
    """Whatever arrives, ends, fails, disconnects or restarts."""
    asyncio.run(run_actions(policy, actions, EngineModel(CacheSize(1000, 10))))


class AlwaysChanging(EngineModel):
    """All waiting prompts are looked up at every event."""

    def look_up_again(self, waiting: Iterable[RequestState]) -> None:
        self.look_up(waiting)


@pytest.mark.parametrize("policy", ["working_set", "hrrn", "longest_prefix"])
@settings(max_examples=40, deadline=None)
@given(ACTIONS)
def test_look_ups_that_can_find_nothing_new_are_left_out(
    policy: str, actions: list[tuple[str, int, int]]
) -> None:
    model, always = (each(CacheSize(1000, 10)) for each in (EngineModel, AlwaysChanging))
    assert asyncio.run(run_actions(policy, actions, model)) == asyncio.run(
        run_actions(policy, actions, always)
    )


async def test_an_arrival_looks_up_its_own_prompt_only() -> None:
    model = EngineModel(CacheSize(1000, 10))
    queue, num_looked = HoldQueue(make_policy("working_set"), 8, Clock(), model=model), 0
    look_up = model.look_up

    def counted(states: Iterable[RequestState]) -> None:
        nonlocal num_looked
        states = list(states)
        num_looked += len(states)
        look_up(states)

    model.look_up = counted  # type: ignore[method-assign]
    tasks = []
    for number in range(60):
        content = (Segment(str(number), 600),)
        request = Request(
            request_id=str(number), arrival_s=0.0, prompt_tokens=600, max_tokens=9, session=str(number), content=content
        )  # fmt: skip
        tasks.append(asyncio.create_task(queue.enter(request)))
        await asyncio.sleep(0)
    assert queue.num_waiting >= 58
    assert num_looked < 70
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def run_actions(
    policy: str, actions: list[tuple[str, int, int]], model: EngineModel
) -> list[tuple[list[str], list[tuple[str, int]]]]:
    """What ran, and what waited with its cached tokens, after each action."""
    clock = Clock()
    order = Single() if policy == "Single" else make_policy(policy)
    queue = HoldQueue(order, 4, clock, model=model)
    trace = []
    tasks: dict[str, asyncio.Task[None]] = {}
    for number, (action, slot, size) in enumerate(actions):
        clock.now += size / 10.0
        name, session = f"r{slot}", f"s{slot % 4}"
        if action == "arrive" and name not in tasks:
            content = (Segment("system:", 20), Segment(session, size))
            request = Request(
                request_id=name, arrival_s=clock.now, prompt_tokens=size + 20, max_tokens=50,
                session="" if slot > 7 else session, content=content,
            )  # fmt: skip
            tasks[name] = asyncio.create_task(queue.enter(request))
        elif action == "restart":
            queue.set_size(CacheSize(900 + size, 10))
        elif action == "counted":
            queue.update(name, None, size)
        elif name in tasks and tasks[name].done():
            if action == "output":
                queue.on_output(name, 1 + size % 3)
            elif action in ("end", "fail"):
                end = End(
                    ended_by="tool_use",
                    is_complete=action == "end",
                    cached_tokens=size if number % 2 else None,
                )
                queue.leave(name, end)
                del tasks[name]
        elif name in tasks and action == "gone":
            task = tasks.pop(name)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        for _ in range(3):
            await asyncio.sleep(0)
        assert queue.num_running or not queue.num_waiting
        assert queue.num_running == sum(task.done() for task in tasks.values())
        model._kv.validate({n for n in tasks if model._kv.held_by(n)}, set())
        waiting = [(state.request_id, state.cached_tokens) for state in queue.first(9)]
        trace.append((sorted(name for name, task in tasks.items() if task.done()), waiting))
    while tasks:
        clock.now += 1.0
        name = next(name for name, task in tasks.items() if task.done())
        await tasks.pop(name)
        queue.on_output(name, 5)
        queue.leave(name, End(is_complete=True))
        await asyncio.sleep(0)
    assert (queue.num_live, queue.num_running, queue.num_waiting) == (0, 0, 0)
    return trace
