"""Layouts of rows with prompts, their registry, and the selection of conversation turns as prompts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from data_gen.prompts import Prompt, conversation_id_of
from data_gen.splits import turn_id
from scheduler_core.errors import InputError
from scheduler_core.prediction.prompt_text import (
    ASSISTANT,
    OPTIONS,
    ROLES,
    SYSTEM,
    USER,
    Message,
    content_text,
)

# Roles of a prompt that can be sampled; calls and results of tools cannot.
_ROLES = (SYSTEM, USER, ASSISTANT)

Turns = Literal["first", "last", "all"] | int


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """Selection of prompts from the rows of a source.

    Attributes:
        layout: Name of a layout in `LAYOUTS`; None: detected from the columns.
        turns: User turns of a conversation that become prompts: "first", "last" (the whole conversation up to it),
            "all" (each one with its history), or a number k (the conversation up to its k-th user turn; shorter ones
            are skipped). None: "first" for public sets of conversations, "last" for rows with `messages`.
        languages: Languages of the rows to keep, case-insensitive; empty: all rows.
        category: Column with the category; None: that of the layout.
        repeated: Treatment of a repeated prompt id: "refuse" raises an error that names the row, "drop" skips the row.
            None: "drop" for public sets, which have many, else "refuse".
    """

    layout: str | None = None
    turns: Turns | None = None
    languages: tuple[str, ...] = ()
    category: str | None = None
    repeated: Literal["refuse", "drop"] | None = None

    def __post_init__(self) -> None:
        is_turn = isinstance(self.turns, int) and not isinstance(self.turns, bool) and self.turns >= 1
        if self.turns not in (None, "first", "last", "all") and not is_turn:
            raise InputError("turns", self.turns, "first, last, all or an integer > 0")
        if self.layout is not None and self.layout not in LAYOUTS:
            raise InputError("layout", self.layout, ", ".join(LAYOUTS))


@dataclass(frozen=True, slots=True)
class Conversation:
    """The conversation of a row; fields that the row lacks are ""."""

    messages: tuple[Message, ...]
    conversation_id: str
    category: str
    language: str
    dataset: str


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout of rows, detected by its columns."""

    # Columns whose texts are joined to one user message; or, if `is_chat`, one column with a list of messages, each with
    # role or from, and content or value.
    columns: tuple[str, ...]
    is_chat: bool = True
    turns: Literal["first", "last"] = "first"  # default of `SourceOptions.turns`
    # Whether this is a public data set: repeated prompts are dropped by default, and invalid conversations (empty texts,
    # unknown roles, a missing beginning) are skipped and counted. In a user's own file both are errors.
    public: bool = True

    def read(self, row: Mapping[str, Any], location: str) -> Conversation:
        """Reads the conversation of a row; InputError if it lacks a column, or has no valid text or messages."""
        missing = [column for column in self.columns if column not in row]
        if missing:
            allowed = f"also a column named {missing[0]!r}"
            raise InputError(f"{location}: columns", sorted(map(str, row)), allowed)
        ids: tuple[str, ...] = ("prompt_id",)
        if self.is_chat:
            name = self.columns[0]
            messages = _sampled_messages(row[name], f"{location}: {name}")
            ids = ("prompt_id", "conversation_id", "conversation_hash", "id")
        else:
            first, *others = (row[name] for name in self.columns)
            if not isinstance(first, str) or not first.strip():
                raise InputError(f"{location}: {self.columns[0]}", first, "a text that is not empty")
            texts = (first, *(str(other) for other in others if other is not None and str(other).strip()))
            text = _valid("\n\n".join(texts), location)
            messages = (Message("user", text),)
        return Conversation(
            messages,
            next(filter(None, (_optional(row, name) for name in ids)), ""),
            _optional(row, "category"),
            _optional(row, "language") or _optional(row, "lang"),
            _optional(row, "dataset"),
        )


LAYOUTS: Mapping[str, Layout] = {
    "prompt": Layout(("prompt",), is_chat=False, public=False),
    "messages": Layout(("messages",), turns="last", public=False),
    "conversation": Layout(("conversation",)),
    "sharegpt": Layout(("conversations",)),
    "sharegpt-items": Layout(("items",)),
    "dolly": Layout(("instruction", "context"), is_chat=False),
    "alpaca": Layout(("instruction", "input"), is_chat=False),
}


def layout_of(columns: Iterable[str], location: str) -> Layout:
    """Detects the layout of a row by its columns; InputError if no layout matches."""
    names = set(columns)
    for layout in LAYOUTS.values():
        if names.issuperset(layout.columns):
            return layout
    layouts = "; ".join(" and ".join(layout.columns) for layout in LAYOUTS.values())
    allowed = f"a column named 'prompt', or one of: {layouts}"
    raise InputError(f"{location}: columns", sorted(map(str, names)), allowed)


def _valid(text: str, location: str) -> str:
    """Returns the text; InputError if it has a lone surrogate, which JSON escapes permit but UTF-8 does not."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(location, text, "text that is valid Unicode") from error
    return text


def _optional(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    return "" if value is None else _valid(str(value), name)


def _sampled_messages(value: object, location: str) -> tuple[Message, ...]:
    """Converts a list of objects with role or from, and content or value, to messages that can be sampled; InputError for
    another role, content that is not text, or an empty system or user message."""
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        raise InputError(location, value, "a list of messages with role and content")
    messages = []
    for number, item in enumerate(value, start=1):
        item_location = f"{location} message {number}"
        if not isinstance(item, Mapping):
            raise InputError(item_location, item, "an object with role and content")
        role, content = ("role" if "role" in item else "from"), ("content" if "content" in item else "value")
        word = str(item.get(role)).lower()
        if word == OPTIONS:
            continue  # of the request that is in a log; samples have their own
        name = ROLES.get(word)
        if name not in _ROLES or word == "function_call":
            raise InputError(f"{item_location}: {role}", item.get(role), ", ".join(_ROLES))
        if not _is_text(item.get(content)):
            raise InputError(f"{item_location}: {content}", item.get(content), "a text that is not empty")
        text = content_text(item.get(content))
        if name != ASSISTANT and not text.strip():
            raise InputError(f"{item_location}: {content}", text, "a text that is not empty")
        messages.append(Message(name, _valid(text, f"{item_location}: {content}")))
    return tuple(messages)


def _is_text(content: object) -> bool:
    """Whether a content is a text, or a list of OpenAI's text parts."""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    return all(
        isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in parts
    )


def check_order(messages: Sequence[Message], location: str) -> None:
    """Raises `InputError` unless an optional system prompt is followed by alternating user and assistant messages."""
    start = 1 if messages and messages[0].role == "system" else 0
    if len(messages) == start:
        raise InputError(location, len(messages), "at least one user message")
    for number, message in enumerate(messages[start:]):
        expected = "assistant" if number % 2 else "user"
        if message.role != expected:
            role_location = f"{location} message {number + 1 + start}: role"
            raise InputError(role_location, message.role, f"{expected}: user and assistant alternate")


def prompts_of(conversation: Conversation, turns: Turns, location: str) -> Iterator[Prompt]:
    """Yields the prompts of the selected turns; with "all", each has its own id (`turn_id`) in the conversation's family.

    InputError if user and assistant do not alternate, or the first message is from the assistant.
    """
    messages, own = conversation.messages, conversation.conversation_id
    check_order(messages, location)
    ends = [number for number, message in enumerate(messages, start=1) if message.role == "user"]
    if turns == "all":
        chosen = range(1, len(ends) + 1)
    else:
        number = {"first": 1, "last": len(ends)}.get(str(turns), turns)
        assert isinstance(number, int)
        chosen = range(number, min(number, len(ends)) + 1)
    for turn in chosen:
        history = messages[: ends[turn - 1]]
        prompt_id = own or conversation_id_of(history)
        if turns == "all":
            family = own or conversation_id_of(messages[: ends[0]])
            prompt_id = turn_id(family, turn, "" if own else conversation_id_of(history)[:8])
        yield Prompt(
            prompt_id=prompt_id,
            text=history[-1].text,
            category=conversation.category,
            messages=() if len(history) == 1 else history,
            dataset=conversation.dataset,
        )
