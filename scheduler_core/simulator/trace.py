"""Reading and writing of request traces: arrivals and, for the simulator only, true output lengths."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from scheduler_core.errors import InputError
from scheduler_core.prediction.predictions import LengthPrediction
from scheduler_core.ranges import parse_number
from scheduler_core.request import MAX_TIERS, Request, Segment
from scheduler_core.shell.files import existing_file, sha256_file
from scheduler_core.shell.json_text import from_json
from scheduler_core.shell.table_files import file_rows
from scheduler_core.simulator.content import hash_content, session_content
from scheduler_core.simulator.tables import write_table

#: Latest arrival in seconds. The simulated clock, a float, has a resolution of 2 microseconds at this time. Times since
#: 1970 are below it.
MAX_TIME_S = 1e10
#: Maximum number of tokens of a prompt or an output.
MAX_TOKENS = 2**31 - 1
#: Maximum number of requests of a trace; each takes about half a kilobyte.
MAX_REQUESTS = 100_000_000
SCHEMA = "trace/1"

REQUIRED = ("request_id", "arrival_s", "prompt_tokens", "output_tokens", "max_tokens")
_TEXTS = ("prompt", "prompt_id", "tenant", "model", "category", "session_id", "ended_by")
#: Numbers: name -> (type, smallest, largest).
_NUMBERS: dict[str, tuple[type, float, float]] = {
    "arrival_s": (float, 0, MAX_TIME_S),
    "prompt_tokens": (int, 1, MAX_TOKENS),
    "output_tokens": (int, 1, MAX_TOKENS),
    "max_tokens": (int, 1, MAX_TOKENS),
    "tier": (int, 0, MAX_TIERS - 1),
    "priority": (int, -(2**53), 2**53),
    "ttft_slo_s": (float, 0, MAX_TIME_S),
    "tbt_slo_s": (float, 0, MAX_TIME_S),
    "ttlt_slo_s": (float, 0, MAX_TIME_S),
    "turn": (int, 0, 2**31),
    "think_time_s": (float, 0, MAX_TIME_S),
    "prefix_tokens": (int, 0, MAX_TOKENS),
    "mu": (float, -math.inf, math.inf),
    "sigma": (float, -math.inf, math.inf),
    "nu": (float, -math.inf, math.inf),
}
_PREDICTED = ("mu", "sigma", "nu")
_OPTIONAL_NUMBERS = tuple(name for name in _NUMBERS if name not in (*REQUIRED, *_PREDICTED))
_OF_REQUEST = (
    "request_id", "arrival_s", "prompt_tokens", "max_tokens", "priority", "tier", "tenant", "ttft_slo_s", "tbt_slo_s",
    "ttlt_slo_s",
)  # fmt: skip
#: Column with the ids of a prompt's blocks (Mooncake), a list of integers: where there is none, `content` is made from it.
HASH_IDS = "hash_ids"
#: Columns with lists, which are written as their JSON text, and their items.
_LISTS = {"content": "pairs [key, number of tokens]", "after": "ids of requests", HASH_IDS: "ids of blocks"}
COLUMNS = (*REQUIRED, *_TEXTS, *_OPTIONAL_NUMBERS, *_PREDICTED, "content", "after")
_request_values = attrgetter(*_OF_REQUEST)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One row of a trace; fields that `Request` also has are documented there.

    Attributes:
        arrival_s: Seconds from the start of the trace; for later turns of a conversation the earliest
            possible arrival, see `think_time_s`.
        output_tokens: True length of the output, from 1 to max_tokens; only for the simulator.
        max_tokens: Maximum number of output tokens; a default for requests without a limit.
        model: Name of the served model, for live predictors.
        category: Kind of request, such as reasoning or chat.
        session_id: Conversation of which it is a turn; None: no conversation.
        turn: Number of the turn in its conversation, from 0.
        think_time_s: Seconds between the end of the previous turn and the arrival of this one; None: it
            always arrives at `arrival_s`.
        prefix_tokens: Leading prompt tokens that are those of prompt and output of the previous turn, 0 to prompt_tokens - 1.
        after: Ids of requests whose ends it waits for: it arrives `think_time_s` (None: 0) after the last of them, but not
            before `arrival_s`. Empty: a turn with a think time waits for the turn before.
        ended_by: How the output ends, such as tool_use or end_turn; empty: unknown.
    """

    request_id: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    prompt: str | None = None
    prompt_id: str | None = None
    prediction: LengthPrediction | None = None
    tier: int = 2
    priority: int = 0
    tenant: str = ""
    model: str = ""
    category: str = ""
    ttft_slo_s: float | None = None
    tbt_slo_s: float | None = None
    ttlt_slo_s: float | None = None
    session_id: str | None = None
    turn: int = 0
    think_time_s: float | None = None
    prefix_tokens: int = 0
    content: tuple[Segment, ...] = ()
    after: tuple[str, ...] = ()
    ended_by: str = ""

    def request(self) -> Request:
        """The request for the scheduler, without the true length; `InputError` if a value is invalid."""
        values = zip(_OF_REQUEST, _request_values(self), strict=True)
        return Request(**dict(values), session=self.session_id or "", content=self.content)


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival; `sha256` is the hash of the file, empty without a file.

    `problem`: what of the source is not among them, as a sentence; empty: nothing.
    """

    requests: tuple[TraceRequest, ...]
    source: str = ""
    sha256: str = ""
    problem: str = ""

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def mean_rate_rps(self) -> float | None:
        """Arrivals per second between the first and the last one; None if all arrive at the same time."""
        span = self.requests[-1].arrival_s - self.requests[0].arrival_s
        return (len(self) - 1) / span if span > 0 and math.isfinite(span) else None

    def fingerprint(self) -> str:
        """SHA-256 of ids, tenants, arrivals, lengths, limits and tiers, independent of the file format."""
        digest = hashlib.sha256()
        for name in ("request_id", "tenant"):
            digest.update("\0".join(getattr(row, name) for row in self.requests).encode())
            digest.update(b"\1")
        digest.update(np.array([row.arrival_s for row in self.requests], "<f8").tobytes())
        for name in ("prompt_tokens", "output_tokens", "max_tokens", "tier"):
            digest.update(np.array([getattr(row, name) for row in self.requests], "<i8").tobytes())
        return digest.hexdigest()

    def with_poisson_arrivals(self, rate_rps: float, rng: np.random.Generator) -> Trace:
        """The same requests in the same order, with independent exponential gaps of mean 1 / rate_rps."""
        times = np.cumsum(rng.exponential(1.0 / rate_rps, size=len(self)))
        rows = zip(self.requests, times, strict=True)
        return replace(self, requests=tuple(replace(row, arrival_s=float(time)) for row, time in rows))

    def repeated(self, num: int) -> Trace:
        """The trace `num` times in a row; a repetition starts after the last arrival and one mean gap. Its requests,
        conversations and texts get new ids, the old one with # and a number. `InputError` if there are too many requests, or
        they arrive too late."""
        if not 1 <= num <= MAX_REQUESTS // len(self):
            raise InputError("repeat", num, f"integers from 1 to {MAX_REQUESTS // len(self)} for this trace")
        rows, first_s, rate = self.requests, self.requests[0].arrival_s, self.mean_rate_rps
        period_s = 0.0 if rate is None else len(self) / rate
        if first_s + num * period_s > MAX_TIME_S:
            raise InputError("repeat", num, f"fewer; arrivals until {MAX_TIME_S:g} s")
        names = {row.request_id for row in rows} | {row.session_id or "" for row in rows}
        names.update(segment.key for row in rows for segment in row.content)
        separator = "#"
        while any(separator in name for name in names):
            separator += "#"
        copies = list(rows)
        for number in range(1, num):
            suffix = f"{separator}{number + 1}"
            copies += [
                replace(
                    row,
                    request_id=row.request_id + suffix,
                    arrival_s=row.arrival_s + number * period_s,
                    session_id=None if row.session_id is None else row.session_id + suffix,
                    content=tuple([Segment(key + suffix, length) for key, length in row.content]),
                    after=tuple([name + suffix for name in row.after]),
                )
                for row in rows
            ]
        return replace(self, requests=tuple(copies))


def waits_for(rows: Collection[TraceRequest]) -> dict[str, tuple[str, ...]]:
    """Ids of the requests whose ends a request waits for, by its id: those in `after`, or the previous turn of its session if
    it has a think time. `InputError` if one is not among the rows, or requests wait for each other."""
    waits: dict[str, tuple[str, ...]] = {}
    names: set[str] = set()
    for row in rows:
        names.add(row.request_id)
        if row.after:
            waits[row.request_id] = tuple(dict.fromkeys(row.after))
    for name, others in waits.items():
        for other in others:
            if other not in names:
                raise InputError(f"after of request {name}", other, "ids of requests of the trace")
    has_lists = bool(waits)
    for turns in _sessions(rows).values():
        for turn, following in pairwise(turns):
            if following.think_time_s is not None and not following.after:
                waits[following.request_id] = (turn.request_id,)
    if has_lists:  # turns alone cannot wait for each other
        try:
            TopologicalSorter(waits).prepare()
        except CycleError as error:
            allowed = "requests that do not wait for each other's ends"
            raise InputError("after", ", ".join(error.args[1][:5]), allowed) from error
    return waits


def _sessions(rows: Iterable[TraceRequest]) -> dict[str, list[TraceRequest]]:
    """The turns of each session in their order."""
    sessions: dict[str, list[TraceRequest]] = {}
    for row in rows:
        if row.session_id is not None:
            sessions.setdefault(row.session_id, []).append(row)
    for turns in sessions.values():
        turns.sort(key=lambda row: row.turn)
    return sessions


def load_trace(
    path: str | Path,
    *,
    need_arrivals: bool = True,
    default_max_tokens: int | None = None,
) -> Trace:
    """Reads a trace from JSON lines (.jsonl), CSV (.csv) or Parquet (.parquet). `InputError` with row,
    column, value and allowed values if it is invalid.

    Columns are the fields of `TraceRequest`; request_id, arrival_s, prompt_tokens, output_tokens and
    max_tokens are required. A predicted log-t length is in mu, sigma, nu (all three or none). `content` is a list of pairs of
    a key and a number of tokens, `after` a list of ids; in CSV, their JSON texts. Without `content`, prefixes are shared by
    `hash_ids` (see `hash_content`), or else by sessions with `prefix_tokens` (see `session_content`). Other columns are
    ignored; empty values are treated as missing. Rows are sorted by arrival.

    Args:
        need_arrivals: False if arrival times will be drawn: arrival_s may then be missing or empty and is set to 0.
        default_max_tokens: max_tokens of requests without one, as in public traces; outputs must not be
            longer. None: every request must have max_tokens.
    """
    file = existing_file(path, "trace")
    defaults = {} if need_arrivals else {"arrival_s": 0.0}
    if default_max_tokens is not None:
        defaults["max_tokens"] = default_max_tokens
    requests: dict[str, TraceRequest] = {}
    hashes: dict[str, tuple[int, Sequence[object]]] = {}
    for number, row in file_rows(file, "trace", (*COLUMNS, HASH_IDS)):
        location = f"{file.name} row {number}"
        lists = {name: values for name in _LISTS if (values := _list(location, name, row.get(name)))}
        request = _request(location, row, defaults, lists)
        if request.request_id in requests:
            field = f"{file.name} row {number} column request_id"
            raise InputError(field, request.request_id, "an id not used before")
        requests[request.request_id] = request
        if HASH_IDS in lists and not request.content:
            hashes[request.request_id] = (request.prompt_tokens, lists[HASH_IDS])
    if not requests:
        raise InputError("trace", str(path), "a file with at least one row")
    try:
        for name, content in hash_content(hashes).items() if hashes else ():
            requests[name] = replace(requests[name], content=content)
        waits_for(requests.values())
    except InputError as problem:
        raise InputError(f"{file.name}: {problem.field}", problem.value, problem.allowed) from problem
    ordered = sorted(requests.values(), key=lambda request: request.arrival_s)
    return Trace(_with_session_content(ordered), str(path), sha256_file(file))


def _with_session_content(rows: list[TraceRequest]) -> tuple[TraceRequest, ...]:
    """The rows, with the content of the turns of sessions that have none."""
    added: dict[str, TraceRequest] = {}
    for turns in _sessions(rows).values():
        if any(row.prefix_tokens for row in turns) and not any(row.content for row in turns):
            for row, content in zip(turns, session_content(turns), strict=True):
                added[row.request_id] = replace(row, content=content)
    return tuple([added.get(row.request_id, row) for row in rows])


def _list(location: str, name: str, value: object) -> list[Any]:
    """The list in a column, or in its JSON text; empty without a value."""
    if value is None or value == "":
        return []
    items: Any = from_json(value)
    for item in items if isinstance(items, list) else [items]:
        if name == "content":
            is_pair = isinstance(item, list | tuple) and len(item) == 2
            is_valid = is_pair and isinstance(item[0], str) and type(item[1]) is int
        else:
            is_valid = isinstance(item, str if name == "after" else int | str)
        if not is_valid or not isinstance(items, list):
            raise InputError(f"{location} column {name}", item, f"a list of {_LISTS[name]}, or its JSON text")
    return list(items)


def read_number(
    location: str,
    name: str,
    value: object,
    high: float | None = None,
    allowed: str = "",
    hint: str = "",
    *,
    range_of: str = "",
) -> float:
    """The value of a numeric column of a trace, or of one with the range of column `range_of`, a number or its decimal text.
    `InputError` with the location, the column and the range, which ends at `high` (None: that of the column), unless `allowed`
    describes it; `hint` follows."""
    kind, low, largest = _NUMBERS[range_of or name]
    high = largest if high is None else high
    try:
        number: Any = parse_number(value) if isinstance(value, str) else value
        converted = math.nan if number is None or isinstance(number, bool) else float(number)
    except (TypeError, ValueError, OverflowError):
        converted = math.nan
    if not low <= converted <= high or math.isinf(converted) or (kind is int and converted % 1):
        unit = "integers" if kind is int else "seconds" if name.endswith("_s") else "numbers"
        end = high if kind is int else f"{high:g}"
        allowed = allowed or f"{unit} from {low} to {end}"
        raise InputError(f"{location} column {name}", value, allowed + hint)
    return int(converted) if kind is int else converted


def _request(
    location: str, row: Mapping[str, Any], defaults: Mapping[str, float], lists: Mapping[str, list[Any]]
) -> TraceRequest:
    """Validates one row of a file and converts it to a request."""

    hints = {"max_tokens": "; or default_max_tokens for requests without max_tokens"}
    if row.get("arrival_s") in (None, ""):
        hints["arrival_s"] = "; or a rate or load, with which arrivals are drawn"

    def error(name: str, value: object, allowed: str) -> InputError:
        return InputError(f"{location} column {name}", value, allowed + hints.get(name, ""))

    def number(name: str, high: float | None = None, allowed: str = "") -> float:
        return read_number(location, name, values.get(name), high, allowed, hints.get(name, ""))

    values = {**defaults, **{name: value for name, value in row.items() if value is not None and value != ""}}
    for name in REQUIRED:
        if name not in row and name not in defaults:
            raise error(name, ", ".join(map(str, row)), "a trace with columns " + ", ".join(REQUIRED))
    fields: dict[str, Any] = {name: number(name) for name in ("arrival_s", "prompt_tokens", "max_tokens")}
    limit = f"{'max_tokens' if row.get('max_tokens') else 'default_max_tokens'} = {fields['max_tokens']}"
    fields["output_tokens"] = number("output_tokens", fields["max_tokens"], f"integers from 1 to {limit}")
    fields["request_id"] = str(values.get("request_id"))
    if isinstance(values.get("request_id"), bool | None):
        raise error("request_id", values.get("request_id"), "a string that is not empty")
    for name in _TEXTS:
        if name in values:
            if not isinstance(values[name], str):
                raise error(name, values[name], "a string")
            fields[name] = values[name]
    for name in _OPTIONAL_NUMBERS:
        if name in values:
            fields[name] = number(name, fields["prompt_tokens"] - 1 if name == "prefix_tokens" else None)
    try:
        if any(name in values for name in _PREDICTED):
            allowed = "a finite number (mu, sigma and nu, or none of them)"
            mu, sigma, nu = (number(name, allowed=allowed) for name in _PREDICTED)
            fields["prediction"] = LengthPrediction(mu, sigma, nu)
        fields["content"] = tuple([Segment(*item) for item in lists.get("content", ())])
        fields["after"] = tuple(lists.get("after", ()))
        request = TraceRequest(**fields)
        request.request()
    except InputError as problem:
        if problem.field.startswith(location):
            raise
        raise InputError(f"{location}, {problem.field}", problem.value, problem.allowed) from problem
    return request


def write_trace(trace: Trace, path: str | Path) -> None:
    """Writes a trace for `load_trace` as JSON lines, CSV or Parquet, by the suffix, atomically. Optional
    columns that only have default values are omitted."""
    defaults = {item.name: item.default for item in fields(TraceRequest)}
    columns = {}
    for name in COLUMNS:
        if name in _PREDICTED:
            values = [getattr(row.prediction, name, None) for row in trace.requests]
        elif name in _LISTS:
            values = [json.dumps(items) if (items := getattr(row, name)) else None for row in trace.requests]
        else:
            values = [getattr(row, name) for row in trace.requests]
        default = None if name in _LISTS else defaults.get(name)
        if any(value != default for value in values):
            columns[name] = values
    write_table(columns, path, SCHEMA, "trace")
