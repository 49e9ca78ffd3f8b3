"""Importers of request logs.

`log` imports any table by a mapping from canonical columns to those of the table (`output_tokens=usage.completion_tokens`;
a dot selects a member of an object), by default the columns with canonical names. `openai-log` imports responses of the
OpenAI API, one per line: alone, with the request (`{"request": ..., "response": ...}`), or in the format of the Batch API
(`{"custom_id", "response": {"body"}}`).

`feedback` imports the log of `tailcast-proxy --feedback FOLDER`, one output per request: a folder of segments
(feedback-*.jsonl, in the order of their names) or a single segment. Lines that are not records (torn by a crash, damaged)
and copies of earlier records are skipped and counted.

| record | as sample |
|---|---|
| finish_reason stop, length, ... | mapped by `values.FINISH_REASONS` |
| the client disconnected ("abort") | an error row: the client determined that length, not the model |
| counted by events ("deltas") | its length: the proxy converts events to tokens |
| only the hash of the prompt | the hash is the prompt id; sufficient for a trace, or for prompts stored elsewhere |
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from data_gen.feedback_record import FeedbackRecord, bounded_lines, parse_object, validated
from data_gen.importers.values import (
    ERROR,
    FINISH_REASONS,
    LENGTH,
    MAPPED,
    STOP,
    UNKNOWN,
    Row,
    SkippedRows,
    checked_columns,
    prompt_columns,
)
from data_gen.prompts import prompt_id_of
from data_gen.sources.layouts import messages_of
from data_gen.splits import digest64
from scheduler_core.errors import InputError
from scheduler_core.table_files import file_rows

log = logging.getLogger(__name__)
SEGMENTS = "feedback-*.jsonl"
#: Longer lines are skipped.
MAX_LINE_BYTES = 64 << 20
_COLUMNS = {"request_id", "tier", "tenant", "temperature", "top_p", "prompt_tokens", "output_tokens", "ttft_s", "total_s"}  # fmt: skip
_OF_REQUEST = {"temperature": "temperature", "top_p": "top_p", "tenant": "user", "model": "model"}
_OF_RESPONSE = {
    "model": "model",
    "arrival_s": "created",
    "prompt_tokens": "usage.prompt_tokens",
    "output_tokens": "usage.completion_tokens",
}


def parse_mapping(text: str) -> dict[str, str]:
    """Parses a mapping such as `output_tokens=usage.completion_tokens,model=name`; empty for an empty text. InputError for
    invalid syntax, or a name that is not in `MAPPED`."""
    mapping: dict[str, str] = {}
    for item in text.split(",") if text else ():
        name, equals, source = (word.strip() for word in item.partition("="))
        if not equals or not source or name not in MAPPED or name in mapping:
            allowed = "NAME=COLUMN, each NAME once and one of " + ", ".join(MAPPED)
            raise InputError("columns", item.strip(), allowed)
        mapping[name] = source
    if mapping and "output_tokens" not in mapping:
        raise InputError("columns", text, "also output_tokens=COLUMN")
    return mapping


def openai_rows(path: Path, skipped: SkippedRows) -> Iterator[Row]:
    """Yields OpenAI-style responses; a response with several choices, which share one token count, becomes an error row."""
    for number, raw in file_rows(path, "file", on_bad_row=skipped.add_bad):
        try:
            row = _openai_row(raw, f"{path.name} row {number}")
        except InputError as error:
            skipped.add_bad(number, error)
            continue
        yield number, row


def _openai_row(raw: Mapping[str, Any], location: str) -> dict[str, Any]:
    response = raw.get("response", raw)
    if isinstance(response, Mapping) and "body" in response:
        response = response["body"]
    request = raw.get("request", raw if "messages" in raw or "prompt" in raw else {})
    if isinstance(request, Mapping) and "body" in request:
        request = request["body"]
    if not isinstance(request := request or {}, Mapping):
        raise InputError(f"{location} column request", request, "an object")
    limit = "max_completion_tokens" if request.get("max_completion_tokens") else "max_tokens"
    mapping = {**_OF_REQUEST, "max_tokens": limit}
    if request.get("messages") is not None:
        mapping["messages"] = "messages"
    elif request.get("prompt") is not None:
        mapping["prompt"] = "prompt"
    row = checked_columns(request, mapping, location, optional=mapping)
    is_response = isinstance(response, Mapping)
    identifier = raw.get("custom_id") or (response.get("id") if is_response else None)
    row["request_id"] = None if identifier is None else str(identifier)
    if not is_response or raw.get("error") or response.get("error"):
        reason = raw.get("error") or (response.get("error") if is_response else response)
        text = reason.get("message") if isinstance(reason, Mapping) else reason
        return row | {"output_tokens": 0, "finish_reason": ERROR, "error": f"refused: {text}"}
    optional = ("model", "arrival_s", "prompt_tokens")
    received = checked_columns(response, _OF_RESPONSE, location, optional)
    row |= received | {"model": received["model"] or row["model"]}
    choices = response.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
        raise InputError(f"{location} column choices", choices, "a list of at least one choice")
    if len(choices) > 1:
        problem = f"shared_count: {len(choices)} choices share one token count"
        return row | {"output_tokens": 0, "finish_reason": ERROR, "error": problem}
    return row | checked_columns(choices[0], {"finish_reason": "finish_reason"}, f"{location} choices")


def segments_of(path: Path) -> list[Path]:
    """The segments of a log in order, or the path itself if it is not a folder; InputError if there is none."""
    segments = sorted(path.glob(SEGMENTS)) if path.is_dir() else [path]
    if not segments or not segments[0].is_file():
        raise InputError("feedback log", str(path), f"a file, or a folder with {SEGMENTS}")
    return segments


def feedback_records(
    path: str | Path, skipped: Counter[str] | None = None
) -> Iterator[tuple[int, FeedbackRecord]]:
    """Yields the line number, counted over all segments, and the content of each record in a folder or a single segment.

    `skipped` counts skipped lines by reason; if it is None, a log message reports the counts. InputError if there is no
    segment or no record.
    """
    reasons = Counter[str]() if skipped is None else skipped
    digests: set[int] = set()
    number = 0
    for number, line in enumerate(_lines(segments_of(Path(path))), start=1):
        try:
            record = _record(line, digests)
        except InputError as error:
            reasons[_reason(error)] += 1
            continue
        yield number, record
    counts = f"skipped {reasons.total()} of {number} lines: " + ", ".join(
        f"{count} x {reason}" for reason, count in reasons.most_common()
    )
    if number and not digests:
        raise InputError("feedback log", str(path), f"at least one record ({counts})")
    if skipped is None and reasons:
        log.warning("%s: %s", Path(path).name, counts)


def feedback_rows(path: Path, skipped: Counter[str]) -> Iterator[Row]:
    """Yields rows of a feedback log; `skipped` counts skipped lines by reason."""
    for number, record in feedback_records(path, skipped):
        try:
            yield number, _row(record)
        except InputError as error:
            skipped[_reason(error)] += 1


def _lines(segments: list[Path]) -> Iterator[bytes]:
    """Non-empty lines; a line above the limit is truncated."""
    for segment in segments:
        with open(segment, "rb") as stream:
            yield from filter(None, map(bytes.strip, bounded_lines(stream, MAX_LINE_BYTES)))


def _record(line: bytes, digests: set[int]) -> FeedbackRecord:
    if len(line) > MAX_LINE_BYTES:
        raise InputError("line", line[:40], f"at most {MAX_LINE_BYTES} bytes")
    record = validated(FeedbackRecord, parse_object(line))
    digest = digest64(record.request_id or line.decode())
    if digest in digests:
        raise InputError("record", line[:40], "a record that is not a copy of an earlier one")
    digests.add(digest)
    return record


def _reason(error: InputError) -> str:
    key = error.field.partition(" ")[0]  # without the message number, to limit the number of reasons
    return f"{key} (allowed: {error.allowed})"


def _row(record: FeedbackRecord) -> dict[str, Any]:
    row = record.model_dump(include=_COLUMNS) | {
        "model": record.served_model,
        "arrival_s": record.time,
        "max_tokens": record.max_output_tokens,
        "finish_reason": FINISH_REASONS.get(record.finish_reason, UNKNOWN),
        **_prompt(record),
    }
    if row["finish_reason"] == UNKNOWN and record.finished is not None:
        row["finish_reason"] = STOP if record.finished else LENGTH
    problem = None
    if record.finish_reason == "abort":
        problem = "abort: the client disconnected"
    elif row["finish_reason"] == ERROR:
        problem = f"{record.finish_reason}: as logged"
    if problem is not None:
        row |= {"output_tokens": 0, "finish_reason": ERROR, "error": problem}
    return row


def _prompt(record: FeedbackRecord) -> dict[str, Any]:
    messages = [message.model_dump() for message in record.messages or ()]
    columns = prompt_columns(messages_of(messages, "messages"))
    if columns:
        return columns
    if record.prompt:
        return {"prompt_id": prompt_id_of(record.prompt), "prompt": record.prompt}
    return {"prompt_id": record.prompt_sha256}
