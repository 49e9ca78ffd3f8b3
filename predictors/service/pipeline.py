"""The pipeline from prompt to prediction: tokenize, queue, run. Long texts and model calls use threads."""

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
from typing import Any, Literal

from cachetools import LRUCache

from predictors.runtime import ArtifactRuntime
from predictors.service.batcher import Batcher, BatchingSettings, Callback
from predictors.service.errors import BatchError, ClosedError, QueueFullError
from predictors.service.messages import CheckedRequest, PipelineResult, RequestReader
from predictors.service.metrics import ArtifactMetrics
from predictors.tokenizer import TokenizedPrompt
from scheduler_core.errors import InputError

logger = logging.getLogger(__name__)

# Rows of different served models and temperatures share batches.
_Row = tuple[TokenizedPrompt, CheckedRequest]
# Numbers of a prediction by name, and seconds of the model call.
_Output = tuple[dict[str, Any], float]

# Prompts up to this length are tokenized in the event loop, in less than 0.25 ms. Switching to a thread takes
# longer on a busy machine.
MAX_INLINE_CHARS = 1000


class ServiceThreads:
    """Threads of one server, shared by its artifacts: one for tokenization, and `num_workers` for model
    calls, each bound to one of `cores` (see `worker_cores`), if any."""

    def __init__(self, num_workers: int, cores: Sequence[int] = ()) -> None:
        numbers = itertools.count()

        def pin() -> None:
            if cores:
                with contextlib.suppress(OSError):  # the core is no longer available to the process
                    os.sched_setaffinity(0, {cores[next(numbers) % len(cores)]})

        self.tokenize = ThreadPoolExecutor(1, "tailcast-tokenize")
        self.run = ThreadPoolExecutor(num_workers, "tailcast-run", initializer=pin)

    def close(self) -> None:
        """Stops the threads after pending calls, without waiting for them."""
        self.tokenize.shutdown(wait=False)
        self.run.shutdown(wait=False)


def worker_cores(num_workers: int, process: int = 0, num_processes: int = 1) -> list[int]:
    """Cores for the `num_workers` single-threaded model calls of each process; empty if the number of threads
    of all processes differs from the number of cores, or threads cannot be bound.

    Linux often runs two busy threads on one core for tens of milliseconds while another core is almost idle;
    at 70 % load this doubled the latency. With fewer threads than cores, services could share a core.
    """
    if not hasattr(os, "sched_getaffinity"):
        return []
    cores = sorted(os.sched_getaffinity(0))
    if num_workers * num_processes != len(cores):
        return []
    return cores[process * num_workers : (process + 1) * num_workers]


class ServedArtifact:
    """One version of an artifact in service: batched predictions with at most `max_queue` requests in flight
    (including tokenization), and a cache of `cache_entries` predictions."""

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
        self.num_in_flight = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self.state: Literal["starting", "ready", "shutting down"] = "starting"
        self._threads = threads
        self._cache = LRUCache[bytes, PipelineResult](cache_entries) if cache_entries else None
        self._batcher: Batcher[_Row, _Output] = Batcher(self._run, settings)

    @property
    def is_full(self) -> bool:
        """Whether all requests are rejected now, because the queue is full and there is no cache."""
        return self._cache is None and self.state == "ready" and self.num_in_flight >= self.settings.max_queue

    async def start(self) -> None:
        """Warms up and verifies the session, then accepts requests. Raises as `ArtifactRuntime.warm_up`."""
        await asyncio.get_running_loop().run_in_executor(self._threads.run, self.runtime.warm_up)
        self.state = "ready"

    async def predict(self, request: CheckedRequest, *, deadline: float | None = None) -> PipelineResult:
        """Predicts one validated prompt, which is dropped if it is still queued at the time `deadline`.
        Raises as `errors`; InputError for a text without tokens, TailcastError for bad predictions."""
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
        """Rejects new requests with `ClosedError`, and closes after the requests in flight."""
        self.state = "shutting down"
        await self._empty.wait()
        await self._batcher.close()

    async def _predict(self, request: CheckedRequest, deadline: float | None) -> PipelineResult:
        prompt = request.prompt
        start = time.perf_counter()
        tokens = prompt if isinstance(prompt, TokenizedPrompt) else await self._tokenized(prompt)
        tokenize_s = time.perf_counter() - start
        if len(tokens.ids) == 0:
            raise InputError("prompt", "a text without tokens", "a text with at least one token")
        batched = await self._batcher.submit(
            (tokens, request), length=max(1, tokens.num_tokens), deadline=deadline
        )
        numbers, inference_s = batched.result
        return PipelineResult(
            prediction=self.runtime.prediction(numbers),
            prompt_tokens=tokens.num_tokens,
            truncated=tokens.truncated,
            tokenize_s=tokenize_s,
            # A batch passed to the workers still waits for an idle one.
            queue_s=batched.queue_s + max(0.0, batched.work_s - inference_s),
            inference_s=inference_s,
            batch_size=batched.batch_size,
            prompt_chars=len(prompt) if isinstance(prompt, str) else 0,
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

    def _run(self, rows: Sequence[_Row], callback: Callback[_Output]) -> None:
        """Predicts in a thread, then calls the callback in the event loop; `loop.run_in_executor` would add a
        future and two iterations of the loop per call."""
        loop = asyncio.get_running_loop()

        def on_done(future: Future[list[_Output]]) -> None:
            error = future.exception()
            with contextlib.suppress(RuntimeError):  # the loop is closed, and the result is not needed
                loop.call_soon_threadsafe(callback, None if error is not None else future.result(), error)

        self._threads.run.submit(self._run_rows, rows).add_done_callback(on_done)

    def _run_rows(self, rows: Sequence[_Row]) -> list[_Output]:
        """The output of each row; runs in a thread."""
        start = time.perf_counter()
        try:
            predicted = self.runtime.run(
                [tokens.ids for tokens, _ in rows],
                [request.served_model for _, request in rows],
                [request.temperature for _, request in rows],
            ).rows()
        except Exception:
            self.metrics.failed_batches.inc()
            logger.exception("a batch of %d prompts failed", len(rows))
            raise
        inference_s = time.perf_counter() - start
        self.metrics.batch([max(1, tokens.num_tokens) for tokens, _ in rows], inference_s)
        return [(numbers, inference_s) for numbers in predicted]


def cache_key(prompt: str | TokenizedPrompt, served_model: str | None, temperature: float | None) -> bytes:
    """128-bit hash of all inputs of a prediction."""
    parts = (prompt if isinstance(prompt, str) else prompt.ids.tobytes(), served_model or "", temperature)
    # Version 0 does not encode shared or interned objects, so equal parts have equal bytes.
    return hashlib.blake2b(marshal.dumps(parts, 0), digest_size=16).digest()
