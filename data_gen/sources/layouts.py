"""Shapes of rows that hold prompts: one literal registry, a reader for each shape, and the turns that become prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from data_gen.prompts import ROLES, Message, Prompt, conversation_id_of
from data_gen.splits import turn_id
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


Turns = Literal["first", "last", "all"] | int


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """What to take of each row.

    Attributes:
        layout: Name of a layout of `data_gen.sources.layouts`; None: by the source's name or columns.
        turns: Which user turns of a conversation become prompts: "first", "last" (the whole conversation up to it),
            "all" (each one with its history), or a number k (the conversation up to its k-th user turn; shorter ones
            are left out). None: "first" for public sets of conversations, "last" for rows of `messages`.
        languages: Only rows whose language is one of these (case does not count); empty takes all.
        category: Column whose value becomes the category; None: the layout's own.
        repeated: Treatment of a repeated prompt id: "refuse" is an error that names the row, "drop" skips it.
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
        if self.repeated not in (None, "refuse", "drop"):
            raise InputError("repeated", self.repeated, "refuse, drop or unset")


@dataclass(frozen=True, slots=True)
class Conversation:
    """The conversation of a row; `conversation_id` and `language` are "" location the row has none."""

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
        columns: A row with these columns is recognized as this layout.
        turns: The turns to take by default.
        public: A public set: repeated prompts are dropped by default, and unusable conversations (empty
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


def _text_of(row: Mapping[str, Any], name: str, location: str) -> str:
    value = row.get(name)
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{location}: {name}", value, "a text that is not empty")
    return _valid(value, f"{location}: {name}")


def _valid(text: str, location: str) -> str:
    """The text, which can be written to a file.

    Raises:
        InputError: It has half of a surrogate pair, as JSON's escapes allow.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(location, text, "text that is valid Unicode") from error
    return text


def _optional(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    return "" if value is None else _valid(str(value), name)


def messages_of(
    value: object, location: str, *, role: str = "role", content: str = "content"
) -> tuple[Message, ...]:
    """A list of messages under the names that the set gives to role and content.

    Raises:
        InputError: It is no list of such messages, or has a role or an empty content that cannot be sent.
    """
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        raise InputError(location, value, f"a list of messages with {role} and {content}")
    messages = []
    for number, item in enumerate(value, start=1):
        if not isinstance(item, Mapping):
            raise InputError(f"{location} message {number}", item, f"an object with {role} and {content}")
        name = _ROLE_NAMES.get(str(item.get(role)).lower())
        text = item.get(content)
        if name is None:
            raise InputError(f"{location} message {number}: {role}", item.get(role), ", ".join(ROLES))
        if not isinstance(text, str) or (name != "assistant" and not text.strip()):
            raise InputError(f"{location} message {number}: {content}", text, "a text that is not empty")
        messages.append(Message(name, _valid(text, f"{location} message {number}: {content}")))
    return tuple(messages)


def _plain(row: Mapping[str, Any], location: str) -> Conversation:
    return Conversation(
        (Message("user", _text_of(row, "prompt", location)),),
        _optional(row, "prompt_id"),
        _optional(row, "category"),
        _optional(row, "language"),
        _optional(row, "dataset"),
    )


def _messages(row: Mapping[str, Any], location: str) -> Conversation:
    return Conversation(
        messages_of(row.get("messages"), f"{location}: messages"),
        _optional(row, "prompt_id") or _optional(row, "conversation_id") or _optional(row, "id"),
        _optional(row, "category"),
        _optional(row, "language"),
        _optional(row, "dataset"),
    )


def _conversation(row: Mapping[str, Any], location: str) -> Conversation:
    """lmsys-chat-1m and WildChat: `conversation` with role and content, `language` a word such as English."""
    return Conversation(
        messages_of(row.get("conversation"), f"{location}: conversation"),
        _optional(row, "conversation_id") or _optional(row, "conversation_hash"),
        "",
        _optional(row, "language"),
    )


def _sharegpt(row: Mapping[str, Any], location: str) -> Conversation:
    """Both layouts of ShareGPT: `conversations` (RyokoAI, the Vicuna files) or `items` (openchat), from and value."""
    name = "conversations" if "conversations" in row else "items"
    value = row.get(name)
    keys = {"role": "from", "content": "value"}
    if isinstance(value, list) and value and isinstance(value[0], Mapping) and "role" in value[0]:
        keys = {"role": "role", "content": "content" if "content" in value[0] else "value"}
    return Conversation(
        messages_of(value, f"{location}: {name}", **keys),
        _optional(row, "id"),
        "",
        _optional(row, "lang") or _optional(row, "language"),
    )


def _instruction(context: str) -> Callable[[Mapping[str, Any], str], Conversation]:
    """Alpaca and Dolly: an instruction, then a blank line and its `context` if there is one."""

    def read(row: Mapping[str, Any], location: str) -> Conversation:
        text = _text_of(row, "instruction", location)
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


def layout_of(columns: Iterable[str], location: str) -> Layout:
    """The layout that a row with these columns has.

    Raises:
        InputError: None has them.
    """
    names = set(columns)
    for layout in LAYOUTS.values():
        if names.issuperset(layout.columns):
            return layout
    layouts = "; ".join(" and ".join(layout.columns) for layout in LAYOUTS.values())
    raise InputError(
        f"{location}: columns", sorted(map(str, names)), f"a column named 'prompt', or one of: {layouts}"
    )


def named_layout(name: str) -> Layout:
    """The layout called `name`.

    Raises:
        InputError: There is none.
    """
    if name not in LAYOUTS:
        raise InputError("layout", name, ", ".join(LAYOUTS))
    return LAYOUTS[name]


def check_order(messages: Sequence[Message], location: str) -> None:
    """Raises `InputError` unless the messages are an optional system prompt, then user and assistant in turn."""
    body = messages[1:] if messages and messages[0].role == "system" else messages
    if not body:
        raise InputError(location, len(messages), "at least one user message")
    for number, message in enumerate(body):
        expected = "assistant" if number % 2 else "user"
        if message.role != expected:
            position = number + 1 + len(messages) - len(body)
            raise InputError(
                f"{location} message {position}: role",
                message.role,
                f"{expected}: user and assistant in turn",
            )


def prompts_of(conversation: Conversation, turns: Turns, location: str) -> Iterator[Prompt]:
    """The prompts of the turns that are to be taken.

    Raises:
        InputError: The messages are not in turn, or the first is the assistant's: its beginning is missing.
    """
    messages = conversation.messages
    check_order(messages, location)
    ends = [number for number, message in enumerate(messages) if message.role == "user"]
    for turn in _turn_numbers(len(ends), turns):
        history = messages[: ends[turn - 1] + 1]
        yield Prompt(
            prompt_id=_prompt_id(
                conversation, history, messages[: ends[0] + 1], turn if turns == "all" else None
            ),
            text=history[-1].content,
            category=conversation.category,
            messages=() if len(history) == 1 else history,
            dataset=conversation.dataset,
        )


def _prompt_id(
    conversation: Conversation, history: Sequence[Message], opening: Sequence[Message], turn: int | None
) -> str:
    """One prompt of a conversation has the conversation's id; of several, each has its own in one family."""
    own = conversation.conversation_id
    if turn is None:
        return own or conversation_id_of(history)
    return (
        turn_id(own, turn)
        if own
        else turn_id(conversation_id_of(opening), turn, conversation_id_of(history)[:8])
    )


def _turn_numbers(num_turns: int, turns: Turns) -> range:
    if turns == "first":
        return range(1, 2)
    if turns == "last":
        return range(num_turns, num_turns + 1)
    if turns == "all":
        return range(1, num_turns + 1)
    assert isinstance(turns, int)
    return range(turns, turns + 1) if turns <= num_turns else range(0)
