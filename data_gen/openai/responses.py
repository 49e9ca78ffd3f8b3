"""Request bodies, and parsing of responses from JSON or from a stream of events."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from data_gen.backend import SamplingSettings, sample_seed
from data_gen.openai.options import OpenAIOptions
from data_gen.prompts import Prompt
from scheduler_core.prediction.api_response import has_output
from scheduler_core.prediction.prompt_text import content_text
from scheduler_core.shell.json_text import valid_unicode

_STOPPED = {"stop": "stop", "eos_token": "stop", "stop_sequence": "stop", "length": "length"}
# Exceptions raised for unexpected JSON values, including an infinite index and deep nesting.
_UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
_MAX_TOKENS = 2**31 - 1
#: Maximum size of a line and of a stream; larger ones are rejected.
MAX_LINE_BYTES = 4 << 20
MAX_STREAM_BYTES = 256 << 20
#: Other finish reasons -> kind of failure, and whether the request is retried.
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
    """An unusable response; `kind` and `reason` are as in `SampleFailure`, `retry` is whether a retry may succeed."""

    def __init__(self, kind: str, reason: str, *, retry: bool) -> None:
        super().__init__(f"{kind}: {reason}")
        self.kind = kind
        self.reason = " ".join(reason.split())[:300]
        self.retry = retry
        self.retry_after_s: float | None = None


@dataclass(slots=True)
class ResponseChoice:
    """One choice of a response."""

    text: str = ""
    finish_reason: str = ""  # "stop" or "length" if there is no `problem`
    listed_tokens: int | None = None  # number of tokens, if the server lists them
    # first_at, last_at: arrival times of the first token and of finish_reason in a stream.
    first_at: float | None = None
    last_at: float | None = None
    problem: ResponseError | None = None  # reason why the choice is unusable; None if it is usable


@dataclass(slots=True)
class ServerResponse:
    """All choices of one request in order of their index, and the token counts of `usage` (over all choices)."""

    choices: list[ResponseChoice]
    prompt_tokens: int | None
    completion_tokens: int | None


def count_tokens(
    response: ServerResponse, max_tokens: int, count_text: Callable[[str], int] | None
) -> list[int]:
    """Exact token counts of the choices, including EOS: those of the server, or else those of `count_text` (number of
    tokens of a text) if they agree with usage. ResponseError no_token_count or tokenizer_mismatch."""
    choices, total = response.choices, response.completion_tokens
    if len(choices) == 1 and total:
        return [total]
    ends = [choice.finish_reason == "stop" for choice in choices]
    listed = [choice.listed_tokens for choice in choices if choice.listed_tokens]
    if len(listed) == len(choices):
        # Some engines list the EOS token, others do not.
        marked = [count + end for count, end in zip(listed, ends, strict=True)]
        if total is None or total in (sum(listed), sum(marked)):
            return listed if total in (None, sum(listed)) else marked
    if count_text is None or total is None:
        usage = "no usage" if total is None else f"usage of {total} tokens over {len(choices)} choices"
        raise ResponseError("no_token_count", f"the server sent {usage} and no list of tokens", retry=False)
    texts = zip(choices, ends, strict=True)
    counts = [count_text(choice.text) + 1 if end else max_tokens for choice, end in texts]
    if sum(counts) == total:
        return counts
    reason = f"the texts have {sum(counts)} tokens, usage reports {total}"
    raise ResponseError("tokenizer_mismatch", reason, retry=False)


class RequestBodies:
    """Encoder of request bodies as JSON; the part shared by all requests for a prompt is encoded once."""

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

    def prefix(self, prompt: Prompt) -> bytes:
        """First part of the bodies of all requests for one prompt."""
        if self._chat:
            messages = [{"role": message.role, "content": message.text} for message in prompt.chat]
            return b'{"messages":' + json.dumps(messages).encode() + b","
        return b'{"prompt":' + json.dumps(prompt.text).encode() + b","

    def body(self, prefix: bytes, prompt: Prompt, indices: tuple[int, ...]) -> bytes:
        """Body of the request for these sample indices."""
        if len(indices) > 1:
            return b'%s"n":%d,%s' % (prefix, len(indices), self._common)
        if self._seed is not None:
            return b'%s"seed":%d,%s' % (
                prefix,
                sample_seed(self._seed, prompt.prompt_id, indices[0]),
                self._common,
            )
        return prefix + self._common


def read_response(payload: bytes) -> ServerResponse:
    """Parses a response that was not streamed; ResponseError malformed, empty or server_error."""
    try:
        content = json.loads(payload)
        if "error" in content and not content.get("choices"):
            raise ResponseError("server_error", _message_of(content), retry=True)
        choices = [_read_choice(entry) for entry in sorted(content["choices"], key=_index_of)]
        prompt_tokens, completion_tokens = _read_usage(content)
    except _UNREADABLE as error:
        excerpt = payload[:80].decode(errors="replace")
        raise ResponseError(
            "malformed", f"not a response of this API: {excerpt!r} ({error})", retry=True
        ) from error
    return _checked(ServerResponse(choices, prompt_tokens, completion_tokens))


def _index_of(entry: Mapping[str, Any]) -> int:
    return int(entry.get("index") or 0)


def _read_choice(entry: Mapping[str, Any]) -> ResponseChoice:
    message = entry.get("message")
    text = entry["text"] if message is None else message.get("content") or message.get("refusal")
    return ResponseChoice(_content(text), _text(entry["finish_reason"]), _listed_tokens(entry))


def _content(value: Any) -> str:
    """The text of an output, which may be a list of parts."""
    return content_text(value) if isinstance(value, list) else _text(value)


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


def _read_usage(content: Mapping[str, Any]) -> tuple[int | None, int | None]:
    usage = content.get("usage")
    if not usage:
        return None, None
    prompt_tokens, completion_tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
    for count in (prompt_tokens, completion_tokens):
        if count is not None and (type(count) is not int or not 0 <= count <= _MAX_TOKENS):
            raise ValueError(f"usage holds {count!r}")
    return prompt_tokens, completion_tokens


def _checked(reply: ServerResponse) -> ServerResponse:
    if not reply.choices:
        raise ResponseError("empty", "the server sent no choices", retry=True)
    for choice in reply.choices:
        # Applied to the joined text, because a stream may split a surrogate pair between two events.
        choice.text = valid_unicode(choice.text)
        reason = choice.finish_reason
        if reason in _STOPPED:
            choice.finish_reason = _STOPPED[reason]
        else:
            kind, retry = _PROBLEMS.get(reason, ("finish_reason", False))
            choice.problem = ResponseError(kind, f"finish_reason {reason!r}", retry=retry)
    return reply


@dataclass(slots=True)
class EventStreamParser:
    """Incremental parser that assembles a response from server-sent events."""

    _buffer: bytes = b""
    _size: int = 0
    _choices: dict[int, ResponseChoice] = field(default_factory=dict)
    _texts: dict[int, list[str]] = field(default_factory=dict)
    _usage: tuple[int | None, int | None] = (None, None)
    _done: bool = False

    def feed(self, data: bytes, now: float) -> None:
        """Processes bytes received at `now`; ResponseError if an event is malformed or reports an error."""
        self._size += len(data)
        lines = (self._buffer + data).split(b"\n") if self._buffer else data.split(b"\n")
        self._buffer = lines.pop()
        if len(self._buffer) > MAX_LINE_BYTES or self._size > MAX_STREAM_BYTES:
            limits = f"{MAX_LINE_BYTES} bytes in a line or {MAX_STREAM_BYTES} in total"
            raise ResponseError("malformed", f"a stream of more than {limits}", retry=True)
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._done = True
            return
        try:
            content = json.loads(data)
            if content.get("error"):
                raise ResponseError("server_error", _message_of(content), retry=True)
            if content.get("usage"):
                self._usage = _read_usage(content)
            for entry in content.get("choices") or ():
                self._piece(entry, now)
        except _UNREADABLE as error:
            excerpt = data[:80].decode(errors="replace")
            raise ResponseError(
                "malformed", f"not an event of this API: {excerpt!r} ({error})", retry=True
            ) from error

    def _piece(self, entry: Mapping[str, Any], now: float) -> None:
        index = _index_of(entry)
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = ResponseChoice()
            self._texts[index] = []
        delta = entry.get("delta")
        text = _content(entry.get("text") if delta is None else delta.get("content") or delta.get("refusal"))
        if text:
            self._texts[index].append(text)
        listed = _listed_tokens(entry)
        if listed:
            choice.listed_tokens = (choice.listed_tokens or 0) + listed
        if choice.first_at is None and (text or has_output(delta) or listed or entry.get("finish_reason")):
            choice.first_at = now
        if entry.get("finish_reason"):
            choice.finish_reason = _text(entry["finish_reason"])
            choice.last_at = now

    def finish(self) -> ServerResponse:
        """Returns the complete response after the end of the stream; ResponseError empty, or truncated if [DONE] and a
        finish reason are missing."""
        if not self._done and not all(choice.finish_reason for choice in self._choices.values()):
            raise ResponseError("truncated", "the stream ended before the output was complete", retry=True)
        for index, texts in self._texts.items():
            self._choices[index].text = "".join(texts)
        return _checked(
            ServerResponse([self._choices[index] for index in sorted(self._choices)], *self._usage)
        )


def read_error_response(status: int, payload: bytes) -> ResponseError:
    """Classifies a response with an HTTP status other than 200."""
    try:
        reason = _message_of(json.loads(payload))
    except _UNREADABLE:
        reason = payload[:200].decode(errors="replace")
    message = f"HTTP {status}: {reason}"
    lowered = payload[:4000].decode(errors="replace").lower()
    if status == 429 and "insufficient_quota" in lowered:
        return ResponseError("no_quota", message, retry=False)
    if status in (408, 409, 425, 429) or status >= 500:
        return ResponseError(f"http_{status}", message, retry=True)
    if status == 413 or (status in (400, 422) and any(words in lowered for words in _TOO_LONG)):
        return ResponseError("too_long", message, retry=False)
    if status == 400 and ("content_filter" in lowered or "content_policy" in lowered):
        return ResponseError("content_filter", message, retry=False)
    if status in (401, 402, 403):
        return ResponseError("unauthorized", message, retry=False)
    if status in (400, 422):
        return ResponseError("refused", message, retry=False)
    return ResponseError(f"http_{status}", message, retry=False)


def _message_of(content: Mapping[str, Any]) -> str:
    error = content.get("error", content)
    if isinstance(error, dict):
        return str(error.get("message") or error)
    return str(content.get("message") or content.get("detail") or error)
