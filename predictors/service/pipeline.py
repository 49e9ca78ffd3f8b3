"""Text in, prediction out: tokenise, queue, run; the CPU work happens in threads, never in the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from predictors.artifact import Artifact
from predictors.manifest import checked_temperature
from predictors.predicted import Predicted, PredictedRow
from predictors.service.batcher import Batcher
from predictors.service.clock import Clock, LoopClock
from predictors.service.errors import ClosedError, QueueFullError
from predictors.service.grouping import BatchingSettings
from scheduler_core.errors import InputError, TailcastError
from scheduler_core.predictions import LengthPrediction

logger = logging.getLogger(__name__)

TOKENISE_BATCH = 32  # texts per hop to the tokenising thread


class ReadPrompt(Protocol):
    """A prompt as the model reads it."""

    @property
    def values(self) -> NDArray[Any]:
        """Token ids or features."""
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
    ) -> Predicted: ...

    def warm_up(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One prompt's prediction and what it cost."""

    found: PredictedRow
    prompt_tokens: int
    truncated: bool
    tokenise_s: float
    queue_s: float
    inference_s: float
    batch_size: int


@dataclass(frozen=True, slots=True)
class _Row:
    """One row of a batch; rows of different served models and temperatures share batches."""

    values: NDArray[Any]
    served_model: str | None
    temperature: float | None


class PredictionPipeline:
    """Bounded, batched predictions with one runtime.

    Args:
        runtime: Artifact to predict with.
        settings: Batching; `max_queue` bounds all requests inside, tokenising ones included.
        clock: Source of time; default: the event loop's.
    """

    def __init__(self, runtime: Runtime, settings: BatchingSettings, clock: Clock | None = None) -> None:
        self.runtime = runtime
        self.settings = settings
        self.clock: Clock = clock or LoopClock()
        self._inside = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._state = "starting"
        self._tokenise_pool = ThreadPoolExecutor(1, thread_name_prefix="tailcast-tokenise")
        self._run_pool = ThreadPoolExecutor(settings.num_workers, thread_name_prefix="tailcast-run")
        self._tokeniser: Batcher[str, ReadPrompt] = Batcher(
            self._tokenise,
            settings=BatchingSettings(
                max_batch=TOKENISE_BATCH, max_wait_s=0.0, order="arrival", max_queue=settings.max_queue
            ),
            clock=self.clock,
        )
        self._batcher: Batcher[_Row, PredictedRow] = Batcher(self._run, settings=settings, clock=self.clock)

    @property
    def num_inside(self) -> int:
        """Requests accepted and not yet answered."""
        return self._inside

    async def start(self) -> None:
        """Warms the session up; requests are accepted from then on."""
        await asyncio.get_running_loop().run_in_executor(self._run_pool, self.runtime.warm_up)
        self._state = "ready"

    async def predict(
        self,
        prompt: str,
        *,
        served_model: str | None = None,
        temperature: float | None = None,
        deadline: float | None = None,
    ) -> Prediction:
        """Predicts one prompt.

        Args:
            prompt: The text; longer than the model reads is truncated.
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
        if self._inside >= self.settings.max_queue:
            raise QueueFullError(self.settings.max_queue)
        # Checked here: in a batch it would fail its neighbours too.
        self.runtime.artifact.manifest.served_model_number(served_model)
        checked_temperature(temperature)
        self._inside += 1
        self._empty.clear()
        try:
            tokenised = await self._tokeniser.submit(prompt, length=1, deadline=deadline)
            read = tokenised.result
            if len(read.values) == 0:
                raise InputError("prompt", prompt, "a text with at least one token")
            answer = await self._batcher.submit(
                _Row(read.values, served_model, temperature),
                length=max(1, read.num_tokens),
                deadline=deadline,
            )
        finally:
            self._inside -= 1
            if self._inside == 0:
                self._empty.set()
        self._check_range(answer.result)
        return Prediction(
            found=answer.result,
            prompt_tokens=read.num_tokens,
            truncated=read.truncated,
            tokenise_s=tokenised.queue_s + tokenised.work_s,
            queue_s=answer.queue_s,
            inference_s=answer.work_s,
            batch_size=answer.batch_size,
        )

    def _check_range(self, found: PredictedRow) -> None:
        """Raises TailcastError for numbers that are not the caller's fault and that no scheduler can use."""
        if found.mu is not None and found.sigma is not None and found.nu is not None:
            try:
                LengthPrediction(found.mu, found.sigma, found.nu)
            except InputError as error:
                raise TailcastError(
                    f"the model gave mu = {found.mu}, sigma = {found.sigma}, nu = {found.nu}: {error}"
                ) from error
        for name in ("urgency", "bucket", "regression_tokens", "rank"):
            value = getattr(found, name)
            if value is not None and not np.isfinite(value).all():
                raise TailcastError(f"the model gave {name} = {value}")

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
        self._tokenise_pool.shutdown()
        self._run_pool.shutdown()

    async def _tokenise(self, prompts: Sequence[str]) -> Sequence[ReadPrompt]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._tokenise_pool, self.runtime.tokenizer, prompts)

    async def _run(self, rows: Sequence[_Row]) -> list[PredictedRow]:
        loop = asyncio.get_running_loop()
        try:
            predicted = await loop.run_in_executor(
                self._run_pool,
                self.runtime.run,
                [row.values for row in rows],
                [row.served_model for row in rows],
                [row.temperature for row in rows],
            )
        except Exception:
            logger.exception("a batch of %d prompts failed", len(rows))
            raise
        return predicted.rows()
