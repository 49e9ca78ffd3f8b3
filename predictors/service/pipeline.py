"""Text in, prediction out: tokenise, queue, run; the CPU work happens in threads, never in the event loop."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from predictors.artifact import Artifact
from predictors.manifest import checked_temperature
from predictors.predicted import Predicted, PredictedRow
from predictors.service.batcher import Answer, Batcher, Done
from predictors.service.cache import LruCache, cache_key
from predictors.service.clock import Clock, LoopClock
from predictors.service.errors import ClosedError, QueueFullError
from predictors.service.grouping import BatchingSettings
from predictors.service.metrics import ArtifactMetrics
from predictors.service.threads import ServiceThreads
from scheduler_core.errors import InputError, TailcastError
from scheduler_core.predictions import LengthPrediction

logger = logging.getLogger(__name__)

TOKENISE_BATCH = 32  # texts per hop to the tokenising thread
PROBES = ("Name three rivers.", "Write a long essay about the sea, and then some more about rivers.")


class ReadPrompt(Protocol):
    """A prompt as the model reads it."""

    @property
    def values(self) -> NDArray[Any]:
        """Token ids or features."""
        ...

    @property
    def lexical(self) -> NDArray[np.float32] | None:
        """Lexical features that an encoder reads beside the tokens; None: unknown, or not read."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens that are read; 0 where features are."""
        ...

    @property
    def truncated(self) -> bool:
        """Whether the prompt was longer than what is read."""
        ...


class Tokenizer(Protocol):
    """Text to what the model reads, callable from a thread."""

    def __call__(self, prompts: Sequence[str]) -> Sequence[ReadPrompt]: ...


class Runtime(Protocol):
    """What the pipeline needs of `predictors.runtime.ArtifactRuntime`."""

    artifact: Artifact
    provider: str

    @property
    def tokenizer(self) -> Tokenizer: ...

    def run(
        self,
        prompts: Sequence[NDArray[Any]],
        served_models: Sequence[str | None] | None = None,
        temperatures: Sequence[float | None] | None = None,
        *,
        lexical: Sequence[NDArray[np.float32] | None] | None = None,
    ) -> Predicted: ...

    def warm_up(self) -> None: ...


class Prediction(NamedTuple):
    """One prompt's prediction and what it cost; found in the cache it cost nothing.

    A tuple, as all that is made anew for each request: a frozen dataclass takes three times as long to make.
    """

    found: PredictedRow
    prompt_tokens: int
    truncated: bool
    tokenise_s: float
    queue_s: float
    inference_s: float
    batch_size: int
    cached: bool = False


class _Row(NamedTuple):
    """One row of a batch; rows of different served models and temperatures share batches.

    A text is read in the thread that runs it, where that thread had nothing else to do; else it was read before.
    """

    prompt: str | ReadPrompt
    served_model: str | None
    temperature: float | None


class _Found(NamedTuple):
    """The prediction of one row, the prompt as it was read, and the seconds that reading took in the same thread."""

    row: PredictedRow | None
    read: ReadPrompt
    reading_s: float


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A prompt that comes as token ids, int64 [tokens]."""

    values: NDArray[Any]

    @property
    def num_tokens(self) -> int:
        """Tokens that are read."""
        return len(self.values)

    @property
    def truncated(self) -> bool:
        """Never: too many ids are refused."""
        return False

    @property
    def lexical(self) -> None:
        """Unknown: there is no text."""
        return None


class PredictionPipeline:
    """Bounded, batched predictions with one runtime.

    Args:
        runtime: Artifact to predict with.
        settings: Batching; `max_queue` bounds all requests inside, tokenising ones included.
        clock: Source of time; default: the event loop's.
        threads: Threads to work in; default: own ones.
        cache_entries: Predictions that are remembered; 0: none.
        metrics: Who counts; default: nobody.
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
        self._known_models = frozenset(runtime.artifact.manifest.served_models)
        self._knows_untold: bool | None = None  # `knows(None)`, once it was asked
        self._inside = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._state = "starting"
        self._own_threads = threads is None
        self._threads = threads or ServiceThreads(settings.num_workers)
        self._cache: LruCache[Prediction] | None = LruCache(cache_entries) if cache_entries else None
        self._metrics = metrics or ArtifactMetrics()
        self._tokeniser: Batcher[str, ReadPrompt] = Batcher(
            self._tokenise,
            settings=BatchingSettings(
                max_batch=TOKENISE_BATCH, max_wait_s=0.0, order="arrival", max_queue=settings.max_queue
            ),
            clock=self.clock,
        )
        self._batcher: Batcher[_Row, _Found] = Batcher(self._run, settings=settings, clock=self.clock)

    @property
    def num_inside(self) -> int:
        """Requests accepted and not yet answered."""
        return self._inside

    @property
    def state(self) -> str:
        """starting, ready or shutting down."""
        return self._state

    @property
    def is_full(self) -> bool:
        """Whether a request is refused whatever it asks: nothing is remembered, and no place is left."""
        return self._cache is None and self._state == "ready" and self._inside >= self.settings.max_queue

    async def start(self) -> None:
        """Warms the session up; requests are accepted from then on."""
        await self._threads.run.call(self.runtime.warm_up)
        self._state = "ready"

    async def verify(self) -> None:
        """Predicts some fixed prompts.

        Raises:
            TailcastError: The model fails, or gives numbers that no scheduler can use.
        """
        await self._threads.run.call(self._probe)

    def knows(self, served_model: str | None) -> bool:
        """Whether the artifact was trained on answers of that model.

        Raises:
            InputError: It cannot predict for it.
        """
        if served_model in self._known_models:
            return True
        if served_model is None and self._knows_untold is not None:
            return self._knows_untold
        known = self.runtime.artifact.manifest.served_model_number(served_model) > 0
        if served_model is None:
            self._knows_untold = known
        return known

    async def predict(
        self,
        prompt: str | TokenIds,
        *,
        served_model: str | None = None,
        temperature: float | None = None,
        deadline: float | None = None,
    ) -> Prediction:
        """Predicts one prompt.

        Args:
            prompt: The text, truncated to what the model reads; or token ids, at most max_length of them, each of
                the artifact's vocabulary (who asks has to check that).
            served_model: Name of the LLM that will answer; None: not told.
            temperature: Its sampling temperature, at least 0; None: not told.
            deadline: Time of the clock after which no more work is done for it.

        Raises:
            ClosedError: Not started yet, or closing.
            QueueFullError: Too many requests inside; raised at once.
            ExpiredError: The deadline passed in the queue.
            BatchError: The model or tokenizer failed.
            InputError: The text has no tokens, or the served model or the temperature cannot be had.
            TailcastError: The model gave numbers that no scheduler can use.
        """
        if self._state != "ready":
            raise ClosedError(self._state)
        # Checked here: in a batch it would fail its neighbours too.
        self.knows(served_model)
        checked_temperature(temperature)
        key = None
        if self._cache is not None:
            values = prompt if isinstance(prompt, str) else prompt.values
            key = cache_key(values, served_model, temperature)
            found = self._cache.get(key)
            self._metrics.cache(found is not None)
            if found is not None:
                return found
        if self._inside >= self.settings.max_queue:
            raise QueueFullError(self.settings.max_queue)
        self._inside += 1
        self._metrics.entered()
        self._empty.clear()
        try:
            prediction = await self._predict(prompt, served_model, temperature, deadline)
        finally:
            self._inside -= 1
            self._metrics.left()
            if self._inside == 0:
                self._empty.set()
        if self._cache is not None and key is not None:
            remembered = prediction._replace(
                tokenise_s=0.0, queue_s=0.0, inference_s=0.0, batch_size=0, cached=True
            )
            self._cache.put(key, remembered)
        return prediction

    def refuse_new(self) -> None:
        """Lets what is inside finish; new requests get `ClosedError`."""
        self._state = "shutting down"

    async def close(self, *, drain: bool = True) -> None:
        """Ends the pipeline; what is inside is answered first, or failed without `drain`."""
        self.refuse_new()
        if drain:
            await self._empty.wait()
        await self._tokeniser.close(drain=False)
        await self._batcher.close(drain=False)
        if self._own_threads:
            self._threads.close()

    async def _predict(
        self,
        prompt: str | TokenIds,
        served_model: str | None,
        temperature: float | None,
        deadline: float | None,
    ) -> Prediction:
        tokenise_s = 0.0
        reads_later = isinstance(prompt, str) and self._batcher.starts_at_once and self._is_tokeniser_idle
        if isinstance(prompt, TokenIds):
            row, length = _Row(prompt, served_model, temperature), prompt.num_tokens
        elif reads_later:
            # A worker is free and nobody is waiting: reading the text in the same thread saves a hop.
            row, length = _Row(prompt, served_model, temperature), 1
        else:
            tokenised: Answer[ReadPrompt] = await self._tokeniser.submit(prompt, length=1, deadline=deadline)
            tokenise_s = tokenised.queue_s + tokenised.work_s
            read = tokenised.result
            _check_tokens(read)
            row, length = _Row(read, served_model, temperature), max(1, read.num_tokens)
        answer = await self._batcher.submit(row, length=length, deadline=deadline)
        found = answer.result
        if found.row is None:
            _check_tokens(found.read)
        assert found.row is not None
        check_range(found.row)
        return Prediction(
            found=found.row,
            prompt_tokens=found.read.num_tokens,
            truncated=found.read.truncated,
            tokenise_s=tokenise_s + found.reading_s,
            queue_s=answer.queue_s,
            inference_s=max(0.0, answer.work_s - found.reading_s),
            batch_size=answer.batch_size,
        )

    @property
    def _is_tokeniser_idle(self) -> bool:
        return self._tokeniser.num_waiting == 0 and self._tokeniser.num_running == 0

    def _probe(self) -> None:
        reads = [read for read in self.runtime.tokenizer(PROBES) if len(read.values) > 0]
        names = self.runtime.artifact.manifest.served_models
        if reads:
            found = self.runtime.run(
                [read.values for read in reads],
                [names[0] if names else None] * len(reads),
                lexical=[read.lexical for read in reads],
            )
            for row in found.rows():
                check_range(row)

    def _tokenise(self, prompts: Sequence[str], done: Done[ReadPrompt]) -> None:
        self._threads.tokenise.submit(done, self.runtime.tokenizer, prompts)

    def _run(self, rows: Sequence[_Row], done: Done[_Found]) -> None:
        self._threads.run.submit(done, self._run_rows, rows)

    def _run_rows(self, rows: Sequence[_Row]) -> list[_Found]:
        """Runs in a thread. A text without tokens gets no prediction and leaves the others theirs."""
        try:
            start = time.perf_counter()
            reads = [
                self.runtime.tokenizer([row.prompt])[0] if isinstance(row.prompt, str) else row.prompt
                for row in rows
            ]
            reading_s = time.perf_counter() - start
            filled = [number for number, read in enumerate(reads) if len(read.values) > 0]
            found: list[PredictedRow | None] = [None] * len(rows)
            if filled:
                begin = time.perf_counter()
                predicted = self.runtime.run(
                    [reads[number].values for number in filled],
                    [rows[number].served_model for number in filled],
                    [rows[number].temperature for number in filled],
                    lexical=[reads[number].lexical for number in filled],
                ).rows()
                lengths = [max(1, reads[number].num_tokens) for number in filled]
                self._metrics.batch(lengths, time.perf_counter() - begin)
                for number, row in zip(filled, predicted, strict=True):
                    found[number] = row
        except Exception:
            self._metrics.failed_batch()
            logger.exception("a batch of %d prompts failed", len(rows))
            raise
        return [
            _Found(row, read, reading_s if isinstance(asked.prompt, str) else 0.0)
            for row, read, asked in zip(found, reads, rows, strict=True)
        ]


def _check_tokens(read: ReadPrompt) -> None:
    if len(read.values) == 0:
        raise InputError("prompt", "a text without tokens", "a text with at least one token")


def check_range(found: PredictedRow) -> None:
    """Raises TailcastError for numbers that are not the caller's fault and that no scheduler can use."""
    if found.mu is not None and found.sigma is not None and found.nu is not None:
        try:
            LengthPrediction(found.mu, found.sigma, found.nu)
        except InputError as error:
            raise TailcastError(
                f"the model gave mu = {found.mu}, sigma = {found.sigma}, nu = {found.nu}: {error}"
            ) from error
    for name in ("sigma_within", "regression_tokens", "rank"):
        value = getattr(found, name)
        if value is not None and not math.isfinite(value):
            raise TailcastError(f"the model gave {name} = {value}")
    for name in ("urgency", "bucket"):
        values = getattr(found, name)
        if values is not None and not all(map(math.isfinite, values)):
            raise TailcastError(f"the model gave {name} = {values}")
