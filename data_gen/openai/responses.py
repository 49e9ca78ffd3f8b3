"""Request bodies, and parsing of responses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from data_gen.backend import SamplingSettings, sample_seed
from data_gen.openai.options import OpenAIOptions
from data_gen.prompts import Prompt
from scheduler_core.prediction import api_response
from scheduler_core.prediction.prompt_text import content_text
from scheduler_core.shell.json_text import valid_unicode

# Exceptions raised for unexpected JSON values, including an infinite index and deep nesting.
_UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
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
class ServerResponse:
    """The output of one request; `problem` is the reason why it is unusable, None if it is usable."""

    text: str
    finish_reason: Literal["stop", "length"]
    output_tokens: int  # including EOS
    prompt_tokens: int | None
    problem: ResponseError | None = None


class RequestBodies:
    """Encoder of request bodies as JSON; the part shared by all requests for a prompt is encoded once."""

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
        self._common = json.dumps(fields)[1:-1].encode() + b"}"

    def prefix(self, prompt: Prompt) -> bytes:
        """First part of the bodies of all requests for one prompt."""
        if self._chat:
            messages = [{"role": message.role, "content": message.text} for message in prompt.chat]
            return b'{"messages":' + json.dumps(messages).encode() + b","
        return b'{"prompt":' + json.dumps(prompt.text).encode() + b","

    def body(self, prefix: bytes, prompt: Prompt, index: int) -> bytes:
        """Body of the request for this sample index."""
        if self._seed is None:
            return prefix + self._common
        return b'%s"seed":%d,%s' % (prefix, sample_seed(self._seed, prompt.prompt_id, index), self._common)


def read_response(payload: bytes, max_tokens: int) -> ServerResponse:
    """Parses a response; ResponseError malformed, empty, server_error or no_token_count."""
    try:
        content = json.loads(payload)
        if "error" in content and not content.get("choices"):
            raise ResponseError("server_error", _message_of(content), retry=True)
        if not content["choices"]:
            raise ResponseError("empty", "the server sent no choices", retry=True)
        (choice,) = content["choices"]
        message = choice.get("message")
        text = choice["text"] if message is None else message.get("content") or message.get("refusal")
        text = text if isinstance(text, str) else content_text(text or "")
        count = (content.get("usage") or {}).get("completion_tokens")
        if count is not None and type(count) is not int:
            raise TypeError(f"usage holds {count!r}")
        response = api_response.read_response(content)
    except _UNREADABLE as error:
        excerpt = payload[:80].decode(errors="replace")
        raise ResponseError(
            "malformed", f"not a response of this API: {excerpt!r} ({error})", retry=True
        ) from error
    if not response.output_tokens:
        raise ResponseError("no_token_count", "the server sent no usage", retry=False)
    reason = response.finish_reason.lower()
    problem = None
    if reason not in api_response.COMPLETE | api_response.TRUNCATED:
        kind, retry = _PROBLEMS.get(reason, ("finish_reason", False))
        problem = ResponseError(kind, f"finish_reason {reason!r}", retry=retry)
    elif response.output_tokens > max_tokens:
        excess = f"{response.output_tokens} tokens for max_tokens = {max_tokens}"
        problem = ResponseError("too_many_tokens", excess, retry=False)
    ending: Literal["stop", "length"] = "length" if reason in api_response.TRUNCATED else "stop"
    return ServerResponse(
        valid_unicode(text), ending, response.output_tokens, response.prompt_tokens, problem
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
