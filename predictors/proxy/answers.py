"""Answers that pass by: what of their bytes goes on to the client, and what they say about their length."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from typing import Any, Protocol

#: An answer or event beyond this is passed on and not read.
MAX_READ_BYTES = 8 * 2**20
_EVENT_END = re.compile(rb"\r\n\r\n|\n\r?\n|\r\r")
_ENDING = re.compile(rb'"finish_reason"\s*:\s*"([^"]*)"')
_PIECE = re.compile(rb'"(?:content|reasoning_content|text)"\s*:\s*"(?!")')
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_NULL_USAGE = re.compile(rb',\s*"usage"\s*:\s*null|"usage"\s*:\s*null\s*,\s*')


@dataclass(slots=True)
class Seen:
    """What an answer says about itself.

    Attributes:
        output_tokens, prompt_tokens: Of its `usage`; None where there is none.
        num_deltas: Events with a piece of the answer that is not empty.
        finish_reason: Of its last choice; empty where none is given.
        text: Its pieces, if they are kept.
        first_s: When the first of them came, on `time.perf_counter`; None where the answer comes as a whole.
    """

    output_tokens: int | None = None
    prompt_tokens: int | None = None
    num_deltas: int = 0
    finish_reason: str = ""
    text: list[str] | None = None
    first_s: float | None = None

    def take_usage(self, usage: object) -> None:
        """Counts of a `usage` object; anything else is passed over."""
        if not isinstance(usage, dict):
            return
        output, prompt = usage.get("completion_tokens"), usage.get("prompt_tokens")
        self.output_tokens = output if type(output) is int and output >= 0 else self.output_tokens
        self.prompt_tokens = prompt if type(prompt) is int and prompt >= 0 else self.prompt_tokens


class Reader(Protocol):
    """Sees an answer's bytes on their way."""

    seen: Seen

    def feed(self, data: bytes) -> bytes:
        """What of it goes to the client now."""
        ...

    def end(self) -> bytes:
        """The engine sends no more: what was held back."""
        ...


class WholeReader:
    """Reads an answer that is one JSON object; its bytes pass untouched."""

    def __init__(self) -> None:
        self.seen = Seen()
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> bytes:
        """All of it."""
        self._size += len(data)
        if self._size <= MAX_READ_BYTES:
            self._parts.append(data)
        return data

    def end(self) -> bytes:
        """Nothing was held back."""
        content = _json(b"".join(self._parts)) if self._size <= MAX_READ_BYTES else {}
        choices = content.get("choices")
        if isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], dict):
            reason = choices[0].get("finish_reason")
            self.seen.finish_reason = reason if isinstance(reason, str) else ""
            self.seen.take_usage(content.get("usage"))
        return b""


class StreamReader:
    """Reads server-sent events.

    Args:
        hides_usage: The proxy asked for the event with the counts and the client did not: that event (no choices, a usage
            object) is left out, and `"usage":null`, which some servers then write into all other events, is cut out of
            them. Each event is passed on when it is complete; all other bytes stay. False: every byte passes at once.
        keeps_text: Pieces of the answer are kept, for a tokenizer.
    """

    def __init__(self, *, hides_usage: bool, keeps_text: bool = False) -> None:
        self.seen = Seen(text=[] if keeps_text else None)
        self._hides_usage = hides_usage
        self._rest = b""
        self._reads = True

    def feed(self, data: bytes) -> bytes:
        """What goes on: all of it, or the complete events that the client shall see."""
        if not self._reads:
            return data
        buffer = self._rest + data
        passed: list[bytes] = []
        start = 0
        # An end may straddle two pieces, and in "\r\n\r" + "\n" only the next byte tells.
        for match in _EVENT_END.finditer(buffer):
            event = buffer[start : match.end()]
            passed.append(self._event(event))
            start = match.end()
        self._rest = buffer[start:]
        if len(self._rest) > MAX_READ_BYTES:
            self._reads = False
            passed.append(self._rest)
            self._rest = b""
        return b"".join(passed) if self._hides_usage else data

    def end(self) -> bytes:
        """An event without its end."""
        rest, self._rest = self._rest, b""
        return rest if self._hides_usage else b""

    def _event(self, event: bytes) -> bytes:
        """Reads a complete event; returns what of it the client gets."""
        has_usage = _USAGE.search(event) is not None
        if ending := _ENDING.search(event):
            self.seen.finish_reason = ending[1].decode("utf-8", "replace")
        if _PIECE.search(event):
            self.seen.num_deltas += 1
            if self.seen.first_s is None:
                self.seen.first_s = time.perf_counter()
        if has_usage or self.seen.text is not None:
            content = _event_json(event)
            self._keep(content)
            if has_usage:
                self.seen.take_usage(content.get("usage"))
                if self._hides_usage and content.get("choices") == [] and "error" not in content:
                    return b""
        return self._without_null(event) if self._hides_usage and b'"usage"' in event else event

    def _keep(self, content: dict[str, Any]) -> None:
        if self.seen.text is None:
            return
        for choice in content.get("choices") or ():
            if isinstance(choice, dict):
                delta = choice.get("delta")
                sources = (
                    [delta.get("reasoning_content"), delta.get("content")] if isinstance(delta, dict) else []
                )
                self.seen.text += [text for text in [*sources, choice.get("text")] if isinstance(text, str)]

    def _without_null(self, event: bytes) -> bytes:
        """The event without a `"usage":null` of its outermost object; unchanged where it is another object's.

        Inside of strings quotation marks are escaped, so the pattern finds members only.
        """
        content = _event_json(event)
        if "usage" not in content or content["usage"] is not None:
            return event
        wanted = {name: value for name, value in content.items() if name != "usage"}
        for match in _NULL_USAGE.finditer(event):
            shorter = event[: match.start()] + event[match.end() :]
            if _event_json(shorter) == wanted:
                return shorter
        return event


def _event_json(event: bytes) -> dict[str, Any]:
    lines = [line[5:] for line in event.splitlines() if line.startswith(b"data:")]
    return _json(b"\n".join(lines))


def _json(text: bytes) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
