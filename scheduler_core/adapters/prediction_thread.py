"""Predictions for a scheduler that must not wait: requested and received by a thread of their own."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

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
_MARK = "tailcast-mark-of-the-message"


class PromptDecoder:
    """Token ids to the prompt's text: an engine's scheduler only has token ids. May be called in any thread.

    Args:
        tokenizer: The served model's, with `decode` and `apply_chat_template` of transformers.
        whole: Decode the whole text, also of a chat with one user message.
    """

    def __init__(self, tokenizer: Any, *, whole: bool = False) -> None:
        self._tokenizer = tokenizer
        self._frame = None if whole else _chat_frame(tokenizer)

    def __call__(self, token_ids: Sequence[int]) -> str:
        """The only user message of a chat as it stands; else the text without special tokens.

        A chat has one user message if its text begins and ends as the chat template begins and ends around one.
        """
        ids = list(token_ids)
        if self._frame is not None:
            head, tail = self._frame
            text = self._tokenizer.decode(ids, skip_special_tokens=False)
            if text.startswith(head) and text.endswith(tail) and len(text) >= len(head) + len(tail):
                inner: str = text[len(head) : len(text) - len(tail)]
                if not any(piece and piece in inner for piece in (head, tail)):
                    return inner
        plain: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return plain


def _chat_frame(tokenizer: Any) -> tuple[str, str] | None:
    """The chat template's text before and behind a single user message; None without a template."""
    try:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": _MARK}], tokenize=False, add_generation_prompt=True
        )
    except Exception:  # templates are programs of others: whatever they raise, there is no frame
        return None
    head, mark, tail = text.partition(_MARK)
    return (head, tail) if mark and (head or tail) else None


class PredictionThread:
    """Runs an `AsyncPredictor` in a thread; every query comes back as one event in any case.

    `submit`, `withdraw` and `take` return at once and are called by one thread, the scheduler's. Token ids are decoded in
    the thread here.
    """

    def __init__(
        self,
        predictor: Predictor,
        decode: Callable[[Sequence[int]], str],
        *,
        max_in_flight: int = 64,
        max_batch: int = 1,
        timeout_s: float | None = None,
    ) -> None:
        self._decode = decode
        self._limits = (max_in_flight, max_batch, timeout_s)
        self._predictor = predictor
        #: Ids of requests whose events have not come.
        self._pending: set[str] = set()
        self._events: deque[PredictionEvent] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tailcast-predictions", daemon=True)
        self._thread.start()
        self._is_ready.wait()

    def submit(self, request: PredictionRequest, token_ids: Sequence[int] | None) -> None:
        """Queries the predictor; the event comes later, or is there at once if the thread has ended.

        Args:
            request: The request, without its prompt.
            token_ids: Its prompt; None: there is no text, as with embeddings.
        """
        self._pending.add(request.request_id)
        if not self._call(self._send, request, token_ids):
            self._fail(request.request_id, "the predictor's thread has ended")

    def withdraw(self, request_id: str) -> None:
        """The request has left: a query that was not sent is dropped."""
        self._call(self._withdraw, request_id)

    def take(self) -> list[PredictionEvent]:
        """The events since the last call."""
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def close(self) -> None:
        """Ends the thread; waits for it a few seconds at most."""
        stop = self._stop
        if stop is not None and self._call(stop.set):
            self._thread.join(CLOSE_S)

    def _call(self, function: Callable[..., object], *arguments: object) -> bool:
        """Calls it in the thread; False if that has ended."""
        loop = self._loop
        try:
            if loop is not None:
                loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop has ended meanwhile
            return False
        return loop is not None

    def _put(self, event: PredictionEvent) -> None:
        try:
            self._pending.remove(event.request_id)
        except KeyError:  # it has its event
            return
        self._events.append(event)

    def _fail(self, request_id: str, error: str) -> None:
        self._put(PredictionEvent(request_id, None, error, 0.0, PredictionStatus.FAILED))

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception:
            logger.exception("predictions have ended; requests are served without them")
        finally:
            self._loop = None
            for request_id in list(self._pending):
                self._fail(request_id, "the predictor's thread has ended")
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
        for event in self._collector.ready_events():
            self._put(event)

    async def _collect(self) -> None:
        while True:
            self._put(await self._collector.next_event())

    def _withdraw(self, request_id: str) -> None:
        self._collector.withdraw(request_id)

    def _send(self, request: PredictionRequest, token_ids: Sequence[int] | None) -> None:
        if token_ids is None:
            self._fail(request.request_id, "the prompt has no text")
            return
        try:
            self._collector.submit(replace(request, prompt=self._decode(token_ids)))
        except TailcastError as error:
            self._fail(request.request_id, str(error))
        except Exception as error:  # a tokenizer of others may raise anything; the engine goes on
            self._fail(request.request_id, f"{type(error).__name__}: {error}")
