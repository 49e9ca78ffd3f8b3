"""The log of finished requests that `tailcast-proxy --feedback FOLDER` writes: one answer to each request.

A folder of segments (feedback-*.jsonl, in the order of their names) or one of them. A last line without its end was torn
by a crash and is passed over; any other line that is no record is an error.

| record | as sample |
|---|---|
| finish_reason stop, length, ... | as of the OpenAI API (`logs.ENDINGS`) |
| the client hung up ("abort") | an error row: the length says when somebody lost patience, not how long the answer was to be |
| counted by events ("deltas") | an error row: a lower bound; a tokenizer or the engine's usage counts rightly |
| prompts only hashed | its prompt id is the hash; it fits a trace, and samples whose prompts are known elsewhere |
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_gen.importers.batch import ERROR, UNKNOWN, Batch, batches_of
from data_gen.importers.logs import ENDINGS
from data_gen.prompts import conversation_id_of, prompt_id_of
from data_gen.sources.layouts import messages_of
from scheduler_core.errors import InputError

FORMAT = "tailcast-feedback/1"
SEGMENTS = "feedback-*.jsonl"


def feedback_records(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number, counted over all segments, and content of each record.

    Raises:
        InputError: There is no segment, or a whole line is no record; names the line.
    """
    place = Path(path)
    segments = sorted(place.glob(SEGMENTS)) if place.is_dir() else [place]
    if not segments or not segments[0].is_file():
        raise InputError("feedback log", str(path), f"a file, or a folder with {SEGMENTS}")
    number = 0
    for segment in segments:
        with open(segment, "rb") as lines:
            for line in lines:
                number += 1
                if line.strip() and line.endswith(b"\n"):
                    yield number, _record(line, f"{segment.name} line {number}")


def feedback_batches(path: str | Path) -> Iterator[Batch]:
    """Batches of a feedback log, arrivals counted from the earliest.

    Raises:
        InputError: See `feedback_records`.
    """
    start = min((record["time"] for _, record in feedback_records(path)), default=0.0)
    yield from batches_of(
        (number, _row(record, start, f"record {number}")) for number, record in feedback_records(path)
    )


def _record(line: bytes, where: str) -> dict[str, Any]:
    try:
        content = json.loads(line)
    except ValueError as error:
        raise InputError(where, line[:40], "a JSON object") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InputError(where, line[:40], f"a record of format {FORMAT}")
    for name, kind in (("time", float), ("output_tokens", int), ("finish_reason", str), ("counted_by", str)):
        if not isinstance(content.get(name), kind):
            raise InputError(f"{where} key {name}", content.get(name), f"a value of type {kind.__name__}")
    return content


def _row(record: dict[str, Any], start_s: float, where: str) -> dict[str, Any]:
    names = ("request_id", "tier", "tenant", "temperature", "top_p", "max_tokens", "prompt_tokens", "output_tokens")  # fmt: skip
    found = {name: record.get(name) for name in (*names, "ttft_s", "total_s")}
    found |= {"model": record.get("served_model"), "arrival_s": record["time"] - start_s}
    found |= _prompt(record, where)
    reason = record["finish_reason"]
    problem = None
    if record["counted_by"] == "deltas":
        problem = "deltas: events were counted, not tokens"
    if reason == "abort":
        problem = "abort: the client hung up"
    if problem is not None:
        return found | {"output_tokens": 0, "finish_reason": ERROR, "error": problem}
    ending = ENDINGS.get(reason, UNKNOWN)
    if ending == ERROR:
        found |= {"output_tokens": 0, "error": f"{reason}: the log says so"}
    return found | {"finish_reason": ending}


def _prompt(record: dict[str, Any], where: str) -> dict[str, Any]:
    listed = record.get("messages")
    if listed:
        messages = messages_of(listed, f"{where} key messages")
        ends = [number for number, message in enumerate(messages) if message.role == "user"]
        if ends:
            history = messages[: ends[-1] + 1]
            several = [{"role": one.role, "content": one.content} for one in history]
            return {
                "prompt_id": conversation_id_of(history),
                "prompt": history[-1].content,
                "messages": several if len(several) > 1 else None,
            }
    prompt = record.get("prompt")
    if prompt:
        return {"prompt_id": prompt_id_of(prompt), "prompt": prompt}
    digest = record.get("prompt_sha256")
    return {"prompt_id": None if digest is None else str(digest)}
