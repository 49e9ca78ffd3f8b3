"""Checked values of one row of a source, by the canonical columns that importers fill."""

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

#: Number of the source's row, as an editor or `file_rows` counts, and its canonical columns.
Row = tuple[int, dict[str, Any]]

STOP, LENGTH, UNKNOWN, ERROR = "stop", "length", "unknown", "error"
MAX_TOKENS = 2**31 - 1
#: Bad rows that are reported with their numbers.
MAX_BAD_ROWS = 100
#: Times further from zero are no seconds: 3,000 years.
MAX_TIME_S = 1e11
#: Finish reasons of servers.
FINISH_REASONS: Mapping[str, str] = {
    **dict.fromkeys(("stop", "eos", "eos_token", "stop_sequence", "end_turn"), STOP),
    **dict.fromkeys(("tool_calls", "tool_use", "function_call"), STOP),
    **dict.fromkeys(("length", "max_tokens"), LENGTH),
    **dict.fromkeys(("error", "abort", "content_filter"), ERROR),
}
_TEXTS = ("request_id", "tenant", "prompt_id", "prompt", "category", "dataset", "model", "run_id")
_INTEGERS = ("tier", "max_tokens", "prompt_tokens", "output_tokens")
_NUMBERS = ("temperature", "top_p", "ttft_s", "total_s")
#: Columns of a mapping, in the order in which they are read. Importers may also fill sample_index and error.
MAPPED = (*_TEXTS, *_INTEGERS, *_NUMBERS, "arrival_s", "messages", "finish_reason")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class SkippedRows:
    """Rows that are left out; with `stop` the first bad one is an error."""

    def __init__(self, *, stop: bool = True) -> None:
        self._stop = stop
        self.counts = Counter[str]()  # by reason
        self.bad: list[dict[str, Any]] = []  # number and reason of the first ones

    def add_bad(self, number: int, error: InputError) -> None:
        """Counts a row that cannot be used; raises its error with `stop`."""
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
    """Rows of a table; one for each element where output_tokens is a list.

    Args:
        path: The file.
        mapping: Canonical column -> column of the table, or a path with dots into objects; empty takes the columns that
            have canonical names.
        skipped: Gets the rows that cannot be used.
        optional: Canonical columns that the table may lack.

    Raises:
        InputError: Names row, column and value that cannot be used.
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
    """The row itself, or one for each element of its list of lengths, with its element of a list of finish reasons."""
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
    """Canonical columns of a row; "" is null. prompt_id is a hash of the prompt where it is not mapped.

    arrival_s is exact: of a number of seconds, or of a date and time (without zone: UTC).

    Raises:
        InputError: A column is missing, or its value is of another kind or out of range.
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
    """Raises ValueError with what is allowed."""
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
        raise ValueError(
            f"seconds from -{MAX_TIME_S:g} to {MAX_TIME_S:g}, or a date and time as ISO 8601 writes it"
        )
    return Fraction(seconds)


def ending(value: object) -> dict[str, Any]:
    """finish_reason of a server's word, or of whether the output finished as a boolean; null is unknown. ValueError for a
    word that no server is known to write."""
    if value is None or isinstance(value, bool):
        return {"finish_reason": {None: UNKNOWN, True: STOP, False: LENGTH}[value]}
    reason = FINISH_REASONS.get(str(value).lower())
    if reason is None:
        raise ValueError("null or one of " + ", ".join(FINISH_REASONS))
    problem = {"output_tokens": 0, "error": f"{value}: as logged"} if reason == ERROR else {}
    return {"finish_reason": reason, **problem}


def _number(value: object) -> float | None:
    """A finite number from a number or text; None where it is none."""
    if isinstance(value, bool):
        return None
    with suppress(TypeError, ValueError, OverflowError):
        return number if math.isfinite(number := float(value)) else None  # type: ignore[arg-type]
    return None


def prompt_columns(messages: Sequence[Message]) -> dict[str, Any]:
    """prompt_id, prompt and messages of a conversation up to its last user message; empty without one."""
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
