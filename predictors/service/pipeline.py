"""Text in, prediction out: tokenize, queue, run. Model calls and the tokenizing of long texts happen in threads."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from predictors.artifact import Artifact
from predictors.manifest import checked_temperature
from predictors.predicted import Predicted, PredictedRow, check_range
from predictors.service.batcher import Answer, Batcher, Done
from predictors.service.cache import LruCache, cache_key
from predictors.service.clock import Clock, LoopClock
from predictors.service.errors import BatchError, ClosedError, QueueFullError
from predictors.service.grouping import BatchingSettings
from predictors.service.metrics import ArtifactMetrics
from predictors.service.threads import ServiceThreads, submit
from scheduler_core.errors import InputError

logger = logging.getLogger(__name__)

# Up to so many characters a prompt is tokenized in the event loop: in less than a quarter of a millisecond, which is
# less than what a thread on a busy machine waits for its turn.
MAX_INLINE_CHARS = 1000
TOKENISE_BATCH = 32  # longer texts per hop to the tokenizing thread


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

    @property
    def vocabulary_size(self) -> int | None:
        """Token ids are below it; None where the model reads none."""
        ...

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
    """One row of a batch; rows of different served models and temperatures share batches."""

    prompt: ReadPrompt
    served_model: str | None
    temperature: float | None


class _RowResult(NamedTuple):
    """The prediction of one row, and the seconds of its model call."""

    prediction: PredictedRow
    inference_s: float


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
        self._batcher: Batcher[_Row, _RowResult] = Batcher(self._run, settings=settings, clock=self.clock)

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
        """Warms the session up and verifies it; requests are accepted from then on.

        Raises:
            TailcastError: The model fails, or gives numbers that no scheduler can use.
        """
        await asyncio.get_running_loop().run_in_executor(self._threads.run, self.runtime.warm_up)
        self._state = "ready"

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
        if isinstance(prompt, TokenIds):
            tokens: ReadPrompt = prompt
        elif len(prompt) <= MAX_INLINE_CHARS:
            begin = time.perf_counter()
            try:
                [tokens] = self.runtime.tokenizer([prompt])
            except Exception as error:
                logger.exception("a prompt could not be tokenized")
                raise BatchError(error) from error
            tokenise_s = time.perf_counter() - begin
        else:
            tokenised: Answer[ReadPrompt] = await self._tokeniser.submit(prompt, length=1, deadline=deadline)
            tokenise_s = tokenised.queue_s + tokenised.work_s
            tokens = tokenised.result
        if len(tokens.values) == 0:
            raise InputError("prompt", "a text without tokens", "a text with at least one token")
        answer = await self._batcher.submit(
            _Row(tokens, served_model, temperature), length=max(1, tokens.num_tokens), deadline=deadline
        )
        result = answer.result
        check_range(result.prediction)
        return Prediction(
            found=result.prediction,
            prompt_tokens=tokens.num_tokens,
            truncated=tokens.truncated,
            tokenise_s=tokenise_s,
            # A batch that was handed over still waits until a worker is free.
            queue_s=answer.queue_s + max(0.0, answer.work_s - result.inference_s),
            inference_s=result.inference_s,
            batch_size=answer.batch_size,
        )

    def _tokenise(self, prompts: Sequence[str], done: Done[ReadPrompt]) -> None:
        submit(self._threads.tokenise, done, self.runtime.tokenizer, prompts)

    def _run(self, rows: Sequence[_Row], done: Done[_RowResult]) -> None:
        submit(self._threads.run, done, self._run_rows, rows)

    def _run_rows(self, rows: Sequence[_Row]) -> list[_RowResult]:
        """Runs in a thread."""
        begin = time.perf_counter()
        try:
            predictions = self.runtime.run(
                [row.prompt.values for row in rows],
                [row.served_model for row in rows],
                [row.temperature for row in rows],
                lexical=[row.prompt.lexical for row in rows],
            ).rows()
        except Exception:
            self._metrics.failed_batch()
            logger.exception("a batch of %d prompts failed", len(rows))
            raise
        inference_s = time.perf_counter() - begin
        self._metrics.batch([max(1, row.prompt.num_tokens) for row in rows], inference_s)
        return [_RowResult(prediction, inference_s) for prediction in predictions]
