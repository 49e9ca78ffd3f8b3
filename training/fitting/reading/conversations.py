"""Whole conversations in place of their last user message, for predictors that read them."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from predictors.conversation import conversation_text
from scheduler_core.errors import InputError

FITS = {"mu", "sigma", "nu"}


def with_conversations(table: pa.Table, path: Path) -> pa.Table:
    """A table of answer lengths whose column `prompt` is the text of the whole conversation, where there is one.

    Args:
        table: Samples or lists; a row whose `messages` are null, and a table without that column, is a lone user message.
        path: Where it came from, for messages.

    Raises:
        InputError: It is a file of fits, which keep the last user message alone.
    """
    if set(table.column_names) >= FITS:
        raise InputError(f"{path.name}, columns", sorted(FITS), "samples, because fits keep no conversations")
    if "messages" not in table.column_names or "prompt" not in table.column_names:
        return table
    texts = [
        text if messages is None else conversation_text((each["role"], each["content"]) for each in messages)
        for text, messages in zip(
            table.column("prompt").to_pylist(), table.column("messages").to_pylist(), strict=True
        )
    ]
    place = table.column_names.index("prompt")
    return table.set_column(place, table.schema.field("prompt"), pa.array(texts, pa.string()))
