"""Exact replay of a decision log: the same calls to a new scheduler must have the same outcomes."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scheduler_core.engine.decision_log import SCHEMA, DecisionLog, Entry
from scheduler_core.engine.plan import StepResult
from scheduler_core.errors import InputError, TailcastError
from scheduler_core.policies import make_policy
from scheduler_core.prediction.predictions import HEADS, Prediction
from scheduler_core.request import Request, RequestState, Segment
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from scheduler_core.shell.files import existing_file

#: Recorded arguments of each call, in order; the last argument of each call is the time.
_ARGUMENTS = {
    "add": ("request",),
    "update": ("request_id", "prediction"),
    "schedule": (),
    "complete": ("result",),
    "abort": ("request_id",),
    "end_session": ("session",),
    "reserve": ("request_id", "num_blocks"),
    "unreserve": ("request_id",),
    "detach": ("request_id",),
    "attach": ("state",),
}


class ReplayError(TailcastError):
    """The outcome of a replayed call differs from the recorded one."""


def read_log(path: str | Path) -> list[Entry]:
    """Entries of a log file. `InputError` if it is not a decision log, or has another schema version."""
    entries: list[Entry] = []
    lines = existing_file(path, "decision log").read_bytes().splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            entry["op"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise InputError(f"{path} line {number}", line[:80], "a decision log entry") from error
        entries.append(entry)
    if entries and entries[0].get("schema", SCHEMA) != SCHEMA:
        raise InputError("decision log", entries[0]["schema"], f"a log of schema {SCHEMA}")
    return entries


def replay(entries: Iterable[Entry]) -> Scheduler:
    """Repeats the calls on a new scheduler, which is returned, and compares all outcomes exactly.
    `ReplayError` with the first entry that differs."""
    entries = list(entries)
    head = entries[0] if entries else {}
    if head.get("op") != "open" or head.get("schema") != SCHEMA:
        raise InputError("first entry of the decision log", head, f'an "open" entry of schema {SCHEMA}')
    log = DecisionLog()
    config = SchedulerConfig(**head["config"])
    scheduler = Scheduler(config, make_policy(head["policy"], head["parameters"]), log)
    for number, entry in enumerate(entries[1:], start=2):
        op = entry["op"]
        if op not in _ARGUMENTS:
            raise InputError("op", op, ", ".join(_ARGUMENTS))
        arguments = [_argument(name, entry[name]) for name in _ARGUMENTS[op]]
        getattr(scheduler, op)(*arguments, entry["now"])
        if op == "schedule" and entry.get("plan") is not None:
            # As in the recorded run, `steady_steps` is called at the start of the step, before later events.
            later = map(entries.__getitem__, range(number, len(entries)))
            num_steps = next((e["result"]["num_steps"] for e in later if e["op"] == "complete"), 1)
            if num_steps > 1:
                scheduler.steady_steps(num_steps)
        if log.entries[-1] != entry:
            raise ReplayError(f"entry {number}: recorded {entry}, replayed {log.entries[-1]}")
    return scheduler


def _argument(name: str, content: Any) -> Any:
    match name:
        case "request":
            return _request(content)
        case "result":
            ends_s = tuple(content.get("ends_s", ()))
            ended_by = content.get("ended_by", {})
            return StepResult(
                content["step"], tuple(content["stopped"]), content["num_steps"], ends_s, ended_by
            )
        case "prediction" if content is not None:
            return _prediction(content)
        case "state":
            return _state(content)
    return content


def _request(content: Entry) -> Request:
    return Request(**{**content, "content": tuple(Segment(*item) for item in content["content"])})


def _state(content: Entry) -> RequestState:
    """The state of a request that was moved from another replica."""
    state = RequestState(_request(content["request"]), order=0)
    for name in content.keys() - {"request", "request_id", "prediction", *HEADS}:
        setattr(state, name, content[name])
    state.apply_prediction(_prediction({**content, "length": content["prediction"]}))
    return state


def _prediction(content: Entry) -> Prediction:
    heads: dict[str, Any] = {}
    for name, kind in HEADS.items():
        if content[name] is not None:
            values = {key: tuple(v) if isinstance(v, list) else v for key, v in content[name].items()}
            heads[name] = kind(**values)
    return Prediction(**heads)
