"""Production logs: one answer to each request.

`log` reads any table with a mapping from canonical columns to the log's (`output_tokens=usage.completion_tokens`;
dots go into objects). `openai-log` reads what the OpenAI API says: a response object on each line, alone, beside its
request (`{"request": ..., "response": ...}`), or as the Batch API writes it (`{"custom_id", "response": {"body"}}`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from data_gen.importers.batch import ERROR, LENGTH, MAX_TIME_S, MAX_TOKENS, STOP, UNKNOWN, Batch, batches_of
from data_gen.prompts import Message, Prompt, conversation_id_of, prompt_id_of
from data_gen.sources.digests import DigestSet
from data_gen.sources.layouts import messages_of
from data_gen.sources.rows import file_rows
from scheduler_core.errors import InputError

#: What servers write for the end of an answer.
ENDINGS: Mapping[str, str] = {
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
)
_WHOLE = ("tier", "max_tokens", "prompt_tokens", "output_tokens")
_NUMBERS = ("temperature", "top_p", "ttft_s", "total_s")


def parse_mapping(text: str) -> dict[str, str]:
    """`output_tokens=usage.completion_tokens,model=name` as a dictionary.

    Raises:
        InputError: It is not of that form, or names a column that is not among `MAPPED`.
    """
    mapping: dict[str, str] = {}
    for item in text.split(","):
        name, equals, source = (word.strip() for word in item.partition("="))
        if not equals or not source or name not in MAPPED or name in mapping:
            raise InputError(
                "columns", item.strip(), "NAME=COLUMN, each once, with NAME of " + ", ".join(MAPPED)
            )
        mapping[name] = source
    if "output_tokens" not in mapping:
        raise InputError("columns", text, "also output_tokens=COLUMN")
    return mapping


def log_batches(path: str | Path, mapping: Mapping[str, str]) -> Iterator[Batch]:
    """Batches of a log; requests without a prompt id or prompt have none.

    Raises:
        InputError: Names row, column and value that cannot be used.
    """
    yield from batches_of(_since_first(path, lambda: _mapped_rows(path, mapping)))


def openai_batches(path: str | Path) -> Iterator[Batch]:
    """Batches of OpenAI-style responses; one with several choices is an error row, since they share one count.

    Raises:
        InputError: Names row, column and value that cannot be used.
    """
    yield from batches_of(_since_first(path, lambda: _openai_rows(path)))


LogRow = tuple[int, dict[str, Any]]


def _since_first(path: str | Path, rows: Callable[[], Iterator[LogRow]]) -> Iterator[LogRow]:
    """Rows with arrivals that count from the earliest, which a first pass finds."""
    start = min((row["arrival_s"] for _, row in rows() if row.get("arrival_s") is not None), default=None)
    for number, row in rows():
        if start is not None and row.get("arrival_s") is not None:
            row["arrival_s"] -= start
        yield number, row


def _mapped_rows(path: str | Path, mapping: Mapping[str, str]) -> Iterator[LogRow]:
    name = Path(path).name
    known = DigestSet()
    for number, raw in file_rows(path, "file"):
        row = RowValues(raw, f"{name} row {number}")
        found: dict[str, Any] = {}
        for column, source in mapping.items():
            if column in _WHOLE:
                found[column] = row.whole(source)
            elif column in _NUMBERS:
                found[column] = row.number(source)
            elif column == "arrival_s":
                found[column] = row.time(source)
            elif column == "messages":
                found |= row.chat(source)
            elif column == "finish_reason":
                found |= row.ending(source)
            else:
                found[column] = row.text(source)
        if "prompt_id" not in mapping and found.get("prompt"):
            found.setdefault("prompt_id", prompt_id_of(found["prompt"]))
        _check_new(known, found.get("request_id"), f"{name} row {number} column request_id")
        yield number, found


def _openai_rows(path: str | Path) -> Iterator[LogRow]:
    name = Path(path).name
    known = DigestSet()
    for number, raw in file_rows(path, "file"):
        where = f"{name} row {number}"
        response = raw.get("response", raw)
        if isinstance(response, Mapping) and "body" in response:
            response = response["body"]
        request = raw.get("request", raw if "messages" in raw or "prompt" in raw else {})
        if isinstance(request, Mapping) and "body" in request:
            request = request["body"]
        if not isinstance(request or {}, Mapping):
            raise InputError(f"{where} column request", request, "an object")
        if isinstance(response, Mapping):
            _check_new(known, response.get("id"), f"{where} column id")
        yield number, _openai_row(raw, request or {}, response, where)


def _check_new(known: DigestSet, identifier: object, where: str) -> None:
    """Raises `InputError` if the same answer is there again: it must not count twice."""
    if identifier is not None and not known.add(str(identifier)):
        raise InputError(where, identifier, "an id not used before")


def _openai_row(
    raw: Mapping[str, Any], request: Mapping[str, Any], response: Any, where: str
) -> dict[str, Any]:
    asked = RowValues(request, where)
    found: dict[str, Any] = {
        "temperature": asked.number("temperature", needed=False),
        "top_p": asked.number("top_p", needed=False),
        "max_tokens": asked.whole("max_completion_tokens", needed=False)
        or asked.whole("max_tokens", needed=False),
        "tenant": asked.text("user", needed=False),
    }
    if request.get("messages") is not None:
        found |= asked.chat("messages")
    elif request.get("prompt") is not None:
        found["prompt"] = asked.text("prompt")
        found["prompt_id"] = prompt_id_of(found["prompt"])
    identifier = raw.get("custom_id") or (response.get("id") if isinstance(response, Mapping) else None)
    found["request_id"] = None if identifier is None else str(identifier)
    if not isinstance(response, Mapping) or raw.get("error") or response.get("error"):
        reason = raw.get("error") or (response.get("error") if isinstance(response, Mapping) else response)
        text = reason.get("message") if isinstance(reason, Mapping) else reason
        model = request.get("model")
        return found | {
            "model": None if model is None else str(model),
            "output_tokens": 0,
            "finish_reason": ERROR,
            "error": f"refused: {text}",
        }
    answer = RowValues(response, where)
    found["model"] = answer.text("model", needed=False) or asked.text("model", needed=False)
    found["arrival_s"] = answer.time("created", needed=False)
    found["prompt_tokens"] = answer.whole("usage.prompt_tokens", needed=False)
    found["output_tokens"] = answer.whole("usage.completion_tokens")
    choices = response.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
        raise InputError(f"{where} column choices", choices, "a list of at least one choice")
    if len(choices) > 1:
        problem = f"shared_count: {len(choices)} choices share one token count"
        return found | {"output_tokens": 0, "finish_reason": ERROR, "error": problem}
    return found | RowValues(choices[0], f"{where} choices").ending("finish_reason")


class RowValues:
    """Checks and converts values of one row; a name with dots goes into objects."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self._raw = raw
        self._where = where

    def _get(self, name: str, needed: bool) -> Any:
        value: Any = self._raw
        if name in self._raw:
            value = self._raw[name]
        else:
            for part in name.split("."):
                if not isinstance(value, Mapping) or part not in value:
                    if needed:
                        raise InputError(
                            f"{self._where}: columns", sorted(map(str, self._raw)), f"also {name}"
                        )
                    return None
                value = value[part]
        return None if value == "" else value

    def _wrong(self, name: str, value: object, allowed: str) -> InputError:
        return InputError(f"{self._where} column {name}", value, allowed)

    def number(self, name: str, *, needed: bool = True) -> float | None:
        """A finite number or None."""
        value = self._get(name, needed)
        number = None if value is None else _number(value)
        if value is not None and number is None:
            raise self._wrong(name, value, "a finite number")
        return number

    def whole(self, name: str, *, needed: bool = True) -> int | None:
        """A whole number from 0 or None."""
        number = self.number(name, needed=needed)
        if number is None:
            return None
        if number != int(number) or not 0 <= number <= MAX_TOKENS:
            raise self._wrong(name, self._get(name, needed), f"a whole number from 0 to {MAX_TOKENS}")
        return int(number)

    def time(self, name: str, *, needed: bool = True) -> float | None:
        """Seconds, at most `MAX_TIME_S` from zero: a number, or a date and time (without zone: UTC)."""
        value = self._get(name, needed)
        if isinstance(value, str) and _number(value) is None:
            with suppress(ValueError):
                value = datetime.fromisoformat(value.strip())
        if isinstance(value, datetime):
            return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
        if value is None:
            return None
        seconds = _number(value)
        if seconds is None or abs(seconds) > MAX_TIME_S:
            allowed = (
                f"seconds from -{MAX_TIME_S:g} to {MAX_TIME_S:g}, or a date and time as ISO 8601 writes it"
            )
            raise self._wrong(name, value, allowed)
        return seconds

    def text(self, name: str, *, needed: bool = True) -> str | None:
        """The value as text or None."""
        value = self._get(name, needed)
        if isinstance(value, Mapping | list):
            raise self._wrong(name, value, "a text or a number")
        return None if value is None else str(value)

    def chat(self, name: str) -> dict[str, Any]:
        """Messages up to the last user message, as prompt, messages and prompt_id."""
        messages = messages_of(self._get(name, True), f"{self._where} column {name}")
        ends = [number for number, message in enumerate(messages) if message.role == "user"]
        if not ends:
            raise self._wrong(name, f"{len(messages)} messages", "at least one user message")
        history = messages[: ends[-1] + 1]
        prompt = Prompt(conversation_id_of(history), history[-1].content, messages=_several(history))
        listed = [{"role": message.role, "content": message.content} for message in prompt.messages]
        return {"prompt_id": prompt.prompt_id, "prompt": prompt.text, "messages": listed or None}

    def ending(self, name: str) -> dict[str, Any]:
        """How the answer ended; null is unknown.

        Raises:
            InputError: A word that no server is known to write.
        """
        value = self._get(name, True)
        if value is None:
            return {"finish_reason": UNKNOWN}
        reason = ENDINGS.get(str(value).lower())
        if reason is None:
            raise self._wrong(name, value, "null or one of " + ", ".join(ENDINGS))
        problem = {"output_tokens": 0, "error": f"{value}: the log says so"} if reason == ERROR else {}
        return {"finish_reason": reason, **problem}


def _number(value: object) -> float | None:
    """A finite number from a number or text; None where it is none."""
    if isinstance(value, bool):
        return None
    with suppress(TypeError, ValueError, OverflowError):
        return number if math.isfinite(number := float(value)) else None  # type: ignore[arg-type]
    return None


def _several(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    return messages if len(messages) > 1 else ()
