"""What a completion request asks for, as far as prediction and order need it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from predictors.conversation import conversation_text

Reads = Literal["last", "conversation"]
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
#: Characters of a token, roughly: policies want a prompt length, and nobody has counted it yet.
CHARS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a request asks for; what it does not say, or says in a form nobody knows, is None.

    Nothing here judges the request: that is the engine's work, and its answer reaches the client.

    Attributes:
        path: Its endpoint.
        content: The parsed body; empty where it is no JSON object.
        prompt: What the prediction is made from; None where there is no text (token ids, several prompts).
        messages: Role and text of each message; None for a text completion.
        model: Name of the served model.
        max_tokens: Cap on the answer.
        temperature, top_p: Sampling.
        stream: Whether the answer is to come as events.
        include_usage: Whether the client asked for the last event with the token counts.
        num_answers: Answers asked for; their token counts come as one sum.
        priority: The client's own, if it is an integer of 64 bits.
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
    num_answers: int
    priority: int | None

    @property
    def is_completion(self) -> bool:
        """Whether it is a chat or text completion, whose answer can be read."""
        return self.path in (CHAT, TEXT)

    @property
    def prompt_tokens(self) -> int:
        """An estimate from the characters, at least 1."""
        return 1 + len(self.prompt or "") // CHARS_PER_TOKEN


def read_asked(content: Mapping[str, Any], path: str, reads: Reads) -> Asked:
    """The request in a body.

    Args:
        content: The body's members.
        path: `CHAT`, `TEXT` or another endpoint.
        reads: What artifacts were trained on: the last user message, or the whole conversation.
    """
    messages = _messages(content.get("messages")) if path == CHAT else None
    prompt = content.get("prompt") if path == TEXT else _prompt(messages, reads)
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    num_answers = max(_whole(content.get("n")) or 1, _whole(content.get("best_of")) or 1)
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        num_answers *= len(prompt)
    options = content.get("stream_options")
    model = content.get("model")
    cap = _whole(content.get("max_completion_tokens")) or _whole(content.get("max_tokens"))
    priority = _integer(content.get("priority"))
    return Asked(
        path=path,
        content=content,
        prompt=prompt if isinstance(prompt, str) and prompt else None,
        messages=messages,
        model=model if isinstance(model, str) else "",
        max_tokens=cap,
        temperature=_number(content.get("temperature")),
        top_p=_number(content.get("top_p")),
        stream=content.get("stream") is True,
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        num_answers=num_answers,
        priority=None if priority is None or not -(2**63) <= priority < 2**63 else priority,
    )


def _messages(found: object) -> list[tuple[str, str]] | None:
    if not isinstance(found, list):
        return None
    return [(_text(one.get("role")), _text(one.get("content"))) for one in found if isinstance(one, dict)]


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    parts = [part.get("text") for part in content if isinstance(part, dict)]
    return "".join(part for part in parts if isinstance(part, str))


def _prompt(messages: list[tuple[str, str]] | None, reads: Reads) -> str | None:
    if not messages:
        return None
    if reads == "conversation":
        return conversation_text(messages)
    return next((text for role, text in reversed(messages) if role == "user"), None)


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _whole(value: object) -> int | None:
    number = _integer(value)
    return number if number is not None and 1 <= number < 2**31 else None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and number >= 0 else None
