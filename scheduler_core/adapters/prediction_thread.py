"""Predictions for a scheduler that must not wait: asked for and received by a thread of their own."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scheduler_core.errors import TailcastError
from scheduler_core.predictor import (
    AsyncPredictor,
    PredictionEvent,
    PredictionRequest,
    PredictionStatus,
    Predictor,
)

logger = logging.getLogger("vllm.tailcast")  # below vLLM's logger, so that its handlers show it

CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class Question:
    """A request whose prediction is wanted.

    Attributes:
        request_id: Id of the request.
        token_ids: Its prompt; None: there is no text, as with embeddings.
        max_tokens: Its cap on output tokens.
        served_model: See `PredictionRequest`.
        temperature: See `PredictionRequest`.
    """

    request_id: str
    token_ids: Sequence[int] | None
    max_tokens: int
    served_model: str = ""
    temperature: float | None = None


class PredictionThread:
    """Runs an `AsyncPredictor` in a thread; every question comes back as one event, whatever happens.

    `submit`, `withdraw` and `take` return at once and are called by one thread, the scheduler's. Text is made of token ids
    in the thread here, too.

    Args:
        predictor: Whom to ask.
        read: Token ids to text.
        max_in_flight, max_batch, timeout_s: As of `AsyncPredictor`.
    """

    def __init__(
        self,
        predictor: Predictor,
        read: Callable[[Sequence[int]], str],
        *,
        max_in_flight: int = 64,
        max_batch: int = 1,
        timeout_s: float | None = None,
    ) -> None:
        self._read = read
        self._limits = (max_in_flight, max_batch, timeout_s)
        self._predictor = predictor
        self._inbox: deque[Question | str] = deque()
        self._events: deque[PredictionEvent] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tailcast-predictions", daemon=True)
        self._thread.start()
        self._is_ready.wait()

    def submit(self, question: Question) -> None:
        """Asks; the event comes later, or is there at once if the thread has ended."""
        self._inbox.append(question)
        self._wake()

    def withdraw(self, request_id: str) -> None:
        """The request has left: what was not sent is not sent any more."""
        self._inbox.append(request_id)
        self._wake()

    def take(self) -> list[PredictionEvent]:
        """The events since the last call."""
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def close(self) -> None:
        """Ends the thread; waits for it a few seconds at most."""
        loop, stop = self._loop, self._stop
        if loop is not None and stop is not None:
            try:
                loop.call_soon_threadsafe(stop.set)
            except RuntimeError:  # the loop has ended meanwhile
                return
            self._thread.join(CLOSE_S)

    def _wake(self) -> None:
        """One wake-up empties the whole inbox; an item behind others already has one under way."""
        if len(self._inbox) > 1 and self._thread.is_alive():
            return
        loop = self._loop
        try:
            if loop is None:
                raise RuntimeError("no event loop")
            loop.call_soon_threadsafe(self._empty_inbox)
        except RuntimeError:
            self._refuse_inbox()

    def _refuse_inbox(self) -> None:
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, Question):
                self._fail(item.request_id, "the predictor's thread has ended")

    def _fail(self, request_id: str, error: str) -> None:
        self._events.append(PredictionEvent(request_id, None, error, 0.0, PredictionStatus.FAILED))

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception:
            logger.exception("predictions have ended; requests are served without them")
        finally:
            self._loop = None
            self._is_ready.set()

    async def _serve(self) -> None:
        max_in_flight, max_batch, timeout_s = self._limits
        self._collector = AsyncPredictor(
            self._predictor, max_in_flight=max_in_flight, max_batch=max_batch, timeout_s=timeout_s
        )
        self._stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        collecting = asyncio.create_task(self._collect())
        self._is_ready.set()
        await self._stop.wait()
        self._loop = None
        await self._collector.close()
        collecting.cancel()
        self._events.extend(self._collector.ready_events())
        self._refuse_inbox()

    async def _collect(self) -> None:
        while True:
            self._events.append(await self._collector.next_event())

    def _empty_inbox(self) -> None:
        while self._inbox:
            # Taken out last, so that whoever puts something behind it wakes nobody and it is still seen here.
            item = self._inbox[0]
            if isinstance(item, Question):
                self._ask(item)
            else:
                self._collector.withdraw(item)
            self._inbox.popleft()

    def _ask(self, question: Question) -> None:
        if question.token_ids is None:
            self._fail(question.request_id, "the prompt has no text")
            return
        try:
            prompt = self._read(question.token_ids)
            self._collector.submit(
                PredictionRequest(
                    question.request_id,
                    prompt,
                    question.max_tokens,
                    question.served_model,
                    question.temperature,
                )
            )
        except TailcastError as error:
            self._fail(question.request_id, str(error))
        except Exception as error:  # a tokenizer of others may raise anything; the engine goes on
            self._fail(question.request_id, f"{type(error).__name__}: {error}")
