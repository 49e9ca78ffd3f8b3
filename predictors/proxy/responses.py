"""Responses of the engine on their way to the client: their bytes, statistics and token counts."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from tokenizers import Tokenizer

from scheduler_core.errors import InputError
from scheduler_core.files import existing_file
from scheduler_core.json_text import parse_json

#: A response or event beyond this is passed on without reading it.
MAX_READ_BYTES = 8 * 2**20
_EVENT_END = re.compile(rb"\r\n\r\n|\n\r?\n|\r\r")
_FINISH_REASON = re.compile(rb'"finish_reason"\s*:\s*"([^"]*)"')
_DELTA = re.compile(rb'"(?:content|reasoning_content|text)"\s*:\s*"(?!")')
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_NULL_USAGE = re.compile(rb',\s*"usage"\s*:\s*null|"usage"\s*:\s*null\s*,\s*')


@dataclass(slots=True)
class ResponseStats:
    """Statistics of one response.

    Attributes:
        output_tokens, prompt_tokens: Of its `usage`; None where there is none.
        num_deltas: Events with a piece of the output that is not empty.
        finish_reason: Of its last choice; empty without one.
        text: Pieces of the output, if they are kept.
        first_s: Time of the first of them, on `time.perf_counter`; None for a response that is not streamed.
    """

    output_tokens: int | None = None
    prompt_tokens: int | None = None
    num_deltas: int = 0
    finish_reason: str = ""
    text: list[str] | None = None
    first_s: float | None = None

    def take_usage(self, usage: object) -> None:
        """Counts of a `usage` object; anything else is ignored."""
        if not isinstance(usage, dict):
            return
        output, prompt = usage.get("completion_tokens"), usage.get("prompt_tokens")
        self.output_tokens = output if type(output) is int and output >= 0 else self.output_tokens
        self.prompt_tokens = prompt if type(prompt) is int and prompt >= 0 else self.prompt_tokens


class JsonReader:
    """Reads a response that is one JSON object; its bytes pass unchanged. `on_tokens` gets its number of tokens at its end."""

    shortens = False

    def __init__(self, on_tokens: Callable[[int], None] = lambda num_tokens: None) -> None:
        self.stats = ResponseStats()
        self._on_tokens = on_tokens
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> bytes:
        """The bytes for the client now."""
        self._size += len(data)
        if self._size <= MAX_READ_BYTES:
            self._parts.append(data)
        return data

    def end(self) -> bytes:
        """The bytes that were held back, at the end of the response."""
        content = _json(b"".join(self._parts)) if self._size <= MAX_READ_BYTES else {}
        choices = content.get("choices")
        if isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], dict):
            reason = choices[0].get("finish_reason")
            self.stats.finish_reason = reason if isinstance(reason, str) else ""
            self.stats.take_usage(content.get("usage"))
            self._on_tokens(self.stats.output_tokens or 0)
        return b""


class EventStreamReader:
    """Reads server-sent events.

    Args:
        hides_usage: The proxy requested the event with the counts and the client did not: that event (no choices, a usage
            object) is left out, and `"usage":null`, which some servers then write into all other events, is removed from
            them. Each event is passed on when it is complete; all other bytes stay. False: every byte passes at once.
        keeps_text: Keep pieces of the output, for a tokenizer.
        on_tokens: Called with 1 for each event with a piece of the output.
    """

    def __init__(
        self,
        *,
        hides_usage: bool,
        keeps_text: bool = False,
        on_tokens: Callable[[int], None] = lambda num_tokens: None,
    ) -> None:
        self.stats = ResponseStats(text=[] if keeps_text else None)
        self._on_tokens = on_tokens
        self.shortens = hides_usage
        self._rest = b""
        self._is_reading = True

    def feed(self, data: bytes) -> bytes:
        """See `JsonReader.feed`."""
        if not self._is_reading:
            return data
        buffer = self._rest + data
        passed: list[bytes] = []
        start = 0
        # An end may straddle two pieces, and after "\r\n\r" only the next byte tells whether it is one.
        for match in _EVENT_END.finditer(buffer):
            passed.append(self._read_event(buffer[start : match.end()]))
            start = match.end()
        self._rest = buffer[start:]
        if len(self._rest) > MAX_READ_BYTES:
            self._is_reading = False
            passed.append(self._rest)
            self._rest = b""
        return b"".join(passed) if self.shortens else data

    def end(self) -> bytes:
        """See `JsonReader.end`."""
        rest, self._rest = self._rest, b""
        return rest if self.shortens else b""

    def _read_event(self, event: bytes) -> bytes:
        """Reads a complete event; returns its bytes for the client."""
        stats, has_usage = self.stats, _USAGE.search(event) is not None
        if reason := _FINISH_REASON.search(event):
            stats.finish_reason = reason[1].decode("utf-8", "replace")
        if _DELTA.search(event):
            stats.num_deltas += 1
            stats.first_s = stats.first_s or time.perf_counter()
            self._on_tokens(1)
        if has_usage or stats.text is not None:
            content = _event_json(event)
            if stats.text is not None:
                stats.text += _texts(content)
            if has_usage:
                stats.take_usage(content.get("usage"))
                if self.shortens and content.get("choices") == [] and "error" not in content:
                    return b""
        return _without_null_usage(event) if self.shortens and b'"usage"' in event else event


def _texts(content: dict[str, Any]) -> list[str]:
    """Pieces of the output in an event."""
    choices = [choice for choice in content.get("choices") or () if isinstance(choice, dict)]
    texts: list[object] = []
    for choice in choices:
        delta = choice.get("delta")
        parts = delta if isinstance(delta, dict) else {}
        texts += [parts.get("reasoning_content"), parts.get("content"), choice.get("text")]
    return [text for text in texts if isinstance(text, str)]


def _without_null_usage(event: bytes) -> bytes:
    """The event without a `"usage":null` of its outermost object; unchanged where it is another object's.

    Inside of strings quotation marks are escaped, so the pattern matches members only.
    """
    content = _event_json(event)
    if "usage" not in content or content["usage"] is not None:
        return event
    expected = {name: content[name] for name in content if name != "usage"}
    for match in _NULL_USAGE.finditer(event):
        shorter = event[: match.start()] + event[match.end() :]
        if _event_json(shorter) == expected:
            return shorter
    return event


def _event_json(event: bytes) -> dict[str, Any]:
    lines = [line[5:] for line in event.splitlines() if line.startswith(b"data:")]
    return _json(b"\n".join(lines))


def _json(text: bytes) -> dict[str, Any]:
    try:
        content = parse_json(text)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


Reader = JsonReader | EventStreamReader


class OutputCounter:
    """Counts output tokens from the best source there is.

    Args:
        path: `tokenizer.json` of the served model; None: none.

    Raises:
        InputError: The file is not a tokenizer.
    """

    def __init__(self, path: str | None = None) -> None:
        self._tokenizer: Tokenizer | None = None
        if path is None:
            return
        file = existing_file(path, "served_tokenizer")
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise InputError("served_tokenizer", path, f"a tokenizer.json ({error})") from error

    @property
    def needs_text(self) -> bool:
        """Whether the output's text has to be kept."""
        return self._tokenizer is not None

    def count(self, stats: ResponseStats) -> tuple[int, Literal["usage", "tokenizer", "deltas"]] | None:
        """Length in tokens, and what counted it; None where nothing was generated, or nothing is known.

        The number of events ("deltas") is a lower bound where an engine puts several tokens in one.
        """
        if stats.output_tokens is not None:
            return (stats.output_tokens, "usage") if stats.output_tokens else None
        if self._tokenizer is not None and stats.text:
            encoding = self._tokenizer.encode("".join(stats.text), add_special_tokens=False)
            has_end = stats.finish_reason in ("stop", "tool_calls")  # the end token has no text
            return max(1, len(encoding.ids) + has_end), "tokenizer"
        return (stats.num_deltas, "deltas") if stats.num_deltas else None
