"""Statistics of the engine's responses, read while they are forwarded to the client."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from scheduler_core.json_text import parse_json

#: Larger responses and events are forwarded without parsing.
MAX_READ_BYTES = 8 * 2**20
_EVENT_END = re.compile(rb"\r\n\r\n|\n\r?\n|\r\r")
_FINISH_REASON = re.compile(rb'"finish_reason"\s*:\s*"([^"]*)"')
_DELTA = re.compile(rb'"(?:content|reasoning_content|text)"\s*:\s*"(?!")')
_USAGE = re.compile(rb'"usage"\s*:\s*\{')


@dataclass(slots=True)
class ResponseStats:
    """Statistics of one response: token counts of its `usage`, number of events with output and time of the
    first one on `time.perf_counter` (None if not streamed), and the finish reason of its last choice."""

    output_tokens: int | None = None
    prompt_tokens: int | None = None
    num_deltas: int = 0
    finish_reason: str = ""
    first_s: float | None = None

    def take_usage(self, usage: object) -> None:
        """Sets the token counts from a `usage` object; ignores other values."""
        if not isinstance(usage, dict):
            return
        output, prompt = usage.get("completion_tokens"), usage.get("prompt_tokens")
        self.output_tokens = output if type(output) is int and output >= 0 else self.output_tokens
        self.prompt_tokens = prompt if type(prompt) is int and prompt >= 0 else self.prompt_tokens


class JsonReader:
    """Reads a response of one JSON object, unchanged; calls `on_tokens` with its tokens at the end."""

    shortens = False

    def __init__(self, on_tokens: Callable[[int], None] = lambda num_tokens: None) -> None:
        self.stats = ResponseStats()
        self._on_tokens = on_tokens
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> bytes:
        """Reads a chunk; returns the bytes to forward now."""
        self._size += len(data)
        if self._size <= MAX_READ_BYTES:
            self._parts.append(data)
        return data

    def end(self) -> bytes:
        """Handles the end of the response; returns bytes that were held back."""
        content = _json(b"".join(self._parts)) if self._size <= MAX_READ_BYTES else {}
        choices = content.get("choices")
        if isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], dict):
            reason = choices[0].get("finish_reason")
            self.stats.finish_reason = reason if isinstance(reason, str) else ""
            self.stats.take_usage(content.get("usage"))
            self._on_tokens(self.stats.output_tokens or 0)
        return b""


class EventStreamReader:
    """Reads server-sent events; calls `on_tokens(1)` for each event with output.

    With `hides_usage` (only the proxy requested the usage event), the event with `usage` and no choices is
    removed, and events are forwarded when complete. Otherwise all bytes are forwarded immediately.
    """

    def __init__(self, hides_usage: bool, on_tokens: Callable[[int], None] = lambda num_tokens: None) -> None:
        self.stats = ResponseStats()
        self._on_tokens = on_tokens
        self.shortens = hides_usage
        self._buffer = b""
        self._is_reading = True

    def feed(self, data: bytes) -> bytes:
        if not self._is_reading:
            return data
        buffer = self._buffer + data
        passed: list[bytes] = []
        start = 0
        # The end of an event can be split across chunks, and "\r\n\r" needs the next byte to be identified.
        for match in _EVENT_END.finditer(buffer):
            passed.append(self._read_event(buffer[start : match.end()]))
            start = match.end()
        self._buffer = buffer[start:]
        if len(self._buffer) > MAX_READ_BYTES:
            self._is_reading = False
            passed.append(self._buffer)
            self._buffer = b""
        return b"".join(passed) if self.shortens else data

    def end(self) -> bytes:
        return self._buffer if self.shortens else b""

    def _read_event(self, event: bytes) -> bytes:
        """Reads a complete event; returns its bytes to forward."""
        stats = self.stats
        if reason := _FINISH_REASON.search(event):
            stats.finish_reason = reason[1].decode("utf-8", "replace")
        if _DELTA.search(event):
            stats.num_deltas += 1
            stats.first_s = stats.first_s or time.perf_counter()
            self._on_tokens(1)
        if _USAGE.search(event):
            content = _event_json(event)
            stats.take_usage(content.get("usage"))
            if self.shortens and content.get("choices") == [] and "error" not in content:
                return b""
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


def output_length(stats: ResponseStats) -> tuple[int, Literal["usage", "deltas"]] | None:
    """Length in tokens and the source of the count; None if it is 0 or unknown. The number of events
    ("deltas") is a lower bound if an engine sends several tokens per event."""
    if stats.output_tokens is not None:
        return (stats.output_tokens, "usage") if stats.output_tokens else None
    return (stats.num_deltas, "deltas") if stats.num_deltas else None
