"""The backend for servers of the OpenAI API: an event loop in a thread of its own behind a plain iterator."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, TypeVar

from data_gen.backend import SamplingSettings, Work, WorkResult
from data_gen.openai.client import Client, allow_descriptors
from data_gen.openai.dispatch import Delivery, Dispatcher
from data_gen.openai.garbage import rare_full_collections
from data_gen.openai.options import OpenAIOptions
from data_gen.openai.pace import Pool, Server
from data_gen.openai.probe import SEEDED_ENGINES, Engine, identify
from data_gen.openai.wire import ReplyError
from scheduler_core.errors import InputError, MissingExtraError

T = TypeVar("T")


class OpenAIBackend:
    """Answers from any server that speaks the OpenAI API; see `OpenAIOptions` for how it is asked.

    One iterator at a time. Nothing is sent before the first property is read or the first result asked for.

    Args:
        options: Servers and how to ask them.
        environment: Where the API key and the headers `env:NAME` are taken from.

    Raises:
        InputError: If a header names a variable that is not set.
    """

    def __init__(self, options: OpenAIOptions, environment: Mapping[str, str] = os.environ) -> None:
        self._options = options
        self._secrets = options.secrets(environment)
        self._thread: _LoopThread | None = None
        self._client: Client | None = None
        self._engine: Engine | None = None
        self._servers: list[Server] = []
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
        """Name of the model as the server knows it."""
        return self._identified().model

    @property
    def seeded(self) -> bool:
        """Whether every answer has a seed of its own that the engine is known to use."""
        options = self._options
        sends = options.send_seed and options.samples_per_request == 1
        return sends and self._identified().name in SEEDED_ENGINES

    @property
    def counters(self) -> dict[str, int]:
        """What happened besides answers, by kind: tries that failed, retries, put_aside, tokenizer_mismatch, ..."""
        return dict(self._counters)

    @property
    def recorded(self) -> dict[str, object]:
        """How the engine is asked, for the manifest; holds no secret."""
        return self._options.recorded()

    def sample(self, work: Iterable[Work], settings: SamplingSettings) -> Iterator[WorkResult]:
        """See `Backend.sample`.

        With several hundred requests in flight the garbage collector of this process is set to rare full
        collections until the iterator ends.

        Raises:
            InputError: If a server does not serve the model, or prompts of several messages go to `completions`.
            EngineError: If the servers are gone for too long or refuse everything.
        """
        options, engine = self._options, self._identified()
        most = options.concurrency * len(self._servers)
        allow_descriptors(most)
        thread, client = self._thread, self._client
        assert thread is not None
        assert client is not None
        results: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
        pool = Pool(self._servers)

        async def start() -> Dispatcher:
            return Dispatcher(client, pool, engine, options, settings, results.put, self._counters)

        dispatcher = thread.run(start())
        try:
            with rare_full_collections(most):
                yield from self._exchange(iter(work), dispatcher, results, options.look_ahead)
        finally:
            thread.run(dispatcher.stop())

    def _exchange(
        self, source: Iterator[Work], dispatcher: Dispatcher, results: queue.SimpleQueue[Delivery], room: int
    ) -> Iterator[WorkResult]:
        """Feeds the dispatcher and yields what it delivers; at most about `room` samples are on their way."""
        assert self._thread is not None
        owed, more = 0, True
        while True:
            batch = []
            while more and owed < room:
                item = next(source, None)
                if item is None:
                    more = False
                    break
                self._check(item)
                batch.append((item.prompt, item.indices))
                owed += len(item.indices)
            if batch:
                self._thread.call(dispatcher.feed, batch)
            if owed == 0:
                return
            delivery = results.get()
            if isinstance(delivery, BaseException):
                raise delivery
            for result in delivery:
                owed -= len(result.answers) + len(result.failures)
                yield result

    def _check(self, item: Work) -> None:
        if self._options.api == "completions" and item.prompt.messages:
            raise InputError(
                "api", "completions", f"chat: prompt {item.prompt.prompt_id} has several messages"
            )

    def _identified(self) -> Engine:
        """Finds out, once, who answers at all addresses."""
        if self._engine is None:
            try:
                import aiohttp  # noqa: F401
            except ImportError as error:
                raise MissingExtraError("aiohttp", "gen") from error
            if self._thread is None:
                self._thread = _LoopThread()
            self._engine = self._thread.run(self._connect())
        return self._engine

    async def _connect(self) -> Engine:
        options = self._options
        if self._client is None:
            self._client = Client(options, self._secrets)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + options.start_wait_s
        found = await asyncio.gather(*(self._patiently(url, deadline) for url in options.base_urls))
        engines = {
            url: engine
            for url, engine in zip(options.base_urls, found, strict=True)
            if isinstance(engine, Engine)
        }
        if not engines:
            raise InputError("base_urls", list(options.base_urls), f"a server that answers ({found[0]})")
        first = next(iter(engines.values()))
        for url, engine in engines.items():
            if engine != first:
                raise InputError(
                    "base_urls", f"{url}: {engine}", f"the same engine, version and model everywhere: {first}"
                )
        self._servers = [Server(url, options.concurrency) for url in options.base_urls]
        for server in self._servers:
            if server.url not in engines:
                server.put_aside(loop.time())
        return first

    async def _patiently(self, url: str, deadline: float) -> Engine | ReplyError:
        assert self._client is not None
        loop = asyncio.get_running_loop()
        while True:
            try:
                return await identify(self._client, url, self._options.model)
            except ReplyError as error:
                if loop.time() >= deadline:
                    return error
            await asyncio.sleep(min(0.2, self._options.backoff_s))

    def close(self) -> None:
        """Closes all connections and ends the thread."""
        if self._thread is None:
            return
        if self._client is not None:
            self._thread.run(self._client.close())
        self._thread.stop()
        self._thread = self._client = self._engine = None

    def __enter__(self) -> OpenAIBackend:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _LoopThread:
    """An event loop that runs in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="openai-backend", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine there and waits for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def call(self, function: Any, *arguments: Any) -> None:
        """Calls a function there, some time."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def stop(self) -> None:
        """Ends loop and thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()
