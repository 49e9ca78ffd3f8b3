"""The decision log: every call to a scheduler with its outcome, as JSON lines; `replay` makes them again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from scheduler_core.errors import InputError
from scheduler_core.files import atomic_file, existing_file
from scheduler_core.plan import Finished, StepPlan, StepResult
from scheduler_core.predictions import LengthPrediction, Prediction
from scheduler_core.request import Request, RequestState

Entry = dict[str, Any]

SCHEMA = "tailcast.decisions/2"


class DecisionLog:
    """Collects entries; `Scheduler` calls the methods, users read `entries` or `write` them."""

    __slots__ = ("entries",)

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def opened(self, config: Mapping[str, object], policy: str, parameters: Mapping[str, float]) -> None:
        """The scheduler was made."""
        self.entries.append(
            {
                "op": "open",
                "schema": SCHEMA,
                "config": dict(config),
                "policy": policy,
                "parameters": dict(parameters),
            }
        )

    def added(self, request: Request, now: float) -> None:
        """`add` succeeded."""
        self.entries.append({"op": "add", "now": now, "request": asdict(request)})

    def updated(self, request_id: str, prediction: Prediction | LengthPrediction | None, now: float) -> None:
        """`update` was called."""
        if isinstance(prediction, LengthPrediction):
            prediction = Prediction(length=prediction)
        content = None if prediction is None else _plain(prediction)
        self.entries.append({"op": "update", "now": now, "request_id": request_id, "prediction": content})

    def scheduled(self, plan: StepPlan | None, now: float) -> None:
        """`schedule` gave a plan, or None."""
        self.entries.append({"op": "schedule", "now": now, "plan": _plain(plan)})

    def completed(self, result: StepResult, finished: Sequence[Finished], now: float) -> None:
        """`complete` was called."""
        self.entries.append(
            {
                "op": "complete",
                "now": now,
                "result": _plain(result),
                "finished": [_plain(item) for item in finished],
            }
        )

    def aborted(self, request_id: str, now: float) -> None:
        """`abort` was called."""
        self.entries.append({"op": "abort", "now": now, "request_id": request_id})

    def reserved(self, request_id: str, num_blocks: int, granted: bool, now: float) -> None:
        """Blocks were asked for, for a request on its way here."""
        entry = {"op": "reserve", "now": now, "request_id": request_id, "num_blocks": num_blocks}
        self.entries.append({**entry, "granted": granted})

    def unreserved(self, request_id: str, now: float) -> None:
        """What was reserved for the request was given back."""
        self.entries.append({"op": "unreserve", "now": now, "request_id": request_id})

    def detached(self, request_id: str, now: float) -> None:
        """The request left for another replica."""
        self.entries.append({"op": "detach", "now": now, "request_id": request_id})

    def attached(self, state: RequestState, now: float) -> None:
        """The request came from another replica, in this state."""
        content = _plain(state)
        del content["status"], content["order"], content["kv_tokens"]
        self.entries.append({"op": "attach", "now": now, "state": content})

    def write(self, path: str | Path) -> None:
        """Writes one JSON object per line, atomically."""
        with atomic_file(path) as temporary, open(temporary, "w", encoding="utf-8") as stream:
            for entry in self.entries:
                stream.write(json.dumps(entry, allow_nan=False, separators=(",", ":")) + "\n")


def _plain(item: StepPlan | StepResult | Finished | Prediction | RequestState | None) -> Any:
    """As JSON would give it back, so that recorded and read entries compare equal."""
    if item is None:
        return None
    return {name: _lists(value) for name, value in asdict(item).items()}


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _lists(item) for name, item in value.items()}
    return [_lists(item) for item in value] if isinstance(value, tuple) else value


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
