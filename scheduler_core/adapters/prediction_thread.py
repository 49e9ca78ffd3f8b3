"""Background thread that requests and receives predictions for a scheduler that must not block."""

import asyncio
import itertools
import logging
import re
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from scheduler_core.prediction.predictor import (
    AsyncPredictor,
    PredictionEvent,
    PredictionRequest,
    PredictionStatus,
)
from scheduler_core.prediction.prompt_text import ASSISTANT, ROLES, TOOL, USER, Message, user_text

logger = logging.getLogger("vllm.tailcast")  # below vLLM's logger, so that its handlers show it

CLOSE_S = 5.0
#: Texts of a user, the model and the user, to find out how a chat template separates them.
_MARKS = ("tailcast-mark-of-the-first", "tailcast-mark-of-the-second", "tailcast-mark-of-the-third")
#: Results of tools, which some templates put into user messages.
_TOOL_RESULT = re.compile(r"\s*<tool_response>\s*(.*?)\s*(?:</tool_response>\s*)?", re.DOTALL)


class PromptDecoder:
    """Decodes prompts, because the scheduler of an engine only has their token ids. Thread-safe.

    `tokenizer` is that of the served model, with `decode` and `apply_chat_template` of transformers. `whole`:
    always decode the whole text, also of a chat.
    """

    def __init__(self, tokenizer: Any, *, whole: bool = False) -> None:
        self._tokenizer = tokenizer
        #: Text of the chat template before and after a user message; both empty without a template.
        self._frame = ("", "")
        #: The text between two messages or before the first one, with the role of the next one as a group; None if the
        #: template does not name the roles.
        self._separator: re.Pattern[str] | None = None
        #: What a template adds: a system prompt where there is none, and the beginning of an output.
        self._added: tuple[Message, ...] = ()
        if not whole:
            # A template is third-party code that may raise any exception; then there is no frame.
            with suppress(Exception):
                self._frame = _user_frame(tokenizer)
                self._separator = _separator(tokenizer)
                *system, _, output = self._messages(_rendered(tokenizer, (USER,)))
                self._added = (*system, output)

    def __call__(self, token_ids: Sequence[int]) -> tuple[Message, ...]:
        """The messages of a chat, unchanged, or one of the user with the text without special tokens.

        A chat is recognized by the text of the template around a user message. If the template does not name the roles,
        only the last message of the user is found. What the template adds is left out.
        """
        ids = list(token_ids)
        if all(self._frame):
            messages = self._messages(self._tokenizer.decode(ids, skip_special_tokens=False))
            if any(message.role == USER for message in messages):
                return tuple(message for message in messages if message not in self._added)
        return (Message(USER, self._tokenizer.decode(ids, skip_special_tokens=True)),)

    def _messages(self, text: str) -> tuple[Message, ...]:
        if self._separator is None:
            head, tail = self._frame
            _, start, rest = text.rpartition(head)
            message, end, _ = rest.partition(tail)
            return (Message(USER, message),) if start and end and message.strip() else ()
        messages = []
        _, *parts = self._separator.split(text)
        for role, message in zip(parts[::2], parts[1::2], strict=True):
            result = _TOOL_RESULT.fullmatch(message)
            messages.append(Message(ROLES[role], message) if result is None else Message(TOOL, result[1]))
        return tuple(messages)


def _rendered(tokenizer: Any, roles: Sequence[str]) -> str:
    """The text of a chat of these roles, whose messages are `_MARKS`, by the template."""
    messages = [{"role": role, "content": mark} for role, mark in zip(roles, _MARKS, strict=False)]
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text


def _separator(tokenizer: Any) -> re.Pattern[str] | None:
    """A pattern of the text between two messages or before the first one, whose group is the role of the next message; None
    if a template does not name the roles."""
    text = _rendered(tokenizer, (USER, ASSISTANT, USER))
    first, to_model, to_user = (part for part in re.split("|".join(_MARKS), text)[:3])
    before = _common_start(to_model, to_user)
    after = to_user[len(before) :].removeprefix(USER)
    # White space at the end of a template may be missing after the last role.
    role = re.compile(f"({'|'.join(ROLES)})(?:{re.escape(after)}|{re.escape(after.rstrip())}$)")
    start = role.search(first)
    if start is None or not role.fullmatch(to_user, len(before)) or not role.fullmatch(to_model, len(before)):
        return None
    opening = re.escape(first[: start.start()])
    return re.compile(f"(?:^{opening}|{re.escape(before)}){role.pattern}")


def _user_frame(tokenizer: Any) -> tuple[str, str]:
    """The text of a chat template before and after each user message, wherever it is in the conversation."""
    text = _rendered(tokenizer, (USER, ASSISTANT, USER))
    parts = []
    for mark in _MARKS:
        part, _, text = text.partition(mark)
        parts.append(part)
    first, to_model, to_user, end = *parts, text
    return _common_start(first[::-1], to_user[::-1])[::-1], _common_start(to_model, end)


def _common_start(first: str, second: str) -> str:
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return "".join(char for char, _ in pairs)


class PredictionThread:
    """Runs an `AsyncPredictor` in a thread; every submitted request results in exactly one event. The thread
    calls `decode` to convert token ids to messages; None: requests already have their prompts.

    `submit`, `withdraw`, `take` and `close` must not be called concurrently; only `close` blocks.
    """

    def __init__(
        self, collector: AsyncPredictor, decode: Callable[[Sequence[int]], tuple[Message, ...]] | None = None
    ) -> None:
        self._collector = collector
        self._decode = decode
        #: Ids of requests without an event so far.
        self._pending: set[str] = set()
        self._events: deque[PredictionEvent] = deque()
        self._loop = asyncio.new_event_loop()
        self._collecting = self._loop.create_task(self._collect())
        self._thread = threading.Thread(target=self._run, name="tailcast-predictions", daemon=True)
        self._thread.start()

    def submit(
        self,
        request: PredictionRequest,
        token_ids: Sequence[int] | None = None,
        options: Callable[[], tuple[Message, ...]] = tuple,
    ) -> None:
        """Queries the predictor; its event follows later, after `close` immediately. `token_ids` is the prompt;
        None: use the prompt of `request`. If that is empty (prompts given as embeddings), the request fails.
        `options` is called in the thread, for messages before those of the prompt."""
        self._pending.add(request.request_id)
        if self._loop.is_closed():
            self._fail(request.request_id, "the predictor's thread has ended")
        else:
            self._loop.call_soon_threadsafe(self._send, request, token_ids, options)

    def withdraw(self, request_id: str) -> None:
        """Withdraws a request that has left; a query that was not sent yet is dropped."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._collector.withdraw, request_id)

    def take(self) -> list[PredictionEvent]:
        """The events since the last call."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def close(self) -> None:
        """Ends the thread; waits for it at most `CLOSE_S` seconds."""
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
        except Exception:  # a third-party predictor may raise any exception; the engine continues
            logger.exception("the predictor could not be closed")
        self._collecting.cancel()
        await asyncio.gather(self._collecting, return_exceptions=True)
        for event in self._collector.ready_events():
            self._put(event)
        self._loop.stop()

    def _send(
        self,
        request: PredictionRequest,
        token_ids: Sequence[int] | None,
        options: Callable[[], tuple[Message, ...]],
    ) -> None:
        if token_ids is None and not request.prompt:
            self._fail(request.request_id, "the prompt has no text")
            return
        try:
            if token_ids is not None and self._decode is not None:
                messages = self._decode(token_ids)
                request = replace(request, prompt=user_text(messages), messages=(*options(), *messages))
            self._collector.submit(request)
        except Exception as error:  # a third-party tokenizer may raise any exception; the engine continues
            self._fail(request.request_id, f"{type(error).__name__}: {error}")
