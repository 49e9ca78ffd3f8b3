"""Prompt in, prediction out: tokenize, queue, run. Model calls and the tokenizing of long texts happen in threads."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import os
import struct
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, TypeVar, TypeVarTuple, Unpack

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray

from predictors.artifact import Artifact
from predictors.manifest import checked_temperature
from predictors.runtime import Predicted, PredictedRow, check_range
from predictors.service.batcher import BatchedResult, Batcher, BatchingSettings, Callback, Clock, LoopClock
from predictors.service.errors import BatchError, ClosedError, QueueFullError
from predictors.service.metrics import ArtifactMetrics, ServiceMetrics
from predictors.tokenizer import TokenizedPrompt
from scheduler_core.errors import InputError

logger = logging.getLogger(__name__)

A = TypeVarTuple("A")
R = TypeVar("R")

# Up to so many characters a prompt is tokenized in the event loop: in less than a quarter of a millisecond, which is
# less than what a thread on a busy machine waits for its turn.
MAX_INLINE_CHARS = 1000
TOKENIZE_BATCH = 32  # longer texts per hop to the tokenizing thread


class Tokenizer(Protocol):
    """Text to token ids, callable from a thread."""

    @property
    def vocabulary_size(self) -> int:
        """Token ids are below it."""
        ...

    def __call__(self, prompts: Sequence[str]) -> Sequence[TokenizedPrompt]: ...


class Runtime(Protocol):
    """The part of `predictors.runtime.ArtifactRuntime` that the pipeline uses."""

    artifact: Artifact
    provider: str

    @property
    def tokenizer(self) -> Tokenizer: ...

    def run(
        self,
        prompts: Sequence[NDArray[Any]],
        served_models: Sequence[str | None] | None = None,
        temperatures: Sequence[float | None] | None = None,
    ) -> Predicted: ...

    def warm_up(self) -> None: ...


class PipelineResult(NamedTuple):
    """One prompt's prediction and its cost; 0 for one from the cache.

    A tuple, as everything created per request: a frozen dataclass takes three times as long to make.
    """

    prediction: PredictedRow
    prompt_tokens: int
    truncated: bool
    tokenize_s: float
    queue_s: float
    inference_s: float
    batch_size: int
    cached: bool = False


class _Row(NamedTuple):
    """One row of a batch; rows of different served models and temperatures share batches."""

    prompt: TokenizedPrompt
    served_model: str | None
    temperature: float | None


class _RowResult(NamedTuple):
    """The prediction of one row, and the seconds of its model call."""

    prediction: PredictedRow
    inference_s: float


class ServiceThreads:
    """The threads of one server, shared by its artifacts: one that tokenizes, and those of the model calls.

    Args:
        num_workers: Model calls at the same time, >= 1.
        cores: Cores of the model threads, one each; empty: the system places them. See `worker_cores`.
    """

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
    """Cores for the single-threaded model calls of one process, one core each.

    Linux often lets two busy threads share a core for tens of milliseconds while the event loop is all that another
    core has to do; at 70 % load this doubled the latency. With as many model threads as cores, threads that are bound
    to one core each cannot meet. With fewer there are idle cores to go to, and binding could put the threads of
    several services on the same ones.

    Args:
        num_workers: Model threads of each process.
        process: Number of the process, from 0.
        num_processes: Processes that share the machine's cores with this one.

    Returns:
        `num_workers` cores; none where cores and threads are not equal in number, or threads cannot be bound.
    """
    if not hasattr(os, "sched_getaffinity"):
        return []
    cores = sorted(os.sched_getaffinity(0))
    if num_workers * num_processes != len(cores):
        return []
    return cores[process * num_workers : (process + 1) * num_workers]


class PredictionPipeline:
    """Bounded, batched predictions with one runtime.

    Args:
        runtime: Artifact to predict with.
        settings: Batching; `max_queue` bounds all requests in the pipeline, tokenizing ones included.
        clock: Source of time; default: the event loop's.
        threads: Default: its own.
        cache_entries: Size of the cache of predictions; 0: no cache.
        metrics: Default: not exposed.
    """

    def __init__(
        self,
        runtime: Runtime,
        settings: BatchingSettings,
        clock: Clock | None = None,
        *,
        threads: ServiceThreads | None = None,
        cache_entries: int = 0,
        metrics: ArtifactMetrics | None = None,
    ) -> None:
        self.runtime = runtime
        self.settings = settings
        self.clock: Clock = clock or LoopClock()
        self._trained_models = frozenset(runtime.artifact.manifest.served_models)
        self._in_flight = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._state = "starting"
        self._owns_threads = threads is None
        self._threads = threads or ServiceThreads(settings.num_workers)
        self._cache: LRUCache[bytes, PipelineResult] | None = (
            LRUCache(cache_entries) if cache_entries else None
        )
        self._metrics = metrics or ServiceMetrics().artifact(runtime.artifact.manifest.artifact_id)
        self._tokenize_batcher: Batcher[str, TokenizedPrompt] = Batcher(
            self._tokenize,
            settings=BatchingSettings(
                max_batch=TOKENIZE_BATCH, max_wait_s=0.0, order="arrival", max_queue=settings.max_queue
            ),
            clock=self.clock,
        )
        self._batcher: Batcher[_Row, _RowResult] = Batcher(self._run, settings=settings, clock=self.clock)

    @property
    def num_in_flight(self) -> int:
        """Requests accepted and not yet answered."""
        return self._in_flight

    @property
    def state(self) -> str:
        """starting, ready or shutting down."""
        return self._state

    @property
    def is_full(self) -> bool:
        """Whether any request is refused now: there is no cache, and the queue is full."""
        return self._cache is None and self._state == "ready" and self._in_flight >= self.settings.max_queue

    async def start(self) -> None:
        """Warms the session up and verifies it; requests are accepted from then on.

        Raises:
            TailcastError: The model fails, or gives numbers that no scheduler can use.
        """
        await asyncio.get_running_loop().run_in_executor(self._threads.run, self.runtime.warm_up)
        self._state = "ready"

    def is_trained_on(self, served_model: str | None) -> bool:
        """Whether the artifact was trained on outputs of that model.

        Raises:
            InputError: It cannot predict for it.
        """
        if served_model in self._trained_models:
            return True
        return self.runtime.artifact.manifest.served_model_number(served_model) > 0

    async def predict(
        self,
        prompt: str | TokenizedPrompt,
        *,
        served_model: str | None = None,
        temperature: float | None = None,
        deadline: float | None = None,
    ) -> PipelineResult:
        """Predicts one prompt.

        Args:
            prompt: The text; or token ids, at most max_length of them, each of the artifact's vocabulary (checked by
                the caller).
            served_model: Name of the LLM of the request; None: unknown.
            temperature: Its sampling temperature, at least 0; None: unknown.
            deadline: Time of the clock after which no more work is done for it.

        Raises:
            ClosedError, QueueFullError, ExpiredError, BatchError: See `errors`.
            InputError: The text has no tokens, or the served model or the temperature is not allowed.
            TailcastError: The model gave numbers that no scheduler can use.
        """
        if self._state != "ready":
            raise ClosedError(self._state)
        # Checked here: in a batch it would fail its neighbors too.
        self.is_trained_on(served_model)
        checked_temperature(temperature)
        key = b""
        if self._cache is not None:
            key = cache_key(prompt, served_model, temperature)
            result = self._cache.get(key)
            self._metrics.cache(result is not None)
            if result is not None:
                return result
        if self._in_flight >= self.settings.max_queue:
            raise QueueFullError(self.settings.max_queue)
        self._in_flight += 1
        self._metrics.queue_length.inc()
        self._empty.clear()
        try:
            result = await self._predict(prompt, served_model, temperature, deadline)
        finally:
            self._in_flight -= 1
            self._metrics.queue_length.dec()
            if self._in_flight == 0:
                self._empty.set()
        if self._cache is not None:
            self._cache[key] = result._replace(
                tokenize_s=0.0, queue_s=0.0, inference_s=0.0, batch_size=0, cached=True
            )
        return result

    def refuse_new(self) -> None:
        """Refuses new requests with `ClosedError`; those in flight finish."""
        self._state = "shutting down"

    async def close(self, *, drain: bool = True) -> None:
        """Ends the pipeline; requests in flight are answered first, or failed without `drain`."""
        self.refuse_new()
        if drain:
            await self._empty.wait()
        await self._tokenize_batcher.close(drain=False)
        await self._batcher.close(drain=False)
        if self._owns_threads:
            self._threads.close()

    async def _predict(
        self,
        prompt: str | TokenizedPrompt,
        served_model: str | None,
        temperature: float | None,
        deadline: float | None,
    ) -> PipelineResult:
        tokenize_s = 0.0
        if isinstance(prompt, TokenizedPrompt):
            tokens: TokenizedPrompt = prompt
        elif len(prompt) <= MAX_INLINE_CHARS:
            begin = time.perf_counter()
            try:
                [tokens] = self.runtime.tokenizer([prompt])
            except Exception as error:
                logger.exception("a prompt could not be tokenized")
                raise BatchError(error) from error
            tokenize_s = time.perf_counter() - begin
        else:
            tokenized: BatchedResult[TokenizedPrompt] = await self._tokenize_batcher.submit(
                prompt, length=1, deadline=deadline
            )
            tokenize_s = tokenized.queue_s + tokenized.work_s
            tokens = tokenized.result
        if len(tokens.ids) == 0:
            raise InputError("prompt", "a text without tokens", "a text with at least one token")
        batched = await self._batcher.submit(
            _Row(tokens, served_model, temperature), length=max(1, tokens.num_tokens), deadline=deadline
        )
        prediction, inference_s = batched.result
        check_range(prediction)
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

    def _tokenize(self, prompts: Sequence[str], callback: Callback[TokenizedPrompt]) -> None:
        _submit(self._threads.tokenize, callback, self.runtime.tokenizer, prompts)

    def _run(self, rows: Sequence[_Row], callback: Callback[_RowResult]) -> None:
        _submit(self._threads.run, callback, self._run_rows, rows)

    def _run_rows(self, rows: Sequence[_Row]) -> list[_RowResult]:
        """Runs in a thread."""
        begin = time.perf_counter()
        try:
            predictions = self.runtime.run(
                [row.prompt.ids for row in rows],
                [row.served_model for row in rows],
                [row.temperature for row in rows],
            ).rows()
        except Exception:
            self._metrics.failed_batches.inc()
            logger.exception("a batch of %d prompts failed", len(rows))
            raise
        inference_s = time.perf_counter() - begin
        self._metrics.batch([max(1, row.prompt.num_tokens) for row in rows], inference_s)
        return [_RowResult(prediction, inference_s) for prediction in predictions]


def cache_key(prompt: str | TokenizedPrompt, served_model: str | None, temperature: float | None) -> bytes:
    """128 bits that two requests share only if they get the same prediction of the same artifact."""
    name = (served_model or "").encode()
    condition = b"" if temperature is None else struct.pack("<d", temperature)
    if isinstance(prompt, str):
        kind, content = b"text", prompt.encode("utf-8", "surrogatepass")
    else:
        kind, content = b"ids", np.ascontiguousarray(prompt.ids, dtype=np.int64).tobytes()
    # With the lengths of all parts but the last in front, no two sets of parts give the same bytes.
    lengths = struct.pack("<BBQ", len(kind), len(condition), len(name))
    return hashlib.blake2b(lengths + kind + condition + name + content, digest_size=16).digest()


def _submit(
    executor: ThreadPoolExecutor,
    callback: Callable[[R | None, BaseException | None], None],
    function: Callable[[Unpack[A]], R],
    *args: *A,
) -> None:
    """Calls `function` in a thread, then `callback` in the running event loop.

    `loop.run_in_executor` would make a second future and two more turns of the event loop for each call.
    """
    loop = asyncio.get_running_loop()

    def on_done(future: Future[R]) -> None:
        error = future.exception()
        result = None if error is not None else future.result()
        with contextlib.suppress(RuntimeError):  # the loop has been closed: nothing waits for the result
            loop.call_soon_threadsafe(callback, result, error)

    executor.submit(function, *args).add_done_callback(on_done)
