"""The prompt as the predictor reads it: an engine's scheduler only has token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_MARK = "tailcast-mark-of-the-message"


class PromptReader:
    """Token ids to text; may be called in a thread of its own.

    Args:
        tokenizer: The served model's, with `decode` and `apply_chat_template` of transformers.
        whole: Give the whole text, also of a chat with one user message.
    """

    def __init__(self, tokenizer: Any, *, whole: bool = False) -> None:
        self._tokenizer = tokenizer
        self._frame = None if whole else _frame(tokenizer)

    def __call__(self, token_ids: Sequence[int]) -> str:
        """The lone user message of a chat as it stands; else the text without special tokens.

        A chat has one user message if its text begins and ends as the chat template begins and ends around one.
        """
        ids = list(token_ids)
        if self._frame is not None:
            head, tail = self._frame
            text = self._tokenizer.decode(ids, skip_special_tokens=False)
            if text.startswith(head) and text.endswith(tail) and len(text) >= len(head) + len(tail):
                inner: str = text[len(head) : len(text) - len(tail)]
                if not any(piece and piece in inner for piece in (head, tail)):
                    return inner
        plain: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return plain


def _frame(tokenizer: Any) -> tuple[str, str] | None:
    """What the chat template puts before and behind a lone user message; None without a template."""
    try:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": _MARK}], tokenize=False, add_generation_prompt=True
        )
    except Exception:  # templates are programs of others: whatever they raise, there is no frame
        return None
    head, mark, tail = text.partition(_MARK)
    return (head, tail) if mark and (head or tail) else None
