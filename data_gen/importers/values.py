"""Validation of source rows, and their conversion to canonical columns."""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

from data_gen.prompts import Message, conversation_id_of, prompt_id_of
from data_gen.sources.layouts import messages_of
from scheduler_core.errors import InputError
from scheduler_core.table_files import file_rows

log = logging.getLogger(__name__)

#: Row number in the source, as counted by an editor or by `file_rows`, and its canonical columns.
Row = tuple[int, dict[str, Any]]

STOP, LENGTH, UNKNOWN, ERROR = "stop", "length", "unknown", "error"
MAX_TOKENS = 2**31 - 1
#: Maximum number of bad rows that are reported individually.
MAX_BAD_ROWS = 100
#: Limit of absolute times in seconds, 3,000 years; larger values have another unit.
MAX_TIME_S = 1e11
#: Finish reason of a server -> canonical finish reason.
FINISH_REASONS: Mapping[str, str] = {
    **dict.fromkeys(("stop", "eos", "eos_token", "stop_sequence", "end_turn"), STOP),
    **dict.fromkeys(("tool_calls", "tool_use", "function_call"), STOP),
    **dict.fromkeys(("length", "max_tokens"), LENGTH),
    **dict.fromkeys(("error", "abort", "content_filter"), ERROR),
}
_TEXTS = ("request_id", "tenant", "prompt_id", "prompt", "category", "dataset", "model", "run_id")
_INTEGERS = ("tier", "max_tokens", "prompt_tokens", "output_tokens")
_NUMBERS = ("temperature", "top_p", "ttft_s", "total_s")
#: Canonical columns that a mapping can have, in the order of conversion. Importers may also fill sample_index and error.
MAPPED = (*_TEXTS, *_INTEGERS, *_NUMBERS, "arrival_s", "messages", "finish_reason")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class SkippedRows:
    """Record of skipped rows; with `stop`, the first bad row raises its error."""

    def __init__(self, *, stop: bool = True) -> None:
        self._stop = stop
        self.counts = Counter[str]()  # by reason
        self.bad: list[dict[str, Any]] = []  # number and reason of the first MAX_BAD_ROWS bad rows

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


def table_rows(
    path: Path, mapping: Mapping[str, str], skipped: SkippedRows, optional: Collection[str] = ()
) -> Iterator[Row]:
    """Yields the rows of a table; a row whose output_tokens is a list becomes one row for each element.

    Args:
        path: The file.
        mapping: Canonical column -> column of the table, or a dotted path into objects; empty: all columns with canonical
            names.
        skipped: Record of invalid rows.
        optional: Canonical columns that the table may lack.

    Raises:
        InputError: A value is invalid; the message names row, column and value.
    """
    for number, raw in file_rows(path, "file", on_bad_row=skipped.add_bad):
        location = f"{path.name} row {number}"
        if not mapping:
            mapping = {name: name for name in MAPPED if name in raw or name == "output_tokens"}
        try:
            rows = [
                checked_columns(each, mapping, location, optional)
                for each in _elements(raw, mapping, location)
            ]
        except InputError as error:
            skipped.add_bad(number, error)
            continue
        for row in rows:
            yield number, row


def _elements(
    raw: Mapping[str, Any], mapping: Mapping[str, str], location: str
) -> Iterator[Mapping[str, Any]]:
    """Yields the row, or a row for each element of its list of lengths and, if present, of its list of finish reasons."""
    tokens, reasons = mapping["output_tokens"], mapping.get("finish_reason", "")
    lengths, ends = raw.get(tokens), raw.get(reasons)
    if not isinstance(lengths, list):
        yield raw
        return
    if isinstance(ends, list) and len(ends) != len(lengths):
        raise InputError(f"{location} column {reasons}", ends, f"one for each of {len(lengths)} lengths")
    for index, length in enumerate(lengths):
        yield {**raw, tokens: length, **({reasons: ends[index]} if isinstance(ends, list) else {})}


def checked_columns(
    raw: Mapping[str, Any], mapping: Mapping[str, str], location: str, optional: Collection[str] = ()
) -> dict[str, Any]:
    """Converts a row to canonical columns; "" is null. An unmapped prompt_id is a hash of the prompt.

    arrival_s is converted exactly, from seconds or from a date and time (default time zone: UTC).

    Raises:
        InputError: A column is missing, or its value has a wrong type or is out of range.
    """
    row: dict[str, Any] = {}
    for column, source in mapping.items():
        value = _value(raw, source, location, required=column not in optional)
        try:
            row |= _checked(column, value, f"{location} column {source}")
        except ValueError as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{location} column {source}", value, str(error)) from error
    if "prompt_id" not in mapping and row.get("prompt"):
        row.setdefault("prompt_id", prompt_id_of(row["prompt"]))
    return row


def _value(raw: Mapping[str, Any], name: str, location: str, *, required: bool) -> Any:
    value: Any = raw
    for part in (name,) if name in raw else name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            if required:
                raise InputError(f"{location}: columns", sorted(map(str, raw)), f"also {name}")
            return None
        value = value[part]
    return None if value == "" else value


def _checked(column: str, value: Any, location: str) -> dict[str, Any]:
    """Converts a value; raises ValueError with a description of the allowed values."""
    if column == "finish_reason":
        return ending(value)
    if value is None and column != "messages":
        return {column: None}
    if column == "messages":
        messages = messages_of(value, location)
        columns = prompt_columns(messages)
        if not columns:
            raise InputError(location, f"{len(messages)} messages", "at least one user message")
        return columns
    if column in _INTEGERS:
        number = _number(value)
        if number is None or number != int(number) or not 0 <= number <= MAX_TOKENS:
            raise ValueError(f"an integer from 0 to {MAX_TOKENS}")
        return {column: int(number)}
    if column in _NUMBERS:
        number = _number(value)
        if number is None:
            raise ValueError("a finite number")
        return {column: number}
    if column == "arrival_s":
        return {column: _time(value)}
    if isinstance(value, Mapping | list):
        raise ValueError("a text or a number")
    return {column: str(value)}


def _time(value: Any) -> Fraction:
    if isinstance(value, str) and _number(value) is None:
        with suppress(ValueError):
            value = datetime.fromisoformat(value.strip())
    if isinstance(value, datetime):
        since_epoch = (value if value.tzinfo else value.replace(tzinfo=UTC)) - _EPOCH
        return Fraction(since_epoch // timedelta(microseconds=1), 1_000_000)
    seconds = _number(value)
    if seconds is None or abs(seconds) > MAX_TIME_S:
        raise ValueError(f"seconds from -{MAX_TIME_S:g} to {MAX_TIME_S:g}, or an ISO 8601 date and time")
    return Fraction(seconds)


def ending(value: object) -> dict[str, Any]:
    """Columns for a finish reason of a server, or for a boolean (whether the output finished); null is unknown.
    ValueError for an unknown finish reason."""
    if value is None or isinstance(value, bool):
        return {"finish_reason": {None: UNKNOWN, True: STOP, False: LENGTH}[value]}
    reason = FINISH_REASONS.get(str(value).lower())
    if reason is None:
        raise ValueError("null or one of " + ", ".join(FINISH_REASONS))
    problem = {"output_tokens": 0, "error": f"{value}: as logged"} if reason == ERROR else {}
    return {"finish_reason": reason, **problem}


def _number(value: object) -> float | None:
    """Converts a number or text to a finite float; None if that is impossible."""
    if isinstance(value, bool):
        return None
    with suppress(TypeError, ValueError, OverflowError):
        return number if math.isfinite(number := float(value)) else None  # type: ignore[arg-type]
    return None


def prompt_columns(messages: Sequence[Message]) -> dict[str, Any]:
    """prompt_id, prompt and messages of a conversation up to its last user message; empty without a user message."""
    ends = [number for number, message in enumerate(messages, start=1) if message.role == "user"]
    if not ends:
        return {}
    history = messages[: ends[-1]]
    several = [{"role": message.role, "content": message.content} for message in history]
    return {
        "prompt_id": conversation_id_of(history),
        "prompt": history[-1].content,
        "messages": several if len(several) > 1 else None,
    }
