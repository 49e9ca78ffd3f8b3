"""Text of prompts: messages of any chat API as roles and texts, and the text that a predictor reads.

Service, proxy, routers, importers and the Python API all read messages here, so that training and serving see
the same text. Reading never fails: a malformed message has an empty text, because the engine reports it.

| content of a message | text |
|---|---|
| a text, or a list of texts and text parts (OpenAI chat, Responses and Anthropic) | the texts, joined |
| null, or nothing that is text | empty |
| images, audio, video or files, without text | a placeholder, such as [image] |
| calls of tools (`tool_calls`, `function_call`, `tool_use`, `tool_call`, `functionCall`) | NAME(ARGUMENTS), one per line |
| results of tools (role tool or function, `tool_result`, `function_call_output`, `functionResponse`) | the result |

What a predictor reads of them is its `PromptForm`: the last text of the user, or the conversation, whole or in parts:

| part | text, in this order |
|---|---|
| options | the options of the request (`request_options`), which are a message of the role options |
| system | the system prompts |
| turns | the messages before the last text of the user |
| last | the last text of the user and what follows, such as results of tools |
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from scheduler_core.errors import InputError
from scheduler_core.ranges import INTEGERS, check_ranges

OPTIONS, SYSTEM, USER, ASSISTANT, TOOL = "options", "system", "user", "assistant", "tool"
#: Returns a member of the body of a request by name; None if it is missing.
Read = Callable[[str], Any]
#: Names of roles in APIs and public data sets -> role.
ROLES: Mapping[str, str] = {
    **dict.fromkeys(("system", "developer"), SYSTEM),
    **dict.fromkeys(("user", "human"), USER),
    **dict.fromkeys(
        ("assistant", "model", "ai", "gpt", "chatgpt", "bing", "bard", "function_call"), ASSISTANT
    ),
    **dict.fromkeys(("tool", "function", "observation", "ipython", "tool_response"), TOOL),
}
#: Word in the type of a content part -> placeholder of a message without text.
_MEDIA = {"image": "[image]", "audio": "[audio]", "video": "[video]", "file": "[file]", "document": "[file]"}
PLACEHOLDERS = frozenset(_MEDIA.values())
#: Types of items of the Responses API that are not messages -> role.
_ITEM_ROLES = {"function_call_output": TOOL, "custom_tool_call_output": TOOL, "tool_result": TOOL}
_CALLS = frozenset({"function_call", "custom_tool_call", "tool_call", "tool_use", "server_tool_use"})
#: Maximum nesting of content that is read.
_MAX_DEPTH = 8
#: What takes about one token each: words of up to `_ENGLISH_LETTERS` or `_OTHER_LETTERS` letters, and other characters.
_PIECES = re.compile(r"[A-Za-z\u00c0-\u024f]{1,32}|[0-9]{1,3}|\S")
_ENGLISH_LETTERS, _OTHER_LETTERS = 6, 3
_ENGLISH = frozenset(
    (
        "the",
        "of",
        "to",
        "and",
        "a",
        "in",
        "is",
        "that",
        "for",
        "on",
        "with",
        "as",
        "it",
        "you",
        "be",
        "are",
        "your",
        "this",
    )
)
#: Share of these words from which a text is English.
_MIN_ENGLISH = 0.1
#: Characters that are read per token of a budget, at each end of a text.
_CHARS_PER_TOKEN = 16
_GAP = " … "
_FORMAT_SIZE = re.compile(r"\[size \d+\] ?")


class Message(NamedTuple):
    """One message of a conversation; `role` is system, user, assistant or tool."""

    role: str
    text: str


def member(source: object, name: str) -> Any:
    """A member of a mapping, or an attribute of another object; None if it is missing."""
    if isinstance(source, dict | Mapping):  # dict first, because the check of an abstract class is slow
        return source.get(name)
    return getattr(source, name, None)


def is_list(value: object) -> bool:
    """Whether a value is a list or another iterable of elements; a text or an object is none."""
    if isinstance(value, list):
        return True
    return value is not None and not isinstance(value, str | bytes | Mapping) and isinstance(value, Iterable)


def content_text(content: object) -> str:
    """The text of the content of a message, which may be a list of parts; see the table above."""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    media: list[str] = []
    _read(content, texts, media, _MAX_DEPTH)
    return "".join(texts) or "".join(media[:1])


def messages_of(value: object) -> tuple[Message, ...]:
    """The messages of a list: of OpenAI chat, Anthropic or ShareGPT messages, or items of the Responses API. Elements
    without a role or content are left out; anything but a list has no messages."""
    if not is_list(value):
        return ()
    messages = (_message(item) for item in value)  # type: ignore[attr-defined]
    return tuple(message for message in messages if message is not None)


def user_text(messages: Sequence[Message]) -> str:
    """The last text of the user; without one the last text of any message, or a placeholder. Empty if there is none."""
    messages = [message for message in messages if message.text and message.role != OPTIONS]
    texts = [each for each in messages if each.text.strip() and each.text not in PLACEHOLDERS]
    of_user = [message for message in texts if message.role == USER]
    return next((choices[-1].text for choices in (of_user, texts, messages) if choices), "")


def conversation_text(messages: Iterable[Message]) -> str:
    """The text of a whole conversation: texts with their roles, or the text of a single user message. Truncation in the
    middle keeps the system prompt and the end."""
    turns = [message for message in messages if message.text and message.role != OPTIONS]
    if len(turns) == 1 and turns[0].role == USER:
        return turns[0].text
    return _with_roles(turns)


class ConversationParts(NamedTuple):
    """The messages of each part of a conversation that have a text; see the table above."""

    options: Sequence[Message]
    system: Sequence[Message]
    turns: Sequence[Message]
    last: Sequence[Message]

    @classmethod
    def of(cls, messages: Iterable[Message]) -> ConversationParts:
        """Splits a conversation into its parts."""
        options: list[Message] = []
        system: list[Message] = []
        others: list[Message] = []
        for message in messages:
            if message.text:
                role = message.role
                (options if role == OPTIONS else system if role == SYSTEM else others).append(message)
        of_user = [number for number, message in enumerate(others) if message.role == USER]
        texts = [number for number in of_user if others[number].text not in PLACEHOLDERS]
        start = [max(len(others) - 1, 0), *of_user[-1:], *texts[-1:]][-1]
        return cls(options, system, others[:start], others[start:])

    def with_random_parts(self, rng: np.random.Generator, dropped: float = 0.5) -> tuple[Message, ...]:
        """The conversation, from which options, system prompts and earlier turns are each dropped with this probability, so
        that a predictor learns to do without them."""
        chosen = [part for part in self[:-1] if rng.random() >= dropped]
        return tuple(message for part in (*chosen, self.last) for message in part)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTokens:
    """Numbers of tokens of the parts of a conversation that a predictor reads, about.

    Of a longer part the beginning and the end are kept. The sum should be less than the predictor's max_length by about
    20, for special tokens and errors of the estimate.
    """

    options: int = 40
    """Tokens of the options of the request, such as its tools and response format."""
    system: int = 56
    """Tokens of the system prompts."""
    turns: int = 48
    """Tokens of the messages before the last text of the user."""
    last: int = 96
    """Tokens of the last text of the user and what follows, in addition to those that the other parts leave."""
    format_size: bool = False
    """Whether the options include the size of the response format."""

    #: Read by pydantic, where a configuration or a manifest has this one.
    __pydantic_config__: ClassVar[Mapping[str, object]] = {"strict": True, "extra": "forbid"}

    def __post_init__(self) -> None:
        check_ranges(self, **dict.fromkeys(("options", "system", "turns", "last"), (1, INTEGERS)))

    def text(self, messages: Iterable[Message]) -> str:
        """The text of a conversation within these numbers of tokens; a single user message is unchanged."""
        parts = ConversationParts.of(messages)
        if not self.format_size:
            shorter = (option._replace(text=_FORMAT_SIZE.sub("", option.text)) for option in parts.options)
            parts = parts._replace(options=[option for option in shorter if option.text])
        if len(parts.last) == 1 and parts.last[0].role == USER and not any(parts[:-1]):
            return parts.last[0].text
        texts, left = [], 0
        for name, part in parts._asdict().items():
            budget: int = getattr(self, name) + (left if name == "last" else 0)
            text, num_tokens = _shortened(_with_roles(part), budget)
            left += budget - num_tokens
            texts.append(text)
        return "\n\n".join(filter(None, texts))


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptForm:
    """What a predictor reads of the messages of a request, in training as in serving.

    Attributes:
        conversations: Whether it reads the conversation, not only the last text of the user.
        part_tokens: Numbers of tokens of the parts of a conversation; None: the whole conversation, without options.
    """

    conversations: bool = False
    part_tokens: PartTokens | None = None

    def __post_init__(self) -> None:
        if self.part_tokens is not None and not self.conversations:
            raise InputError("part_tokens", self.part_tokens, "unset, because conversations is false")

    def text(self, messages: Sequence[Message]) -> str:
        """The text that the predictor reads."""
        if not self.conversations:
            return user_text(messages)
        return (conversation_text if self.part_tokens is None else self.part_tokens.text)(messages)


#: The form of predictors of the last text of the user.
LAST_TEXT = PromptForm()


def prompt_key(messages: Sequence[Message]) -> int:
    """Key of the system prompts of a conversation, an integer of 64 bits; 0 without a system prompt. They often identify the
    application, whose requests have similar outputs."""
    texts = [message.text for message in messages if message.role == SYSTEM and message.text]
    if not texts:
        return 0
    digest = hashlib.blake2b("\0".join(texts).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _with_roles(messages: Iterable[Message]) -> str:
    return "\n\n".join(f"{message.role}: {message.text}" for message in messages)


def _shortened(text: str, budget: int) -> tuple[str, int]:
    """The beginning and the end of a text, of about `budget` tokens together, and their number of tokens. The estimate is
    one for all tokenizers, and rather too high."""
    limit = _CHARS_PER_TOKEN * budget
    letters = _ENGLISH_LETTERS if _is_english(text[:limit]) else _OTHER_LETTERS

    def pieces(start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Start, end and number of tokens of each piece between two positions."""
        for match in _PIECES.finditer(text, start, end):
            first, last = match.span()
            yield first, last, -(-(last - first) // letters) if text[first].isalpha() else 1

    if len(text) <= limit:
        num_tokens = sum(tokens for _, _, tokens in pieces(0, limit))
        if num_tokens <= budget:
            return text, num_tokens
    last = (budget - 1) // 2
    first, used, head = budget - 1 - last, 1, 0
    for _, end, tokens in pieces(0, limit):
        if tokens > first:
            break
        first, used, head = first - tokens, used + tokens, end
    for chars in (limit // 4, limit):  # usually the smaller number is enough
        start, left = len(text), last
        for begin, _, tokens in reversed(list(pieces(max(len(text) - chars, 0), len(text)))):
            if tokens > left:
                return f"{text[:head]}{_GAP}{text[start:]}", used + last - left
            left, start = left - tokens, begin
    return f"{text[:head]}{_GAP}{text[start:]}", used + last - left


def _is_english(text: str) -> bool:
    words = text.lower().split()
    return sum(word in _ENGLISH for word in words) > _MIN_ENGLISH * len(words)


def _message(item: object) -> Message | None:
    if isinstance(item, str):
        return Message(USER, item)
    kind, role = member(item, "type"), member(item, "role")
    kind = kind if isinstance(kind, str) else ""
    role = role if isinstance(role, str) else member(item, "from")
    if kind in _CALLS:
        return Message(ASSISTANT, _call(item))
    if not isinstance(role, str):
        role = _ITEM_ROLES.get(kind)
        if role is None:
            return None
    role = ROLES.get(role.strip().lower(), role)
    names = ("content", "value", "output", "parts", "contents", "text")
    content = next((value for name in names if (value := member(item, name)) is not None), None)
    if role == USER and _has_only_results(content):
        role = TOOL
    text = content_text(content)
    called = member(item, "tool_calls")
    calls = [*called] if is_list(called) else []
    if (call := member(item, "function_call")) is not None:
        calls.append(call)
    if not text and (refusal := member(item, "refusal")) and isinstance(refusal, str):
        text = refusal
    return Message(role, "\n".join(filter(None, (text, *map(_call, calls)))))


def _has_only_results(content: object) -> bool:
    """Whether the content of a user message is results of tools, as in the Anthropic API."""
    if not isinstance(content, list) or not content:
        return False
    return all(isinstance(part, Mapping) and part.get("type") == "tool_result" for part in content)


def _call(call: object) -> str:
    """A call of a tool: NAME(ARGUMENTS)."""
    function = member(call, "function")
    source = call if function is None or isinstance(function, str) else function
    name = function if isinstance(function, str) else member(source, "name")
    values = (member(source, key) for key in ("arguments", "input", "args"))
    arguments = next((value for value in values if value is not None), "")
    if not isinstance(arguments, str):
        arguments = _json(arguments)
    return f"{name}({arguments})" if isinstance(name, str) else ""


def _json(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, TypeError, RecursionError):
        return ""


def _read(content: object, texts: list[str], media: list[str], depth: int) -> None:
    """Appends the texts of a content, and placeholders of its other parts."""
    if isinstance(content, str):
        texts.append(content)
    elif content is None or isinstance(content, bytes | int | float) or depth == 0:
        return
    elif isinstance(content, Iterable) and not isinstance(content, Mapping):
        for part in content:
            _read(part, texts, media, depth - 1)
    else:
        kind = member(content, "type")
        kind = kind if isinstance(kind, str) else ""
        if kind in _CALLS:
            texts.append(_call(content))
            return
        if (call := member(content, "functionCall")) is not None:
            texts.append(_call(call))
            return
        names = (
            "text",
            "refusal",
            "thinking",
            "content",
            "output",
            "value",
            "response",
            "result",
            "parts",
            "functionResponse",
        )
        inner = next((value for name in names if (value := member(content, name)) is not None), None)
        media += [placeholder for word, placeholder in _MEDIA.items() if word in kind][:1]
        _read(inner, texts, media, depth - 1)
