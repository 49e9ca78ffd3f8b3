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
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"
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
    texts = [message for message in messages if message.text.strip() and message.text not in PLACEHOLDERS]
    of_user = [message for message in texts if message.role == USER]
    others = [message for message in messages if message.text]
    return next((choices[-1].text for choices in (of_user, texts, others) if choices), "")


def conversation_text(messages: Iterable[tuple[str, str]]) -> str:
    """The text of a conversation of (role, text): texts with their roles, or the text of a single user message. Truncation
    in the middle keeps the system prompt and the end."""
    turns = [(role, text) for role, text in messages if text]
    if len(turns) == 1 and turns[0][0] == USER:
        return turns[0][1]
    return "\n\n".join(f"{role}: {text}" for role, text in turns)


def predictor_text(messages: Sequence[Message], *, conversations: bool) -> str:
    """The text that a predictor reads: the conversation, if the artifact was trained on `conversations`, else `user_text`."""
    return conversation_text(messages) if conversations else user_text(messages)


def prompt_key(messages: Sequence[Message]) -> int:
    """Key of the system prompts of a conversation, an integer of 64 bits; 0 without a system prompt. They often identify the
    application, whose requests have similar outputs."""
    texts = [message.text for message in messages if message.role == SYSTEM and message.text]
    if not texts:
        return 0
    digest = hashlib.blake2b("\0".join(texts).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


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
