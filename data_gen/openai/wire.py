"""What goes over the wire: request bodies, and answers read from JSON or from a stream of events."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from data_gen.backend import SamplingSettings
from data_gen.draws import answer_seed
from data_gen.openai.options import OpenAIOptions
from data_gen.prompts import Prompt
from scheduler_core.json_text import valid_unicode

_STOPPED = {"stop": "stop", "eos_token": "stop", "stop_sequence": "stop", "length": "length"}
# What reading an unexpected JSON value raises, an infinite index and deep nesting included.
_UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
_MAX_TOKENS = 2**31 - 1
_GAVE_UP = ("abort", "error", "cancelled")
_TOO_LONG = (
    "context length",
    "context_length",
    "context size",
    "context window",
    "exceed_context",
    "maximum model length",
    "max_model_len",
    "max_new_tokens` must be",
    "input length",
    "prompt is too long",
    "too many tokens",
)


class ReplyError(Exception):
    """An answer that cannot be used.

    Args:
        kind: Short stable word that failures are counted by.
        reason: One line for people.
        retry: Whether asking again may help.
    """

    def __init__(self, kind: str, reason: str, *, retry: bool) -> None:
        super().__init__(f"{kind}: {reason}")
        self.kind = kind
        self.reason = " ".join(reason.split())[:300]
        self.retry = retry
        self.retry_after_s: float | None = None


@dataclass(slots=True)
class Choice:
    """One answer as the server gave it.

    Attributes:
        text: What it says.
        finish_reason: "stop" or "length", unless there is a problem.
        counted: Its length, if the server listed its tokens.
        first_at: When its first token arrived in a stream.
        last_at: When its finish_reason arrived in a stream.
        problem: Why it is no use, if it is none.
    """

    text: str = ""
    finish_reason: str = ""
    counted: int | None = None
    first_at: float | None = None
    last_at: float | None = None
    problem: ReplyError | None = None


@dataclass(slots=True)
class Reply:
    """All answers of one request in the order of their index, and the counts of `usage` (over all answers)."""

    choices: list[Choice]
    prompt_tokens: int | None
    completion_tokens: int | None


class BodyMaker:
    """Request bodies as JSON bytes; the part that all answers to a prompt share is encoded once."""

    def __init__(self, options: OpenAIOptions, settings: SamplingSettings, model: str) -> None:
        self._chat = options.api == "chat"
        self._seed = settings.seed if options.send_seed and options.samples_per_request == 1 else None
        fields: dict[str, Any] = {
            "model": model,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            options.max_tokens_field: settings.max_tokens,
            **options.body,
        }
        if options.stream:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        if options.count_by == "token_ids":
            fields["return_token_ids"] = True
        if options.count_by == "logprobs":
            fields["logprobs"] = True if self._chat else 1
        self._common = json.dumps(fields)[1:-1].encode() + b"}"

    def start(self, prompt: Prompt) -> bytes:
        """What the bodies of all requests for one prompt begin with."""
        if self._chat:
            messages = [{"role": message.role, "content": message.content} for message in prompt.chat]
            return b'{"messages":' + json.dumps(messages).encode() + b","
        return b'{"prompt":' + json.dumps(prompt.text).encode() + b","

    def body(self, start: bytes, prompt: Prompt, indices: tuple[int, ...]) -> bytes:
        """The body that asks for these sample indices."""
        if len(indices) > 1:
            return b'%s"n":%d,%s' % (start, len(indices), self._common)
        if self._seed is not None:
            return b'%s"seed":%d,%s' % (
                start,
                answer_seed(self._seed, prompt.prompt_id, indices[0]),
                self._common,
            )
        return start + self._common


def read_reply(payload: bytes) -> Reply:
    """An answer that came in one piece.

    Raises:
        ReplyError: malformed, empty or server_error.
    """
    try:
        found = json.loads(payload)
        if "error" in found and not found.get("choices"):
            raise ReplyError("server_error", _message_of(found), retry=True)
        choices = [_read_choice(entry) for entry in sorted(found["choices"], key=_index_of)]
        prompt_tokens, completion_tokens = _read_usage(found)
    except _UNREADABLE as error:
        shown = payload[:80].decode(errors="replace")
        raise ReplyError(
            "malformed", f"not an answer of this API: {shown!r} ({error})", retry=True
        ) from error
    return _checked(Reply(choices, prompt_tokens, completion_tokens))


def _index_of(entry: Mapping[str, Any]) -> int:
    return int(entry.get("index") or 0)


def _read_choice(entry: Mapping[str, Any]) -> Choice:
    message = entry.get("message")
    text = (message.get("content") or message.get("refusal")) if message is not None else entry["text"]
    return Choice(_text(text), _text(entry["finish_reason"]), _listed_tokens(entry))


def _text(value: Any) -> str:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    return value or ""


def _listed_tokens(entry: Mapping[str, Any]) -> int | None:
    token_ids = entry.get("token_ids")
    if token_ids is not None:
        return len(token_ids)
    logprobs = entry.get("logprobs")
    if logprobs:
        listed = logprobs.get("content") or logprobs.get("tokens")
        return None if listed is None else len(listed)
    return None


def _read_usage(found: Mapping[str, Any]) -> tuple[int | None, int | None]:
    usage = found.get("usage")
    if not usage:
        return None, None
    prompt_tokens, completion_tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
    for count in (prompt_tokens, completion_tokens):
        if count is not None and (type(count) is not int or not 0 <= count <= _MAX_TOKENS):
            raise ValueError(f"usage holds {count!r}")
    return prompt_tokens, completion_tokens


def _checked(reply: Reply) -> Reply:
    if not reply.choices:
        raise ReplyError("empty", "the server sent no choices", retry=True)
    for choice in reply.choices:
        # Only now: a stream may split a surrogate pair between two events.
        choice.text = valid_unicode(choice.text)
        reason = choice.finish_reason
        if reason in _STOPPED:
            choice.finish_reason = _STOPPED[reason]
        elif reason == "content_filter":
            choice.problem = ReplyError("content_filter", "the server withheld the answer", retry=False)
        elif not reason:
            choice.problem = ReplyError("truncated", "the answer has no finish_reason", retry=True)
        elif reason in _GAVE_UP:
            choice.problem = ReplyError("aborted", f"the server gave up on the answer: {reason}", retry=True)
        else:
            choice.problem = ReplyError("finish_reason", f"finish_reason {reason!r}", retry=False)
    return reply


@dataclass(slots=True)
class StreamReader:
    """Puts an answer together from server-sent events, in pieces of any size."""

    _rest: bytes = b""
    _choices: dict[int, Choice] = field(default_factory=dict)
    _texts: dict[int, list[str]] = field(default_factory=dict)
    _usage: tuple[int | None, int | None] = (None, None)
    _done: bool = False

    def feed(self, data: bytes, now: float) -> None:
        """Takes bytes that arrived at `now`.

        Raises:
            ReplyError: If an event is malformed or reports an error.
        """
        lines = (self._rest + data).split(b"\n") if self._rest else data.split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._done = True
            return
        try:
            found = json.loads(data)
            if "error" in found:
                raise ReplyError("server_error", _message_of(found), retry=True)
            if found.get("usage"):
                self._usage = _read_usage(found)
            for entry in found.get("choices") or ():
                self._piece(entry, now)
        except _UNREADABLE as error:
            shown = data[:80].decode(errors="replace")
            raise ReplyError(
                "malformed", f"not an event of this API: {shown!r} ({error})", retry=True
            ) from error

    def _piece(self, entry: Mapping[str, Any], now: float) -> None:
        index = _index_of(entry)
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = Choice()
            self._texts[index] = []
        delta = entry.get("delta")
        if delta is None:
            text = shown = _text(entry.get("text"))
        else:
            text = _text(delta.get("content") or delta.get("refusal"))
            shown = text or delta.get("reasoning_content") or delta.get("reasoning") or ""
        if text:
            self._texts[index].append(text)
        counted = _listed_tokens(entry)
        if counted:
            choice.counted = (choice.counted or 0) + counted
        if choice.first_at is None and (shown or counted or entry.get("finish_reason")):
            choice.first_at = now
        if entry.get("finish_reason"):
            choice.finish_reason = _text(entry["finish_reason"])
            choice.last_at = now

    def finish(self) -> Reply:
        """The whole answer, once the server has closed the stream.

        Raises:
            ReplyError: empty, or truncated if the stream ended before it should.
        """
        if not self._done and not all(choice.finish_reason for choice in self._choices.values()):
            raise ReplyError("truncated", "the stream ended before the answer did", retry=True)
        for index, texts in self._texts.items():
            self._choices[index].text = "".join(texts)
        return _checked(Reply([self._choices[index] for index in sorted(self._choices)], *self._usage))


def read_refusal(status: int, payload: bytes) -> ReplyError:
    """What an answer with an HTTP status other than 200 means."""
    try:
        reason = _message_of(json.loads(payload))
    except _UNREADABLE:
        reason = payload[:200].decode(errors="replace")
    shown = f"HTTP {status}: {reason}"
    lowered = payload[:4000].decode(errors="replace").lower()
    if status == 429 and "insufficient_quota" in lowered:
        return ReplyError("no_quota", shown, retry=False)
    if status in (408, 409, 425, 429) or status >= 500:
        return ReplyError(f"http_{status}", shown, retry=True)
    if status == 413 or (status in (400, 422) and any(words in lowered for words in _TOO_LONG)):
        return ReplyError("too_long", shown, retry=False)
    if status == 400 and ("content_filter" in lowered or "content_policy" in lowered):
        return ReplyError("content_filter", shown, retry=False)
    if status in (401, 402, 403):
        return ReplyError("unauthorized", shown, retry=False)
    if status in (400, 422):
        return ReplyError("refused", shown, retry=False)
    return ReplyError(f"http_{status}", shown, retry=False)


def _message_of(found: Mapping[str, Any]) -> str:
    error = found.get("error", found)
    if isinstance(error, dict):
        return str(error.get("message") or error)
    return str(found.get("message") or found.get("detail") or error)
