"""Production logs and other tables of output lengths.

`log` reads any table with a mapping from canonical columns to the table's (`output_tokens=usage.completion_tokens`;
dots go into objects), by default the columns that have canonical names. `openai-log` reads responses of the OpenAI API:
one on each line, alone, beside its request (`{"request": ..., "response": ...}`), or as the Batch API writes it
(`{"custom_id", "response": {"body"}}`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

from data_gen.importers.rows import (
    ERROR,
    LENGTH,
    MAX_TIME_S,
    MAX_TOKENS,
    STOP,
    UNKNOWN,
    ImportedRows,
    in_batches,
)
from data_gen.prompts import Message, conversation_id_of, prompt_id_of
from data_gen.sources.layouts import messages_of
from data_gen.sources.rows import file_rows
from data_gen.splits import digest64
from scheduler_core.errors import InputError

#: Finish reasons of servers.
FINISH_REASONS: Mapping[str, str] = {
    "stop": STOP,
    "eos": STOP,
    "eos_token": STOP,
    "stop_sequence": STOP,
    "end_turn": STOP,
    "tool_calls": STOP,
    "tool_use": STOP,
    "function_call": STOP,
    "length": LENGTH,
    "max_tokens": LENGTH,
    "error": ERROR,
    "abort": ERROR,
    "content_filter": ERROR,
}

MAPPED = (
    "request_id",
    "arrival_s",
    "tier",
    "tenant",
    "prompt_id",
    "prompt",
    "messages",
    "category",
    "dataset",
    "model",
    "temperature",
    "top_p",
    "max_tokens",
    "prompt_tokens",
    "output_tokens",
    "finish_reason",
    "ttft_s",
    "total_s",
    "run_id",
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_INTEGERS = ("tier", "max_tokens", "prompt_tokens", "output_tokens")
_NUMBERS = ("temperature", "top_p", "ttft_s", "total_s")


def parse_mapping(text: str) -> dict[str, str]:
    """`output_tokens=usage.completion_tokens,model=name` as a dictionary; empty for an empty text.

    Raises:
        InputError: It is not of that form, or names a column that is not among `MAPPED`.
    """
    mapping: dict[str, str] = {}
    for item in text.split(",") if text else ():
        name, equals, source = (word.strip() for word in item.partition("="))
        if not equals or not source or name not in MAPPED or name in mapping:
            raise InputError(
                "columns", item.strip(), "NAME=COLUMN, each once, with NAME of " + ", ".join(MAPPED)
            )
        mapping[name] = source
    if mapping and "output_tokens" not in mapping:
        raise InputError("columns", text, "also output_tokens=COLUMN")
    return mapping


def log_rows(path: str | Path, columns: str = "") -> Iterator[ImportedRows]:
    """Batches of a table; location output_tokens is a list, one row for each of its elements.

    Args:
        path: The file.
        columns: Mapping, see `parse_mapping`; empty takes the columns that have canonical names.

    Raises:
        InputError: Names row, column and value that cannot be used.
    """
    mapping = parse_mapping(columns)
    yield from in_batches(since_first(lambda: _mapped_rows(path, mapping)))


def openai_rows(path: str | Path) -> Iterator[ImportedRows]:
    """Batches of OpenAI-style responses; one with several choices is an error row, since they share one count.

    Raises:
        InputError: Names row, column and value that cannot be used.
    """
    yield from in_batches(since_first(lambda: _openai_rows(path)))


LogRow = tuple[int, dict[str, Any]]


def since_first(rows: Callable[[], Iterator[LogRow]]) -> Iterator[LogRow]:
    """Rows with arrivals that count from the earliest, which a first pass finds."""
    start = min((row["arrival_s"] for _, row in rows() if row.get("arrival_s") is not None), default=None)
    for number, row in rows():
        if start is not None and row.get("arrival_s") is not None:
            row["arrival_s"] = float(row["arrival_s"] - start)
        yield number, row


def _mapped_rows(path: str | Path, mapping: Mapping[str, str]) -> Iterator[LogRow]:
    name = Path(path).name
    request_ids: set[int] = set()
    for number, raw in file_rows(path, "file"):
        if not mapping:
            mapping = {column: column for column in MAPPED if column in raw} | {
                "output_tokens": "output_tokens"
            }
        for part in _elements(raw, mapping, f"{name} row {number}"):
            row = mapped_row(RowValues(part, f"{name} row {number}"), mapping)
            _check_new(request_ids, row.get("request_id"), f"{name} row {number} column request_id")
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


def mapped_row(values: RowValues, mapping: Mapping[str, str]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for column, source in mapping.items():
        if column in _INTEGERS:
            row[column] = values.integer(source)
        elif column in _NUMBERS:
            row[column] = values.number(source)
        elif column == "arrival_s":
            row[column] = values.time(source)
        elif column == "messages":
            row |= values.chat(source)
        elif column == "finish_reason":
            row |= values.ending(source)
        else:
            row[column] = values.text(source)
    if "prompt_id" not in mapping and row.get("prompt"):
        row.setdefault("prompt_id", prompt_id_of(row["prompt"]))
    return row


def _openai_rows(path: str | Path) -> Iterator[LogRow]:
    name = Path(path).name
    response_ids: set[int] = set()
    for number, raw in file_rows(path, "file"):
        location = f"{name} row {number}"
        response = raw.get("response", raw)
        if isinstance(response, Mapping) and "body" in response:
            response = response["body"]
        request = raw.get("request", raw if "messages" in raw or "prompt" in raw else {})
        if isinstance(request, Mapping) and "body" in request:
            request = request["body"]
        if not isinstance(request or {}, Mapping):
            raise InputError(f"{location} column request", request, "an object")
        if isinstance(response, Mapping):
            _check_new(response_ids, response.get("id"), f"{location} column id")
        yield number, _openai_row(raw, request or {}, response, location)


def _check_new(ids: set[int], identifier: object, location: str) -> None:
    """Raises `InputError` if the same response is there again: it must not count twice."""
    if identifier is not None:
        digest = digest64(str(identifier))
        if digest in ids:
            raise InputError(location, identifier, "an id not used before")
        ids.add(digest)


def _openai_row(
    raw: Mapping[str, Any], request: Mapping[str, Any], response: Any, location: str
) -> dict[str, Any]:
    sent = RowValues(request, location)
    row: dict[str, Any] = {
        "temperature": sent.number("temperature", required=False),
        "top_p": sent.number("top_p", required=False),
        "max_tokens": sent.integer("max_completion_tokens", required=False)
        or sent.integer("max_tokens", required=False),
        "tenant": sent.text("user", required=False),
    }
    if request.get("messages") is not None:
        row |= sent.chat("messages")
    elif request.get("prompt") is not None:
        row["prompt"] = sent.text("prompt")
        row["prompt_id"] = prompt_id_of(row["prompt"])
    identifier = raw.get("custom_id") or (response.get("id") if isinstance(response, Mapping) else None)
    row["request_id"] = None if identifier is None else str(identifier)
    if not isinstance(response, Mapping) or raw.get("error") or response.get("error"):
        reason = raw.get("error") or (response.get("error") if isinstance(response, Mapping) else response)
        text = reason.get("message") if isinstance(reason, Mapping) else reason
        model = request.get("model")
        return row | {
            "model": None if model is None else str(model),
            "output_tokens": 0,
            "finish_reason": ERROR,
            "error": f"refused: {text}",
        }
    received = RowValues(response, location)
    row["model"] = received.text("model", required=False) or sent.text("model", required=False)
    row["arrival_s"] = received.time("created", required=False)
    row["prompt_tokens"] = received.integer("usage.prompt_tokens", required=False)
    row["output_tokens"] = received.integer("usage.completion_tokens")
    choices = response.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
        raise InputError(f"{location} column choices", choices, "a list of at least one choice")
    if len(choices) > 1:
        problem = f"shared_count: {len(choices)} choices share one token count"
        return row | {"output_tokens": 0, "finish_reason": ERROR, "error": problem}
    return row | RowValues(choices[0], f"{location} choices").ending("finish_reason")


class RowValues:
    """Checks and converts values of one row; a name with dots goes into objects."""

    def __init__(self, raw: Mapping[str, Any], location: str) -> None:
        self._raw = raw
        self._location = location

    def _get(self, name: str, required: bool) -> Any:
        value: Any = self._raw
        if name in self._raw:
            value = self._raw[name]
        else:
            for part in name.split("."):
                if not isinstance(value, Mapping) or part not in value:
                    if required:
                        raise InputError(
                            f"{self._location}: columns", sorted(map(str, self._raw)), f"also {name}"
                        )
                    return None
                value = value[part]
        return None if value == "" else value

    def _wrong(self, name: str, value: object, allowed: str) -> InputError:
        return InputError(f"{self._location} column {name}", value, allowed)

    def number(self, name: str, *, required: bool = True) -> float | None:
        """A finite number or None."""
        value = self._get(name, required)
        number = None if value is None else _number(value)
        if value is not None and number is None:
            raise self._wrong(name, value, "a finite number")
        return number

    def integer(self, name: str, *, required: bool = True) -> int | None:
        """An integer from 0, or None."""
        number = self.number(name, required=required)
        if number is None:
            return None
        if number != int(number) or not 0 <= number <= MAX_TOKENS:
            raise self._wrong(name, self._get(name, required), f"an integer from 0 to {MAX_TOKENS}")
        return int(number)

    def time(self, name: str, *, required: bool = True) -> Fraction | None:
        """Seconds, at most `MAX_TIME_S` from zero: a number, or a date and time (without zone: UTC); exact."""
        value = self._get(name, required)
        if isinstance(value, str) and _number(value) is None:
            with suppress(ValueError):
                value = datetime.fromisoformat(value.strip())
        if isinstance(value, datetime):
            since_epoch = (value if value.tzinfo else value.replace(tzinfo=UTC)) - _EPOCH
            return Fraction(since_epoch // timedelta(microseconds=1), 1_000_000)
        if value is None:
            return None
        seconds = _number(value)
        if seconds is None or abs(seconds) > MAX_TIME_S:
            allowed = (
                f"seconds from -{MAX_TIME_S:g} to {MAX_TIME_S:g}, or a date and time as ISO 8601 writes it"
            )
            raise self._wrong(name, value, allowed)
        return Fraction(seconds)

    def text(self, name: str, *, required: bool = True) -> str | None:
        """The value as text or None."""
        value = self._get(name, required)
        if isinstance(value, Mapping | list):
            raise self._wrong(name, value, "a text or a number")
        return None if value is None else str(value)

    def chat(self, name: str) -> dict[str, Any]:
        """Messages up to the last user message, as prompt, messages and prompt_id."""
        messages = messages_of(self._get(name, True), f"{self._location} column {name}")
        columns = prompt_columns(messages)
        if not columns:
            raise self._wrong(name, f"{len(messages)} messages", "at least one user message")
        return columns

    def ending(self, name: str) -> dict[str, Any]:
        """The finish reason, or whether the output finished as a boolean; null is unknown.

        Raises:
            InputError: A word that no server is known to write.
        """
        value = self._get(name, True)
        if value is None:
            return {"finish_reason": UNKNOWN}
        if isinstance(value, bool):
            return {"finish_reason": STOP if value else LENGTH}
        reason = FINISH_REASONS.get(str(value).lower())
        if reason is None:
            raise self._wrong(name, value, "null or one of " + ", ".join(FINISH_REASONS))
        problem = {"output_tokens": 0, "error": f"{value}: as logged"} if reason == ERROR else {}
        return {"finish_reason": reason, **problem}


def _number(value: object) -> float | None:
    """A finite number from a number or text; None location it is none."""
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
