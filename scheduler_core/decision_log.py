"""The decision log: every call to a scheduler with its outcome, as JSON lines; `replay` repeats them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, TextIO

from scheduler_core.errors import InputError
from scheduler_core.files import atomic_file, existing_file
from scheduler_core.request import RequestState

Entry = dict[str, Any]

SCHEMA = "tailcast.decisions/2"


class DecisionLog:
    """Collects entries: `Scheduler` calls `record`, users read `entries` or `write` them."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def record(self, op: str, now: float | None = None, **content: object) -> None:
        """Adds an entry for a call, with its arguments and outcome as JSON would return them."""
        entry: Entry = {"op": op} if now is None else {"op": op, "now": now}
        for name, value in content.items():
            entry[name] = _plain(value)
        self.entries.append(entry)

    def write(self, path: str | Path) -> None:
        """Writes one JSON object per line, atomically."""
        with atomic_file(path) as temporary, open(temporary, "w", encoding="utf-8") as stream:
            for entry in self.entries:
                stream.write(json.dumps(entry, allow_nan=False, separators=(",", ":")) + "\n")


def _plain(value: Any) -> Any:
    """Dataclasses as mappings and tuples as lists, so that recorded and read entries compare equal."""
    if is_dataclass(value) and not isinstance(value, type):
        content = asdict(value)
        if isinstance(value, RequestState):  # what belongs to the scheduler it comes from
            del content["status"], content["order"], content["kv_tokens"]
        return _plain(content)
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def read_log(path: str | Path) -> list[Entry]:
    """Entries of a written log.

    Raises:
        InputError: Not a file, a line is not a JSON object, or another version wrote it.
    """
    entries: list[Entry] = []
    with open(existing_file(path, "decision log"), encoding="utf-8") as stream:
        for number, line in enumerate(_lines(stream, path), start=1):
            try:
                entry = json.loads(line)
                entry["op"]
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise InputError(f"{path} line {number}", line.strip(), "a decision log entry") from error
            entries.append(entry)
    if entries and entries[0].get("schema", SCHEMA) != SCHEMA:
        raise InputError("decision log", entries[0]["schema"], f"a log of schema {SCHEMA}")
    return entries


def _lines(stream: TextIO, path: str | Path) -> Iterator[str]:
    try:
        yield from stream
    except UnicodeDecodeError as error:
        raise InputError("decision log", str(path), f"UTF-8 text ({error.reason})") from error
