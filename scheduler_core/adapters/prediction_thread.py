"""Predictions for a scheduler that must not wait: requested and received by a thread of their own."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from scheduler_core.predictor import AsyncPredictor, PredictionEvent, PredictionRequest, PredictionStatus

logger = logging.getLogger("vllm.tailcast")  # below vLLM's logger, so that its handlers show it

CLOSE_S = 5.0
_MARK = "tailcast-mark-of-the-message"


class PromptDecoder:
    """Token ids to the prompt's text: an engine's scheduler only has token ids. May be called in any thread.

    `tokenizer` is the served model's, with `decode` and `apply_chat_template` of transformers; `whole`: decode the whole
    text, also of a chat with one user message.
    """

    def __init__(self, tokenizer: Any, *, whole: bool = False) -> None:
        self._tokenizer = tokenizer
        #: The chat template's text before and behind a single user message; both empty without one.
        self._frame = ("", "")
        if not whole:
            message = {"role": "user", "content": _MARK}
            # Templates are programs of others: whatever they raise, there is no frame.
            with suppress(Exception):
                text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
                head, mark, tail = text.partition(_MARK)
                self._frame = (head, tail) if mark else ("", "")

    def __call__(self, token_ids: Sequence[int]) -> str:
        """The only user message of a chat as it stands; else the text without special tokens.

        A chat has one user message if its text begins and ends as the chat template begins and ends around one.
        """
        ids = list(token_ids)
        head, tail = self._frame
        if head or tail:
            text = self._tokenizer.decode(ids, skip_special_tokens=False)
            if text.startswith(head) and text.endswith(tail) and len(text) >= len(head) + len(tail):
                inner: str = text[len(head) : len(text) - len(tail)]
                if not any(piece and piece in inner for piece in (head, tail)):
                    return inner
        plain: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return plain


class PredictionThread:
    """Runs an `AsyncPredictor` in a thread; every query comes back as one event in any case. `decode`, token ids to text, is called
    in the thread here; None: requests come with their prompts.

    `submit`, `withdraw`, `take` and `close` are called by one thread at a time, the scheduler's; none but `close` waits.
    """

    def __init__(
        self, collector: AsyncPredictor, decode: Callable[[Sequence[int]], str] | None = None
    ) -> None:
        self._collector = collector
        self._decode = decode
        #: Ids of requests whose events have not come.
        self._pending: set[str] = set()
        self._events: deque[PredictionEvent] = deque()
        self._loop = asyncio.new_event_loop()
        self._collecting = self._loop.create_task(self._collect())
        self._thread = threading.Thread(target=self._run, name="tailcast-predictions", daemon=True)
        self._thread.start()

    def submit(self, request: PredictionRequest, token_ids: Sequence[int] | None = None) -> None:
        """Queries the predictor; the event comes later, or is there at once after `close`. `token_ids` is the prompt; None:
        that of `request`, and if that is empty there is no text, as with embeddings."""
        self._pending.add(request.request_id)
        if self._loop.is_closed():
            self._fail(request.request_id, "the predictor's thread has ended")
        else:
            self._loop.call_soon_threadsafe(self._send, request, token_ids)

    def withdraw(self, request_id: str) -> None:
        """The request has left: a query that was not sent is dropped."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._collector.withdraw, request_id)

    def take(self) -> list[PredictionEvent]:
        """The events since the last call."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def close(self) -> None:
        """Ends the thread; waits for it a few seconds at most."""
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._close(), self._loop)
            self._thread.join(CLOSE_S)
        for request_id in list(self._pending):
            self._fail(request_id, "the predictor's thread has ended")

    def _put(self, event: PredictionEvent) -> None:
        if event.request_id in self._pending:
            self._pending.remove(event.request_id)
            self._events.append(event)

    def _fail(self, request_id: str, error: str) -> None:
        self._put(PredictionEvent(request_id, None, error, 0.0, PredictionStatus.FAILED))

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    async def _collect(self) -> None:
        while True:
            self._put(await self._collector.next_event())

    async def _close(self) -> None:
        try:
            await self._collector.close()
        except Exception:  # a predictor of others may raise anything; the engine goes on
            logger.exception("the predictor could not be closed")
        self._collecting.cancel()
        await asyncio.gather(self._collecting, return_exceptions=True)
        for event in self._collector.ready_events():
            self._put(event)
        self._loop.stop()

    def _send(self, request: PredictionRequest, token_ids: Sequence[int] | None) -> None:
        if token_ids is None and not request.prompt:
            self._fail(request.request_id, "the prompt has no text")
            return
        try:
            if token_ids is not None and self._decode is not None:
                request = replace(request, prompt=self._decode(token_ids))
            self._collector.submit(request)
        except Exception as error:  # a tokenizer of others may raise anything; the engine goes on
            self._fail(request.request_id, f"{type(error).__name__}: {error}")
