"""Requests: strict parsing of bodies, and the fields for prediction and scheduling."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from predictors.proxy.config import PromptText
from predictors.proxy.errors import bad_body
from predictors.tokenizer import conversation_text
from scheduler_core.adapters.live_routing import CHARS_PER_TOKEN, content_text
from scheduler_core.json_text import RepeatedKeyError, parse_json

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
_OPEN = re.compile(rb"\s*\{\s*")
# Bytes before the first brace in UTF-16 and UTF-32, or in a byte order mark, which some parsers skip.
_BEFORE_OBJECT = b" \t\r\n\v\f\0\xef\xbb\xbf\xff\xfe"


@dataclass(frozen=True, slots=True)
class JsonBody:
    """A JSON object that all parsers agree on: bytes (None: serialize `content`) and members."""

    data: bytes | None
    content: Mapping[str, Any]

    def with_members(self, added: Mapping[str, Any]) -> bytes:
        """The bytes of the object with members added or replaced. New members are inserted after the opening
        brace, and all other bytes are unchanged; if a member is replaced, the object is serialized again."""
        if self.data is not None and not added:
            return self.data
        if self.data is None or any(name in self.content for name in added):
            return _dump({**self.content, **added})
        opening = _OPEN.match(self.data)
        assert opening is not None
        comma = b"," if self.content else b""
        return self.data[: opening.end()] + _dump(dict(added))[1:-1] + comma + self.data[opening.end() :]


def json_body(data: bytes) -> JsonBody:
    """Parses a body; Refusal if it is not a JSON object, or if parsers differ on it: encodings other than
    UTF-8, byte order marks, NaN, Infinity, numbers out of range, lone surrogates. If members have the same
    name, only the last one is used and sent to the engine."""
    sent: bytes | None = data
    try:
        try:
            content = parse_json(data, finite=True, unique_keys=True, lone_surrogates="refuse")
        except RepeatedKeyError:
            sent, content = None, parse_json(data, finite=True, lone_surrogates="refuse")
    except UnicodeDecodeError:
        raise bad_body("not UTF-8") from None
    except ValueError as error:
        raise bad_body(f"not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise bad_body("not a JSON object")
    return JsonBody(sent, content)


def may_be_json_object(data: bytes) -> bool:
    """Whether any parser could parse a body as a JSON object."""
    return data.lstrip(_BEFORE_OBJECT)[:1] == b"{"


def _dump(content: dict[str, Any]) -> bytes:
    try:
        return json.dumps(content, separators=(",", ":")).encode()
    except RecursionError:
        raise bad_body("nested too deeply") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """Fields of a request; None if a field is absent or malformed, which the engine reports.

    Attributes:
        content: The parsed body; empty if it is not a JSON object.
        prompt: Text to predict from; None for token ids and for several prompts.
        messages: Role and text of each message; None for a text completion.
        num_choices: Number of completions of the request; the engine reports the sum of their tokens.
        priority: The client's own priority, if it is a 64-bit integer.
    """

    path: str
    content: Mapping[str, Any]
    prompt: str | None
    messages: list[tuple[str, str]] | None
    model: str
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    stream: bool
    include_usage: bool
    num_choices: int
    priority: int | None

    @property
    def is_completion(self) -> bool:
        """Whether it is a chat or text completion, whose response can be parsed."""
        return self.path in (CHAT, TEXT)

    def prompt_tokens(self, counted: int | None = None) -> int:
        """Estimated tokens of the conversation, at least 1: by the tokens per character of `prompt` if it has
        `counted` tokens, otherwise by CHARS_PER_TOKEN."""
        texts = [text for _, text in self.messages or ()] or [self.prompt or ""]
        num_chars = sum(map(len, texts))
        if counted is None or not self.prompt:
            return 1 + num_chars // CHARS_PER_TOKEN
        return max(1, round(counted * num_chars / len(self.prompt)))


def parse_request(content: Mapping[str, Any], path: str, prompt_text: PromptText) -> ParsedRequest:
    """Parses the fields of a request to the endpoint `path`."""
    messages = _messages(content.get("messages")) if path == CHAT else None
    prompt = content.get("prompt") if path == TEXT else _prompt(messages, prompt_text)
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    num_choices = max(_count(content.get("n")) or 1, _count(content.get("best_of")) or 1)
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        num_choices *= len(prompt)
    options, model, priority = map(content.get, ("stream_options", "model", "priority"))
    return ParsedRequest(
        path=path,
        content=content,
        prompt=prompt if isinstance(prompt, str) and prompt else None,
        messages=messages,
        model=model if isinstance(model, str) else "",
        max_tokens=_count(content.get("max_completion_tokens")) or _count(content.get("max_tokens")),
        temperature=_number(content.get("temperature")),
        top_p=_number(content.get("top_p")),
        stream=content.get("stream") is True,
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        num_choices=num_choices,
        priority=priority if type(priority) is int and -(2**63) <= priority < 2**63 else None,
    )


def _messages(value: object) -> list[tuple[str, str]] | None:
    if not isinstance(value, list):
        return None
    messages = [item for item in value if isinstance(item, dict)]
    return [(content_text(item.get("role")), content_text(item.get("content"))) for item in messages]


def _prompt(messages: list[tuple[str, str]] | None, prompt_text: PromptText) -> str | None:
    if not messages:
        return None
    if prompt_text == "conversation":
        return conversation_text(messages)
    return next((text for role, text in reversed(messages) if role == "user"), None)


def _count(value: object) -> int | None:
    return value if type(value) is int and 1 <= value < 2**31 else None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value <= sys.float_info.max else None
