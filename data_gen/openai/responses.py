"""Request bodies, and responses parsed from JSON or from a stream of events."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from data_gen.backend import SamplingSettings, sample_seed
from data_gen.openai.options import OpenAIOptions
from data_gen.prompts import Prompt
from scheduler_core.json_text import valid_unicode

_STOPPED: Mapping[str, Literal["stop", "length"]] = {
    "stop": "stop",
    "eos_token": "stop",
    "stop_sequence": "stop",
    "length": "length",
}
# What reading an unexpected JSON value raises, an infinite index and deep nesting included.
_UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
_MAX_TOKENS = 2**31 - 1
#: A stream beyond these is dropped, whatever the server sends.
MAX_LINE_BYTES = 4 << 20
MAX_STREAM_BYTES = 256 << 20
#: Other reasons -> kind of failure, and whether another attempt may help.
_PROBLEMS = {"content_filter": ("content_filter", False), "": ("truncated", True)} | dict.fromkeys(
    ("abort", "error", "cancelled"), ("aborted", True)
)
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


class ResponseError(Exception):
    """A response that cannot be used; kind and reason as of a `SampleFailure`, `retry` if another attempt may help."""

    def __init__(self, kind: str, reason: str, *, retry: bool) -> None:
        super().__init__(f"{kind}: {reason}")
        self.kind = kind
        self.reason = " ".join(reason.split())[:300]
        self.retry = retry
        self.retry_after_s: float | None = None


@dataclass(slots=True)
class ServerResponse:
    """The output of one request.

    Attributes:
        prompt_tokens: None if the server does not count them.
        output_tokens: Its length as the server counts it, end marker included.
        first_at, last_at: When its first token and its finish_reason arrived in a stream.
    """

    text: str
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int | None
    output_tokens: int
    first_at: float | None = None
    last_at: float | None = None


class RequestBodies:
    """Request bodies as JSON bytes; the part that all requests for a prompt share is encoded once."""

    def __init__(self, options: OpenAIOptions, settings: SamplingSettings, model: str) -> None:
        self._chat = options.api == "chat"
        self._seed = settings.seed if options.send_seed else None
        fields: dict[str, Any] = {
            "model": model,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            options.max_tokens_field: settings.max_tokens,
            **options.body,
        }
        if options.stream:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        self._common = json.dumps(fields)[1:-1].encode() + b"}"

    def prefix(self, prompt: Prompt) -> bytes:
        """The beginning of the bodies of all requests for one prompt."""
        if self._chat:
            messages = [{"role": message.role, "content": message.content} for message in prompt.chat]
            return b'{"messages":' + json.dumps(messages).encode() + b","
        return b'{"prompt":' + json.dumps(prompt.text).encode() + b","

    def body(self, prefix: bytes, prompt: Prompt, index: int) -> bytes:
        """The body that asks for a sample of a prompt."""
        if self._seed is None:
            return prefix + self._common
        return b'%s"seed":%d,%s' % (prefix, sample_seed(self._seed, prompt.prompt_id, index), self._common)


def read_response(payload: bytes) -> ServerResponse:
    """A response that came in one piece.

    Raises:
        ResponseError: It cannot be used.
    """
    try:
        content = json.loads(payload)
        if "error" in content and not content.get("choices"):
            raise ResponseError("server_error", _message_of(content), retry=True)
        if not content["choices"]:
            raise ResponseError("empty", "the server sent no choices", retry=True)
        [entry] = content["choices"]
        message = entry.get("message")
        text = (message.get("content") or message.get("refusal")) if message is not None else entry["text"]
        return _response([_text(text)], _text(entry["finish_reason"]), *_read_usage(content))
    except _UNREADABLE as error:
        raise _malformed("a response", payload, error) from error


def _malformed(kind: str, payload: bytes, error: Exception) -> ResponseError:
    excerpt = payload[:80].decode(errors="replace")
    return ResponseError("malformed", f"not {kind} of this API: {excerpt!r} ({error})", retry=True)


def _text(value: Any) -> str:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    return value or ""


def _read_usage(content: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Tokens of the prompt and of the output."""
    usage = content.get("usage") or {}
    counts = usage.get("prompt_tokens"), usage.get("completion_tokens")
    for count in counts:
        if count is not None and (type(count) is not int or not 0 <= count <= _MAX_TOKENS):
            raise ValueError(f"usage holds {count!r}")
    return counts


def _response(
    texts: list[str],
    reason: str,
    prompt_tokens: int | None,
    output_tokens: int | None,
    first_at: float | None = None,
    last_at: float | None = None,
) -> ServerResponse:
    if reason not in _STOPPED:
        kind, retry = _PROBLEMS.get(reason, ("finish_reason", False))
        raise ResponseError(kind, f"finish_reason {reason!r}", retry=retry)
    if not output_tokens:
        raise ResponseError("no_token_count", "the server gave no usage", retry=False)
    # Joined before it is checked: a stream may split a surrogate pair between two events.
    text = valid_unicode("".join(texts))
    return ServerResponse(text, _STOPPED[reason], prompt_tokens, output_tokens, first_at, last_at)


@dataclass(slots=True)
class EventStreamParser:
    """Assembles a response from server-sent events, in pieces of any size."""

    _rest: bytes = b""
    _size: int = 0
    _texts: list[str] = field(default_factory=list)
    _reason: str | None = None
    _usage: tuple[int | None, int | None] = (None, None)
    _first_at: float | None = None
    _last_at: float | None = None

    def feed(self, data: bytes, now: float) -> None:
        """Takes bytes that arrived at `now`.

        Raises:
            ResponseError: If an event is malformed or reports an error.
        """
        self._size += len(data)
        lines = (self._rest + data).split(b"\n") if self._rest else data.split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > MAX_LINE_BYTES or self._size > MAX_STREAM_BYTES:
            limits = f"{MAX_LINE_BYTES} bytes in a line or {MAX_STREAM_BYTES} in all"
            raise ResponseError("malformed", f"a stream of more than {limits}", retry=True)
        for line in lines:
            if line.startswith(b"data:") and (event := line[5:].strip()) != b"[DONE]":
                self._event(event, now)

    def _event(self, data: bytes, now: float) -> None:
        try:
            content = json.loads(data)
            if "error" in content:
                raise ResponseError("server_error", _message_of(content), retry=True)
            if content.get("usage"):
                self._usage = _read_usage(content)
            for entry in content.get("choices") or ():
                self._piece(entry, now)
        except _UNREADABLE as error:
            raise _malformed("an event", data, error) from error

    def _piece(self, entry: Mapping[str, Any], now: float) -> None:
        if entry.get("index"):
            raise ValueError("one choice was requested")
        reason = _text(entry.get("finish_reason"))
        self._reason = self._reason or reason
        delta = entry.get("delta")
        if delta is None:
            text = visible = _text(entry.get("text"))
        else:
            text = _text(delta.get("content") or delta.get("refusal"))
            visible = text or delta.get("reasoning_content") or delta.get("reasoning") or ""
        self._texts.append(text)
        if self._first_at is None and (visible or reason):
            self._first_at = now
        if reason:
            self._last_at = now

    def finish(self) -> ServerResponse:
        """The complete response, once the server has closed the stream.

        Raises:
            ResponseError: It cannot be used.
        """
        if self._reason is None:
            raise ResponseError("empty", "the server sent no choices", retry=True)
        return _response(self._texts, self._reason, *self._usage, self._first_at, self._last_at)


def read_error_response(status: int, payload: bytes) -> ResponseError:
    """The error that a response with an HTTP status other than 200 stands for."""
    try:
        reason = _message_of(json.loads(payload))
    except _UNREADABLE:
        reason = payload[:200].decode(errors="replace")
    message = f"HTTP {status}: {reason}"
    lowered = payload[:4000].decode(errors="replace").lower()
    if status in (408, 409, 425, 429) or status >= 500:
        if status == 429 and "insufficient_quota" in lowered:
            return ResponseError("no_quota", message, retry=False)
        return ResponseError(f"http_{status}", message, retry=True)
    if status in (401, 402, 403):
        kind = "unauthorized"
    elif status == 413 or (status in (400, 422) and any(words in lowered for words in _TOO_LONG)):
        kind = "too_long"
    elif status == 400 and ("content_filter" in lowered or "content_policy" in lowered):
        kind = "content_filter"
    else:
        kind = "refused" if status in (400, 422) else f"http_{status}"
    return ResponseError(kind, message, retry=False)


def _message_of(content: Mapping[str, Any]) -> str:
    error = content.get("error", content)
    if isinstance(error, dict):
        return str(error.get("message") or error)
    return str(content.get("message") or content.get("detail") or error)
