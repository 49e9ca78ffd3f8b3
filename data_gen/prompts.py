"""Prompts: a single user message, or a conversation that ends with one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler_core.prediction.prompt_text import USER, Message

__all__ = ["Message", "Prompt", "conversation_id_of", "prompt_id_of"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One input of a model."""

    # Unique within a source. Ids of the turns of a conversation end in `#turn-N` (see `data_gen.splits`).
    prompt_id: str
    text: str  # the user message; for a conversation, the last one
    category: str = ""
    # The whole conversation, ending with a user message, if it has more than this message; else empty.
    messages: tuple[Message, ...] = ()
    dataset: str = ""  # public data set that the prompt comes from

    @property
    def chat(self) -> tuple[Message, ...]:
        """The messages to send."""
        return self.messages or (Message(USER, self.text),)


def prompt_id_of(text: str) -> str:
    """Default id of a prompt: the first 16 hex digits of the SHA-256 of its text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def conversation_id_of(messages: Sequence[Message]) -> str:
    """Default id of a conversation, a hash of roles and texts; for a single user message, `prompt_id_of` its text."""
    if len(messages) == 1 and messages[0].role == USER:
        return prompt_id_of(messages[0].text)
    return prompt_id_of(json.dumps([[m.role, m.text] for m in messages], ensure_ascii=False))
