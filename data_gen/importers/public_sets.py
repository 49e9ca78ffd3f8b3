"""Importers of public sets of output lengths whose rows need rules of their own; `formats` has the serving traces.

| kind | columns of the source |
|---|---|
| castillo | ten lengths for each prompt and model, from `preproc_DATASET_SPLIT_MODEL.json` or Parquet |
| sharegpt | conversations, in any layout supported by `gen-samples`, and lists of messages |

They have no arrival times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_gen.filters import token_counter
from data_gen.importers.formats import Format, format_rows
from data_gen.importers.values import LENGTH, STOP, Row, SkippedRows
from data_gen.sources.layouts import Layout, layout_of
from data_gen.splits import digest64, turn_id
from scheduler_core.prediction.prompt_text import (
    ASSISTANT,
    SYSTEM,
    TOOL,
    USER,
    Message,
    content_text,
    messages_of,
)
from scheduler_core.shell.json_text import from_json
from scheduler_core.shell.table_files import file_rows, file_suffix

#: max_tokens of CASTILLO: an output of at least this length was truncated (some files count one token more).
CASTILLO_MAX_TOKENS = 15_000
_CASTILLO = ("prompt_id", "prompt", "category", "dataset", "model", "temperature", "top_p", "prompt_tokens", "output_tokens")  # fmt: skip
_CASTILLO_JSON = {
    "prompt": "prompt_text",
    "prompt_tokens": "input_size",
    "temperature": "temp",
    "output_tokens": "output_sizes",
}


def castillo_rows(path: Path, skipped: SkippedRows) -> Iterator[Row]:
    """Yields one row for each length of CASTILLO, in tokens of the respective model."""
    names = _CASTILLO_JSON if file_suffix(path) == ".json" else {}
    source_format = Format(columns={name: names.get(name, name) for name in _CASTILLO})
    for number, row in format_rows(path, source_format, skipped):
        length = row["output_tokens"]
        row["model"] = (row["model"] or "").replace("--", "/", 1)
        row |= {"sample_index": row["element"], "max_tokens": CASTILLO_MAX_TOKENS}
        if length is not None:
            row["output_tokens"] = min(length, CASTILLO_MAX_TOKENS)
            row["finish_reason"] = LENGTH if length >= CASTILLO_MAX_TOKENS else STOP
        yield number, row


def sharegpt_rows(path: Path, tokenizer: str, skipped: Counter[str]) -> Iterator[Row]:
    """Yields a request for each output of the assistant; its prompt is the preceding conversation, its tenant the
    conversation id.

    Calls of tools and their results are part of the prompt of the output that follows. Lengths are tokens of the texts
    without a chat template; an output includes its EOS token. Repeated and invalid conversations (an empty text, a missing
    beginning or turn) are skipped.
    """
    count_tokens = token_counter(tokenizer)
    layout = None
    identifiers: set[int] = set()
    for number, raw in file_rows(
        path, "file", on_bad_row=lambda *_: skipped.update(["unusable conversation"])
    ):
        layout = layout or layout_of(raw, f"{path.name} row {number}")
        messages = _conversation(raw, layout)
        if messages is None:
            skipped["unusable conversation"] += 1
            continue
        identifier = next((str(raw[name]) for name in _IDS if raw.get(name) not in (None, "")), f"r{number}")
        if (digest := digest64(identifier)) in identifiers:
            skipped["repeated conversation"] += 1
            continue
        identifiers.add(digest)
        lengths = count_tokens([message.text for message in messages])
        outputs = [position for position in range(len(messages)) if _is_output(messages, position)]
        for turn, position in enumerate(outputs, start=1):
            users = [message.text for message in messages[:position] if message.role == USER]
            yield (
                number,
                {
                    "request_id": turn_id(identifier, turn),
                    "tenant": identifier,
                    "prompt": users[-1],
                    "prompt_tokens": sum(lengths[:position]),
                    "output_tokens": lengths[position] + 1,
                },
            )


_IDS = ("prompt_id", "conversation_id", "conversation_hash", "id")


def _conversation(raw: Mapping[str, Any], layout: Layout) -> Sequence[Message] | None:
    """The messages of a row, with a system prompt beside them; None if a message is missing or has no text."""
    value = from_json(raw.get(layout.columns[0]))
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        return None
    messages = messages_of(value)
    # An output and the result of a tool may be empty, unlike a text of the user.
    has_texts = all(each.text.strip() or each.role in (ASSISTANT, TOOL) for each in messages)
    if len(messages) < len(value) or not has_texts:
        return None
    if messages and messages[0].role != SYSTEM and (text := content_text(raw.get("system"))):
        messages = (Message(SYSTEM, text), *messages)
    turns = [
        message
        for position, message in enumerate(messages)
        if message.role == USER or _is_output(messages, position) or (position and message.role == SYSTEM)
    ]
    in_order = all(turn.role == (ASSISTANT if number % 2 else USER) for number, turn in enumerate(turns))
    return messages if turns and in_order else None


def _is_output(messages: Sequence[Message], position: int) -> bool:
    """Whether a message is an output to the user, and not a call of a tool."""
    following = messages[position + 1] if position + 1 < len(messages) else None
    return messages[position].role == ASSISTANT and (following is None or following.role != TOOL)
