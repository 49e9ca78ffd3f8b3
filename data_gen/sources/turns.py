"""Prompts from a conversation: its first user turn, all of it, or each user turn with its history."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from data_gen.prompts import Message, Prompt, conversation_id_of
from data_gen.sources.layouts import Conversation
from data_gen.sources.options import Turns
from data_gen.splits import turn_id
from scheduler_core.errors import InputError


def check_order(messages: Sequence[Message], where: str) -> None:
    """Raises `InputError` unless the messages are an optional system prompt, then user and assistant in turn."""
    body = messages[1:] if messages and messages[0].role == "system" else messages
    if not body:
        raise InputError(where, len(messages), "at least one user message")
    for number, message in enumerate(body):
        expected = "assistant" if number % 2 else "user"
        if message.role != expected:
            position = number + 1 + len(messages) - len(body)
            raise InputError(
                f"{where} message {position}: role", message.role, f"{expected}: user and assistant in turn"
            )


def prompts_of(conversation: Conversation, turns: Turns, where: str) -> Iterator[Prompt]:
    """The prompts that `turns` asks for, at least none.

    Raises:
        InputError: The messages are not in turn, or the first is the assistant's: its beginning is missing.
    """
    messages = conversation.messages
    check_order(messages, where)
    ends = [number for number, message in enumerate(messages) if message.role == "user"]
    for turn in _chosen(len(ends), turns):
        history = messages[: ends[turn - 1] + 1]
        yield Prompt(
            prompt_id=_id(conversation, history, messages[: ends[0] + 1], turn if turns == "all" else None),
            text=history[-1].content,
            category=conversation.category,
            messages=() if len(history) == 1 else history,
            dataset=conversation.dataset,
        )


def _id(
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


def _chosen(num_turns: int, turns: Turns) -> range:
    if turns == "first":
        return range(1, 2)
    if turns == "last":
        return range(num_turns, num_turns + 1)
    if turns == "all":
        return range(1, num_turns + 1)
    assert isinstance(turns, int)
    return range(turns, turns + 1) if turns <= num_turns else range(0)
