"""Importers of public serving traces and sets of output lengths.

| kind | columns of the source | time |
|---|---|---|
| azure | TIMESTAMP, ContextTokens, GeneratedTokens (2023 and 2024) | date and time, with or without zone |
| burstgpt | Timestamp, Model, Request tokens, Response tokens, Log Type, since 2.0 Session ID | seconds |
| mooncake | timestamp, input_length, output_length (hash_ids are not kept) | milliseconds |
| castillo | ten lengths for each prompt and model, from `preproc_DATASET_SPLIT_MODEL.json` or Parquet | |
| sharegpt | conversations, in any layout supported by `gen-samples` | |

The first three have neither max_tokens nor finish reasons; the last two have no arrival times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from data_gen.filters import token_counter
from data_gen.importers.values import LENGTH, STOP, Row, SkippedRows, table_rows
from data_gen.sources.layouts import check_order, layout_of
from data_gen.splits import digest64, turn_id
from scheduler_core.errors import InputError
from scheduler_core.table_files import file_rows, file_suffix

#: Kind -> canonical column -> column of the source.
TRACES: Mapping[str, Mapping[str, str]] = {
    "azure": {"arrival_s": "TIMESTAMP", "prompt_tokens": "ContextTokens", "output_tokens": "GeneratedTokens"},
    "burstgpt": {
        "arrival_s": "Timestamp",
        "prompt_tokens": "Request tokens",
        "output_tokens": "Response tokens",
        "model": "Model",
        "category": "Log Type",
        "tenant": "Session ID",
    },
    "mooncake": {"arrival_s": "timestamp", "prompt_tokens": "input_length", "output_tokens": "output_length"},
}
#: max_tokens of CASTILLO: an output of at least this length was truncated (some files count one token more).
CASTILLO_MAX_TOKENS = 15_000
_CASTILLO = ("prompt_id", "prompt", "category", "dataset", "model", "temperature", "top_p", "prompt_tokens", "output_tokens")  # fmt: skip
_CASTILLO_JSON = {
    "prompt": "prompt_text",
    "prompt_tokens": "input_size",
    "temperature": "temp",
    "output_tokens": "output_sizes",
}


def trace_rows(path: Path, kind: str, skipped: SkippedRows) -> Iterator[Row]:
    """Yields the requests of a serving trace."""
    for number, row in table_rows(path, TRACES[kind], skipped, ("model", "category", "tenant")):
        if kind == "mooncake" and row["arrival_s"] is not None:
            row["arrival_s"] /= 1000
        yield number, row


def castillo_rows(path: Path, skipped: SkippedRows) -> Iterator[Row]:
    """Yields one row for each length of CASTILLO, in tokens of the respective model."""
    names = _CASTILLO_JSON if file_suffix(path) == ".json" else {}
    mapping = {name: names.get(name, name) for name in _CASTILLO}
    numbers = Counter[int]()
    for number, row in table_rows(path, mapping, skipped, ("category",)):
        length = row["output_tokens"]
        row["model"] = (row["model"] or "").replace("--", "/", 1)
        row |= {"sample_index": numbers[number], "max_tokens": CASTILLO_MAX_TOKENS}
        if length is not None:
            row["output_tokens"] = min(length, CASTILLO_MAX_TOKENS)
            row["finish_reason"] = LENGTH if length >= CASTILLO_MAX_TOKENS else STOP
        numbers[number] += 1
        yield number, row


def sharegpt_rows(path: Path, tokenizer: str, skipped: Counter[str]) -> Iterator[Row]:
    """Yields a request for each assistant message; its prompt is the preceding conversation, its tenant the conversation id.

    Lengths are tokens of the texts without a chat template; an output includes its EOS token. Repeated and invalid
    conversations (an empty text, a missing beginning) are skipped.
    """
    count_tokens = token_counter(tokenizer)
    layout = None
    identifiers: set[int] = set()
    for number, raw in file_rows(path, "file"):
        location = f"{path.name} row {number}"
        layout = layout or layout_of(raw, location)
        try:
            conversation = layout.read(raw, location)
            check_order(conversation.messages, location)
        except InputError:
            skipped["unusable conversation"] += 1
            continue
        identifier = conversation.conversation_id or f"r{number}"
        if (digest := digest64(identifier)) in identifiers:
            skipped["repeated conversation"] += 1
            continue
        identifiers.add(digest)
        lengths = count_tokens([message.content for message in conversation.messages])
        turn = 0
        for position, message in enumerate(conversation.messages):
            if message.role == "assistant":
                turn += 1
                yield (
                    number,
                    {
                        "request_id": turn_id(identifier, turn),
                        "tenant": identifier,
                        "prompt": conversation.messages[position - 1].content,
                        "prompt_tokens": sum(lengths[:position]),
                        "output_tokens": lengths[position] + 1,
                    },
                )
