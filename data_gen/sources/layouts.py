"""How a row of each known set of prompts is read: one literal registry, one function for each shape of row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from data_gen.prompts import ROLES, Message
from scheduler_core.errors import InputError

# Names that public sets give to the three roles.
_ROLE_NAMES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "developer": "system",
}


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a row says; `conversation_id` is "" if it brings none, `language` if it does not say."""

    messages: tuple[Message, ...]
    conversation_id: str = ""
    category: str = ""
    language: str = ""
    dataset: str = ""


@dataclass(frozen=True, slots=True)
class Layout:
    """One shape of row.

    Attributes:
        read: (columns, name of the row for messages) -> conversation.
        columns: A row with these columns is recognised as this layout.
        turns: Which turns are taken unless asked otherwise.
        public: A public set: repeated prompts are dropped unless asked otherwise, and unusable conversations (empty
            texts, unknown roles, a missing beginning) skipped and counted; in a user's own file they are errors.
    """

    read: Callable[[Mapping[str, Any], str], Conversation]
    columns: tuple[str, ...]
    turns: Literal["first", "last"] = "first"
    public: bool = True


@dataclass(frozen=True, slots=True)
class HubSet:
    """A set on the hub: layout of its rows, the split and the files to take when none are named."""

    layout: str
    dataset: str
    split: str = "train"
    data_files: str | None = None


def _text_of(row: Mapping[str, Any], name: str, where: str) -> str:
    value = row.get(name)
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{where}: {name}", value, "a text that is not empty")
    return _valid(value, f"{where}: {name}")


def _valid(text: str, where: str) -> str:
    """The text, which can be written to a file.

    Raises:
        InputError: It has half of a surrogate pair, as JSON's escapes allow.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(where, text, "text that is valid Unicode") from error
    return text


def _optional(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    return "" if value is None else _valid(str(value), name)


def messages_of(
    value: object, where: str, *, role: str = "role", content: str = "content"
) -> tuple[Message, ...]:
    """A list of messages under the names that the set gives to role and content.

    Raises:
        InputError: It is no list of such messages, or has a role or an empty content that cannot be sent.
    """
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        raise InputError(where, value, f"a list of messages with {role} and {content}")
    messages = []
    for number, item in enumerate(value, start=1):
        if not isinstance(item, Mapping):
            raise InputError(f"{where} message {number}", item, f"an object with {role} and {content}")
        name = _ROLE_NAMES.get(str(item.get(role)).lower())
        text = item.get(content)
        if name is None:
            raise InputError(f"{where} message {number}: {role}", item.get(role), ", ".join(ROLES))
        if not isinstance(text, str) or (name != "assistant" and not text.strip()):
            raise InputError(f"{where} message {number}: {content}", text, "a text that is not empty")
        messages.append(Message(name, _valid(text, f"{where} message {number}: {content}")))
    return tuple(messages)


def _plain(row: Mapping[str, Any], where: str) -> Conversation:
    return Conversation(
        (Message("user", _text_of(row, "prompt", where)),),
        _optional(row, "prompt_id"),
        _optional(row, "category"),
        _optional(row, "language"),
        _optional(row, "dataset"),
    )


def _messages(row: Mapping[str, Any], where: str) -> Conversation:
    return Conversation(
        messages_of(row.get("messages"), f"{where}: messages"),
        _optional(row, "prompt_id") or _optional(row, "conversation_id") or _optional(row, "id"),
        _optional(row, "category"),
        _optional(row, "language"),
        _optional(row, "dataset"),
    )


def _conversation(row: Mapping[str, Any], where: str) -> Conversation:
    """lmsys-chat-1m and WildChat: `conversation` with role and content, `language` a word such as English."""
    return Conversation(
        messages_of(row.get("conversation"), f"{where}: conversation"),
        _optional(row, "conversation_id") or _optional(row, "conversation_hash"),
        "",
        _optional(row, "language"),
    )


def _sharegpt(row: Mapping[str, Any], where: str) -> Conversation:
    """Both layouts of ShareGPT: `conversations` (RyokoAI, the Vicuna files) or `items` (openchat), from and value."""
    name = "conversations" if "conversations" in row else "items"
    value = row.get(name)
    keys = {"role": "from", "content": "value"}
    if isinstance(value, list) and value and isinstance(value[0], Mapping) and "role" in value[0]:
        keys = {"role": "role", "content": "content" if "content" in value[0] else "value"}
    return Conversation(
        messages_of(value, f"{where}: {name}", **keys),
        _optional(row, "id"),
        "",
        _optional(row, "lang") or _optional(row, "language"),
    )


def _instruction(context: str) -> Callable[[Mapping[str, Any], str], Conversation]:
    """Alpaca and Dolly: an instruction, then a blank line and its `context` if there is one."""

    def read(row: Mapping[str, Any], where: str) -> Conversation:
        text = _text_of(row, "instruction", where)
        extra = _optional(row, context).strip()
        return Conversation(
            (Message("user", f"{text}\n\n{extra}" if extra else text),),
            "",
            _optional(row, "category"),
            _optional(row, "language"),
        )

    return read


LAYOUTS: Mapping[str, Layout] = {
    "prompt": Layout(_plain, ("prompt",), public=False),
    "messages": Layout(_messages, ("messages",), turns="last", public=False),
    "conversation": Layout(_conversation, ("conversation",)),
    "sharegpt": Layout(_sharegpt, ("conversations",)),
    "sharegpt-items": Layout(_sharegpt, ("items",)),
    "dolly": Layout(_instruction("context"), ("instruction", "context")),
    "alpaca": Layout(_instruction("input"), ("instruction", "input")),
}

HUB_SETS: Mapping[str, HubSet] = {
    "lmsys/lmsys-chat-1m": HubSet("conversation", "lmsys-chat-1m"),
    "allenai/WildChat": HubSet("conversation", "wildchat"),
    "allenai/WildChat-1M": HubSet("conversation", "wildchat"),
    "anon8231489123/ShareGPT_Vicuna_unfiltered": HubSet(
        "sharegpt", "sharegpt", data_files="ShareGPT_V3_unfiltered_cleaned_split.json"
    ),
    "RyokoAI/ShareGPT52K": HubSet("sharegpt", "sharegpt"),
    "tatsu-lab/alpaca": HubSet("alpaca", "alpaca"),
    "databricks/databricks-dolly-15k": HubSet("dolly", "dolly"),
}


def layout_of(columns: Iterable[str], where: str) -> Layout:
    """The layout that a row with these columns has.

    Raises:
        InputError: None has them.
    """
    names = set(columns)
    for layout in LAYOUTS.values():
        if names.issuperset(layout.columns):
            return layout
    known = "; ".join(" and ".join(layout.columns) for layout in LAYOUTS.values())
    raise InputError(
        f"{where}: columns", sorted(map(str, names)), f"a column named 'prompt', or one of: {known}"
    )


def named_layout(name: str) -> Layout:
    """The layout called `name`.

    Raises:
        InputError: There is none.
    """
    if name not in LAYOUTS:
        raise InputError("layout", name, ", ".join(LAYOUTS))
    return LAYOUTS[name]
