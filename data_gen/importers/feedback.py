"""The log of finished requests that `tailcast-proxy --feedback FOLDER` writes: one answer to each request.

A folder of segments (feedback-*.jsonl, in the order of their names) or one of them. Lines that are no record, torn by a
crash or damaged, and copies of earlier lines are skipped and counted.

| record | as sample |
|---|---|
| finish_reason stop, length, ... | as of the OpenAI API (`logs.ENDINGS`) |
| the client hung up ("abort") | an error row: the length says when somebody lost patience, not how long the answer was to be |
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

from data_gen.feedback_record import FeedbackRecord, parse_object, validated
from data_gen.importers.batch import ERROR, UNKNOWN, Batch, batches_of
from data_gen.importers.logs import ENDINGS
from data_gen.prompts import conversation_id_of, prompt_id_of
from data_gen.sources.digests import DigestSet
from data_gen.sources.layouts import messages_of
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
    place = Path(path)
    segments = sorted(place.glob(SEGMENTS)) if place.is_dir() else [place]
    if not segments or not segments[0].is_file():
        raise InputError("feedback log", str(path), f"a file, or a folder with {SEGMENTS}")
    counts = SkippedLines() if skipped is None else skipped
    known = DigestSet()
    for line in _lines(segments):
        counts.num_lines += 1
        try:
            record = _record(line, known)
        except InputError as error:
            counts.reasons[_reason(error)] += 1
            continue
        yield counts.num_lines, record
    if counts.num_lines and not len(known):
        raise InputError("feedback log", str(path), f"at least one record ({counts})")
    if skipped is None and counts.reasons:
        log.warning("%s: %s", place.name, counts)


def feedback_batches(path: str | Path) -> Iterator[Batch]:
    """Batches of a feedback log, arrivals counted from the earliest; the last one has the counts of skipped lines.

    Raises:
        InputError: See `feedback_records`.
    """
    first_pass = feedback_records(path, SkippedLines())
    start_s = min((record.time for _, record in first_pass), default=0.0)
    skipped = SkippedLines()
    yield from batches_of(_rows(path, start_s, skipped))
    if skipped.reasons:
        log.warning("%s: %s", Path(path).name, skipped)
        yield Batch.of_left_out(skipped.reasons)


def _lines(segments: list[Path]) -> Iterator[bytes]:
    """Lines that are not empty; of one that is too long the part that is."""
    for segment in segments:
        with open(segment, "rb") as stream:
            while line := stream.readline(MAX_LINE_BYTES + 1):
                if line.strip():
                    yield line.strip()
                while len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
                    line = stream.readline(MAX_LINE_BYTES + 1)


def _record(line: bytes, known: DigestSet) -> FeedbackRecord:
    if len(line) > MAX_LINE_BYTES:
        raise InputError("line", line[:40], f"at most {MAX_LINE_BYTES} bytes")
    record = validated(FeedbackRecord, parse_object(line))
    if not known.add(record.request_id or line.decode()):
        raise InputError("record", line[:40], "one not read before")
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
    row |= {"model": record.served_model, "arrival_s": record.time - start_s, "max_tokens": record.cap}
    row |= _prompt(record)
    problem = None
    if record.counted_by == "deltas":
        problem = "deltas: events were counted, not tokens"
    if record.finish_reason == "abort":
        problem = "abort: the client hung up"
    if problem is not None:
        return row | {"output_tokens": 0, "finish_reason": ERROR, "error": problem}
    ending = ENDINGS.get(record.finish_reason, UNKNOWN)
    if ending == ERROR:
        row |= {"output_tokens": 0, "error": f"{record.finish_reason}: the log says so"}
    return row | {"finish_reason": ending}


def _prompt(record: FeedbackRecord) -> dict[str, Any]:
    if record.messages:
        messages = messages_of([message.model_dump() for message in record.messages], "messages")
        ends = [number for number, message in enumerate(messages) if message.role == "user"]
        if ends:
            history = messages[: ends[-1] + 1]
            several = [{"role": one.role, "content": one.content} for one in history]
            return {
                "prompt_id": conversation_id_of(history),
                "prompt": history[-1].content,
                "messages": several if len(several) > 1 else None,
            }
    if record.prompt:
        return {"prompt_id": prompt_id_of(record.prompt), "prompt": record.prompt}
    return {"prompt_id": record.prompt_sha256}
