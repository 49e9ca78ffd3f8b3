"""A conversation as one text: what a predictor reads that looks at system prompt and earlier turns too."""

from __future__ import annotations

from collections.abc import Iterable


def conversation_text(messages: Iterable[tuple[str, str]]) -> str:
    """The messages one after another, each behind its role; a lone user message as it stands.

    With truncation in the middle a long one keeps the system prompt and the end of the last message.

    Args:
        messages: Role ("system", "user", "assistant", ...) and content of each, in order.
    """
    found = list(messages)
    if len(found) == 1 and found[0][0] == "user":
        return found[0][1]
    return "\n\n".join(f"{role}: {content}" for role, content in found)
