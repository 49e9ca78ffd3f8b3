"""The records of a shard: one line each, with a checksum, so that a torn or damaged one is seen and left out.

A line is `CRC32 KIND POSITION JSON`, the checksum (8 hex digits) over all that follows it. POSITION is the place of the
prompt in its source, from 0. Kinds:

| kind | JSON | meaning |
|---|---|---|
| p | object | the prompt at this position, written before its first result |
| r | [engine version, prompt tokens, answers, failures] | what came of some of its answers |

An answer is [index, tokens, finish reason, queue_s, ttft_s, total_s, text], a failure [index, kind, reason]; null is
unknown.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from data_gen.backend import Answer, Failure
from data_gen.prompts import Prompt
from data_gen.samples import prompt_sha256
from scheduler_core.json_text import valid_unicode

PROMPT, RESULT = "p", "r"
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_BODY = 9
_POSITION = 11


class Record(NamedTuple):
    """A whole line with its end, and what it says; `payload` is JSON."""

    line: bytes
    kind: str
    position: int
    payload: bytes


@dataclass(slots=True)
class Damage:
    """Lines that were left out because they were torn or altered."""

    num_lines: int = 0
    num_bytes: int = 0


def encode(kind: str, position: int, content: object) -> bytes:
    """One record as a line of valid Unicode."""
    body = valid_unicode(f"{kind} {position} {_ENCODER.encode(content)}").encode()
    return b"%08x %s\n" % (zlib.crc32(body), body)


def decode(line: bytes) -> Record | None:
    """The record of a line; None if the line is torn or its checksum is wrong."""
    if not line.endswith(b"\n") or line[8:_BODY] != b" ":
        return None
    if line[: _BODY - 1] != b"%08x" % zlib.crc32(line[_BODY:-1]):
        return None
    kind, position, payload = line[_BODY:-1].split(b" ", 2)
    return Record(line, kind.decode(), int(position), payload)


def read_records(path: Path, damage: Damage) -> Iterator[Record]:
    """The sound records of a shard, in order; the others are counted in `damage`."""
    with open(path, "rb", buffering=1 << 20) as stream:
        for line in stream:
            record = decode(line)
            if record is None:
                damage.num_lines += 1
                damage.num_bytes += len(line)
            else:
                yield record


def position_of(line: bytes) -> int:
    """The position that a sound line names, without reading the rest."""
    return int(line[_POSITION : line.index(b" ", _POSITION)])


def prompt_record(position: int, prompt: Prompt, *, hash_only: bool) -> bytes:
    """Record of a prompt; with `hash_only` neither its text nor its messages go to disk."""
    content: dict[str, Any] = {
        "prompt_id": prompt.prompt_id,
        "prompt": None if hash_only else prompt.text,
        "prompt_sha256": prompt_sha256(prompt),
        "messages": None
        if hash_only or not prompt.messages
        else [{"role": message.role, "content": message.content} for message in prompt.messages],
        "category": prompt.category,
        "dataset": prompt.dataset,
    }
    return encode(PROMPT, position, content)


def result_record(
    position: int,
    prompt_tokens: int | None,
    answers: Sequence[Answer],
    failures: Sequence[Failure],
    *,
    engine_version: str,
    keep_text: bool,
) -> bytes:
    """Record of what came of some answers to the prompt at `position`."""
    listed = [
        (
            answer.sample_index,
            answer.output_tokens,
            answer.finish_reason,
            _rounded(answer.queue_s),
            _rounded(answer.ttft_s),
            _rounded(answer.total_s),
            answer.text if keep_text else None,
        )
        for answer in answers
    ]
    failed = [[failure.sample_index, failure.kind, failure.reason] for failure in failures]
    return encode(RESULT, position, [engine_version, prompt_tokens, listed, failed])


def result_indices(payload: bytes) -> tuple[list[int], list[int]]:
    """Sample indices that a result record answers, and those that it calls failed."""
    _, _, answers, failures = json.loads(payload)
    return [answer[0] for answer in answers], [failure[0] for failure in failures]


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
