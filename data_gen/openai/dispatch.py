"""Which request goes to which server when, and again after a failure; runs in the event loop of one sampling run."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import random
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from data_gen.backend import Answer, Failure, SamplingSettings, WorkResult
from data_gen.openai.client import DISCONNECTED, UNREACHABLE, Client
from data_gen.openai.garbage import collect_now_and_then
from data_gen.openai.options import EngineError, OpenAIOptions
from data_gen.openai.pace import Pool, Server, backoff_s
from data_gen.openai.probe import Engine, identify, root_of
from data_gen.openai.tokens import TokenCounter
from data_gen.openai.wire import BodyMaker, Choice, Reply, ReplyError
from data_gen.prompts import Prompt
from scheduler_core.errors import InputError

log = logging.getLogger(__name__)

Delivery = list[WorkResult] | BaseException

_STOPS_THE_RUN = ("unauthorized", "no_quota", "http_404", "http_405")
_OF_ONE_PROMPT = ("too_long", "content_filter")
_HOPELESS = 20
"""A run stops when so many requests in a row were refused and none was ever answered: all would be."""
_MAX_REVIVE_S = 15.0


@dataclass(slots=True, eq=False)
class Ask:
    """One request to be made: some sample indices of one prompt."""

    prompt: Prompt
    indices: tuple[int, ...]
    start: bytes
    ready_at: float
    attempt: int = 0


class Dispatcher:
    """Sends what it is fed, as fast as the servers take it.

    Args:
        client: Open client of this event loop.
        pool: The servers.
        engine: What they are known as; a server that comes back as something else is not used.
        options: How to ask.
        settings: How answers are drawn.
        deliver: Gets finished results, or the error that ends the run; called in the event loop.
        counters: Counts what happened besides answers.
    """

    def __init__(
        self,
        client: Client,
        pool: Pool,
        engine: Engine,
        options: OpenAIOptions,
        settings: SamplingSettings,
        deliver: Callable[[Delivery], None],
        counters: Counter[str],
    ) -> None:
        self._client, self._pool, self._engine = client, pool, engine
        self._options, self._settings = options, settings
        self._deliver, self._counters = deliver, counters
        self._loop = asyncio.get_running_loop()
        self._bodies = BodyMaker(options, settings, engine.model)
        self._tokens = TokenCounter(options, settings.max_tokens, self._count_on_server, counters)
        self._ready: deque[Ask] = deque()
        self._late: list[tuple[float, int, Ask]] = []
        self._order = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._results: list[WorkResult] = []
        self._checked: str | None = None
        self._per_request = options.samples_per_request
        self._answered = False
        self._refused = 0
        self._rng = random.Random()
        self._spawn(collect_now_and_then())
        for server in pool.servers:
            if server.aside_since is not None:
                self._spawn(self._revive(server))
            self._spawn(self._watch(server))

    def feed(self, work: Iterable[tuple[Prompt, tuple[int, ...]]]) -> None:
        """Takes prompts and the indices that are missing; every index is delivered exactly once."""
        now = self._loop.time()
        size = self._options.samples_per_request
        try:
            for prompt, indices in work:
                start = self._bodies.start(prompt)
                for first in range(0, len(indices), size):
                    self._ready.append(Ask(prompt, indices[first : first + size], start, now))
            self._pump()
        except Exception as error:  # Whoever waits for results must learn of it.
            self._deliver(error)

    async def stop(self) -> None:
        """Gives up everything that is in flight."""
        self._ready.clear()
        self._late.clear()
        if self._timer is not None:
            self._timer.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for server in self._pool.servers:
            server.in_flight = 0

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._deliver(error)

    def _pump(self) -> None:
        """Sends what can be sent now and sets the alarm for what cannot."""
        now = self._loop.time()
        while (pair := self._next(now)) is not None:
            self._spawn(self._serve(*pair))
        wakes = [self._late[0][0]] if self._late else []
        resumed = self._pool.next_wake(now) if self._ready else None
        if resumed is not None:
            wakes.append(resumed)
        self._alarm(min(wakes, default=None))

    def _next(self, now: float) -> tuple[Ask, Server] | None:
        """A request that can be sent now, and where to; its place there is taken."""
        while self._late and self._late[0][0] <= now:
            self._ready.appendleft(heapq.heappop(self._late)[2])
        server = self._pool.pick(now) if self._ready else None
        if server is None:
            return None
        server.in_flight += 1
        return self._take(), server

    def _take(self) -> Ask:
        """The next request, cut to what the servers give at once."""
        ask = self._ready.popleft()
        if len(ask.indices) > self._per_request:
            rest = Ask(ask.prompt, ask.indices[self._per_request :], ask.start, ask.ready_at, ask.attempt)
            self._ready.appendleft(rest)
            ask.indices = ask.indices[: self._per_request]
        return ask

    def _alarm(self, at: float | None) -> None:
        if self._timer is not None:
            if self._timer.when() == at:
                return
            self._timer.cancel()
        self._timer = None if at is None else self._loop.call_at(at, self._on_alarm)

    def _on_alarm(self) -> None:
        self._timer = None
        self._pump()

    async def _serve(self, ask: Ask, server: Server) -> None:
        """Sends a request, then the next one that can be sent, as long as there is one."""
        pair: tuple[Ask, Server] | None = (ask, server)
        while pair is not None:
            ask, server = pair
            sent_at = self._loop.time()
            try:
                body = self._bodies.body(ask.start, ask.prompt, ask.indices)
                reply = await self._client.ask(server.url, body)
                await self._accept(ask, reply, sent_at, self._loop.time())
                server.succeeded()
            except ReplyError as error:
                self._on_failure(ask, server, error, sent_at)
            finally:
                server.in_flight -= 1
            pair = self._next(self._loop.time())
            self._pump()

    async def _accept(self, ask: Ask, reply: Reply, sent_at: float, ended_at: float) -> None:
        """Delivers the answers of a reply and asks again for what it lacks."""
        given, asked = len(reply.choices), len(ask.indices)
        if given > asked:
            raise ReplyError("malformed", f"{given} choices for {asked} asked", retry=True)
        if given < asked:
            self._counters["fewer_choices"] += 1
            self._per_request = min(self._per_request, given)
        counts = await self._tokens.count(reply)
        if self._checked != ask.prompt.prompt_id:
            self._checked = ask.prompt.prompt_id
            self._tokens.check_prompt(ask.prompt, reply.prompt_tokens)
        answers, failures = [], []
        for index, choice, count in zip(ask.indices, reply.choices, counts, strict=False):
            problem = choice.problem or self._implausible(choice, count)
            if problem is None:
                answers.append(_answer(index, choice, count, ask.ready_at, sent_at, ended_at))
                continue
            self._counters[problem.kind] += 1
            if not problem.retry:
                failures.append(Failure(index, problem.reason, problem.kind))
            else:
                self._again(Ask(ask.prompt, (index,), ask.start, ask.ready_at, ask.attempt), problem)
        if given < asked:
            self._ready.appendleft(Ask(ask.prompt, ask.indices[given:], ask.start, ask.ready_at))
        self._answered = self._answered or bool(answers)
        self._put(WorkResult(ask.prompt, reply.prompt_tokens, tuple(answers), tuple(failures)))

    def _implausible(self, choice: Choice, count: int) -> ReplyError | None:
        cap = self._settings.max_tokens
        if count > cap:
            return ReplyError("too_many_tokens", f"{count} tokens for a cap of {cap}", retry=False)
        if choice.finish_reason == "length" and count < cap:
            self._counters["cut_early"] += 1
        return None

    def _on_failure(self, ask: Ask, server: Server, error: ReplyError, sent_at: float) -> None:
        self._counters[error.kind] += 1
        now = self._loop.time()
        if error.kind == UNREACHABLE:
            self._ready.appendleft(ask)
            self._put_aside(server, now, error)
            return
        if not error.retry:
            self._refuse(ask, error)
            return
        overload = error.kind in ("timeout", "http_429") or error.kind.startswith("http_5")
        if overload and server.overloaded(sent_at, now) and error.retry_after_s is None:
            wait_s = backoff_s(
                server.strikes, self._options.backoff_s, self._options.max_backoff_s, self._rng
            )
            server.pause(now + wait_s)
        if error.retry_after_s is not None:
            if error.retry_after_s > self._options.server_wait_s:
                raise EngineError(
                    f"{server.url} asks to come back in {error.retry_after_s:.0f} s: {error.reason}"
                )
            server.pause(now + error.retry_after_s)
        is_spent = error.kind != "http_429" and server.failed()
        # What answers after a broken connection may be another server: it is asked who it is before it gets more.
        if is_spent or error.kind == DISCONNECTED:
            self._put_aside(server, now, error)
        self._again(ask, error)

    def _again(self, ask: Ask, error: ReplyError) -> None:
        """Another try after a wait, or the end of it."""
        options = self._options
        ask.attempt += 1
        if ask.attempt >= options.max_attempts:
            self._fail(
                ask, ReplyError(error.kind, f"{ask.attempt} tries, the last one: {error.reason}", retry=False)
            )
            return
        self._counters["retries"] += 1
        wait_s = backoff_s(ask.attempt, options.backoff_s, options.max_backoff_s, self._rng)
        due = self._loop.time() + (error.retry_after_s or 0.0) + wait_s
        heapq.heappush(self._late, (due, next(self._order), ask))

    def _refuse(self, ask: Ask, error: ReplyError) -> None:
        if error.kind in _STOPS_THE_RUN:
            raise EngineError(f"{error.kind}: {error.reason}")
        if error.kind not in _OF_ONE_PROMPT and not self._answered:
            self._refused += 1
            if self._refused >= _HOPELESS:
                raise EngineError(
                    f"the first {self._refused} requests were all of no use; {error.kind}: {error.reason}"
                )
        self._fail(ask, error)

    def _fail(self, ask: Ask, error: ReplyError) -> None:
        failures = tuple(Failure(index, error.reason, error.kind) for index in ask.indices)
        self._put(WorkResult(ask.prompt, None, (), failures))

    def _put(self, result: WorkResult) -> None:
        if not result.answers and not result.failures:
            return
        if not self._results:
            self._loop.call_soon(self._flush)
        self._results.append(result)

    def _flush(self) -> None:
        """All results of one turn of the event loop go over at once: waking the other thread is what costs."""
        results, self._results = self._results, []
        self._deliver(results)

    def _put_aside(self, server: Server, now: float, error: ReplyError) -> None:
        if server.aside_since is None:
            log.warning("%s is put aside: %s", server.url, error.reason)
            self._counters["put_aside"] += 1
            server.put_aside(now)
            self._spawn(self._revive(server, was_cut_off=error.kind == DISCONNECTED))

    async def _revive(self, server: Server, *, was_cut_off: bool = False) -> None:
        """Tries a server again and again until it answers as what it was; one that was merely cut off at once."""
        options = self._options
        tries = server.absences
        is_first = True
        while True:
            if not (is_first and was_cut_off):
                await asyncio.sleep(
                    backoff_s(tries, options.backoff_s, min(options.max_backoff_s, _MAX_REVIVE_S), self._rng)
                )
            tries += 1
            try:
                reason = await self._changed(server)
                if reason is None:
                    break
            except (ReplyError, InputError) as error:
                reason = str(error)
            is_first = False
            since = self._pool.all_aside_since()
            if since is not None and self._loop.time() - since > options.server_wait_s:
                raise EngineError(f"no server for {options.server_wait_s:.0f} s; {server.url}: {reason}")
        log.warning("%s is back", server.url)
        server.bring_back(at_full=is_first and was_cut_off)
        self._pump()

    async def _changed(self, server: Server) -> str | None:
        """What a server is now, if it is no longer what it was."""
        found = await identify(self._client, server.url, self._engine.model)
        if found == self._engine:
            return None
        return f"it is {found.name} {found.version} now and was {self._engine.name} {self._engine.version}"

    async def _watch(self, server: Server) -> None:
        """Asks a server now and then who it is: one that is replaced in an orderly way breaks no request."""
        while True:
            await asyncio.sleep(self._options.identity_check_s)
            if server.aside_since is not None:
                continue
            try:
                reason = await self._changed(server)
            except ReplyError:
                continue  # Busy or away: that is for the requests to find out.
            except InputError as error:
                reason = str(error)
            if reason is not None:
                self._put_aside(server, self._loop.time(), ReplyError("replaced", reason, retry=True))

    async def _count_on_server(self, text: str) -> int:
        fields = {"model": self._engine.model, "prompt": text, "add_special_tokens": False}
        if self._engine.name == "llama.cpp":
            fields = {"content": text}
        for server in self._pool.servers:
            if server.aside_since is None:
                status, found = await self._client.post(root_of(server.url) + "/tokenize", fields)
                if status == 200 and isinstance(found, dict) and isinstance(found.get("tokens"), list):
                    return len(found["tokens"])
                if status == 429 or status >= 500:
                    raise ReplyError(f"http_{status}", f"{server.url}/tokenize: HTTP {status}", retry=True)
                raise ReplyError(
                    "no_token_count", f"{server.url} has no /tokenize (HTTP {status})", retry=False
                )
        raise ReplyError(UNREACHABLE, "no server to count with", retry=True)


def _answer(
    index: int, choice: Choice, count: int, ready_at: float, sent_at: float, ended_at: float
) -> Answer:
    first_at, last_at = choice.first_at, choice.last_at
    return Answer(
        sample_index=index,
        output_tokens=count,
        finish_reason="stop" if choice.finish_reason == "stop" else "length",
        text=choice.text,
        queue_s=sent_at - ready_at,
        ttft_s=None if first_at is None else first_at - sent_at,
        total_s=(ended_at if last_at is None else last_at) - sent_at,
    )
