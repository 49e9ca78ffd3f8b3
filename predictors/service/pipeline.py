"""Prompt in, prediction out: tokenize, queue, run. Model calls and the tokenizing of long texts happen in threads."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import marshal
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal, NamedTuple

from cachetools import LRUCache

from predictors.runtime import ArtifactRuntime, PredictedRow, check_range
from predictors.service.batcher import Batcher, BatchingSettings, Callback
from predictors.service.errors import BatchError, ClosedError, QueueFullError
from predictors.service.messages import CheckedRequest, RequestReader
from predictors.service.metrics import ArtifactMetrics
from predictors.tokenizer import TokenizedPrompt
from scheduler_core.errors import InputError

logger = logging.getLogger(__name__)

# Rows of different served models and temperatures share batches.
_Row = tuple[TokenizedPrompt, CheckedRequest]

# Up to so many characters a prompt is tokenized in the event loop: in less than a quarter of a millisecond, which is
# less than what a thread on a busy machine waits for its turn.
MAX_INLINE_CHARS = 1000


class PipelineResult(NamedTuple):
    """One prompt's prediction and its cost, 0 for one from the cache. A tuple, as everything created per request: a frozen
    dataclass takes three times as long to make."""

    prediction: PredictedRow
    prompt_tokens: int
    truncated: bool
    tokenize_s: float
    queue_s: float
    inference_s: float
    batch_size: int
    cached: bool = False


class ServiceThreads:
    """The threads of one server, shared by its artifacts: one that tokenizes, and `num_workers` of the model calls, one on
    each of `cores` (see `worker_cores`), if there are any."""

    def __init__(self, num_workers: int, cores: Sequence[int] = ()) -> None:
        numbers = itertools.count()

        def pin() -> None:
            if cores:
                with contextlib.suppress(OSError):  # the core has been taken from the process since
                    os.sched_setaffinity(0, {cores[next(numbers) % len(cores)]})

        self.tokenize = ThreadPoolExecutor(1, "tailcast-tokenize")
        self.run = ThreadPoolExecutor(num_workers, "tailcast-run", initializer=pin)

    def close(self) -> None:
        """Ends them after the calls that wait, without waiting for that."""
        self.tokenize.shutdown(wait=False)
        self.run.shutdown(wait=False)


def worker_cores(num_workers: int, process: int = 0, num_processes: int = 1) -> list[int]:
    """Cores for the `num_workers` single-threaded model calls of each process; none where the threads of all processes are
    not as many as the cores, or threads cannot be bound.

    Linux often lets two busy threads share a core for tens of milliseconds while another core is almost idle; at 70 %
    load this doubled the latency. With fewer threads than cores, binding could put those of several services on one.
    """
    if not hasattr(os, "sched_getaffinity"):
        return []
    cores = sorted(os.sched_getaffinity(0))
    if num_workers * num_processes != len(cores):
        return []
    return cores[process * num_workers : (process + 1) * num_workers]


class ServedArtifact:
    """One artifact in service, at one version: batched predictions, of at most `max_queue` requests in flight (tokenizing
    ones included), and a cache of `cache_entries` of them."""

    def __init__(
        self,
        settings: BatchingSettings,
        threads: ServiceThreads,
        cache_entries: int,
        max_prompt_chars: int | None,
        runtime: ArtifactRuntime,
        metrics: ArtifactMetrics,
    ) -> None:
        self.runtime = runtime
        self.manifest = runtime.artifact.manifest
        self.name, self.version = self.manifest.artifact_id, self.manifest.artifact_version
        self.reader = RequestReader(runtime, max_prompt_chars)
        self.metrics = metrics
        self.settings = settings
        self.num_in_flight = 0  # requests accepted and not yet answered
        self._empty = asyncio.Event()
        self._empty.set()
        self.state: Literal["starting", "ready", "shutting down"] = "starting"
        self._threads = threads
        self._cache = LRUCache[bytes, PipelineResult](cache_entries) if cache_entries else None
        self._batcher: Batcher[_Row, tuple[PredictedRow, float]] = Batcher(self._run, settings)

    @property
    def is_full(self) -> bool:
        """Whether any request is refused now: there is no cache, and the queue is full."""
        return self._cache is None and self.state == "ready" and self.num_in_flight >= self.settings.max_queue

    async def start(self) -> None:
        """Warms the session up and verifies it; requests are accepted from then on. Raises as `ArtifactRuntime.warm_up`."""
        await asyncio.get_running_loop().run_in_executor(self._threads.run, self.runtime.warm_up)
        self.state = "ready"

    async def predict(self, request: CheckedRequest, *, deadline: float | None = None) -> PipelineResult:
        """Predicts one prompt, checked by the artifact's reader; after `deadline`, a time of the clock, no more work is done for it.
        Errors are those of `errors`, InputError for a text without tokens, and TailcastError for numbers that no scheduler can use."""
        if self.state != "ready":
            raise ClosedError(self.state)
        key = b""
        if self._cache is not None:
            key = cache_key(request.prompt, request.served_model, request.temperature)
            result = self._cache.get(key)
            self.metrics.cache(result is not None)
            if result is not None:
                return result
        if self.num_in_flight >= self.settings.max_queue:
            raise QueueFullError(self.settings.max_queue)
        self.num_in_flight += 1
        self.metrics.queue_length.inc()
        self._empty.clear()
        try:
            result = await self._predict(request, deadline)
        finally:
            self.num_in_flight -= 1
            self.metrics.queue_length.dec()
            if self.num_in_flight == 0:
                self._empty.set()
        if self._cache is not None:
            self._cache[key] = result._replace(
                tokenize_s=0.0, queue_s=0.0, inference_s=0.0, batch_size=0, cached=True
            )
        return result

    async def close(self) -> None:
        """Refuses new requests with `ClosedError`, and ends it once those in flight are answered."""
        self.state = "shutting down"
        await self._empty.wait()
        await self._batcher.close()

    async def _predict(self, request: CheckedRequest, deadline: float | None) -> PipelineResult:
        prompt = request.prompt
        begin = time.perf_counter()
        tokens = prompt if isinstance(prompt, TokenizedPrompt) else await self._tokenized(prompt)
        tokenize_s = time.perf_counter() - begin
        if len(tokens.ids) == 0:
            raise InputError("prompt", "a text without tokens", "a text with at least one token")
        batched = await self._batcher.submit(
            (tokens, request), length=max(1, tokens.num_tokens), deadline=deadline
        )
        prediction, inference_s = batched.result
        check_range([prediction])
        return PipelineResult(
            prediction=prediction,
            prompt_tokens=tokens.num_tokens,
            truncated=tokens.truncated,
            tokenize_s=tokenize_s,
            # A batch that was handed over still waits until a worker is free.
            queue_s=batched.queue_s + max(0.0, batched.work_s - inference_s),
            inference_s=inference_s,
            batch_size=batched.batch_size,
        )

    async def _tokenized(self, prompt: str) -> TokenizedPrompt:
        try:
            if len(prompt) <= MAX_INLINE_CHARS:
                return self.runtime.tokenizer([prompt])[0]
            tokenizing = self._threads.tokenize.submit(self.runtime.tokenizer, [prompt])
            return (await asyncio.wrap_future(tokenizing))[0]
        except Exception as error:
            logger.exception("a prompt could not be tokenized")
            raise BatchError(error) from error

    def _run(self, rows: Sequence[_Row], callback: Callback[tuple[PredictedRow, float]]) -> None:
        """Predicts in a thread, then calls back in the event loop; `loop.run_in_executor` would make a second future and two
        more turns of the loop for each call."""
        loop = asyncio.get_running_loop()

        def on_done(future: Future[list[tuple[PredictedRow, float]]]) -> None:
            error = future.exception()
            with contextlib.suppress(RuntimeError):  # the loop has been closed: nothing waits for the result
                loop.call_soon_threadsafe(callback, None if error is not None else future.result(), error)

        self._threads.run.submit(self._run_rows, rows).add_done_callback(on_done)

    def _run_rows(self, rows: Sequence[_Row]) -> list[tuple[PredictedRow, float]]:
        """Predictions and the seconds of the model call; runs in a thread."""
        begin = time.perf_counter()
        try:
            predictions = self.runtime.run(
                [tokens.ids for tokens, _ in rows],
                [request.served_model for _, request in rows],
                [request.temperature for _, request in rows],
            ).rows()
        except Exception:
            self.metrics.failed_batches.inc()
            logger.exception("a batch of %d prompts failed", len(rows))
            raise
        inference_s = time.perf_counter() - begin
        self.metrics.batch([max(1, tokens.num_tokens) for tokens, _ in rows], inference_s)
        return [(prediction, inference_s) for prediction in predictions]


def cache_key(prompt: str | TokenizedPrompt, served_model: str | None, temperature: float | None) -> bytes:
    """128 bits that two requests share only if they get the same prediction of the same artifact."""
    parts = (prompt if isinstance(prompt, str) else prompt.ids.tobytes(), served_model or "", temperature)
    # Version 0 knows no shared or interned objects: equal parts have equal bytes.
    return hashlib.blake2b(marshal.dumps(parts, 0), digest_size=16).digest()
