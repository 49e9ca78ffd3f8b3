"""The log of finished requests that `tailcast-proxy --feedback FOLDER` writes: one output of each request.

A folder of segments (feedback-*.jsonl, in the order of their names) or one of them. Lines that are no record, torn by a
crash or damaged, and copies of earlier lines are skipped and counted.

| record | as sample |
|---|---|
| finish_reason stop, length, ... | as of the OpenAI API (`logs.FINISH_REASONS`) |
| the client hung up ("abort") | an error row: the client decided that length, not the model |
| counted by events ("deltas") | an error row: a lower bound; a tokenizer or the engine's usage counts rightly |
| prompts only hashed | its prompt id is the hash; it fits a trace, and samples whose prompts are known elsewhere |
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data_gen.feedback_record import FeedbackRecord, parse_object, validated
from data_gen.importers.logs import FINISH_REASONS, prompt_columns
from data_gen.importers.rows import ERROR, UNKNOWN, ImportedRows, in_batches
from data_gen.prompts import prompt_id_of
from data_gen.sources.layouts import messages_of
from data_gen.splits import digest64
from scheduler_core.errors import InputError

log = logging.getLogger(__name__)
SEGMENTS = "feedback-*.jsonl"
#: A line beyond this is skipped.
MAX_LINE_BYTES = 64 << 20


@dataclass(slots=True)
class SkippedLines:
    """How many lines of a log were read, and why some of them were skipped."""

    num_lines: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        counts = ", ".join(f"{count} x {reason}" for reason, count in self.reasons.most_common())
        return f"skipped {self.reasons.total()} of {self.num_lines} lines: {counts}"


def feedback_records(
    path: str | Path, skipped: SkippedLines | None = None
) -> Iterator[tuple[int, FeedbackRecord]]:
    """Number of the line, counted over all segments, and content of each record; one line in the log sums up the others.

    Args:
        path: The folder, or one segment.
        skipped: Counts the lines; the caller then reports them.

    Raises:
        InputError: There is no segment, or no line of them is a record.
    """
    location = Path(path)
    segments = sorted(location.glob(SEGMENTS)) if location.is_dir() else [location]
    if not segments or not segments[0].is_file():
        raise InputError("feedback log", str(path), f"a file, or a folder with {SEGMENTS}")
    counts = SkippedLines() if skipped is None else skipped
    digests: set[int] = set()
    for line in _lines(segments):
        counts.num_lines += 1
        try:
            record = _record(line, digests)
        except InputError as error:
            counts.reasons[_reason(error)] += 1
            continue
        yield counts.num_lines, record
    if counts.num_lines and not digests:
        raise InputError("feedback log", str(path), f"at least one record ({counts})")
    if skipped is None and counts.reasons:
        log.warning("%s: %s", location.name, counts)


def feedback_rows(path: str | Path) -> Iterator[ImportedRows]:
    """Batches of a feedback log, arrivals counted from the earliest; the last one has the counts of skipped lines.

    Raises:
        InputError: See `feedback_records`.
    """
    first_pass = feedback_records(path, SkippedLines())
    start_s = min((record.time for _, record in first_pass), default=0.0)
    skipped = SkippedLines()
    yield from in_batches(_rows(path, start_s, skipped))
    if skipped.reasons:
        log.warning("%s: %s", Path(path).name, skipped)
        columns = {"output_tokens": pa.array([], pa.int64())}
        yield ImportedRows(columns, np.empty(0, dtype=np.int64), skipped.reasons)


def _lines(segments: list[Path]) -> Iterator[bytes]:
    """Lines that are not empty; of one beyond the limit its first part."""
    for segment in segments:
        with open(segment, "rb") as stream:
            while line := stream.readline(MAX_LINE_BYTES + 1):
                if line.strip():
                    yield line.strip()
                while len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
                    line = stream.readline(MAX_LINE_BYTES + 1)


def _record(line: bytes, digests: set[int]) -> FeedbackRecord:
    if len(line) > MAX_LINE_BYTES:
        raise InputError("line", line[:40], f"at most {MAX_LINE_BYTES} bytes")
    record = validated(FeedbackRecord, parse_object(line))
    digest = digest64(record.request_id or line.decode())
    if digest in digests:
        raise InputError("record", line[:40], "one not read before")
    digests.add(digest)
    return record


def _reason(error: InputError) -> str:
    key = error.field.partition(" ")[0]  # not which of many messages: reasons stay few
    return f"{key} (allowed: {error.allowed})"


def _rows(path: str | Path, start_s: float, skipped: SkippedLines) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, record in feedback_records(path, skipped):
        try:
            yield number, _row(record, start_s)
        except InputError as error:
            skipped.reasons[_reason(error)] += 1


def _row(record: FeedbackRecord, start_s: float) -> dict[str, Any]:
    names = {"request_id", "tier", "tenant", "temperature", "top_p", "prompt_tokens", "output_tokens", "ttft_s", "total_s"}  # fmt: skip
    row = record.model_dump(include=names)
    row |= {
        "model": record.served_model,
        "arrival_s": record.time - start_s,
        "max_tokens": record.max_output_tokens,
    }
    row |= _prompt(record)
    problem = None
    if record.counted_by == "deltas":
        problem = "deltas: events were counted, not tokens"
    if record.finish_reason == "abort":
        problem = "abort: the client hung up"
    if problem is not None:
        return row | {"output_tokens": 0, "finish_reason": ERROR, "error": problem}
    ending = FINISH_REASONS.get(record.finish_reason, UNKNOWN)
    if ending == ERROR:
        row |= {"output_tokens": 0, "error": f"{record.finish_reason}: as logged"}
    return row | {"finish_reason": ending}


def _prompt(record: FeedbackRecord) -> dict[str, Any]:
    if record.messages:
        columns = prompt_columns(
            messages_of([message.model_dump() for message in record.messages], "messages")
        )
        if columns:
            return columns
    if record.prompt:
        return {"prompt_id": prompt_id_of(record.prompt), "prompt": record.prompt}
    return {"prompt_id": record.prompt_sha256}
