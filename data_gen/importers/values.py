"""Validation of source rows, and their conversion to canonical columns."""

from __future__ import annotations

import json
import logging
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import Any

from data_gen.importers.config import TimeUnit
from data_gen.importers.source_row import SourceRow
from data_gen.prompts import conversation_id_of, prompt_id_of
from scheduler_core.errors import InputError
from scheduler_core.prediction.api_request import ApiRequest, read_request
from scheduler_core.prediction.api_response import COMPLETE, TRUNCATED, ended_by
from scheduler_core.prediction.prompt_text import ASSISTANT, OPTIONS, Message, user_text
from scheduler_core.shell.json_text import from_json

log = logging.getLogger(__name__)

#: Row number in the source, as counted by an editor or by `file_rows`, and its canonical columns.
Row = tuple[int, dict[str, Any]]

STOP, LENGTH, UNKNOWN, ERROR = "stop", "length", "unknown", "error"
MAX_TOKENS = 2**31 - 1
#: Maximum number of bad rows that are reported individually.
MAX_BAD_ROWS = 100
#: Limit of absolute times in seconds, 3,000 years; larger values have another unit.
MAX_TIME_S = 1e11
#: Finish reason of a server -> canonical finish reason. Others are unknown.
FINISH_REASONS: Mapping[str, str] = {
    **dict.fromkeys((*COMPLETE, "tool_call"), STOP),
    **dict.fromkeys(TRUNCATED, LENGTH),
    **dict.fromkeys(("error", "abort", "content_filter", "failed", "cancelled"), ERROR),
    **dict.fromkeys(("insufficient_system_resource", "safety", "recitation", "blocklist"), ERROR),
}
_TEXTS = ("request_id", "tenant", "prompt_id", "category", "dataset", "model", "run_id", "session_id")
_INTEGERS = ("tier", "max_tokens", "prompt_tokens", "output_tokens", "turn", "prefix_tokens")
_NUMBERS = ("temperature", "top_p")
_DURATIONS = ("ttft_s", "total_s", "think_time_s")
_INSTANTS = ("arrival_s", "first_token_s", "end_s")
_PROMPTS = ("prompt", "messages", "system")
#: Canonical columns that a mapping can have, in the order of conversion. Importers may also fill sample_index.
MAPPED = (
    *_TEXTS, *_PROMPTS, *_INTEGERS, *_NUMBERS, *_DURATIONS, *_INSTANTS, "hash_ids", "finish_reason", "error",
)  # fmt: skip
#: Units of time per second.
_PER_SECOND: Mapping[str, int] = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
#: Ends of names that have a unit of their own.
_UNIT_OF_NAME = re.compile(r"(?:_(ms|us|ns)|(nano)s?)$", re.IGNORECASE)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class SkippedRows:
    """Record of skipped rows; with `stop`, the first bad row raises its error."""

    def __init__(self, *, stop: bool = True) -> None:
        self._stop = stop
        self.counts = Counter[str]()  # by reason
        self.bad: list[dict[str, Any]] = []  # number and reason of the first MAX_BAD_ROWS bad rows
        self.num_other = 0  # rows that are no requests, such as spans of tools; not skipped ones

    def add_bad(self, number: int, error: InputError) -> None:
        """Counts an invalid row; raises its error with `stop`."""
        if self._stop:
            raise error
        column = re.sub(r"^.* row \d+:? ?|(?<= message) \d+", "", error.field)
        reason = f"bad {column or 'row'} (allowed: {error.allowed})"
        if reason not in self.counts:
            log.warning("row %d is left out: %s", number, error)
        self.counts[reason] += 1
        if len(self.bad) < MAX_BAD_ROWS:
            self.bad.append({"row": number, "reason": str(error)})


def canonical_row(
    source: SourceRow,
    columns: Mapping[str, Sequence[str]],
    location: str,
    time_unit: TimeUnit = "s",
) -> dict[str, Any]:
    """Converts a row to canonical columns; an absent value is null. An unmapped prompt_id is a hash of the prompt.

    Instants are converted exactly, from numbers in `time_unit` or the unit of their name, or from a date and time (default
    time zone: UTC). With them, ttft_s and total_s are computed where they have no column.

    Args:
        source: The row.
        columns: Canonical column -> paths, of which the first with a value is used.
        location: Name of the row in error messages.
        time_unit: Unit of times whose name has none.

    Raises:
        InputError: A value has a wrong type or is out of range.
    """
    row: dict[str, Any] = {}
    prompts: dict[str, Any] = {}
    for column in MAPPED:
        if column not in columns:
            continue
        path, value = source.first(columns[column])
        try:
            if column in _PROMPTS:
                prompts[column] = value
            else:
                row |= _checked(column, value, _unit_of(path, time_unit))
        except ValueError as error:
            raise InputError(f"{location} column {path}", value, str(error)) from error
    if prompts:
        present = {name: value for name, value in row.items() if value is not None}
        row = {**row, **_prompt_columns(**prompts), **present}
    start = row.get("arrival_s")
    for name, instant in (("ttft_s", "first_token_s"), ("total_s", "end_s")):
        end = row.pop(instant, None)
        if row.get(name) is None and None not in (start, end) and end >= start:
            row[name] = float(end - start)
    return row


def _unit_of(path: str, default: TimeUnit) -> str:
    match = _UNIT_OF_NAME.search(path)
    return default if match is None else (match[1] or "ns").lower()


def _checked(column: str, value: Any, unit: str) -> dict[str, Any]:
    """Converts a value; raises ValueError with a description of the allowed values."""
    if column == "finish_reason":
        return ending(value)
    if column == "error":
        return failure(f"failed: {_brief(value)}") if value else {}
    if value is None:
        return {column: None}
    if column in _INTEGERS:
        return {column: _integer(column, value)}
    if column in _NUMBERS or column in _DURATIONS:
        number = _number(value)
        if number is None:
            raise ValueError("a finite number")
        return {column: number / _PER_SECOND[unit] if column in _DURATIONS else number}
    if column in _INSTANTS:
        return {column: _instant(value, unit)}
    if column == "hash_ids":
        return {column: _hash_ids(value)}
    if isinstance(value, Mapping | list):
        raise ValueError("a text or a number")
    return {column: str(value)}


def _integer(column: str, value: Any) -> int | None:
    number = _number(value)
    if number is not None and column == "max_tokens" and number in (-1, 0):
        return None  # no limit
    if number is None or number != int(number) or not 0 <= number <= MAX_TOKENS:
        raise ValueError(f"an integer from 0 to {MAX_TOKENS}")
    return int(number)


def _instant(value: Any, unit: str) -> Fraction:
    if isinstance(value, str) and _number(value) is None:
        with suppress(ValueError):
            value = datetime.fromisoformat(re.sub(r" UTC$", "+00:00", value.strip()))
    if isinstance(value, datetime):
        since_epoch = (value if value.tzinfo else value.replace(tzinfo=UTC)) - _EPOCH
        return Fraction(since_epoch // timedelta(microseconds=1), 1_000_000)
    number = _number(value)
    if number is None or abs(number) > MAX_TIME_S * _PER_SECOND[unit]:
        allowed = f"seconds from -{MAX_TIME_S:g} to {MAX_TIME_S:g} (--time_unit: another unit)"
        raise ValueError(f"{allowed}, or an ISO 8601 date and time")
    is_exact = isinstance(value, int) or (isinstance(value, str) and value.strip().isdecimal())
    return Fraction(int(value) if is_exact else number) / _PER_SECOND[unit]


def _hash_ids(value: Any) -> list[int]:
    """Ids of blocks; unsigned ids above the range of int64 become negative, which keeps them distinct."""
    ids = from_json(value)
    if not isinstance(ids, list) or not all(type(each) is int and -(2**63) <= each < 2**64 for each in ids):
        raise ValueError("a list of integers of 64 bits")
    return [each - 2**64 if each >= 2**63 else each for each in ids]


def ending(value: object) -> dict[str, Any]:
    """Columns for a finish reason of a server, or for a boolean (whether the output finished).

    Null and reasons that are not in `FINISH_REASONS` are unknown; an error keeps its length. `ended_by` has the kind of end. Several outputs of a request, which share one token count,
    are an error without a length. ValueError for an object.
    """
    value = from_json(value)
    if isinstance(value, list):
        if len(value) > 1:
            return shared_count(len(value))
        value = value[0] if value else None
    if isinstance(value, str):
        value = {"true": True, "false": False}.get(value.lower(), value)
    if value is None or isinstance(value, bool):
        return {"finish_reason": {None: None, True: STOP, False: LENGTH}[value]}
    if isinstance(value, Mapping | list):
        raise ValueError("null, a text, true or false")
    reason = FINISH_REASONS.get(str(value).lower(), UNKNOWN if str(value) else None)
    ended = ended_by(str(value))
    error = {"error": f"{value}: as logged"} if reason == ERROR else {}
    return {"finish_reason": reason, **({"ended_by": ended} if ended else {}), **error}


def failure(error: str) -> dict[str, Any]:
    """Columns of a request without an output."""
    return {"finish_reason": ERROR, "error": error, "output_tokens": 0}


def forced_length() -> dict[str, Any]:
    """Columns of an output whose length the client determined. A trace keeps it; as a sample it would teach a wrong length."""
    return {"finish_reason": ERROR, "error": "forced_length: ignore_eos or min_tokens"}


def shared_count(num_outputs: int) -> dict[str, Any]:
    """Columns of a request with several outputs, whose lengths are not known."""
    return failure(f"shared_count: {num_outputs} choices share one token count")


def _brief(value: object) -> str:
    if isinstance(value, Mapping):
        value = value.get("message") or value.get("code") or json.dumps(value, default=str)
    return str(value)[:200]


def _number(value: object) -> float | None:
    """Converts a number, or its text in ASCII digits, to a finite float; None if that is impossible."""
    if isinstance(value, bool) or (isinstance(value, str) and (not value.isascii() or "_" in value)):
        return None
    with suppress(TypeError, ValueError, OverflowError):
        return number if math.isfinite(number := float(value)) else None  # type: ignore[arg-type]
    return None


def _prompt_columns(prompt: Any = None, messages: Any = None, system: Any = None) -> dict[str, Any]:
    """Columns of the prompt of a table: of its messages, or else of its text."""
    system = from_json(system)
    columns = prompt_columns(read_prompt(messages, system), messages)
    if "prompt_id" not in columns and prompt is not None:
        is_text = isinstance(prompt, str | int | float)
        request = read_prompt([{"role": "user", "content": str(prompt)}] if is_text else prompt, system)
        columns = prompt_columns(request, prompt)
    return {"prompt": None, **columns}


def read_prompt(value: Any, system: Any = None) -> ApiRequest:
    """Reads a prompt as logs store it: messages, a message, the body of a request, JSON text of one of them, or a text."""
    value = from_json(value)
    if isinstance(value, Mapping) and "role" in value:
        value = [value]
    if isinstance(value, list):
        is_text = value and all(isinstance(item, int | str) for item in value)
        value = {"prompt" if is_text else "messages": [_unwrapped(item) for item in value]}
    elif not isinstance(value, Mapping):
        value = {"input": value} if isinstance(value, str) else {}
    return read_request(value if system is None else {**value, "system": system})


def _unwrapped(item: Any) -> Any:
    """A message of OpenInference, which wraps messages, parts and calls in objects of one member."""
    if isinstance(item, list):
        return [_unwrapped(each) for each in item]
    if not isinstance(item, Mapping):
        return item
    if len(item) == 1:
        [(name, inner)] = item.items()
        if name in ("message", "message_content", "tool_call"):
            return _unwrapped(inner)
    return {
        name: _unwrapped(inner) if name in ("contents", "tool_calls") else inner
        for name, inner in item.items()
    }


def prompt_columns(request: ApiRequest, value: Any = None) -> dict[str, Any]:
    """prompt_id, prompt and messages of a request; of a prompt without text, such as token ids, only an id, the hash of
    `value`. Empty without a prompt."""
    if request.messages or (request.options and request.conversation):
        return conversation_columns(request.conversation)
    if text := request.text():
        return {"prompt_id": prompt_id_of(text), "prompt": text}
    if request.has_prompt or (isinstance(value, Mapping) and value):
        return {"prompt_id": prompt_id_of(json.dumps(value, ensure_ascii=False, default=str))}
    return {}


def conversation_columns(messages: Sequence[Message]) -> dict[str, Any]:
    """prompt_id, prompt and messages of a conversation, without the assistant's messages at its end: an output, or the
    beginning of one. The options of the request are its first message. Empty without a text."""
    options = [message for message in messages if message.role == OPTIONS]
    texts = [message for message in messages if message.text and message.role != OPTIONS]
    last = max(
        (number for number, each in enumerate(texts, start=1) if each.role != ASSISTANT), default=len(texts)
    )
    history = texts[:last]
    if not history:
        return {}
    history = [*options, *history]
    several = [{"role": role, "content": text} for role, text in history]
    is_prompt = len(history) == 1 and history[0].role == "user"
    return {
        "prompt_id": conversation_id_of(history),
        "prompt": user_text(history),
        "messages": None if is_prompt else several,
    }
