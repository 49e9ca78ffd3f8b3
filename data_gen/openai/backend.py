"""Backend for servers with the OpenAI API: a synchronous iterator over an event loop in a background thread."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import queue
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import tenacity

from data_gen.backend import SampledOutput, SampleFailure, SamplingSettings, Work, WorkResult
from data_gen.openai.http_client import (
    DISCONNECTED,
    SEEDED_ENGINES,
    UNREACHABLE,
    CompletionsClient,
    ServerIdentity,
    allow_descriptors,
)
from data_gen.openai.options import EngineError, OpenAIOptions
from data_gen.openai.responses import RequestBodies, ResponseError, ServerResponse
from data_gen.prompts import Prompt
from scheduler_core.errors import InputError

log = logging.getLogger(__name__)

T = TypeVar("T")
Delivery = list[WorkResult] | BaseException

_FATAL = ("unauthorized", "no_quota", "http_404", "http_405")
_PROMPT_FAILURES = ("too_long", "content_filter")
#: A run stops after this many refused requests without a success, because all others would be refused too.
_MAX_FIRST_REFUSALS = 20
_MAX_RECONNECT_WAIT_S = 15.0
_COLLECTION_THRESHOLDS = (10_000, 1_000, 100)
#: Number of rounds of successes in which the limit of an overloaded server grows from zero back to its maximum.
_ROUNDS_TO_FULL = 50


class OpenAIBackend:
    """Samples from any server with the OpenAI API, configured by `OpenAIOptions`.

    Supports one iterator at a time. No request is sent before the first property is read or the first result requested.
    The API key and the headers `env:NAME` are read from `environment`; InputError if a variable is not set.
    """

    def __init__(self, options: OpenAIOptions, environment: Mapping[str, str] = os.environ) -> None:
        self._options = options
        self._secrets = options.secrets(environment)
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread | None = None
        self._client: CompletionsClient | None = None
        self._identity: ServerIdentity | None = None
        self._absent: set[str] = set()
        self._counters: Counter[str] = Counter()

    @property
    def name(self) -> str:
        """Name of the engine: vllm, sglang, llama.cpp, ollama, tgi or openai-compatible."""
        return self._identified().name

    @property
    def version(self) -> str:
        """Version of the engine, or "unknown"."""
        return self._identified().version

    @property
    def served_model(self) -> str:
        """Name of the model on the server."""
        return self._identified().model

    @property
    def seeded(self) -> bool:
        """Whether every sample is requested with its own seed, from an engine that is known to use it."""
        options = self._options
        return options.send_seed and self._identified().name in SEEDED_ENGINES

    @property
    def counters(self) -> dict[str, int]:
        """Number of events other than outputs, by kind: failed attempts, retries, server_down, ..."""
        return dict(+self._counters)

    def sample(self, work: Iterable[Work], settings: SamplingSettings) -> Generator[WorkResult, None, None]:
        """See `Backend.sample`; InputError if a server does not serve the model, or a prompt for `completions` has several
        messages; EngineError if the servers are unavailable for too long or refuse all requests."""
        options, identity = self._options, self._identified()
        allow_descriptors(options.concurrency * len(options.base_urls))
        deliveries: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
        dispatcher = self._run(self._dispatcher(identity, settings, deliveries.put))
        source = iter(work)
        num_pending, more = 0, True
        try:
            with _rare_collections():
                while more or num_pending:
                    batch = []
                    while more and num_pending < options.look_ahead:
                        item = next(source, None)
                        if item is None:
                            more = False
                        elif options.api == "completions" and item.prompt.messages:
                            allowed = f"chat: prompt {item.prompt.prompt_id} has several messages"
                            raise InputError("api", "completions", allowed)
                        else:
                            batch.append(item)
                            num_pending += len(item.indices)
                    if batch:
                        self._loop.call_soon_threadsafe(dispatcher.feed, batch)
                    delivery = deliveries.get() if num_pending else []
                    if isinstance(delivery, BaseException):
                        raise delivery
                    for result in delivery:
                        num_pending -= len(result.outputs) + len(result.failures)
                        yield result
        finally:
            self._run(dispatcher.stop())

    async def _dispatcher(
        self, identity: ServerIdentity, settings: SamplingSettings, deliver: Callable[[Delivery], None]
    ) -> _Dispatcher:
        assert self._client is not None
        return _Dispatcher(
            self._client, identity, self._options, settings, deliver, self._counters, self._absent
        )

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in the event loop of the background thread, and waits for it."""
        if self._thread is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="openai-backend", daemon=True)
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _identified(self) -> ServerIdentity:
        """The engine behind all addresses; queried once."""
        if self._identity is None:
            self._identity = self._run(self._connect())
        return self._identity

    async def _connect(self) -> ServerIdentity:
        options = self._options
        if self._client is None:
            self._client = CompletionsClient(options, self._secrets)
        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(ResponseError),
            wait=tenacity.wait_fixed(min(0.2, options.backoff_s)),
            stop=tenacity.stop_after_delay(options.start_wait_s),
            reraise=True,
        )
        tries: list[Coroutine[Any, Any, ServerIdentity]] = [
            retrying.copy()(self._client.identify, url, options.model) for url in options.base_urls
        ]
        results = await asyncio.gather(*tries, return_exceptions=True)
        identities: dict[str, ServerIdentity] = {}
        for url, result in zip(options.base_urls, results, strict=True):
            if isinstance(result, ServerIdentity):
                identities[url] = result
            elif not isinstance(result, ResponseError):
                raise result
        if not identities:
            raise InputError("base_urls", list(options.base_urls), f"a server that responds ({results[0]})")
        first = next(iter(identities.values()))
        for url, identity in identities.items():
            if identity != first:
                allowed = f"the same engine, version and model everywhere: {first}"
                raise InputError("base_urls", f"{url}: {identity}", allowed)
        self._absent = set(options.base_urls) - set(identities)
        return first

    def close(self) -> None:
        """Closes all connections and stops the background thread."""
        if self._thread is None:
            return
        if self._client is not None:
            self._run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()
        self._thread = self._client = self._identity = None


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Makes garbage collection less frequent: it scans all requests in flight, 24 % of the CPU time with 1,000 of them."""
    thresholds = gc.get_threshold()
    gc.set_threshold(*_COLLECTION_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


@dataclass(slots=True, eq=False)
class _Server:
    """State of one address; the limit is halved on overload, as in TCP, and grows with every round of successes."""

    url: str
    max_in_flight: int
    limit: int  # current maximum number of requests in flight, at most `max_in_flight`
    num_workers: int = 0  # tasks that send to this server, each one request at a time
    paused_until: float = float("-inf")  # no request is sent before this time (Retry-After)
    down_since: float | None = None  # when the server became unavailable; None while it is in use
    _successes: int = 0
    _halved_at: float = float("-inf")

    def on_success(self) -> None:
        """Raises a reduced limit by max_in_flight / 50 after each round of `limit` successes."""
        self._successes += 1
        if self._successes >= self.limit:
            self._successes = 0
            self.limit = min(self.max_in_flight, self.limit + max(1, self.max_in_flight // _ROUNDS_TO_FULL))

    def on_overload(self, sent_at: float, now: float) -> None:
        """Halves the limit, unless the request was sent before the last halving."""
        if sent_at >= self._halved_at:
            self.limit, self._halved_at, self._successes = max(1, self.limit // 2), now, 0


@dataclass(slots=True, eq=False)
class _Request:
    """A sample of a prompt, and the number of failed attempts."""

    prompt: Prompt
    index: int
    prefix: bytes
    ready_at: float
    num_failed: int = 0


class _Dispatcher:
    """Sends requests to the servers up to their limits, and retries failed ones; used in the event loop only.

    Args:
        identity: Expected identity of all servers; a server that comes back with another one is not used.
        deliver: Called in the event loop with finished results, or with the error that ends the run.
        counters: Counts events other than outputs.
        absent: Addresses that did not respond at the start.
    """

    def __init__(
        self,
        client: CompletionsClient,
        identity: ServerIdentity,
        options: OpenAIOptions,
        settings: SamplingSettings,
        deliver: Callable[[Delivery], None],
        counters: Counter[str],
        absent: set[str],
    ) -> None:
        self._client, self._identity = client, identity
        self._options, self._settings = options, settings
        self._deliver, self._counters = deliver, counters
        self._loop = asyncio.get_running_loop()
        self._bodies = RequestBodies(options, settings, identity.model)
        self._tasks: set[asyncio.Task[None]] = set()
        self._results: list[WorkResult] = []
        self._num_refused: int | None = 0  # None once a request has succeeded
        self._ready: deque[_Request] = deque()
        self._stopped = False
        self._servers = [_Server(url, options.concurrency, options.concurrency) for url in options.base_urls]
        for server in self._servers:
            if server.url in absent:
                self._set_down(server, "it did not respond at the start")

    def feed(self, work: Iterable[Work]) -> None:
        """Queues prompts with their missing indices; every index is delivered exactly once."""
        now = self._loop.time()
        try:
            for item in work:
                prefix = self._bodies.prefix(item.prompt)
                self._ready += [_Request(item.prompt, index, prefix, now) for index in item.indices]
            self._start_workers()
        except Exception as error:  # re-raised in the thread that waits for results
            self._deliver(error)

    async def stop(self) -> None:
        """Cancels all requests in flight."""
        self._stopped = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._deliver(error)

    def _start_workers(self) -> None:
        """Starts a worker for each request that can be sent now, on the least loaded server."""
        for _ in range(len(self._ready)):
            free = [s for s in self._servers if s.down_since is None and s.num_workers < s.limit]
            if not free:
                return
            server = min(free, key=lambda server: server.num_workers / server.limit)
            server.num_workers += 1
            self._spawn(self._work(server))

    async def _work(self, server: _Server) -> None:
        """Sends one request after the other, until the queue is empty or the server is down or above its limit."""
        try:
            while self._ready and server.down_since is None and server.num_workers <= server.limit:
                wait_s = server.paused_until - self._loop.time()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                    continue
                await self._send(self._ready.popleft(), server)
        finally:
            server.num_workers -= 1
        self._start_workers()

    async def _send(self, request: _Request, server: _Server) -> None:
        """Makes one attempt at a request; an unreachable server does not count as an attempt."""
        sent_at = self._loop.time()
        try:
            body = self._bodies.body(request.prefix, request.prompt, request.index)
            response = await self._client.complete(server.url, body, self._settings.max_tokens)
            problem = response.problem
            server.on_success()
        except ResponseError as error:
            self._counters[error.kind] += 1
            if error.kind == UNREACHABLE:
                self._ready.appendleft(request)
                self._set_down(server, error.reason)
                return
            self._on_error(server, error, sent_at)
            problem = error
        else:
            if problem is None:
                self._accept(request, response, sent_at)
            else:
                self._counters[problem.kind] += 1
        if problem is not None:
            self._retry(request, problem)

    def _retry(self, request: _Request, error: ResponseError) -> None:
        """Schedules a retry after exponential back-off with full jitter, or reports the request as failed."""
        options = self._options
        request.num_failed += 1
        if error.retry and request.num_failed < options.max_attempts:
            self._counters["retries"] += 1
            longest_s = min(options.max_backoff_s, options.backoff_s * 2.0 ** (request.num_failed - 1))
            self._loop.call_later(random.uniform(0, longest_s), self._queue, request)
            return
        attempts = f"{options.max_attempts} attempts, the last one: " if error.retry else ""
        reason = f"{attempts}{error.reason}"
        self._put(WorkResult(request.prompt, None, (), (SampleFailure(request.index, reason, error.kind),)))

    def _queue(self, request: _Request) -> None:
        if not self._stopped:
            self._ready.append(request)
            self._start_workers()

    def _accept(self, request: _Request, response: ServerResponse, sent_at: float) -> None:
        """Delivers the output of a response."""
        is_truncated = response.finish_reason == "length"
        self._counters["truncated_early"] += (
            is_truncated and response.output_tokens < self._settings.max_tokens
        )
        output = SampledOutput(
            sample_index=request.index,
            output_tokens=response.output_tokens,
            finish_reason=response.finish_reason,
            text=response.text,
            queue_s=sent_at - request.ready_at,
            total_s=self._loop.time() - sent_at,
        )
        self._num_refused = None
        self._put(WorkResult(request.prompt, response.prompt_tokens, (output,)))

    def _on_error(self, server: _Server, error: ResponseError, sent_at: float) -> None:
        """Reduces the limit of the server or marks it as down; raises EngineError if no request can succeed."""
        now = self._loop.time()
        if error.kind in ("timeout", "http_429") or error.kind.startswith("http_5"):
            server.on_overload(sent_at, now)
        if error.retry_after_s is not None:
            if error.retry_after_s > self._options.server_wait_s:
                raise EngineError(
                    f"{server.url} sent Retry-After {error.retry_after_s:.0f} s: {error.reason}"
                )
            server.paused_until = max(server.paused_until, now + error.retry_after_s)
        if error.kind == DISCONNECTED:  # the server may have been replaced, so its identity is checked
            self._set_down(server, error.reason)
        if error.kind in _FATAL:
            raise EngineError(f"{error.kind}: {error.reason}")
        if not error.retry and error.kind not in _PROMPT_FAILURES and self._num_refused is not None:
            self._num_refused += 1
            if self._num_refused >= _MAX_FIRST_REFUSALS:
                raise EngineError(
                    f"the first {self._num_refused} requests were all refused; {error.kind}: {error.reason}"
                )

    def _put(self, result: WorkResult) -> None:
        if not self._results:
            self._loop.call_soon(self._flush)
        self._results.append(result)

    def _flush(self) -> None:
        """Delivers all results of one event-loop iteration at once, because waking the other thread is expensive."""
        results, self._results = self._results, []
        self._deliver(results)

    def _set_down(self, server: _Server, reason: str) -> None:
        if server.down_since is None:
            log.warning("%s is down: %s", server.url, reason)
            self._counters["server_down"] += 1
            server.down_since = self._loop.time()
            self._spawn(self._reconnect(server))

    async def _reconnect(self, server: _Server) -> None:
        """Polls the identity of a server until it responds with the expected one."""
        options = self._options
        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type((ResponseError, InputError)),
            wait=tenacity.wait_random_exponential(
                multiplier=options.backoff_s, max=min(options.max_backoff_s, _MAX_RECONNECT_WAIT_S)
            ),
            stop=lambda state: self._all_down_s() > options.server_wait_s,
            reraise=True,
        )
        try:
            await retrying(self._check_identity, server)
        except (ResponseError, InputError) as error:
            raise EngineError(
                f"no server for {options.server_wait_s:.0f} s; {server.url}: {error}"
            ) from error
        log.warning("%s is back", server.url)
        server.down_since = None
        self._start_workers()

    def _all_down_s(self) -> float:
        """Seconds since the last server went down; 0 while one is up."""
        times = [server.down_since for server in self._servers]
        return 0.0 if None in times else self._loop.time() - max(time for time in times if time is not None)

    async def _check_identity(self, server: _Server) -> None:
        identity, expected = await self._client.identify(server.url, self._identity.model), self._identity
        if identity != expected:
            reason = (
                f"it is now {identity.name} {identity.version}, but was {expected.name} {expected.version}"
            )
            raise ResponseError("replaced", reason, retry=True)
