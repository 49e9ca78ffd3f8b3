"""Statistics of the engine's responses, read while they are forwarded to the client."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from scheduler_core.prediction.api_response import ApiResponse, read_response

#: Larger responses and events are forwarded without parsing.
MAX_READ_BYTES = 8 * 2**20
#: Bytes of responses and events that are held at the same time.
MAX_HELD_BYTES = 256 * 2**20
_EVENT_END = re.compile(rb"\r\n\r\n|\n\r?\n|\r\r")
_LINE_END = re.compile(rb"\n")
#: The beginning of a text in an event. Texts cannot contain it, because quotation marks in them are escaped.
_TEXT = re.compile(rb'[{,]\s*"(?:content|text|reasoning|reasoning_content|arguments)"\s*:\s*"')


@dataclass(slots=True)
class ResponseStats:
    """Statistics of one response: the token counts of the engine, number of events with output and time of the
    first one on `time.perf_counter` (None if not streamed), finish reason, number of outputs, and id (of the Responses API)."""

    output_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    num_deltas: int = 0
    finish_reason: str = ""
    num_outputs: int = 1
    first_s: float | None = None
    response_id: str = ""

    def take(self, response: ApiResponse) -> None:
        """Adds the fields of a response or event; what it does not report stays as it is."""
        if response.output_tokens is not None:
            self.output_tokens = response.output_tokens
        if response.prompt_tokens is not None:
            self.prompt_tokens = response.prompt_tokens
        if response.cached_tokens is not None:
            self.cached_tokens = response.cached_tokens
        if response.response_id:
            self.response_id = response.response_id
        if response.finish_reason:
            self.finish_reason = response.finish_reason
        if response.num_outputs > self.num_outputs:
            self.num_outputs = response.num_outputs


#: The fields of most events.
_ONE_TOKEN = ApiResponse(num_new_tokens=1, num_outputs=1)


class ReadBudget:
    """Bytes that all readers of a proxy hold together; a reader that gets no more forwards its response unread."""

    def __init__(self, limit: int = MAX_HELD_BYTES) -> None:
        self._limit = limit
        self.num_bytes = 0

    def resize(self, before: int, after: int) -> bool:
        """Changes what a reader holds from `before` to `after` bytes; False, without a change, if that is too much."""
        if after > before and (after > MAX_READ_BYTES or self.num_bytes + after - before > self._limit):
            return False
        self.num_bytes += after - before
        return True


class JsonReader:
    """Reads a response of one JSON object, unchanged; calls `on_tokens` with its tokens at the end."""

    shortens = False

    def __init__(self, budget: ReadBudget, on_tokens: Callable[[int], None] | None = None) -> None:
        self.stats = ResponseStats()
        self._budget = budget
        self._on_tokens = on_tokens
        self._parts: list[bytes] = []
        self._size = 0
        self._is_reading = True

    def feed(self, data: bytes) -> bytes:
        """Reads a chunk; returns the bytes to forward now."""
        if self._is_reading:
            self._is_reading = self._budget.resize(self._size, self._size + len(data))
            if self._is_reading:
                self._parts.append(data)
                self._size += len(data)
            else:
                self.close()
        return data

    def end(self) -> bytes:
        """Handles the end of the response; returns bytes that were held back."""
        self.stats.take(read_response(_json(b"".join(self._parts))))
        if self._on_tokens is not None:
            self._on_tokens(self.stats.output_tokens or 0)
        return b""

    def close(self) -> None:
        """Drops what is held, also of a response that does not end."""
        self._budget.resize(self._size, 0)
        self._parts.clear()
        self._size = 0


class EventStreamReader:
    """Reads server-sent events, or JSON lines with `is_lines`; calls `on_tokens` with the tokens of each event.

    With `hides_usage` (only the proxy requested the usage event), the event with `usage` and no choices is
    removed, and events are forwarded when complete. Otherwise all bytes are forwarded immediately.
    """

    def __init__(
        self,
        hides_usage: bool,
        budget: ReadBudget,
        on_tokens: Callable[[int], None] | None = None,
        *,
        is_lines: bool = False,
    ) -> None:
        self.stats = ResponseStats()
        self._budget = budget
        self._on_tokens = on_tokens
        self.shortens = hides_usage
        self._is_lines = is_lines
        self._event_end = _LINE_END if is_lines else _EVENT_END
        self._buffer = b""
        self._is_reading = True
        # All bytes of the last parsed event before and after its text: most events of a stream differ only in their text.
        self._before, self._after = b"", b""

    def feed(self, data: bytes) -> bytes:
        """Reads a chunk; returns the bytes to forward now."""
        if not self._is_reading:
            return data
        # The end of an event can be split across chunks, and "\r\n\r" needs the next byte to be identified.
        searched = max(0, len(self._buffer) - 3)
        buffer = self._buffer + data
        forwarded: list[bytes] = []
        start = 0
        for match in self._event_end.finditer(buffer, searched):
            forwarded.append(self._read_event(buffer[start : match.end()]))
            start = match.end()
        if self._budget.resize(len(self._buffer), len(buffer) - start):
            self._buffer = buffer[start:]
        else:
            self._is_reading = False
            forwarded.append(buffer[start:])
            self.close()
        return b"".join(forwarded) if self.shortens else data

    def end(self) -> bytes:
        """Handles the end of the response; returns bytes that were held back."""
        remaining = self._read_event(self._buffer)
        return remaining if self.shortens else b""

    def close(self) -> None:
        """Drops what is held, also of a response that does not end."""
        self._budget.resize(len(self._buffer), 0)
        self._buffer = b""

    def _read_event(self, event: bytes) -> bytes:
        """Reads a complete event; returns its bytes to forward."""
        if self._differs_in_text(event):
            self._count(1)
            return event
        content = _json(event if self._is_lines else _event_data(event))
        if content is None:
            return event
        stats, response = self.stats, read_response(content)
        stats.take(response)
        if response.num_new_tokens:
            self._count(response.num_new_tokens)
        if response == _ONE_TOKEN and (around := _around_text(event)) is not None:
            self._before, self._after = around
        is_hidden = self.shortens and isinstance(content, dict) and _has_only_usage(content)
        return b"" if is_hidden else event

    def _count(self, num_tokens: int) -> None:
        self.stats.num_deltas += num_tokens
        if self.stats.first_s is None:
            self.stats.first_s = time.perf_counter()
        if self._on_tokens is not None:
            self._on_tokens(num_tokens)

    def _differs_in_text(self, event: bytes) -> bool:
        """Whether an event is the last parsed one with another text, which is quicker to find out than to parse it."""
        before, after = self._before, self._after
        if not before or not event.startswith(before) or not event.endswith(after):
            return False
        text = event[len(before) : len(event) - len(after)]
        return bool(text) and b'"' not in text and b"\\" not in text


def _around_text(event: bytes) -> tuple[bytes, bytes] | None:
    """The bytes before and after the text of an event; None if it has several texts, or one with escapes."""
    starts = [match.end() for match in _TEXT.finditer(event)]
    if len(starts) != 1:
        return None
    text, quote, after = event[starts[0] :].partition(b'"')
    return (event[: starts[0]], quote + after) if text and b"\\" not in text else None


def _has_only_usage(content: dict[str, Any]) -> bool:
    has_usage = isinstance(content.get("usage"), dict) and "error" not in content
    return has_usage and "choices" in content and not content["choices"]


def _event_data(event: bytes) -> bytes:
    lines = [line[5:] for line in event.splitlines() if line.startswith(b"data:")]
    return lines[0] if len(lines) == 1 else b"\n".join(lines)


def _json(text: bytes) -> Any:
    """The value of a JSON object or array; None for other texts."""
    if text.lstrip()[:1] not in (b"{", b"["):
        return None
    try:
        return json.loads(text.decode())
    except (ValueError, RecursionError):  # also [DONE]
        return None


Reader = JsonReader | EventStreamReader


def output_length(stats: ResponseStats) -> tuple[int, Literal["usage", "deltas"]] | None:
    """Length in tokens and the source of the count; None if it is 0 or unknown. The number of events
    ("deltas") is a lower bound if an engine sends several tokens per event."""
    if stats.output_tokens is not None:
        return (stats.output_tokens, "usage") if stats.output_tokens else None
    return (stats.num_deltas, "deltas") if stats.num_deltas else None
