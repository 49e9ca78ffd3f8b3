"""The decision log: every call to a scheduler with its outcome, as JSON lines; `replay` repeats the calls."""

import json
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from scheduler_core.engine.plan import StepResult
from scheduler_core.prediction.predictions import HEADS, Prediction
from scheduler_core.request import RequestState
from scheduler_core.shell.files import atomic_file

Entry = dict[str, Any]

SCHEMA = "tailcast.decisions/4"


class DecisionLog:
    """A list of entries: `Scheduler` adds them with `record`; users read `entries` or call `write`."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def record(self, op: str, now: float | None = None, **content: object) -> None:
        """Adds an entry for a call, with its arguments and outcome as JSON values."""
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
        if isinstance(value, RequestState):  # valid in the source scheduler only, or a cache
            del content["status"], content["order"], content["kv_tokens"], content["_risk"]
            del content["declared_level"]  # that of its request
        if isinstance(value, Prediction):
            content = {name: content[name] for name in HEADS}
        if isinstance(value, StepResult):
            for name in ("ends_s", "ended_by"):
                if not content[name]:
                    del content[name]
        return _plain(content)
    if isinstance(value, dict):
        # Empty quantiles are left out, so that logs of log-t predictions keep their format.
        return {name: _plain(item) for name, item in value.items() if name != "quantiles" or item}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
